"""Evaluate a jaxpr with a rule for its equations, and analyse how its values depend on each other.

Every transformation of jaxprs in this library is a rule that is passed to `evaluate`.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from zerojax import compat, names, primitives

Rule = Callable[[Any, list], Sequence | None]
ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


def evaluate(
    jaxpr: Any, consts: Sequence, args: Sequence, rule: Rule, *, literal: Callable[[Any], Any] = lambda value: value
) -> list:
    """Evaluate an open jaxpr, equation by equation, on arrays, tracers, or other objects that `rule` understands.

    `rule(eqn, values)` returns the results of one equation. If it returns None, the equation's primitive is bound to
    `values`. `rule` is called in the equation's context, so that the operations that it traces get the equation's name
    scopes and source line. `literal` converts the values of literals to objects that `rule` understands.
    """
    env = dict(zip(compat.constvars_of(jaxpr), as_jax_values(consts), strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom):
        return literal(atom.val) if compat.is_literal(atom) else env[atom]

    context_of = names.contexts()
    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        with context_of(eqn):
            results = rule(eqn, values)
            # If JAX finds a NaN, it runs equations one by one. In a call, the error would not name the equation inside.
            is_call = results is None and eqn.primitive.name in ("jit", "pjit")
            if is_call and jax.config.jax_debug_nans:  # pyright: ignore[reportAttributeAccessIssue]
                results = evaluate_call(eqn, values, lambda *_: None)
            if results is None:
                results = compat.evaluate_one(eqn, values)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def run(jaxpr: Any, consts: Sequence, *args: Any) -> list:
    return evaluate(jaxpr, consts, args, lambda eqn, values: None)


def evaluate_call(eqn: Any, values: Sequence, rule: Rule) -> list:
    """Evaluate the body of a call or a remat in place, under the call's name. `rule` is as in `evaluate`."""
    with names.inside_call(eqn):
        return evaluate(*compat.opened(compat.evaluated(eqn)), values, rule)


def as_jax_values(consts: Sequence) -> list:
    """Convert NumPy arrays in `consts` to JAX arrays, because a `custom_vjp` may index them with traced values."""
    is_numpy = lambda x: hasattr(x, "__array__") and not isinstance(x, jax.Array | jax.Ref)
    return [jnp.asarray(x) if is_numpy(x) else x for x in consts]


def facts(eqn: Any) -> primitives.Facts:
    return primitives.named(compat.name_of(eqn))


def is_linear(eqn: Any) -> bool:
    """Return whether an equation is linear in one operand, or in several operands jointly.

    A linear equation can be applied to each term of a sum. Rounding to integers, or to fewer bits than bfloat16 has,
    does not count as linear, because each term would be rounded.
    """
    if eqn.primitive.name == "reduce_precision":
        return eqn.params["mantissa_bits"] >= jnp.finfo(jnp.bfloat16).nmant
    if eqn.primitive.name == "convert_element_type":
        dtype = np.dtype(eqn.params["new_dtype"])
        return jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize >= 2
    return facts(eqn).linear or facts(eqn).jointly_linear != slice(0)


def inline_calls(jaxpr: Any, consts: Sequence, *args: Any, stops: Callable[[Any], bool] = lambda eqn: False) -> list:
    """Evaluate a jaxpr with its calls inlined, except those for which `stops(eqn)` is true."""
    is_kept = lambda eqn: compat.called(eqn) is None or stops(eqn)
    rule = lambda eqn, values: None if is_kept(eqn) else evaluate_call(eqn, values, rule)
    return evaluate(jaxpr, consts, args, rule)


def evaluate_remat(eqn: Any, values: Sequence, evaluate_body: Callable[[Any, Sequence, Sequence], list]) -> list:
    """Evaluate a `jax.checkpoint` equation, under its policy. `evaluate_body(jaxpr, consts, values)` runs the body."""
    params = compat.params_of(eqn)
    body = lambda *values: evaluate_body(*compat.opened(params["jaxpr"]), values)
    run = jax.checkpoint(body, policy=params["policy"], prevent_cse=params["prevent_cse"])
    if not params.get("differentiated"):  # From `jax_remat3` on, the barrier is an equation before this one.
        return run(*values)
    # JAX lowers a derivative with a barrier. Without the barrier, XLA may keep values and not compute them again.
    closed, shape = jax.make_jaxpr(run, return_shape=True)(*values)
    jaxpr, consts = compat.opened(closed)
    marked = lambda e: e.replace(params={**e.params, "differentiated": True}) if compat.is_remat(e) else e
    results = jax.core.eval_jaxpr(jaxpr.replace(eqns=[*map(marked, jaxpr.eqns)]), consts, *jax.tree.leaves(values))
    return jax.tree.unflatten(jax.tree.structure(shape), results)


def variables_in(atoms: Iterable) -> list:
    return [atom for atom in atoms if not compat.is_literal(atom)]


def differentiable(dtype: Any) -> bool:
    """Return whether values of a type have cotangents: inexact types, and extended types except PRNG keys."""
    extended = jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
    return not jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) if extended else jnp.issubdtype(dtype, jnp.inexact)


def dot_flops(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return 2 * eqn.outvars[0].aval.size * math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)


def nbytes(var: Any) -> int:
    return var.aval.size * var.aval.dtype.itemsize


def expands(eqn: Any) -> bool:
    """Return whether an equation is a product whose result is at least twice as large as its operands together."""
    sizes = [var.aval.size for var in variables_in(eqn.invars)]
    return eqn.primitive.name == "dot_general" and 2 * sum(sizes) <= eqn.outvars[0].aval.size


def uses_of(jaxpr: Any) -> tuple[dict, frozenset]:
    """Return the uses of each variable as pairs `(equation, operand index)`, and the set of the jaxpr's results."""
    uses: dict = {}
    for eqn in jaxpr.eqns:
        for index, atom in enumerate(eqn.invars):
            if not compat.is_literal(atom):
                uses.setdefault(atom, []).append((eqn, index))
    return uses, frozenset(variables_in(jaxpr.outvars))


def equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield from with_inner(eqn)


def with_inner(eqn: Any) -> Iterator[Any]:
    yield eqn
    for inner in compat.inner_jaxprs(eqn):
        yield from equations(inner)


def has_kernel(jaxpr: Any) -> bool:
    """Return whether a jaxpr runs a Pallas kernel outside of a `jax.shard_map`."""
    return any(map(calls_kernel, jaxpr.eqns))


def calls_kernel(eqn: Any) -> bool:
    if eqn.primitive.name in ("pallas_call", "shard_map"):
        return eqn.primitive.name == "pallas_call"
    return any(map(has_kernel, compat.inner_jaxprs(eqn)))


def makes_ref(eqn: Any) -> bool:
    return facts(eqn).kind is primitives.Kind.REF and any(map(compat.is_ref, eqn.outvars))


def reached(start: Iterable, following: Callable[[Any], Iterable]) -> dict:
    """Return `start` and all items that `following` reaches from it, as keys. `following(item)` has the next items."""
    found, pending = {}, list(start)
    while pending:
        item = pending.pop()
        if item not in found:
            found[item] = None
            pending += following(item)
    return found


def makers(eqns: Iterable) -> dict:
    return {var: eqn for eqn in eqns for var in eqn.outvars}


def needed_for(eqns: Sequence, wanted: Sequence, given: Collection = ()) -> tuple[list, set]:
    """Return the equations that compute `wanted` from `given`, and a set of `wanted` and these equations' operands."""
    reads = set(variables_in(wanted))
    needed = []
    for eqn in reversed(eqns):
        if any(var in reads and var not in given for var in eqn.outvars):
            needed.append(eqn)
            reads.update(variables_in(eqn.invars))
    return needed[::-1], reads


def alive(jaxpr: Any) -> list:
    """Return the equations that have effects, or on which an effect or a result depends, in order."""
    effects = [eqn for eqn in jaxpr.eqns if eqn.effects]
    needed, _ = needed_for(jaxpr.eqns, [*jaxpr.outvars, *(atom for eqn in effects for atom in eqn.invars)])
    ids = {*map(id, needed), *map(id, effects)}
    return [eqn for eqn in jaxpr.eqns if id(eqn) in ids]


def dependent_on(
    variables: Collection,
    eqns: Sequence,
    results: Callable[[Any, bool], Sequence] = lambda eqn, reads: eqn.outvars if reads else (),
) -> set:
    """Return the set of `variables` and all variables that depend on them.

    `results(eqn, reads)` returns the results of `eqn` that belong to the set. `reads` says whether any operand of `eqn`
    belongs to the set. By default, all results belong to the set if `reads` is true, and otherwise none.
    """
    dependent = set(variables)
    for eqn in eqns:
        reads = any(atom in dependent for atom in variables_in(eqn.invars))
        dependent.update(results(eqn, reads))
        if reads:  # The equation may write to any ref among its operands.
            dependent.update(filter(compat.is_ref, eqn.invars))
    return dependent


def roots_of(variables: Collection, jaxpr: Any) -> dict:
    """Map each value that depends on `variables`, and on no other input, to the set of those that it depends on."""
    roots, free = {var: {var} for var in variables}, set()
    for eqn in jaxpr.eqns:
        reads = variables_in(eqn.invars)
        if free.issuperset(reads):
            free.update(eqn.outvars)
        elif all(v in roots or v in free for v in reads):
            roots |= dict.fromkeys(eqn.outvars, set().union(*(roots.get(v, ()) for v in reads)))
    return roots


def moved_by(variables: Collection, jaxpr: Any) -> set:
    """Return the values through which cotangents may flow to `variables`, including `variables`."""
    live = set(variables)
    for eqn in jaxpr.eqns:
        reads = [not compat.is_literal(atom) and atom in live for atom in eqn.invars]
        if not any(reads) or eqn.primitive.name == "stop_gradient":
            continue
        outs, inside = eqn.outvars, _part_of_call(eqn, reads)
        if inside is not None:
            found = moved_by([var for var, on in zip(inside.invars, reads, strict=True) if on], inside)
            outs = [v for v, atom in zip(outs, inside.outvars, strict=True) if _is_in(atom, found)]
        live.update(v for v in outs if differentiable(v.aval.dtype))
        live.update(filter(compat.is_ref, eqn.invars))  # The equation may write to any ref among its operands.
    return live


def moving(results: Collection, jaxpr: Any) -> set:
    """Return the values to which cotangents may flow from `results`, including `results`."""
    live = set(results)
    for eqn in reversed(jaxpr.eqns):
        wanted = [var in live for var in eqn.outvars]
        # The equation may write to any ref among its operands.
        writes = any(compat.is_ref(v) and _is_in(v, live) for v in eqn.invars)
        if eqn.primitive.name == "stop_gradient" or not (any(wanted) or writes):
            continue
        atoms, inside = eqn.invars, _part_of_call(eqn, wanted)
        if inside is not None:
            found = moving(variables_in(atom for atom, on in zip(inside.outvars, wanted, strict=True) if on), inside)
            atoms = [atom for atom, var in zip(atoms, inside.invars, strict=True) if var in found]
        live.update(variables_in(atoms))
    return live


def _is_in(atom: Any, variables: Collection) -> bool:
    return not compat.is_literal(atom) and atom in variables


def _part_of_call(eqn: Any, concerned: Sequence[bool]) -> Any | None:
    """Return the body of a call if `concerned` is not true for all of its operands (or results), otherwise None.

    An analysis must look into such a body. In the body of a JVP, for example, primal results do not read the tangents.
    """
    if all(concerned) or len(eqn.outvars) < 2 or any(map(compat.is_ref, eqn.invars)):
        return None
    return compat.inlined_body(eqn)


def split_arrays(args: Sequence) -> tuple[list, Callable]:
    """Return the arrays in `args`, and a function that rebuilds `args` with new arrays and the same other leaves."""
    leaves, tree = jax.tree.flatten(args)
    is_array = [isinstance(x, ARRAYS) for x in leaves]

    def put_back(arrays):
        remaining = iter(arrays)
        return tree.unflatten([next(remaining) if on else x for x, on in zip(leaves, is_array, strict=True)])

    return [x for x, on in zip(leaves, is_array, strict=True) if on], put_back


def alike_args(args: Sequence, differing: Collection[int]) -> list[bool]:
    """Return, for each array in `args`, whether all devices hold equal values.

    False for the arguments with indices `differing`, and for integers, which may be keys that differ by device.
    """
    return [
        i not in differing and jnp.issubdtype(x.dtype, jnp.inexact)
        for i, arg in enumerate(args)
        for x in jax.tree.leaves(arg)
        if isinstance(x, ARRAYS)
    ]
