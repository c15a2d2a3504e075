"""Rules for primitives that cut, join or mix the entries along some dims. They are a part of the table of rules."""

from collections.abc import Sequence
from typing import Any

from zerojax.dims.moves import PlaceRule, agree, without
from zerojax.dims.place import NOWHERE, UNKNOWN, Context, Place, Places, RowDims, off, ragged, renumbered, together
from zerojax.primitives import ROWS, Kind, of_kind


def slice_rule(eqn: Any, row_dims: Sequence[RowDims], context: Context) -> RowDims:
    params, rows = eqn.params, row_dims[0]
    old, new, strides = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, params["strides"]
    if rows is not None and strides and any(strides[place.dim] != 1 for place in rows.places):
        return UNKNOWN
    return cut(rows, old, new, params["start_indices"])


def cut(rows: RowDims, old: Sequence[int], new: Sequence[int], starts: Sequence[int | None]) -> RowDims:
    """Find the followed dim after a slice, from the shapes `old` and `new`. In `starts`, None is an unknown start.

    Return UNKNOWN if the slice cuts the followed dim at an unknown start, or inside of a block (`Place.outer`).
    """
    if rows is None:
        return UNKNOWN
    places = set()
    for place in rows.places:
        block, start, size = old[place.dim] // place.outer, starts[place.dim], new[place.dim]
        is_whole = old[place.dim] == size
        if not is_whole and (start is None or start % block or size % block):
            return UNKNOWN
        places.add(place if is_whole else _with_blocks(place, size // block))
    return Places(frozenset(places), rows.uniform)


def concatenate_rule(eqn: Any, row_dims: Sequence[RowDims], context: Context) -> RowDims:
    """Find the followed dim after `concatenate`.

    If the operands are joined along the followed dim, and their sizes or places differ, the answer is unknown.
    """
    dim = int(eqn.params["dimension"])
    sizes = [int(atom.aval.shape[dim]) for atom in eqn.invars]
    row_dims = [rows for rows, size in zip(row_dims, sizes, strict=True) if size] or [NOWHERE]
    rows = ragged(together(row_dims), (dim,))
    if rows is None or len(row_dims) == 1 or (place := rows.along(dim)) is None:
        return rows
    if len({*sizes} - {0}) > 1 or any(s is None or s.along(dim) != place for s in row_dims):
        return UNKNOWN
    return _replaced(rows, place, place.outer * len(row_dims))


def pad_rule(eqn: Any, row_dims: Sequence[RowDims], context: Context) -> RowDims:
    """Find the followed dim after `pad`: unknown if this dim is padded, except by whole blocks (`Place.outer`)."""
    rows = ragged(row_dims[0], [d for d, config in enumerate(eqn.params["padding_config"]) if any(config)])
    for dim, (low, high, inside) in enumerate(eqn.params["padding_config"]):
        place = None if rows is None else rows.along(dim)
        if rows is not None and place is not None and (low or high or inside):
            block = eqn.invars[0].aval.shape[dim] // place.outer
            if inside or low % block or high % block or low < 0 or high < 0:
                return UNKNOWN
            rows = _replaced(rows, place, place.outer + (low + high) // block)
    return rows


def _with_blocks(place: Place, blocks: int) -> Place:
    return Place(place.dim, blocks, joined=blocks > 1)


def _replaced(rows: Places, place: Place, blocks: int) -> Places:
    return Places(rows.places - {place} | {_with_blocks(place, blocks)}, rows.uniform)


def split_rule(eqn: Any, row_dims: Sequence[RowDims], context: Context) -> list[RowDims]:
    axis, start, slices = int(eqn.params["axis"]), 0, []
    old = eqn.invars[0].aval.shape
    for size in eqn.params["sizes"]:
        new = (*old[:axis], size, *old[axis + 1 :])
        slices.append(cut(row_dims[0], old, new, [start if dim == axis else 0 for dim in range(len(old))]))
        start += int(size)
    return slices


def stack_rule(eqn: Any, row_dims: Sequence[RowDims], context: Context) -> RowDims:
    axis, ndim = int(eqn.params["axis"]), len(eqn.invars[0].aval.shape)
    return renumbered(together(row_dims), [dim + (dim >= axis) for dim in range(ndim)])


def unstack_rule(eqn: Any, row_dims: Sequence[RowDims], context: Context) -> list[RowDims]:
    axes, ndim = (eqn.params["axis"],), len(eqn.invars[0].aval.shape)
    return [renumbered(off(axes, row_dims[0]), without(axes, ndim))] * len(eqn.outvars)


def tile_rule(eqn: Any, row_dims: Sequence[RowDims], context: Context) -> RowDims:
    repeated = [dim for dim, times in enumerate(eqn.params["reps"]) if times != 1]
    adds_dims = len(eqn.params["reps"]) != len(eqn.invars[0].aval.shape)
    return UNKNOWN if adds_dims else ragged(off(repeated, row_dims[0]), repeated)


def along_rule(eqn: Any, row_dims: Sequence[RowDims], context: Context) -> list[RowDims]:
    """Find the followed dim after an operation along one dim, such as a sort: unknown if this is the followed dim."""
    names, ndim = ("axis", "dimension", "reduction_dimension"), len(eqn.invars[0].aval.shape)
    axis = next((int(eqn.params[name]) for name in names if name in eqn.params), -1)
    dims = eqn.params.get("dimensions", (axis % ndim,))
    return [ragged(off(dims, together(row_dims)), dims)] * len(eqn.outvars)


def window_rule(eqn: Any, row_dims: Sequence[RowDims], context: Context) -> RowDims | list[RowDims]:
    slid = [dim for dim, size in enumerate(eqn.params["window_dimensions"]) if size != 1]
    rows = off(slid, _of_arrays(eqn, row_dims))
    return [rows if rows is None else Places(rows.places)] * len(eqn.outvars)


def batched(rows: RowDims, ndim: int) -> RowDims:
    """Return row dims after elements are mixed along the dims from `ndim` on: UNKNOWN if one of these holds rows."""
    if rows is None or any(place.dim >= ndim for place in rows.places):
        return UNKNOWN
    return Places(rows.places)


def _of_arrays(eqn: Any, row_dims: Sequence[RowDims]) -> RowDims:
    return together([s for s, atom in zip(row_dims, eqn.invars, strict=True) if atom.aval.shape] or [NOWHERE])


def convolution_rule(eqn: Any, row_dims: Sequence[RowDims], context: Context) -> RowDims:
    """Find the followed dim after a convolution. In an operand, it may be the batch dim or a feature dim."""
    lhs, rhs = row_dims
    if lhs is None or rhs is None:
        return UNKNOWN
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    (batch_of_lhs, features, *_), (out_features, in_features, *_) = numbers.lhs_spec, numbers.rhs_spec
    batch_of_out, features_of_out = numbers.out_spec[:2]
    grouped = params["feature_group_count"] > 1
    found = set()
    for place in lhs.places:
        if place.dim == batch_of_lhs and params["batch_group_count"] == 1 and (not rhs.places or grouped):
            found.add(place.to(batch_of_out))
        elif place.dim == features and not grouped and agree(lhs, rhs, features, in_features):
            continue
        elif place.dim == features and _in_groups(place, rhs.along(out_features), params, context):
            found.add(Place(features_of_out))
        else:
            return UNKNOWN
    for place in rhs.places:
        if place.dim == out_features and (not grouped or Place(features_of_out) in found or not lhs.places):
            if grouped and not _in_groups(place, place, params, context):
                return UNKNOWN
            found.add(place.to(features_of_out))
        elif place.dim != in_features or grouped or not agree(lhs, rhs, features, in_features):
            return UNKNOWN
    return Places(frozenset(found))


def _in_groups(lhs: Place, rhs: Place | None, params: Any, context: Context) -> bool:
    return lhs.outer == 1 and (rhs is None or rhs.outer == 1) and params["feature_group_count"] % context.count == 0


def decomposition_rule(eqn: Any, row_dims: Sequence[RowDims], context: Context) -> list[RowDims]:
    ndim = min(len(atom.aval.shape) for atom in eqn.invars)
    rows = batched(together(row_dims), ndim - 2)
    return [rows] * len(eqn.outvars)


def attention_rule(eqn: Any, row_dims: Sequence[RowDims], context: Context) -> RowDims:
    """Find the followed dim after fused attention. Dim 0 of every operand and result is a batch dim."""
    return batched(_of_arrays(eqn, row_dims), 1)


def bitcast_rule(eqn: Any, row_dims: Sequence[RowDims], context: Context) -> RowDims:
    """Find the followed dim after a bitcast, which may add or remove a last dim."""
    return batched(row_dims[0], min(len(atom.aval.shape) for atom in (eqn.invars[0], eqn.outvars[0])))


RULES: dict[str, PlaceRule] = {
    **dict.fromkeys(of_kind(Kind.ALONG), along_rule),
    **dict.fromkeys(of_kind(Kind.DECOMPOSITION), decomposition_rule),
    **dict.fromkeys(of_kind(Kind.KEYS), lambda eqn, rows, _: batched(_of_arrays(eqn, rows), eqn.outvars[0].aval.ndim)),
    **dict.fromkeys(of_kind(Kind.WINDOW), window_rule),
    "bitcast_convert_type": bitcast_rule,
    "concatenate": concatenate_rule,
    "conv_general_dilated": convolution_rule,
    "dot_product_attention_bwd_wrapper": attention_rule,
    "dot_product_attention_fwd_wrapper": attention_rule,
    "fft": lambda eqn, rows, _: batched(rows[0], eqn.invars[0].aval.ndim - len(eqn.params["fft_lengths"])),
    "pad": pad_rule,
    "rev": along_rule,
    "slice": slice_rule,
    "split": split_rule,
    "stack": stack_rule,
    "tile": tile_rule,
    "unstack": unstack_rule,
    ROWS: lambda eqn, row_dims, context: list(row_dims),  # for a `Follower` that does not guess: it proves nothing
}
