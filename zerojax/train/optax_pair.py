"""The methods of `ZeroTransformation` for optax, Flax and hand-written loops, such as `init` and `update`."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from zerojax.comm.explicit import on_auto_mesh, to_explicit
from zerojax.comm.mesh import replicated
from zerojax.config import Config
from zerojax.layout.padded import without_padding
from zerojax.layout.tree import layout_of
from zerojax.offload.host import to_device
from zerojax.optim.logical_state import unshard_state
from zerojax.optim.plan import ShardingPlan, make_plan
from zerojax.optim.state_forms import as_returned, seen_in, state_shardings
from zerojax.placement.place import storage_of
from zerojax.placement.storage import named_tree, padded_forms, storage_forms
from zerojax.placement.unusable import unusable_named
from zerojax.staged.state import files_of, loaded, shapes_on_disk
from zerojax.streaming.adopted_state import adopt_state
from zerojax.streaming.init_state import init_opt_state
from zerojax.train.same_run import SameCalls, signature_of
from zerojax.train.state import ZeroState
from zerojax.train.tree_api import TreeForm, update_tree


def init(config: Config, params: Any) -> Any:
    """Return the initial optimizer state of the wrapped transformation, sharded for the stage."""
    plan = make_plan(config, params)
    make = lambda params: as_returned(config, plan, init_opt_state(config, plan, storage_of(params, plan.layout)))
    return on_auto_mesh(config.user_mesh, make, params, shardings=lambda _: init_shardings(config, plan))


def adopt(config: Config, state: Any, params: Any) -> Any:
    """Shard a plain optimizer state; see `ZeroTransformation.adopt`."""
    plan = make_plan(config, params)
    place = lambda state, params: as_returned(config, plan, adopt_state(config, plan, state, params))
    return on_auto_mesh(config.user_mesh, place, state, params, shardings=lambda _: init_shardings(config, plan))


def unshard(config: Config, tree: Any, params: Any = None) -> Any:
    """Gather a tree into logical arrays; see `ZeroTransformation.unshard`."""
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
    return as_returned(config, plan, state_shardings(config, plan))


def update(config: Config, updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
    """Return updates with the structure and shardings of the parameters, and the new optimizer state."""
    check_context(config)
    like = updates if params is None else params
    number = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
    arrays = {k: v for k, v in extra.items() if all(isinstance(x, number) for x in jax.tree.leaves(v))}
    static = tuple((k, v) for k, v in extra.items() if k not in arrays)
    form = TreeForm(config, layout_of(config, like, **seen_in(state)), padded_forms(like))
    same = same_updates(config)
    is_new = same.is_new((signature_of((updates, state, params)), static), arrays, ())
    return same.call(jitted_update, updates, state, params, arrays, form, static, is_new=is_new)


class Shardings(NamedTuple):
    """The shardings of a run, as trees of `jax.sharding.NamedSharding` for `jax.jit` and `jax.device_put`.

    Attributes:
        params: Shardings of the parameters.
        grads: Shardings of the gradients that `value_and_grad` returns.
        opt_state: Shardings of the optimizer state.
    """

    params: Any
    grads: Any
    opt_state: Any


def shardings(config: Config, params: Any) -> Shardings:
    """Return the shardings of a run; see `ZeroTransformation.shardings`."""
    plan = make_plan(config, params)
    layout = plan.layout
    found = Shardings(
        params=named_tree(config, layout.treedef, layout.params),
        grads=TreeForm(config, layout, storage_forms(layout.params)).grad_shardings,
        opt_state=init_shardings(config, plan),
    )
    return to_explicit(config.user_mesh, found)


@functools.lru_cache(maxsize=16)
def same_updates(config: Config) -> SameCalls:
    """Return the `SameCalls` that compares calls of `update` over processes. There is one per configuration."""
    return SameCalls(config, "update")


def check_context(config: Config) -> None:
    """Raise a ValueError inside of a `jax.pmap` or `jax.shard_map` over an axis that `config.mesh` does not have."""
    others = sorted(set(jax.sharding.get_abstract_mesh().manual_axes) - set(config.mesh.axis_names))
    if others:
        raise ValueError(
            f"update runs inside of jax.pmap or jax.shard_map over {', '.join(map(repr, others))}, and this "
            f"transformation's mesh has {', '.join(map(repr, config.mesh.axis_names))}. Call it outside, under "
            f"jax.jit: it divides its work over the mesh itself, and value_and_grad divides the batch."
        )


@functools.partial(jax.jit, static_argnames=("form", "static"))
def jitted_update(
    grads: Any, state: Any, params: Any, arrays: dict, form: TreeForm, static: tuple[tuple[str, Any], ...]
) -> tuple[Any, Any]:
    """Run the update as one program. `arrays` and `static` are the further keyword arguments of `update`."""
    return update_tree(form, grads, state, params, arrays | dict(static))
