"""Evaluate a jaxpr on parts of arrays (`parts`): on the shards of devices, or on one layer of a stack."""

import dataclasses
import functools
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax import compat, jaxprs, names
from zerojax.comm import rebinding
from zerojax.comm.collectives import Collectives
from zerojax.gather.parts import COMBINED, Dim, FlatDim, dims_of
from zerojax.layout.leaf import Leaf
from zerojax.primitives import Kind, of_kind

# How a device reduces its part, and how devices combine the results.
_EXTREMA = MappingProxyType({"reduce_max": (jnp.max, lax.pmax), "reduce_min": (jnp.min, lax.pmin)})
# Primitives whose operands must all be divided in the same dim as the result.
_ALIGNED = of_kind(Kind.ELEMENTWISE) | {"concatenate", "sort"}


@dataclasses.dataclass(frozen=True)
class Division:
    """How one dim of some values is divided over devices, or into the layers of a stack."""

    length: int  # the logical size of the dim
    extent: int  # its size in one part, with padding
    total: int  # its size in all parts, with padding
    axes: tuple[str, ...]  # the mesh axes that divide it
    layer: Any = None  # the index of this part, if the parts are layers

    @classmethod
    def of(cls, leaf: Leaf) -> "Division":
        """Return the division of a sharded parameter."""
        assert leaf.dim is not None
        extent = leaf.local_shape[leaf.dim]
        return cls(leaf.shape[leaf.dim], extent, extent * leaf.shards, leaf.axes)

    @property
    def start(self) -> Any:
        return lax.axis_index(self.axes) * self.extent if self.layer is None else self.layer

    def fill(self, x: jax.Array, dim: int | FlatDim, value: Any) -> jax.Array:
        """Replace the padding of a part by `value`."""
        if self.total == self.length:
            return x
        if isinstance(dim, FlatDim):
            return self.fill(x.reshape(dim.outer, self.extent, -1), 1, value).ravel()
        place = self.start + lax.broadcasted_iota(jnp.int32, x.shape, dim)
        return jnp.where(place < self.length, x, jnp.asarray(value, x.dtype))

    def part(self, x: jax.Array, dim: int | FlatDim) -> jax.Array:
        """Return this part of an array that is given in full. The padding is 1."""
        if isinstance(dim, FlatDim):
            return self.part(x.reshape(dim.outer, self.length, -1), 1).ravel()
        widths = [(0, self.total - self.length if d == dim else 0) for d in range(x.ndim)]
        x = jnp.pad(x, widths, constant_values=1) if self.total > self.length else x
        return lax.dynamic_slice_in_dim(x, self.start, self.extent, dim)

    def whole(self, part: jax.Array, dim: int | FlatDim) -> jax.Array:
        """Gather the parts of all devices into the whole array, without padding."""
        if isinstance(dim, FlatDim):
            return self.whole(part.reshape(dim.outer, self.extent, -1), 1).ravel()
        full = lax.all_gather(part, self.axes, axis=dim, tiled=True)
        return lax.slice_in_dim(full, 0, self.length, axis=dim)


class Split(NamedTuple):
    """How an argument or a result is divided."""

    dim: Any  # the index of the divided dim
    division: Division


def splits_of(dims: Sequence[int | None], division: Division) -> list[Split | None]:
    return [None if dim is None else Split(dim, division) for dim in dims]


def dims_in(splits: Sequence[Split | None]) -> list[int | None]:
    return [split and split.dim for split in splits]


def evaluate_parts(
    closed: Any,
    values: Sequence,
    given: Sequence[Split | None],
    wanted: Sequence[Split | None],
    label: str = "zerojax_all_reduce[scales]",
) -> list:
    """Evaluate a closed jaxpr on parts of arrays.

    Args:
        closed: The jaxpr. `dims_of` must find the dims of all its variables. If the parts are shards, the jaxpr must be
            a result of `without_calls`.
        values: The arguments, each a part or an array in full.
        given: How each argument is divided; None for an array in full.
        wanted: How to divide each result, with zeros in the padding; None for a result in full.
        label: The name scope of collectives.
    """
    jaxpr, consts = compat.opened(closed)
    run, context_of = _Evaluation(jaxpr, consts, values, given, label), names.contexts()
    for eqn in jaxprs.alive(jaxpr):
        with context_of(eqn):
            run.env.update(zip(eqn.outvars, run.results(eqn), strict=True))
    return [run.divided(*pair) for pair in zip(jaxpr.outvars, wanted, strict=True)]


def evaluate_on_shards(
    comm: Collectives,
    closed: Any,
    values: Sequence,
    given: Sequence[Split | None],
    wanted: Sequence[Split | None],
    label: str = "zerojax_all_reduce[scales]",
) -> list:
    """Evaluate a jaxpr on shards, and on arrays that all devices have in full; see `evaluate_parts`."""
    axes = next(split.division.axes for split in given if split is not None)
    local = lambda *values: evaluate_parts(closed, values, given, wanted, label)
    return comm.per_shard(local, values, dims_in(given), dims_in(wanted), axes)


class _Evaluation:
    """Evaluates the equations of a jaxpr on parts. The arguments are those of `evaluate_parts`."""

    def __init__(self, jaxpr: Any, consts: Sequence, values: Sequence, given: Sequence[Split | None], label: str):
        layers = any(split is not None and split.division.layer is not None for split in given)
        self.dims = dims_of(
            jaxpr, dict(zip(jaxpr.invars, dims_in(given), strict=True)), layers=layers, flattens=not layers
        )
        self.env: dict = dict(zip(compat.constvars_of(jaxpr), jaxprs.as_jax_values(consts), strict=True))
        self.divisions: dict = {}
        for var, x, split in zip(jaxpr.invars, values, given, strict=True):
            # The padding is 1 in every operand, so that a quotient or a logarithm there is finite.
            self.env[var] = x if split is None else split.division.fill(x, split.dim, 1)
            self.divisions[var] = split and split.division
        self._made, self._label = jaxprs.makers(jaxpr.eqns), label

    def value(self, atom: Any) -> Any:
        return atom.val if compat.is_literal(atom) else self.env[atom]

    def dim_of(self, atom: Any) -> Dim:
        return None if compat.is_literal(atom) else self.dims[atom]

    def divided(self, atom: Any, split: Split | None) -> jax.Array:
        """Return a result divided as `split` says, with zeros in the padding, or in full if `split` is None."""
        if split is not None:
            return split.division.fill(jnp.asarray(self.operand(atom, *split)), split.dim, 0)
        x, dim = jnp.asarray(self.value(atom)), self.dim_of(atom)
        with jax.named_scope(self._label):
            return x if dim is None else self.divisions[atom].whole(x, dim)

    def operand(self, atom: Any, dim: Dim, division: Division) -> Any:
        """Return the value of `atom`, or its part along `dim` if the equation needs a part and `atom` is in full."""
        if dim is None or self.dim_of(atom) is not None or not atom.aval.shape:
            return self.value(atom)
        at = 0 if isinstance(dim, FlatDim) else dim
        if atom.aval.shape[at] == 1:
            return self.value(atom)
        # A broadcast or an elementwise result is computed again in the shape of the part, because the full result would
        # be as large as the parameter.
        eqn = self._made.get(atom)
        if eqn is not None and jaxprs.facts(eqn).elementwise and division.layer is None:
            return compat.evaluate_one(_local(eqn), [self.operand(a, dim, division) for a in eqn.invars])[0]
        if eqn is None or eqn.primitive.name != "broadcast_in_dim":
            return division.part(self.env[atom], dim)
        x, to = self.value(eqn.invars[0]), eqn.params["broadcast_dimensions"]
        if at in to and np.shape(x)[list(to).index(at)] != 1:
            x = division.part(x, dim if isinstance(dim, FlatDim) else list(to).index(dim))
        return lax.broadcast_in_dim(x, _with(atom.aval.shape, dim, division.extent), to)

    def results(self, eqn: Any) -> Sequence:
        own, after = list(map(self.dim_of, eqn.invars)), list(map(self.dim_of, eqn.outvars))
        division = next((self.divisions[a] for a in eqn.invars if self.dim_of(a) is not None), None)
        if division is None:
            return compat.evaluate_one(_local(eqn), [*map(self.value, eqn.invars)])
        self.divisions.update(dict.fromkeys(eqn.outvars, division))
        pairs = zip(eqn.invars, _operand_dims(eqn, own, after[0]), strict=True)
        operands = [self.operand(*pair, division) for pair in pairs]
        if after[0] is None and eqn.primitive.name in COMBINED:
            return [self._combined(eqn, operands, own, division)]
        return _on_parts(eqn, operands, own, after, division)

    def _combined(self, eqn: Any, operands: Sequence, own: Sequence[Dim], division: Division) -> jax.Array:
        """Return the result of a reduction or inner product, combined over the devices by a collective."""
        name, axes = eqn.primitive.name, division.axes
        identity: Any = 0
        if division.total > division.length and name != "dot_general":
            identity = getattr(lax, name)(jnp.zeros(0, operands[0].dtype), [0])  # a reduction of no elements
        filled = [x if d is None else division.fill(x, d, identity) for x, d in zip(operands, own, strict=True)]
        if name in _EXTREMA:
            return _extremum(filled[0], name, tuple(eqn.params["axes"]), axes, self._label)
        (term,) = compat.evaluate_one(_local(eqn), filled)
        with jax.named_scope(self._label):
            return lax.psum(term, axes)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3, 4))
def _extremum(x: jax.Array, name: str, dims: tuple, axes: tuple[str, ...], label: str) -> jax.Array:
    """Return a maximum or minimum over `dims` and devices. `lax.pmax` has no derivative, so one is defined here."""
    reduce, combine = _EXTREMA[name]
    with jax.named_scope(label):
        return combine(reduce(x, dims), axes)


@_extremum.defjvp
def _extremum_jvp(name: str, dims: tuple, axes: tuple, label: str, primals: tuple, tangents: tuple) -> tuple:
    """Return an extremum and its tangent: the mean tangent of the elements that equal the extremum, as in JAX."""
    (x,), (moving,), found = primals, tangents, _extremum(*primals, name, dims, axes, label)
    is_equal = (x == jnp.expand_dims(found, dims)).astype(x.dtype)
    return found, lax.psum((moving * is_equal).sum(dims), axes) / lax.psum(is_equal.sum(dims), axes)


def _operand_dims(eqn: Any, own: Sequence[Dim], after: Dim) -> list[Dim]:
    """Return, for each operand of an equation on parts, the dim in which it must be divided; None for a full operand.

    `own` has the dims in which the operands are divided now, and `after` is the divided dim of the first result.
    """
    name, rank = eqn.primitive.name, eqn.outvars[0].aval.ndim
    is_batch_of_solves = name == "triangular_solve" and isinstance(after, int) and after < rank - 2
    if name in _ALIGNED or is_batch_of_solves:
        return [after if dim is None else dim for dim in own]
    if name == "dot_general" and rank == 0:
        return [next(dim for dim in own if dim is not None)] * 2
    if name == "dot_general":
        _, batch = eqn.params["dimension_numbers"]
        is_batch = isinstance(after, int) and after < len(batch[0])
        return [int(batch[k][after]) if is_batch else own[k] for k in range(2)]
    return list(own)


def _on_parts(eqn: Any, values: list, own: Sequence, after: Sequence, division: Division) -> Sequence:
    """Return the results of `eqn` on parts. `own` and `after` have the divided dims of its operands and results."""
    name, params = compat.name_of(eqn), eqn.params
    if (body := compat.called(eqn)) is not None:
        with names.inside_call(eqn):
            return evaluate_parts(body, values, splits_of(own, division), splits_of(after, division))
    if name not in ("broadcast_in_dim", "reshape", "slice", "squeeze"):
        return compat.evaluate_one(_local(eqn), values)
    shape = _with(eqn.outvars[0].aval.shape, after[0], division.extent)
    if name == "broadcast_in_dim":
        return [lax.broadcast_in_dim(values[0], shape, params["broadcast_dimensions"])]
    if name == "slice":
        limits = _with(params["limit_indices"], own[0], division.extent)
        return [lax.slice(values[0], params["start_indices"], limits, params["strides"])]
    return [values[0].reshape(shape)]


def _local(eqn: Any) -> Any:
    """Return `eqn` without the sharding of its result, as if it had been traced on the current mesh."""
    params = {name: None if name in ("sharding", "out_sharding") else x for name, x in eqn.params.items()}
    return rebinding.in_force(eqn.replace(params=params))


def _with(shape: Sequence[int], dim: int | FlatDim, size: int) -> tuple[int, ...]:
    if isinstance(dim, FlatDim):
        return (shape[0] // dim.length * size,)
    return (*shape[:dim], size, *shape[dim + 1 :])
