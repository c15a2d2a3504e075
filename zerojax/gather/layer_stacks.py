"""Turn loops over a stack of layers into scans over the stacked parameter, so that an iteration gathers one layer.

`planner` calls `evaluated`, `combined` and `over_stacks` while it inlines the loss.

In a `fori_loop` with `stack[i]`, or a scan over `jnp.arange`, the stack is a constant of the loop. It would be gathered
before the loop. So this module computes the index of each iteration with NumPy, and makes a scan over the rows. It also
moves into the loop the equations that change the stack layer by layer before the loop (scale, mask, transpose, `tanh`).
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from zerojax import compat, jaxprs
from zerojax.gather.sharded_param import OF_STACKS, WEIGHT_ARITHMETIC, narrower

_LONGEST_LOOP = 2**16  # Arrays of more indices than this are not computed while tracing.
_OF_SHARDS = frozenset({"slice", "dynamic_slice", "squeeze"})  # `sharded_param` applies them before the gather.


@dataclasses.dataclass(frozen=True, eq=False)
class Derived:
    """A sharded parameter, a value computed from a parameter, or an array that may be combined with a parameter.

    Attributes:
        value: The array.
        eqn: The equation that computed it. None for a parameter, and for an array that needs no equation.
        operands: The operands of the equation: `Derived`, or scalars.
        of_params: Whether the value depends on a sharded parameter.
    """

    value: Any
    eqn: Any = None
    operands: tuple = ()
    of_params: bool = True

    @functools.cached_property
    def leaves(self) -> "tuple[Derived, ...] | None":
        """Return the values whose rows i are enough to compute row i of this value, or None if there are none."""
        if self._is_leaf:
            return (self,)
        if not self._is_by_row:
            return None
        leaves = [x.leaves for x in self._by_row]
        return None if None in leaves else tuple(dict.fromkeys(leaf for some in leaves for leaf in some or ()))

    @functools.cached_property
    def _is_leaf(self) -> bool:
        """Return whether a loop can scan over this value, because it stays sharded or depends on no parameter."""
        if self.eqn is None or self.eqn.primitive.name in _OF_SHARDS:
            return True
        operand, name = self.operands[0], self.eqn.primitive.name
        if name in ("concatenate", "stack"):
            return all(isinstance(x, Derived) for x in self.operands)
        if name in OF_STACKS:
            return isinstance(operand, Derived) and operand._is_leaf and not self._is_by_row
        is_cast = name == "convert_element_type" and isinstance(operand, Derived) and operand.eqn is None
        return is_cast and narrower(self.value.dtype, operand.value.dtype)

    @functools.cached_property
    def _is_by_row(self) -> bool:
        """Return whether the equation computes each row (index of dim 0) from the operands' rows at the same index."""
        name, shape = self.eqn.primitive.name, self.value.shape
        shapes = [np.shape(x.value if isinstance(x, Derived) else x) for x in self.operands]
        if name == "transpose":
            return self.eqn.params["permutation"][0] == 0
        if name == "reshape":
            return len(shapes) == 1 and shape[:1] == shapes[0][:1]
        return name == "broadcast_in_dim" or (
            name in WEIGHT_ARITHMETIC and all(len(x) in (0, len(shape)) for x in shapes)
        )

    @functools.cached_property
    def _by_row(self) -> "tuple[Derived, ...]":
        """Return the operands that have one row per row of this value."""
        if self.eqn.primitive.name == "broadcast_in_dim" and self.eqn.params["broadcast_dimensions"][:1] != (0,):
            return ()
        arrays = [x for x in self.operands if isinstance(x, Derived)]
        return tuple(x for x in arrays if x.value.shape[:1] == self.value.shape[:1])

    def row(self, rows: dict) -> Any:
        """Compute one row of this value. `rows` maps the leaves to their rows. Computed rows are added to `rows`."""
        if self not in rows:
            rows[self] = self._computed(rows)
        return rows[self]

    def _computed(self, rows: dict) -> Any:
        def of_operand(x):
            if not isinstance(x, Derived):
                return x
            if x in self._by_row:
                return x.row(rows)
            has_dim_0 = x.value.ndim and (dims is None or dims[0] == 0)
            return lax.squeeze(x.value, [0]) if has_dim_0 else x.value

        params, shape = self.eqn.params, self.value.shape[1:]
        dims = params.get("broadcast_dimensions")
        values = [of_operand(x) for x in self.operands]
        if self.eqn.primitive.name == "broadcast_in_dim":
            return lax.broadcast_in_dim(values[0], shape, [dim - 1 for dim in dims if dim])
        if self.eqn.primitive.name == "transpose":
            return lax.transpose(values[0], [dim - 1 for dim in params["permutation"][1:]])
        if self.eqn.primitive.name == "reshape":
            return lax.reshape(values[0], shape)
        return compat.evaluate_one(self.eqn, values)[0]


def combined(eqn: Any, values: Sequence, results: Sequence) -> list | None:
    """Wrap the result of an elementwise equation on a parameter and another value, or of a broadcast, as `Derived`.

    `values` are the operands' values, and `results` the resulting arrays. For any other equation, return None.
    """
    name, stacks = eqn.primitive.name, [x for x in values if isinstance(x, Derived) and x.of_params and x.leaves]
    of_params = name in WEIGHT_ARITHMETIC and any(x.value.shape == results[0].shape for x in stacks)
    if not of_params and not (name == "broadcast_in_dim" and results[0].ndim > 1):
        return None
    is_bare = lambda x: not isinstance(x, Derived) and np.ndim(x) > 0
    operands = tuple(Derived(x, of_params=False) if is_bare(x) else x for x in values)
    return [Derived(results[0], eqn, operands, of_params)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Row:
    """The row of a stack that an iteration reads. The loop's body is evaluated with the row instead of the stack."""

    value: Any


class _Rows(NamedTuple):
    """The rows of a stack that a loop reads. The first of `count` rows is `start`, and their distance is `step`."""

    start: int
    step: int
    count: int

    def of(self, stack: Any) -> Any:
        """Return these rows of a stack."""
        last = self.start + self.step * (self.count - 1)
        if self == (0, 1, stack.shape[0]):
            return stack
        rows = lax.slice_in_dim(stack, min(self.start, last), max(self.start, last) + 1, abs(self.step))
        return rows if self.step > 0 else lax.rev(rows, [0])


def over_stacks(eqn: Any, values: Sequence, known: Mapping) -> list | None:
    """Evaluate a loop as a scan over the parameters from which its stacks are computed.

    `values` are the operands' values. `known` has the NumPy values of some variables outside of the loop. Return None
    if `eqn` is not a loop, or if the loop needs no change.
    """
    loop = compat.loop_of(eqn)
    if loop is None:
        return None
    body, body_consts = compat.opened(loop.body)
    split = loop.consts + loop.carry
    counters = _counters(eqn, loop, body, known)

    def rows_read(i, x) -> _Rows | None:
        if not isinstance(x, Derived) or not x.leaves or not any(leaf.of_params for leaf in x.leaves):
            return None
        if any(leaf.value.shape[:1] != x.value.shape[:1] for leaf in x.leaves):
            return None
        if i >= split:
            return None if x.leaves == (x,) else _Rows(0, 1, loop.length)
        indices = _indices(body, body.invars[i], counters) if i < loop.consts and loop.length else None
        return _progression(indices, loop.length) if indices else None

    chosen = {i: rows for i, x in enumerate(values) if (rows := rows_read(i, x)) is not None}
    if not chosen:
        return None
    bare = [x.value if isinstance(x, Derived) else x for x in values]
    leaves = tuple(dict.fromkeys((leaf, rows) for i, rows in chosen.items() for leaf in values[i].leaves))
    sliced = [i for i in range(split, len(values)) if i not in chosen]

    def iteration(carry, slices):
        computed: dict[_Rows, dict] = {rows: {} for rows in chosen.values()}
        for (leaf, rows), row in zip(leaves, slices[0], strict=True):
            computed[rows][leaf] = row
        given = dict(enumerate(bare[: loop.consts])) | dict(enumerate(carry, loop.consts))
        given |= dict(zip(sliced, slices[1], strict=True))
        for i, rows in chosen.items():
            row = values[i].row(computed[rows])
            given[i] = _Row(row) if i < loop.consts else row
        results = _with_rows(body, body_consts, [given[i] for i in range(len(values))])
        return results[: loop.carry], results[loop.carry :]

    scanned = [rows.of(leaf.value) for leaf, rows in leaves], [bare[i] for i in sliced]
    options = {"length": loop.length, "reverse": loop.reverse, "unroll": loop.unroll}
    with compat.at_line_of(eqn):
        carry, stacked = lax.scan(iteration, bare[loop.consts : split], scanned, **options)
    return [*carry, *stacked]


def _progression(indices: Sequence[np.ndarray], length: int) -> _Rows | None:
    """Return the rows that a loop reads, or None if its reads differ, or the distances between rows are not equal.

    `indices` has, for each read, one index per iteration, or a scalar that is the same in all iterations.
    """
    index, *others = (np.broadcast_to(index, (length,)) for index in indices)
    index = index.astype(int)
    step = int(index[1] - index[0]) if index.size > 1 else 1
    rows = _Rows(int(index[0]), step, index.size)
    same = all(np.array_equal(index, other) for other in others)
    return rows if same and step and np.array_equal(index, rows.start + step * np.arange(index.size)) else None


def evaluated(eqn: Any, known: Mapping) -> np.ndarray | None:
    """Compute the result of an equation on known values (indices) with NumPy, or return None if that is impossible."""
    if len(eqn.outvars) != 1 or eqn.outvars[0].aval.size > _LONGEST_LOOP:
        return None
    return jaxprs.on_numpy(eqn, _known_operands(eqn, known))


def _known_operands(eqn: Any, known: Mapping) -> list:
    return [np.asarray(a.val) if compat.is_literal(a) else known.get(a) for a in eqn.invars]


def _counters(eqn, loop: compat.LoopEqn, body, known: Mapping) -> dict:
    """Return the known values of the body's arguments, which are counters in the carry and rows of known stacks.

    Each argument has one value per iteration, in the order of the stacks' rows. A reversed loop begins with the last
    row.
    """
    made = {var: inner for inner in body.eqns for var in inner.outvars}
    is_one = lambda atom: compat.is_literal(atom) and np.shape(atom.val) == () and atom.val == 1
    step, counters = np.arange(loop.length), {}
    for k in range(loop.consts, len(body.invars)):
        var, start = body.invars[k], eqn.invars[k]
        if k >= loop.consts + loop.carry:
            if not compat.is_literal(start) and start in known:
                counters[var] = known[start]
        elif compat.is_literal(start) and np.shape(start.val) == () and np.dtype(var.aval.dtype).kind in "iu":
            adds = made.get(body.outvars[k - loop.consts])
            if adds is not None and adds.primitive.name == "add" and adds.invars[0] is var and is_one(adds.invars[1]):
                counters[var] = np.asarray(start.val) + (step[::-1] if loop.reverse else step)
    return counters


def _indices(body, stack, known: Mapping) -> list[np.ndarray] | None:
    """Return, for each read of `stack`, the index in each iteration. Return None if `body` uses `stack` otherwise."""
    known, indices = dict(known), []
    for eqn in body.eqns:
        at = [i for i, atom in enumerate(eqn.invars) if atom is stack]
        values = _known_operands(eqn, known)
        if at and (inner := compat.inlined_body(eqn)) is not None:
            inside = {var: x for var, x in zip(inner.invars, values, strict=True) if x is not None}
            reads = [_indices(inner, inner.invars[i], inside) for i in at]
            if None in reads:
                return None
            indices += [index for some in reads for index in some or ()]
        elif at:
            if eqn.primitive.name != "dynamic_slice" or eqn.params["slice_sizes"] != (1, *stack.aval.shape[1:]):
                return None
            if at != [0] or values[1] is None:  # Other dims are read in full, so their clamped index is 0.
                return None
            indices.append(np.clip(values[1], 0, stack.aval.shape[0] - 1))
        elif (value := evaluated(eqn, known)) is not None:
            known[eqn.outvars[0]] = value
    return None if stack in jaxprs.variables_in(body.outvars) else indices


def _with_rows(jaxpr, consts: Sequence, args: Sequence) -> list:
    """Evaluate a loop's body, given a `_Row` instead of each stack."""

    def rule(eqn, values):
        if not any(isinstance(value, _Row) for value in values):
            return None
        if eqn.primitive.name == "dynamic_slice":
            return [lax.expand_dims(values[0].value, [0])]
        if (called := compat.called(eqn)) is not None:
            return _with_rows(*compat.opened(called), values)
        return jaxprs.evaluate_remat(eqn, values, _with_rows)

    return jaxprs.evaluate(jaxpr, consts, args, rule)
