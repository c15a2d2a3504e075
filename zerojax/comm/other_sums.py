"""Find sums over rows that are not matrix products, and sums over the workers in a user's `jax.shard_map`.

A parameter that every worker has in full enters the user's `shard_map` undivided. In the transposed `shard_map`, JAX
then computes the parameter's gradient with a `psum` over the data axes, which gives every worker the whole sum.
`unreduced` leaves this `psum` out, so that partial sums remain.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from zerojax import compat, jaxprs, names
from zerojax.comm import rebinding
from zerojax.config.data_mesh import axes_of, spec_entry
from zerojax.dims import NOWHERE, Place, Places, RowDims, on_dim
from zerojax.primitives import Kind


def contracted(eqn: Any) -> list[tuple[int, int]]:
    """Return the pairs `(lhs dim, rhs dim)` that a product contracts and that the workers can divide."""
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        return [*zip(*params["dimension_numbers"][0], strict=True)]
    if name == "ragged_dot_general":
        numbers = params["ragged_dot_dimension_numbers"]
        lhs, rhs = numbers.dot_dimension_numbers[0]
        is_flat = len(eqn.invars[2].aval.shape) == 1  # one size per group, for all batch dims
        return [(i, j) for i, j in zip(lhs, rhs, strict=True) if is_flat and i in numbers.lhs_ragged_dimensions]
    if name == "conv_general_dilated" and params["feature_group_count"] == 1:
        # In the gradient of a kernel, the feature dim of the convolution holds the rows.
        numbers = params["dimension_numbers"]
        return [(numbers.lhs_spec[1], numbers.rhs_spec[1])]
    return []


def scattered(eqn: Any, row_dims: Sequence[Places]) -> tuple[Place | None, ...] | None:
    """Return the places of the rows in a scatter-add's operands if it sums over rows into zeros, otherwise None."""
    _, indices, updates = row_dims
    numbers = eqn.params["dimension_numbers"]
    place = next(iter({*indices.places} or {*updates.places}), None)
    if place is None or place.is_split or getattr(numbers, "operand_batching_dims", ()):
        return None
    summed = [d for d in range(len(eqn.invars[2].aval.shape)) if d not in numbers.update_window_dims]
    if indices.places:
        return (None, place, place.to(summed[place.dim])) if place.dim < len(summed) else None
    return (None, place.to(summed.index(place.dim)), place) if place.dim in summed else None


def assumed(eqn: Any, row_dims: Sequence[RowDims]) -> Iterator[list[Places]]:
    """Yield row dims to assume for the operands of an equation that sums over unknown dims, the most likely first."""
    if eqn.primitive.name == "reduce_sum":
        yield [on_dim(0)]
    elif eqn.primitive.name == "scatter-add":
        yield [NOWHERE, NOWHERE, on_dim(0)]
    else:
        yield [NOWHERE if rows is None else rows for rows in row_dims[:2]]
        yield from ([on_dim(int(i)), on_dim(int(j))] for i, j in contracted(eqn))


def unreduced(eqn: Any, values: Sequence, wanted: Mapping[int, tuple[str, ...]]) -> tuple[list, frozenset[int]] | None:
    """Evaluate a `shard_map`, and leave out the sums over the data axes that compute the results `wanted`.

    `wanted` maps the index of a result to the data axes to sum over: all, or those that do not divide an expert. Only
    gradients may depend on such a result, and only linearly. Return `(results, found)`, where `found` has the indices
    of results that now have a leading dim, with one partial sum per worker. Return None if no sum can be left out.
    """
    params = eqn.params
    jaxpr, consts = compat.opened(params["jaxpr"])
    made = jaxprs.makers(jaxpr.eqns)
    specs = params["out_specs"]
    free = {i: params["newly_manual_axes"] - {*axes_of(specs[i])} for i in wanted}
    chains = {i: _chain(jaxpr.outvars[i], made, axes) for i, axes in wanted.items() if axes and free[i] >= {*axes}}
    chains = {i: chain for i, chain in chains.items() if chain}
    if not chains:
        return None
    atoms = [chains[i][0] if i in chains else atom for i, atom in enumerate(jaxpr.outvars)]
    needed, _ = jaxprs.needed_for(jaxpr.eqns, atoms)
    bare = compat.part_of(jaxpr, needed, [*compat.constvars_of(jaxpr), *jaxpr.invars], atoms)

    def run(*values):
        found = jaxprs.run(bare, (), *consts, *values)
        return [_applied(chains[i][1], x, wanted[i])[None] if i in chains else x for i, x in enumerate(found)]

    partial = lambda i, spec: PartitionSpec(spec_entry(wanted[i]), *spec) if i in chains else spec
    out_specs = [partial(i, spec) for i, spec in enumerate(specs)]
    with eqn.ctx.manager:
        results = rebinding.shard_map_of(eqn, run, out_specs=out_specs)(*values)
    return results, frozenset(chains)


def _chain(atom: Any, made: dict, axes: tuple[str, ...]) -> tuple[Any, list] | None:
    """Return `(summand, equations)` if a `psum` over the workers and then linear equations compute `atom`, else None.

    The first equation is the `psum` of the summand. Each later equation has one array as operand.
    """
    chain: list = []
    while not compat.is_literal(atom) and (eqn := made.get(atom)) is not None:
        chain.insert(0, eqn)
        if eqn.primitive.name in ("psum", "psum_invariant"):
            whole = eqn.params.get("axis_index_groups") is None and {*axes} <= {*eqn.params["axes"]}
            return (eqn.invars[eqn.outvars.index(atom)], chain) if whole else None
        arrays = jaxprs.variables_in(eqn.invars)
        dividing = eqn.primitive.name == "div" and compat.is_literal(eqn.invars[0])
        # Only what each worker computes by itself commutes with a sum over the workers.
        facts = jaxprs.facts(eqn)
        is_kept = facts.linear and facts.kind is not Kind.COLLECTIVE and jaxprs.is_linear(eqn)
        if not is_kept or len(arrays) != 1 or len(eqn.outvars) != 1 or dividing or not _is_float(eqn):
            return None
        atom = arrays[0]
    return None


def _is_float(eqn: Any) -> bool:
    """Return whether the result is a float of at least two bytes: a cast to float8 would round each partial sum."""
    dtype = eqn.outvars[0].aval.dtype
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 2


def _applied(chain: Sequence, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Sum `x` over the axes of the first equation that are not in `axes`, and apply the other equations to the sum."""
    remaining = tuple(axis for axis in chain[0].params["axes"] if axis not in axes)
    x = lax.psum(x, remaining) if remaining else x
    for eqn in chain[1:]:
        if eqn.primitive.name != "pvary":
            # With `check_vma`, a primitive refuses a constant, which is equal on all workers, with `x`, which is not.
            operands = [lax.pcast(v.val, axes, to="varying") if compat.is_literal(v) else x for v in eqn.invars]
            with names.at(eqn), eqn.ctx.manager:
                found = eqn.primitive.bind(*operands, **eqn.params)
            x = found[0] if eqn.primitive.multiple_results else found
    return x


def local_sizes(sizes: jax.Array, extent: int, axes: tuple[str, ...]) -> jax.Array:
    """Return how many of this worker's rows are in each group of a `ragged_dot`, whose rows are sorted by group.

    `sizes` counts the rows of all workers in each group. `extent` is the number of rows of one worker.
    """
    ends = jnp.cumsum(sizes)
    first = (lax.axis_index(axes) * extent).astype(ends.dtype)
    inside = lambda x: jnp.clip(x, first, first + extent)
    return (inside(ends) - inside(ends - sizes)).astype(sizes.dtype)
