"""Find the weights from which the next update starts: master weights, and parameters where a program changed them.

An update finds them inside its program (`master_weights.current_weight`). This file finds them for everything else that
reads master weights: checkpoints, exports, `reshard` and `ZeroTransformation.weights`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from zerojax.comm.explicit import auto_context, mesh_of, on_auto_mesh
from zerojax.comm.mesh import to_storage, wait_if_simulated
from zerojax.config import Config
from zerojax.layout.chunked import is_chunked
from zerojax.layout.leaf import Leaf
from zerojax.layout.padded import is_padded
from zerojax.layout.tree import layout_of
from zerojax.offload.host import to_device
from zerojax.optim.checks import check_state
from zerojax.optim.logical_state import unsharded_params
from zerojax.optim.master_weights import MasterState, current_weight, is_copy, narrow_leaves
from zerojax.optim.plan import ShardingPlan, plan_of_layout
from zerojax.optim.state_forms import as_planned, rechunked, seen_in
from zerojax.placement.chunking import joined
from zerojax.placement.storage import in_logical_shape, leaves_of, named_tree

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, PyTree

Layouts = tuple[Leaf, Leaf]  # of a master weight, and of its parameter


def split_masters(plan: ShardingPlan, opt_state: PyTree) -> tuple[PyTree, dict[int, tuple[Leaf, Any]]]:
    """Return the wrapped transformation's state, and the layout and array of master weights by parameter index."""
    if not isinstance(opt_state, MasterState):
        return opt_state, {}
    arrays, others = (jax.tree.leaves(tree, is_leaf=is_chunked) for tree in (opt_state.master, opt_state.inner))
    narrow = [i for i, on in zip(plan.layout.trained, narrow_leaves(plan.trained), strict=True) if on]
    return opt_state.inner, dict(zip(narrow, zip(plan.state[len(others) :], arrays, strict=True), strict=True))


def current_masters(
    plan: ShardingPlan, params: PyTree, opt_state: PyTree, *, compare: bool = True
) -> dict[int, tuple[Leaf, Any]]:
    """Return the layout and array of the current master weights, by parameter index.

    A leaf that no program changed keeps its array, also if it is offloaded. A changed leaf becomes an array on the
    devices. To find these leaves, the call waits for the devices. Without `compare`, it does not wait, and every leaf
    becomes a new array on the devices. If the arrays are shapes, they are returned unchanged.
    """
    _, masters = split_masters(plan, opt_state)
    leaves = leaves_of(params)
    arrays = jax.tree.leaves([[x for _, x in masters.values()], [leaves[i] for i in masters]])
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in arrays):
        return masters
    layouts = {i: (leaf, plan.layout.params[i]) for i, (leaf, _) in masters.items()}
    offloaded = [i for i, (_, x) in masters.items() if is_chunked(x) or is_chunked(leaves[i])]

    def current(group: Sequence[int]) -> dict[int, Array]:
        pairs = [(on_device(masters[i][1]), on_device(leaves[i])) for i in group]
        if not pairs:
            return {}
        mesh, of = mesh_of(pairs[0][0]), tuple(layouts[i] for i in group)
        if compare:
            wait_if_simulated(mesh, pairs)
            same = jax.device_get(comparing(mesh, of)(pairs))
            changed = [k for k, on in enumerate(same) if not on]
            group, pairs, of = ([items[k] for k in changed] for items in (group, pairs, of))
        return dict(zip(group, choosing(mesh, tuple(of))(pairs), strict=True)) if group else {}

    # Offloaded leaves are loaded one at a time, because device memory may be too small for all of them.
    for group in ([i for i in masters if i not in offloaded], *([i] for i in offloaded)):
        masters |= {i: (masters[i][0], x) for i, x in on_auto_mesh(None, lambda _, g=group: current(g), arrays).items()}
    return masters


def weights(config: Config, params: PyTree, opt_state: PyTree) -> Any:
    """Return the weights from which the next update starts; see `ZeroTransformation.weights`."""
    if not config.has_master_weights:
        return params
    with auto_context(config.user_mesh):
        layout = layout_of(config, params, **seen_in(opt_state))
        plan = config.plans.get(layout) or plan_of_layout(config, layout)
    opt_state = as_planned(plan, rechunked(config, plan, opt_state))
    leaves = jax.tree.leaves(opt_state, is_leaf=is_chunked)
    if len(leaves) == plan.state_def.num_leaves:  # the variables in nnx.Optimizer's state are other nodes
        opt_state = jax.tree.unflatten(plan.state_def, leaves)
    check_state(plan, opt_state, may_be_wider=not plan.offloaded)
    masters = current_masters(plan, params, opt_state, compare=False)
    arrays = [on_device(masters[i][1]) if i in masters else None for i in plan.layout.trained]
    gather = functools.partial(unsharded_params, config, plan)
    shardings = lambda _: named_tree(config, plan.layout.treedef, plan.layout.params)
    return on_auto_mesh(config.user_mesh, gather, arrays, params, shardings=shardings)


def on_device(x: Any) -> Array:
    """Return a stored array on the devices, whether it is padded, offloaded or in host memory."""
    return joined(x) if is_chunked(x) else to_device(x.storage if is_padded(x) else x)


def aligned(mesh: Mesh, layouts: Layouts, master: Array, param: Array) -> tuple[Array, Array, Any]:
    """Return the arguments of `is_copy`: the master weight, the parameter in its layout, and the stored type."""
    of_master, of_param = layouts
    moved = to_storage(mesh, in_logical_shape(param, of_param), of_master)
    return master, moved.astype(master.dtype), of_param.dtype


@functools.lru_cache(maxsize=16)
def comparing(mesh: Mesh, layouts: tuple[Layouts, ...]) -> Any:
    """Return a jitted function of pairs `(master, param)` that returns, per pair, whether `param` is unchanged."""

    def same(pairs: Sequence) -> list[Bool[Array, ""]]:
        found = [aligned(mesh, of, *pair) for of, pair in zip(layouts, pairs, strict=True)]
        return [is_copy(*one).all() for one in found]

    return jax.jit(same)


@functools.lru_cache(maxsize=16)
def choosing(mesh: Mesh, layouts: tuple[Layouts, ...]) -> Any:
    """Return a jitted function of pairs `(master, param)` that returns the current master weight of each pair."""

    def chosen(pairs: Sequence) -> list[Array]:
        found = [current_weight(*aligned(mesh, of, *pair)) for of, pair in zip(layouts, pairs, strict=True)]
        return [to_storage(mesh, x, leaf) for x, (leaf, _) in zip(found, layouts, strict=True)]

    return jax.jit(chosen)
