"""Create the parameters and the first state of a run, in storage."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.comm.explicit import auto_context, on_auto_mesh
from zerojax.config import Config
from zerojax.layout.leaf import Leaf
from zerojax.layout.tree import Layout, check_experts_named, layout_of
from zerojax.optim.plan import ShardingPlan, make_plan, plan_of_layout
from zerojax.placement.place import (
    MOST_PROGRAMS,
    are_shapes,
    cast_params,
    check_host_room,
    init_programs,
    place_params,
    place_replicated,
)
from zerojax.placement.storage import in_storage, leaves_of, named_tree
from zerojax.staged.state import (
    dtype_of,
    files_of_params,
    files_of_run,
    placed_leaf,
    put_on_disk,
    shapes_on_disk,
    unlocked_on_error,
    write_params,
)
from zerojax.streaming.adopted_state import adopt_state
from zerojax.streaming.init_state import Deferred, init_opt_state, state_shapes
from zerojax.train.loss_scaling import init_scaling
from zerojax.train.same_run import require_same_programs, require_same_run, require_same_values
from zerojax.train.state import ZeroState


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
        return on_auto_mesh(
            config.user_mesh, functools.partial(write_params, config, wide, one_by_one(programs, args), files)
        )
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
    """Copy parameters into storage; see `ZeroTransformation.shard`."""
    layout = layout_of(config, shapes_on_disk(params))
    layout = in_master_types(layout, layout.trained)
    remember_experts(config, layout)
    if config.params_on_disk:
        return on_auto_mesh(config.user_mesh, functools.partial(put_on_disk, config, layout), params)

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
        wide = [deferred(config, x, leaf) for x, leaf in zip(leaves_of(params), layout.params, strict=True)]
    else:
        wide = place_params(config, layout, params)
    with contextlib.nullcontext() if files is None else unlocked_on_error(files):
        if shapes:
            opt_state = state_shapes(config, plan)
        else:
            opt_state = (
                init_opt_state(config, plan, wide) if plain is None else adopt_state(config, plan, plain, params)
            )
    if tree is None:
        tree = in_storage(cast_params(config, layout, wide, like=layout.params), layout)
    return ZeroState(step, tree, opt_state, scaling, mutable, plan)


def deferred(config: Config, x: Any, leaf: Leaf) -> Any:
    """Return a `Deferred` parameter, which is copied to the devices later and keeps the type of `x`."""
    return Deferred(functools.partial(placed_leaf, config, x, leaf), leaf.storage_shape, dtype_of(x))
