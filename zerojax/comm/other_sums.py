"""Find the dims over which equations other than products of matrices sum, and those of all if rows are unknown."""

from collections.abc import Iterator, Sequence
from typing import Any

from zerojax.dims import NOWHERE, Place, Places, State, at


def contracted(eqn: Any) -> list[tuple[int, int]]:
    """Return the pairs of dims over which a product of two operands sums, for every worker alike."""
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        return [*zip(*params["dimension_numbers"][0], strict=True)]
    if name == "ragged_dot_general":
        numbers = params["ragged_dot_dimension_numbers"]
        lhs, rhs = numbers.dot_dimension_numbers[0]
        is_flat = len(eqn.invars[2].aval.shape) == 1  # one size per group, for all batch dims
        return [(i, j) for i, j in zip(lhs, rhs, strict=True) if is_flat and i in numbers.lhs_ragged_dimensions]
    if name == "conv_general_dilated" and params["feature_group_count"] == 1:
        # In the gradient of a kernel, the feature dim of the convolution holds the rows.
        numbers = params["dimension_numbers"]
        return [(numbers.lhs_spec[1], numbers.rhs_spec[1])]
    return []


def scattered(eqn: Any, states: Sequence[Places]) -> tuple[Place | None, ...] | None:
    """Return the places of the rows in a scatter-add into zeros, or None. The indices may have no rows."""
    _, indices, updates = states
    numbers = eqn.params["dimension_numbers"]
    place = next(iter({*indices.places} or {*updates.places}), None)
    if place is None or place.is_split or getattr(numbers, "operand_batching_dims", ()):
        return None
    summed = [d for d in range(len(eqn.invars[2].aval.shape)) if d not in numbers.update_window_dims]
    if indices.places:
        return (None, place, place.to(summed[place.dim])) if place.dim < len(summed) else None
    return (None, place.to(summed.index(place.dim)), place) if place.dim in summed else None


def assumed(eqn: Any, states: Sequence[State]) -> Iterator[list[Places]]:
    """Yield states to assume for the operands of an equation that sums over unknown dims, the most likely first."""
    if eqn.primitive.name == "reduce_sum":
        yield [at(0)]
    elif eqn.primitive.name == "scatter-add":
        yield [NOWHERE, NOWHERE, at(0)]
    else:
        yield [NOWHERE if state is None else state for state in states[:2]]
        yield from ([at(int(i)), at(int(j))] for i, j in contracted(eqn))
