"""A state as named logical leaves, the same for every stage, number of devices and precision.

Master weights stand for the parameters they are of, and the optimizer's state is the wrapped
transformation's own. A leaf stays as it is stored: its `Leaf` says what is padding, or flat.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from zerojax.comm.buckets import flatten, unflatten
from zerojax.config import DataMesh, path_of
from zerojax.config.data_mesh import spec_entry
from zerojax.layout.chunked import is_chunked
from zerojax.layout.leaf import Leaf
from zerojax.layout.padded import is_padded, pad
from zerojax.layout.tree import best_dim
from zerojax.offload.host import to_device
from zerojax.optim.master_weights import MasterState
from zerojax.placement.chunking import joined
from zerojax.placement.storage import leaves_of, view
from zerojax.train.state import ZeroState

if TYPE_CHECKING:
    from jaxtyping import Array, PyTree, Shaped


@dataclasses.dataclass(frozen=True)
class Slot:
    """One logical leaf of a state, and where it is stored.

    Attributes:
        name: As errors name it: `params['layer']['w']`.
        path: Its keys, from the field of the state on.
        leaf: How the array is laid out.
        array: The array, or its shape with a sharding; storage shape.
        narrow: Whether it is stored in a narrower type than it is updated in, so that a wider
            value may be rounded to it.
    """

    name: str
    path: tuple[str, ...]
    leaf: Leaf
    array: Any
    narrow: bool = False

    @property
    def dtype(self) -> str:
        """Element type of the array, by name."""
        return str(self.array.dtype)


def slots_of(state: ZeroState) -> dict[str, Slot]:
    """The logical leaves of a state, by name.

    Args:
        state: Live arrays, or shapes.

    Returns:
        The leaves in a fixed order: step, scaling, parameters, optimizer state, mutable.
    """
    plan = state.plan
    inner, masters = taken_apart(state)
    found: list[Slot] = []
    for field in ("step", "scaling"):
        found += whole_slots(field, getattr(state, field), plan.layout.policy.data)
    stored = [x.storage if is_padded(x) else x for x in leaves_of(state.params)]
    paths = key_paths(jax.tree.unflatten(plan.layout.treedef, range(len(stored))))
    for i, (path, x, leaf) in enumerate(zip(paths, stored, plan.layout.params, strict=True)):
        where, array = masters.get(i, (leaf, x))
        narrow = i not in masters and leaf.dtype != plan.layout.grads[i].dtype
        found.append(slot("params", path, where, array, narrow))
    arrays = jax.tree.leaves(inner, is_leaf=is_chunked)
    for path, x, leaf in zip(key_paths(inner), arrays, plan.state, strict=False):
        found.append(slot("opt_state", path, leaf, x))
    found += whole_slots("mutable", state.mutable, plan.layout.policy.data)
    return {one.name: one for one in found}


def taken_apart(state: ZeroState) -> tuple[PyTree, dict[int, tuple[Leaf, Any]]]:
    """The wrapped transformation's own state; and the master weights, by index of their parameter."""
    if not isinstance(state.opt_state, MasterState):
        return state.opt_state, {}
    plan, (inner, master) = state.plan, state.opt_state
    masters, others = (jax.tree.leaves(tree, is_leaf=is_chunked) for tree in (master, inner))
    owners = [
        plan.layout.trained[k]
        for k, (leaf, part) in enumerate(zip(plan.trained.params, plan.trained.grads, strict=True))
        if leaf.dtype != part.dtype
    ]
    return inner, dict(zip(owners, zip(plan.state[len(others) :], masters, strict=True), strict=True))


def put_together(like: ZeroState, arrays: dict[str, Any]) -> ZeroState:
    """The state whose leaves are `arrays`; the inverse of `slots_of`.

    Args:
        like: Says how the state is laid out; live arrays, or shapes.
        arrays: One array for each of its slots, by name; storage shape.

    Returns:
        A state with the structure and the layout of `like`. Narrow copies of master weights
        are made again.
    """
    plan = like.plan
    inner, masters = taken_apart(like)
    paths = key_paths(jax.tree.unflatten(plan.layout.treedef, range(len(plan.layout.params))))
    params = [arrays[name_of("params", path)] for path in paths]
    structure = lambda tree: jax.tree.structure(tree, is_leaf=is_chunked)
    opt_state = jax.tree.unflatten(structure(inner), [arrays[name_of("opt_state", p)] for p in key_paths(inner)])
    if masters:
        wide = [params[i] for i in masters]
        opt_state = MasterState(opt_state, jax.tree.unflatten(structure(like.opt_state.master), wide))
        where = [x.sharding for x in jax.tree.leaves(like.params)]
        moves = {i: (masters[i][0], plan.layout.params[i], where[i]) for i in masters}
        far = [i for i in masters if is_chunked(params[i])]
        near = [i for i in masters if i not in far]
        narrow = dict(zip(near, convert([params[i] for i in near], [moves[i] for i in near]), strict=True))
        for i in far:  # one by one: the devices may not hold all
            (narrow[i],) = convert([joined(params[i])], [moves[i]])
        params = [narrow.get(i, x) for i, x in enumerate(params)]
    fields = {field: filled(field, getattr(like, field), arrays) for field in ("step", "scaling", "mutable")}
    stored = jax.tree.unflatten(jax.tree.structure(like.params), params)
    return like.replace(params=stored, opt_state=opt_state, **fields)


def filled(field: str, tree: PyTree, arrays: dict[str, Any]) -> PyTree:
    """A tree with its leaves taken from `arrays`."""
    return jax.tree.unflatten(jax.tree.structure(tree), [arrays[name_of(field, path)] for path in key_paths(tree)])


def whole_slots(field: str, tree: PyTree, data: DataMesh) -> list[Slot]:
    """The slots of a field that every device holds whole."""
    return [
        slot(field, path, Leaf(jax.tree_util.keystr(path), tuple(x.shape), x.dtype, data.batch, data.workers), x)
        for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]


def slot(field: str, path: tuple, leaf: Leaf, array: Any, narrow: bool = False) -> Slot:
    """One slot, named."""
    return Slot(name_of(field, path), (field, *(path_of((key,)) for key in path)), leaf, array, narrow)


def name_of(field: str, path: tuple) -> str:
    """A leaf's name as errors have it."""
    return field + jax.tree_util.keystr(path)


def key_paths(tree: PyTree) -> list[tuple]:
    """The key paths of a tree's leaves."""
    return [path for path, _ in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_chunked)[0]]


def logical(x: Shaped[Array, "*storage"], leaf: Leaf) -> Shaped[Array, "*logical"]:
    """A stored array in its logical shape; traced under jit."""
    return unflatten(x, leaf) if leaf.kind == "flat" else view(x, leaf)


def laid_out(x: Shaped[Array, "*logical"], leaf: Leaf) -> Shaped[Array, "*storage"]:
    """A logical array in storage shape; traced under jit."""
    if leaf.kind == "flat":
        return flatten(x, leaf)
    return x if leaf.dim is None else pad(x, leaf.dim, leaf.storage_shape[leaf.dim])


def convert(arrays: Sequence[Any], moves: Sequence[tuple[Leaf, Leaf, Sharding]]) -> list[Any]:
    """Move stored arrays into other layouts and types, all in one program.

    Args:
        arrays: Stored as the first leaf of their move says.
        moves: For each array how it is laid out, how it shall be (shape and dtype), and where.
    """
    return list(converter(tuple(moves))(list(arrays))) if moves else []


@functools.lru_cache(maxsize=16)
def converter(moves: tuple[tuple[Leaf, Leaf, Sharding], ...]):
    """The program of `convert`."""

    def program(arrays):
        return [
            laid_out(logical(to_device(x), source), target).astype(target.dtype)
            for x, (source, target, _) in zip(arrays, moves, strict=True)
        ]

    return jax.jit(program, out_shardings=[where for *_, where in moves])


def divided(leaf: Leaf, sharding: Sharding) -> tuple[Leaf, Sharding]:
    """A dim-cut layout for a leaf that is on its way to or from flat storage: no device holds it whole."""
    whole = dataclasses.replace(leaf, kind="replicated", dim=None)
    if not isinstance(sharding, NamedSharding):
        return whole, sharding
    if not leaf.shape or not set(leaf.axes) <= set(sharding.mesh.axis_names):
        return whole, NamedSharding(sharding.mesh, PartitionSpec())
    dim = best_dim(leaf.shape, list(range(len(leaf.shape))), leaf.shards)
    chunking = dataclasses.replace(leaf, kind="sharded", dim=dim)
    return chunking, NamedSharding(sharding.mesh, PartitionSpec(*[None] * dim, spec_entry(leaf.axes)))


def exactly_wider(saved: Any, wanted: Any) -> bool:
    """Whether every number of one floating type is one of the other, too."""
    saved, wanted = jnp.dtype(saved), jnp.dtype(wanted)
    both = jnp.issubdtype(saved, jnp.floating) and jnp.issubdtype(wanted, jnp.floating)
    return both and saved != wanted and jnp.promote_types(saved, wanted) == wanted
