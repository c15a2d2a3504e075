"""Call or trace the wrapped transformation's update as a function of lists."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from zerojax.config import Config
from zerojax.layout.leaf import Leaf
from zerojax.layout.tree import Layout
from zerojax.optim.master_weights import wrapped_tx
from zerojax.optim.traced import TracedUpdate, trace_update
from zerojax.optim.transformation import check_new_state, guarded
from zerojax.placement.storage import cast

NO_MESH = jax.sharding.AbstractMesh((), ())


class UpdatedLeaves(NamedTuple):
    """The layouts of an update's gradients and state."""

    grads: tuple[Leaf, ...]  # one `Leaf` per trained parameter, for its gradient and its update
    state: tuple[Leaf, ...]  # one `Leaf` per leaf of the state
    # for each leaf of the state, the index of the trained parameter that the leaf mirrors, or None
    param_of: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class FlatUpdate:
    """The wrapped transformation's update as a function of lists.

    With `applies`, the function returns new parameters, in their stored types, instead of updates.
    """

    config: Config
    trained: Layout
    leaves: UpdatedLeaves
    state_def: jax.tree_util.PyTreeDef
    applies: bool = False

    def __call__(self, grads: list, state: list, params: list | None, extra: dict) -> tuple[list, list]:
        """Return `(updates, state)`, or the new `(params, state)` with `applies`."""
        tree: Any = self.trained.treedef
        old: Any = None if params is None else jax.tree.unflatten(tree, params)
        updates, new = wrapped_tx(self.config, self.trained).update(
            jax.tree.unflatten(tree, grads), jax.tree.unflatten(self.state_def, state), old, **extra
        )
        check_new_state(self.leaves.state, new)
        if self.applies:
            moved = updates if self.config.has_master_weights else optax.apply_updates(old, updates)
            updates = cast(jax.tree.leaves(moved), [leaf.dtype for leaf in self.trained.params])
        return jax.tree.leaves(updates), jax.tree.leaves(new)

    def tracer(self, grads: Sequence, state: Sequence, params: Sequence | None, extra: dict) -> Callable:
        """Return a function `trace(changed)` that traces the update for these values or shapes.

        `changed` maps the indices of some trained parameters to other shapes. Their state gets the shapes that
        `_state_shape` returns. If the transformation raises an error, `trace` raises a `TransformationError`.
        """
        numbers, tree = jax.tree.flatten(extra)
        fixed = [None if is_traced(x) else x for x in numbers]
        arrays = [_shaped(x) for x in numbers if is_traced(x)]

        def update(grads, state, moved, arrays):
            rest = iter(arrays)
            filled = [next(rest) if value is None else value for value in fixed]
            return guarded(self)(grads, state, None if params is None else moved, jax.tree.unflatten(tree, filled))

        def trace(changed: Mapping[int, tuple[int, ...]] = {}) -> TracedUpdate:
            of_params = lambda values: [_shaped(x, changed.get(i)) for i, x in enumerate(values)]
            seen = [_shaped(x, self._state_shape(k, changed)) for k, x in enumerate(state)]
            # Equations record the mesh of their context, and owners use another mesh. So trace without a mesh.
            with jax.sharding.use_abstract_mesh(NO_MESH):
                return trace_update(update, of_params(grads), seen, of_params(params or []), arrays)

        return trace

    def _state_shape(self, k: int, changed: Mapping[int, tuple[int, ...]]) -> tuple[int, ...] | None:
        """Return the new shape of state leaf `k` if its parameter is in `changed`, or None if the shape stays."""
        i, leaf = self.leaves.param_of[k], self.leaves.state[k]
        if i is None or i not in changed:
            return None
        param, new = self.leaves.grads[i].shape, changed[i]
        if leaf.shape == param:
            return new
        return (new[0], *leaf.shape[1:]) if leaf.shape[:1] == param[:1] and new[1:] == param[1:] else None


def is_traced(x: Any) -> bool:
    """Return whether an extra argument of an update is an array or an array's shape. Other arguments are static."""
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct)


def _shaped(x: Any, shape: tuple[int, ...] | None = None) -> jax.ShapeDtypeStruct:
    """Return a `ShapeDtypeStruct` with the type of `x`, and with `shape`, or the shape of `x` if `shape` is None."""
    return jax.ShapeDtypeStruct(x.shape if shape is None else shape, x.dtype, weak_type=getattr(x, "weak_type", False))
