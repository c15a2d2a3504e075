"""The state of a run, which a training step takes and returns: create it, place it, and read it in logical shapes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp

from zerojax import compat
from zerojax.comm.mesh import auto_context, mesh_of, on_auto_mesh, owned, replicated, to_explicit
from zerojax.config import Config
from zerojax.layout.leaf import Leaf, is_chunked, is_padded, is_stored_node
from zerojax.layout.padded import Padded, is_number_array
from zerojax.layout.tree import Layout, canonical, check_experts_named, layout_of
from zerojax.offload.chunked import Chunked, joined
from zerojax.optim.sharding_plan import ShardingPlan, make_plan, plan_of_layout, state_shapes, state_shardings
from zerojax.optim.update import init_state
from zerojax.placement import storage
from zerojax.placement.init_programs import MOST_PROGRAMS, init_programs
from zerojax.placement.problems import problem_of
from zerojax.placement.storage import (
    are_shapes,
    cast_params,
    check_host_room,
    in_logical_shape,
    in_storage,
    leaves_of,
    named_tree,
    place_params,
    place_replicated,
    to_device,
)
from zerojax.staged.params_on_disk import (
    files_of_params,
    files_of_run,
    placed_leaf,
    shapes_on_disk,
    unlocked_on_error,
    write_params,
)
from zerojax.train.loss import ScalingState, init_scaling
from zerojax.train.same_run import require_same_programs, require_same_run, require_same_values
from zerojax.units import format_bytes

if TYPE_CHECKING:
    from jaxtyping import Array, Int, PyTree


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "opt_state", "scaling", "mutable"],
    meta_fields=["plan"],
)
@dataclasses.dataclass(frozen=True, repr=False)
class ZeroState:
    """The state of a run, with parameters and optimizer state in storage.

    Attributes:
        step: Number of updates done, without skipped steps; int32 scalar.
        params: The parameters. A leaf that is padded in storage is a `Padded`.
        opt_state: The state of the wrapped transformation, in storage. With master weights, a `MasterState` that
            contains this state and the weights.
        scaling: The loss scale, and the record of skipped steps.
        mutable: The state that the loss function updates, such as batch statistics; None without `mutable=True`.
        plan: How every leaf is sharded. It belongs to the structure of the pytree and is not a leaf.

    Examples:
        >>> state = tx.create(params)
        >>> state, metrics = step(state, batch)
        >>> state.params, int(state.step)
    """

    step: Int[Array, ""]
    params: PyTree
    opt_state: PyTree
    scaling: ScalingState
    mutable: PyTree
    plan: ShardingPlan

    def __repr__(self) -> str:
        """Return the stage, and the number and size of each field's leaves. `zerojax.report` lists the leaves."""
        policy = self.plan.layout.policy
        parts = {"params": self.plan.layout.params, "opt_state": self.plan.state}
        rows = [
            f"  {name}: {len(leaves)} leaves, {format_bytes(sum(leaf.bytes for leaf in leaves))}"
            for name, leaves in parts.items()
        ]
        if self.mutable is not None:
            rows.append(f"  mutable: {len(jax.tree.leaves(self.mutable))} leaves")
        over = f"stage {policy.stage} over {policy.data.in_words()}, {policy.data.workers} devices"
        return "\n".join([f"ZeroState({over})", *rows])

    @classmethod
    def shardings(cls, config: Config, plan: ShardingPlan) -> ZeroState:
        """Return a `ZeroState` of `NamedSharding`s. A field with only replicated leaves has one sharding for all."""
        same = replicated(config.mesh)
        params = named_tree(config, plan.layout.treedef, plan.layout.params)
        return cls(same, params, state_shardings(config, plan), same, same, plan)  # pyright: ignore[reportArgumentType]

    def reset_skips(self) -> ZeroState:
        """Return a copy without the record of skipped steps, to continue after an error. Keep the loss scale."""
        record = ("skips", "nonfinite", "weights_invalid")
        zeros = {name: jnp.zeros_like(getattr(self.scaling, name)) for name in record}
        return self.replace(scaling=dataclasses.replace(self.scaling, **zeros))

    def replace(self, **changes: Any) -> ZeroState:
        """Return a copy with some fields replaced.

        Args:
            **changes: New values of fields. `opt_state` may also be a state that `tx.init` or `tx.adopt` returned.
        """
        if "opt_state" in changes:
            from zerojax.optim.returned_state import as_planned

            changes["opt_state"] = as_planned(self.plan, changes["opt_state"])
        return dataclasses.replace(self, **changes)


def ready_state(config: Config, state: ZeroState) -> ZeroState:
    """Return `state` on the mesh. If the caller moved `state` to NumPy or to another device, move it back.

    Only `state.step` is inspected, because inspecting every leaf would take time in every step.

    Raises:
        ValueError: If the state has shapes, or an earlier step used it up. Also if the caller moved a state with
            offloaded leaves, because only `create` and `restore` can place offloaded chunks.
    """
    count = state.step
    if isinstance(count, jax.core.Tracer):
        return state
    if isinstance(count, jax.ShapeDtypeStruct):
        raise ValueError(f"{problem_of(None, 'state', state)} `lower` and `trace` of the step take shapes.")
    if isinstance(count, jax.Array) and count.is_deleted():
        raise ValueError(
            "An earlier step used up this state, because steps donate their state. Continue with the state that the "
            "step returned. If the step failed, restore the last checkpoint."
        )
    is_placed = lambda x: isinstance(x, jax.Array) and x.sharding.device_set == set(config.mesh.devices.flat)
    if is_placed(count):
        return state
    if all(map(is_placed, jax.tree.leaves((state.params, state.opt_state)))):  # the caller set only the count
        return dataclasses.replace(state, step=jax.device_put(jnp.asarray(count, jnp.int32), replicated(config.mesh)))
    if state.plan.offloaded:
        found = f"on {count.sharding}" if isinstance(count, jax.Array) else f"a {type(count).__name__}"
        raise ValueError(
            f"state.step is {found}, not on the mesh. Part of the optimizer state is offloaded, and only tx.create and "
            f"Checkpointer.restore can place it. Save and restore the state with zerojax.checkpoint."
        )
    return jax.device_put(
        jax.tree.map(owned, state), to_explicit(config.user_mesh, ZeroState.shardings(config, state.plan))
    )


def donatable(state: ZeroState) -> ZeroState:
    """Copy arrays that are several leaves of a state, because a step donates every leaf. Make arrays of numbers."""
    leaves = jax.tree.leaves(state)
    if len(set(map(id, leaves))) == len(leaves) and not any(isinstance(x, int | float) for x in leaves):
        return state
    seen: set[int] = set()

    def one(x):
        if is_chunked(x) and x.store is not None:  # leaves on disk share the version of their files
            return x
        if is_chunked(x):
            return jax.tree.map(one, x)
        if not isinstance(x, jax.Array):
            return jnp.asarray(x) if isinstance(x, int | float) else x
        if id(x) in seen:
            return jax.device_put(to_device(x).copy(), x.sharding)
        seen.add(id(x))
        return x

    return jax.tree.map(one, state, is_leaf=is_chunked)


def check_is_state(state: Any, mutable: bool) -> None:
    """Raise an error if `state` is no state of a step whose loss has mutable state or not, as `mutable` says."""
    if not isinstance(state, ZeroState):
        raise TypeError(
            f"The step takes a ZeroState, not {type(state).__name__}. Make one with tx.create(params), or use "
            f"tx.value_and_grad and tx.update in a hand-written loop."
        )
    if mutable and state.mutable is None:
        raise ValueError(
            "The loss function updates a mutable state, and this ZeroState has none. Give the initial one: "
            "tx.create(params, mutable=...)."
        )
    if not mutable and state.mutable is not None:
        raise ValueError(
            "The state has a mutable state, which this step would not update. Pass mutable=True to train_step, or "
            "make the state without it."
        )


def create(config: Config, params: Any, mutable: Any, opt_state: Any) -> ZeroState:
    """Create the state of a run, and check that all processes have equal states; see `ZeroTransformation.create`."""
    plan, is_live = make_plan(config, shapes_on_disk(params)), not are_shapes(params)
    check_experts_named(plan.layout)
    if is_live:
        require_same_run(config, plan)
        require_same_values(config, "begin with values", params=params, mutable=mutable, given_opt_state=opt_state)
    shardings = lambda _: ZeroState.shardings(config, plan)
    begin = functools.partial(begin_run, config, plan)
    state = on_auto_mesh(config.user_mesh, begin, params, mutable, opt_state, shardings=shardings)
    if is_live:
        require_same_values(config, "create a state", params=state.params, opt_state=state.opt_state)
    return state


def create_like(config: Config, params: Any, mutable: Any) -> ZeroState:
    """Return the shapes, on the Auto mesh, of a state of a live run. `params` are shapes, and `mutable` has arrays."""
    plan = make_plan(config, params)
    require_same_run(config, plan)
    check_experts_named(plan.layout)
    with auto_context(config.user_mesh):
        return begin_run(config, plan, params, mutable)


def init_params(config: Config, init_fn: Callable, args: tuple) -> Any:
    """Initialise parameters in storage; see `ZeroTransformation.init_params`. Check that all processes agree."""
    layout = layout_of(config, jax.eval_shape(init_fn, *args))
    remember_experts(config, layout)
    check_host_room(config, layout)
    wide = in_master_types(layout, range(len(layout.params)))
    # For parameters on disk, each program makes about one leaf, in the type of the files, to save device memory.
    given, most = (wide, len(layout.params)) if config.params_on_disk else (layout, MOST_PROGRAMS)
    programs, what = init_programs(config, given, init_fn, args, most=most), "initialise parameters"
    require_same_values(config, what, args=args)
    require_same_programs(config, what, (functools.partial(one.lower, *args) for one in programs))
    if config.params_on_disk:
        files = files_of_params(config, layout, layout.grads)
        return on_auto_mesh(config.user_mesh, lambda: write_params(config, wide, one_by_one(programs, args), files))
    arrays = [x for program in programs for x in program(*args)]
    store = lambda arrays: in_storage(cast_params(config, layout, arrays, like=layout.grads), layout)
    return on_auto_mesh(config.user_mesh, store, arrays, shardings=lambda _: params_shardings(config, layout))


def remember_experts(config: Config, layout: Layout) -> None:
    """Record the plan of a layout with experts, because their stored arrays do not say that they are experts."""
    check_experts_named(layout)
    if config.expert_axis:
        plan_of_layout(config, layout)


def one_by_one(programs: Sequence[Callable], args: tuple) -> Iterator[Any]:
    """Call each program, and yield the elements of the list that it returns. Keep no reference to a yielded element."""
    for program in programs:
        results = list(reversed(program(*args)))
        while results:
            yield results.pop()


def in_master_types(layout: Layout, wide: Collection[int]) -> Layout:
    """Return a layout in which the parameters with the indices `wide` are stored in the types of master weights.

    A `ZeroState` stores narrow copies at some stages. Outside of it, parameters are wide, because `init` and `create`
    copy the master weights from them.
    """
    pairs = enumerate(zip(layout.params, layout.grads, strict=True))
    typed = (dataclasses.replace(x, dtype=grad.dtype) if i in wide else x for i, (x, grad) in pairs)
    return dataclasses.replace(layout, params=tuple(typed))


def shard(config: Config, params: Any) -> Any:
    layout = layout_of(config, shapes_on_disk(params))
    layout = in_master_types(layout, layout.trained)
    remember_experts(config, layout)
    if config.params_on_disk:
        files = files_of_params(config, layout, layout.params)
        write = lambda params: write_params(config, layout, leaves_of(params), files, shapes=are_shapes(params))
        return on_auto_mesh(config.user_mesh, write, params)

    def store(params):
        arrays = place_params(config, layout, params)
        return in_storage(cast_params(config, layout, arrays, like=layout.params), layout)

    return on_auto_mesh(config.user_mesh, store, params, shardings=lambda _: params_shardings(config, layout))


def params_shardings(config: Config, layout: Layout) -> Any:
    return named_tree(config, layout.treedef, layout.params)


def begin_run(config: Config, plan: ShardingPlan, params: Any, mutable: Any, plain: Any = None) -> ZeroState:
    """Return the state at step 0: parameters in storage, and the adopted state `plain` or a fresh optimizer state.

    If `params` are shapes, the state consists of shapes. Parameters on disk are written to files, one after the other.
    """
    layout, shapes, files, tree = plan.layout, are_shapes(params), None, None
    if layout.overwritten and config.params_on_disk:
        raise ValueError(
            f"params{layout.params[layout.overwritten[0]].path} takes its gradient as its new value, which a step in "
            f'stages does not do. Use Offload(params="host").'
        )
    others = (jnp.zeros((), jnp.int32), init_scaling(config.precision, len(plan.grads)), mutable)
    step, scaling, mutable = place_replicated(config.mesh, others, shapes=shapes)
    if config.params_on_disk:
        files = files_of_run(config, plan)
        tree = write_params(config, layout, leaves_of(params), files, shapes=shapes)
        from zerojax.streaming.init_state import Deferred

        # These are copied to the devices later, one after the other, and keep their types.
        later = lambda x, leaf: Deferred(lambda: placed_leaf(config, x, leaf), leaf.storage_shape, canonical(x.dtype))
        wide: Any = [later(x, leaf) for x, leaf in zip(leaves_of(params), layout.params, strict=True)]
    else:
        wide = place_params(config, layout, params)
    with contextlib.nullcontext() if files is None else unlocked_on_error(files):
        if shapes and not plan.offloaded:
            opt_state = state_shapes(config, plan)
        elif shapes:
            from zerojax.streaming.init_state import first_shapes

            opt_state = first_shapes(config, plan)
        elif plain is None:
            opt_state = init_opt_state(config, plan, wide)
        else:
            from zerojax.streaming.adopted_state import adopt_state

            opt_state = adopt_state(config, plan, plain, params)
    if tree is None:
        tree = in_storage(cast_params(config, layout, wide, like=layout.params), layout)
    return ZeroState(step, tree, opt_state, scaling, mutable, plan)


def init_opt_state(config: Config, plan: ShardingPlan, stored: Sequence[Any]) -> PyTree:
    """Return the wrapped transformation's first state, sharded and offloaded as `plan` says."""
    is_whole = not plan.offloaded and not config.params_on_disk
    if is_whole or any(isinstance(x, jax.core.Tracer) for x in stored):
        return init_state(config, plan, stored)
    from zerojax.streaming.init_state import init_state_by_group

    return init_state_by_group(config, plan, stored)


def logical(tree: PyTree) -> PyTree:
    """Replace each `Padded` of a tree by its logical array, for statistics, assertions and logging.

    Under `jax.jit`, each logical array is a slice of the stored array. The compiler keeps it sharded, without a gather.

    Args:
        tree: Parameters, gradients, updates, a `ZeroState`, or a tree that contains them. For an optimizer state,
            pass its `ZeroState`, which records which arrays are padded or flat, or call `tx.unshard(opt_state)`.

    Returns:
        The tree with logical arrays. In a `ZeroState`, the leaves of `opt_state` also get their logical shapes, and
        offloaded leaves are copied to the devices. Such a state cannot be passed to a training step.

    Examples:
        >>> means = jax.jit(lambda params: jax.tree.map(jnp.mean, zerojax.logical(params)))(state.params)
    """
    is_node = lambda x: is_stored_node(x) or isinstance(x, ZeroState)
    one = lambda x: logical_state(x) if isinstance(x, ZeroState) else logical_leaf(x)
    return jax.tree.map(one, tree, is_leaf=is_node)


def logical_leaf(x: Any) -> Any:
    """Return the logical array of a `Padded` or of a leaf on disk. Return any other leaf unchanged."""
    if is_chunked(x):
        return logical_of_stored(x, x.leaf)
    if not is_padded(x):
        return x
    if isinstance(x.storage, jax.ShapeDtypeStruct):
        return compat.eval_shape(Padded.logical, x)
    return on_auto_mesh(mesh_of(x.storage), storage.logical, x) if is_number_array(x.storage) else x.storage


def logical_state(state: ZeroState) -> ZeroState:
    """Return a state in which every array has its logical shape."""
    leaves, structure = jax.tree.flatten(state.opt_state, is_leaf=is_chunked)
    arrays = [logical_of_stored(x, leaf) for x, leaf in zip(leaves, state.plan.state, strict=True)]
    params = jax.tree.map(logical_leaf, state.params, is_leaf=is_stored_node)
    return dataclasses.replace(state, params=params, opt_state=jax.tree.unflatten(structure, arrays))


def logical_of_stored(x: Any, leaf: Leaf) -> Any:
    """Return the logical array of a stored leaf, given its layout."""
    if isinstance(x, Chunked) and any(isinstance(chunk, jax.ShapeDtypeStruct) for chunk in x.chunks):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    array = joined(x) if isinstance(x, Chunked) else x
    trim = functools.partial(in_logical_shape, leaf=leaf)
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.eval_shape(trim, array)
    return on_auto_mesh(mesh_of(array), trim, array) if array.shape != leaf.shape else array
