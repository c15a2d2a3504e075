"""Compute penalties, norms and statistics of parameters on shards. The rule "reduction" makes these segments.

Each device evaluates the equations of the segment on its parts (`on_shards.Part`). This gives one term per result, and
one small collective combines the terms of all devices. The cotangents of the results are as small as the results, and
each device computes its shard of the gradient from them. So the backward pass needs no gather and no reduce-scatter.

In global view, there is one loss, and the cotangent of a result is complete. In device view, each device has a loss and
a cotangent, so the backward pass first sums the cotangents over the devices.

Padding must not change a result. Where values enter the segment, their padding is replaced by ones, so that a quotient
or a logarithm of it is finite. Where values are reduced, the padding is replaced by the identity of the reduction.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax import compat, jaxprs, names
from zerojax.comm.collectives import Collectives
from zerojax.gather.on_shards import Part, largest, part_of_result
from zerojax.gather.schedule import GatherScheduler, GradScheduler
from zerojax.gather.segments import Segment
from zerojax.gather.sharded_param import ShardedParam
from zerojax.gather.vjp import differentiable
from zerojax.layout.leaf import replace_items
from zerojax.layout.padded import pad
from zerojax.offload.host import to_device

# How devices combine their terms of maxima and minima. The terms of all other reductions are summed.
_COMBINE: Mapping[str | None, Callable] = MappingProxyType({"reduce_max": lax.pmax, "reduce_min": lax.pmin})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReducedResiduals:
    """Residuals of a `ReducedSegment`.

    Attributes:
        others: The segment's other inputs.
        operands: Values that the slices of the parameters read.
        results: The results. The backward pass compares elements with them, to find maxima and minima.
        moving: Indices of the sources whose cotangents are wanted.
    """

    others: list
    operands: list
    results: list
    moving: tuple[int, ...] = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class ReducedSegment(Segment):
    """Reductions of parameters that are computed on shards. `params` is empty, because nothing is gathered.

    Attributes:
        shards: The parameters. In the jaxpr, they come before the others.
    """

    shards: tuple[ShardedParam, ...] = ()

    @classmethod
    def of(cls, jaxpr: Any, params: tuple, others: tuple, results: tuple) -> "ReducedSegment":
        return cls(jaxpr, (), others, results, params)

    @property
    def sources(self) -> list:
        """Return the variables of the parameters' shards and of the others; see `Segment`."""
        return [*(param.root for param in self.shards), *self.others]

    @functools.cached_property
    def parts(self) -> dict:
        """Return, for each variable that is not alike on all devices, the part that each device holds."""
        parts = dict(zip(self.jaxpr.invars, map(Part.of, self.shards), strict=False))
        for eqn in self.jaxpr.eqns:
            of = [None if compat.is_literal(a) else parts.get(a) for a in eqn.invars]
            if any(of) and (part := part_of_result(eqn, of)) is not None:
                parts[eqn.outvars[0]] = part
        return parts

    @functools.cached_property
    def divided(self) -> dict:
        """Return, for each of the other inputs that is as large as a parameter, the part that each device needs."""
        uses, _ = jaxprs.uses_of(self.jaxpr)
        found = {}
        for var in self.jaxpr.invars[len(self.shards) :]:
            parts = {self._part_beside(eqn) for eqn, _ in uses.get(var, ())}
            if len(parts) == 1 and (part := parts.pop()) and part.dim is not None and part.shape == var.aval.shape:
                found[var] = part
        return found

    def _part_beside(self, eqn: Any) -> Part | None:
        """Return the largest part among an equation's operands, or None if no operand is a part."""
        parts = [self.parts[a] for a in jaxprs.variables_in(eqn.invars) if a in self.parts]
        return largest(parts) if parts else None

    @functools.cached_property
    def _dims(self) -> list[int | None]:
        """Return the divided dim of each argument of the jaxpr, or None."""
        parts = {**self.parts, **self.divided}
        return [parts[var].dim if var in parts else None for var in self.jaxpr.invars]

    @property
    def axes(self) -> tuple[str, ...]:
        return self.shards[0].leaf.axes

    @property
    def _label(self) -> str:
        paths = list(dict.fromkeys(param.leaf.path for param in self.shards))
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        return f"zerojax_all_reduce[{paths[0]}{more}]"

    def forward(self, gathers: GatherScheduler, moving: Set) -> tuple[list, ReducedResiduals | None]:
        """Run the forward pass; see `Segment`."""
        env, comm = gathers.env, gathers.options.comm
        others = [env[v] for v in self.others]
        values = [*self._shards(env), *(self._entered(comm, others))]
        results = comm.per_shard(self._reduce, values, self._dims, [None] * len(self.results), self.axes)
        if not moving:
            return results, None
        indices = tuple(i for i, source in enumerate(self.sources) if source in moving)
        operands = [env[v] for param in self.shards for v in param.operands]
        return results, ReducedResiduals(others, operands, results, indices)

    def backward(self, residuals: ReducedResiduals, gathers: GatherScheduler, grads: GradScheduler) -> None:
        """Run the backward pass; see `Segment`."""
        wanted = [i for i, var in enumerate(self.jaxpr.outvars) if differentiable(var.aval.dtype)]
        cotangents = self.cotangents(wanted, grads)
        if cotangents is None:
            return
        comm = gathers.options.comm
        gathers.env.update(zip((v for p in self.shards for v in p.operands), residuals.operands, strict=True))
        others, pull_others = jax.vjp(lambda others: self._entered(comm, others), residuals.others)
        values = [*self._shards(gathers.env), *others]
        moving = [i for i in residuals.moving if differentiable(values[i].dtype)]
        count = len(values)

        def pull(*args):
            return self._pull(
                comm, args[:count], args[count:][: len(self.results)], args[-len(wanted) :], moving, wanted
            )

        dims = [*self._dims, *[None] * (len(self.results) + len(wanted))]
        args = [*values, *residuals.results, *cotangents]
        found = comm.per_shard(pull, args, dims, [self._dims[i] for i in moving], self.axes)
        to = dict(zip(moving, found, strict=True))
        for i, param in enumerate(self.shards):
            if i in to:
                shard = comm.own_part(to[i].astype(gathers.env[param.root].dtype), param.leaf)
                grads.add(param.root, grads.root_grad(param, shard))
        first = len(self.shards)
        zeros = [compat.zero_cotangent(x.shape, x.dtype) for x in others]
        (to_others,) = pull_others([to.get(first + i, zero) for i, zero in enumerate(zeros)])
        for i, var in enumerate(self.others):
            if first + i in to:
                grads.add(var, to_others[i])

    def _shards(self, env: Mapping) -> list[jax.Array]:
        return [to_device(param.sliced(env)).astype(param.wide) for param in self.shards]

    def _entered(self, comm: Collectives, others: Sequence) -> list[jax.Array]:
        """Return the other inputs. Each input in `divided` is replaced by the device's part."""
        pairs = zip(self.jaxpr.invars[len(self.shards) :], others, strict=True)
        return [comm.divided(x, of.dim, of.extent, of.axes) if (of := self.divided.get(v)) else x for v, x in pairs]

    def _reduce(self, *values: jax.Array) -> list[jax.Array]:
        """Return the results, given the device's `values` of the jaxpr's arguments."""
        terms, _ = Evaluation(self).run(values)
        results: dict[int, jax.Array] = {}
        with jax.named_scope(self._label):
            for name in (None, *_COMBINE):
                chosen = [i for i, eqn in enumerate(self._reductions) if self._combined_by(eqn) == name]
                if name is None:
                    found = _together(lax.psum, [terms[i] for i in chosen], self.axes)
                else:
                    dims = tuple(self._reductions[i].params["axes"] for i in chosen)
                    found = _extrema([terms[i] for i in chosen], name, dims, self.axes)
                results |= dict(zip(chosen, found, strict=True))
        return [self._delivered(var, results[i]) for i, var in enumerate(self.jaxpr.outvars)]

    @functools.cached_property
    def _reductions(self) -> list:
        """Return the reduction that computes each result."""
        made = {var: eqn for eqn in self.jaxpr.eqns for var in eqn.outvars}
        return [made[var] for var in self.jaxpr.outvars]

    def _combined_by(self, eqn: Any) -> str | None:
        """Return the key in `_COMBINE` of the collective for the terms of `eqn`, or None if the terms are summed."""
        name = eqn.primitive.name
        return name if name in _COMBINE and eqn.outvars[0] not in self.parts else None

    def _delivered(self, var: Any, total: jax.Array) -> jax.Array:
        """Return the result `var` without padding, given `total`, the sum or extremum of its terms."""
        part = self.parts.get(var)
        return total if part is None else lax.slice(total, [0] * total.ndim, part.shape)

    def _undelivered(self, var: Any, cotangent: jax.Array) -> jax.Array:
        """Return the cotangent of a term of the result `var`. If the result is divided, its terms have padding."""
        part = self.parts.get(var)
        if part is None:
            return cotangent
        assert part.dim is not None
        return pad(cotangent, part.dim, part.extent * part.shards)

    def _pull(self, comm: Collectives, values, results, cotangents, moving, wanted) -> list[jax.Array]:
        """Return the cotangents of the `moving` inputs on one device, given the cotangents of the `wanted` results."""

        def terms(some):
            found, counts = Evaluation(self, results).run(replace_items(values, moving, some))
            return [found[i] for i in wanted], [counts[i] for i in wanted if i in counts]

        cotangents = [self._undelivered(self.jaxpr.outvars[i], c) for i, c in zip(wanted, cotangents, strict=True)]
        _, pull, counts = jax.vjp(terms, [values[i] for i in moving], has_aux=True)
        counted = [i for i in wanted if self._combined_by(self._reductions[i]) is not None]
        own_loss = comm.follower is None
        with jax.named_scope(self._label):
            totals = _together(lax.psum, [*(cotangents if own_loss else []), *counts], self.axes)
        if own_loss:
            cotangents = totals[: len(cotangents)]
        of = dict(zip(counted, totals[len(totals) - len(counts) :], strict=True))
        shared = lambda cs: [c / of[i] if i in of else c for i, c in zip(wanted, cs, strict=True)]
        (found,) = pull(shared(cotangents))
        across = comm.across(self.shards[0].leaf)
        if own_loss and across and not comm.defers:
            # Each group of devices holds all shards. Their gradients are sums over all groups, and everything else
            # stays this group's part of a sum that is computed later.
            (all_groups,) = pull(shared(_together(lax.psum, cotangents, across)))
            found = [x if i < len(self.shards) else y for i, x, y in zip(moving, all_groups, found, strict=True)]
        if not own_loss:
            alike = [k for k, i in enumerate(moving) if self._dims[i] is None]
            for k, x in zip(alike, _together(lax.psum, [found[k] for k in alike], self.axes), strict=True):
                found[k] = x
        return found


class Evaluation:
    """Evaluates a segment's equations on one device's parts.

    In a backward pass, `results` are the results of the forward pass. The term of a maximum or minimum is then the sum
    of the elements that equal it, so that these elements share its cotangent, as in JAX.
    """

    def __init__(self, segment: ReducedSegment, results: Sequence | None = None):
        """Begin an evaluation."""
        self.segment, self.parts = segment, segment.parts
        self.maxima = dict(zip(segment.jaxpr.outvars, results or (), strict=False))
        self.env: dict = {}
        self.broadcasts: dict = {}
        self.terms: dict = {}
        self.counts: dict = {}

    def run(self, values: Sequence) -> tuple[list, dict[int, jax.Array]]:
        """Return this device's term of each result and, by the index of a maximum, how many elements equal it."""
        parts = {**self.parts, **self.segment.divided}
        for var, x in zip(self.segment.jaxpr.invars, values, strict=True):
            self.env[var] = _where_inside(x, parts[var], 1) if var in parts else x
        context_of = names.contexts()
        for eqn in self.segment.jaxpr.eqns:
            with context_of(eqn):
                self._evaluate(eqn)
        outvars = self.segment.jaxpr.outvars
        terms = [self.terms[v] if v in self.terms else _placed(self.env[v], self.parts[v]) for v in outvars]
        return terms, {i: self.counts[v] for i, v in enumerate(outvars) if v in self.counts}

    def _evaluate(self, eqn: Any) -> None:
        (out,) = eqn.outvars
        params = {name: None if name in ("out_sharding", "sharding") else x for name, x in eqn.params.items()}
        part = self.segment._part_beside(eqn)
        if part is None and eqn.primitive.name == "broadcast_in_dim":
            self.broadcasts[out] = eqn  # Its readers make the broadcast in the shape that they need.
        elif part is None:
            self.env[out] = eqn.primitive.bind(*map(self._full, eqn.invars), **params)
        else:
            values = [self._beside(atom, part) for atom in eqn.invars]
            if out in self.parts:
                self.env[out] = _by_part(eqn, values, self.parts[out], params)
            else:
                self.terms[out] = self._reduced(eqn, values, part, params)

    def _full(self, atom: Any) -> jax.Array:
        """Return the value of `atom`, which is alike on all devices."""
        if compat.is_literal(atom):
            return jnp.asarray(atom.val, atom.aval.dtype)
        if atom in self.broadcasts:
            eqn = self.broadcasts[atom]
            dims = eqn.params["broadcast_dimensions"]
            return lax.broadcast_in_dim(self._full(eqn.invars[0]), atom.aval.shape, dims)
        return self.env[atom]

    def _beside(self, atom: Any, part: Part) -> jax.Array:
        """Return an operand of an equation whose largest operand is `part`, in a shape that fits the local arrays."""
        if not compat.is_literal(atom) and (atom in self.parts or atom in self.segment.divided):
            return self.env[atom]
        if compat.is_literal(atom) or atom not in self.broadcasts:
            shape, x, dims = atom.aval.shape, self._full(atom), range(len(atom.aval.shape))
        else:
            eqn = self.broadcasts[atom]
            shape, x, dims = atom.aval.shape, self._full(eqn.invars[0]), eqn.params["broadcast_dimensions"]
        if part.dim is None or not shape:
            return _where_inside(jnp.broadcast_to(x.reshape(()), part.local_shape), part, 1)
        at = list(dims).index(part.dim) if part.dim in dims else None
        if at is not None and x.shape[at] == part.shape[part.dim] != 1:
            widths = [(0, part.extent * part.shards - x.shape[at] if d == at else 0) for d in range(x.ndim)]
            x = lax.dynamic_slice_in_dim(jnp.pad(x, widths), lax.axis_index(part.axes) * part.extent, part.extent, at)
        return _where_inside(lax.broadcast_in_dim(x, part.local_shape, tuple(dims)), part, 1)

    def _reduced(self, eqn: Any, values: list, part: Part, params: Mapping) -> jax.Array:
        """Return the term of a reduction over the divided dim."""
        name, (out,) = eqn.primitive.name, eqn.outvars
        if name not in _COMBINE:
            return eqn.primitive.bind(*(_where_inside(x, part, 0) for x in values), **params)
        (x,) = values
        if out not in self.maxima:
            return _where_inside(x, part, jaxprs.identity_of(name, x.dtype))  # `_extrema` reduces it.
        axes = eqn.params["axes"]
        equal = lax.stop_gradient(_where_inside(_equal(x, self.maxima[out], axes), part, 0))
        self.counts[out] = equal.sum(axes)
        return jnp.sum(x * equal, axes)


def _by_part(eqn: Any, values: Sequence, part: Part, params: Mapping) -> jax.Array:
    """Evaluate an equation on parts whose result has the part `part`."""
    name = eqn.primitive.name
    if name == "broadcast_in_dim":
        return lax.broadcast_in_dim(values[0], part.local_shape, eqn.params["broadcast_dimensions"])
    if name in ("reshape", "squeeze"):
        return values[0].reshape(part.local_shape)
    return eqn.primitive.bind(*values, **params)


def _where_inside(x: jax.Array, part: Part, fill: Any) -> jax.Array:
    """Replace the padding of a device's part by `fill`."""
    if not part.is_padded:
        return x
    whole = part.with_dim
    assert whole.dim is not None
    place = lax.axis_index(part.axes) * part.extent + lax.broadcasted_iota(jnp.int32, whole.local_shape, whole.dim)
    inside = (place < whole.shape[whole.dim]).reshape(part.local_shape)
    return jnp.where(inside, x, jnp.asarray(fill, x.dtype))


def _placed(x: jax.Array, part: Part) -> jax.Array:
    """Return an array of the whole value with padding. It has this device's part `x`, and zeros everywhere else."""
    assert part.dim is not None
    shape = (*part.shape[: part.dim], part.extent * part.shards, *part.shape[part.dim + 1 :])
    start = lax.axis_index(part.axes) * part.extent
    return lax.dynamic_update_slice_in_dim(jnp.zeros(shape, x.dtype), x, start, part.dim)


def _equal(x: jax.Array, extremum: jax.Array, dims: Sequence[int]) -> jax.Array:
    """Return 1 where an element equals the extremum over `dims`, and 0 elsewhere."""
    kept = [d for d in range(x.ndim) if d not in dims]
    return (x == lax.broadcast_in_dim(extremum, x.shape, kept)).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _extrema(arrays: Sequence[jax.Array], name: str, dims: tuple, axes: tuple[str, ...]) -> list[jax.Array]:
    """Return the maximum or minimum of each array over its `dims` and all devices. `lax.pmax` has no derivative."""
    reduce = jnp.max if name == "reduce_max" else jnp.min
    return _together(_COMBINE[name], [reduce(x, d) for x, d in zip(arrays, dims, strict=True)], axes)


@_extrema.defjvp
def _tangents_of_extrema(name: str, dims: tuple, axes: tuple, primals: tuple, tangents: tuple) -> tuple[list, list]:
    """Return the extrema and their tangents. Elements that equal an extremum share its tangent equally, as in JAX."""
    (arrays,), (moving,) = primals, tangents
    found = _extrema(arrays, name, dims, axes)
    is_equal = [_equal(*triple) for triple in zip(arrays, found, dims, strict=True)]
    sums = [(t * on).sum(d) for t, on, d in zip(moving, is_equal, dims, strict=True)]
    counts = [on.sum(d) for on, d in zip(is_equal, dims, strict=True)]
    # Not in one collective: JAX transposes the sums, and would take the counts for linear, too.
    totals, counts = _together(lax.psum, sums, axes), _together(lax.psum, counts, axes)
    return found, [a / b for a, b in zip(totals, counts, strict=True)]


def _together(reduce: Callable, arrays: Sequence[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    """Combine small arrays over devices, with one collective per type."""
    results = list(arrays)
    for dtype in dict.fromkeys(x.dtype for x in arrays):
        places = [i for i, x in enumerate(arrays) if x.dtype == dtype]
        flat = reduce(jnp.concatenate([arrays[i].ravel() for i in places]), axes)
        for i in places:
            size = arrays[i].size
            results[i], flat = flat[:size].reshape(arrays[i].shape), flat[size:]
    return results
