"""Compute the loss and gradient of each microbatch, and combine them over devices and microbatches.

At stage 3, `zerojax.gather` runs the loss: a sharded parameter is gathered where the loss uses it, and its gradient is
reduce-scattered in the backward pass. At stages 0 to 2, `full_passes` differentiates the loss on full parameters. This
file reduces the gradients that the backward pass does not reduce, and divides all gradients by the loss scale.

References:
    Rajbhandari et al. 2020, arXiv 1910.02054, section 5.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree, Shaped

from zerojax import names
from zerojax.comm.collectives import Collectives
from zerojax.dims.follow import row_dims_of_args, row_dims_of_params
from zerojax.gather.engine import run_backward, run_forward, trace_loss
from zerojax.gather.schedule import Options
from zerojax.gather.segments import Program
from zerojax.gather.vjp import KnownRows, Sums, traced_passes
from zerojax.jaxprs import split_arrays
from zerojax.layout.leaf import Leaf
from zerojax.layout.tree import Layout
from zerojax.placement.storage import unpadded
from zerojax.train.loss import DIFFERING, OF_ROWS, LossInputs, Returned, View, at_least_float32


class StepGradients(NamedTuple):
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


def check_trained(layout: Layout) -> None:
    """Raise a TypeError for a trained PRNG key or 8-bit float array, because optax cannot add updates to them."""
    for leaf in (layout.params[i] for i in layout.trained):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise TypeError(
                f"params{leaf.path} is {leaf.dtype}, a PRNG key, which cannot be trained. For a module of NNX, use "
                "zerojax.flax_nnx.value_and_grad(tx, loss_fn). Otherwise pass the key as an argument of the loss, or "
                "freeze it: trainable=lambda path, x: not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)."
            )
        if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize == 1:
            raise TypeError(
                f"params{leaf.path} is {leaf.dtype}, a type in which gradients and updates are rounded away. Keep the "
                "parameter in bfloat16 or wider and cast it in the loss, or freeze it with trainable=."
            )


def gradients_of_one(view: View, given: LossInputs, scale: Array) -> StepGradients:
    """Compute loss and gradients of a step with one microbatch. `combined` states the shapes of arrays."""
    returned, grads, mean_weight, values = microbatch_gradients(view, given, scale)
    stacked = jax.tree.map(lambda x: jnp.asarray(x)[None], returned._replace(mutable=None))
    return combined(view, scale, stacked, view.reduce(grads), mean_weight, returned.mutable, values)


def combined(
    view: View, scale: Array, returned: Returned, grads: list, mean_weight: Array | None, mutable: PyTree, values: list
) -> StepGradients:
    """Combine the results of all microbatches and devices.

    Arrays have storage shape in global view, and local shape in device view. `returned` has the values that the loss
    returned in each microbatch, stacked along dim 0. `microbatch_gradients` describes `mean_weight` and `values`. With
    several microbatches, `mean_weight` is None.
    """
    comm, aux, rows = view.comm, returned.aux, None
    mean, weight, factor, weights_valid = mean_loss(view, returned.total, returned.weight, mean_weight, scale)
    if view.reduces_across_once:
        grads = comm.reduce_across(grads, [view.scattered_leaf(k) for k in range(len(grads))])
    grads = unscale(grads, factor)
    if view.loss.has_aux:
        from zerojax.train.optional_outputs import combine

        aux, rows = combine(view, aux, returned.weight, weight)
    if view.loss.mutable:
        from zerojax.train.optional_outputs import mean_mutable

        mutable = mean_mutable(mutable, comm)
    squares = sums_of_squares(grads, view.grads, comm)
    return StepGradients(mean, grads, aux, rows, mutable, weights_valid, squares, comm.over_workers(lax.pmax, values))


def microbatch_gradients(view: View, given: LossInputs, scale: Array):
    """Return the loss and gradient of one microbatch.

    Gradients are divided by the number of losses later, in `unscale` or in the loop over microbatches. If the cotangent
    of the loss were divided, a custom derivative rule that clips its cotangent would give other results.

    Returns:
        `(returned, grads, mean_weight, values)`:

        - `returned`: the values that the loss returned.
        - `grads`: the gradients. Their sum over the devices is `scale` times the gradient of the sum of the losses.
          For a weighted loss, their sum is `scale / mean_weight` times the gradient of the sum of the totals.
        - `mean_weight`: the mean of the devices' weights, or 1 if the mean is not positive. None without weights.
          Cotangents are divided by `mean_weight`, because gradients of a large total may overflow narrow types. The
          exact divisor, the sum of all weights, is known only after the last microbatch.
        - `values`: the new value of each overwritten parameter, which the loss computes as its gradient.
    """
    if view.gathers_on_use:
        returned, pull = gathered_passes(view, given)
    else:
        returned, pull = full_passes(view, given)
    cotangent, mean_weight = scale.astype(returned.total.dtype), None
    if view.loss.weighted:
        weight = view.comm.over_workers(lax.pmean, returned.weight)
        mean_weight = jnp.where(weight > 0, weight, 1).astype(cotangent.dtype)
        cotangent = cotangent / mean_weight
    # Multiply the cotangent by the loss scale, so that gradients in narrow types do not underflow.
    grads, values = pull(cotangent)
    view.loss.undivided[:] = view.comm.undivided_kernels()
    if values:
        from zerojax.train.overwriting import without_scale

        # A new value belongs to the mean loss of this call, so it is also divided by this call's weight.
        own_weight = jnp.where(returned.weight > 0, returned.weight, 1)
        values = without_scale(view, values, given, cotangent * own_weight)
    return returned, grads, mean_weight, values


def trace_view(view: View, given: LossInputs) -> tuple[Program, list, Options, Any]:
    """Trace the loss. Return its program, the values and options to run it with, and the structure of its results."""
    comm, leaves, further = view.comm, view.layout.params, (given.mutable, given.batch, *given.args)
    pairs = zip(given.stored, leaves, strict=True)
    full = [jax.ShapeDtypeStruct(leaf.shape, x.dtype) if leaf.kind == "sharded" else x for x, leaf in pairs]
    loss = view.checked_call
    on_leaves = lambda full, *further: loss(view.layout.treedef.unflatten(full), *further)
    program, arrays, consts, structure = trace_loss(on_leaves, leaves, full, further, OF_ROWS, comm, DIFFERING)
    options = Options(comm, view.config.prefetch, view.config.reshard_after_forward)
    return program, [*given.stored, *arrays, *consts], options, structure


def gathered_passes(view: View, given: LossInputs) -> tuple[Returned, Callable]:
    """Run the loss forward, with each sharded parameter gathered where it is used.

    Returns:
        The values that the loss returns, and a function from the cotangent of the loss to
        `(gradients, values of overwritten parameters)`. Gradients of sharded parameters are reduced already. The other
        gradients may be partial sums, one per worker.
    """
    comm, layout, leaves = view.comm, view.layout, view.layout.params
    stored, overwritten = given.stored, layout.overwritten
    program, values, options, structure = trace_view(view, given)
    differentiated = {*layout.trained, *overwritten}
    active = [i in differentiated for i in range(len(values))]
    results, residuals = run_forward(program, values, active, options)
    whole = {*overwritten, *(i for i in comm.experts(leaves) if leaves[i].kind != "sharded")}

    def in_form(i: int, grad: Array | None) -> Array:
        """Return the gradient of parameter `i` in the result's layout, or zeros if the loss does not use `i`."""
        x, leaf = stored[i], leaves[i]
        if i in whole:
            summed = jnp.zeros(x.shape, x.dtype) if grad is None else grad
            return summed if summed.ndim == x.ndim else summed.sum(0)
        if leaf.kind == "sharded":
            shape = comm.grad_shape(leaf)
            return jnp.zeros(shape, x.dtype) if grad is None else comm.like(grad, jax.ShapeDtypeStruct(shape, x.dtype))
        zeros = comm.zeros(leaf.shape, x.dtype)
        return zeros if grad is None else comm.like(grad, zeros)

    def pull(cotangent: Array) -> tuple[list[Array], list[Array]]:
        grads = run_backward(program, values, residuals, [cotangent, *[None] * (len(results) - 1)], options)
        return [in_form(i, grads[i]) for i in layout.trained], [in_form(i, grads[i]) for i in overwritten]

    return jax.tree.unflatten(structure, results), pull


def full_passes(view: View, given: LossInputs) -> tuple[Returned, Callable]:
    """Do the same as `gathered_passes`, but on full parameters. All gradients may be partial sums, one per worker."""
    layout, comm, further = view.layout, view.comm, (given.mutable, given.batch, *given.args)
    trained, overwritten, count = layout.trained, layout.overwritten, len(given.stored)
    arrays, put_back = split_arrays(further)
    structure: Any = None

    def run(_: Sequence, values: Sequence) -> list[Array]:
        nonlocal structure
        full = [unpadded(x, leaf) for x, leaf in zip(values[:count], layout.params, strict=True)]
        returned = view.checked_call(jax.tree.unflatten(layout.treedef, full), *put_back(values[count:]))
        leaves, structure = jax.tree.flatten(returned)
        return leaves

    values = [*given.stored, *arrays]
    experts = {i: axes if view.reduces_each else () for i, axes in comm.experts(layout.params).items()}
    row_dims = [*row_dims_of_params(given.stored, experts), *row_dims_of_args(further, OF_ROWS, comm.follower)]
    active = [i in trained or i in overwritten for i in range(len(values))]
    rows = KnownRows(row_dims, (), comm.follower, comm)
    passes = traced_passes(run, (), values, active=active, wanted=(0,), rows=rows)
    with names.in_scopes((), "jvp"):
        results, saved = passes.run((), values)

    def pull(cotangent: Array) -> tuple[list[Array], list[Array]]:
        with names.in_scopes((), "transpose", "jvp"):
            _, found = passes.pull(comm, (), values, saved, [cotangent], sums=Sums.of(trained, experts))
        of = dict(zip(passes.active_others, found, strict=True))
        return [of[i] for i in trained], [of[i] for i in overwritten]

    return jax.tree.unflatten(structure, results), pull


@jax.named_scope(names.MEAN)
def mean_loss(view: View, totals: Array, weights: Array, mean_weight: Array | None, scale: Array):
    """Combine the losses of all devices and microbatches. `totals` and `weights` have one entry per microbatch.

    `mean_weight` is as in `combined`. With several microbatches it is None, because their gradients are already
    multiplied by their mean weights. Return the mean loss, the sum of all weights, the factor that multiplies the sums
    of gradients, and whether the weights are valid. If the weights are invalid, all three numbers are NaN.
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
    return total / weight, weight, (1.0 if mean_weight is None else mean_weight) / weight / scale, valid


@jax.named_scope(names.GRAD_NORM)
def sums_of_squares(grads: Sequence[Array], leaves: Sequence[Leaf], comm: Collectives) -> Float[Array, " trained"]:
    """Return the sum of the squares of each gradient, in float32. One collective serves all gradients."""
    local = jnp.asarray([jnp.sum(jnp.square(jnp.abs(g).astype(jnp.float32))) for g in grads])
    if comm.losses == 1:
        return local
    replicated = jnp.asarray([leaf.kind == "replicated" for leaf in leaves], bool)
    # The sum below is over all workers. In hybrid sharding, several workers hold the same shard: divide by the copies.
    copies = jnp.asarray([max(1.0, comm.losses / leaf.shards) for leaf in leaves])
    return jnp.where(replicated, local, comm.over_workers(lax.psum, jnp.where(replicated, 0, local / copies)))


@jax.named_scope(names.MEAN)
def unscale(grads: Sequence[Array], factor: Array) -> list[Array]:
    """Multiply gradients by `factor`, which `mean_loss` returns, in float32 or wider."""
    wide = [at_least_float32(g) for g in grads]
    return [g * factor.astype(g.dtype) for g in wide]
