"""Loops over a stack of layers, as scans over the parameter itself, which stays sharded until its iteration.

`fori_loop` with `stack[i]`, and a scan over `jnp.arange`, have the stack as a constant, which would
be gathered before the loop: what the index is in each iteration is computed here with NumPy. What
is done to the stack before the loop, layer by layer (scaled, transposed, `tanh`), is done in it.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax import lax

from zerojax import compat, jaxprs
from zerojax.gather.sharded_param import narrower

_ARITHMETIC: Mapping[str, Callable] = MappingProxyType(
    {
        "add": lambda eqn, a, b: a + b,
        "sub": lambda eqn, a, b: a - b,
        "lt": lambda eqn, a, b: a < b,
        "select_n": lambda eqn, which, *cases: np.choose(which.astype(int), cases),
        "convert_element_type": lambda eqn, a: a.astype(eqn.params["new_dtype"]),
    }
)
_ELEMENTWISE = frozenset(
    "abs add convert_element_type cos div erf exp integer_pow logistic max min mul neg pow rsqrt sign sin sqrt square "
    "sub tanh".split()
)
_OF_SHARDS = frozenset({"slice", "dynamic_slice", "squeeze"})  # what `sharded_param` applies before the gather


@dataclasses.dataclass(frozen=True, eq=False)
class Derived:
    """A sharded parameter, or a value computed from such alone.

    Attributes:
        value: The array.
        eqn: What computed it; None for a parameter.
        operands: The equation's: `Derived`, or literals.
    """

    value: Any
    eqn: Any = None
    operands: tuple = ()

    @functools.cached_property
    def leaves(self) -> "tuple[Derived, ...] | None":
        """What to scan over so that an iteration can compute its row of this; None if it needs other rows."""
        if self.eqn is None or self.eqn.primitive.name in _OF_SHARDS or self._is_narrow_cast:
            return (self,)
        operands = [x.leaves for x in self.operands if isinstance(x, Derived)]
        if not self._is_by_row or None in operands:
            return None
        return tuple(dict.fromkeys(leaf for leaves in operands for leaf in leaves or ()))

    @property
    def _is_narrow_cast(self) -> bool:
        """Whether it is a parameter, cast before it is gathered."""
        of = self.operands[0]
        is_cast = self.eqn.primitive.name == "convert_element_type" and isinstance(of, Derived) and of.eqn is None
        return is_cast and narrower(self.value.dtype, of.value.dtype)

    @property
    def _is_by_row(self) -> bool:
        """Whether the equation leaves dim 0 alone."""
        name, shape = self.eqn.primitive.name, self.eqn.outvars[0].aval.shape
        if name == "transpose":
            return self.eqn.params["permutation"][0] == 0
        shapes = [atom.aval.shape for atom in self.eqn.invars]
        if name == "reshape":
            return len(shapes) == 1 and shape[:1] == shapes[0][:1]
        return name in _ELEMENTWISE and all(x in ((), shape) for x in shapes)

    def row(self, rows: dict) -> Any:
        """One row of this; `rows` has those of its leaves, and takes what is computed."""
        if self not in rows:
            rows[self] = self._computed(rows)
        return rows[self]

    def _computed(self, rows: dict) -> Any:
        values = [x.row(rows) if isinstance(x, Derived) else x for x in self.operands]
        if self.eqn.primitive.name == "transpose":
            return lax.transpose(values[0], [dim - 1 for dim in self.eqn.params["permutation"][1:]])
        if self.eqn.primitive.name == "reshape":
            return lax.reshape(values[0], self.eqn.outvars[0].aval.shape[1:])
        return compat.evaluate_one(self.eqn, values)[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Row:
    """What an iteration reads of a stack, in place of the stack.

    Attributes:
        value: The row.
    """

    value: Any


def over_stacks(eqn: Any, values: Sequence, counts: Collection) -> list | None:
    """Evaluate a scan over the parameters that the stacks it uses are made of.

    Args:
        eqn: The scan.
        values: Of its operands; `Derived` if they are made of sharded parameters.
        counts: Variables outside of the loop that are 0, 1, 2, ...

    Returns:
        Its results; None if it scans over parameters already.
    """
    scan = compat.scan_params(eqn)
    body, body_consts = compat.opened(scan.body)
    known, split = _counters(eqn, scan, body, counts), scan.consts + scan.carry

    def is_chosen(i, x) -> bool:
        if not isinstance(x, Derived) or not x.leaves:
            return False
        if any(array.value.shape[:1] != (scan.length,) for array in (x, *x.leaves)):
            return False
        return x.leaves != (x,) if i >= split else i < scan.consts and _only_row(body, body.invars[i], known)

    chosen = {i: x for i, x in enumerate(values) if is_chosen(i, x)}
    if not chosen:
        return None
    bare = [x.value if isinstance(x, Derived) else x for x in values]
    leaves = tuple(dict.fromkeys(leaf for x in chosen.values() for leaf in x.leaves or ()))
    sliced = [i for i in range(split, len(values)) if i not in chosen]

    def iteration(carry, slices):
        rows, rest = dict(zip(leaves, slices[0], strict=True)), slices[1]
        given = dict(enumerate(bare[: scan.consts])) | dict(enumerate(carry, scan.consts))
        given |= dict(zip(sliced, rest, strict=True))
        given |= {i: _Row(x.row(rows)) if i < scan.consts else x.row(rows) for i, x in chosen.items()}
        results = _with_rows(body, body_consts, [given[i] for i in range(len(values))])
        return results[: scan.carry], results[scan.carry :]

    scanned = [leaf.value for leaf in leaves], [bare[i] for i in sliced]
    options = {"length": scan.length, "reverse": scan.reverse, "unroll": scan.unroll}
    with compat.at_line_of(eqn):
        carry, stacked = lax.scan(iteration, bare[scan.consts : split], scanned, **options)
    return [*carry, *stacked]


def _counters(eqn, scan: compat.ScanParams, body, counts: Collection) -> dict:
    """Variables of the body that count the iterations: for each its value where row 0, 1, 2, ... is read."""
    made = {var: inner for inner in body.eqns for var in inner.outvars}
    step, known = np.arange(scan.length), {}
    for k in range(scan.consts, len(body.invars)):
        var, start = body.invars[k], eqn.invars[k]
        if k >= scan.consts + scan.carry:
            if not compat.is_literal(start) and start in counts:
                known[var] = step
        elif compat.is_literal(start) and np.shape(start.val) == () and np.dtype(var.aval.dtype).kind in "iu":
            adds = made.get(body.outvars[k - scan.consts])
            if adds is not None and adds.primitive.name == "add" and adds.invars[0] is var and _is_one(adds.invars[1]):
                known[var] = np.asarray(start.val) + (step[::-1] if scan.reverse else step)
    return known


def _is_one(atom) -> bool:
    return compat.is_literal(atom) and np.shape(atom.val) == () and atom.val == 1


def _only_row(body, stack, known: Mapping) -> bool:
    """Whether all that a loop's body does with a stack is to read the row of its iteration."""
    known = dict(known)
    for eqn in body.eqns:
        at = [i for i, atom in enumerate(eqn.invars) if atom is stack]
        values = [np.asarray(a.val) if compat.is_literal(a) else known.get(a) for a in eqn.invars]
        if at and (inner := compat.inlined_body(eqn)) is not None:
            inside = {var: x for var, x in zip(inner.invars, values, strict=True) if x is not None}
            if not all(_only_row(inner, inner.invars[i], inside) for i in at):
                return False
        elif at:
            if eqn.primitive.name != "dynamic_slice" or eqn.params["slice_sizes"] != (1, *stack.aval.shape[1:]):
                return False
            index = values[1]  # the other dims are read in full, wherever a clamped index begins
            if at != [0] or index is None or not np.array_equal(index, np.arange(stack.aval.shape[0])):
                return False
        elif (compute := _ARITHMETIC.get(eqn.primitive.name)) and all(x is not None for x in values):
            known[eqn.outvars[0]] = compute(eqn, *values)
    return stack not in jaxprs.variables_in(body.outvars)


def _with_rows(jaxpr, consts: Sequence, args: Sequence) -> list:
    """Evaluate a body that is given rows in place of stacks."""

    def rule(eqn, values):
        if not any(isinstance(value, _Row) for value in values):
            return None
        if eqn.primitive.name == "dynamic_slice":
            return [lax.expand_dims(values[0].value, [0])]
        if (called := compat.called(eqn)) is not None:
            return _with_rows(*compat.opened(called), values)
        body = lambda *values: _with_rows(*compat.opened(eqn.params["jaxpr"]), values)
        return jax.checkpoint(body, policy=eqn.params["policy"], prevent_cse=eqn.params["prevent_cse"])(*values)

    return jaxprs.evaluate(jaxpr, consts, args, rule)
