"""Call the wrapped transformation on lists of arrays (`FlatUpdate`), with the loss as an extra argument.

A step runs a `FlatUpdate`, and the analyses for a sharding plan trace it. In such a trace, `guarded` turns errors of
the transformation into a `TransformationError`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jaxtyping import PyTree

from zerojax.config import Config
from zerojax.layout.leaf import Leaf
from zerojax.layout.tree import Layout
from zerojax.placement.problems import tree_difference
from zerojax.placement.storage import cast

NOTE = (
    "The transformation that zero_shard wraps was called with gradients in the tree of its trained parameters. If it "
    "needs the gradients of a part of them, as optax.lookahead does, let it wrap zero_shard, in a loop of your own: "
    "optax.lookahead(zero_shard(tx, ...), ...)."
)
UNEXPECTED = "unexpected keyword argument 'value'"  # Python's message
# Equations record the mesh of their context, and owners use another mesh. So an analysis traces without a mesh.
NO_MESH = jax.sharding.AbstractMesh((), ())


class TransformationError(Exception):
    """An analysis could not trace the wrapped transformation. `__cause__` is the transformation's error."""


def guarded(update: Callable) -> Callable:
    """Return a function that calls `update`, and raises a `TransformationError` if `update` raises any error.

    An analysis traces the transformation with fewer arguments, or in other shapes, than training does. If the
    transformation refuses them, the analysis has no result, and the plan reports this. An error of the analysis
    itself is a bug, and must not silently replicate a leaf. So an analysis catches only a `TransformationError`.
    """

    def call(*args: Any, **keywords: Any) -> Any:
        try:
            return update(*args, **keywords)
        except Exception as error:
            raise TransformationError(f"{type(error).__name__}: {error}") from error

    return call


def with_extra_args(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return the transformation with an `update` that accepts the loss as `value=`.

    A training step gives every transformation the loss. optax drops the loss if a transformation takes no extra
    arguments. But a transformation that takes other extra arguments, such as `optax.contrib.sam`, raises a `TypeError`,
    alone or in a chain. The signature of `update` does not help, because a chain takes any argument. So after this
    error, the update is called again without the loss.
    """
    supported = optax.with_extra_args_support(tx)

    def noted(*args, **extra):
        try:
            return supported.update(*args, **extra)
        except (AttributeError, TypeError, ValueError) as error:
            error.add_note(NOTE)
            raise

    def update(updates, state, params=None, **extra):
        try:
            return noted(updates, state, params, **extra)
        except TypeError as error:
            if "value" not in extra or UNEXPECTED not in str(error):
                raise
        del extra["value"]
        return noted(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(supported.init, update)  # pyright: ignore[reportArgumentType]


def check_new_state(leaves: Sequence[Leaf], state: PyTree) -> None:
    """Raise a `ValueError` if `update` returned a state with other paths than the state that `init` made."""
    found = jax.tree_util.tree_leaves_with_path(state)
    if [jax.tree_util.keystr(path) for path, _ in found] != [leaf.path for leaf in leaves]:
        raise ValueError(
            f"The transformation changes the tree of its state: what update returns {tree_difference(found, leaves)}, "
            f"and init did not. How the state is sharded is planned from init: let it return a state of the same tree."
        )


def wrapped_tx(config: Config, trained: Layout, *, encodes: bool = True) -> optax.GradientTransformationExtraArgs:
    """Return the user's transformation, wrapped to encode its state and to update master weights if `config` says so.

    With master weights, its `update` returns new parameters, not increments. If `encodes` is false, all state is wide.
    """
    inner = with_extra_args(config.tx)
    if encodes and config.state is not None:
        from zerojax.narrow_state.encoded_state import with_encoded_state

        inner = with_encoded_state(inner, config, trained)
    if not config.has_master_weights:
        return inner
    from zerojax.optim.master_weights import master_forms, with_master_weights

    return with_master_weights(inner, master_forms(config, trained, encodes=encodes))


def new_params(config: Config, trained: Layout, results: list, params: Any) -> list:
    """Return new parameters, in their stored types, from the results of an update of `params`."""
    moved: Any = results if config.has_master_weights else optax.apply_updates(params, results)
    return cast(moved, [leaf.dtype for leaf in trained.params])


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
        if jax.tree.structure(updates) != tree:
            found = jax.tree_util.tree_leaves_with_path(updates)
            raise ValueError(
                f"The transformation changes the tree of its updates: what update returns "
                f"{tree_difference(found, self.leaves.grads)}. Let it return a tree like that of the gradients, as "
                f"optax.apply_updates needs it."
            )
        leaves = jax.tree.leaves(updates)
        if self.applies:
            leaves = new_params(self.config, self.trained, leaves, params)
        return leaves, jax.tree.leaves(new)

    @property
    def may_have_owners(self) -> bool:
        """Return whether a matrix may be divided, so that owners may compute its update."""
        divided = any(leaf.kind == "sharded" and leaf.shards > 1 for leaf in self.leaves.grads)
        return divided and self.config.matrix_updates != "sharded"

    def planned_shapes(self) -> tuple[list, list, list, dict]:
        """Return the shapes of the arguments of `__call__` in a training step."""
        seen = lambda leaf: leaf.storage_shape if leaf.kind == "flat" else leaf.shape
        shapes = lambda leaves: [jax.ShapeDtypeStruct(seen(leaf), leaf.dtype) for leaf in leaves]
        grads = shapes(self.leaves.grads)
        return grads, shapes(self.leaves.state), grads, {"value": jax.ShapeDtypeStruct((), "float32")}
