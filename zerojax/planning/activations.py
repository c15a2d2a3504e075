"""What a device needs within a step beyond what lives: activations, and the parameters gathered at a time.

Activations are not estimated but compiled: the plain gradient of the loss, on whole
parameters and one device's rows, for one device. Its temporary memory is what the model
needs whatever the stage, remat and loops as the compiler sees them; its gradients are
results and not among it. That is one compilation for any stage and number of devices,
and a smaller program than the step's.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..config import Config
from ..layout.tree import Layout
from ..stages.batch import check_batch
from ..stages.gather import working_set
from ..stages.loss import Loss
from ..stages.storage import cast
from .topology import absent_mesh


class Activations:
    """The activations of a loss: compiled when they are asked for, once for each number of rows."""

    def __init__(self, loss: Loss, args: tuple, gpu: str | None):
        """Choose what to compile for: an absent GPU of a kind, or the first device that is here.

        Raises:
            ValueError: If the kind is unknown.
            ModuleNotFoundError: If it is given and the extra `aot` is not installed.
        """
        self.loss = loss
        self.args = jax.tree.map(shape_of, args)
        self._mesh = Mesh(jax.devices()[:1], ("data",)) if gpu is None else absent_mesh(f"{gpu}:1")
        self._found: dict[Any, int] = {}

    def bytes(self, layout: Layout, share: Any) -> int:
        """Temporary bytes of the gradient on the rows that a device differentiates at a time."""
        key = (layout.compute, layout.trained, *((x.shape, x.dtype) for x in jax.tree.leaves(share)))
        if key not in self._found:
            self._found[key] = plain_temp(layout, self.loss, share, self.args, mesh=self._mesh)
        return self._found[key]

    def gathered(self, config: Config, layout: Layout, share: Any) -> int:
        """Bytes of parameters that stage 3 has gathered at a time."""

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
    check_batch(batch, config.axis, config.shards, accumulate)
    parts = config.shards * accumulate

    def share(x):
        whole = shape_of(x)
        return jax.ShapeDtypeStruct((whole.shape[0] // parts, *whole.shape[1:]), whole.dtype)

    return jax.tree.map(share, batch)


def shape_of(x: Any) -> jax.ShapeDtypeStruct:
    """Shape and type of an array, a number or a shape."""
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))


def plain_temp(layout: Layout, loss: Loss, batch: Any, args: tuple, *, mesh: Mesh) -> int:
    """Temporary bytes of a device for the gradient by plain jit on whole parameters: its activations.

    Args:
        layout: Layout of the parameters, of which shapes, types and what is trained are read.
        loss: The loss function.
        batch: Rows, laid out on the mesh; shapes are enough. Unlaid ones are whole on it.
        args: Further arguments of the loss.
        mesh: To compile for.
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

    lowered = jax.jit(jax.value_and_grad(value)).lower([leaves[i] for i in moving], leaves, batch, *args)
    return memory_of(lowered.compile()).temp_size_in_bytes


def memory_of(compiled: Any) -> Any:
    """`memory_analysis()` of a compiled program, which every backend here has."""
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory
