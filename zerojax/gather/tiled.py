"""A function of each position alone, run on the positions tile by tile: what it computes is in memory for one tile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.config import check_count
from zerojax.config.precision import common_dtype
from zerojax.gather.engine import block

if TYPE_CHECKING:
    from jaxtyping import Array, PyTree, Shaped


def tiled(fn: Callable, *, tiles: int) -> Callable:
    """Run a function of each position alone on one tile of the positions at a time, recomputed for its gradients.

    For a head and its cross entropy, whose logits are then never whole, and for the feed-forward layers of long
    sequences. The result is `fn(params, *arrays)`, and so are its derivatives, to rounding. Its parameters are
    gathered once for all tiles, and their gradients summed over the tiles in at least float32, then reduced once.

    Args:
        fn: `fn(params, *tiles)` returns arrays of (rows, positions, ...), each position of which depends on the same
            position of its arguments alone. Take a mean over positions of the result, outside of `fn`.
        tiles: How many, at least 1; the memory of what `fn` computes is divided by it. A tile has every so many-th
            position, of all rows: it is divided over the devices as the rows are, and over an axis for
            positions as these are. Where it does not divide the positions, the last one is computed again.

    Returns:
        `run(params, *arrays)`: any tree of arrays that `fn` uses in full, and arrays of (rows, positions, ...), such
        as hidden states and targets. It returns what `fn` does of all positions.

    Raises:
        TypeError: If `tiles` is no integer.
        ValueError: If `tiles` is below 1; from `run`, if arrays have no dim 1 or different numbers of
            positions, or `fn` returns an array without those of its tile.

    References:
        Bekman et al. 2025, arXiv 2506.13996 (sequence tiling).

    Examples:
        >>> def nll(head, x, targets):
        ...     return optax.softmax_cross_entropy_with_integer_labels(x @ head, targets)
        >>> def loss(params, x, targets, mask):
        ...     each = tiled(nll, tiles=16)(params["head"], x, targets)  # (rows, positions)
        ...     return jnp.sum(each * mask) / jnp.sum(mask)
    """
    check_count("tiles", tiles, "tiles", least=1)

    def run(params: PyTree, *arrays: Shaped[Array, "rows positions ..."]) -> Any:
        positions = positions_of(arrays)
        count = min(tiles, positions)

        def over_tiles(params: PyTree, *arrays: Array) -> Any:
            wide = jax.tree.map(summed_wide, params)

            @functools.partial(jax.checkpoint, prevent_cse=False)
            def of_tile(wide, tile):
                own = jax.tree.map(lambda w, as_given: w.astype(as_given.dtype), wide, params)
                results = fn(own, *tile)
                check_results(results, tile[0].shape[1])
                return results

            split = tuple(split_positions(x, count) for x in arrays)
            _, results = lax.scan(lambda _, tile: (None, of_tile(wide, tile)), None, split)
            return jax.tree.map(lambda x: joined_positions(x, positions), results)

        return block(over_tiles)(params, *arrays)

    return run


def positions_of(arrays: tuple) -> int:
    """Return the number of positions of the arrays, on dim 1.

    Raises:
        ValueError: If one has none, or another number of them.
    """
    shapes = [jnp.shape(x) for x in arrays]
    if not shapes or any(len(shape) < 2 for shape in shapes) or len({shape[1] for shape in shapes}) > 1:
        found = ", ".join(str(list(shape)) for shape in shapes) or "none"
        raise ValueError(
            f"tiled divides the positions of its arrays, on dim 1 and as many in each; the shapes are {found}. "
            f"Give arrays of (rows, positions, ...), and what every tile needs in full as `params`."
        )
    if not shapes[0][1]:
        raise ValueError(f"tiled divides positions, and the arrays have none: the first has shape {list(shapes[0])}.")
    return shapes[0][1]


def check_results(results: Any, extent: int) -> None:
    """Refuse results that are not one for each position of a tile.

    Raises:
        ValueError: Naming the shape found.
    """
    for path, x in jax.tree_util.tree_flatten_with_path(results)[0]:
        if jnp.ndim(x) < 2 or jnp.shape(x)[1] != extent:
            raise ValueError(
                f"A function given to tiled returns arrays of (rows, positions, ...), with the {extent} positions of "
                f"its tile on dim 1, but result{jax.tree_util.keystr(path)} has shape {list(jnp.shape(x))}. Take sums "
                f"and means over positions of what tiled returns."
            )


def summed_wide(w: Any) -> Any:
    """Return a parameter in a type in which gradients of many tiles can be added: bfloat16 has only 8 bits."""
    dtype = jnp.result_type(w)
    return w.astype(common_dtype(dtype, jnp.float32)) if jnp.issubdtype(dtype, jnp.floating) else w


def split_positions(x: Array, tiles: int) -> Shaped[Array, "tiles rows extent ..."]:
    """Tile by tile every so many-th position; the last one repeated (a function of zeros might be NaN)."""
    padding = [(0, 0), (0, -x.shape[1] % tiles), *[(0, 0)] * (x.ndim - 2)]
    x = jnp.pad(x, padding, mode="edge") if padding[1][1] else x
    return jnp.moveaxis(x.reshape(x.shape[0], -1, tiles, *x.shape[2:]), 2, 0)


def joined_positions(x: Shaped[Array, "tiles rows extent ..."], positions: int) -> Array:
    """Undo `split_positions`."""
    return jnp.moveaxis(x, 0, 2).reshape(x.shape[1], -1, *x.shape[3:])[:, :positions]
