"""Move the equations that change a stack of layers before a scan into the scan, so that an iteration gathers one layer.

`planner` calls `combined` and `over_stacks` while it inlines the loss.

A stack that is scaled, masked, transposed or passed through `tanh` before a scan over it would be gathered for that
equation. So the scan runs over the parameter itself, and each iteration computes its own layer. A loop that reads
`stack[i]` is not a scan over the stack: it gathers the whole stack.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from zerojax import compat, jaxprs, names
from zerojax.gather.sharded_param import OF_STACKS, WEIGHT_ARITHMETIC, narrower

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
        """Return values from whose rows i row i of this value can be computed. None if there are no such values."""
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
        with names.at(self.eqn):
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


def over_stacks(eqn: Any, values: Sequence) -> list | None:
    """Evaluate a scan over stacks that are computed from parameters as a scan over the parameters.

    `values` are the operands' values. Return None if `eqn` is not a loop, or if the loop needs no change.
    """
    loop = compat.loop_of(eqn)
    if loop is None:
        return None
    split = loop.consts + loop.carry

    def is_computed(i, x) -> bool:
        if i < split or not isinstance(x, Derived) or not x.leaves or x.leaves == (x,):
            return False
        leaves = x.leaves
        return any(leaf.of_params for leaf in leaves) and all(
            leaf.value.shape[:1] == x.value.shape[:1] for leaf in leaves
        )

    chosen = [i for i, x in enumerate(values) if is_computed(i, x)]
    if not chosen:
        return None
    bare = [x.value if isinstance(x, Derived) else x for x in values]
    leaves = tuple(dict.fromkeys(leaf for i in chosen for leaf in values[i].leaves))
    sliced = [i for i in range(split, len(values)) if i not in chosen]
    body, body_consts = compat.opened(loop.body)

    def iteration(carry, slices):
        computed = dict(zip(leaves, slices[0], strict=True))
        given = dict(enumerate(bare[: loop.consts])) | dict(enumerate(carry, loop.consts))
        given |= dict(zip(sliced, slices[1], strict=True)) | {i: values[i].row(computed) for i in chosen}
        results = jaxprs.evaluate(body, body_consts, [given[i] for i in range(len(values))], lambda *_: None)
        return results[: loop.carry], results[loop.carry :]

    scanned = [leaf.value for leaf in leaves], [bare[i] for i in sliced]
    options = {"length": loop.length, "reverse": loop.reverse, "unroll": loop.unroll}
    carry, stacked = lax.scan(iteration, bare[loop.consts : split], scanned, **options)
    return [*carry, *stacked]
