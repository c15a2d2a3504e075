"""The wrapped transformation's update as a function of lists, and its traces."""

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
    """Layouts of everything that an update reads and replaces.

    Attributes:
        grads: One `Leaf` per trained parameter, for its gradient and its update.
        state: One `Leaf` per leaf of the state.
        param_of: For each leaf of the state, the trained parameter that it mirrors, or None.
    """

    grads: tuple[Leaf, ...]
    state: tuple[Leaf, ...]
    param_of: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class FlatUpdate:
    """The wrapped transformation's update as a function of lists.

    With `applies`, it returns new parameters instead of updates, in the types they are stored in.
    """

    config: Config
    trained: Layout
    leaves: UpdatedLeaves
    state_def: jax.tree_util.PyTreeDef
    applies: bool = False

    def __call__(self, grads: list, state: list, params: list | None, extra: dict) -> tuple[list, list]:
        """Return `(updates, state)`, or `(params, state)` if it applies them."""
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
        """Return `trace(changed)`, which traces the update of these values or shapes.

        `changed` maps trained parameters to other shapes, which their state takes as well; see `_state_shape`. `trace`
        raises a `TransformationError` for every error of the transformation.
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
            # Equations remember the mesh of their context. Owners evaluate them in a shard_map, with another mesh.
            with jax.sharding.use_abstract_mesh(NO_MESH):
                return trace_update(update, of_params(grads), seen, of_params(params or []), arrays)

        return trace

    def _state_shape(self, k: int, changed: Mapping[int, tuple[int, ...]]) -> tuple[int, ...] | None:
        """Return another shape for a state leaf that has the shape, or the first dim, of a changed parameter."""
        i, leaf = self.leaves.param_of[k], self.leaves.state[k]
        if i is None or i not in changed:
            return None
        param, new = self.leaves.grads[i].shape, changed[i]
        if leaf.shape == param:
            return new
        return (new[0], *leaf.shape[1:]) if leaf.shape[:1] == param[:1] and new[1:] == param[1:] else None


def is_traced(x: Any) -> bool:
    """Return whether a further argument of an update is an array or stands for one. Other arguments are static."""
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct)


def _shaped(x: Any, shape: tuple[int, ...] | None = None) -> jax.ShapeDtypeStruct:
    """Return the shape and type of a value, or another shape in its type."""
    return jax.ShapeDtypeStruct(x.shape if shape is None else shape, x.dtype, weak_type=getattr(x, "weak_type", False))
