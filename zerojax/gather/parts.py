"""Evaluate a jaxpr on parts of arrays. A part is a range of one dim of a value: a device's shard, or a stack's layer.

Elementwise equations, broadcasts and reductions can be evaluated on the parts of devices. A reduction over the divided
dim then needs a small collective. Equations on a layer may also multiply or decompose the matrices of this layer.

`dims_of` finds the values of a jaxpr that can be computed on parts, and the dim in which each value is divided.
`evaluate_parts` computes these values. `narrow` and `shardwise` use them for shards, and `per_layer` for layers.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax import compat, jaxprs, names
from zerojax.dims import NOWHERE, Context, Follower, at
from zerojax.layout.leaf import replace_items
from zerojax.primitives import Kind, of_kind

# How devices combine their results of a reduction over the divided dim.
_COMBINE = MappingProxyType({"reduce_sum": lax.psum, "reduce_max": lax.pmax, "reduce_min": lax.pmin})
# Primitives that can be computed on the shards of devices, and further ones that can be computed on layers.
_OF_SHARDS = of_kind(Kind.ELEMENTWISE) | _COMBINE.keys() | {"broadcast_in_dim", "pad", "reshape", "slice", "squeeze"}
_OF_LAYERS = _OF_SHARDS | of_kind(Kind.REDUCTION, Kind.ALONG, Kind.DECOMPOSITION)
_OF_LAYERS |= {"concatenate", "dot_general", "rev", "transpose"}
# Primitives of which each operand is divided in the same dim as the result.
_ALIGNED = of_kind(Kind.ELEMENTWISE) | {"concatenate", "sort"}
UNKNOWN = -1  # the dim of a value that cannot be computed on parts


def call(closed: Any, *args: Any) -> list:
    """Evaluate a closed jaxpr."""
    jaxpr, consts = compat.opened(closed)
    return jaxprs.run(jaxpr, jaxprs.as_jax_values(consts), *args)


def flat(closed: Any) -> Any:
    """Return a closed jaxpr in which all calls are inlined, including calls of functions with a custom derivative."""
    jaxpr, consts = compat.opened(closed)

    def rule(eqn, values):
        if eqn.primitive.name == "reshard":  # JAX adds `reshard` to cotangents. In a `shard_map` it changes nothing.
            return values
        body = compat.evaluated_body(eqn)
        if body is None or compat.constvars_of(body):
            return None
        consts = next((compat.opened(p)[1] for p in compat.params_of(eqn).values() if compat.is_jaxpr(p)), ())
        return jaxprs.evaluate(body, consts, values, rule)

    jaxpr = jaxpr.replace(eqns=jaxprs.alive(jaxpr))
    avals = [var.aval for var in jaxpr.invars]
    return jax.make_jaxpr(lambda *args: jaxprs.evaluate(jaxpr, consts, args, rule))(*avals)


def dims_of(jaxpr: Any, given: Mapping[Any, int | None], *, layers: bool = False) -> dict[Any, int | None]:
    """Return, for each variable that can be computed on parts, its divided dim, or None if it has no divided dim.

    A value without a divided dim is alike on all devices, or for all layers. `given` maps the arguments to their
    divided dims or None. A variable that cannot be computed on parts has no entry. If `layers` is true, the parts are
    layers.
    """
    dims = {**given, **dict.fromkeys(compat.constvars_of(jaxpr))}
    for eqn in jaxpr.eqns:
        for var, dim in zip(eqn.outvars, _dims_after(eqn, dims, layers), strict=True):
            if dim != UNKNOWN:
                dims[var] = dim
    return dims


def _dims_after(eqn: Any, dims: Mapping, layers: bool) -> Sequence[int | None]:
    """Return, for each result of `eqn`, its divided dim, None if it has none, or `UNKNOWN`."""
    name, reads = compat.name_of(eqn), jaxprs.variables_in(eqn.invars)
    unknown = [UNKNOWN] * len(eqn.outvars)
    if eqn.effects or jaxprs.facts(eqn).differs_by_device or any(v not in dims for v in reads):
        return unknown
    divided = [v for v in reads if dims[v] is not None]
    if not divided:
        return [None] * len(eqn.outvars)
    if (results := eqn.params.get("out_dims")) is not None and name == "zerojax_shardwise":
        return results
    given = [None if compat.is_literal(a) else dims[a] for a in eqn.invars]
    if layers and name == "custom_jvp_call":
        found, moving = _of_results(_body(eqn), given, layers), [given[i] for i in _moving(eqn)]
        tangents = _of_results(compat.opened(_derivative(eqn))[0], [*given, *moving], layers)
        return found if tangents == found else unknown
    if (body := compat.called(eqn) if layers else compat.evaluated_body(eqn)) is not None:
        return _of_results(compat.opened(body)[0], given, layers)
    if (loop := compat.loop_of(eqn)) is not None and layers:
        return _through_loop(loop, given)[1] or unknown
    count = divided[0].aval.shape[dims[divided[0]]]
    if name not in (_OF_LAYERS if layers else _OF_SHARDS) or count == 1:
        return unknown
    states = [NOWHERE if dim is None else at(dim) for dim in given]
    pairs = zip(eqn.outvars, Follower(count).through(eqn, states, Context(count, {})), strict=True)
    return [_dim_in(var, state, count, name in _COMBINE and not layers) for var, state in pairs]


def _body(eqn: Any) -> Any:
    return compat.opened(compat.params_of(eqn)["call_jaxpr"])[0]


def _moving(eqn: Any) -> list[int]:
    return [i for i, a in enumerate(eqn.invars) if not compat.is_literal(a) and jaxprs.differentiable(a.aval.dtype)]


def _derivative(eqn: Any) -> Any:
    """Return the custom derivative of a function as a closed jaxpr of its operands and the tangents of `_moving`."""
    moving = _moving(eqn)

    def run(values, tangents):
        of_moving = lambda *some: compat.evaluate_one(eqn, replace_items(values, moving, some))
        return jax.jvp(of_moving, [values[i] for i in moving], tangents)[1]

    avals = [a.aval for a in eqn.invars]
    closed = jax.make_jaxpr(run)(avals, [avals[i] for i in moving])
    # The derivative may call the function again, whose derivative would be needed only for a second derivative.
    return flat(closed)


def _dim_in(var: Any, state: Any, count: int, may_combine: bool) -> int | None:
    """Return the divided dim of a result. If `may_combine` is true, it may have none."""
    if state is None or len(state.places) > 1 or not (state.places or may_combine):
        return UNKNOWN
    place = state.only
    return place and (place.dim if place.outer == 1 and var.aval.shape[place.dim] == count else UNKNOWN)


def _of_results(jaxpr: Any, given: Sequence[int | None], layers: bool) -> list[int | None]:
    """Return the same as `_dims_after` for the results of a jaxpr, given the divided dims of its arguments."""
    dims = dims_of(jaxpr, dict(zip(jaxpr.invars, given, strict=True)), layers=layers)
    return [None if compat.is_literal(a) else dims.get(a, UNKNOWN) for a in jaxpr.outvars]


def _through_loop(loop: compat.LoopEqn, given: Sequence[int | None]) -> tuple[list, list]:
    """Return the divided dims of a body's arguments and of the loop's results. Both are empty if one is unknown."""
    body, first = compat.opened(loop.body)[0], loop.consts + loop.carry
    inside = [*given[:first], *(dim and dim - 1 if dim != 0 else UNKNOWN for dim in given[first:])]
    while UNKNOWN not in inside:
        outs = _of_results(body, inside, True)
        carry = [a if b is None else b for a, b in zip(inside[loop.consts : first], outs, strict=False)]
        if UNKNOWN in outs or any(a not in (None, b) for a, b in zip(inside[loop.consts : first], carry, strict=True)):
            break
        if carry == inside[loop.consts : first]:
            return inside, [*carry, *(None if dim is None else dim + 1 for dim in outs[loop.carry :])]
        inside[loop.consts : first] = carry
    return [], []


@dataclasses.dataclass(frozen=True)
class Division:
    """How one dim of some values is divided over devices.

    Attributes:
        length: The logical size of the dim.
        extent: The size of the dim on one device, with padding.
        axes: The mesh axes that divide the dim.
    """

    length: int
    extent: int
    axes: tuple[str, ...]
    layers = False

    @property
    def start(self) -> Any:
        return lax.axis_index(self.axes) * self.extent

    @property
    def total(self) -> int:
        return lax.axis_size(self.axes) * self.extent

    def fill(self, x: jax.Array, dim: int, value: Any) -> jax.Array:
        """Replace the padding of a part by `value`."""
        if self.total == self.length:
            return x
        place = self.start + lax.broadcasted_iota(jnp.int32, x.shape, dim)
        return jnp.where(place < self.length, x, jnp.asarray(value, x.dtype))

    def part(self, x: jax.Array, dim: int) -> jax.Array:
        """Return this part of an array that is given in full. The padding is 1."""
        widths = [(0, self.total - self.length if d == dim else 0) for d in range(x.ndim)]
        x = jnp.pad(x, widths, constant_values=1) if self.total > self.length else x
        return lax.dynamic_slice_in_dim(x, self.start, self.extent, dim)

    def whole(self, part: jax.Array, dim: int) -> jax.Array:
        """Gather the parts of all devices into the whole array, without padding."""
        full = lax.all_gather(part, self.axes, axis=dim, tiled=True)
        return lax.slice_in_dim(full, 0, self.length, axis=dim)


@dataclasses.dataclass(frozen=True)
class Layer(Division):
    """One layer of `length` layers. The divided dim keeps the size 1.

    Attributes:
        index: The index of the layer.
    """

    extent: int = 1
    axes: tuple[str, ...] = ()
    index: Any = 0
    layers = True

    @property
    def start(self) -> Any:
        return self.index

    @property
    def total(self) -> int:
        return self.length


def evaluate_parts(closed: Any, values: Sequence, given: Sequence[int | None], division: Division) -> list:
    """Evaluate a closed jaxpr on one part of its arguments. Each result is a part, or has no divided dim.

    `values` are parts, or arrays in full. `given` has the divided dim of each part, and None for each full array.
    `dims_of` must have an entry for each variable. `division` describes the divided dim of all parts. If the parts are
    shards, `closed` must be a result of `flat`.
    """
    jaxpr, consts = compat.opened(closed)
    dims = dims_of(jaxpr, dict(zip(jaxpr.invars, given, strict=True)), layers=division.layers)
    made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    env = dict(zip(compat.constvars_of(jaxpr), jaxprs.as_jax_values(consts), strict=True))
    for var, x, dim in zip(jaxpr.invars, values, given, strict=True):
        # The padding is 1 in every operand, so that a quotient or a logarithm there is finite.
        env[var] = x if dim is None else division.fill(x, dim, 1)

    def beside(atom: Any, dim: int | None) -> Any:
        """Return an operand of an equation on parts. If it is a full array, return the part along `dim`."""
        if compat.is_literal(atom):
            return atom.val
        if dim is None or dims[atom] is not None or not atom.aval.shape or atom.aval.shape[dim] == 1:
            return env[atom]
        eqn = made.get(atom)
        if eqn is None or eqn.primitive.name != "broadcast_in_dim":
            return division.part(env[atom], dim)
        # The broadcast is made again in the shape of the part. The full result would be as large as the parameter.
        (x, *_), to = (
            [a.val if compat.is_literal(a) else env[a] for a in eqn.invars],
            eqn.params["broadcast_dimensions"],
        )
        if dim in to and np.shape(x)[list(to).index(dim)] != 1:
            x = division.part(x, list(to).index(dim))
        return lax.broadcast_in_dim(x, _with(atom.aval.shape, dim, division.extent), to)

    def results_of(eqn: Any) -> Sequence:
        own = [None if compat.is_literal(a) else dims[a] for a in eqn.invars]
        if not any(dim is not None for dim in own):
            return compat.evaluate_one(_local(eqn), [a.val if compat.is_literal(a) else env[a] for a in eqn.invars])
        after = [dims[v] for v in eqn.outvars]
        operands = [beside(*pair) for pair in zip(eqn.invars, _dims_beside(eqn, own, after[0]), strict=True)]
        return _on_parts(eqn, operands, own, after, division)

    context_of = names.contexts()
    for eqn in jaxprs.alive(jaxpr):
        with context_of(eqn):
            env.update(zip(eqn.outvars, results_of(eqn), strict=True))
    return [atom.val if compat.is_literal(atom) else env[atom] for atom in jaxpr.outvars]


def _dims_beside(eqn: Any, own: Sequence[int | None], after: int | None) -> list[int | None]:
    """Return the dim in which each operand of an equation on parts has to be divided, or None.

    `own` has the dims in which the operands are divided, and `after` is the divided dim of the first result.
    """
    if eqn.primitive.name in _ALIGNED:
        return [after if dim is None else dim for dim in own]
    if eqn.primitive.name == "dot_general":
        _, batch = eqn.params["dimension_numbers"]
        return [own[k] if after is None or after >= len(batch[k]) else int(batch[k][after]) for k in range(2)]
    if eqn.primitive.name == "triangular_solve":
        return [after if dim is None and after < eqn.outvars[0].aval.ndim - 2 else dim for dim in own]
    return list(own)


def _on_parts(eqn: Any, values: list, own: Sequence, after: Sequence, division: Division) -> Sequence:
    """Return the results of `eqn` on parts. `own` and `after` have the divided dims of its operands and results."""
    name, params = compat.name_of(eqn), eqn.params
    if (body := compat.called(eqn)) is not None:
        with names.inside_call(eqn):
            return evaluate_parts(body, values, own, division)
    if name == "custom_jvp_call":
        return _custom_on_parts(eqn, values, own, division)
    if (loop := compat.loop_of(eqn)) is not None:
        return _loop_on_parts(loop, values, own, division)
    if name in _COMBINE and after[0] is None:
        x = division.fill(values[0], own[0], jaxprs.identity_of(name, values[0].dtype))
        return [_COMBINE[name](compat.evaluate_one(_local(eqn), [x])[0], division.axes)]
    if name not in ("broadcast_in_dim", "reshape", "slice", "squeeze"):
        return compat.evaluate_one(_local(eqn), values)
    shape = _with(eqn.outvars[0].aval.shape, after[0], division.extent)
    if name == "broadcast_in_dim":
        return [lax.broadcast_in_dim(values[0], shape, params["broadcast_dimensions"])]
    if name == "slice":
        limits = _with(params["limit_indices"], own[0], division.extent)
        return [lax.slice(values[0], params["start_indices"], limits, params["strides"])]
    return [values[0].reshape(shape)]


def _custom_on_parts(eqn: Any, values: list, own: Sequence, division: Division) -> Sequence:
    """Call a function with a custom derivative on a layer. `own` has the divided dims of its operands."""
    assert isinstance(division, Layer), "calls on shards are inlined (`flat`)"
    moving, derivative = _moving(eqn), _derivative(eqn)
    dims = [*own, *(own[i] for i in moving)]

    # A function with a custom derivative must not close over traced values, such as the layer's index.
    @jax.custom_jvp
    def on_layer(start, *values):
        return evaluate_parts(
            compat.params_of(eqn)["call_jaxpr"], values, own, dataclasses.replace(division, index=start)
        )

    @on_layer.defjvp
    def _(given, tangents):
        start, *values = given
        values += [tangents[1 + i] for i in moving]
        return on_layer(*given), evaluate_parts(derivative, values, dims, dataclasses.replace(division, index=start))

    return on_layer(division.start, *values)


def _loop_on_parts(loop: compat.LoopEqn, values: list, own: Sequence, division: Division) -> list:
    """Run a loop on parts. `own` has the divided dims of its operands."""
    inside, after = _through_loop(loop, own)
    first = loop.consts + loop.carry
    as_part = lambda x, have, want: x if want is None or have is not None else division.part(jnp.asarray(x), want)
    carry = [as_part(*triple) for triple in zip(values, own, inside, strict=True)][loop.consts : first]
    outs = _of_results(compat.opened(loop.body)[0], inside, True)

    def iteration(carry, slices):
        results = evaluate_parts(loop.body, [*values[: loop.consts], *carry, *slices], inside, division)
        carry = [as_part(*triple) for triple in zip(results[: loop.carry], outs, after, strict=False)]
        return carry, results[loop.carry :]

    options = {"length": loop.length, "reverse": loop.reverse, "unroll": loop.unroll}
    carry, stacks = lax.scan(iteration, carry, values[first:], **options)
    return [*carry, *stacks]


def _local(eqn: Any) -> Any:
    """Return `eqn` without the sharding of its result, as if it had been traced on the current mesh."""
    params = {name: None if name in ("sharding", "out_sharding") else x for name, x in eqn.params.items()}
    return compat.in_force(eqn.replace(params=params))


def _with(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def extremum_of_layers(eqn: Any, x: jax.Array, counts: jax.Array) -> jax.Array:
    """Reduce the extrema `x` of all layers as `eqn` does. Equal elements share the cotangent, as in JAX.

    `counts` has, for each layer, the number of its elements that equal its extremum.
    """

    @jax.custom_jvp
    def extremum(x, counts):
        return reduced_like(eqn, x, [0])

    @extremum.defjvp
    def _(given, tangents):
        found = extremum(*given)
        equal = jnp.where(given[0] == found, given[1], 0)
        return found, jnp.sum(tangents[0] * (equal / equal.sum(0)).astype(found.dtype), 0)

    return extremum(x, counts)


def reduced_like(eqn: Any, x: jax.Array, axes: Sequence[int]) -> jax.Array:
    return compat.evaluate_one(eqn.replace(params={**eqn.params, "axes": tuple(axes)}), [x])[0]
