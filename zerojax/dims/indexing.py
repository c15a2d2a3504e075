"""Rules for slices, gathers and scatters whose indices are operands. They are a part of the table of rules."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from zerojax import compat, jaxprs
from zerojax.dims.mixing import cut
from zerojax.dims.moves import PlaceRule
from zerojax.dims.place import NOWHERE, UNKNOWN, Context, Place, Places, RowDims, is_index, one_per_dim
from zerojax.primitives import Kind, of_kind

_MOST_EVALUATED = 1 << 20  # Constant indices with more elements than this are not computed.


def dynamic_slice_rule(eqn: Any, row_dims: Sequence[RowDims], context: Context) -> RowDims:
    """Find the followed dim after `dynamic_slice`: unknown if the slice cuts it, or if a start depends on the rows."""
    operand, *starts = row_dims
    if any(start is None or start.places for start in starts):
        return UNKNOWN
    old = eqn.invars[0].aval.shape
    return cut(operand, old, eqn.outvars[0].aval.shape, [None] * len(old))


def dynamic_update_slice_rule(eqn: Any, row_dims: Sequence[RowDims], context: Context) -> RowDims:
    """Find the followed dim after `dynamic_update_slice`, which is unknown if the update covers only a part of it."""
    operand, update, *starts = row_dims
    old, new = (atom.aval.shape for atom in eqn.invars[:2])
    if operand is None or update is None or any(start is None or start.places for start in starts):
        return UNKNOWN
    places = operand.places or update.places
    whole = all(old[place.dim] == new[place.dim] for place in places)
    agree = not operand.places or operand.places == update.places or not update.places
    return Places(places) if whole and agree else UNKNOWN


def gather_rule(eqn: Any, row_dims: Sequence[RowDims], context: Context) -> RowDims:
    """Find the followed dim after `gather`: in dims of the indices, and in operand dims that are read completely."""
    operand, indices = row_dims
    if operand is None or indices is None:
        return UNKNOWN
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape, ndim = eqn.invars[0].aval.shape, len(eqn.outvars[0].aval.shape)
    batching = tuple(map(int, numbers.operand_batching_dims))
    kept = [d for d in range(len(shape)) if d not in numbers.collapsed_slice_dims and d not in batching]
    windows = dict(zip(kept, map(int, numbers.offset_dims), strict=True))
    batch = [d for d in range(ndim) if d not in numbers.offset_dims]
    index_map, found = list(map(int, numbers.start_index_map)), set()
    for place in operand.places:
        dim = place.dim
        if dim in windows and sizes[dim] == shape[dim]:
            found.add(place.to(windows[dim]))
        elif dim in batching:
            paired = int(numbers.start_indices_batching_dims[batching.index(dim)])
            found.add(place.to(batch[paired]))
        elif place.outer == 1 and (at := _dim_counting(eqn, indices, dim, index_map, context)) is not None:
            found.add(Place(batch[at]))
        else:
            return UNKNOWN
    for place in indices.places:
        if place.dim == len(batch):  # the dim of the numbers that form one index
            return UNKNOWN
        found.add(place.to(batch[place.dim]))
    return one_per_dim(found)


def scatter_rule(eqn: Any, row_dims: Sequence[RowDims], context: Context) -> RowDims:
    """Find the followed dim in the result of a scatter. If the scatter sums over this dim, the result has no place."""
    operand, indices, updates = row_dims
    if operand is None or indices is None or updates is None:
        return UNKNOWN
    numbers, shapes = eqn.params["dimension_numbers"], [atom.aval.shape for atom in eqn.invars]
    batching = tuple(map(int, numbers.operand_batching_dims))
    kept = [d for d in range(len(shapes[0])) if d not in numbers.inserted_window_dims and d not in batching]
    windows = dict(zip(map(int, numbers.update_window_dims), kept, strict=True))
    scattered = [d for d in range(len(shapes[2])) if d not in windows]
    paired = dict(zip(map(int, numbers.scatter_indices_batching_dims), batching, strict=True))
    found, summed = set(), False
    of_indices = {place.to(scattered[place.dim]) for place in indices.places if place.dim < len(scattered)}
    if len(of_indices) < len(indices.places):
        return UNKNOWN
    for place in updates.places | of_indices:
        dim = place.dim
        if dim in windows:
            if shapes[2][dim] != shapes[0][windows[dim]]:
                return UNKNOWN
            found.add(place.to(windows[dim]))
        elif (at_index := scattered.index(dim)) in paired:
            found.add(place.to(paired[at_index]))
        elif place.outer == 1 and (counted := _dim_counted(eqn, indices, at_index, context)) is not None:
            found.add(Place(counted))
        else:
            summed = True
    if summed and jaxprs.facts(eqn).reduction is None:
        return UNKNOWN  # The result depends on the order of several updates of one element.
    if operand.places and not operand.places <= found:
        return UNKNOWN
    return one_per_dim(found)


def _dim_counted(eqn: Any, rows: Places, dim: int, context: Context) -> int | None:
    """Return the operand dim that a scatter indexes with 0, 1, 2, ... along dim `dim` of its indices, or None."""
    to_operand = list(map(int, eqn.params["dimension_numbers"].scatter_dims_to_operand_dims))
    return next((d for d in to_operand if _dim_counting(eqn, rows, d, to_operand, context) == dim), None)


def _dim_counting(eqn: Any, rows: Places, dim: int, index_map: Sequence[int], context: Context) -> int | None:
    """Return the dim of the indices along which a gather or scatter reads dim `dim` of the operand at 0, 1, 2, ...

    In `x[jnp.arange(4), labels]`, for example, this is dim 0 of the indices for dim 0 of `x`. `rows` has the row dims
    of the indices, and `index_map` the operand dim for each part of an index. Return None if there is no such dim.
    """
    operand, indices = eqn.invars[:2]
    if dim not in index_map or compat.is_literal(indices) or indices.aval.shape[-1] != len(index_map):
        return None
    part, found = index_map.index(dim), rows.counting or _counting(indices, context)
    size = operand.aval.shape[dim]
    return next((at for of, at in found if of in (part, None) and indices.aval.shape[at] == size), None)


def _counting(indices: Any, context: Context) -> frozenset[tuple[int | None, int]]:
    """Return the pairs `(part, dim)` of `Places.counting` for an array of integers."""
    if (values := _constant(indices, context)) is not None:
        dim = _dim_of(values)
        return frozenset() if dim is None else frozenset({(None, dim)})
    eqn = context.made.get(indices)
    if eqn is None or eqn.primitive.name != "concatenate" or any(atom.aval.shape[-1] != 1 for atom in eqn.invars):
        return frozenset()
    parts = [_constant(piece, context) for piece in eqn.invars]
    dims = [None if values is None else _dim_of(values[..., 0]) for values in parts]
    return frozenset((part, dim) for part, dim in enumerate(dims) if dim is not None)


def _dim_of(values: np.ndarray) -> int | None:
    """Return the dim along which the entries are 0, 1, 2, ..., if they are equal along all other dims, or None."""
    for dim, size in enumerate(values.shape):
        if size > 1 and np.array_equal(values, _counted_along(dim, values.shape)):
            return dim
    return None


def _counted_along(dim: int, shape: Sequence[int]) -> np.ndarray:
    return _broadcast(np.arange(shape[dim]), shape, [dim])


def noted(atoms: Sequence, row_dims: Sequence[RowDims], context: Context) -> list[RowDims]:
    """Add `Places.counting` to the row dims of index arrays that enter or leave a function.

    A backward pass needs this note: it gets the indices of a gather as a residual, and not how they were computed.
    """
    return [
        dataclasses.replace(rows, counting=found)
        if rows is not None and not rows.counting and is_index(atom) and (found := _counting(atom, context))
        else rows
        for atom, rows in zip(atoms, row_dims, strict=True)
    ]


def known(variables: Sequence, row_dims: Sequence[RowDims]) -> dict[Any, np.ndarray]:
    """Map each of the `variables` to its value if `Places.counting` determines all of its entries."""
    return {
        var: _counted_along(dim, var.aval.shape)
        for var, rows in zip(variables, row_dims, strict=True)
        for part, dim in (() if rows is None else rows.counting)
        if part is None
    }


def _constant(atom: Any, context: Context) -> np.ndarray | None:
    """Return the value of an integer array that depends on no argument, or None if it cannot be computed here."""
    if compat.is_literal(atom):
        return np.asarray(atom.val)
    eqn = context.made.get(atom)
    if eqn is None or atom.aval.size > _MOST_EVALUATED:
        return context.known.get(atom)
    # PRNG keys and bfloat16 are not NumPy types.
    if getattr(eqn.outvars[0].aval.dtype, "kind", "") not in tuple("biuf") or eqn.primitive.name not in _ON_NUMPY:
        return None
    values = []
    for operand in eqn.invars:
        if (value := _constant(operand, context)) is None:  # Stop at once: most arrays depend on an argument.
            return None
        values.append(value)
    return _ON_NUMPY[eqn.primitive.name](eqn, *values)


def _broadcast(value: np.ndarray, shape: Sequence[int], dims: Sequence[int]) -> np.ndarray:
    return np.broadcast_to(np.expand_dims(value, [dim for dim in range(len(shape)) if dim not in dims]), shape)


_ON_NUMPY: Mapping[str, Callable[..., np.ndarray]] = MappingProxyType(
    {
        "add": lambda eqn, a, b: a + b,
        "broadcast_in_dim": lambda eqn, a: _broadcast(a, eqn.outvars[0].aval.shape, eqn.params["broadcast_dimensions"]),
        "convert_element_type": lambda eqn, a: a.astype(eqn.params["new_dtype"]),
        "ge": lambda eqn, a, b: a >= b,
        "iota": lambda eqn: _counted_along(eqn.params["dimension"], eqn.params["shape"]).astype(eqn.params["dtype"]),
        "lt": lambda eqn, a, b: a < b,
        "mul": lambda eqn, a, b: a * b,
        "reshape": lambda eqn, a: a.reshape(eqn.outvars[0].aval.shape),
        "rev": lambda eqn, a: np.flip(a, eqn.params["dimensions"]),
        "select_n": lambda eqn, which, *cases: np.choose(which.astype(int), cases),
        "sub": lambda eqn, a, b: a - b,
    }
)


def iota_rule(eqn: Any, row_dims: Sequence[RowDims], context: Context) -> RowDims:
    dims = set(range(len(eqn.outvars[0].aval.shape))) - {int(eqn.params["dimension"])}
    return Places(uniform=frozenset(dims)) if dims else NOWHERE


RULES: dict[str, PlaceRule] = {
    "dynamic_slice": dynamic_slice_rule,
    "dynamic_update_slice": dynamic_update_slice_rule,
    "gather": gather_rule,
    "iota": iota_rule,
    **dict.fromkeys(of_kind(Kind.SCATTER), scatter_rule),
}
