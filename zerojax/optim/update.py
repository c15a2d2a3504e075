"""Run the optax update. Each of N devices does 1/N of the work, and the result is exact for every transformation.

The update runs in global view under `jit`. Gradients, parameters and state are logical arrays with fixed layouts, and
the compiler divides the work. So a norm over all parameters, a factored second moment or a Newton-Schulz iteration sees
full matrices, as on one device. A leaf that is updated element by element may be flat. Owners compute the cores.

References:
    Xu et al. 2020, arXiv 2004.13336: the sharded weight update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import optax

from zerojax import compat, jaxprs, names
from zerojax.comm.collectives import UPDATE
from zerojax.comm.mesh import constrain, to_storage
from zerojax.comm.owners import Owners
from zerojax.compat import common_dtype
from zerojax.config import Config
from zerojax.layout.leaf import Leaf, is_padded
from zerojax.optim.owned import owned_update
from zerojax.optim.plan import ShardingPlan, partitioned_update
from zerojax.optim.traced import (
    CONST,
    EXTRA,
    GRAD,
    PARAM,
    STATE,
    Equations,
    FlatUpdate,
    OwnedGroup,
    equations_after,
    is_traced,
    item_of,
)
from zerojax.optim.transformation import TransformationError
from zerojax.placement.storage import cast, gather, is_on_host, leaves_of, logical, to_device, unpadded

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, PyTree, Shaped


def evaluate(config: Config, equations: Equations, values: Sequence) -> list:
    """Evaluate `equations` on `values`, which have logical shapes, and return the results.

    All cores are computed together. So the equations that do not depend on a core run first, then the cores, and then
    all other equations.
    """
    jaxpr, variables = equations.jaxpr, equations.variables
    if not equations.owned:
        return jax.core.eval_jaxpr(jaxpr, (), *values)
    cores = [core for group in equations.owned for core in group.cores]
    inside, late = equations_after(jaxpr, cores)
    before = [eqn for e, eqn in enumerate(jaxpr.eqns) if e not in inside | late]
    after = [jaxpr.eqns[e] for e in sorted(late)]
    env = dict(zip(jaxpr.invars, values, strict=True))
    results = set(jaxprs.variables_in(jaxpr.outvars))
    wanted = {variables[n] for core in cores for n in core.inputs}
    _evaluate(jaxpr, before, env, wanted | _read(after) | results)
    for group in equations.owned:
        env |= _compute(config, group, env, variables)
    _evaluate(jaxpr, after, env, results)
    return [atom.val if compat.is_literal(atom) else env[atom] for atom in jaxpr.outvars]


def _read(eqns: Sequence) -> set:
    return {v for eqn in eqns for v in jaxprs.variables_in(eqn.invars)}


def _evaluate(jaxpr: Any, eqns: Sequence, env: dict, wanted: set) -> None:
    """Evaluate `eqns`, and add the results that are in `wanted` to `env`."""
    made = [v for eqn in eqns for v in eqn.outvars if v in wanted]
    given = [v for v in _read(eqns) if v in env]
    part = compat.part_of(jaxpr, eqns, given, made)
    env.update(zip(made, jax.core.eval_jaxpr(part, (), *(env[v] for v in given)), strict=True))


def _compute(config: Config, group: OwnedGroup, env: dict, variables: list) -> dict:
    """Let owners compute a group's cores. Return a map from the cores' result variables to their values."""
    first = group.cores[0]
    value = lambda n: env[variables[n]]

    def stack(n: int, where: Leaf) -> Array:
        x = to_storage(config.mesh, value(n), where)
        return x.reshape(-1, group.size, *x.shape[1:]) if group.size else x[None]

    arrays = [[stack(*core.arrays[a]) for core in group.cores] for a in range(len(first.arrays))]
    numbers = list(zip(*((*core.small, *core.shared) for core in group.cores), strict=True))
    same = [len(set(of_each)) == 1 for of_each in numbers]  # whether all cores read the same variable

    def each_item(of_each: Sequence[int]) -> Array:
        rows = zip(of_each, group.counts, strict=True)
        return jnp.stack([x for n, count in rows for x in [value(n)] * count])

    def fn(*args):
        taken, each = args[: len(arrays)], iter(args[len(arrays) : len(args) - sum(same)])
        shared = iter(args[len(args) - sum(same) :])
        return jax.core.eval_jaxpr(group.jaxpr, (), *taken, *(next(shared if one else each) for one in same))

    outs, small_outs = Owners.of(config.mesh, group.leaf.axes, group.within).compute(
        fn,
        arrays,
        [item_of(where, group.size) for _, where in first.arrays],
        [each_item(of_each) for of_each, one in zip(numbers, same, strict=True) if not one],
        [value(of_each[0]) for of_each, one in zip(numbers, same, strict=True) if one],
        [item_of(where, group.size) for _, where in first.outs],
    )
    found, at = {}, 0
    for core, count in zip(group.cores, group.counts, strict=True):
        for x, (n, where) in zip(outs, core.outs, strict=True):
            stored = x[at : at + count].reshape(-1, *x.shape[2:]) if group.size else x[at]
            found[variables[n]] = unpadded(stored, where)
        found |= {variables[n]: x[at] for x, n in zip(small_outs, core.small_outs, strict=True)}
        at += count
    return found


@jax.named_scope(names.SHARDS)
def shard_for_update(config: Config, plan: ShardingPlan, tree: PyTree) -> list[Shaped[Array, "*storage"]]:
    """Shard the trained leaves of a tree of parameters or gradients for the update. Return them in storage shape.

    The tree may be in logical or storage form. A parameter in host memory already has the sharding of its gradient, and
    stays in host memory.
    """
    leaves = leaves_of(tree)

    def one(x, leaf: Leaf):
        value = x.storage if is_padded(x) else x
        if value.shape == leaf.storage_shape and (is_padded(x) or is_on_host(value)):
            return value if is_on_host(value) else constrain(config.mesh, value, leaf)
        return to_storage(config.mesh, logical(x), leaf)

    return [one(leaves[i], leaf) for i, leaf in zip(plan.layout.trained, plan.grads, strict=True)]


@jax.named_scope(names.SHARDS)
def unshard_after_update(
    config: Config,
    plan: ShardingPlan,
    updated: Sequence[Shaped[Array, "*storage"] | None],
    frozen: Sequence[Shaped[Array, "*storage"]],
) -> list[Any]:
    """Undo `shard_for_update`. Gather each parameter that is stored replicated, or sharded over fewer axes.

    `frozen` has one array per parameter. The result has the arrays of `frozen` for parameters that are not trained, and
    None where `updated` has None.
    """
    arrays = {k: x for k, x in enumerate(updated) if x is not None}
    leaves = plan.trained.params
    moved = [k for k, leaf in enumerate(leaves) if k in arrays and (leaf.dim is None or leaf.further > 1)]
    pick = lambda items: [items[k] for k in moved]
    gathered = gather(config, pick(arrays), pick(plan.grads), pick(leaves))
    arrays |= dict(zip(moved, gathered, strict=True))
    params = dict(enumerate(frozen)) | {i: arrays.get(k) for k, i in enumerate(plan.layout.trained)}
    return [params[i] for i in range(len(plan.layout.params))]


def update(
    config: Config,
    plan: ShardingPlan,
    grads: Sequence[Shaped[Array, "*storage"]],
    state: PyTree,
    params: Sequence[Shaped[Array, "*storage"]] | None,
    extra: dict,
) -> tuple[list[Shaped[Array, "*storage"]], PyTree]:
    """Run one step of the optimizer on sharded leaves, and return `(updates, state)`.

    Gradients, parameters and updates have the storage shapes of `plan.grads`. With master weights, the updates are the
    new parameters. A gradient that is wider than its parameter is not cast.

    Raises:
        TypeError: If state is offloaded, and wide gradients make a leaf of the state wider than `init` made it.
    """
    views = lambda stored, leaves: list(map(unpadded, stored, leaves))
    keep = lambda values, leaves: [to_storage(config.mesh, x, leaf) for x, leaf in zip(values, leaves, strict=True)]
    types = [part.dtype for part in plan.grads]
    wide = [common_dtype(x.dtype, dtype) for x, dtype in zip(grads, types, strict=True)]
    params = None if params is None else [to_device(x) for x in params]
    updates, new_state = logical_update(
        config,
        plan,
        views(cast(grads, wide), plan.grads),
        views(jax.tree.leaves(state), plan.state),
        None if params is None else views(cast(params, types), plan.grads),
        extra,
    )
    if wide != types and plan.offloaded:
        check_state_dtypes(new_state, plan.state)
    return keep(updates, plan.grads), jax.tree.unflatten(plan.state_def, keep(new_state, plan.state))


def logical_update(
    config: Config, plan: ShardingPlan, grads: list, state: list, params: list | None, extra: dict
) -> tuple[list[Array], list[Array]]:
    """Call the wrapped transformation on logical arrays, let owners compute cores, and return `(updates, state)`."""
    flat = FlatUpdate(config, plan.trained, plan.leaves, plan.state_def)
    # The update is traced again, because a custom loop may give it other arguments and types than the plan assumed.
    # `plan.matrices` is None if the plan could not trace the update without extra arguments. `extra` may have them.
    if plan.matrices is None or plan.matrices.owned:
        trace = flat.tracer(grads, state, params, extra)
        try:
            traced = trace()
        except TransformationError:  # tracing may need the mesh's context. The call below raises any other error
            return flat(grads, state, params, extra)
        if found := owned_update(config, plan.leaves, traced, trace).groups:
            arrays = filter(is_traced, jax.tree.leaves(extra))
            consts = jaxprs.as_jax_values(traced.consts)
            values = [*grads, *state, *(params or ()), *arrays, *consts]
            jaxpr = traced.jaxpr
            whole = traced.equations(range(len(jaxpr.eqns)), traced.reads, jaxpr.outvars, found)
            results = evaluate(config, whole, values)
            return results[: len(grads)], results[len(grads) :]
    return flat(grads, state, params, extra)


def check_state_dtypes(state: Sequence[Array], leaves: Sequence[Leaf]) -> None:
    """Raise a `TypeError` for the first state leaf whose float type is not the type that `init` gave it."""
    for x, leaf in zip(state, leaves, strict=True):
        if x.dtype != leaf.dtype and jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"Gradients that are wider than their parameters make opt_state{leaf.path} {x.dtype}, and init made it "
                f"{leaf.dtype}. The type of an offloaded leaf cannot change. Cast the gradients to the parameters' "
                f"type, or keep both wide: precision=Precision.bf16() has float32 master weights."
            )


def apply_update(
    config: Config,
    plan: ShardingPlan,
    grads: Sequence[Shaped[Array, "*storage"]],
    state: PyTree,
    params: Sequence[Shaped[Array, "*storage"]],
    extra: dict,
) -> tuple[list[Shaped[Array, "*storage"]], PyTree]:
    """Run `update` and apply its updates. Return the trained parameters, in their stored types, and the state."""
    params = [to_device(x) for x in params]
    updates, state = update(config, plan, grads, state, params, extra)
    moved: Any = updates if config.has_master_weights else optax.apply_updates(list(params), updates)
    return cast(moved, [leaf.dtype for leaf in plan.trained.params]), state


@jax.named_scope(UPDATE)
def roll_back(ok: Bool[Array, ""], new: PyTree, old: PyTree) -> PyTree:
    """Return the arrays of `new` if `ok`, and otherwise those of `old`, bit for bit."""
    return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)


class Updated(NamedTuple):
    """The result of an update's first group.

    Attributes:
        params: The trained parameters that the group updates, by index. They are sharded like their gradients.
        state: One array per leaf of the state: the new array, or the old array if another group replaces it. None for
            offloaded leaves.
        shared: The shared values, which the other groups read.
        grads: The indices of the gradients that the other groups read.
    """

    params: dict[int, Array]
    state: list
    shared: list
    grads: tuple[int, ...]


def resident_update(
    config: Config, plan: ShardingPlan, grads: Sequence, state: Sequence, params: Sequence, value: Array
) -> Updated:
    """Compute the first group of the update, which needs no offloaded state. `value` is the loss.

    `grads` and `params` have the storage shapes and shardings of `plan.grads`. `state` has None for offloaded leaves.
    """
    if all(x is not None for x in state):
        tree = jax.tree.unflatten(plan.state_def, state)
        updated, tree = apply_update(config, plan, grads, tree, params, {"value": value})
        return Updated(dict(enumerate(updated)), jax.tree.leaves(tree), [], ())
    partition = partitioned_update(config, plan)
    first, equations = partition.first, partition.first.equations[0]
    read = {
        GRAD: lambda i: unpadded(grads[i], plan.grads[i]),
        PARAM: lambda i: unpadded(to_device(params[i]).astype(plan.grads[i].dtype), plan.grads[i]),
        STATE: lambda k: unpadded(state[k], plan.state[k]),
        EXTRA: lambda _: value.astype(jnp.float32),
        CONST: lambda i: partition.consts[i],
    }
    results = iter(evaluate(config, equations, [read[kind](i) for kind, i in equations.reads]))
    new_params = {i: to_storage(config.mesh, next(results), plan.grads[i]) for i in first.params}
    new_state = {k: to_storage(config.mesh, next(results), plan.state[k]) for k in first.resident}
    leaves = [new_state.get(k, x) for k, x in enumerate(state)]
    return Updated(new_params, leaves, list(results), partition.grads)
