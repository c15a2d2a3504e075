"""Evaluate a jaxpr on one device's parts of sharded arrays. `narrow` and `shardwise` use this.

A part is one device's range of one dim of a value. Elementwise equations, broadcasts and reductions can be evaluated on
parts. `dims_of` finds the values of a jaxpr that can be computed on parts, and the dim in which each value is divided.
`evaluate_parts` computes these values. A reduction over the divided dim needs a small collective.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax import compat, jaxprs

# How devices combine their results of a reduction over the divided dim.
_COMBINE = MappingProxyType({"reduce_sum": lax.psum, "reduce_max": lax.pmax, "reduce_min": lax.pmin})
_DEVICE_DEPENDENT = frozenset(
    "all_to_all axis_index pallas_call ppermute psum_scatter reduce_scatter rng_uniform shard_map".split()
)
UNKNOWN = -1  # the dim of a value that cannot be computed on parts


def call(closed: Any, *args: Any) -> list:
    """Evaluate a closed jaxpr."""
    jaxpr, consts = compat.opened(closed)
    return jax.core.eval_jaxpr(jaxpr, jaxprs.as_jax_values(consts), *args)


def flat(closed: Any) -> Any:
    """Return a closed jaxpr in which all calls are inlined, including calls of functions with a custom derivative."""
    jaxpr, consts = compat.opened(closed)

    def rule(eqn, values):
        if eqn.primitive.name == "reshard":  # JAX adds `reshard` to cotangents. In a `shard_map` it changes nothing.
            return values
        body = compat.evaluated_body(eqn)
        if body is None or compat.constvars_of(body):
            return None
        consts = next((compat.opened(p)[1] for p in eqn.params.values() if compat.is_jaxpr(p)), ())
        return jaxprs.evaluate(body, consts, values, rule)

    avals = [var.aval for var in jaxpr.invars]
    return jax.make_jaxpr(lambda *args: jaxprs.evaluate(jaxpr, consts, args, rule))(*avals)


def dims_of(jaxpr: Any, given: Mapping[Any, int | None]) -> dict[Any, int | None]:
    """Return, for each variable that can be computed on parts, its divided dim, or None if it is alike on all devices.

    `given` has the same for the arguments. A variable that cannot be computed on parts has no entry.
    """
    dims = {**given, **dict.fromkeys(compat.constvars_of(jaxpr))}
    for eqn in jaxpr.eqns:
        for var, dim in zip(eqn.outvars, _dims_after(eqn, dims), strict=True):
            if dim != UNKNOWN:
                dims[var] = dim
    return dims


def _dims_after(eqn: Any, dims: Mapping) -> Sequence[int | None]:
    """Return, for each result of `eqn`, its divided dim, None if it is alike on all devices, or `UNKNOWN`."""
    reads = jaxprs.variables_in(eqn.invars)
    unknown = [UNKNOWN] * len(eqn.outvars)
    if eqn.effects or eqn.primitive.name in _DEVICE_DEPENDENT or any(v not in dims for v in reads):
        return unknown
    divided = [v for v in reads if dims[v] is not None]
    if not divided:
        return [None] * len(eqn.outvars)
    if (results := eqn.params.get("out_dims")) is not None and eqn.primitive.name == "zerojax_shardwise":
        return results
    if (body := compat.evaluated_body(eqn)) is not None:
        given = {v: None if compat.is_literal(a) else dims[a] for v, a in zip(body.invars, eqn.invars, strict=True)}
        inside = dims_of(body, given)
        return [None if compat.is_literal(a) else inside.get(a, UNKNOWN) for a in body.outvars]
    if len({dims[v] for v in divided}) > 1 or len(eqn.outvars) != 1:
        return unknown
    return [_dim_after(eqn, divided[0], dims[divided[0]], [v.aval.shape for v in divided])]


def _dim_after(eqn: Any, operand: Any, dim: int, shapes: Sequence[tuple]) -> int | None:
    """Return the same as `_dims_after` for the only result of `eqn`, whose `operand` is divided in `dim`.

    `shapes` has the shapes of all divided operands.
    """
    name, before, after = eqn.primitive.name, operand.aval.shape, eqn.outvars[0].aval.shape
    if name in jaxprs.ELEMENTWISE:
        return dim if all(len(shape) == len(after) and shape[dim] == after[dim] for shape in shapes) else UNKNOWN
    if eqn.invars[0] is not operand:
        return UNKNOWN
    if name in _COMBINE:
        axes = eqn.params["axes"]
        return None if dim in axes else dim - sum(axis < dim for axis in axes)
    if name == "broadcast_in_dim":
        to = eqn.params["broadcast_dimensions"][dim]
        return to if after[to] == before[dim] != 1 else UNKNOWN
    if name in ("reshape", "squeeze", "expand_dims"):
        return _dim_kept(before, after, dim)
    if name == "slice":
        strides = eqn.params["strides"] or [1] * len(before)
        return dim if after[dim] == before[dim] and strides[dim] == 1 else UNKNOWN
    if name == "pad":
        return dim if eqn.params["padding_config"][dim] == (0, 0, 0) else UNKNOWN
    return UNKNOWN


def _dim_kept(before: Sequence[int], after: Sequence[int], dim: int) -> int:
    """Return the index of `dim` after a reshape that only adds or removes dims of size 1, and otherwise `UNKNOWN`."""
    kept = [d for d, size in enumerate(before) if size != 1]
    now = [d for d, size in enumerate(after) if size != 1]
    alike = [before[d] for d in kept] == [after[d] for d in now]
    return now[kept.index(dim)] if alike and dim in kept else UNKNOWN


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

    def fill(self, x: jax.Array, dim: int, value: Any) -> jax.Array:
        """Replace the padding of a part by `value`."""
        if self.extent * lax.axis_size(self.axes) == self.length:
            return x
        place = lax.axis_index(self.axes) * self.extent + lax.broadcasted_iota(jnp.int32, x.shape, dim)
        return jnp.where(place < self.length, x, jnp.asarray(value, x.dtype))

    def part(self, x: jax.Array, dim: int) -> jax.Array:
        """Return this device's part of an array that all devices have in full. The padding is 1."""
        total = self.extent * lax.axis_size(self.axes)
        widths = [(0, total - self.length if d == dim else 0) for d in range(x.ndim)]
        x = jnp.pad(x, widths, constant_values=1) if total > self.length else x
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.axes) * self.extent, self.extent, dim)

    def whole(self, part: jax.Array, dim: int) -> jax.Array:
        """Gather the parts of all devices into the whole array, without padding."""
        full = lax.all_gather(part, self.axes, axis=dim, tiled=True)
        return lax.slice_in_dim(full, 0, self.length, axis=dim)


def evaluate_parts(closed: Any, values: Sequence, given: Sequence[int | None], division: Division) -> list:
    """Evaluate `closed`, a result of `flat`, on one device. Each result is a part, or alike on all devices.

    `values` are parts, or arrays that all devices have in full. `given` has the divided dim of each part, and None for
    each full array. `dims_of` must have an entry for each variable. `division` describes the divided dim of all parts.
    """
    jaxpr, consts = compat.opened(closed)
    dims = dims_of(jaxpr, dict(zip(jaxpr.invars, given, strict=True)))
    made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    env = dict(zip(compat.constvars_of(jaxpr), jaxprs.as_jax_values(consts), strict=True))
    for var, x, dim in zip(jaxpr.invars, values, given, strict=True):
        # The padding is 1 in every operand, so that a quotient or a logarithm there is finite.
        env[var] = x if dim is None else division.fill(x, dim, 1)

    def beside(atom: Any, dim: int) -> Any:
        """Return an operand of an elementwise equation on parts. If it is a full array, return the part along `dim`."""
        if compat.is_literal(atom):
            return atom.val
        if dims[atom] is not None or not atom.aval.shape or atom.aval.shape[dim] == 1:
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

    for eqn in jaxprs.alive(jaxpr):
        outs = [v for v in eqn.outvars if not compat.is_dropped(v)]
        divided = [dim for v in jaxprs.variables_in(eqn.invars) if (dim := dims[v]) is not None]
        if not divided:
            full = [a.val if compat.is_literal(a) else env[a] for a in eqn.invars]
            env.update(zip(eqn.outvars, compat.evaluate_one(_local(eqn), full), strict=True))
        elif eqn.primitive.name in jaxprs.ELEMENTWISE:
            env[outs[0]] = compat.evaluate_one(_local(eqn), [beside(atom, divided[0]) for atom in eqn.invars])[0]
        else:
            env[outs[0]] = _moved(eqn, env[eqn.invars[0]], divided[0], dims[outs[0]], division)
    return [atom.val if compat.is_literal(atom) else env[atom] for atom in jaxpr.outvars]


def _moved(eqn: Any, x: jax.Array, dim: int, after: int | None, division: Division) -> jax.Array:
    """Return the result of `eqn`, a reduction or an equation that only moves elements, given the part `x`.

    `dim` is the divided dim of `x`, and `after` that of the result, or None if the result is alike on all devices.
    """
    name, params = eqn.primitive.name, eqn.params
    if name in _COMBINE:
        if after is not None:
            return compat.evaluate_one(_local(eqn), [x])[0]
        x = division.fill(x, dim, jaxprs.identity_of(name, x.dtype))
        return _COMBINE[name](compat.evaluate_one(_local(eqn), [x])[0], division.axes)
    if name == "pad":
        padding = (
            jnp.asarray(eqn.invars[1].val, x.dtype) if compat.is_literal(eqn.invars[1]) else jnp.zeros((), x.dtype)
        )
        return lax.pad(x, padding, params["padding_config"])
    assert after is not None
    shape = _with(eqn.outvars[0].aval.shape, after, division.extent)
    if name == "broadcast_in_dim":
        return lax.broadcast_in_dim(x, shape, params["broadcast_dimensions"])
    if name == "slice":
        limits = _with(params["limit_indices"], dim, division.extent)
        return lax.slice(x, params["start_indices"], limits, params["strides"])
    return x.reshape(shape)


def _local(eqn: Any) -> Any:
    """Return `eqn` without the sharding of its result, as if it had been traced on the current mesh."""
    params = {name: None if name in ("sharding", "out_sharding") else x for name, x in eqn.params.items()}
    return compat.in_force(eqn.replace(params=params))


def _with(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])
