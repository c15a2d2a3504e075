"""Evaluate the equations of an update. Owners compute the cores among these equations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp

from zerojax import compat, jaxprs
from zerojax.comm.mesh import to_storage
from zerojax.comm.owners import Owners
from zerojax.config import Config
from zerojax.layout.leaf import Leaf
from zerojax.optim.owned_group import OwnedGroup, equations_after, item_of
from zerojax.optim.traced import Equations
from zerojax.placement.storage import unpadded

if TYPE_CHECKING:
    from jaxtyping import Array


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
