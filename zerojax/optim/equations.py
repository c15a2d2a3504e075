"""Evaluate the equations of an update. Owners compute its cores."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from zerojax import compat, jaxprs
from zerojax.comm.mesh import to_storage
from zerojax.comm.owners import Owners
from zerojax.config import Config
from zerojax.layout.leaf import Leaf
from zerojax.optim.cores import equations_after
from zerojax.optim.owned import owned_update
from zerojax.optim.sharding_plan import ShardingPlan
from zerojax.optim.traced import (
    CONST,
    CUT,
    EXTRA,
    GRAD,
    PARAM,
    STATE,
    Equations,
    OwnedCores,
    is_traced,
    layouts_of_item,
    trace_update,
)
from zerojax.optim.wrapped import FlatUpdate, TransformationError
from zerojax.placement.storage import to_device, unpadded


def update_by_owners(
    update: FlatUpdate, grads: list, state: list, params: list | None, extra: dict
) -> tuple[list, list]:
    """Call `update`, and let owners compute its cores.

    The update is traced again, because a hand-written loop may pass other arguments and types than the plan assumed.
    """
    given = grads, state, params, extra
    try:
        traced = trace_update(update, given)
    except TransformationError:  # tracing may fail without the mesh's context; the call raises all other errors again
        return update(*given)
    found = owned_update(update, given, traced).owned
    if not found:
        return update(*given)
    arrays = filter(is_traced, jax.tree.leaves(extra))
    values = [*grads, *state, *(params or ()), *arrays, *jaxprs.as_jax_values(traced.consts)]
    whole = traced.equations(range(len(traced.jaxpr.eqns)), traced.reads, traced.jaxpr.outvars, found)
    results = evaluate_equations(update.config, whole, values)
    return results[: len(grads)], results[len(grads) :]


def update_first_group(
    config: Config,
    plan: ShardingPlan,
    grads: Sequence,
    state: Sequence,
    params: Sequence,
    value: Array,
    equations: Equations | None = None,
    cuts: Sequence[Array] = (),
) -> tuple[dict[int, Array], list, list, tuple[int, ...]]:
    """Compute the group that needs no offloaded state. Return the fields of `ResidentResults`; see `resident_update`.

    With parameters on disk, `cuts` are scalars that were reduced from gradients in files, chunk by chunk, and
    `equations` are those of the group that read these scalars. Otherwise, all equations of the group are computed.
    """
    partition = plan.analysis(config).partition
    first, equations = partition.first, equations or partition.first.equations
    read = {
        GRAD: lambda i: unpadded(grads[i], plan.grads[i]),
        PARAM: lambda i: unpadded(to_device(params[i]).astype(plan.grads[i].dtype), plan.grads[i]),
        STATE: lambda k: unpadded(state[k], plan.state[k]),
        EXTRA: lambda _: value.astype(jnp.float32),
        CONST: lambda i: partition.consts[i],
        CUT: lambda n: cuts[n],
    }
    results = iter(evaluate_equations(config, equations, [read[kind](i) for kind, i in equations.reads]))
    new_params = {i: to_storage(config.mesh, next(results), plan.grads[i]) for i in first.params}
    new_state = {k: to_storage(config.mesh, next(results), plan.state[k]) for k in first.resident}
    return new_params, [new_state.get(k, x) for k, x in enumerate(state)], list(results), partition.grads


def evaluate_equations(config: Config, equations: Equations, values: Sequence) -> list:
    """Evaluate `equations` on `values`, which have logical shapes, and return the results.

    All cores are computed together. So the equations that do not depend on a core run first, then the cores, and then
    all other equations.
    """
    jaxpr, whole = equations.jaxpr, equations.whole
    if not equations.owned:
        return jax.core.eval_jaxpr(jaxpr, (), *values)
    inside, late = equations_after(whole.jaxpr, [core for each in equations.owned for core in each.cores])
    env = dict(zip(jaxpr.invars, values, strict=True))
    _evaluate_some(whole.jaxpr, [whole.jaxpr.eqns[e] for e in equations.eqns if e not in inside | late], env)
    for each in equations.owned:
        env |= _compute(config, each, env, whole.variables)
    _evaluate_some(whole.jaxpr, [whole.jaxpr.eqns[e] for e in equations.eqns if e in late], env)
    return [atom.val if compat.is_literal(atom) else env[atom] for atom in jaxpr.outvars]


def _evaluate_some(jaxpr: Any, eqns: Sequence, env: dict) -> None:
    """Evaluate `eqns`, and add their results to `env`, which maps variables to values."""
    made = [v for eqn in eqns for v in eqn.outvars if not compat.is_dropped(v)]
    given = [v for v in {v: None for eqn in eqns for v in jaxprs.variables_in(eqn.invars)} if v in env]
    part = compat.part_of(jaxpr, eqns, given, made)
    env.update(zip(made, jax.core.eval_jaxpr(part, (), *(env[v] for v in given)), strict=True))


def _compute(config: Config, owned: OwnedCores, env: dict, variables: list) -> dict:
    """Let owners compute cores. Return a map from the cores' result variables to their values."""
    value = lambda n: env[variables[n]]
    reads, results = layouts_of_item(owned.cores[0], owned.size)

    def stack(n: int, where: Leaf) -> Array:
        x = to_storage(config.mesh, value(n), where)
        return x.reshape(-1, owned.size, *x.shape[1:]) if owned.size else x[None]

    arrays = [[stack(*core.arrays[a]) for core in owned.cores] for a in range(len(reads))]
    numbers = list(zip(*((*core.small, *core.shared) for core in owned.cores), strict=True))
    same = [len(set(of_each)) == 1 for of_each in numbers]  # whether all cores read the same variable

    def each_item(of_each: Sequence[int]) -> Array:
        rows = zip(of_each, owned.counts, strict=True)
        return jnp.stack([x for n, count in rows for x in [value(n)] * count])

    def fn(*args):
        taken, each = args[: len(arrays)], iter(args[len(arrays) : len(args) - sum(same)])
        shared = iter(args[len(args) - sum(same) :])
        return jax.core.eval_jaxpr(owned.jaxpr, (), *taken, *(next(shared if one else each) for one in same))

    outs, small_outs = Owners.of(config.mesh, owned.leaf.axes, owned.within).compute(
        fn,
        arrays,
        reads,
        [each_item(of_each) for of_each, one in zip(numbers, same, strict=True) if not one],
        [value(of_each[0]) for of_each, one in zip(numbers, same, strict=True) if one],
        results,
    )
    found, at = {}, 0
    for core, count in zip(owned.cores, owned.counts, strict=True):
        for x, (n, where) in zip(outs, core.outs, strict=True):
            stored = x[at : at + count].reshape(-1, *x.shape[2:]) if owned.size else x[at]
            found[variables[n]] = unpadded(stored, where)
        found |= {variables[n]: x[at] for x, n in zip(small_outs, core.small_outs, strict=True)}
        at += count
    return found


def evaluate_as(
    jaxpr: Any, consts: Sequence, values: Sequence, shape: tuple[int, ...], first: jaxprs.Rule = lambda *_: None
) -> list:
    """Evaluate an elementwise `jaxpr` on `values` with the given shape, which may differ from the shape in its trace.

    All branches of a `cond` are evaluated, because the shapes in a traced branch cannot change. If any of `values` is
    in host memory, constants that are broadcast are copied to host memory. An equation for which `first` returns
    results is not evaluated.
    """
    on_host = any(compat.in_host_memory(jax.typeof(x)) for x in jax.tree.leaves(values))

    def rule(eqn, operands):
        if (results := first(eqn, operands)) is not None:
            return results
        if eqn.primitive.name == "broadcast_in_dim":
            out = jnp.broadcast_to(operands[0], shape)
            moved = on_host and not compat.in_host_memory(jax.typeof(out))
            return [jax.device_put(out, jax.memory.Space.Host) if moved else out]
        if eqn.primitive.name == "cond":
            index, *rest = operands
            results = [evaluate_as(*compat.opened(branch), rest, shape, first) for branch in eqn.params["branches"]]
            return [lax.select_n(index, *jnp.broadcast_arrays(*cases)) for cases in zip(*results, strict=True)]
        if (body := compat.evaluated(eqn)) is not None:
            return evaluate_as(*compat.opened(body), operands, shape, first)
        return None

    return jaxprs.evaluate(jaxpr, consts, values, rule)
