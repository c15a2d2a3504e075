"""Bind equations of a jaxpr again, in the context of another mesh."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

from zerojax import compat


def with_inner_jaxprs(eqn, new: dict[int, Any]) -> Any:
    """Replace each open jaxpr in the parameters of `eqn` by `new[id(jaxpr)]`, if given. Return None for a `HiPrim`."""
    if "_prim" in eqn.params:
        return None

    def replaced(value):
        if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
            return type(value)(map(replaced, value))
        if not compat.is_jaxpr(value) or id(compat.opened(value)[0]) not in new:
            return value
        closed: Any = value
        inner = new[id(compat.opened(closed)[0])]
        return compat.with_jaxpr(closed, inner)

    return eqn.replace(params={name: replaced(value) for name, value in eqn.params.items()})


def in_force(eqn):
    """Return `eqn` as if it had been traced on the current mesh. The rest of the equation's context is unchanged."""
    mesh = jax.sharding.get_abstract_mesh()
    with eqn.ctx.manager, jax.sharding.use_abstract_mesh(mesh):
        return eqn.replace(ctx=type(eqn.ctx)())


def all_in_force(jaxpr):
    """Return an open jaxpr in which every equation, also of inner jaxprs, is changed by `in_force`."""

    def changed(eqn):
        inner = {id(body): all_in_force(body) for body in compat.inner_jaxprs(eqn)}
        return in_force(with_inner_jaxprs(eqn, inner) or eqn)

    return jaxpr.replace(eqns=[*map(changed, jaxpr.eqns)])


def shard_map_of(eqn, fn: Callable, **options: Any) -> Callable:
    """Return `jax.shard_map` of `fn` with the options of the `shard_map` equation `eqn`, except the given `options`."""
    params = eqn.params
    specs = {"in_specs": tuple(params["in_specs"]), "out_specs": tuple(params["out_specs"]), "mesh": params["mesh"]}
    others = {"axis_names": set(params["newly_manual_axes"]), "check_vma": params["check_vma"]}
    return jax.shard_map(fn, **(specs | others | options))


def mesh_of_calls() -> Any:
    """Return the mesh that a call of `jax.jit` would record if it were traced here, or None if there is no mesh."""
    (call,) = compat.opened(jax.make_jaxpr(jax.jit(lambda: 0.0))())[0].eqns
    return call.params.get("ctx_mesh")


def like(closed, other):
    """Return `closed`, opened if `other` is an open jaxpr, so that the result can replace `other` in an equation."""
    if isinstance(other, core.ClosedJaxpr):
        return closed
    jaxpr, consts = compat.opened(closed)
    assert not consts
    return jaxpr
