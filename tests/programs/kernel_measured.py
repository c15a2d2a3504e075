"""What a loss with kernels gives and costs in a form, a view and at a stage, beside plain jit."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import kernel_constructs  # noqa: F401
import kernel_experts  # noqa: F401
import kernel_libraries  # noqa: F401
import kernel_pallas  # noqa: F401
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from kernel_registry import FORMS, KERNELS, Where, mesh_of
from measured import Cost, cost_of

from zerojax import Precision, Wire, zero_shard
from zerojax.inspect.memory import memory_analysis

PERSIST_BELOW = 1000
OPTIONS = ("", "accumulate", "bf16", "wire")
MICROBATCHES = 2
WIRES = {2: Wire(reduce="int8", block=32), 3: Wire(gather="int8", reduce="int8", block=32)}


class Case(NamedTuple):
    """A loss, in a form, with an option of the step."""

    name: str
    form: str = "unrolled"
    option: str = ""


@dataclasses.dataclass(frozen=True)
class Result:
    """What a program costs, and what it computes, if somebody asks."""

    compiled: Any
    given: tuple
    cost: Cost
    memory: int  # bytes of temporary memory and of results

    @classmethod
    def of(cls, compiled: Any, params: Any, given: tuple) -> "Result":
        """Read what a compiled program costs."""
        analysis = memory_analysis(compiled)
        memory = analysis.temp_size_in_bytes + analysis.output_size_in_bytes
        return cls(compiled, given, cost_of(compiled, params), memory)

    @functools.cached_property
    def values(self) -> tuple[float, Any]:
        """Loss and gradients in full."""
        return run(self.compiled, *self.given)


def narrow(tree: Any) -> Any:
    """Floats in bfloat16."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def run(compiled: Any, *args: Any) -> tuple[float, Any]:
    """Loss and gradients in full."""
    loss, grads = compiled(*args)
    return float(loss), jax.tree.map(lambda g: np.asarray(g, np.float32), grads)


def gradient(case: Case, where: Where) -> Any:
    """The gradient by jax alone: of one microbatch after another, and in bfloat16, where the option says so."""
    loss = KERNELS[case.name].loss(case.form, where)
    in_type = narrow if case.option == "bf16" else lambda tree: tree
    grad = jax.value_and_grad(lambda p, batch: loss(in_type(p), batch))
    if case.option != "accumulate":
        return grad

    def accumulated(params, batch):
        workers = 1 if where.view == "one" else where.mesh.shape["data"]

        def divided(x):
            rows = x.reshape(workers, MICROBATCHES, -1, *x.shape[1:])
            return jnp.moveaxis(rows, 1, 0).reshape(MICROBATCHES, -1, *x.shape[1:])

        def micro(carry, rows):
            return jax.tree.map(jnp.add, carry, grad(params, rows)), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(micro, zeros, jax.tree.map(divided, batch))
        return jax.tree.map(lambda x: x / MICROBATCHES, total)

    return accumulated


@functools.cache
def inputs(name: str, form: str) -> tuple[Any, Any]:
    """Parameters and batch."""
    kernel = KERNELS[name]
    return kernel.params(form), kernel.batch()


@functools.cache
def on_one_device(case: Case) -> tuple[float, Any]:
    """Loss and gradients of plain jit on one device."""
    params, batch = inputs(case.name, case.form)
    return run(jax.jit(gradient(case, Where("one"))), params, batch)


def placed(kernel: Any, batch: Any) -> Any:
    """The batch, divided as the loss's mesh divides it."""
    spec = PartitionSpec("data", "sequence") if kernel.sequence else PartitionSpec("data")
    return jax.device_put(batch, NamedSharding(mesh_of(kernel), spec))


@functools.cache
def by_jit(case: Case) -> Result:
    """Plain jit on all devices: replicated parameters and gradients, and the rows divided."""
    kernel, (params, batch) = KERNELS[case.name], inputs(case.name, case.form)
    replicated = NamedSharding(mesh_of(kernel), PartitionSpec())
    given = jax.device_put(params, replicated), placed(kernel, batch)
    grad = gradient(case, Where("global", mesh_of(kernel)))
    compiled = jax.jit(grad, out_shardings=replicated).lower(*given).compile()
    return Result.of(compiled, params, given)


@functools.cache
def by_zerojax(case: Case, stage: int, view: str) -> Result:
    """A case at a stage and in a view of the loss."""
    kernel, (params, batch) = KERNELS[case.name], inputs(case.name, case.form)
    options = {"persist_below": PERSIST_BELOW, "view": view}
    if kernel.sequence:
        options["batch_spec"] = PartitionSpec("data", "sequence")
    if case.option == "bf16":
        options["precision"] = Precision.bf16()
    if case.option == "wire":
        options["wire"] = WIRES[stage]
    tx = zero_shard(optax.sgd(0.1), stage=stage, mesh=mesh_of(kernel), **options)
    microbatches = MICROBATCHES if case.option == "accumulate" else 1
    grad = tx.value_and_grad(kernel.loss(case.form, Where(view, mesh_of(kernel))), accumulate=microbatches)
    given = tx.shard(params), placed(kernel, batch)
    compiled = jax.jit(grad).lower(*given).compile()
    return Result.of(compiled, params, given)


def error(found: tuple[float, Any], expected: tuple[float, Any]) -> float:
    """The largest error of the loss and of a gradient, relative to the largest entry of the gradient's leaf."""
    of = lambda a, b: float(np.max(np.abs(a - b)) / np.max(np.abs(b)))
    errors = jax.tree.leaves(jax.tree.map(of, found[1], expected[1]))
    return max(abs(found[0] - expected[0]) / abs(expected[0]), *errors)


def of_result(result: Result, case: Case) -> float:
    """The error of a result, relative to plain jit on one device."""
    return error(result.values, on_one_device(case))


class Ratios(NamedTuple):
    """A program's bytes sent, FLOPs and memory over what is needed."""

    bytes: float
    flops: float
    memory: float


def needed(case: Case, stage: int, view: str) -> tuple[float, float, float]:
    """Bytes sent, FLOPs and memory of plain jit or of device view, whichever is less.

    Plain jit all-reduces gradients, so device view alone says what stages 2 and 3 send. At stage 3, plain jit holds all
    parameters as arguments, so device view says what is held, too. Without device view, the gradients' bytes are those
    of plain jit, half as many at stage 2, and half more at stage 3: an all-reduce sends twice what a gather or a
    reduce-scatter does. `Kernel.bare` allows what plain jit needs, and `shared` its activations.
    """
    kernel, plain = KERNELS[case.name], by_jit(case)
    if view == "device" or "device" not in kernel.views:
        sent = plain.cost.activations + {1: 1, 2: 0.5, 3: 1.5}[stage] * plain.cost.gradients
        return sent, plain.cost.flops, plain.memory
    device = by_zerojax(case, stage, "device")
    if kernel.bare:
        memory = plain.memory + (device.memory if stage == 3 else 0)
        return plain.cost.activations + device.cost.moved, plain.cost.flops, memory
    sent = min(plain.cost.moved, device.cost.moved) if stage == 1 else device.cost.moved
    sent += plain.cost.activations if kernel.shared else 0
    memory = min(plain.memory, device.memory) if stage < 3 else device.memory
    return sent, min(plain.cost.flops, device.cost.flops), memory


def ratios(case: Case, stage: int, view: str) -> Ratios:
    """A program's costs over what is needed."""
    found = by_zerojax(case, stage, view)
    costs = found.cost.moved, found.cost.flops, found.memory
    return Ratios(*(a / b for a, b in zip(costs, needed(case, stage, view), strict=True)))


# Relative to the largest entry of each gradient. In float32, sums over devices, microbatches and tiles of tokens have
# another order. In bfloat16, each product is rounded to 8 bits. With `wire`, each parameter and each device's gradient
# is rounded to 1 / 254 of its block's largest entry. Where a rounded score chooses another expert, or a scale depends
# on the microbatch, plain jit on eight devices differs from one device, too: half as much again is allowed.
TOLERANCES = {"": 1e-5, "accumulate": 1e-5, "bf16": 0.03, "wire": 0.05}
MOST = 1.05
# The compiler averages the loss, and sums counts: some scalars.
SLACK = 1024


def cases(rounds: int) -> list[tuple[Case, int]]:
    """Each loss once per round, at a stage. Forms, options and stages change in turn, so that any two meet."""
    found = []
    for turn in range(rounds):
        for i, name in enumerate(KERNELS):
            form, option = FORMS[(i + turn) % len(FORMS)], OPTIONS[(i // 3 + 3 * turn) % len(OPTIONS)]
            stage = 1 + (i // 2 + 2 * turn) % 3
            found.append((Case(name, form, option), max(stage, 2) if option == "wire" else stage))
    return found


def wrong(case: Case, stage: int) -> list[str]:
    """Views whose loss or gradients differ from plain jit's on one device."""
    errors = {view: of_result(by_zerojax(case, stage, view), case) for view in KERNELS[case.name].views}
    most = max(TOLERANCES[case.option], 1.5 * of_result(by_jit(case), case))
    return [f"{view}: {e:.1e}" for view, e in errors.items() if not e <= most]


def differs(case: Case, stage: int) -> bool:
    """Whether global view differs from plain jit on the same devices, which is compiled for its costs anyway.

    Where a rounded score may choose another expert, one device is the reference.
    """
    found = error(by_zerojax(case, stage, "global").values, by_jit(case).values)
    return not found <= TOLERANCES[case.option] and any(line.startswith("global") for line in wrong(case, stage))


def exceeded(case: Case, stage: int) -> list[str]:
    """The costs that a program exceeds, with its largest collectives."""
    kernel, over = KERNELS[case.name], []
    found, allowed = by_zerojax(case, stage, "global"), needed(case, stage, "global")
    costs = found.cost.moved - SLACK, found.cost.flops, found.memory
    for name, cost, limit in zip(Ratios._fields, costs, allowed, strict=True):
        one = kernel.exceptions.get(name)
        most = one.most if one and stage in one.stages else MOST
        if cost > most * limit:
            over.append(f"{name}: {cost:,.0f} found, {limit:,.0f} needed")
    causes = found.cost.causes.most_common(3)
    return [*over, *(f"{sent:,d} bytes sent: {cause}" for cause, sent in causes if sent > SLACK)] if over else []


def forget() -> None:
    """Drop compiled programs and results, which nothing needs again."""
    jax.clear_caches()
    for cached in (by_jit, by_zerojax, on_one_device):
        cached.cache_clear()
