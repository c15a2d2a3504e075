"""What a device needs within a step beyond what lives: activations, and the parameters gathered at a time.

Activations are not estimated but compiled: the plain gradient of the loss, on whole
parameters and one device's rows, for one device. Its temporary memory is what the model
needs on any number of devices, remat and loops as the compiler sees them; its gradients
are results and not among it. That is a smaller program than the step's, compiled once
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
from zerojax.inspect.roofline import Kernel, kernels
from zerojax.layout.tree import Layout
from zerojax.placement.storage import cast
from zerojax.train.batch import check_batch
from zerojax.train.loss import Loss


@dataclasses.dataclass(frozen=True)
class Seen:
    """What the plain gradient of a loss tells of a stage.

    Attributes:
        activations: Temporary bytes, and the rows themselves.
        gathered: Bytes of parameters that are gathered at a time; 0 below stage 3.
        compiled: The program.
    """

    activations: int
    gathered: int
    compiled: Any

    @functools.cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        """What the program runs."""
        return tuple(kernels(read(self.compiled)))

    def seconds(self, device: Device) -> float:
        """How long its kernels take a device at least."""
        return sum(kernel.times * kernel.seconds(device) for kernel in self.kernels)


class PlainGradient:
    """The gradient of a loss by plain jit: compiled for one device when it is asked for, once for each number of rows.

    Attributes:
        loss: The loss function.
        args: Shapes of its further arguments.
    """

    def __init__(self, loss: Loss, args: tuple, gpu: str | None):
        """Choose what to compile for: an absent GPU of a kind, or the first device that is here.

        Raises:
            ValueError: If the kind is unknown.
            ModuleNotFoundError: If it is given and the extra `aot` is not installed.
        """
        self.loss = loss
        self.args = jax.tree.map(shape_of, args)
        self._mesh = Mesh(jax.devices()[:1], ("data",)) if gpu is None else absent_mesh(f"{gpu}:1")
        self._compiled: dict[Any, Any] = {}
        self._seen: dict[Any, Seen] = {}

    def seen(self, config: Config, layout: Layout, share: Any) -> Seen:
        """What it tells of a stage, given the rows that a device differentiates at a time."""
        kinds = tuple((leaf.kind, leaf.dim) for leaf in layout.params)
        key = (layout.compute, layout.trained, kinds, *((x.shape, x.dtype) for x in jax.tree.leaves(share)))
        if key not in self._seen:
            gathered = self._gathered(config, layout, share)
            apart = {i for i, leaf in enumerate(layout.params) if leaf.kind == "sharded"} - gathered.stacks
            compiled = self._compile(layout, share, frozenset(apart))
            rows = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(share))
            self._seen[key] = Seen(memory_of(compiled).temp_size_in_bytes + rows, gathered.bytes, compiled)
        return self._seen[key]

    def _compile(self, layout: Layout, share: Any, apart: frozenset[int]) -> Any:
        """The program, which stages and meshes share that keep the same gradients apart."""
        key = (layout.compute, layout.trained, apart, *((x.shape, x.dtype) for x in jax.tree.leaves(share)))
        if key not in self._compiled:
            compiled = plain_gradient(layout, self.loss, share, self.args, mesh=self._mesh, apart=apart)
            self._compiled[key] = compiled
        return self._compiled[key]

    def _gathered(self, config: Config, layout: Layout, share: Any) -> WorkingSet:
        if config.stage < 3:
            return WorkingSet(0, frozenset())

        def value(params, batch, *args):
            params = jax.tree.unflatten(layout.treedef, cast(jax.tree.leaves(params), layout.compute))
            return self.loss.call(params, None, batch, args)

        tree = jax.tree.unflatten(layout.treedef, layout.params)
        return working_set(value, tree, share, *self.args, prefetch=config.prefetch)


def share_of(batch: Any, config: Config, accumulate: int) -> Any:
    """Shapes of the rows of a global batch that a device differentiates at a time.

    Raises:
        ValueError: If devices and microbatches do not divide the batch.
    """
    check_batch(batch, config.data, accumulate)
    parts = config.data.workers * accumulate

    def share(x):
        whole = shape_of(x)
        return jax.ShapeDtypeStruct((whole.shape[0] // parts, *whole.shape[1:]), whole.dtype)

    return jax.tree.map(share, batch)


def shape_of(x: Any) -> jax.ShapeDtypeStruct:
    """Shape and type of an array, a number or a shape."""
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))


def plain_gradient(
    layout: Layout, loss: Loss, batch: Any, args: tuple, *, mesh: Mesh, apart: frozenset[int] = frozenset()
) -> Any:
    """The gradient by plain jit on whole parameters, compiled: its temporary memory is a device's activations.

    XLA puts activations where a gradient will be, as long as it is not there. A gradient
    that stage 3 divides leaves no such room: it is added to one that is there from the
    start. (The gradient of a stack that a loop fills is there as long as the loop runs.)

    Args:
        layout: Layout of the parameters, of which shapes, types and what is trained are read.
        loss: The loss function.
        batch: Rows, laid out on the mesh; shapes are enough. Unlaid ones are whole on it.
        args: Further arguments of the loss.
        mesh: To compile for.
        apart: Indices of the parameters in whose gradients' place nothing may be put.
    """
    whole = NamedSharding(mesh, PartitionSpec())
    leaves = [
        jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=whole)
        for leaf, dtype in zip(layout.params, layout.compute, strict=True)
    ]
    moving = [i for i in layout.trained if jnp.issubdtype(leaves[i].dtype, jnp.inexact)]

    def value(values, leaves, batch, *args):
        merged = dict(enumerate(leaves)) | dict(zip(moving, values, strict=True))
        params = jax.tree.unflatten(layout.treedef, [merged[i] for i in range(len(leaves))])
        returned = loss.call(params, None, batch, args)
        return returned.total / returned.weight

    def gradient(there, *args):
        loss, grads = jax.value_and_grad(value)(*args)
        return loss, [there[i] + g if i in there else g for i, g in zip(moving, grads, strict=True)]

    there = {i: leaves[i] for i in moving if i in apart}
    lowered = jax.jit(gradient, donate_argnums=0).lower(there, [leaves[i] for i in moving], leaves, batch, *args)
    return lowered.compile()


def memory_of(compiled: Any) -> Any:
    """`memory_analysis()` of a compiled program, which every backend here has."""
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory
