"""Find the values that can be computed on parts of arrays. A part is a range of one dim: a shard, or a stack's layer.

Elementwise equations, broadcasts and reductions can be evaluated on the parts of devices. A reduction over the divided
dim then needs a small collective. Equations on a layer may also multiply or decompose the matrices of this layer.

`dims_of` finds the values of a jaxpr that can be computed on parts, and the dim in which each value is divided.
`on_parts.evaluate_parts` computes these values. `narrow`, `shardwise` and `reduced` use them for shards, and
`per_layer` for layers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core

from zerojax import compat, jaxprs
from zerojax.dims import NOWHERE, Context, Follower, Place, Places, on_dim
from zerojax.layout.leaf import replace_items
from zerojax.primitives import TABLE, Kind, of_kind

# Primitives whose results on several devices can be combined. Of products, only inner products can.
REDUCTIONS = frozenset(name for name, facts in TABLE.items() if facts.is_combinable)
COMBINED = REDUCTIONS | {"dot_general"}
# Primitives that can be computed on the shards of devices. `_OF_LAYERS` adds those that can be computed on layers.
OF_SHARDS = of_kind(Kind.ELEMENTWISE) | REDUCTIONS
OF_SHARDS |= {"bitcast_convert_type", "broadcast_in_dim", "pad", "reshape", "slice", "squeeze", "transpose"}
_OF_LAYERS = OF_SHARDS | of_kind(Kind.REDUCTION, Kind.ALONG, Kind.DECOMPOSITION)
_OF_LAYERS |= {"concatenate", "dot_general", "rev"}
UNKNOWN = -1  # the dim of a value that cannot be computed on parts


class FlatDim(NamedTuple):
    """The divided dim of a flat array. The array's shape was `(outer, length, rest)` before, with dim 1 divided."""

    outer: int
    length: int


Dim = int | FlatDim | None


def bare(atom: Any) -> Any:
    """Return the type of a variable or literal without its sharding."""
    return jax.core.ShapedArray(atom.aval.shape, atom.aval.dtype)


def function_of(jaxpr: Any, consts: Sequence, inputs: Sequence, wanted: Sequence) -> Callable[..., list]:
    """Return a function that computes the variables `wanted` of a jaxpr from the variables `inputs`."""
    eqns, _ = jaxprs.needed_for(jaxpr.eqns, wanted, {*inputs})
    needed = compat.part_of(jaxpr, eqns, [*compat.constvars_of(jaxpr), *inputs], wanted)
    return lambda *args: jaxprs.run(needed, (), *jaxprs.as_jax_values(consts), *args)


def without_calls(closed: Any) -> Any:
    """Return a closed jaxpr with all calls inlined, including calls of functions with a custom derivative."""
    jaxpr, consts = compat.opened(closed)

    def rule(eqn, values):
        if eqn.primitive.name == "reshard":  # JAX adds `reshard` to cotangents. In a `shard_map` it changes nothing.
            return values
        body = compat.evaluated_body(eqn)
        return None if body is None or compat.constvars_of(body) else jaxprs.evaluate(body, (), values, rule)

    jaxpr = jaxpr.replace(eqns=jaxprs.alive(jaxpr))
    return jax.make_jaxpr(lambda *args: jaxprs.evaluate(jaxpr, consts, args, rule))(*map(bare, jaxpr.invars))


@jax.custom_vjp
def with_cotangent_of(value: jax.Array, carrier: jax.Array) -> jax.Array:
    """Return `value`. In the backward pass, `carrier`, which has the same shape and type, gets the cotangent.

    `value` gets zeros, so that JAX runs the backward pass of a quantiser that computed `value`. This backward pass may
    return new scales. With a `jax.custom_jvp`, `value` would get no cotangent, and JAX would leave the pass out.
    """
    return value


with_cotangent_of.defvjp(lambda value, carrier: (value, None), lambda _, cotangent: (None, cotangent))


def dims_of(
    jaxpr: Any, given: Mapping[Any, int | None], *, layers: bool = False, flattens: bool = False
) -> dict[Any, Any]:
    """Return, for each variable that can be computed on parts, its divided dim, or None if it has no divided dim.

    A value without a divided dim is alike on all devices, or for all layers. `given` maps the arguments to their
    divided dims or None. A variable that cannot be computed on parts has no entry. If `layers` is true, the parts are
    layers. If `flattens` is true, flattened arrays have an entry `FlatDim`.
    """
    dims = {**given, **dict.fromkeys(compat.constvars_of(jaxpr))}
    for eqn in jaxpr.eqns:
        for var, dim in zip(eqn.outvars, dims_after(eqn, dims, layers, flattens), strict=True):
            if dim != UNKNOWN:
                dims[var] = dim
    return dims


def dims_after(eqn: Any, dims: Mapping, layers: bool = False, flattens: bool = False) -> Sequence[Dim]:
    """Return for each result of `eqn` its divided dim, None if it has none, or `UNKNOWN` if parts cannot compute it."""
    name, reads = compat.name_of(eqn), jaxprs.variables_in(eqn.invars)
    unknown = [UNKNOWN] * len(eqn.outvars)
    if eqn.effects or jaxprs.facts(eqn).differs_by_device or any(v not in dims for v in reads):
        return unknown
    divided = [v for v in reads if dims[v] is not None]
    if not divided:
        return [None] * len(eqn.outvars)
    given = [None if compat.is_literal(a) else dims[a] for a in eqn.invars]
    if (body := compat.called(eqn) if layers else compat.evaluated_body(eqn)) is not None:
        return result_dims(body, given, layers, flattens)
    first = dims[divided[0]]
    if isinstance(first, FlatDim) and name in ("pad", "slice"):  # a part of a flattened array is no part of each shard
        return unknown
    count = first.length if isinstance(first, FlatDim) else divided[0].aval.shape[first]
    if count == 1 or not (name in _OF_LAYERS if layers else name in OF_SHARDS or _is_product_of_shards(eqn)):
        return unknown
    row_dims = Follower(count).through(eqn, list(map(_row_dims, given)), Context(count, {}))
    may_combine = not layers and name in COMBINED
    return [_dim_in(*pair, count, may_combine, flattens) for pair in zip(eqn.outvars, row_dims, strict=True)]


def _row_dims(dim: Dim) -> Places:
    if isinstance(dim, FlatDim):
        return Places(frozenset((Place(0, dim.outer),)))
    return NOWHERE if dim is None else on_dim(dim)


def _dim_in(var: Any, state: Any, count: int, may_combine: bool, flattens: bool) -> Dim:
    """Return the divided dim of a result. Without one, return None if `may_combine` is true, otherwise `UNKNOWN`."""
    if state is None or len(state.places) > 1 or not (state.places or may_combine):
        return UNKNOWN
    place, shape = state.only, var.aval.shape
    if place is None or (place.outer == 1 and shape[place.dim] == count):
        return place and place.dim
    return FlatDim(place.outer, count) if flattens and len(shape) == 1 and not place.joined else UNKNOWN


def _is_product_of_shards(eqn: Any) -> bool:
    """Return whether `eqn` is an inner product of all elements, or a product with a scalar (its derivative)."""
    if eqn.primitive.name != "dot_general":
        return False
    (lhs, rhs), (batch, _) = eqn.params["dimension_numbers"]
    is_inner = not eqn.outvars[0].aval.shape and list(lhs) == list(rhs)
    return not batch and (is_inner or any(not atom.aval.shape for atom in eqn.invars))


def both_passes(run: Callable, atoms: Sequence, moving: Sequence[int], active: Mapping, results: str = "active") -> Any:
    """Return the closed jaxpr of a function `run(values)` and its derivative.

    The jaxpr takes the operands (`atoms` has their types) and the cotangents of some results. `active` maps the index
    of each of these results to a variable of its type. The jaxpr returns results, and then the cotangents of the
    operands with indices `moving`. `results` selects the results: "active", "none", or "all" (the active ones first).
    `run` returns None for a result that is dropped.
    """

    def both(*args):
        values = args[: len(atoms)]

        def of_moving(*some):
            found = run(replace_items(values, moving, some))
            return [found[k] for k in active], [x for k, x in enumerate(found) if k not in active]

        found, pull, others = jax.vjp(of_moving, *(values[i] for i in moving), has_aux=True)
        returned = {"none": [], "active": found, "all": [*found, *jax.tree.leaves(others)]}[results]
        return *returned, *pull(list(args[len(atoms) :]))

    return jax.make_jaxpr(both)(*map(bare, [*atoms, *active.values()]))


def result_dims(closed: Any, given: Sequence[Any], layers: bool = False, flattens: bool = False) -> list[Any]:
    """Return the same as `dims_after` for the results of a jaxpr, given the divided dims of its arguments."""
    jaxpr, _ = compat.opened(closed)
    dims = dims_of(jaxpr, dict(zip(jaxpr.invars, given, strict=True)), layers=layers, flattens=flattens)
    return [None if compat.is_literal(a) else dims.get(a, UNKNOWN) for a in jaxpr.outvars]
