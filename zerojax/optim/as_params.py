"""A tree of the optimizer's state that mirrors the parameters, in their form."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax

from zerojax.comm.explicit import on_auto_mesh
from zerojax.comm.mesh import wait_if_simulated
from zerojax.config import Config
from zerojax.layout.chunked import is_chunked
from zerojax.layout.padded import is_padded
from zerojax.optim.checks import tree_difference
from zerojax.optim.plan import ShardingPlan, make_plan
from zerojax.optim.update import unshard_after_update
from zerojax.placement.chunking import joined
from zerojax.placement.storage import in_storage, named_tree, storage_leaves

if TYPE_CHECKING:
    from jaxtyping import PyTree


def as_params(config: Config, mirror: PyTree, params: PyTree) -> Any:
    """Convert a state tree that mirrors the parameters into parameters; see `ZeroTransformation.as_params`."""
    plan = make_plan(config, params)
    found, _ = jax.tree_util.tree_flatten_with_path(mirror, is_leaf=lambda x: is_chunked(x) or is_padded(x))
    trained = jax.tree.unflatten(plan.trained.treedef, plan.grads)
    # By path: the state of nnx.Optimizer has variables of another class in the places of the parameters.
    if [path for path, _ in found] != [path for path, _ in jax.tree_util.tree_leaves_with_path(trained)]:
        raise ValueError(
            f"The tree does not mirror the parameters that are trained: it {tree_difference(found, plan.grads)}. Give "
            f"one tree of the state, such as optax.tree_utils.tree_get(state, 'mu')."
        )
    for (path, x), leaf in zip(found, plan.grads, strict=True):
        shape = tuple(x.leaf.storage_shape if is_chunked(x) else x.shape)
        if shape != leaf.storage_shape or is_padded(x):
            raise ValueError(
                f"{jax.tree_util.keystr(path)} has shape {list(shape)}, but the optimizer's state of its parameter has "
                f"{list(leaf.storage_shape)} in storage. Give a tree of this transformation's own state."
            )
    arrays = [joined(x) if is_chunked(x) else x for _, x in found]
    wait_if_simulated(config.mesh, (arrays, params))
    shardings = lambda _: named_tree(config, plan.layout.treedef, plan.layout.params)
    return on_auto_mesh(
        config.user_mesh, functools.partial(_as_params, config, plan), arrays, params, shardings=shardings
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _as_params(config: Config, plan: ShardingPlan, arrays: list, params: PyTree) -> Any:
    stored = storage_leaves(params, plan.layout.params)
    return in_storage(unshard_after_update(config, plan, arrays, stored), plan.layout)
