"""Convert an optimizer state in storage into logical arrays, or into parameters.

The leaves of a state are plain arrays in storage shape, so a padded or flat array does not record its logical shape.
The logical shapes are read from a plan: the plan of the parameters that the caller gives, or an earlier plan of this
transformation.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.core
from jax.sharding import Mesh

from zerojax.comm.explicit import auto_context, on_auto_mesh
from zerojax.comm.mesh import replicated, wait_if_simulated
from zerojax.config import Config
from zerojax.layout.chunked import is_chunked
from zerojax.layout.leaf import Leaf
from zerojax.layout.padded import is_padded
from zerojax.layout.tree import layout_of
from zerojax.offload.host import to_device
from zerojax.optim.master_weights import MasterState
from zerojax.optim.plan import ShardingPlan, make_plan, plan_of_layout
from zerojax.optim.state_forms import Annotated, as_planned, seen_in
from zerojax.optim.transformation import tree_difference
from zerojax.optim.update import unshard_after_update
from zerojax.placement.chunking import joined
from zerojax.placement.storage import in_logical_shape, in_storage, is_stored_node, named_tree, storage_leaves

if TYPE_CHECKING:
    from jaxtyping import Array, PyTree, Shaped


def is_opt_state(tree: PyTree) -> bool:
    """Return whether a tree must be a state or a part of a state, because it has a node class of optax or zerojax."""
    nodes: list[Any] = []
    jax.tree.flatten(tree, is_leaf=lambda x: nodes.append(x) or is_chunked(x))
    ours = (Annotated, MasterState)
    optaxs = lambda x: isinstance(x, tuple) and type(x).__module__.partition(".")[0] == "optax"
    return any(isinstance(x, ours) or is_chunked(x) or optaxs(x) for x in nodes)


def unshard_state(config: Config, tree: PyTree, params: PyTree = None) -> Any:
    """Gather a state in storage, or a part of a state, into replicated logical arrays. Drop master weights.

    Without `params`, the logical shapes come from an earlier plan of this transformation. Return None if no plan fits
    `tree`, and nothing shows that `tree` is a state.

    Raises:
        ValueError: If `tree` is a state, and no plan or several plans with different logical shapes fit it.
    """
    if params is not None:
        with auto_context(config.user_mesh):
            plans = [plan_of_layout(config, layout_of(config, params, **seen_in(tree)))]
    else:
        plans = list(config.plans.values())
    may_be_part = params is not None or is_opt_state(tree)
    described = [found for plan in plans for found in matches(plan, tree, may_be_part=may_be_part)]
    if len({tuple(leaf.shape for leaf in leaves) for _, leaves in described}) == 1:
        return gathered(config, *described[0])
    if described or may_be_part:
        refuse(tree, len(described), with_params=params is not None)
    return None


def refuse(tree: PyTree, count: int, *, with_params: bool) -> None:
    """Raise a `ValueError` that says why the logical shapes of `tree` are not known, unless it has no arrays."""
    keyed = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_stored_node)
    if not keyed:
        return
    path, x = keyed[0]
    first = f"opt_state{jax.tree_util.keystr(path)}, of shape {list(x.shape)}, and {len(keyed) - 1} more leaves"
    if with_params:
        raise ValueError(
            f"The state does not belong to these parameters: {first} are not what this transformation stores for them. "
            f"Pass the parameters that the state was made for."
        )
    why = (
        f"this transformation has {count} plans with different logical shapes that all store such a state"
        if count
        else "in this process this transformation has not planned parameters with such a state"
    )
    raise ValueError(
        f"The logical shapes of an optimizer state in storage are not known: {why} ({first}). "
        f"Pass the parameters, or their shapes: tx.unshard(opt_state, params)."
    )


def matches(plan: ShardingPlan, tree: PyTree, *, may_be_part: bool) -> Iterator[tuple[Any, tuple[Leaf, ...]]]:
    """Yield `(tree, layouts)` for each part of the plan's state that `tree` fits. Drop master weights from the tree.

    Leaves are compared by path and not by structure, because Flax's NNX has variables where the plan has arrays.
    """
    tree = as_planned(plan, tree)
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_stored_node)
    paths = [jax.tree_util.keystr(path) for path, _ in found]
    whole = len(paths) == len(plan.state)
    stored_as = lambda x, leaf: not is_padded(x) and hasattr(x, "shape") and tuple(x.shape) == leaf.storage_shape
    for start in range(len(plan.state) if may_be_part else 1):
        leaves = plan.state[start : start + len(paths)]
        if not paths or len(leaves) < len(paths) or not (whole or may_be_part):
            return
        prefix = leaves[0].path.removesuffix(paths[0])
        same_paths = [prefix + path for path in paths] == [leaf.path for leaf in leaves]
        if same_paths and all(stored_as(x, leaf) for (_, x), leaf in zip(found, leaves, strict=True)):
            if prefix and not may_be_part:
                return
            if isinstance(tree, MasterState):
                tree = tree.inner
                leaves = leaves[: len(jax.tree.leaves(tree, is_leaf=is_chunked))]
            yield tree, leaves


def gathered(config: Config, tree: PyTree, leaves: tuple[Leaf, ...]) -> Any:
    """Gather the leaves of a state into logical arrays. Copy offloaded leaves to the devices first."""
    nodes, treedef = jax.tree.flatten(tree, is_leaf=is_chunked)
    if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(nodes)):
        wait_if_simulated(config.mesh, nodes)
    arrays = [joined(x) if is_chunked(x) else to_device(x) if isinstance(x, jax.Array) else x for x in nodes]
    return treedef.unflatten(gathering(config.user_mesh, leaves)(arrays))


@functools.lru_cache(maxsize=16)
def gathering(mesh: Mesh, leaves: tuple[Leaf, ...]) -> Any:
    """Return a jitted function that gathers arrays in storage shape into replicated logical arrays."""

    def all_logical(arrays: Sequence[Shaped[Array, "*storage"]]) -> list[Shaped[Array, "*logical"]]:
        return [in_logical_shape(x, leaf) for x, leaf in zip(arrays, leaves, strict=True)]

    return jax.jit(functools.partial(on_auto_mesh, mesh, all_logical), out_shardings=replicated(mesh))


def as_params(config: Config, mirror: PyTree, params: PyTree) -> Any:
    """Convert a state tree that mirrors the trained parameters into parameters; see `ZeroTransformation.as_params`."""
    plan = make_plan(config, params)
    found, _ = jax.tree_util.tree_flatten_with_path(mirror, is_leaf=is_stored_node)
    # Compare paths and not structures, because the variables in nnx.Optimizer's state have another class.
    trained = jax.tree_util.tree_leaves_with_path(jax.tree.unflatten(plan.trained.treedef, plan.grads))
    if [path for path, _ in found] != [path for path, _ in trained]:
        raise ValueError(
            f"The tree does not mirror the parameters that are trained: it {tree_difference(found, plan.grads)}. Give "
            f"one tree of the state, such as optax.tree_utils.tree_get(state, 'mu')."
        )
    for (path, x), leaf in zip(found, plan.grads, strict=True):
        if tuple(x.shape) != leaf.storage_shape or is_padded(x):
            raise ValueError(
                f"{jax.tree_util.keystr(path)} has shape {list(x.shape)}, but the optimizer's state of its parameter "
                f"has {list(leaf.storage_shape)} in storage. Give a tree of the state that this transformation made."
            )
    arrays = [joined(x) if is_chunked(x) else x for _, x in found]
    wait_if_simulated(config.mesh, (arrays, params))
    shardings = lambda _: named_tree(config, plan.layout.treedef, plan.layout.params)
    return on_auto_mesh(
        config.user_mesh, functools.partial(unsharded_params, config, plan), arrays, params, shardings=shardings
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def unsharded_params(config: Config, plan: ShardingPlan, arrays: list, params: PyTree) -> Any:
    """Return parameters in storage. `arrays` has new trained ones, sharded for the update, or None for the old ones."""
    stored = storage_leaves(params, plan.layout.params)
    new = unshard_after_update(config, plan, arrays, stored)
    return in_storage([old if x is None else x for x, old in zip(new, stored, strict=True)], plan.layout)
