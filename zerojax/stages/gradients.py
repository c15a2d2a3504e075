"""Loss and gradient over all devices, with explicit collectives inside `shard_map`.

Each device differentiates the loss of its own rows; the gradients are reduce-scattered,
so that a device ends with its part of their mean. At stage 3 the loss is first rewritten
to gather each parameter where it is used (`gather`), and differentiating a gather gives
the reduce-scatter.

References:
    Rajbhandari et al. 2020, arXiv 1910.02054, section 5.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ..comm import collectives
from ..comm.mesh import rows
from ..config import Config
from ..layout.leaf import Leaf
from ..layout.tree import Layout
from .gather import gather_on_use

if TYPE_CHECKING:
    from jaxtyping import Array, Float, PyTree, Shaped


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss function and how to read what it returns.

    Attributes:
        fn: `fn(params, batch, *args)`, on the device's own rows.
        has_aux: It returns `(loss, aux)`.
        weighted: Its loss is `(total, weight)`; the mean is the sum of the totals over
            the sum of the weights.
    """

    fn: Callable
    has_aux: bool = False
    weighted: bool = False

    def parse(self, returned: Any) -> tuple[Float[Array, ""], Float[Array, ""], PyTree]:
        """`(total, weight, aux)` of what the function returned.

        Raises:
            TypeError: If it is not of the form announced.
            ValueError: If loss or weight is no scalar.
        """
        wanted = "(loss, aux)" if self.has_aux else "loss"
        if self.has_aux and not (isinstance(returned, tuple) and len(returned) == 2):
            raise TypeError(f"With has_aux=True the loss function returns (loss, aux), not {type(returned).__name__}.")
        value, aux = returned if self.has_aux else (returned, None)
        if self.weighted:
            if not (isinstance(value, tuple) and len(value) == 2):
                raise TypeError(f"With weighted=True the loss in {wanted} is (total, weight), not {value!r}.")
            return scalar("total", value[0]), scalar("weight", value[1]), aux
        return scalar("loss", value), jnp.ones((), jnp.float32), aux


@functools.partial(jax.tree_util.register_dataclass, data_fields=["tree"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Same:
    """A part of aux that is the same on every device (a counter, say), and is not averaged.

    Attributes:
        tree: Arrays of any type.
    """

    tree: PyTree


def scalar(name: str, value: Any) -> Float[Array, ""]:
    """Check that the loss function returned a real scalar."""
    if isinstance(value, tuple | list | dict):
        raise TypeError(
            f"The loss function must return a scalar {name}, not a {type(value).__name__}. "
            f"For (loss, aux) pass has_aux=True; for (total, weight) pass weighted=True."
        )
    value = jnp.asarray(value)
    if value.shape != ():
        raise ValueError(
            f"The loss function must return a scalar {name}, but it has shape {list(value.shape)}. "
            f"Take jnp.mean(...) over the rows, or return (total, weight) with weighted=True."
        )
    if name != "weight" and not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(f"The loss function must return a floating point {name}, but it is {value.dtype}.")
    return value


def loss_and_grads(
    config: Config,
    layout: Layout,
    parts: Sequence[Leaf],
    loss: Loss,
    stored: Sequence[Shaped[Array, "*storage"]],
    batch: PyTree,
    args: tuple,
) -> tuple[Float[Array, ""], PyTree, list[Shaped[Array, "*storage"]]]:
    """Mean loss and its gradient over all devices.

    Args:
        config: Mesh, axis and stage.
        layout: Layout of the parameters.
        parts: How the gradient of each parameter is left: one `Leaf` a parameter.
        loss: The loss function.
        stored: Parameters; storage shape.
        batch: Every leaf is divided on dim 0 over the axis.
        args: Further arguments, whole on every device; PRNG keys are folded with the
            device's index.

    Returns:
        `(loss, aux, grads)`: gradients in storage shape of `parts`, zeros for integers.
    """
    check_batch(batch, config.axis, config.shards)
    check_args(args)
    axis = config.axis

    def local(stored, batch, args):
        return local_grads(config, layout, parts, loss, stored, batch, fold_keys(args, axis))

    whole = PartitionSpec()
    return jax.shard_map(
        local,
        mesh=config.mesh,
        in_specs=([leaf.manual_spec for leaf in layout.params], PartitionSpec(axis), whole),
        out_specs=(whole, whole, [part.manual_spec for part in parts]),
        axis_names={axis},
        check_vma=False,
    )(list(stored), batch, args)


def local_grads(config, layout, parts, loss, stored, batch, args):
    """`loss_and_grads` as one device sees it: local shapes in and out."""
    axis, leaves = config.axis, layout.params
    fn = loss.fn
    if any(leaf.kind == "cut" for leaf in leaves):
        fn = gather_on_use(
            fn,
            jax.tree.unflatten(layout.treedef, leaves),
            axis=axis,
            prefetch=config.prefetch,
            bucket_bytes=config.bucket_bytes,
            reshard_after_forward=config.reshard_after_forward,
        )
    floats = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

    def objective(values):
        merged = dict(enumerate(stored)) | dict(zip(floats, values, strict=True))
        params = jax.tree.unflatten(layout.treedef, [merged[i] for i in range(len(leaves))])
        total, weight, aux = loss.parse(fn(params, batch, *args))
        return total, (weight, aux)

    total, pull, (weight, aux) = jax.vjp(objective, [stored[i] for i in floats], has_aux=True)
    if loss.weighted:
        mean_total, weight = lax.psum((total, weight), axis)
        mean_total, scale = mean_total / weight, 1 / weight
    else:  # known without asking the devices: no collective stands between the two passes
        mean_total, scale = lax.pmean(total, axis), jnp.asarray(1 / config.shards)
    # Scaling the cotangent and not the gradients keeps narrow types in range and saves a pass over them.
    (grads,) = pull(scale.astype(total.dtype))
    summed = sum_over_devices(dict(zip(floats, grads, strict=True)), leaves, parts, axis)
    return mean_total, mean_aux(aux, axis), summed


def sum_over_devices(
    grads: dict[int, Array], leaves: Sequence[Leaf], parts: Sequence[Leaf], axis: str
) -> list[Shaped[Array, "*local"]]:
    """Each device's part of the summed gradients; a leaf gathered on use is summed already."""
    reduce = [i for i in grads if leaves[i].dim is None]
    sums = collectives.reduce_scatter([grads[i] for i in reduce], [parts[i] for i in reduce], axis)
    done = grads | dict(zip(reduce, sums, strict=True))
    return [done[i] if i in done else jnp.zeros(part.local_shape, part.dtype) for i, part in enumerate(parts)]


def fold_keys(args: PyTree, axis: str) -> Any:
    """Fold PRNG keys with the device's index, so that devices draw different numbers."""

    def fold(x):
        if not (isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)):
            return x
        for_device = lambda key: jax.random.fold_in(key, lax.axis_index(axis))
        for _ in range(x.ndim):
            for_device = jax.vmap(for_device)
        return for_device(x)

    return jax.tree.map(fold, args)


def mean_aux(aux: PyTree, axis: str) -> Any:
    """Average the float leaves of aux over the devices.

    Raises:
        TypeError: If a leaf is not a float, since its mean means nothing.
    """

    def mean(path, x):
        if isinstance(x, Same):
            return x
        if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            raise TypeError(
                f"aux{jax.tree_util.keystr(path)} is {jnp.result_type(x)}; aux is averaged over the devices, which "
                f"only floats can be. Return it as a float, or as a float mean over the rows."
            )
        return lax.pmean(x, axis)

    return jax.tree_util.tree_map_with_path(mean, aux, is_leaf=lambda x: isinstance(x, Same))


def check_batch(batch: PyTree, axis: str, shards: int) -> None:
    """Refuse a batch whose rows the devices cannot share evenly.

    Raises:
        ValueError: Naming the leaf, its rows, the axis's size and what to do.
    """
    for path, x in jax.tree_util.tree_flatten_with_path(batch)[0]:
        name = f"batch{jax.tree_util.keystr(path)}"
        shape = jnp.shape(x)
        if not shape:
            raise ValueError(
                f"Cannot cut {name} over mesh axis {axis!r}: it is a scalar and has no dim 0. "
                f"Pass values that belong to no row as further arguments, after the batch."
            )
        if shape[0] % shards:
            below, above = shape[0] // shards * shards, -(-shape[0] // shards) * shards
            fits = f"{below} or {above}" if below else f"{above}"
            raise ValueError(
                f"Cannot cut {name} over mesh axis {axis!r}: its dim 0 has {shape[0]} rows, and the axis has "
                f"{shards} devices. Give a batch of {fits} rows, or drop the remainder in the data loader."
            )


def place_batch(config: Config, batch: PyTree) -> PyTree:
    """Cut a batch's rows over the devices, unless they lie so already.

    Args:
        config: Mesh and axis.
        batch: Arrays of any kind and place, or shapes.

    Returns:
        Arrays on the mesh; of shapes, shapes with their sharding.

    Raises:
        ValueError: As `check_batch`.
    """
    check_batch(batch, config.axis, config.shards)
    sharding = rows(config.mesh, config.axis)

    def place(x):
        if isinstance(x, jax.core.Tracer):
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return x if getattr(x, "sharding", None) == sharding else jax.device_put(x, sharding)

    return jax.tree.map(place, batch)


def check_args(args: tuple) -> None:
    """Refuse untyped PRNG keys, which cannot be told from data and so would not be folded.

    Raises:
        TypeError: If an argument looks like one.
    """
    for path, x in jax.tree_util.tree_flatten_with_path(args)[0]:
        if jnp.shape(x) == (2,) and jnp.result_type(x) == jnp.uint32:
            raise TypeError(
                f"args{jax.tree_util.keystr(path)} is uint32[2], which looks like an untyped PRNG key: every device "
                f"would draw the same numbers. Pass jax.random.key(seed), or jax.random.wrap_key_data(key)."
            )
