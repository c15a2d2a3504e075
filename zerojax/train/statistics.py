"""`zerojax.statistics`: describe the values of sharded trees. Each device reads its own shards, without a gather.

A stored array is never sliced or reshaped here, because both may move elements between devices. A mask hides the
padding instead. Only sums, minima and maxima of shards are combined over the devices.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax.comm.explicit import mesh_of, on_auto_mesh
from zerojax.config import check_count
from zerojax.inspect.planned import planned
from zerojax.layout.chunked import is_chunked
from zerojax.layout.padded import Padded, is_padded
from zerojax.offload.host import is_on_host, to_device
from zerojax.placement.chunking import joined
from zerojax.placement.storage import is_stored_node
from zerojax.train.loss import at_least_float32

if TYPE_CHECKING:
    from jaxtyping import Array, PyTree, Shaped

COUNTABLE = 2**32  # an array with as many elements may overflow the counts of a histogram
WHOLE = "all"  # the name of the whole tree


def statistics(
    tree: PyTree, *, of: PyTree = None, depth: int | None = None, bins: int = 0
) -> dict[str, dict[str, Array]]:
    """Compute norm, root mean square, mean, standard deviation, minimum and maximum of the leaves or modules of a tree.

    Only scalars, and the counts of histograms, are sent between devices. Padding does not count. The function may be
    called under `jax.jit`. Outside of it, leaves in host memory or on disk are loaded onto the devices one at a time.
    With several processes, all processes must call it.

    Args:
        tree: Parameters, gradients, updates, an NNX module, a `ZeroState`, a Flax `TrainState`, or any tree of arrays.
            Leaves that are not floating, or have no elements, are left out. Of a complex leaf, the absolute values
            count. In an optimizer state alone, the padding is unknown and counts: pass the state that contains it.
        of: The parameters, if `tree` contains updates. Adds `ratio`, the norm of the update divided by the norm of the
            parameter; infinite if the parameter is zero.
        depth: Number of keys of a path that name a module, whose leaves are described together. 0 describes the whole
            tree under the name `"all"`. None describes each leaf.
        bins: Number of bins of a histogram. Adds `counts`, shape `(bins,)`, and `edges`, shape `(bins + 1,)`, of the
            finite elements, as `numpy.histogram` computes them. 0: no histogram.

    Returns:
        By path, with keys joined by slashes, the statistics by name: `norm`, `rms`, `mean`, `std`, `min` and `max`.
        They are scalars in float32, or in a wider type of the leaf.

    Raises:
        TypeError: If a leaf is a shape, or if it is offloaded and the function is called under `jax.jit`.
        ValueError: If `of` lacks a leaf of `tree`, or has it in another shape. Also if two leaves have the same path,
            or a leaf has too many elements for the counts of a histogram.

    Examples:
        >>> found = zerojax.statistics(state.params)
        >>> found["params/Dense_0/kernel"]["norm"]
        >>> zerojax.statistics(updates, of=params, depth=2)["params/Dense_0"]["ratio"]
    """
    check_count("bins", bins, "bins", least=0)
    check_count("depth", depth or 0, "keys", least=0)
    parts = parts_of(tree)
    if bins and (large := [part for part in parts if part.size >= COUNTABLE]):
        raise ValueError(
            f"{large[0].name} has {large[0].size:,d} elements, and the counts of a histogram have 32 bits. Leave out "
            f"bins=, or pass the tree without this leaf."
        )
    below = None if of is None else same_leaves(parts, of)
    modules: dict[tuple[str, ...], list[int]] = {}
    for i, part in enumerate(parts):
        modules.setdefault(part.keys[:depth], []).append(i)
    names = names_of(list(modules))
    groups, sizes = tuple(map(tuple, modules.values())), tuple(part.size for part in parts)
    found = combined(groups, sizes, each(moments, parts))
    if bins:
        edges = edges_of(groups, each(finite_range, parts), bins)
        of_leaf = {i: one for members, one in zip(groups, edges, strict=True) for i in members}
        counts = each(counts_between, parts, [of_leaf[i] for i in range(len(parts))])
        for one, members, edge in zip(found, groups, edges, strict=True):
            one |= {"counts": sum(counts[i] for i in members), "edges": edge}
    if below is not None:
        for one, other in zip(found, combined(groups, sizes, each(moments, below)), strict=True):
            one["ratio"] = one["norm"] / other["norm"]
    return dict(zip(names, found, strict=True))


class Part(NamedTuple):
    """A leaf to describe: the keys of its path, its stored array or `Chunked` node, and its logical shape."""

    keys: tuple[str, ...]
    stored: Any
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """Return the path, with keys joined by slashes."""
        return "/".join(self.keys) or WHOLE

    @property
    def size(self) -> int:
        """Return the number of elements, without padding."""
        return math.prod(self.shape)

    @property
    def is_offloaded(self) -> bool:
        """Return whether the leaf is in host memory or on disk, and can be loaded alone."""
        if is_chunked(self.stored):
            return True
        is_array = isinstance(self.stored, jax.Array) and not isinstance(self.stored, jax.core.Tracer)
        return is_array and is_on_host(self.stored)

    def loaded(self) -> Shaped[Array, "*storage"]:
        """Return the stored array on the devices."""
        return joined(self.stored) if is_chunked(self.stored) else to_device(self.stored)


def parts_of(tree: PyTree) -> list[Part]:
    """Return the floating leaves of a tree that have elements. Raise a ValueError if two of them have one name."""
    plan, parts = planned(tree).leaves, []
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_stored_node):
        leaf, dtype = plan.get(jax.tree_util.keystr(path)), getattr(x, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            continue
        keys = keys_of(path)
        check_leaf("/".join(keys) or WHOLE, x)
        if is_padded(x):
            # Without the sharding: on Explicit axes, JAX does not slice a dim to a length that they do not divide.
            storage: Any = jax.ShapeDtypeStruct(x.storage.shape, x.dtype)
            logical = jax.eval_shape(Padded.logical, dataclasses.replace(x, storage=storage))
            part = Part(keys, x.storage, tuple(logical.shape))
        else:
            leaf = x.leaf if is_chunked(x) else leaf
            part = Part(keys, x, tuple(x.shape if leaf is None else leaf.shape))
        parts += [part] if part.size else []
    names_of([part.keys for part in parts])
    return parts


def names_of(paths: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the keys of each path joined by slashes. Raise a ValueError if two paths have the same name."""
    names = ["/".join(keys) or WHOLE for keys in paths]
    if doubled := [name for name, count in collections.Counter(names).items() if count > 1]:
        raise ValueError(
            f"Two leaves or modules have the path {doubled[0]}, because a key contains a slash. Rename one of them."
        )
    return names


def keys_of(path: Sequence[Any]) -> tuple[str, ...]:
    """Return the keys of a path, without the last key `value` of a variable of NNX or a box of Linen."""
    named = path[:-1] if path and getattr(path[-1], "name", None) == "value" else path
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in named)


def check_leaf(name: str, x: Any) -> None:
    """Raise a TypeError if a leaf has no values, or if it is offloaded and traced."""
    arrays = jax.tree.leaves(x)
    if any(isinstance(one, jax.ShapeDtypeStruct) for one in arrays):
        raise TypeError(f"{name} is a shape, which has no values to describe. Pass arrays.")
    if is_chunked(x) and any(isinstance(one, jax.core.Tracer) for one in arrays):
        raise TypeError(
            f"{name} is offloaded, and a program traced by jax.jit cannot load it. Call zerojax.statistics outside of "
            f"jax.jit, where it loads one leaf at a time."
        )


def same_leaves(updates: Sequence[Part], of: PyTree) -> list[Part]:
    """Return the parameter of each update. Raise a ValueError if it is missing or has another logical shape."""
    params = {part.name: part for part in parts_of(of)}
    for part in updates:
        other = params.get(part.name)
        if other is None or other.shape != part.shape:
            found = "there is no such leaf in of=" if other is None else f"it has shape {list(other.shape)} in of="
            raise ValueError(
                f"{part.name} of shape {list(part.shape)} is to be divided by the parameter with the same path, and "
                f"{found}. Pass the parameters that the updates belong to."
            )
    return [params[part.name] for part in updates]


def each(fn: Callable, parts: Sequence[Part], args: Sequence = ()) -> list[Any]:
    """Call `fn(array, shape, arg)` on each leaf. One program describes all leaves that are not offloaded."""
    resident = [i for i, part in enumerate(parts) if not part.is_offloaded]
    found: dict[int, Any] = {}
    for chosen in ([resident] if resident else []) + [[i] for i, part in enumerate(parts) if part.is_offloaded]:
        arrays = [parts[i].loaded() for i in chosen]
        program = functools.partial(run, fn, tuple(parts[i].shape for i in chosen))
        mesh = next((of for x in arrays if (of := mesh_of(x)) is not None), None)  # abstract if traced
        values = on_auto_mesh(mesh, program, arrays, [args[i] for i in chosen] if args else [()] * len(chosen))
        found |= dict(zip(chosen, values, strict=True))
    return [found[i] for i in range(len(parts))]


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(fn: Callable, shapes: tuple, arrays: Sequence[Array], args: Sequence) -> list[Any]:
    """Call `fn(array, shape, arg)` on each array, in one program."""
    wide = (at_least_float32(jnp.abs(x) if jnp.iscomplexobj(x) else x) for x in arrays)
    return [fn(x, *rest) for x, *rest in zip(wide, shapes, args, strict=True)]


def is_element(x: Shaped[Array, "*storage"], shape: tuple[int, ...]) -> Any:
    """Return a mask of the elements that are not padding, or True without padding. A flat array has another rank."""
    shape = shape if x.ndim == len(shape) else (math.prod(shape),)
    masks = [lax.broadcasted_iota(np.uint32, x.shape, d) < n for d, n in enumerate(shape) if n < x.shape[d]]
    return functools.reduce(jnp.logical_and, masks) if masks else True


class Moments(NamedTuple):
    """The sums from which statistics are computed: of the squares, and of the squared distances from the mean."""

    mean: Array
    squares: Array
    distances: Array
    low: Array
    high: Array


def moments(x: Array, shape: tuple[int, ...], _: Any = ()) -> Moments:
    """Return the moments of the elements of a stored array."""
    inside, size = is_element(x, shape), float(math.prod(shape))
    kept = lambda values, other: values if inside is True else jnp.where(inside, values, jnp.asarray(other, x.dtype))
    mean = jnp.sum(kept(x, 0)) / size
    distances = jnp.sum(kept(jnp.square(x - mean), 0))
    low, high = jnp.min(kept(x, jnp.inf)), jnp.max(kept(x, -jnp.inf))
    return Moments(mean, jnp.sum(kept(jnp.square(x), 0)), distances, low, high)


@functools.partial(jax.jit, static_argnums=(0, 1))
def combined(groups: tuple, sizes: tuple[int, ...], found: Sequence[Moments]) -> list[dict[str, Array]]:
    """Return the statistics of each group of leaves.

    References:
        Chan, Golub and LeVeque 1979, STAN-CS-79-773: the sum of squared distances of two samples together.
    """
    results = []
    for members in groups:
        size = float(sum(sizes[i] for i in members))
        mean = sum(found[i].mean * (sizes[i] / size) for i in members)
        squares = sum(found[i].squares for i in members)
        distances = sum(found[i].distances + float(sizes[i]) * jnp.square(found[i].mean - mean) for i in members)
        values = {
            "norm": jnp.sqrt(squares),
            "rms": jnp.sqrt(squares / size),
            "mean": mean,
            "std": jnp.sqrt(distances / size),
            "min": functools.reduce(jnp.minimum, [found[i].low for i in members]),
            "max": functools.reduce(jnp.maximum, [found[i].high for i in members]),
        }
        results.append(values)
    return results


def norm(x: Shaped[Array, "*storage"], shape: tuple[int, ...]) -> Array:
    """Return the norm of a stored array without its padding. Call this under `jax.jit`."""
    squares = jnp.square(at_least_float32(jnp.abs(x)))
    return jnp.sqrt(jnp.sum(jnp.where(is_element(x, shape), squares, jnp.zeros((), squares.dtype))))


def finite_range(x: Array, shape: tuple[int, ...], _: Any = ()) -> tuple[Array, Array]:
    """Return the smallest and the largest finite element."""
    inside = is_element(x, shape) & jnp.isfinite(x)
    return jnp.min(jnp.where(inside, x, jnp.inf)), jnp.max(jnp.where(inside, x, -jnp.inf))


@functools.partial(jax.jit, static_argnums=(0, 2))
def edges_of(groups: tuple, ranges: Sequence[tuple[Array, Array]], bins: int) -> list[Array]:
    """Return the edges of each group's histogram. If all elements are equal, the histogram has a range of 1."""
    results = []
    for members in groups:
        low = functools.reduce(jnp.minimum, [ranges[i][0] for i in members])
        high = functools.reduce(jnp.maximum, [ranges[i][1] for i in members])
        wider = jnp.where(low == high, 0.5, 0.0).astype(low.dtype)
        results.append(jnp.linspace(low - wider, high + wider, bins + 1))
    return results


def counts_between(x: Array, shape: tuple[int, ...], edges: Array) -> Array:
    """Return the number of finite elements in each bin. The last bin contains its upper edge.

    Each device counts its own elements. `jnp.histogram` was rejected, because it flattens the array, which would gather
    it. A comparison of each element with all edges was rejected, because XLA materialises it on CPUs.
    """
    inside, bins = is_element(x, shape) & jnp.isfinite(x), len(edges) - 1
    halves = (x / 2 - edges[0] / 2) / (edges[-1] / 2 - edges[0] / 2)  # the range itself may be infinite
    index = jnp.clip(jnp.where(inside, halves * bins, 0).astype(np.int32), 0, bins - 1)
    index -= x < edges[index]  # the quotient is rounded
    index += (x >= edges[index + 1]) & (index < bins - 1)
    return jnp.zeros(bins, np.uint32).at[index].add(inside.astype(np.uint32))
