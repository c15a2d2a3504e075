"""Convert the optimizer state between the form that a plan describes and two other forms, and check both.

The first form is the state that `init` and `update` return. Its Flax annotations describe the layout of the state, and
`Annotated` adds facts that `update` cannot see under `jax.jit`. The second form has the full state in device memory,
for programs that need all of it at once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from zerojax import compat
from zerojax.comm.mesh import replicated
from zerojax.compat import common_dtype
from zerojax.config import Config, LayoutPolicy
from zerojax.config.data_mesh import axes_of
from zerojax.layout.annotations import overwritten_leaves
from zerojax.layout.leaf import Leaf, is_chunked, is_padded, metadata_of
from zerojax.layout.tree import Layout, layout_of
from zerojax.offload.chunked import Chunking, chunked, join_chunks, split_chunks
from zerojax.offload.host import host_sharding
from zerojax.optim.master_weights import wrapped_tx
from zerojax.optim.plan import ShardingPlan
from zerojax.optim.transformation import tree_difference
from zerojax.placement.storage import named, shapes

if TYPE_CHECKING:
    from jaxtyping import PyTree

ON_DISK = (
    "The optimizer state is on disk, which a jitted program cannot reach. Make it with tx.create(params), and update "
    "it with the step of tx.train_step, both called as they are, outside of jax.jit."
)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["state"], meta_fields=["others", "overwritten"])
@dataclasses.dataclass(frozen=True)
class Annotated:
    """The state of an optimizer, with facts about the parameters that `update` cannot see.

    Under `jax.jit`, `update` cannot see which Auto axes, other than the data axes, divide a parameter. Flax's
    `nnx.Optimizer` passes arrays without their variables, whose class marks overwritten parameters.
    """

    state: PyTree  # the state, in the structure of the wrapped transformation
    # `Leaf.others` of each parameter; () if no Auto axis other than the data axes divides a parameter
    others: tuple[tuple, ...]
    # indices of the overwritten parameters that `update` cannot recognise by their paths or shapes
    overwritten: tuple[int, ...]


def seen_in(state: PyTree) -> dict[str, tuple]:
    """Return the facts in an `Annotated` state as keyword arguments of `layout_of`. Other states give no arguments."""
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
    same = jax.tree.structure(relabelled(plan, planned), is_leaf=is_chunked) == jax.tree.structure(
        state, is_leaf=is_chunked
    )
    return planned if same else state


def rechunked(config: Config, plan: ShardingPlan, state: PyTree) -> PyTree:
    """Put `Chunked` nodes back into a state from which Flax's `nnx.update` has removed them.

    `nnx.Optimizer` stores each node as nested dicts of its chunks after its first update. Any other state is returned
    unchanged.
    """
    if not plan.offloaded or is_on_disk(config):
        return state
    found = [(jax.tree_util.keystr(path), x) for path, x in jax.tree_util.tree_leaves_with_path(state)]
    paths = lambda leaf, one: [f"{leaf.path}['chunks'][{n}]" for n in range(len(one.extents))] if one else [leaf.path]
    wanted = [path for pair in zip(plan.state, plan.chunkings, strict=True) for path in paths(*pair)]
    if [path for path, _ in found] != wanted:
        return state
    planned = jax.tree.structure(state_shapes(config, plan))
    return as_returned(config, plan, jax.tree.unflatten(planned, [x for _, x in found]))


def relabelled(plan: ShardingPlan, state: PyTree) -> PyTree:
    """Return the state with Flax annotations that describe the layouts of the state, and not of the parameters."""
    is_annotated = lambda x: bool(metadata_of(x).get("out_sharding"))
    nodes, treedef = jax.tree.flatten(state, is_leaf=lambda x: is_chunked(x) or is_annotated(x))
    new = [x.copy(out_sharding=leaf.spec) if is_annotated(x) else x for x, leaf in zip(nodes, plan.state, strict=True)]
    return jax.tree.unflatten(treedef, new)


def state_to_device(config: Config, plan: ShardingPlan, state: PyTree) -> PyTree:
    """Return the state with the chunks of all offloaded leaves copied to the device and joined.

    Raises:
        TypeError: If a leaf is on disk, because a traced program cannot read files.
    """

    def one(x, leaf: Leaf):
        if not is_chunked(x):
            return x
        if x.store is not None:
            raise TypeError(ON_DISK)
        chunks = [jax.device_put(chunk, named(config, leaf)) for chunk in x.chunks]
        return join_chunks(config.mesh, chunks, leaf, x.chunking)

    leaves = jax.tree.leaves(state, is_leaf=is_chunked)
    return jax.tree.unflatten(plan.state_def, list(map(one, leaves, plan.state)))


def state_to_host(config: Config, plan: ShardingPlan, state: PyTree) -> PyTree:
    """Undo `state_to_device`."""

    def one(x, where):
        if not is_chunked(where):
            return x
        if is_on_disk(config):
            raise TypeError(ON_DISK)
        chunks = split_chunks(config.mesh, x, where.leaf, where.chunking)
        return dataclasses.replace(where, chunks=tuple(map(jax.device_put, chunks, where.chunks)))

    shardings = jax.tree.leaves(state_shardings(config, plan), is_leaf=is_chunked)
    return jax.tree.unflatten(plan.state_def, list(map(one, jax.tree.leaves(state), shardings)))


def state_shardings(config: Config, plan: ShardingPlan) -> PyTree:
    """Return the state's tree of `NamedSharding`s. Offloaded leaves are `Chunked` nodes of shardings."""
    return jax.tree.map(lambda x: x.sharding, state_shapes(config, plan))


def state_shapes(config: Config, plan: ShardingPlan) -> PyTree:
    """Return the storage shapes and shardings of the state as a tree. The nodes of state on disk have no store."""

    def one(leaf: Leaf, chunking: Chunking | None):
        if chunking is None:
            return jax.ShapeDtypeStruct(leaf.storage_shape, leaf.dtype, sharding=named(config, leaf))
        if is_on_disk(config):
            version = jax.ShapeDtypeStruct((), np.int32, sharding=replicated(config.mesh))
            return chunked(config, [version], leaf, chunking)
        where = host_sharding(config.mesh, leaf.spec)
        chunks = [jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=where) for shape in chunking.chunk_shapes(leaf)]
        return chunked(config, chunks, leaf, chunking)

    return jax.tree.unflatten(plan.state_def, list(map(one, plan.state, plan.chunkings)))


def is_on_disk(config: Config) -> bool:
    return config.offload is not None and config.offload.optimizer == "disk"


def check_state(plan: ShardingPlan, state: PyTree, *, may_be_wider: bool = False) -> None:
    """Raise a `ValueError` for the first leaf of `state` that differs from the plan.

    With `may_be_wider`, a float leaf may have a wider type than `init` gave it. An update returns such a state if the
    gradients are wider than the parameters.
    """
    remedy = "Make a new state with init(params), or pass the parameters, stage and mesh it was made for."
    found, structure = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_chunked)
    if structure != plan.state_def:
        what = tree_difference(found, plan.state)
        raise ValueError(f"The optimizer state does not belong to these parameters: it {what}. {remedy}")
    for (_, x), leaf, chunking in zip(found, plan.state, plan.chunkings, strict=True):
        if (x.chunking if is_chunked(x) else None) != chunking:
            where = f"offloaded in {len(x.chunking.extents)} chunks" if is_chunked(x) else "on the device"
            wanted = f"offloaded in {len(chunking.extents)} chunks" if chunking else "on the device"
            raise ValueError(f"opt_state{leaf.path} is {where}, and this transformation has it {wanted}. {remedy}")
        changed = x.dtype != leaf.dtype and jnp.issubdtype(leaf.dtype, jnp.floating)
        changed = changed and not (may_be_wider and common_dtype(x.dtype, leaf.dtype) == x.dtype)
        if changed and tuple(x.shape) == leaf.storage_shape:
            raise ValueError(
                f"opt_state{leaf.path} is {x.dtype}, and init made it {leaf.dtype}. If an update returned this state, "
                f"the transformation changes the type of its state, as optax.inject_hyperparams does for parameters of "
                f"several types. Give all parameters one type, or let the transformation keep it, as mu_dtype= of "
                f"optax.adamw does."
            )
        if tuple(x.shape) != leaf.storage_shape:
            raise ValueError(
                f"The optimizer state does not belong to these parameters: opt_state{leaf.path} is "
                f"{x.dtype}{list(x.shape)}, and {leaf.dtype}{list(leaf.storage_shape)} is required (storage shape; "
                f"logical {list(leaf.shape)}, {leaf.shards} shards). {remedy}"
            )


def check_params(config: Config, plan: ShardingPlan, params: PyTree) -> None:
    """Raise a `ValueError` unless the plan was made for these parameters and for the configuration of the step."""
    policy = config.layout_policy
    if plan.layout.policy != policy:
        made = plan.layout.policy
        raise ValueError(
            f"The state was made for {policy_in_words(made)}, and the step is for {policy_in_words(policy)}. "
            f"Make it with this transformation's create(params)."
        )
    found, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_padded)
    if structure != plan.layout.treedef:
        raise ValueError(
            f"The state was not made with these parameters: their tree "
            f"{tree_difference(found, plan.layout.params)}. Make a new state with create(params)."
        )
    for (_, x), leaf in zip(found, plan.layout.params, strict=True):
        if tuple(x.shape) == leaf.shape and x.dtype != leaf.dtype:
            raise ValueError(
                f"params{leaf.path} is {x.dtype}, and the state was made for {leaf.dtype}. Cast new values to the type "
                f"of the state: x.astype({leaf.dtype}). To begin from {x.dtype} weights without rounding, give them to "
                f"create(params, opt_state=tx.unshard(state.opt_state))."
            )
        if tuple(x.shape) != leaf.shape:
            raise ValueError(
                f"params{leaf.path} is {x.dtype}{list(x.shape)}, and the state was made for {leaf.dtype}"
                f"{list(leaf.shape)} (logical). Make a new state with create(params)."
            )
    for found, required in zip(roles(layout_of(config, params)), roles(plan.layout), strict=True):
        if found != required:
            raise ValueError(
                f"The state was made with another precision= or trainable= than the step: {required}, and the step "
                f"needs {found}. Make a new state with this transformation's create(params)."
            )
    trained = plan.trained
    init = wrapped_tx(config, trained).init
    state = compat.eval_shape(init, jax.tree.unflatten(trained.treedef, shapes(trained.grads)))
    if jax.tree.structure(state) != plan.state_def:
        found = jax.tree_util.tree_flatten_with_path(state)[0]
        raise ValueError(
            f"The state was made with another transformation than the step's, whose state "
            f"{tree_difference(found, plan.state)}. Make a new state with this transformation's create(params)."
        )


def policy_in_words(policy: LayoutPolicy) -> str:
    """Describe a layout policy for an error message."""
    host = ", parameters on the host" * policy.params_on_host
    data = policy.data
    return (
        f"stage {policy.stage} on {data.workers} devices over {data.in_words()} of a mesh {dict(data.sizes)} "
        f"(persist_below={policy.persist_below}{host})"
    )


def roles(layout: Layout) -> Iterator[str]:
    """Yield a text per parameter that says whether it is trained, the type of its gradient, and its compute type."""
    for i, (part, compute) in enumerate(zip(layout.grads, layout.compute, strict=True)):
        yield f"params{part.path} {layout.why_not_trained(i) or 'trained'}, {part.dtype} computed in {compute}"
