"""Differentiate a loss that is called several times in a step: once per device, once per microbatch, or both.

The results are those of one call with all rows, so the losses of microbatches are averaged. Averaging is wrong if the
loss is a sum over the rows, so such a loss is refused. To find out, the loss is traced twice, for one microbatch and
for all rows. Each trace is followed from the result back through linear equations to sums over rows, and the constant
factors on the way are multiplied. If the factors of both traces are equal, the loss is a sum. (In a mean, the factor of
all rows is smaller.) Everything else, such as a sum divided by a count of tokens, is accepted.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from zerojax import compat, jaxprs, names
from zerojax.comm.mesh import mapped
from zerojax.compat import common_dtype
from zerojax.config.data_mesh import spec_entry
from zerojax.dims import NOWHERE, Follower, RowDims, on_dim
from zerojax.train.checked import check_args, fold_keys
from zerojax.train.gradients import StepGradients, combined, gradients_of_one, microbatch_gradients
from zerojax.train.loss import LossInputs, View, at_least_float32


def gradients_of_several(view: View, given: LossInputs, scale: Array) -> StepGradients:
    """Compute loss and gradients, as `loss_and_grads` returns them. Fold PRNG keys per device and per microbatch."""
    check_args(given.args)
    if view.config.view == "global":
        return accumulated_gradients(view, given, scale)
    return mapped_gradients(view, given, scale)


def mapped_gradients(view: View, given: LossInputs, scale: Array) -> StepGradients:
    """Compute loss and gradients in device view: in a `shard_map`, on each device's rows and shards."""
    config = view.config

    def local(given, scale):
        given = given._replace(args=fold_keys(given.args, lax.axis_index(config.data.batch)))
        return (gradients_of_one if view.accumulate == 1 else accumulated_gradients)(view, given, scale)

    full: Any = PartitionSpec()
    rows: Any = PartitionSpec(spec_entry(config.data.batch))
    specs: Any = [[leaf.local_spec for leaf in leaves] for leaves in (view.layout.params, view.grads)]
    try:
        found = mapped(
            local,
            mesh=config.mesh,
            in_specs=(LossInputs(specs[0], mutable=full, batch=rows, args=full), full),
            out_specs=StepGradients(*[full] * len(StepGradients._fields))._replace(grads=specs[1], rows=rows),
            axis_names=set(config.data.batch),
        )(given._replace(stored=list(given.stored)), scale)
    except FloatingPointError as error:
        from zerojax.train.nan_lines import note_line

        note_line(error, view, given)
        raise
    # Multiply by 1 so that `checkify` checks the results of the devices for NaN. XLA removes the product.
    loss, grads = jax.tree.map(lambda x: x * jnp.ones((), x.dtype), (found.loss, found.grads))
    return found._replace(loss=loss, grads=grads)


def accumulated_gradients(view: View, given: LossInputs, scale: Array) -> StepGradients:
    """Differentiate the microbatches in a loop. `gradients.combined` states the shapes of arrays.

    Stages 0 and 1 add up full gradients, and reduce them once. Stages 2 and 3 reduce-scatter the gradients of each
    microbatch, so that each of N devices holds 1/N of the sum. In hybrid sharding, the loop reduces gradients only
    within a host, and `combined` then reduces the sums across hosts.
    """
    check_reduction(view, given)
    comm = view.comm
    experts = set(comm.experts(view.layout.params))

    def zeros(k) -> Array:
        leaf = view.layout.params[view.layout.trained[k]]
        wide = common_dtype(leaf.dtype, jnp.float32)
        dtype = wide if view.config.precision is None else comm.reduced_dtype(leaf.dtype)
        if view.reduces_each:
            return jnp.zeros(comm.grad_shape(view.scattered_leaf(k)), dtype)
        # The gradient of experts is no partial sum.
        return jnp.zeros(leaf.shape, dtype) if view.layout.trained[k] in experts else comm.zeros(leaf.shape, dtype)

    def iteration(carry, microbatch):
        sums, mutable, maxima = carry
        number, rows = microbatch
        one = LossInputs(given.stored, mutable, rows, fold_keys(given.args, number))
        returned, grads, mean_weight, values = microbatch_gradients(view, one, scale)
        if view.reduces_each:
            grads = view.reduce(grads)
        # Multiply in the loop, where XLA fuses product and sum. After the loop, the product could read memory again.
        share = 1 / view.divisor if mean_weight is None else mean_weight
        with jax.named_scope(names.MEAN):
            grads = [at_least_float32(g) * share for g in grads]
            sums = [comm.add(s, g.astype(s.dtype)) for s, g in zip(sums, grads, strict=True)]
            maxima = [jnp.maximum(m, x) for m, x in zip(maxima, values, strict=True)]
        return (sums, returned.mutable, maxima), returned._replace(mutable=None)

    microbatches = (jnp.arange(view.accumulate), jax.tree.map(view.microbatches_of, given.batch))
    lowest = [jnp.full_like(given.stored[i], -jnp.inf) for i in view.layout.overwritten]
    carry = [zeros(k) for k in range(len(view.grads))], given.mutable, lowest
    (sums, mutable, maxima), returned = lax.scan(iteration, carry, microbatches)
    if not view.reduces_each:
        sums = view.reduce(sums)
    return combined(view, scale, returned, sums, None, mutable, maxima)


def check_reduction(view: View, given: LossInputs) -> None:
    """Raise a ValueError if the loss is a sum over rows, but its microbatches would be averaged.

    `given` has the rows of all microbatches. In global view, these are rows of all devices; in device view, of one.
    """
    if view.loss.weighted or view.loss.reduction is not None:
        return
    part = lambda x: jax.ShapeDtypeStruct((x.shape[0] // view.accumulate, *x.shape[1:]), x.dtype)
    micro = jax.tree.map(part, given.batch)
    for one, all_rows in zip(_factors(view, given, micro), _factors(view, given, given.batch), strict=False):
        if one and all_rows and np.isclose(one, all_rows, rtol=1e-3):
            raise ValueError(
                f"The loss is a sum over the rows of the batch, and accumulate={view.accumulate} averages microbatches:"
                f" the loss would be 1/{view.accumulate} of the sum over all rows. Give reduction='sum' if all of its "
                f"terms are such sums, or return the mean over the rows. reduction='mean' averages all the same."
            )


def _factors(view: View, given: LossInputs, batch: Any) -> Iterator[float | None]:
    """Yield the constant factor of each sum over rows in the loss of `batch`, or None if a factor is not known."""
    leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in view.layout.params]
    rows = jax.tree.leaves(batch)
    shaped = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in rows]

    def loss(leaves, rows):
        params, batch_ = jax.tree.unflatten(view.layout.treedef, leaves), jax.tree.unflatten(structure, rows)
        return view.call(params, given.mutable, batch_, *given.args).total

    structure = jax.tree.structure(batch)
    jaxpr, consts = compat.opened(jax.make_jaxpr(loss)(leaves, shaped))
    inlined = jax.make_jaxpr(lambda *args: jaxprs.inline_calls(jaxpr, consts, *args))(*leaves, *shaped)
    row_dims = [*[NOWHERE] * len(leaves), *[on_dim(0)] * len(rows)]
    return _factors_of_sums(compat.opened(inlined)[0], row_dims, rows[0].shape[0])


def _number(atom: Any) -> float | None:
    return float(atom.val) if compat.is_literal(atom) and np.ndim(atom.val) == 0 else None


def _factors_of_sums(jaxpr: Any, given: Sequence[RowDims], rows: int) -> Iterator[float | None]:
    """Yield the constant factor of each sum over `rows` rows in the first result of `jaxpr`; see `_factors`."""
    found = Follower(rows).row_dims(jaxpr, given)
    made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    pairs = zip(jaxpr.invars, given, strict=True)
    of_rows = jaxprs.dependent_on([var for var, state in pairs if state is not NOWHERE], jaxpr.eqns)
    has_rows = lambda var: (state := found[var]) is not None and bool(state.places)
    # Values that are computed from several rows but hold no rows, such as the mean of a batch, and their dependents.
    is_joint = lambda var, reads: var in of_rows and (reads or not has_rows(var))
    joint = jaxprs.dependent_on((), jaxpr.eqns, lambda eqn, reads: [v for v in eqn.outvars if is_joint(v, reads)])

    def follow(atom: Any, factor: float) -> Iterator[float | None]:
        if compat.is_literal(atom) or atom not in of_rows:
            return
        if (eqn := made.get(atom)) is None or found[atom] is None:
            yield None
            return
        name = compat.name_of(eqn)
        if name == "reduce_sum" and has_rows(eqn.invars[0]):
            if 0 not in eqn.invars[0].aval.shape:
                yield None if eqn.invars[0] in joint else factor
        elif jaxprs.facts(eqn).linear and len(eqn.invars) == 1:
            yield from follow(eqn.invars[0], factor)
        elif name in ("add", "add_any", "sub"):
            for one in eqn.invars:
                yield from follow(one, factor)
        elif name == "mul" and (value := _number(eqn.invars[0])):
            yield from follow(eqn.invars[1], factor * value)
        elif name in ("mul", "div") and (value := _number(eqn.invars[1])):
            yield from follow(eqn.invars[0], factor * value if name == "mul" else factor / value)
        else:
            yield None

    return follow(jaxpr.outvars[0], 1.0)
