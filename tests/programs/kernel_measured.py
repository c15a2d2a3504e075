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
from flat_options import tuned
from jax.sharding import NamedSharding, PartitionSpec
from kernel_registry import FORMS, KERNELS, Where, mesh_of
from measured import PERSIST_BELOW, SLACK, Cost, Limit, accumulated, cost_of, over

from zerojax import Precision, Wire, zero_shard

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

    @functools.cached_property
    def values(self) -> tuple[float, Any]:
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
    workers = 1 if where.view == "one" else where.mesh.shape["data"]
    return accumulated(grad, MICROBATCHES, workers) if case.option == "accumulate" else grad


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
    return Result(compiled, given, cost_of(compiled, params))


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
    tx = zero_shard(optax.sgd(0.1), stage=stage, mesh=mesh_of(kernel), **tuned(**options))
    microbatches = MICROBATCHES if case.option == "accumulate" else 1
    grad = tx.value_and_grad(kernel.loss(case.form, Where(view, mesh_of(kernel))), accumulate=microbatches)
    given = tx.shard(params), placed(kernel, batch)
    compiled = jax.jit(grad).lower(*given).compile()
    return Result(compiled, given, cost_of(compiled, params))


def error(found: tuple[float, Any], expected: tuple[float, Any]) -> float:
    """The largest error of the loss and of a gradient, relative to the largest entry of the gradient's leaf."""
    of = lambda a, b: float(np.max(np.abs(a - b)) / np.max(np.abs(b)))
    errors = jax.tree.leaves(jax.tree.map(of, found[1], expected[1]))
    return max(abs(found[0] - expected[0]) / abs(expected[0]), *errors)


def of_result(result: Result, case: Case) -> float:
    """The error of a result, relative to plain jit on one device."""
    return error(result.values, on_one_device(case))


def limits(case: Case, stage: int) -> list[Limit]:
    """Bytes sent, FLOPs and memory are at most 1.05 times those of plain jit or of device view, whichever is less.

    Plain jit all-reduces gradients, so device view alone says what stages 2 and 3 send. At stage 3, plain jit holds all
    parameters as arguments, so device view says what is held, too. Without device view, the gradients' bytes are those
    of plain jit, half as many at stage 2, and half more at stage 3: an all-reduce sends twice what a gather or a
    reduce-scatter does. `Kernel.bare` allows what plain jit needs, and `shared` its activations.
    """
    kernel, plain, found = KERNELS[case.name], by_jit(case).cost, by_zerojax(case, stage, "global").cost
    sent, flops, memory = 0, plain.flops, plain.memory
    if "device" not in kernel.views:
        sent = plain.activations + {1: 1, 2: 0.5, 3: 1.5}[stage] * plain.gradients
    else:
        device = by_zerojax(case, stage, "device").cost
        sent = min(plain.moved, device.moved) if stage == 1 and not kernel.bare else device.moved
        sent += plain.activations if kernel.shared else 0
        if kernel.bare:
            memory += device.memory if stage == 3 else 0
        else:
            flops = min(flops, device.flops)
            memory = min(memory, device.memory) if stage < 3 else device.memory
    return [
        Limit("bytes", found.moved, MOST, sent, SLACK),
        Limit("flops", found.flops, MOST, flops),
        Limit("memory", found.memory, MOST, memory),
    ]


# Relative to the largest entry of each gradient. In float32, sums over devices, microbatches and tiles of tokens have
# another order. In bfloat16, each product is rounded to 8 bits. With `wire`, each parameter and each device's gradient
# is rounded to 1 / 254 of its block's largest entry. Where a rounded score chooses another expert, or a scale depends
# on the microbatch, plain jit on eight devices differs from one device, too: half as much again is allowed.
TOLERANCES = {"": 1e-5, "accumulate": 1e-5, "bf16": 0.03, "wire": 0.05}
MOST = 1.05


def cases(rounds: int) -> list[tuple[Case, int]]:
    """Each loss once per round, at a stage. Forms, options and stages change in turn, so that any two meet."""
    found = []
    for turn in range(rounds):
        for i, name in enumerate(KERNELS):
            form, option = FORMS[(i + turn) % len(FORMS)], OPTIONS[(i // 3 + 3 * turn) % len(OPTIONS)]
            stage = 1 + (i // 2 + 2 * turn) % 3
            found.append((Case(name, form, option), max(stage, 2) if option == "wire" else stage))
    return found


def differs(case: Case, stage: int) -> bool:
    """Whether global view differs from plain jit on the same devices, which is compiled for its costs anyway.

    Where a rounded score may choose another expert, one device is the reference.
    """
    found, plain, most = by_zerojax(case, stage, "global"), by_jit(case), TOLERANCES[case.option]
    if error(found.values, plain.values) <= most:
        return False
    return not of_result(found, case) <= max(most, 1.5 * of_result(plain, case))


def exceeded(case: Case, stage: int) -> list[str]:
    """The limits that a case exceeds."""
    causes = by_zerojax(case, stage, "global").cost.causes
    return over(KERNELS[case.name], stage, limits(case, stage), causes)


def forget() -> None:
    """Drop compiled programs and results, which nothing needs again."""
    jax.clear_caches()
    for cached in (by_jit, by_zerojax, on_one_device):
        cached.cache_clear()
