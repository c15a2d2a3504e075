"""Evaluate a jaxpr on parts of arrays (`parts`): on the shards of devices, or on one layer of a stack."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax import compat, jaxprs, names
from zerojax.comm import rebinding
from zerojax.gather.parts import COMBINED, dims_of, moving_operands, result_dims, tangents_of, through_loop
from zerojax.layout.leaf import Leaf
from zerojax.primitives import Kind, of_kind

# How devices combine their results of a reduction over the divided dim.
_COMBINE = MappingProxyType({"reduce_sum": lax.psum, "reduce_max": lax.pmax, "reduce_min": lax.pmin})
# Primitives of which each operand is divided in the same dim as the result.
_ALIGNED = of_kind(Kind.ELEMENTWISE) | {"concatenate", "sort"}


@dataclasses.dataclass(frozen=True)
class Division:
    """How one dim of some values is divided over devices."""

    length: int  # the logical size of the dim
    extent: int  # its size on one device, with padding
    total: int  # its size on all devices, with padding
    axes: tuple[str, ...]  # the mesh axes that divide it

    @classmethod
    def of(cls, leaf: Leaf) -> "Division":
        """Return the division of a sharded parameter."""
        assert leaf.dim is not None
        extent = leaf.local_shape[leaf.dim]
        return cls(leaf.shape[leaf.dim], extent, extent * leaf.shards, leaf.axes)

    @property
    def start(self) -> Any:
        return lax.axis_index(self.axes) * self.extent

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
    """One layer of `length` layers. The divided dim keeps the size 1."""

    index: Any

    @property
    def start(self) -> Any:
        return self.index


class Term(NamedTuple):
    """One device's term of a value that devices have to combine."""

    key: Any  # the variable of the value, or the index of a result
    name: str  # a key of `_COMBINE`
    array: jax.Array  # for a maximum or minimum, the operand, of which `_extrema` reduces `dims`
    dims: tuple[int, ...]
    axes: tuple[str, ...]

    @classmethod
    def of(cls, eqn: Any, operands: Sequence, own: Sequence[int | None], division: Division) -> "Term":
        """Return the term of a reduction or an inner product. `own` has the divided dims of its operands."""
        name = eqn.primitive.name
        identity = 0 if name == "dot_general" else _identity_of(name, operands[0].dtype)
        filled = [x if d is None else division.fill(x, d, identity) for x, d in zip(operands, own, strict=True)]
        if name in ("reduce_max", "reduce_min"):
            return cls(eqn.outvars[0], name, filled[0], tuple(eqn.params["axes"]), division.axes)
        return cls(eqn.outvars[0], "reduce_sum", compat.evaluate_one(_local(eqn), filled)[0], (), division.axes)

    @classmethod
    def of_part(cls, key: Any, part: jax.Array, dim: int, division: Division) -> "Term":
        """Return the term of a whole array: zeros outside of this device's part, and no padding."""
        full = jnp.zeros(_with(part.shape, dim, division.total), part.dtype)
        full = lax.dynamic_update_slice_in_dim(full, division.fill(part, dim, 0), division.start, dim)
        return cls(key, "reduce_sum", lax.slice_in_dim(full, 0, division.length, axis=dim), (), division.axes)


def evaluate_parts(
    closed: Any,
    values: Sequence,
    given: Sequence[int | None],
    division: Division | Sequence[Division | None],
    *,
    wanted: Sequence[tuple[int, Division] | None] | None = None,
    label: str = "zerojax_all_reduce[scales]",
) -> list:
    """Evaluate a closed jaxpr on one part of its arguments. Each result is a part, or has no divided dim.

    `values` are parts, or arrays in full. `given` has the divided dim of each part, and None for each full array.
    `dims_of` must have an entry for each variable. If the parts are shards, `closed` must be a result of `flat`.
    `division` describes the divided dim of all parts, or of each argument. If `wanted` is given, each result is divided
    as it says, or is in full if it says None. `label` is the name scope of collectives.
    """
    jaxpr, consts = compat.opened(closed)
    each = [division] * len(values) if isinstance(division, Division) else division
    run = _Evaluation(jaxpr, consts, values, given, each)
    # Equations that read a combined value wait, so that one collective combines the terms of many reductions.
    waiting, ends = jaxprs.alive(jaxpr), list(zip(jaxpr.outvars, wanted or (), strict=wanted is not None))
    while waiting or ends:
        waiting, terms = run.ready(waiting)
        if not waiting:
            for i, (var, end) in enumerate(ends):
                if end is None and (dim := run.dim_of(var)) is not None:
                    terms.append(Term.of_part(i, run.env[var], dim, run.divisions[var]))
            ends = []
        with jax.named_scope(label):
            run.env.update(_combined(terms))
    results = enumerate(zip(jaxpr.outvars, wanted or [None] * len(jaxpr.outvars), strict=True))
    return [run.beside(v, *end) if end else run.env[i] if i in run.env else run.value(v) for i, (v, end) in results]


class _Evaluation:
    """Evaluates the equations of a jaxpr on parts. The arguments are those of `evaluate_parts`."""

    def __init__(self, jaxpr: Any, consts: Sequence, values: Sequence, given: Sequence, each: Sequence):
        """Begin with the arguments."""
        layers = any(isinstance(division, Layer) for division in each)
        self.dims = dims_of(jaxpr, dict(zip(jaxpr.invars, given, strict=True)), layers=layers)
        # The values of variables, and those of results that devices combine by their indices.
        self.env: dict = dict(zip(compat.constvars_of(jaxpr), jaxprs.as_jax_values(consts), strict=True))
        self.divisions = dict(zip(jaxpr.invars, each, strict=True))
        for var, x, dim, division in zip(jaxpr.invars, values, given, each, strict=True):
            # The padding is 1 in every operand, so that a quotient or a logarithm there is finite.
            self.env[var] = x if dim is None else division.fill(x, dim, 1)
        self._made = jaxprs.makers(jaxpr.eqns)

    def value(self, atom: Any) -> Any:
        return atom.val if compat.is_literal(atom) else self.env[atom]

    def dim_of(self, atom: Any) -> int | None:
        return None if compat.is_literal(atom) else self.dims[atom]

    def ready(self, eqns: Sequence) -> tuple[list, list[Term]]:
        """Evaluate the equations whose operands are known. Return the others, and terms that devices combine."""
        later, terms, context_of = [], [], names.contexts()
        for eqn in eqns:
            if not self.env.keys() >= {*jaxprs.variables_in(eqn.invars)}:
                later.append(eqn)
                continue
            with context_of(eqn):
                results = self._results(eqn)
            if isinstance(results, Term):
                terms.append(results)
            else:
                self.env.update(zip(eqn.outvars, results, strict=True))
        return later, terms

    def beside(self, atom: Any, dim: int | None, division: Division) -> Any:
        """Return an operand of an equation on parts. If it is a full array, return the part along `dim`."""
        if dim is None or self.dim_of(atom) is not None or not atom.aval.shape or atom.aval.shape[dim] == 1:
            return self.value(atom)
        # A broadcast, and what is computed element by element, is computed again in the shape of the part. The full
        # result would be as large as the parameter.
        eqn = self._made.get(atom)
        if eqn is not None and jaxprs.facts(eqn).elementwise and not isinstance(division, Layer):
            return compat.evaluate_one(_local(eqn), [self.beside(a, dim, division) for a in eqn.invars])[0]
        if eqn is None or eqn.primitive.name != "broadcast_in_dim":
            return division.part(self.env[atom], dim)
        x, to = self.value(eqn.invars[0]), eqn.params["broadcast_dimensions"]
        if dim in to and np.shape(x)[list(to).index(dim)] != 1:
            x = division.part(x, list(to).index(dim))
        return lax.broadcast_in_dim(x, _with(atom.aval.shape, dim, division.extent), to)

    def _results(self, eqn: Any) -> Sequence | Term:
        own, after = list(map(self.dim_of, eqn.invars)), list(map(self.dim_of, eqn.outvars))
        division = next((self.divisions[a] for a in eqn.invars if self.dim_of(a) is not None), None)
        if division is None:
            return compat.evaluate_one(_local(eqn), [*map(self.value, eqn.invars)])
        self.divisions.update(dict.fromkeys(eqn.outvars, division))
        pairs = zip(eqn.invars, _dims_beside(eqn, own, after[0]), strict=True)
        operands = [self.beside(*pair, division) for pair in pairs]
        if after[0] is None and eqn.primitive.name in COMBINED:
            return Term.of(eqn, operands, own, division)
        return _on_parts(eqn, operands, own, after, division)


def _combined(terms: Sequence[Term]) -> dict:
    """Return the values that devices combine from terms, by their keys."""
    found: dict = {}
    for name, axes in dict.fromkeys((term.name, term.axes) for term in terms):
        some = [term for term in terms if (term.name, term.axes) == (name, axes)]
        arrays = [term.array for term in some]
        is_sum = name == "reduce_sum"
        results = (
            together(lax.psum, arrays, axes) if is_sum else _extrema(arrays, name, tuple(t.dims for t in some), axes)
        )
        found |= zip((term.key for term in some), results, strict=True)
    return found


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _extrema(arrays: Sequence[jax.Array], name: str, dims: tuple, axes: tuple[str, ...]) -> list[jax.Array]:
    """Return the maxima or minima of devices' arrays over their dims and over devices. JAX has no derivative of it."""
    reduce = {"reduce_max": jnp.max, "reduce_min": jnp.min}[name]
    return together(_COMBINE[name], [reduce(x, d) for x, d in zip(arrays, dims, strict=True)], axes)


@_extrema.defjvp
def _extrema_jvp(name: str, dims: tuple, axes: tuple, primals: tuple, tangents: tuple) -> tuple[list, list]:
    """Return the extrema and their tangents. Elements that equal an extremum share its tangent equally, as in JAX."""
    (arrays,), (moving,) = primals, tangents
    found = _extrema(arrays, name, dims, axes)
    triples = zip(arrays, found, dims, strict=True)
    is_equal = [(x == jnp.expand_dims(extremum, d)).astype(x.dtype) for x, extremum, d in triples]
    sums = [(t * on).sum(d) for t, on, d in zip(moving, is_equal, dims, strict=True)]
    counts = [on.sum(d) for on, d in zip(is_equal, dims, strict=True)]
    # Not in one collective: JAX transposes the sums, and would take the counts for linear, too.
    totals, counts = together(lax.psum, sums, axes), together(lax.psum, counts, axes)
    return found, [a / b for a, b in zip(totals, counts, strict=True)]


def together(reduce: Callable, arrays: Sequence[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    """Combine small arrays over devices, with one collective per type."""
    results = list(arrays)
    for dtype in dict.fromkeys(x.dtype for x in arrays):
        places = [i for i, x in enumerate(arrays) if x.dtype == dtype]
        if len(places) == 1:
            results[places[0]] = reduce(arrays[places[0]], axes)
            continue
        flat = reduce(jnp.concatenate([arrays[i].ravel() for i in places]), axes)
        for i in places:
            size = arrays[i].size
            results[i], flat = flat[:size].reshape(arrays[i].shape), flat[size:]
    return results


def _dims_beside(eqn: Any, own: Sequence[int | None], after: int | None) -> list[int | None]:
    """Return the dim in which each operand of an equation on parts has to be divided, or None.

    `own` has the dims in which the operands are divided, and `after` is the divided dim of the first result.
    """
    if eqn.primitive.name in _ALIGNED:
        return [after if dim is None else dim for dim in own]
    if eqn.primitive.name == "dot_general" and not eqn.outvars[0].aval.shape:
        return [next(dim for dim in own if dim is not None)] * 2
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
    moving, derivative = moving_operands(eqn), tangents_of(eqn)
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
    inside, after = through_loop(loop, own)
    as_part = lambda x, have, want: x if want is None or have is not None else division.part(jnp.asarray(x), want)
    carried = [as_part(*triple) for triple in zip(values, own, inside, strict=True)][loop.consts :][: loop.carry]
    outs = result_dims(compat.opened(loop.body)[0], inside, True)

    def run(values):
        results = evaluate_parts(loop.body, values, inside, division)
        carry = [as_part(*triple) for triple in zip(results[: loop.carry], outs, after, strict=False)]
        return [*carry, *results[loop.carry :]]

    return loop.evaluate(run, [*values[: loop.consts], *carried, *values[loop.consts + loop.carry :]])


def _local(eqn: Any) -> Any:
    """Return `eqn` without the sharding of its result, as if it had been traced on the current mesh."""
    params = {name: None if name in ("sharding", "out_sharding") else x for name, x in eqn.params.items()}
    return rebinding.in_force(eqn.replace(params=params))


def _with(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _identity_of(name: str, dtype: Any) -> Any:
    """Return the identity of the reduction `reduce_sum`, `reduce_max` or `reduce_min`, in the elements' type."""
    if name == "reduce_sum":
        return 0
    if not jnp.issubdtype(dtype, jnp.inexact):
        limits = (False, True) if dtype == jnp.bool_ else (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
    else:  # some types of 8 bits have no infinity
        is_finite = not np.isinf(np.array(np.inf).astype(dtype).astype(np.float32))
        limits = (jnp.finfo(dtype).min, jnp.finfo(dtype).max) if is_finite else (-np.inf, np.inf)
    return limits[0] if name == "reduce_max" else limits[1]
