"""Measure the memory of a step's activations, and of the parameters that stage 3 gathers at the same time.

The gradient of the loss is compiled by plain jit for one device, with full parameters and one device's rows. The
temporary memory of this program is the memory of activations per device, on any number of devices. It includes the
effects of remat and loops, but not the gradients, which are results of the program. The program is smaller than a
step, and is compiled once for stages 0 to 2 and once for stage 3.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.budget.blocks import Blocks
from zerojax.comm.typed import TypedLoss, on_one_device
from zerojax.config import Config
from zerojax.gather.working_set import WorkingSet, working_set
from zerojax.gpus.devices import Device, absent_mesh
from zerojax.inspect.hlo import memory_analysis, read
from zerojax.inspect.roofline import Kernel, kernels, product_flops
from zerojax.layout.leaf import replace_items
from zerojax.layout.tree import Layout
from zerojax.placement.storage import cast
from zerojax.planning.absent_program import abstract, kernels_for, lowered
from zerojax.train.arguments import packed
from zerojax.train.fitting import largest_share
from zerojax.train.loss import Loss


@dataclasses.dataclass(frozen=True)
class GradientCost:
    """The cost of the plain gradient of a loss at a stage."""

    activations: int  # bytes of temporary memory and of one device's rows
    gathered: int  # bytes of parameters that are gathered at the same time
    kernels: tuple[Kernel, ...]
    blocks: Blocks | None = None  # the blocks of the loss, if they save as little as possible in the program

    def seconds(self, device: Device) -> float:
        return sum(kernel.times * kernel.seconds(device) for kernel in self.kernels)

    def saved(self, room: float, device: Device) -> tuple[int, float]:
        """Return how many more bytes the blocks save if they may take `room` bytes, and the seconds that this spares.

        The seconds are those of the products that the backward pass then does not repeat.
        """
        blocks = self.blocks
        assert blocks is not None, "the loss recomputes"
        more = lambda share: blocks.held_bytes(share) - blocks.held_bytes(0.0)
        repeated = lambda share: sum(block.calls * blocks.choice(block, share).flops for block in blocks.found)
        share, by_type = largest_share(0, more, room), product_flops(self.kernels)
        rate = device.rate(max(by_type, key=lambda dtype: by_type[dtype], default="f32"))
        return int(more(share)), (repeated(0.0) - repeated(share)) / rate


class PlainGradient:
    """The gradient of a loss by plain jit on one device. `cost` compiles the gradient for the shapes of a batch."""

    def __init__(self, loss: Loss, args: tuple, gpu: str | None, *, recompute: bool = False):
        """Compile for the first local device if `gpu` is None. With `recompute`, blocks save as little as possible."""
        self.loss, self._recompute = loss, recompute
        self.args = abstract(packed(args))
        self._mesh = Mesh(jax.devices()[:1], ("data",)) if gpu is None else absent_mesh(f"{gpu}:1")
        self._gathered: dict[Any, WorkingSet] = {}
        self._costs: dict[Any, GradientCost] = {}

    def cost(self, config: Config, layout: Layout, rows: Any) -> GradientCost:
        """Return the cost at the stage of `config`. `rows` has the shapes of the rows that one device has at a time.

        Stages and meshes that accumulate the same gradients share one program, and those that shard the same dims one
        trace.
        """
        types = tuple((x.shape, x.dtype) for x in jax.tree.leaves(rows))
        traced = layout.compute, layout.trained, tuple((leaf.kind, leaf.dim) for leaf in layout.params), types
        with kernels_for(self._mesh):
            if traced not in self._gathered:
                self._gathered[traced] = program_of(config, layout, self.loss, rows, self.args)
            gathered = self._gathered[traced]
            sharded = {i for i, leaf in enumerate(layout.params) if leaf.kind == "sharded"}
            accumulated = frozenset(sharded - gathered.stacks)
            key = layout.compute, layout.trained, accumulated, types
            if key not in self._costs:
                blocks = Blocks() if self._recompute else None
                fn = self.loss.fn if blocks is None else blocks.rematerialised(self.loss.fn, 0.0)
                loss = dataclasses.replace(self.loss, fn=fn)
                compiled = plain_gradient(layout, loss, rows, self.args, mesh=self._mesh, accumulated=accumulated)
                row_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in types)
                temporary = memory_analysis(compiled).temp_size_in_bytes
                self._costs[key] = GradientCost(temporary + row_bytes, 0, tuple(kernels(read(compiled))), blocks)
            return dataclasses.replace(self._costs[key], gathered=gathered.bytes)


def program_of(config: Config, layout: Layout, loss: Loss, batch: Any, args: tuple, mutable: Any = None) -> WorkingSet:
    """Trace `loss`, and return the parameters that stage 3 gathers to compute `loss`. Empty at other stages."""
    if config.stage < 3:
        return WorkingSet()

    def value(params, batch, mutable, *args):
        params = jax.tree.unflatten(layout.treedef, cast(jax.tree.leaves(params), layout.compute))
        return typed.call(params, mutable, batch, args)

    tree, typed = jax.tree.unflatten(layout.treedef, layout.params), TypedLoss(on_one_device(config), layout, loss)
    return working_set(value, tree, batch, mutable, *args, prefetch=config.prefetch, shared_bytes=config.shared_bytes)


def plain_gradient(
    layout: Layout,
    loss: Loss | TypedLoss,
    batch: Any,
    args: tuple,
    *,
    mesh: Mesh,
    accumulated: frozenset[int] = frozenset(),
    mutable: Any = None,
) -> Any:
    """Compile the gradient by plain jit with replicated parameters. Its temporary memory holds the activations.

    XLA puts activations into the buffers of gradients that are not computed yet. At stage 3, a sharded gradient has no
    full buffer. So here the gradient is added to an input, whose buffer XLA cannot use for activations. A stacked leaf
    needs no such input, because a loop fills the gradient, which occupies its buffer throughout the loop.

    `accumulated` has the indices of the parameters whose gradients are added to inputs. Rows without a sharding are
    replicated.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    leaves = [
        jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=replicated)
        for leaf, dtype in zip(layout.params, layout.compute, strict=True)
    ]
    differentiated = [i for i in layout.trained if jnp.issubdtype(leaves[i].dtype, jnp.inexact)]

    def value(values, leaves, mutable, batch, *args):
        params = jax.tree.unflatten(layout.treedef, replace_items(leaves, differentiated, values))
        returned = loss.call(params, mutable, batch, args)
        return returned.total / returned.weight

    def gradient(buffers, *args):
        loss, grads = jax.value_and_grad(value)(*args)
        return loss, [buffers[i] + g if i in buffers else g for i, g in zip(differentiated, grads, strict=True)]

    buffers = {i: leaves[i] for i in differentiated if i in accumulated}
    values = [leaves[i] for i in differentiated]
    traced = jax.jit(gradient, donate_argnums=0).trace(buffers, values, leaves, mutable, batch, *args)
    return lowered(traced, mesh).compile()
