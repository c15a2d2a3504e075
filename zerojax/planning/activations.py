"""Activations of a step, and the parameters gathered at a time.

Activations are not estimated but compiled: the plain gradient of the loss, on replicated
parameters and one device's rows, for one device. Its temporary memory is what the model
needs on any number of devices, remat and loops as the compiler sees them; its gradients
are results and not part of it. That is a smaller program than the step's, compiled once
for stages 0 to 2 and once for stage 3.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.config import Config
from zerojax.gather import WorkingSet, working_set
from zerojax.gpus.devices import Device
from zerojax.gpus.topology import absent_mesh
from zerojax.inspect.hlo import read
from zerojax.inspect.memory import memory_analysis
from zerojax.inspect.roofline import Kernel, kernels
from zerojax.layout.tree import Layout
from zerojax.placement.storage import cast
from zerojax.planning.shapes import abstract, shape_of
from zerojax.train.arguments import packed
from zerojax.train.batch import check_batch
from zerojax.train.loss import Loss
from zerojax.train.typed_loss import TypedLoss, on_one_device


@dataclasses.dataclass(frozen=True)
class GradientCost:
    """What the plain gradient of a loss costs at a stage.

    Attributes:
        activations: Temporary bytes, and the device's rows themselves.
        gathered: Bytes of parameters gathered at a time; 0 below stage 3.
        compiled: The program.
    """

    activations: int
    gathered: int
    compiled: Any

    @functools.cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        """Return the kernels of the program."""
        return tuple(kernels(read(self.compiled)))

    def seconds(self, device: Device) -> float:
        """Return the least time of all its kernels."""
        return sum(kernel.times * kernel.seconds(device) for kernel in self.kernels)


class PlainGradient:
    """The gradient of a loss by plain jit on one device, compiled when asked for, once for each number of rows.

    Attributes:
        loss: The loss function.
        args: Shapes of its further arguments.
    """

    def __init__(self, loss: Loss, args: tuple, gpu: str | None):
        """Choose what to compile for: an absent GPU of a kind, or the first device here.

        Raises:
            ValueError: If the kind is unknown.
            ModuleNotFoundError: If it is given and the extra `aot` is not installed.
        """
        self.loss = loss
        self.args = abstract(packed(args))
        self._mesh = Mesh(jax.devices()[:1], ("data",)) if gpu is None else absent_mesh(f"{gpu}:1")
        self._compiled: dict[Any, Any] = {}
        self._costs: dict[Any, GradientCost] = {}

    def cost(self, config: Config, layout: Layout, rows: Any) -> GradientCost:
        """Return the cost at a stage, given shapes of the rows that a device differentiates at a time."""
        types = tuple((x.shape, x.dtype) for x in jax.tree.leaves(rows))
        kinds = tuple((leaf.kind, leaf.dim) for leaf in layout.params)
        key = (layout.compute, layout.trained, kinds, types)
        if key not in self._costs:
            gathered = program_of(config, layout, self.loss, rows, self.args)
            sharded = {i for i, leaf in enumerate(layout.params) if leaf.kind == "sharded"}
            compiled = self._compile(layout, rows, frozenset(sharded - gathered.stacks))
            row_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in types)
            temporary = memory_analysis(compiled).temp_size_in_bytes
            self._costs[key] = GradientCost(temporary + row_bytes, gathered.bytes, compiled)
        return self._costs[key]

    def _compile(self, layout: Layout, rows: Any, accumulated: frozenset[int]) -> Any:
        """Compile the program, shared by all stages and meshes that accumulate the same gradients."""
        types = tuple((x.shape, x.dtype) for x in jax.tree.leaves(rows))
        key = (layout.compute, layout.trained, accumulated, types)
        if key not in self._compiled:
            compiled = plain_gradient(layout, self.loss, rows, self.args, mesh=self._mesh, accumulated=accumulated)
            self._compiled[key] = compiled
        return self._compiled[key]


def program_of(config: Config, layout: Layout, loss: Loss, batch: Any, args: tuple) -> WorkingSet:
    """Return what stage 3 gathers of a loss, read off its program; nothing at the other stages.

    Args:
        config: Stage and mesh.
        layout: Layout of the parameters.
        loss: The loss function.
        batch: Shapes of the rows.
        args: Further arguments of the loss.
    """
    if config.stage < 3:
        return WorkingSet()

    def value(params, batch, *args):
        params = jax.tree.unflatten(layout.treedef, cast(jax.tree.leaves(params), layout.compute))
        return typed.call(params, None, batch, args)

    tree, typed = jax.tree.unflatten(layout.treedef, layout.params), TypedLoss(on_one_device(config), layout, loss)
    return working_set(value, tree, batch, *args, prefetch=config.prefetch)


def device_rows(batch: Any, config: Config, accumulate: int) -> Any:
    """Return shapes of the rows that a device differentiates at a time, in the types that the loss sees.

    Raises:
        ValueError: If devices and microbatches do not divide the batch.
    """
    check_batch(batch, config.data, accumulate)
    shards, precision = config.data.workers * accumulate, config.precision

    def local(x):
        shape = shape_of(x)
        dtype = shape.dtype if precision is None else precision.input_dtype(shape.shape, shape.dtype)
        return shape.update(shape=(shape.shape[0] // shards, *shape.shape[1:]), dtype=dtype)

    return jax.tree.map(local, batch)


def plain_gradient(
    layout: Layout,
    loss: Loss | TypedLoss,
    batch: Any,
    args: tuple,
    *,
    mesh: Mesh,
    accumulated: frozenset[int] = frozenset(),
) -> Any:
    """Compile the gradient by plain jit on replicated parameters. Its temporary memory is a device's activations.

    XLA allocates activations in the buffers of gradients that are not computed yet. A
    gradient that stage 3 shards has no such buffer: here it is added to one that is live
    from the start. (The gradient of a stacked leaf that a loop fills is live as long as
    the loop runs.)

    Args:
        layout: Layout of the parameters, of which shapes, types and what is trained are read.
        loss: The loss function, or another with the same `call`.
        batch: Rows, as shapes with or without shardings; those without are replicated.
        args: Further arguments of the loss.
        mesh: To compile for.
        accumulated: Indices of the parameters whose gradients are added to live buffers.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    leaves = [
        jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=replicated)
        for leaf, dtype in zip(layout.params, layout.compute, strict=True)
    ]
    differentiated = [i for i in layout.trained if jnp.issubdtype(leaves[i].dtype, jnp.inexact)]

    def value(values, leaves, batch, *args):
        merged = dict(enumerate(leaves)) | dict(zip(differentiated, values, strict=True))
        params = jax.tree.unflatten(layout.treedef, [merged[i] for i in range(len(leaves))])
        returned = loss.call(params, None, batch, args)
        return returned.total / returned.weight

    def gradient(buffers, *args):
        loss, grads = jax.value_and_grad(value)(*args)
        return loss, [buffers[i] + g if i in buffers else g for i, g in zip(differentiated, grads, strict=True)]

    buffers = {i: leaves[i] for i in differentiated if i in accumulated}
    values = [leaves[i] for i in differentiated]
    return jax.jit(gradient, donate_argnums=0).lower(buffers, values, leaves, batch, *args).compile()
