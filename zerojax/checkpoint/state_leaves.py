"""Convert a state to named logical leaves and back. The leaves are the same for every stage, mesh and precision.

Master weights replace their parameter, and the state of the wrapped transformation replaces `MasterState`. Arrays stay
in storage shape; the `Leaf` of an array says how it is padded or flattened.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import Sharding
from jaxtyping import PyTree

from zerojax.comm.mesh import in_storage_shape
from zerojax.config import path_of
from zerojax.layout.leaf import Leaf, is_chunked, is_padded, is_stored_node
from zerojax.offload.chunked import joined, replaced
from zerojax.optim.logical_state import current_masters, split_masters
from zerojax.optim.master_weights import MasterState, form_of
from zerojax.placement.storage import in_logical_shape, leaves_of, to_device
from zerojax.train.state import ZeroState

ROUNDING = "rounding"  # the field of seeds of parameters, which only `Narrow(masters="rounded")` has


@dataclasses.dataclass(frozen=True)
class StateLeaf:
    """One logical leaf of a state, and its array."""

    name: str  # the name that errors print, such as params['layer']['w']
    path: tuple[str, ...]  # the leaf's keys, starting with the field of the state
    leaf: Leaf  # the layout of the array
    array: Any  # an array, or a shape with a sharding; in storage shape
    narrow: bool = False  # whether the type is narrower than the update's, so that a restore may round saved values

    @property
    def dtype(self) -> str:
        return str(self.array.dtype)


def state_leaves(state: ZeroState | PyTree) -> dict[str, StateLeaf]:
    """Return the logical leaves of a state, or of a tree of parameters, by name, in a fixed order of their fields."""
    if not isinstance(state, ZeroState):
        require_arrays("params", state)
        return {one.name: dataclasses.replace(one, narrow=True) for one in leaves_of_tree("params", state)}
    for field in ("opt_state", "mutable"):
        require_arrays(field, getattr(state, field))
    plan = state.plan
    opt_state, kept = split_masters(plan, state.opt_state)
    masters = current_masters(plan, state.params, state.opt_state)
    leaves = [leaf for field in ("step", "scaling") for leaf in leaves_of_tree(field, getattr(state, field))]
    stored = [x.storage if is_padded(x) else x for x in leaves_of(state.params)]
    paths = key_paths(jax.tree.unflatten(plan.layout.treedef, range(len(stored))))
    for i, (path, x, layout) in enumerate(zip(paths, stored, plan.layout.params, strict=True)):
        narrow = i not in masters and layout.dtype != plan.layout.grads[i].dtype
        leaves.append(state_leaf("params", path, *masters.get(i, (layout, x)), narrow))
    leaves += [
        state_leaf(ROUNDING, paths[i], *kept_of) for i, kept_of in kept.items() if kept_of[0].encoding is not None
    ]
    arrays = jax.tree.leaves(opt_state, is_leaf=is_chunked)
    for path, x, layout in zip(key_paths(opt_state), arrays, plan.state, strict=False):
        leaves.append(state_leaf("opt_state", path, layout, x))
    leaves += leaves_of_tree("mutable", state.mutable)
    return {leaf.name: leaf for leaf in leaves}


def require_arrays(field: str, tree: PyTree) -> None:
    for path, x in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_stored_node)[0]:
        if not hasattr(x, "dtype"):
            name = leaf_name(field, path)
            raise TypeError(f"{name} is {x!r}, a {type(x).__name__} of Python. Give an array: jnp.asarray({x!r}).")


def with_leaves(like: ZeroState | PyTree, arrays: dict[str, Any]) -> Any:
    """Return a state or tree with the layout of `like` and the leaves `arrays`. This undoes `state_leaves`.

    `arrays` has an array in storage shape for each leaf of `like`, by name. For a parameter with master weights, the
    array has the master weights, and the narrow parameter is computed from them.
    """
    if not isinstance(like, ZeroState):
        return refilled("params", like, arrays)
    layout, (inner, masters) = like.plan.layout, split_masters(like.plan, like.opt_state)
    fields = {field: refilled(field, getattr(like, field), arrays) for field in ("step", "scaling", "mutable")}
    opt_state = refilled("opt_state", inner, arrays)
    paths = key_paths(jax.tree.unflatten(layout.treedef, range(len(layout.params))))
    params = [arrays[leaf_name("params", path)] for path in paths]
    if masters:
        structure = jax.tree.structure(like.opt_state.master, is_leaf=is_chunked)
        shardings, kept = [x.sharding for x in jax.tree.leaves(like.params, is_leaf=is_chunked)], []
        for i, (leaf, node) in masters.items():
            if leaf.encoding is not None:
                kept.append(arrays[leaf_name(ROUNDING, paths[i])])
                continue
            wide, form = params[i], form_of(leaf, layout.params[i])
            params[i] = convert(joined(wide) if is_chunked(wide) else wide, leaf, layout.params[i], shardings[i])
            kept.append(wide if form.is_weight else placed_like(node, jax.jit(form.first, static_argnums=1)(wide, i)))
        opt_state = MasterState(opt_state, jax.tree.unflatten(structure, kept))
    nodes, structure = jax.tree.flatten(like.params, is_leaf=is_chunked)
    # If the parameters are on disk, narrow copies of master weights are written to the files of the parameters.
    pairs = zip(nodes, params, strict=True)
    params = [replaced(node, x) if is_chunked(node) and not is_chunked(x) else x for node, x in pairs]
    stored = jax.tree.unflatten(structure, params)
    return like.replace(params=stored, opt_state=opt_state, **fields)


def placed_like(node: Any, x: Any) -> Any:
    """Return an array on the devices in the place of `node`, which is an offloaded leaf or any other."""
    return replaced(node, x) if is_chunked(node) else x


def refilled(field: str, tree: PyTree, arrays: dict[str, Any]) -> PyTree:
    """Return a tree with the leaves `arrays`, by name. This undoes `leaves_of_tree`."""

    def one(path: tuple, x: Any) -> Any:
        array = arrays[leaf_name(field, path)]
        return dataclasses.replace(x, storage=array) if is_padded(x) else array

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=is_stored_node)


def leaves_of_tree(field: str, tree: PyTree) -> list[StateLeaf]:
    """Return the leaves of a tree of parameters or other arrays, whose nodes say how they are stored.

    An array that is not in a `Padded` or `Chunked` node has its logical shape.
    """
    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_stored_node)[0]
    return [state_leaf(field, path, leaf_of(x), x.storage if is_padded(x) else x) for path, x in found]


def leaf_of(x: Any) -> Leaf:
    if is_chunked(x):
        return x.leaf
    if is_padded(x):
        # With one shard per element of the stored dim, the leaf has the node's padding, on any number of devices.
        return Leaf("", x.shape, x.dtype, (), x.storage.shape[x.dim], "sharded", x.dim)
    return Leaf("", tuple(x.shape), x.dtype, (), 1)


def state_leaf(field: str, path: tuple, leaf: Leaf, array: Any, narrow: bool = False) -> StateLeaf:
    return StateLeaf(leaf_name(field, path), (field, *keys_of(path)), leaf, array, narrow)


def leaf_name(field: str, path: tuple) -> str:
    return field + jax.tree_util.keystr(path)


def key_paths(tree: PyTree) -> list[tuple]:
    return [path for path, _ in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_chunked)[0]]


def keys_of(path: tuple) -> tuple[str, ...]:
    return tuple(path_of((key,)) for key in path)


def convert(x: Any, source: Leaf, target: Leaf, sharding: Sharding) -> Any:
    """Convert a stored array to another layout and type, on the array's devices. Equal conversions share a program."""
    return converter(source, target, sharding)(x)


@functools.lru_cache(maxsize=256)
def converter(source: Leaf, target: Leaf, sharding: Sharding):
    def program(x):
        x = in_logical_shape(to_device(x), source)
        if source.encoding != target.encoding:
            from zerojax.narrow_state.rounding import recoded

            x = recoded(x, source.encoding, target.encoding)
        return in_storage_shape(x, target).astype(target.dtype)

    return jax.jit(program, out_shardings=sharding)
