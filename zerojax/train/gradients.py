"""Compute loss and gradient over all devices and microbatches. The loss scale is divided out.

References:
    Rajbhandari et al. 2020, arXiv 1910.02054, section 5.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from zerojax import names
from zerojax.comm.collectives import Collectives
from zerojax.comm.mesh import constrain, mapped, replicated
from zerojax.compat import common_dtype
from zerojax.config.data_mesh import spec_entry
from zerojax.inspect.nonfinite import origins
from zerojax.layout.leaf import Leaf, replace_items
from zerojax.layout.tree import Layout
from zerojax.metrics import unmarked
from zerojax.placement.storage import in_logical_shape, to_device
from zerojax.train.apart import TracedLoss
from zerojax.train.arguments import batch_shardings, check_args, fold_keys
from zerojax.train.combined_aux import combine, merged
from zerojax.train.loss import at_least_float32, mean_mutable
from zerojax.train.loss_scaling import unscale
from zerojax.train.reduction import check_reduction
from zerojax.train.view import LossInputs, View

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, PyTree, Shaped


class Gradients(NamedTuple):
    """The results of the forward and backward passes of a step, over all devices and microbatches."""

    loss: Float[Array, ""]  # the mean loss
    # the gradient of the mean loss, per trained parameter, in storage shape; NaN if weights are invalid
    grads: list[Shaped[Array, "*storage"]]
    aux: PyTree  # the combined auxiliary results, with None for each leaf in `rows`
    rows: PyTree  # the auxiliary results with one entry per row, with None for each leaf in `aux`
    mutable: PyTree  # the new mutable state, averaged over the devices
    weights_valid: Bool[Array, ""]  # whether no weight is negative and the sum of the weights is positive
    squares: Float[Array, " trained"]  # for each trained parameter, the sum of the squares of its gradient, in float32
    overwritten: list[Array]  # the new value of each overwritten parameter: the maximum over devices and microbatches


def loss_and_grads(view: View, given: LossInputs, scale: Float[Array, ""] | float) -> Gradients:
    """Return the mean loss and its gradient over all devices. Parameters and gradients are in storage shape.

    The batch axes divide dim 0 of the batch, and each device divides its rows into microbatches. PRNG keys in the
    further arguments are folded with the indices of device and microbatch. `scale` is the loss scale: the backward pass
    uses the scaled loss, and the gradients are divided by `scale`.
    """
    config, layout = view.config, view.layout
    check_trained(layout)
    scale = jnp.asarray(scale, jnp.float32)
    if not view.is_one_loss:
        check_args(given.args)
    if config.view == "global" or config.batch_spec is not None:
        batch = lax.with_sharding_constraint(given.batch, batch_shardings(config, config.mesh, given.batch))
        given = given._replace(batch=batch)
    if config.view == "global":
        found = view_gradients(view, given, scale)
        constrained = [constrain(config.mesh, *pair) for pair in zip(found.grads, view.grads, strict=True)]
        # Keep the mutable state replicated. If the compiler sharded it, the next step would have to be compiled again.
        mutable = lax.with_sharding_constraint(found.mutable, replicated(config.mesh))
        pairs = zip(found.overwritten, layout.overwritten, strict=True)
        values = [constrain(config.mesh, x, layout.params[i]) for x, i in pairs]
        aux = merged(found.aux, found.rows)
        return found._replace(grads=constrained, mutable=mutable, aux=aux, overwritten=values)

    def local(given, scale):
        given = given._replace(args=fold_keys(given.args, lax.axis_index(config.data.batch)))
        return view_gradients(view, given, scale)

    full: Any = PartitionSpec()
    rows: Any = PartitionSpec(spec_entry(config.data.batch))
    specs: Any = [[leaf.local_spec for leaf in leaves] for leaves in (layout.params, view.grads)]
    with line_in_errors(view, given):
        found = mapped(
            local,
            mesh=config.mesh,
            in_specs=(LossInputs(specs[0], mutable=full, batch=rows, args=full), full),
            out_specs=Gradients(*[full] * len(Gradients._fields))._replace(grads=specs[1], rows=rows),
            axis_names=set(config.data.batch),
        )(given._replace(stored=list(given.stored)), scale)
    # Multiply by 1 so that `checkify` checks the results of the devices for NaN. XLA removes the product.
    loss, grads = jax.tree.map(lambda x: x * jnp.ones((), x.dtype), (found.loss, found.grads))
    return found._replace(loss=loss, grads=grads, aux=merged(found.aux, found.rows))


def check_trained(layout: Layout) -> None:
    """Raise a TypeError for a trained PRNG key or 8-bit float array, because optax cannot add updates to them."""
    for leaf in (layout.params[i] for i in layout.trained):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise TypeError(
                f"params{leaf.path} is {leaf.dtype}, a PRNG key, which cannot be trained. Pass it as an argument of "
                "the loss, or freeze it: trainable=lambda path, x: not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)."
            )
        if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize == 1:
            raise TypeError(
                f"params{leaf.path} is {leaf.dtype}, a type in which gradients and updates are rounded away. Keep the "
                "parameter in bfloat16 or wider and cast it in the loss, or freeze it with trainable=."
            )


def view_gradients(view: View, given: LossInputs, scale: Array) -> Gradients:
    """Compute `loss_and_grads` on arrays in storage shape in global view, and in local shape in device view."""
    comm, traced, factor = view.comm, view.traced_loss(given), None
    if view.accumulate == 1:
        returned, grads, factor, values = view.value_and_grad(given, scale, traced)
        grads, mutable = view.reduce(grads), returned.mutable
        returned = jax.tree.map(lambda x: jnp.asarray(x)[None], returned._replace(mutable=None))
    else:
        returned, grads, mutable, values = accumulate_microbatches(view, given, scale, traced)
    totals, weights, aux, _ = returned
    mean, weight, factor, weights_valid = mean_loss(view, totals, weights, factor, scale)
    grads, cotangents = grads[: len(view.differentiable)], grads[len(view.differentiable) :]
    if view.reduces_across_once:
        grads = view.comm.reduce_across(grads, [view.reduced(k) for k in view.differentiable])
    if traced is not None and cotangents:
        grads = view.with_shards(grads, traced.pull(cotangents))
    grads = unscale(grads, factor)
    of = dict(zip(view.differentiable, grads, strict=True))
    grads = [of[k] if k in of else jnp.zeros(comm.shape(leaf), leaf.dtype) for k, leaf in enumerate(view.grads)]
    if view.is_one_loss:
        aux = unmarked(jax.tree.map(lambda x: x[0], aux))
        rows = jax.tree.map(lambda _: None, aux)
    else:
        aux, rows = combine(aux, weights, weight, comm, view.rows_of)
    squares = sums_of_squares(grads, view.grads, comm)
    mutable, values = mean_mutable(mutable, comm), comm.over_workers(lax.pmax, values)
    return Gradients(mean, grads, aux, rows, mutable, weights_valid, squares, values)


@jax.named_scope(names.MEAN)
def mean_loss(view: View, totals: Array, weights: Array, factor: Array | None, scale: Array):
    """Combine the losses of all microbatches and devices.

    Args:
        view: The view.
        totals: The loss, or the total of a weighted loss, of each microbatch of this device.
        weights: The weight of each.
        factor: The factor that `View.value_and_grad` returned for the only microbatch. None if there are several.
        scale: The loss scale.

    Returns:
        `(loss, weight, factor, weights_valid)`: the mean loss, the sum of all weights, the factor by which the sums of
        gradients are multiplied, and whether the weights are valid. If they are not, the others are NaN.
    """
    comm = view.comm
    if not view.loss.weighted:
        total = comm.over_workers(lax.psum, totals.sum())
        factor = 1 / (scale * view.divisor) if view.accumulate == 1 else 1 / scale
        return total / view.divisor, view.microbatches, factor, jnp.array(True)
    sums = totals.sum(), weights.sum(), (weights < 0).sum(dtype=weights.dtype)
    total, weight, below = comm.over_workers(lax.psum, sums)
    valid = (weight > 0) & (below == 0)
    # Replace an invalid sum of weights by NaN, so that loss and gradients become NaN and cannot be used by mistake.
    weight = jnp.where(valid, weight, jnp.nan)
    return total / weight, weight, (1.0 if factor is None else factor) / weight / scale, valid


def accumulate_microbatches(view: View, given: LossInputs, scale: Array, traced: TracedLoss | None):
    """Differentiate the microbatches in a loop. Arrays have the shapes of the view, as for `view_gradients`.

    Stages 0 and 1 add up full gradients, and reduce them once. Stages 2 and 3 reduce-scatter the gradients of each
    microbatch, so that each device holds 1/N of the sum. In hybrid sharding, gradients are reduced only within a host
    here. The caller then calls `View.reduce_across`.

    Returns:
        `(returned, grads, mutable, values)`:

        - `returned`: the values that the loss function returned, with the microbatches stacked along dim 0.
        - `grads`: `scale` times the gradient of the mean loss, or of the sum of the totals if the loss is weighted.
          They are followed by the cotangents of those `traced.results` that have one.
        - `mutable`: the mutable state after the last microbatch.
        - `values`: for each overwritten parameter, the maximum of its new values.
    """
    check_reduction(view, given)
    comm = view.comm

    experts = set(comm.experts(view.layout.params))

    def zeros(k) -> Array:
        leaf = view.layout.params[view.layout.trained[k]]
        wide = common_dtype(leaf.dtype, jnp.float32)
        dtype = wide if view.config.precision is None else comm.reduce_dtype(leaf.dtype)
        if view.reduces_each:
            return jnp.zeros(comm.grad_shape(view.reduced(k)), dtype)
        # The gradient of experts is no partial sum.
        return jnp.zeros(leaf.shape, dtype) if view.layout.trained[k] in experts else comm.zeros(leaf.shape, dtype)

    def iteration(carry, microbatch):
        sums, mutable, maxima = carry
        number, rows = microbatch
        one = LossInputs(given.stored, mutable, rows, fold_keys(given.args, number))
        returned, grads, factor, values = view.value_and_grad(one, scale, traced)
        if view.reduces_each:
            grads = view.reduce(grads)
        # Inside the loop, XLA fuses this product with the sum. After the loop, the product could read memory once more.
        share = 1 / view.divisor if factor is None else factor
        with jax.named_scope(names.MEAN):
            grads = [at_least_float32(g) * share for g in grads]
            sums = [comm.add(s, g.astype(s.dtype)) for s, g in zip(sums, grads, strict=True)]
            maxima = [jnp.maximum(m, x) for m, x in zip(maxima, values, strict=True)]
        return (sums, returned.mutable, maxima), returned._replace(mutable=None)

    microbatches = (jnp.arange(view.accumulate), jax.tree.map(view.microbatches_of, given.batch))
    lowest = [jnp.full_like(given.stored[i], -jnp.inf) for i in view.layout.overwritten]
    results = [] if traced is None else [traced.results[k] for k in traced.moving]
    of_results = [comm.zeros(x.shape, common_dtype(x.dtype, jnp.float32)) for x in results]
    carry = [*(zeros(k) for k in view.differentiable), *of_results], given.mutable, lowest
    (sums, mutable, maxima), returned = lax.scan(iteration, carry, microbatches)
    if not view.reduces_each:
        sums = view.reduce(sums)
    return returned, sums, mutable, maxima


@jax.named_scope(names.GRAD_NORM)
def sums_of_squares(grads: Sequence[Array], leaves: Sequence[Leaf], comm: Collectives) -> Float[Array, " trained"]:
    """Return the sum of the squares of each gradient, in float32. One collective serves all gradients."""
    local = jnp.asarray([jnp.sum(jnp.square(jnp.abs(g).astype(jnp.float32))) for g in grads])
    if comm.losses == 1:
        return local
    replicated = jnp.asarray([leaf.kind == "replicated" for leaf in leaves], bool)
    # In device view, the sum is over all workers. In hybrid sharding, several workers hold copies of the same shard.
    copies = jnp.asarray([max(1.0, comm.losses / leaf.shards) for leaf in leaves])
    return jnp.where(replicated, local, comm.over_workers(lax.psum, jnp.where(replicated, 0, local / copies)))


@contextlib.contextmanager
def line_in_errors(view: View, given: LossInputs) -> Iterator[None]:
    """Add a note with the line of the loss that makes the first NaN to each FloatingPointError of `jax_debug_nans`.

    If a result has a NaN, JAX evaluates the function again, one operation at a time. But it does not test the
    operations inside of a `shard_map`, and the error only says that the NaN comes from a sharded computation.
    """
    try:
        yield
    except FloatingPointError as error:
        # Without a note if the loss cannot be evaluated here. For example, a kernel may have no rule for `vmap`.
        with contextlib.suppress(Exception), jax.debug_nans(False), jax.debug_infs(False):
            for origin in _origins(view, given):
                error.add_note(f"On the rows of one device, {origin}.")
        raise


def _origins(view: View, given: LossInputs) -> tuple:
    """Find the first NaN of the loss and its gradient, with `vmap` over the axes of devices instead of `shard_map`."""
    data, layout = view.config.data, view.layout
    stored = [in_logical_shape(to_device(x), leaf) for x, leaf in zip(given.stored, layout.params, strict=True)]
    trained = view.trained

    def of_device(rows):
        args = fold_keys(given.args, lax.axis_index(data.batch))

        def total(values):
            params = jax.tree.unflatten(layout.treedef, replace_items(stored, trained, values))
            return view.loss_of_params()(params, given.mutable, rows, *args).total

        return jax.value_and_grad(total)([stored[i] for i in trained])

    of_all = of_device
    for axis in reversed(data.batch):
        of_all = jax.vmap(of_all, axis_name=axis)
    sizes = [view.config.mesh.shape[axis] for axis in data.batch]
    batch = jax.tree.map(lambda x: x.reshape(*sizes, x.shape[0] // data.workers, *x.shape[1:]), given.batch)
    return origins(lambda rows: of_all(rows), rows=batch)  # `vmap` maps keywords, too
