"""`block` marks a layer of a model. `tiled` saves memory: it runs a function on one tile of a sequence at a time."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree, Shaped

from zerojax import names
from zerojax.compat import common_dtype
from zerojax.config import check_count


def block(fn: Callable) -> Callable:
    """Mark `fn` as one layer, whose parameters are gathered together, and dropped when `fn` returns.

    Use `block` for models whose layers are not under `jax.checkpoint`. Outside of stage 3, `block` is `jax.jit`.

    Args:
        fn: A function of arrays. It takes parameters as arguments, or closes over them.

    Returns:
        A function that returns the results of `fn`.

    Examples:
        >>> import jax.numpy as jnp
        >>> layer = block(lambda w, x: jnp.tanh(x @ w))
        >>> layer(jnp.ones((2, 2)), jnp.zeros((1, 2)))
        Array([[0., 0.]], dtype=float32)
    """

    def zerojax_block(*args, **kwargs):
        return fn(*args, **kwargs)

    zerojax_block.__name__ = names.BLOCK
    return jax.jit(zerojax_block)


def tiled(fn: Callable, *, tiles: int) -> Callable:
    """Run a function on one tile of the positions at a time. The function must treat each position independently.

    Use `tiled` for a head and its cross entropy, so that the logits of all positions never exist at once, and for the
    feed-forward layers of long sequences. Values and derivatives equal those of `fn(params, *arrays)`, except for
    rounding. The backward pass computes each tile again. Parameters are gathered once for all tiles. Their gradients
    are summed over the tiles in at least float32, and reduced once.

    Args:
        fn: `fn(params, *tiles)` returns arrays of (rows, positions, ...). Each position of a result must depend on the
            same position of the arguments alone. Take a mean over positions outside of `fn`.
        tiles: The number of tiles, at least 1. The memory of the values that `fn` computes is divided by this number. A
            tile has every `tiles`-th position of all rows, so the devices divide a tile as they divide the whole array.
            If `tiles` does not divide the number of positions, the last position is computed more than once.

    Returns:
        `run(params, *arrays)`, which returns the results of `fn` for all positions. `params` is any tree of arrays that
        `fn` needs in full, and `arrays` are arrays of (rows, positions, ...), such as hidden states and targets.

    Raises:
        TypeError: If `tiles` is no integer.
        ValueError: If `tiles` is below 1. `run` raises it if arrays have no dim 1 or different numbers of positions, or
            if `fn` returns an array without the positions of its tile.

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
            joined = lambda x: jnp.moveaxis(x, 0, 2).reshape(x.shape[1], -1, *x.shape[3:])[:, :positions]
            return jax.tree.map(joined, results)

        return block(over_tiles)(params, *arrays)

    return run


def positions_of(arrays: tuple) -> int:
    """Return the size of dim 1 (the positions) of all arrays. Raise a ValueError if the arrays have no common size."""
    shapes = [jnp.shape(x) for x in arrays]
    if not shapes or any(len(shape) < 2 for shape in shapes) or len({shape[1] for shape in shapes}) > 1:
        given = ", ".join(str(list(shape)) for shape in shapes) or "none"
        raise ValueError(
            f"tiled divides the positions of its arrays, on dim 1 and as many in each; the shapes are {given}. "
            f"Give arrays of (rows, positions, ...), and what every tile needs in full as `params`."
        )
    if not shapes[0][1]:
        raise ValueError(f"tiled divides positions, and the arrays have none: the first has shape {list(shapes[0])}.")
    return shapes[0][1]


def check_results(results: Any, extent: int) -> None:
    """Raise a ValueError unless each result has the positions of its tile on dim 1."""
    for path, x in jax.tree_util.tree_flatten_with_path(results)[0]:
        if jnp.ndim(x) < 2 or jnp.shape(x)[1] != extent:
            raise ValueError(
                f"A function given to tiled returns arrays of (rows, positions, ...), with the {extent} positions of "
                f"its tile on dim 1, but result{jax.tree_util.keystr(path)} has shape {list(jnp.shape(x))}. Take sums "
                f"and means over positions of what tiled returns."
            )


def summed_wide(w: Any) -> Any:
    """Return a parameter in at least float32, because a sum of many tiles' gradients in bfloat16 would lose bits."""
    dtype = jnp.result_type(w)
    return w.astype(common_dtype(dtype, jnp.float32)) if jnp.issubdtype(dtype, jnp.floating) else w


def split_positions(x: Array, tiles: int) -> Shaped[Array, "tiles rows extent ..."]:
    """Split positions into tiles. Padding repeats the last position, because `fn` might return NaN for zeros."""
    padding = [(0, 0), (0, -x.shape[1] % tiles), *[(0, 0)] * (x.ndim - 2)]
    x = jnp.pad(x, padding, mode="edge") if padding[1][1] else x
    return jnp.moveaxis(x.reshape(x.shape[0], -1, tiles, *x.shape[2:]), 2, 0)
