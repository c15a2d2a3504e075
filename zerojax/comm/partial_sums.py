"""In global view, keep gradients as partial sums, one per worker, until zerojax reduces them.

In global view the compiler divides the rows of the batch. A parameter's gradient is a product whose contracted dim
holds rows, and the compiler would all-reduce it where the product is computed. This module computes the product in a
small `shard_map` instead: each worker's partial sum is a row of a global array `(workers, *shape)`, divided on dim 0.
The reduction is then a separate step, as in device view. Linear operations after the product are applied to each row.

The result is right for any model and any divided dim, because a sum equals the sum of its parts. The divided dim only
decides how many bytes move. It should hold the rows of the batch, which `zerojax.dims` finds or guesses in each value.
If nothing is known, the first summed dim whose size allows it is divided. Other sums are left to the compiler.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from zerojax import compat, jaxprs
from zerojax.comm.mesh import mapped
from zerojax.config.data_mesh import dim_spec
from zerojax.dims import NOWHERE, UNKNOWN, Follower, Place, Places, RowDims, fits, row_dims_of
from zerojax.dims.place import LARGE
from zerojax.primitives import Kind

# The name scope of a sum in a gradient's computation, if the analysis does not know whether the sum is over rows.
ROWS_UNKNOWN = "zerojax_rows_unknown"
# Primitives of JAX's sparse matrices that it lowers to functions of arrays, in which the sums can be seen.
_SPARSE = ("bcoo_dot_general_sampled", "bcoo_extract", "bcoo_transpose")


# For each operand of an equation, the place of the rows, which the workers divide. None: the operand has no rows.
Divided = tuple[Place | None, ...]


@dataclasses.dataclass(frozen=True)
class PartialSum:
    """A value that is the sum of one array per worker. `summands` is `(workers, *shape)`, divided on dim 0."""

    summands: jax.Array

    @property
    def shape(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.summands.shape[1:], self.summands.dtype)


@dataclasses.dataclass(frozen=True)
class BackwardOptions:
    """The options of `evaluate_backward`."""

    mesh: Any  # None: there is one worker
    axes: tuple[str, ...]  # the mesh axes of the workers
    zero: jax.Array | None = None  # a zero from which arrays of zeros are made, if given
    replicates: bool = True  # whether gradients that are computed from parameters alone are replicated


def workers_of(mesh: Any, axes: tuple[str, ...]) -> int:
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in axes)


def evaluate_backward(
    backward: Any,
    args: Sequence,
    how: BackwardOptions,
    *,
    grads: Sequence[int],
    rows: Sequence[RowDims],
    experts: Mapping[int, tuple[str, ...]] = MappingProxyType({}),
) -> list:
    """Evaluate a backward pass, a closed jaxpr, and leave gradients as partial sums `(workers, *shape)` where possible.

    An argument may be a `PartialSum` if the pass does nothing with it but add it to gradients. `grads` has the indices
    of the results that are gradients of parameters. `experts` maps the indices of experts' gradients to the axes over
    which to sum these. `rows` says which dims of each argument hold the rows of the batch.
    """
    (jaxpr, consts), workers = compat.opened(backward), workers_of(how.mesh, how.axes)
    if workers == 1:  # Every sum is complete.
        return jaxprs.evaluate(jaxpr, consts, args, lambda eqn, values: zeros_from(how.zero, eqn, values))
    shapes = [x.shape if isinstance(x, PartialSum) else x for x in args]
    closed = jax.make_jaxpr(lambda consts, args: _inlined(jaxpr, consts, *args))(list(consts), shapes)
    flat, more = compat.opened(closed)
    follower = Follower(workers, guesses=True, axes=how.axes)
    found = follower.row_dims(flat, [*[NOWHERE] * len(consts), *rows])
    has_rows = lambda var: bool((rows := found.get(var)) and rows.places)
    only_grads = _only_of(flat, grads, has_rows)
    summed = {var: axes for i, axes in experts.items() for var in _only_of(flat, [i], has_rows)}
    summed |= dict.fromkeys(only_grads, how.axes)
    zeros: set = set()

    def partial_rule(eqn, values):
        out = eqn.outvars[0] if len(eqn.outvars) == 1 else None
        if _makes_zeros(eqn, values):
            zeros.add(out)
        if any(isinstance(x, PartialSum) for x in values):
            return _linear(eqn, values)
        loop = compat.loop_of(eqn)
        if loop is not None and not only_grads.isdisjoint(eqn.outvars):
            # A carry that holds rows is the cotangent of an activation, which is divided along its rows already.
            holds_rows = lambda i, var: i < loop.carry and has_rows(var)
            wanted = [i for i, var in enumerate(eqn.outvars) if var in only_grads and not holds_rows(i, var)]
            in_body = dataclasses.replace(how, replicates=False, zero=None)  # The loop's results are replicated later.
            from zerojax.dims.loops import into_loop

            body_rows = into_loop(follower, loop, row_dims_of(eqn.invars, found))
            inside = lambda args, grads: evaluate_backward(loop.body, args, in_body, grads=grads, rows=body_rows)
            return _loop(eqn, loop, values, wanted, inside, workers)
        is_sum = jaxprs.facts(eqn).kind is Kind.PRODUCT or eqn.primitive.name in ("reduce_sum", "scatter-add")
        if out in only_grads and is_sum:
            row_dims = row_dims_of(eqn.invars, found)
            if (divided := _divided(eqn, row_dims, found[out], zeros, workers)) is not None:
                return [PartialSum(sum_per_worker(eqn, divided, values, how))]
            if UNKNOWN in row_dims:
                with jax.named_scope(ROWS_UNKNOWN):
                    return compat.evaluate_one(eqn, values)
        if eqn.primitive.name == "shard_map" and not summed.keys().isdisjoint(eqn.outvars):
            wanted = {i: summed[var] for i, var in enumerate(eqn.outvars) if var in summed}
            from zerojax.comm import other_sums

            if (sums := other_sums.unreduced(eqn, values, wanted)) is not None:
                return [PartialSum(x) if i in sums[1] else x for i, x in enumerate(sums[0])]
        return zeros_from(how.zero, eqn, values)

    results = jaxprs.evaluate(flat, more, [*consts, *args], partial_rule)
    if how.replicates:
        _replicate_sums(flat, results, grads, row_dims_of(flat.outvars, found), how)
    return [x.summands if isinstance(x, PartialSum) else x for x in results]


def _replicate_sums(
    jaxpr: Any, results: list, grads: Sequence[int], row_dims: Sequence[RowDims], how: BackwardOptions
) -> None:
    """Replicate gradients that are computed from parameters alone. Warn about gradients whose rows are not found.

    A gradient that is computed from parameters alone is equal on all workers. Without replication, the compiler would
    divide the computation like the gradient's shards. If padding makes the shards uneven, XLA aborts at the gradient of
    a sort, and computes wrong gradients of an index past the end and of a window maximum. Unlike a sharding constraint,
    the `shard_map` leaves other mesh axes unconstrained.

    The barrier separates the slice that takes a device's shard from the operations before it. Before jax 0.12, XLA
    merges two slices, and clamps their indices as if there were one slice.
    """
    none = PartitionSpec()
    replicate = mapped(
        lax.optimization_barrier, mesh=how.mesh, in_specs=(none,), out_specs=none, axis_names={*how.axes}
    )
    for i in (i for i in grads if not isinstance(results[i], PartialSum)):
        rows, shape = row_dims[i], results[i].shape
        if rows is None and math.prod(shape) >= LARGE:
            eqn = next(eqn for eqn in jaxpr.eqns if jaxpr.outvars[i] in eqn.outvars)
            warnings.warn(  # The text names the user's line, so Python shows it once per line.
                f"The compiler all-reduces a gradient of shape {shape}, computed at "
                f"{compat.line_of(eqn) or 'an unknown line'}, because zerojax cannot find the rows of the batch there. "
                "If a kernel or callback computes it, put that into a jax.shard_map over the data axes. Otherwise call "
                "zerojax.rows(x, dim) on the activations that the parameter is multiplied with.",
                stacklevel=2,
            )
        elif rows is not None and not rows.places:
            results[i] = replicate(results[i])


def _inlined(jaxpr: Any, consts: Sequence, *args: Any) -> list:
    """Evaluate a jaxpr with its calls, its remats and some operations on sparse matrices inlined."""

    def rule(eqn, values):
        if eqn.primitive.name in _SPARSE:
            results = eqn.primitive.impl(*values, **eqn.params)
            return results if eqn.primitive.multiple_results else [results]
        if compat.inlined_body(eqn) is None:
            return None
        if compat.is_remat(eqn) and compat.params_of(eqn)["prevent_cse"]:
            # The barrier keeps XLA from merging the remat's equations with the forward pass.
            arrays, put_back = jaxprs.split_arrays(values)
            values = put_back(lax.optimization_barrier(arrays))
        return jaxprs.evaluate_call(eqn, values, rule)

    return jaxprs.evaluate(jaxpr, consts, args, rule)


def _loop(eqn, loop: compat.LoopEqn, values: Sequence, grads: Sequence[int], inside: Callable, workers: int) -> list:
    """Evaluate a loop. Its results with indices `grads` stay partial sums if the loop adds them up or stacks them.

    `inside(args, grads)` evaluates the body in the same way.
    """
    summed = _added_up(loop, grads)
    partial = [*summed, *(i for i in grads if i >= loop.carry)]
    is_sum = lambda i: i - loop.consts in summed
    values = [as_summands(x, workers) if is_sum(i) else x for i, x in enumerate(values)]
    run = lambda xs: inside([PartialSum(x) if is_sum(i) else x for i, x in enumerate(xs)], partial)
    results = loop.evaluate(run, values)
    for i in partial:
        if results[i].ndim > len(eqn.outvars[i].aval.shape):
            results[i] = PartialSum(results[i] if i < loop.carry else jnp.moveaxis(results[i], 1, 0))
    return results


def _added_up(loop: compat.LoopEqn, grads: Sequence[int]) -> list[int]:
    """Return the indices in `grads` of carries to which the loop only adds."""
    jaxpr, _ = compat.opened(loop.body)
    carries, before, stacked = [i for i in grads if i < loop.carry], None, [i for i in grads if i >= loop.carry]
    while carries != before:
        found = _only_of(jaxpr, [*carries, *stacked])
        is_kept = lambda i, found=found: jaxpr.invars[loop.consts + i] in found and jaxpr.outvars[i] in found
        before, carries = carries, [*filter(is_kept, carries)]
    return carries


def _only_of(jaxpr: Any, grads: Sequence[int], has_rows: Callable[[Any], bool] = lambda _: False) -> set:
    """Return the variables that may be partial sums: they affect only results with indices `grads`, and linearly.

    Leave out a sum over rows that is broadcast to all rows again, as in the backward pass of a mean over the batch. If
    that sum were partial, everything that reads the sum would be partial, too, and each worker would compute all rows.
    """
    uses, _ = jaxprs.uses_of(jaxpr)
    wanted = set(jaxprs.variables_in(jaxpr.outvars[i] for i in grads))
    refused = set(jaxprs.variables_in(atom for i, atom in enumerate(jaxpr.outvars) if i not in grads))
    found: set = set()
    is_found = lambda var: var in found or compat.is_dropped(var)
    meets_rows = lambda var, use: not has_rows(var) and any(map(has_rows, use.outvars))
    for var in (*(var for eqn in reversed(jaxpr.eqns) for var in eqn.outvars), *jaxpr.invars):
        if var in refused or not (var in wanted or var in uses):
            continue
        linear = (jaxprs.is_linear(use) and not meets_rows(var, use) for use, _ in uses.get(var, ()))
        if all(linear) and all(is_found(out) for use, _ in uses.get(var, ()) for out in use.outvars):
            found.add(var)
    return found


def _linear(eqn, values: Sequence) -> list:
    workers = next(x.summands.shape[0] for x in values if isinstance(x, PartialSum))
    arrays = [x.summands if isinstance(x, PartialSum) else x for x in values]
    partial = [isinstance(x, PartialSum) for x in values]

    def per_worker(batched):
        of_one = lambda *xs: compat.evaluate_one(eqn, xs)
        results = jax.vmap(of_one, in_axes=[0 if on else None for on in batched])(*arrays)
        return [None if x is None else PartialSum(x) for x in results]

    joint = range(len(arrays))[jaxprs.facts(eqn).jointly_linear]
    if joint and not any(on and i not in joint for i, on in enumerate(partial)):
        # A literal zero is the same for every worker, because it adds nothing.
        zero = [compat.is_literal(atom) and not np.any(atom.val) for atom in eqn.invars]
        batched = [i in joint and not zero[i] for i in range(len(arrays))]
        arrays = [as_summands(x, workers) if batched[i] and not partial[i] else x for i, x in enumerate(arrays)]
        return per_worker(batched)
    is_linear = jaxprs.facts(eqn).linear and jaxprs.is_linear(eqn)
    if is_linear and sum(partial) == 1 and (eqn.primitive.name != "div" or partial[0]):
        return per_worker(partial)
    return compat.evaluate_one(eqn, [x.sum(0) if on else x for x, on in zip(arrays, partial, strict=True)])


def _makes_zeros(eqn: Any, values: Sequence) -> bool:
    return eqn.primitive.name == "broadcast_in_dim" and compat.is_literal(eqn.invars[0]) and not values[0]


def zeros_from(zero: jax.Array | None, eqn: Any, values: Sequence) -> list | None:
    """Return the zeros that `eqn` makes, but computed from `zero`. None: `eqn` makes no zeros, or `zero` is None."""
    if zero is None or not _makes_zeros(eqn, values):
        return None
    out = eqn.outvars[0].aval
    return [lax.broadcast(zero.astype(out.dtype), out.shape)]


def sum_per_worker(eqn: Any, divided: Divided, values: Sequence, how: BackwardOptions) -> jax.Array:
    """Compute an equation that sums over rows, and return one partial sum per worker."""
    # A transposed product names the sharding of its result. `jax.vmap` would check it against the mesh, whose axes are
    # Manual in this `shard_map`.
    params = {name: None if name == "out_sharding" else x for name, x in eqn.params.items()}
    values, split = list(values), [(i, p) for i, p in enumerate(divided) if p is not None and p.is_split]
    for i, p in split:  # The rows are an inner factor of a dim, which is split so that they begin a separate dim.
        values[i] = values[i].reshape(*values[i].shape[: p.dim], p.outer, -1, *values[i].shape[p.dim + 1 :])

    def of_one(*given):
        values = list(given)
        for i, p in split:
            values[i] = values[i].reshape(*values[i].shape[: p.dim], -1, *values[i].shape[p.dim + 2 :])
        if eqn.primitive.name == "ragged_dot_general":
            from zerojax.comm.other_sums import local_sizes

            assert divided[0] is not None
            values[2] = local_sizes(values[2], values[0].shape[divided[0].dim], how.axes)
        return eqn.primitive.bind(*values, **params)[None]

    specs = tuple(dim_spec(None if p is None else p.dim + (1 if p.is_split else 0), how.axes) for p in divided)
    out_specs = dim_spec(0, how.axes)
    return mapped(of_one, mesh=how.mesh, in_specs=specs, out_specs=out_specs, axis_names={*how.axes})(*values)


def as_summands(value: jax.Array, workers: int) -> jax.Array:
    """Return partial sums that add up to `value`. The first worker has `value`, and all other workers have zeros."""
    first = lax.broadcasted_iota(jnp.int32, (workers, *value.shape), 0) == 0
    return jnp.where(first, value[None], 0)


def _divided(eqn, row_dims: Sequence[RowDims], result: RowDims, zeros: set, workers: int) -> Divided | None:
    """Return the places of the rows in the operands of `eqn` if `eqn` sums over the rows, and otherwise None.

    If some places are unknown, assume the places in the known operands, or else the first summed dim whose size fits.
    If the assumed dim holds no rows, the compiler moves the operands. Without an assumption, the compiler would instead
    all-reduce the gradient, in the gradient's type and once per microbatch.
    """
    # The group sizes of a `ragged_dot` count all rows.
    operands = row_dims[:2] if eqn.primitive.name == "ragged_dot_general" else row_dims
    known = [rows for rows in operands if rows is not None]
    # If the result still holds rows, as in a batched product, a later equation sums over them.
    is_known = len(known) == len(operands) and result is not None and not result.places
    if is_known and (divided := _summed(eqn, known, zeros)) is not None:
        return divided
    if UNKNOWN not in (*row_dims, result):
        return None
    from zerojax.comm import other_sums

    shapes = [atom.aval.shape for atom in eqn.invars]
    found = (_summed(eqn, assumed, zeros) for assumed in other_sums.assumed(eqn, row_dims))
    fit = lambda divided: all(p is None or fits(p, x, workers) for p, x in zip(divided, shapes, strict=True))
    return next((divided for divided in found if divided is not None and fit(divided)), None)


def _summed(eqn, row_dims: Sequence[Places], zeros: set) -> Divided | None:
    name = eqn.primitive.name
    if name == "reduce_sum":
        place = row_dims[0].only
        return (place,) if place is not None and place.dim in eqn.params["axes"] else None
    if name == "dot_general":
        pairs = zip(*eqn.params["dimension_numbers"][0], strict=True)
    else:
        from zerojax.comm import other_sums

        if name == "scatter-add":
            return other_sums.scattered(eqn, row_dims) if eqn.invars[0] in zeros else None
        pairs = other_sums.contracted(eqn)
    lhs, rhs = row_dims
    for i, j in pairs:
        if (place := lhs.along(int(i)) or rhs.along(int(j))) is not None:  # One of the dims may be uniform.
            # The groups of a `ragged_dot` (a third operand) are sorted, so that a worker's rows must be contiguous.
            place = place if len(eqn.invars) == 2 else Place(place.dim)
            return place.to(int(i)), place.to(int(j)), *[None] * (len(eqn.invars) - 2)
    return None
