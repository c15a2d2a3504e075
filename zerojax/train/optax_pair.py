"""`init` and `update` of a `ZeroTransformation`: what optax, Flax and hand-written loops call."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from zerojax.comm.events import EVENTS, first_array
from zerojax.comm.explicit import on_auto_mesh
from zerojax.comm.mesh import replicated
from zerojax.config import Config
from zerojax.layout.padded import without_padding
from zerojax.layout.tree import Layout, layout_of
from zerojax.offload.host import to_device
from zerojax.optim.logical_state import unshard_state
from zerojax.optim.outer_chain import warn_of_outer_transformations
from zerojax.optim.plan import ShardingPlan, make_plan
from zerojax.optim.returned_state import as_returned, seen_in
from zerojax.optim.state_memory import state_shardings
from zerojax.placement.place import storage_of
from zerojax.placement.storage import Form, padded_forms
from zerojax.placement.unusable import unusable_named
from zerojax.staged.state import files_of, loaded, shapes_on_disk
from zerojax.streaming.adopted_state import adopt_state
from zerojax.streaming.init_state import init_opt_state
from zerojax.train.same_run import SameCalls, types_of
from zerojax.train.serialization import known_to_flax
from zerojax.train.state import ZeroState
from zerojax.train.tree_api import update_tree


def init(config: Config, params: Any) -> Any:
    """Return the state of the wrapped transformation, sharded for the stage, as `optax`'s init does."""
    known_to_flax()
    plan = make_plan(config, params)
    make = lambda params: as_returned(config, plan, init_opt_state(config, plan, storage_of(params, plan.layout)))
    return on_auto_mesh(config.user_mesh, make, params, shardings=lambda _: init_shardings(config, plan))


def adopt(config: Config, state: Any, params: Any) -> Any:
    """Shard a plain optimizer state; see `ZeroTransformation.adopt`."""
    known_to_flax()
    plan = make_plan(config, params)
    place = lambda state, params: as_returned(config, plan, adopt_state(config, plan, state, params))
    return on_auto_mesh(config.user_mesh, place, state, params, shardings=lambda _: init_shardings(config, plan))


def unshard(config: Config, tree: Any, params: Any = None) -> Any:
    """Gather a tree into logical arrays; see `ZeroTransformation.unshard`.

    Raises:
        ValueError: If the tree is an optimizer state whose logical shapes are not known, or an array was donated or is
            on another mesh.
    """
    if isinstance(tree, ZeroState):
        raise ValueError(
            "tx.unshard takes parameters or an optimizer state, and this is a ZeroState, which has both. Call "
            "tx.unshard(state.params) and tx.unshard(state.opt_state)."
        )
    with unusable_named(config.mesh, tree=tree):
        is_params = files_of(tree) is not None
        if not is_params and (state := unshard_state(config, tree, shapes_on_disk(params))) is not None:
            return state
        on_device = jax.tree.map(lambda x: to_device(x) if isinstance(x, jax.Array) else x, loaded(tree))
        gather = functools.partial(on_auto_mesh, config.user_mesh, without_padding)
        return jax.jit(gather, out_shardings=replicated(config.user_mesh))(on_device)


def init_shardings(config: Config, plan: ShardingPlan) -> Any:
    """Return the shardings of what `init` returns."""
    return as_returned(config, plan, state_shardings(config, plan))


def update(config: Config, updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
    """Return updates in the form and layout of the parameters, and the new state, as `optax`'s update does."""
    check_context(config)
    like = updates if params is None else params
    number = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
    arrays = {k: v for k, v in extra.items() if all(isinstance(x, number) for x in jax.tree.leaves(v))}
    static = tuple((k, v) for k, v in extra.items() if k not in arrays)
    layout, forms = layout_of(config, like, **seen_in(state)), padded_forms(like)
    warn_of_outer_transformations(layout, forms)
    given = (updates, state, params, arrays, config, layout, forms, static)
    same = same_updates(config)
    if not same.is_needed:
        return jitted_update(*given)
    if same.is_first((types_of((updates, state, params)), static), arrays, ()):
        same.require_same_program(functools.partial(jitted_update.lower, *given))
    with EVENTS.calling("update", config.mesh) as call:
        returned = jitted_update(*given)
        call.result = first_array(returned)
    return returned


@functools.lru_cache(maxsize=16)
def same_updates(config: Config) -> SameCalls:
    """Return what compares the updates of one configuration with those of the other processes."""
    return SameCalls(config, "update")


def check_context(config: Config) -> None:
    """Refuse to update where each device runs a program of its own.

    Raises:
        ValueError: Inside of `jax.pmap`, or of `jax.shard_map` over a mesh without the transformation's axes.
    """
    others = sorted(set(jax.sharding.get_abstract_mesh().manual_axes) - set(config.mesh.axis_names))
    if others:
        raise ValueError(
            f"update runs inside of jax.pmap or jax.shard_map over {', '.join(map(repr, others))}, and this "
            f"transformation's mesh has {', '.join(map(repr, config.mesh.axis_names))}. Call it outside, under "
            f"jax.jit: it divides its work over the mesh itself, and value_and_grad divides the batch."
        )


@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7))
def jitted_update(
    grads: Any,
    state: Any,
    params: Any,
    extra: dict,
    config: Config,
    layout: Layout,
    forms: tuple[Form, ...],
    static: tuple,
) -> tuple[Any, Any]:
    """Run the update as one program."""
    return update_tree(config, layout, forms, grads, state, params, extra | dict(static))
