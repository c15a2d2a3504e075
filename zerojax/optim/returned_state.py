"""Convert the optimizer state between the form that a plan describes and the form that `init` and `update` return.

The returned form is for Flax and hand-written loops. Its Flax annotations describe the layout of the state, and
`Annotated` adds facts that `update` cannot see under `jax.jit`. For programs that need all offloaded state at once,
such as `update`, this file also copies the state to device memory and back.
"""

import dataclasses
import functools

import jax
from jaxtyping import PyTree

from zerojax.config import Config
from zerojax.config.data_mesh import axes_of
from zerojax.layout.annotations import metadata_of, overwritten_leaves
from zerojax.layout.leaf import Leaf, is_chunked
from zerojax.optim.sharding_plan import ShardingPlan, state_shapes, state_shardings
from zerojax.placement.storage import leaf_sharding, shapes


@functools.partial(jax.tree_util.register_dataclass, data_fields=["state"], meta_fields=["others", "overwritten"])
@dataclasses.dataclass(frozen=True)
class Annotated:
    """The state of an optimizer, with facts about the parameters that `update` cannot see.

    Under `jax.jit`, `update` cannot see which Auto axes, other than the data axes, divide a parameter. Flax's
    `nnx.Optimizer` passes arrays without their variables, whose class says which parameters are overwritten.
    """

    state: PyTree  # the state, in the structure of the wrapped transformation
    # `Leaf.others` of each parameter; () if no Auto axis other than the data axes divides a parameter
    others: tuple[tuple, ...]
    # indices of the overwritten parameters that `update` would not recognise by path or shape
    overwritten: tuple[int, ...]


def seen_in(state: PyTree) -> dict[str, tuple]:
    """Return the facts in an `Annotated` state as keyword arguments of `layout_of`; {} for other states."""
    return {"others": state.others, "overwritten": state.overwritten} if isinstance(state, Annotated) else {}


def as_returned(config: Config, plan: ShardingPlan, state: PyTree) -> PyTree:
    """Convert `state`, or a tree of its shardings, to the form that `init` and `update` return."""
    others = tuple(leaf.others for leaf in plan.layout.params)
    others = others if {*axes_of(*others)} - {*config.user_mesh.explicit_axes} else ()
    visible = overwritten_leaves((), plan.layout.paths, shapes(plan.layout.grads), overwrite=config.overwrite)
    hidden = tuple(i for i in plan.layout.overwritten if i not in visible)
    labelled = relabelled(plan, state)
    return Annotated(labelled, others, hidden) if others or hidden else labelled


def as_planned(plan: ShardingPlan, state: PyTree) -> PyTree:
    """Undo `as_returned`. A state of another structure is returned unchanged, and `check_state` refuses it.

    As in optax, None is accepted as the state of a transformation without state.
    """
    if state is None and plan.state_def.num_leaves == 0:
        return jax.tree.unflatten(plan.state_def, ())
    state = state.state if isinstance(state, Annotated) else state
    leaves = jax.tree.leaves(state, is_leaf=is_chunked)
    if len(leaves) != plan.state_def.num_leaves:
        return state
    planned = jax.tree.unflatten(plan.state_def, leaves)
    structure = functools.partial(jax.tree.structure, is_leaf=is_chunked)
    return planned if structure(relabelled(plan, planned)) == structure(state) else state


def relabelled(plan: ShardingPlan, state: PyTree) -> PyTree:
    """Return the state with Flax annotations that describe the layouts of the state, and not of the parameters."""
    is_annotated = lambda x: bool(metadata_of(x).get("out_sharding"))
    nodes, treedef = jax.tree.flatten(state, is_leaf=lambda x: is_chunked(x) or is_annotated(x))
    new = [x.copy(out_sharding=leaf.spec) if is_annotated(x) else x for x, leaf in zip(nodes, plan.state, strict=True)]
    return jax.tree.unflatten(treedef, new)


ON_DISK = (
    "The optimizer state is on disk, which a jitted program cannot reach. Make it with tx.create(params), and update "
    "it with the step of tx.train_step, both called as they are, outside of jax.jit."
)


def is_on_disk(config: Config) -> bool:
    return config.offload is not None and config.offload.optimizer == "disk"


def all_on_device(config: Config, plan: ShardingPlan, state: PyTree) -> PyTree:
    """Return the state with the chunks of all offloaded leaves copied to the device and joined.

    Raises:
        TypeError: If a leaf is on disk, because a traced program cannot read files.
    """
    from zerojax.offload.chunked import join_chunks

    def one(x, leaf: Leaf):
        if not is_chunked(x):
            return x
        if x.leaf_files is not None:
            raise TypeError(ON_DISK)
        chunks = [jax.device_put(chunk, leaf_sharding(config, leaf)) for chunk in x.chunks]
        return join_chunks(config.mesh, chunks, leaf, x.chunking)

    leaves = jax.tree.leaves(state, is_leaf=is_chunked)
    return jax.tree.unflatten(plan.state_def, list(map(one, leaves, plan.state)))


def all_on_host(config: Config, plan: ShardingPlan, state: PyTree) -> PyTree:
    """Undo `all_on_device`."""
    from zerojax.offload.chunked import split_chunks

    def one(x, where):
        if not is_chunked(where):
            return x
        if is_on_disk(config):
            raise TypeError(ON_DISK)
        chunks = split_chunks(config.mesh, x, where.leaf, where.chunking)
        return dataclasses.replace(where, chunks=tuple(map(jax.device_put, chunks, where.chunks)))

    shardings = jax.tree.leaves(state_shardings(config, plan), is_leaf=is_chunked)
    return jax.tree.unflatten(plan.state_def, list(map(one, jax.tree.leaves(state), shardings)))


def rechunked(config: Config, plan: ShardingPlan, state: PyTree) -> PyTree:
    """Put `Chunked` nodes back into a state from which Flax's `nnx.update` has removed them.

    After its first update, an `nnx.Optimizer` has nested dicts of chunks instead of these nodes. A state without such
    dicts is returned unchanged.
    """
    if is_on_disk(config):
        return state
    found = [(jax.tree_util.keystr(path), x) for path, x in jax.tree_util.tree_leaves_with_path(state)]
    paths = lambda leaf, one: [f"{leaf.path}['chunks'][{n}]" for n in range(len(one.extents))] if one else [leaf.path]
    wanted = [path for pair in zip(plan.state, plan.chunkings, strict=True) for path in paths(*pair)]
    if [path for path, _ in found] != wanted:
        return state
    planned = jax.tree.structure(state_shapes(config, plan))
    return as_returned(config, plan, jax.tree.unflatten(planned, [x for _, x in found]))
