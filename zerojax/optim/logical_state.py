"""Convert an optimizer state in storage into logical arrays, into parameters, or into the current weights.

The leaves of a state are plain arrays in storage shape, so a padded or flat array does not record its logical shape.
The logical shapes are read from a plan: the plan of the parameters that the caller gives, or an earlier plan of this
transformation.

The next update starts from the current weights: from the master weights or, where a program changed a parameter since
the last update, from the parameter. An update finds them inside its program (`master_weights.current_weight`). This
file finds them for checkpoints, exports, `reshard` and `ZeroTransformation.weights`.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from zerojax.comm.mesh import auto_context, mesh_of, on_auto_mesh, replicated, to_storage, wait_if_simulated
from zerojax.config import Config
from zerojax.layout.leaf import Leaf, is_chunked, is_padded, is_stored_node
from zerojax.layout.tree import layout_of
from zerojax.offload.chunked import joined
from zerojax.optim.master_weights import MasterState, form_of, is_copy, narrow_leaves
from zerojax.optim.returned_state import Annotated, as_planned, rechunked, seen_in
from zerojax.optim.sharding_plan import ShardingPlan, make_plan, plan_of_layout
from zerojax.optim.update import check_state, unshard_after_update
from zerojax.placement.problems import tree_difference
from zerojax.placement.storage import in_logical_shape, in_storage, leaves_of, sharding_tree, storage_leaves, to_device


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
    plans = list(config.plans.values()) if params is None else [plan_for(config, params, tree)]
    may_be_part = params is not None or is_opt_state(tree)
    described = [found for plan in plans for found in matches(plan, tree, may_be_part=may_be_part)]
    if len({tuple(leaf.shape for leaf in leaves) for _, leaves in described}) == 1:
        return gathered(config, *described[0])
    if described or may_be_part:
        raise_unknown_shapes(tree, len(described), with_params=params is not None)
    return None


def plan_for(config: Config, params: PyTree, opt_state: PyTree) -> ShardingPlan:
    with auto_context(config.user_mesh):
        layout = layout_of(config, params, **seen_in(opt_state))
        return config.plans.get(layout) or plan_of_layout(config, layout)


def raise_unknown_shapes(tree: PyTree, count: int, *, with_params: bool) -> None:
    """Raise a `ValueError` that says why the shapes of `tree` are not known. Do nothing if `tree` has no arrays."""
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
    """Yield `(tree, layouts)` for each part of the plan's state that `tree` fits. Drop master weights from `tree`.

    Leaves are compared by path and not by structure, because Flax's NNX has variables where the plan has arrays.
    """
    tree = as_planned(plan, tree)
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_stored_node)
    paths, count = [jax.tree_util.keystr(path) for path, _ in found], len(found)
    stored_as = lambda x, leaf: not is_padded(x) and hasattr(x, "shape") and tuple(x.shape) == leaf.storage_shape
    last = len(plan.state) - count if paths else -1
    for start in range(last + 1) if may_be_part or last == 0 else ():
        leaves = plan.state[start : start + count]
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
    arrays = [on_device(x) if is_chunked(x) or isinstance(x, jax.Array) else x for x in nodes]
    return treedef.unflatten(gather_program(config.user_mesh, leaves)(arrays))


@functools.lru_cache(maxsize=16)
def gather_program(mesh: Mesh, leaves: tuple[Leaf, ...]) -> Any:
    """Return a jitted function that gathers arrays in storage shape into replicated logical arrays."""
    all_logical = lambda arrays: list(map(wide_array, arrays, leaves))
    return jax.jit(functools.partial(on_auto_mesh, mesh, all_logical), out_shardings=replicated(mesh))


def wide_array(stored: Array, leaf: Leaf) -> Array:
    """Return a stored array in logical shape. Decode it if it is encoded."""
    x = in_logical_shape(stored, leaf)
    if leaf.encoding is None:
        return x
    from zerojax.narrow_state.rounding import widen

    return widen(x, leaf.encoding)


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
                f"has {list(leaf.storage_shape)} in storage. Give a tree of the state that this transformation made "
                f"and, with Narrow, keeps wide."
            )
    arrays = [joined(x) if is_chunked(x) else x for _, x in found]
    wait_if_simulated(config.mesh, (arrays, params))
    return with_new(config, plan, arrays, params)


def with_new(config: Config, plan: ShardingPlan, arrays: list, params: PyTree) -> Any:
    gather = functools.partial(unsharded_params, config, plan)
    shardings = lambda _: sharding_tree(config, plan.layout.treedef, plan.layout.params)
    return on_auto_mesh(config.user_mesh, gather, arrays, params, shardings=shardings)


@functools.partial(jax.jit, static_argnums=(0, 1))
def unsharded_params(config: Config, plan: ShardingPlan, arrays: list, params: PyTree) -> Any:
    """Return `params` in storage. Each array in `arrays`, sharded for the update, replaces a trained parameter."""
    stored = storage_leaves(params, plan.layout.params)
    new = unshard_after_update(config, plan, arrays, stored)
    return in_storage([old if x is None else x for x, old in zip(new, stored, strict=True)], plan.layout)


Layouts = tuple[Leaf, Leaf]  # of a master weight, and of its parameter


def split_masters(plan: ShardingPlan, opt_state: PyTree) -> tuple[PyTree, dict[int, tuple[Leaf, Any]]]:
    """Return the wrapped transformation's state and, by parameter index, the layout and array kept by `WideMaster`.

    If `Narrow(masters=)` is used, other classes keep less than a master weight.
    """
    if not isinstance(opt_state, MasterState):
        return opt_state, {}
    arrays, others = (jax.tree.leaves(tree, is_leaf=is_chunked) for tree in (opt_state.master, opt_state.inner))
    narrow = [i for i, on in zip(plan.layout.trained, narrow_leaves(plan.trained), strict=True) if on]
    return opt_state.inner, dict(zip(narrow, zip(plan.state[len(others) :], arrays, strict=True), strict=True))


def current_masters(
    plan: ShardingPlan, params: PyTree, opt_state: PyTree, *, compare: bool = True, mesh: Mesh | None = None
) -> dict[int, tuple[Leaf, Any]]:
    """Return the layout and array of the current master weights, by parameter index.

    With `compare`, wait for the devices to find out which parameters a program changed. Return new arrays on devices
    for these parameters, and the stored arrays, even offloaded ones, for all others. Without `compare`, do not wait,
    and return new arrays for all master weights. If any leaf is a shape, return the leaves of `opt_state` unchanged.
    Under `jax.jit`, `mesh` must be the caller's mesh.
    """
    kept, leaves = split_masters(plan, opt_state)[1], leaves_of(params)
    layouts = {i: (leaf, plan.layout.params[i]) for i, (leaf, _) in kept.items()}
    # The weight of a parameter with seeds is the parameter itself.
    kept = {i: (leaf, x) for i, (leaf, x) in kept.items() if leaf.encoding is None}
    wide = {i: dataclasses.replace(leaf, dtype=plan.layout.grads[i].dtype) for i, (leaf, _) in kept.items()}
    arrays = jax.tree.leaves([[x for _, x in kept.values()], [leaves[i] for i in kept]])
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in arrays):
        shape = lambda x, leaf: jax.ShapeDtypeStruct(leaf.storage_shape, leaf.dtype, sharding=x.sharding)
        return {i: (wide[i], x if form_of(*layouts[i]).is_weight else shape(x, wide[i])) for i, (_, x) in kept.items()}

    def current(stored: dict[int, tuple[Any, Any]]) -> dict[int, Array]:
        pairs = {i: (on_device(master), on_device(param)) for i, (master, param) in stored.items()}
        of_pair = lambda: tuple(layouts[i] for i in pairs)
        auto = mesh_of(next(iter(pairs.values()))[0])
        if compare:
            wait_if_simulated(auto, pairs)
            same = jax.device_get(of_pairs(auto, of_pair(), compare=True)(list(pairs.values())))
            pairs = {i: pair for (i, pair), on in zip(pairs.items(), same, strict=True) if not on}
        new = of_pairs(auto, of_pair(), compare=False)(list(pairs.values())) if pairs else ()
        return dict(zip(pairs, new, strict=True))

    masters = {i: (wide[i], x) for i, (_, x) in kept.items()}
    specs = {i: leaf.spec for i, (leaf, _) in masters.items()}
    # Offloaded leaves are loaded one at a time, because device memory may be too small for all of them.
    alone = [i for i, (_, x) in masters.items() if is_chunked(x) or is_chunked(leaves[i])]
    for some in filter(None, ([i for i in masters if i not in alone], *([i] for i in alone))):
        stored = {i: (masters[i][1], leaves[i]) for i in some}
        found = on_auto_mesh(mesh, current, stored, shardings=lambda new: {i: specs[i] for i in new})
        masters |= {i: (masters[i][0], x) for i, x in found.items()}
    return masters


def weights(config: Config, params: PyTree, opt_state: PyTree) -> Any:
    """Return the weights from which the next update starts; see `ZeroTransformation.weights`."""
    if not config.has_master_weights:
        return params
    plan = plan_for(config, params, opt_state)
    opt_state = as_planned(plan, rechunked(config, plan, opt_state) if plan.offloaded else opt_state)
    leaves = jax.tree.leaves(opt_state, is_leaf=is_chunked)
    if len(leaves) == plan.state_def.num_leaves:  # the variables in nnx.Optimizer's state are other nodes
        opt_state = jax.tree.unflatten(plan.state_def, leaves)
    check_state(plan, opt_state, may_be_wider=not plan.offloaded)
    masters = current_masters(plan, params, opt_state, compare=False, mesh=config.user_mesh)
    arrays = [on_device(masters[i][1]) if i in masters else None for i in plan.layout.trained]
    return with_new(config, plan, arrays, params)


def on_device(x: Any) -> Array:
    """Return a stored array on the devices, whether it is padded, offloaded or in host memory."""
    return joined(x) if is_chunked(x) else to_device(x.storage if is_padded(x) else x)


@functools.lru_cache(maxsize=32)
def of_pairs(mesh: Mesh, layouts: tuple[Layouts, ...], *, compare: bool) -> Any:
    """Return a jitted function from pairs `(master, param)` to the current weight of each pair.

    With `compare`, the function returns, for each pair, only whether the parameter is a copy of the master weight.
    """

    def one(of: Layouts, master: Array, param: Array) -> Array:
        of_master, of_param = of
        form, moved = form_of(*of), to_storage(mesh, in_logical_shape(param, of_param), of_master)
        if compare and not form.is_weight:
            return jnp.zeros((), bool)
        moved = moved.astype(master.dtype if form.is_weight else jnp.float32)
        if compare:
            return is_copy(master, moved, of_param.dtype).all()
        return to_storage(mesh, form.current(master, moved), of_master)

    return jax.jit(lambda pairs: [one(of, *pair) for of, pair in zip(layouts, pairs, strict=True)])
