"""The first state of a run."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from zerojax.comm.explicit import on_auto_mesh
from zerojax.config import Config
from zerojax.layout.leaf import Leaf
from zerojax.optim.plan import ShardingPlan, make_plan
from zerojax.placement.place import are_shapes, cast_params, place_params, place_replicated
from zerojax.placement.storage import in_storage, named
from zerojax.staged.state import (
    dtype_of,
    files_of_run,
    leaves_of_tree,
    node_of,
    node_of_shape,
    on_disk,
    placed_leaf,
    shapes_on_disk,
    write_leaf,
)
from zerojax.streaming.adopted_state import adopt_state
from zerojax.streaming.init_state import Deferred, init_opt_state, state_shapes
from zerojax.train.loss_scaling import init_scaling
from zerojax.train.same_run import live_plan, require_same_programs, require_same_values
from zerojax.train.serialization import known_to_flax
from zerojax.train.state import ZeroState


def create(config: Config, params: Any, mutable: Any, opt_state: Any) -> ZeroState:
    """Create a state that is the same on every process; see `ZeroTransformation.create`."""
    plan, is_live = make_plan(config, shapes_on_disk(params)), not are_shapes(params)
    if is_live:
        plan = live_plan(config, plan)
        require_same_values(config, "begin with values", params=params, mutable=mutable, given_opt_state=opt_state)
    begin = functools.partial(begin_on_disk if config.params_on_disk else begin_run, config, plan)
    shardings = lambda _: ZeroState.shardings(config, plan)
    state = on_auto_mesh(config.user_mesh, begin, params, mutable, opt_state, shardings=shardings)
    if is_live:
        require_same_values(config, "create a state", params=state.params, opt_state=state.opt_state)
    return state


def initialised(config: Config, programs: list[Any], args: tuple) -> list[Any]:
    """Run the programs that make the parameters, which are the same on every process, as are their arguments."""
    what = "initialise parameters"
    require_same_values(config, what, args=args)
    require_same_programs(config, what, (functools.partial(one.lower, *args) for one in programs))
    return [x for program in programs for x in program(*args)]


def begin_run(config: Config, plan: ShardingPlan, params: Any, mutable: Any, plain: Any = None) -> ZeroState:
    """Place parameters in storage, with a fresh optimizer state or the `plain` one, at step 0; of shapes, shapes."""
    known_to_flax()
    shapes = are_shapes(params)
    others = (jnp.zeros((), jnp.int32), init_scaling(config.precision, len(plan.grads)), mutable)
    step, scaling, mutable = place_replicated(config.mesh, others, shapes=shapes)
    wide = place_params(config, plan.layout, params)
    opt_state = state_shapes(config, plan) if shapes else first_state(config, plan, params, wide, plain)
    stored = cast_params(config, plan.layout, wide, like=plan.layout.params)
    errors = {path: zeros(leaf, named(config, leaf), shapes=shapes) for path, leaf in plan.errors}
    return ZeroState(step, in_storage(stored, plan.layout), opt_state, scaling, mutable, errors, plan)


def begin_on_disk(config: Config, plan: ShardingPlan, params: Any, mutable: Any, plain: Any = None) -> ZeroState:
    """Write parameters to files, one after the other; otherwise like `begin_run`."""
    known_to_flax()
    layout, shapes = plan.layout, are_shapes(params)
    kept, given = on_disk(config, layout), leaves_of_tree(params)
    if layout.overwritten:
        raise ValueError(
            f"params{layout.params[layout.overwritten[0]].path} takes its gradient as its new value, which a step in "
            f'stages does not do. Take Offload(params="host").'
        )
    others = (jnp.zeros((), jnp.int32), init_scaling(config.precision, len(plan.grads)), mutable)
    step, scaling, mutable = place_replicated(config.mesh, others, shapes=shapes)
    if shapes:
        stored = [
            jax.ShapeDtypeStruct(leaf.storage_shape, leaf.dtype, sharding=named(config, leaf)) for leaf in layout.params
        ]
        nodes = {i: node_of_shape(config, of) for i, of in kept.items()}
        opt_state = state_shapes(config, plan)
    else:
        files = files_of_run(config, plan)
        wide = {i: placed_leaf(config, x, layout.params[i]) for i, x in enumerate(given) if i not in kept}
        for i, of in kept.items():
            write_leaf(files, of, placed_leaf(config, given[i], layout.params[i]))
        files.flush()
        nodes = {i: node_of(files, of) for i, of in kept.items()}
        later = {
            i: Deferred(
                functools.partial(placed_leaf, config, given[i], layout.params[i]),
                layout.params[i].storage_shape,
                dtype_of(given[i]),
            )
            for i in kept
        }
        all_wide: list = [wide.get(i, later.get(i)) for i in range(len(given))]
        opt_state = first_state(config, plan, params, all_wide, plain)
        stored = [
            x.astype(leaf.dtype) if isinstance(x, jax.Array) else x
            for x, leaf in zip(all_wide, layout.params, strict=True)
        ]
    tree = jax.tree.unflatten(layout.treedef, [nodes.get(i, x) for i, x in enumerate(stored)])
    return ZeroState(step, tree, opt_state, scaling, mutable, {}, plan)


def first_state(config: Config, plan: ShardingPlan, params: Any, wide: list, plain: Any) -> Any:
    """Return the optimizer state that a run begins with: one of `wide` parameters in storage, or the `plain` one."""
    return init_opt_state(config, plan, wide) if plain is None else adopt_state(config, plan, plain, params)


def zeros(leaf: Leaf, sharding: NamedSharding, *, shapes: bool) -> Any:
    """Return zeros in a leaf's storage, or only their shape if `shapes`."""
    of = jax.ShapeDtypeStruct(leaf.storage_shape, leaf.dtype, sharding=sharding)
    return of if shapes else jnp.zeros(of.shape, of.dtype, device=sharding)
