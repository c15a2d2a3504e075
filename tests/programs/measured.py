"""What a program costs, compiled for eight simulated devices: by zerojax in either view, and by plain jit."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from programs import PUBLISHED, TABLE
from registry import DEVICES

from zerojax import Tuning, collectives, zero_shard
from zerojax.comm.collectives import LABEL
from zerojax.inspect.compiled_collectives import Collective, cause_of
from zerojax.inspect.hlo import memory_analysis, read
from zerojax.inspect.roofline import kernels, product_flops

EXCHANGES = ("all-to-all", "ragged-all-to-all", "collective-permute")
SMALL = 1000  # elements; vectors have fewer and matrices more
PERSIST_BELOW = SMALL
MOST_FLOPS, MOST_MEMORY = 1.05, 1.2  # times plain jit's
MOST_PASSES = 2.05  # of gathers of all parameters: one forward, one backward, and padding
MOST_MOVED = 1.01  # times device view's: which leaves share a bucket, and so their padding, is not the same
# Bytes of scalars: the compiler averages the loss and sums a norm or a count. The smallest activation is larger, one
# number a row of which a device has 52 or 832 and there are 416 or 6656.
SLACK = 1024


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one device computes, holds and sends.

    Attributes:
        flops: FLOPs of its matrix products.
        temporary: Bytes of temporary memory.
        results: Bytes of its results.
        labelled: Bytes that it sends in collectives of parameters and gradients that zerojax labels.
        gathered: Bytes of these that are of all-gathers.
        gradients: Bytes that it sends in other collectives of arrays as large as a parameter or a layer of a stack,
            where the compiler sums a gradient.
        activations: Bytes that it sends in all other collectives.
        causes: Bytes of the last two, by kind, arrays and cause.
    """

    flops: int
    temporary: int
    results: int
    labelled: int
    gathered: int
    gradients: int
    activations: int
    causes: Counter

    @property
    def beyond(self) -> int:
        """Bytes sent in collectives that are not zerojax's own."""
        return self.gradients + self.activations

    @property
    def moved(self) -> int:
        """Bytes sent in all."""
        return self.labelled + self.beyond

    @property
    def memory(self) -> int:
        """Bytes of memory beyond the arguments."""
        return self.temporary + self.results


class Limit(NamedTuple):
    """A cost of a program must be at most `most` times `base`, and `slack` more."""

    name: str
    found: float
    most: float
    base: float
    slack: float = 0


@functools.cache
def mesh():
    """All simulated devices on one axis."""
    return jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])


def placed(tree: Any, *spec: str) -> Any:
    """Shapes with a sharding."""
    sharding = NamedSharding(mesh(), PartitionSpec(*spec))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


@functools.cache
def by_zerojax(name: str, stage: int, view: str) -> Cost:
    """A program's cost at a stage and in a view of the loss."""
    program = TABLE[name]
    params, batch, args = program.shapes()
    tx = zero_shard(optax.sgd(0.1), stage=stage, mesh=mesh(), view=view, tuning=Tuning(persist_below=PERSIST_BELOW))
    batch, args = placed(batch, "data"), placed(args)
    if program.accumulate > 1:
        lowered = tx.train_step(program.loss, accumulate=program.accumulate).lower(tx.create(params), batch, *args)
    else:
        lowered = jax.jit(tx.value_and_grad(program.loss)).lower(tx.shard(params), batch, *args)
    return cost_of(lowered.compile(), params)


@functools.cache
def by_jit(name: str) -> Cost:
    """A program's cost under plain jit: replicated parameters and gradients, and the rows divided."""
    program = TABLE[name]
    params, batch, args = program.shapes()
    replicated = NamedSharding(mesh(), PartitionSpec())
    gradient, donated = jax.value_and_grad(program.loss), ()
    if program.accumulate > 1:
        gradient, donated = plain_step(accumulated(gradient, program.accumulate)), (0,)
    jitted = jax.jit(gradient, out_shardings=replicated, donate_argnums=donated)
    compiled = jitted.lower(placed(params), placed(batch, "data"), *placed(args)).compile()
    return cost_of(compiled, params)


def leaves_of(name: str) -> list[Any]:
    return jax.tree.leaves(TABLE[name].shapes()[0])


def sent_once(name: str) -> float:
    """Bytes that a device sends to gather all parameters once, or to reduce-scatter all gradients."""
    return sum(x.size * x.dtype.itemsize for x in leaves_of(name)) * (DEVICES - 1) / DEVICES


def exchanged(name: str) -> float:
    """Bytes that plain jit sends beyond the gradients, if the program says why it does."""
    plain = by_jit(name)
    if TABLE[name].lost:
        return plain.beyond
    return plain.activations + max(0, plain.gradients - 2 * sent_once(name)) if TABLE[name].shared else 0


def limits(name: str, stage: int) -> list[Limit]:
    """The limits on a program in global view at a stage.

    FLOPs and temporary memory are at most 1.05 and 1.2 times plain jit's. Bytes beyond parameters and gradients, and
    bytes in all, are at most those of device view, and what plain jit exchanges itself. A published program is compared
    with plain jit alone: at stage 3 it gathers parameters at most twice, once forward and once backward, and may need
    as much more memory as the parameters and their gradients do; beyond zerojax's own collectives, only gradients of
    leaves that stay replicated are reduced.
    """
    plain, found, slack = by_jit(name), by_zerojax(name, stage, "global"), exchanged(name) + SLACK
    flops = Limit("FLOPs", found.flops, MOST_FLOPS, plain.flops)
    memory = Limit("memory", found.temporary, MOST_MEMORY, plain.temporary)
    if name in PUBLISHED:
        small = sum(x.size * x.dtype.itemsize for x in leaves_of(name) if x.size < PERSIST_BELOW)
        full, passes = 2 * sent_once(name) * DEVICES / (DEVICES - 1), found.gathered
        return [
            flops,
            memory._replace(slack=full) if stage == 3 else memory,
            Limit("passes", passes if stage == 3 else 0, MOST_PASSES, sent_once(name)),
            Limit("beyond", found.beyond, 2, small, slack),
        ]
    device = by_zerojax(name, stage, "device")
    beyond = Limit("beyond", found.beyond, 1, device.beyond, slack)
    moved = Limit("moved", found.moved, MOST_MOVED, device.moved, slack)
    # At stage 3 the memory is for the gathered parameters, too, and has tests of its own.
    return [flops, *([memory] if stage < 3 else []), beyond, moved]


def over(program: Any, stage: int, limits: list[Limit], causes: Counter) -> list[str]:
    """The limits that a program exceeds, with its largest collectives."""
    lines = []
    for one in limits:
        exception = program.exceptions.get(one.name)
        most = exception.most if exception and stage in exception.stages else one.most
        if one.found > (allowed := most * one.base + one.slack):
            lines.append(f"{one.name} at stage {stage}: {one.found:,.0f} found, {allowed:,.0f} allowed")
    largest = [(cause, sent) for cause, sent in causes.most_common(3) if sent > SLACK] if lines else []
    return [*lines, *(f"{sent:,d} bytes sent: {cause}" for cause, sent in largest)]


def exceeded(name: str, stage: int) -> list[str]:
    """The limits that a program exceeds at a stage."""
    return over(TABLE[name], stage, limits(name, stage), by_zerojax(name, stage, "global").causes)


def unneeded(name: str, stage: int) -> list[str]:
    """Limits with an exception at a stage that keep the usual limit."""
    excepted = {limit for limit, one in TABLE[name].exceptions.items() if stage in one.stages}
    kept = (one.name for one in limits(name, stage) if one.found <= one.most * one.base + one.slack)
    return [name for name in kept if name in excepted]


def accumulated(gradient: Callable, count: int, workers: int = DEVICES) -> Callable:
    """The mean of `gradient` over microbatches by jax alone, each with rows of every worker."""

    def mean(params, batch, *args):
        def divided(x):
            rows = x.reshape(workers, count, -1, *x.shape[1:])
            return jnp.moveaxis(rows, 1, 0).reshape(count, -1, *x.shape[1:])

        def micro(carry, rows):
            return jax.tree.map(jnp.add, carry, gradient(params, rows, *args)), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(micro, zeros, jax.tree.map(divided, batch))
        return jax.tree.map(lambda x: x / count, total)

    return mean


def plain_step(gradient: Callable) -> Callable:
    """A step of SGD by jax alone."""

    def step(params, *args):
        loss, grads = gradient(params, *args)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return step


def cost_of(compiled: Any, params: Any) -> Cost:
    """What a compiled program costs, given shapes of the parameters."""
    sizes = {n for x in jax.tree.leaves(params) for n in (x.size, x.size // max(1, *x.shape[:1]))}
    sizes -= set(range(SMALL))
    labelled, gathered, gradients, activations, causes = 0, 0, 0, 0, Counter()
    for c in collectives(compiled):
        sent = c.sent * c.times_if_once
        if c.kind not in EXCHANGES and LABEL.search(c.op_name):
            labelled += sent
            gathered += sent if c.kind == "all-gather" else 0
            continue
        of_params = sum(a.bytes for a in c.arrays if a.elements in sizes and c.kind not in EXCHANGES)
        part = sent * of_params // max(1, c.bytes)
        gradients, activations = gradients + part, activations + sent - part
        causes[described(c)] += sent
    flops = sum(product_flops(kernels(read(compiled))).values())
    memory = memory_analysis(compiled)
    held = memory.temp_size_in_bytes, memory.output_size_in_bytes
    return Cost(flops, *held, labelled, gathered, gradients, activations, causes)


def described(c: Collective) -> str:
    """Kind, arrays, operation and cause of a collective."""
    arrays = ", ".join(f"{a.dtype}{list(a.shape)}" for a in c.arrays[:3]) + " ..." * (len(c.arrays) > 3)
    return f"{c.kind} {arrays} x{c.times_if_once} | {c.op_name[-90:]} | {cause_of(c).rsplit('/', 1)[-1]}"
