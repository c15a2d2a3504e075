"""The update of a piece in host memory: every device's part by itself, in one pass where that can be had."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from zerojax import compat, jaxprs
from zerojax.config import Config
from zerojax.offload.blocked import in_blocks
from zerojax.offload.host import host_sharding
from zerojax.optim.elementwise import ELEMENTWISE, INLINED
from zerojax.optim.partition import CONST, GRAD, PARAM, SHARED, STATE
from zerojax.streaming.chunk_programs import Kind


def on_host(config: Config, kind: Kind) -> Callable:
    """`f(params, grads, state, shared, consts) -> (params, state)`, all in host memory.

    Pieces are given and come back, in the place of those given where they can be. New
    parameters are in the type they are stored in.
    """
    leaves = [*kind.params, *kind.state]
    where = [host_sharding(config.mesh, leaf.spec) for leaf in leaves]
    part, whole = kind.params[0].local_spec, PartitionSpec()
    compute = in_one_pass if blockable(kind) else at_once

    def run(params, grads, state, shared, consts):
        # each device's part by itself: as one array over all devices, a block would be cut across them
        local = jax.shard_map(
            compat.on_host(functools.partial(compute, kind)),
            mesh=config.mesh,
            in_specs=(part, part, part, whole, whole),
            out_specs=part,
            axis_names=set(config.data.batch),
            check_vma=False,
        )
        new = local(params, grads, state, shared, consts)
        return new[: len(kind.params)], new[len(kind.params) :]

    # new parameters take the place of the old ones, or of gradients, if either is there in the type they are stored in
    taken = 0 if kind.reads_params else 1
    donated = (taken, 2) if all(x.dtype == y for x, y in zip(kind.params, kind.stored, strict=True)) else 2
    return jax.jit(run, donate_argnums=donated, out_shardings=(where[: len(kind.params)], where[len(kind.params) :]))


def at_once(kind: Kind, params: list, grads: list, state: list, shared: list, consts: list) -> list:
    """New parameters and new state of a piece."""
    held = {PARAM: params, GRAD: grads, STATE: state, SHARED: shared, CONST: consts}
    values = [typed(kind, name, i, held[name][i]) for name, i in kind.reads]
    new = evaluated(kind, values, (params or grads or state)[0].shape)
    types = [*kind.stored, *(x.dtype for x in state)]
    return [x.astype(dtype) for x, dtype in zip(new, types, strict=True)]


def in_one_pass(kind: Kind, params: list, grads: list, state: list, shared: list, consts: list) -> list:
    """The same, block by block, each output in the place of an operand where there is one of its type."""
    wide = [*params, *grads, *state]
    ends = len(params), len(params) + len(grads)

    def block(wide: list, shared: list) -> list:
        return at_once(kind, wide[: ends[0]], wide[ends[0] : ends[1]], wide[ends[1] :], shared, consts)

    places = [0 if ends[1] and wide[0].dtype == dtype else None for dtype in kind.stored]
    return in_blocks(block, wide, shared, overwrites=[*places, *range(ends[1], len(wide))])


def typed(kind: Kind, name: str, i: int, x: Any) -> Any:
    """A value in the type in which the update sees it."""
    leaves = {PARAM: kind.params, GRAD: kind.grads, STATE: kind.state}
    return x.astype(leaves[name][i].dtype) if name in leaves else x


def evaluated(kind: Kind, values: Sequence, shape: tuple[int, ...]) -> list:
    """The equations, on arrays of another shape than they were traced with."""
    return [jnp.broadcast_to(x, shape) for x in reshaped(kind.part.jaxpr, (), values, shape)]


def reshaped(jaxpr: Any, consts: Sequence, values: Sequence, shape: tuple[int, ...]) -> list:
    """A jaxpr's elementwise equations on such arrays; of a `cond` all branches, which have the shapes written in."""

    def rule(eqn, given):
        if eqn.primitive.name == "broadcast_in_dim":
            return [jnp.broadcast_to(given[0], shape)]
        if eqn.primitive.name == "cond":
            index, *operands = given
            taken = [reshaped(*compat.opened(branch), operands, shape) for branch in eqn.params["branches"]]
            return [chosen(index, outcomes) for outcomes in zip(*taken, strict=True)]
        if eqn.primitive.name in INLINED:
            body = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
            return reshaped(*compat.opened(body), given, shape)
        return None

    return jaxprs.evaluate(jaxpr, consts, values, rule)


def chosen(index: Any, outcomes: Sequence) -> Any:
    """What a `cond` gives, of what each of its branches does."""
    shape = jnp.broadcast_shapes(*map(jnp.shape, outcomes))
    return lax.select_n(index, *(jnp.broadcast_to(x, shape) for x in outcomes))


def blockable(kind: Kind) -> bool:
    """Whether the equations are known to do the same to a block as to the whole piece."""
    simple = all(eqn.primitive.name in ELEMENTWISE | {"broadcast_in_dim"} for eqn in kind.part.jaxpr.eqns)
    scalars = all(
        var.aval.shape == ()
        for var, (name, _) in zip(kind.part.jaxpr.invars, kind.reads, strict=True)
        if name in (SHARED, CONST)
    )
    return simple and scalars and not any(any(leaf.others) for leaf in (*kind.params, *kind.state))
