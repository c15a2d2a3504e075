"""Differentiate a loss in one of its two views, which use different collectives.

In global view, the loss sees the whole batch, as under `jax.jit`, and the compiler divides the rows. In device view,
each device differentiates the loss of its own rows inside of a `shard_map`, as under `pmap` and DDP.

At stage 3, `zerojax.gather` rewrites the loss to gather each sharded parameter at each use, and to reduce-scatter
its gradient in the backward pass. The gradients of all other parameters are reduced in this file.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zerojax import compat
from zerojax.comm.collectives import Collectives
from zerojax.comm.global_collectives import GlobalCollectives
from zerojax.config import Config
from zerojax.dims import NOWHERE
from zerojax.gather import (
    RowStates,
    StandIn,
    Sums,
    alike_args,
    gather_on_use,
    param_states,
    row_states,
    split_arrays,
    traced_passes,
)
from zerojax.layout.leaf import Leaf, replace_items, without_padding
from zerojax.layout.tree import Layout
from zerojax.placement.storage import cast, is_on_host, unpadded
from zerojax.train.apart import TracedLoss, traced_apart
from zerojax.train.arguments import cast_inputs
from zerojax.train.checked import checked
from zerojax.train.loss import Loss, TypedLoss, at_least_float32
from zerojax.train.overwriting import unscaled

if TYPE_CHECKING:
    from jaxtyping import Array, PyTree, Shaped

# Among the arguments after the parameters (mutable state, batch, *args), only the batch at index 1 has rows.
_OF_ROWS = (1,)
# In device view, the mutable state, which is averaged at the end of a step, and the batch may differ between devices.
_DIFFERING = (0, 1)


class LossInputs(NamedTuple):
    """The arguments of a loss, with the parameters in storage.

    Attributes:
        stored: One array per parameter, in storage shape.
        mutable: The mutable state, or None.
        batch: The batch: all rows in global view, or this device's rows in device view.
        args: Further arguments.
    """

    stored: Sequence[Array]
    mutable: PyTree
    batch: PyTree
    args: tuple


@dataclasses.dataclass(frozen=True)
class View:
    """A loss in one view, with methods that differentiate one microbatch and reduce the gradients.

    Parameters and gradients have storage shape in global view, and local shape in device view.

    Attributes:
        config, layout: The configuration, and the layout of the parameters.
        grads: The layout in which the gradient of each trained parameter is returned.
        loss: The loss function, or another object with the same `call` method.
        accumulate: Number of microbatches per device.
    """

    config: Config
    layout: Layout
    grads: Sequence[Leaf]
    loss: Loss | Any
    accumulate: int

    @property
    def differentiable(self) -> list[int]:
        """Return the indices into `layout.trained` of the parameters that JAX can differentiate."""
        leaves = self.layout.params
        return [k for k, i in enumerate(self.layout.trained) if jnp.issubdtype(leaves[i].dtype, jnp.inexact)]

    @property
    def trained(self) -> list[int]:
        """Return the indices of the parameters that are trained and that JAX can differentiate."""
        return [self.layout.trained[k] for k in self.differentiable]

    @property
    def microbatches(self) -> int:
        return self.comm.losses * self.accumulate

    @property
    def divisor(self) -> int:
        """Return the number by which the sum of the losses of a step is divided."""
        return 1 if self.loss.reduction == "sum" else self.microbatches

    @property
    def reduces_each(self) -> bool:
        """Return whether the gradients of each microbatch are reduced. Otherwise they are reduced once per step."""
        return self.config.stage >= 2 or self.accumulate == 1

    @property
    def gathers_on_use(self) -> bool:
        """Return whether parameters are gathered, and their gradients reduced, where the loss uses them."""
        is_away = self.config.params_on_disk or self.config.layout_policy.params_on_host
        return any(leaf.kind == "sharded" and (leaf.shards > 1 or is_away) for leaf in self.layout.params)

    @functools.cached_property
    def comm(self) -> Collectives:
        return self._comm(self.config.bucket_bytes, self.config.shared_bytes)

    @property
    def reduces_across_once(self) -> bool:
        """Return whether hybrid sharding reduces gradients across hosts only once, at the end of a step."""
        return self.accumulate > 1 and self.reduces_each and bool(self.config.data.across)

    def _comm(self, bucket_bytes: int, shared_bytes: int = 0) -> Collectives:
        precision = self.config.precision
        reduce = None if precision is None else precision.reduce
        options = self.config.data.batch, bucket_bytes, reduce, self.config.wire, self.reduces_across_once, shared_bytes
        is_global = self.config.view == "global"
        return GlobalCollectives(*options, mesh=self.config.mesh) if is_global else Collectives(*options)

    def microbatches_of(self, rows: Array) -> Array:
        """Divide the rows of the batch into microbatches, along a new dim 0. A microbatch has rows of every device."""
        devices = self.config.data.workers // self.comm.losses
        each = rows.shape[0] // (devices * self.accumulate)  # `reshape` with -1 fails if another dim is empty
        divided = rows.reshape(devices, self.accumulate, each, *rows.shape[1:])
        return jnp.moveaxis(divided, 1, 0).reshape(self.accumulate, devices * each, *rows.shape[1:])

    def rows_of(self, microbatches: Array) -> Array:
        """Undo `microbatches_of`, by merging dims 0 and 1 into rows in the order of the batch."""
        devices = self.config.data.workers // self.comm.losses
        each = microbatches.shape[1] // devices
        divided = microbatches.reshape(self.accumulate, devices, each, *microbatches.shape[2:])
        return jnp.moveaxis(divided, 0, 1).reshape(self.accumulate * devices * each, *microbatches.shape[2:])

    @property
    def is_one_loss(self) -> bool:
        return self.config.view == "global" and self.accumulate == 1

    def loss_of_params(self) -> Callable:
        """Return the loss as a function that casts logical parameters and the batch before it calls the loss."""
        config, layout = self.config, self.layout

        def call(params, mutable, batch, *args):
            if config.precision is not None:
                params = jax.tree.unflatten(layout.treedef, cast(jax.tree.leaves(params), layout.compute))
            batch = cast_inputs(config.precision, batch)
            return TypedLoss(config, layout, self.loss).call(params, mutable, batch, without_padding(args))

        return call

    def loss_of_storage(self) -> Callable:
        """Return the loss as a function of stored parameters, which are cast and, at stage 3, gathered on use."""
        config, layout, call = self.config, self.layout, self.loss_of_params()
        if not self.is_one_loss:
            call = checked(call, manual=config.data.batch if config.view == "device" else ())
        if not self.gathers_on_use:
            return call
        return gather_on_use(
            call,
            jax.tree.unflatten(layout.treedef, layout.params),
            comm=self.comm,
            prefetch=config.prefetch,
            reshard_after_forward=config.reshard_after_forward,
            of_rows=_OF_ROWS,
            differing=_DIFFERING,
        )

    def traced_loss(self, given: LossInputs) -> TracedLoss | None:
        """Trace the loss of one microbatch, and compute its reductions of parameters on shards (stages 1 and 2).

        Return None if no gradient is sharded, or if parameters are sharded: then the loss is traced elsewhere.
        """
        trained, overwritten = self.layout.trained, self.layout.overwritten
        pairs = ((trained[k], self.grads[k]) for k in self.differentiable)
        leaves = {i: leaf for i, leaf in pairs if leaf.kind == "sharded" and leaf.shards > 1}
        if self.gathers_on_use or not leaves:
            return None
        function, args, structures = self._flat_loss(given)
        first = lambda batch: jax.tree.map(lambda x: self.microbatches_of(x)[0], batch)
        each = given if self.accumulate == 1 else given._replace(batch=compat.eval_shape(first, given.batch))
        closed = jax.make_jaxpr(function)(self._flat_loss(each)[1])
        # A small trained parameter is no shard, and its gradient would be the sum of two that are reduced differently.
        alike = [i in leaves or i not in (*trained, *overwritten) for i in range(len(given.stored))]
        alike += alike_args((given.mutable, given.batch, *given.args), _DIFFERING)
        is_sum = self.accumulate > 1
        return traced_apart(closed, structures[0], args, leaves, alike=alike, comm=self.comm, is_sum=is_sum)

    def _flat_loss(self, given: LossInputs) -> tuple[Callable, list, list]:
        """Return the loss as a function of a list of arrays, and this list.

        The function returns a list, whose first entry is the total. When it is traced, it adds the structure of the
        other entries to the last returned list.
        """
        stored, mutable, batch, args = given
        fn, structures = self.loss_of_storage(), []
        arrays, put_back = split_arrays((mutable, batch, *args))

        def function(values):
            full = [unpadded(x, leaf) for x, leaf in zip(values, self.layout.params, strict=False)]
            params = jax.tree.unflatten(self.layout.treedef, full)
            returned = fn(params, *put_back(values[len(stored) :]))
            rest, structure = jax.tree.flatten(returned._replace(total=None))
            structures.append(structure)
            return [returned.total, *rest]

        return function, [*stored, *arrays], structures

    def value_and_grad(self, given: LossInputs, scale: Array, traced: TracedLoss | None = None):
        """Return the loss and gradient of one microbatch. `traced` is the result of `traced_loss`.

        The cotangent is not divided by the number of losses, because a custom derivative rule may be nonlinear, such as
        one that clips its cotangent. The gradients are divided later, with the loss scale or in the microbatch loop.

        Returns:
            `(returned, grads, factor, values)`:

            - `returned`: the values that the loss returned.
            - `grads`: the gradients. Their sum over the devices is `scale` times the gradient of the sum of the losses.
              For a weighted loss, their sum is `scale / factor` times the gradient of the sum of the totals. They are
              followed by the cotangents of those `traced.results` that have one.
            - `factor`: the mean weight over the devices; None without weights. The sum of all weights is known only
              after the last microbatch, so cotangents are divided by `factor` for now, which keeps them in range.
            - `values`: the new value of each overwritten parameter.
        """
        is_complete = self.gathers_on_use or self.config.data.workers == 1
        returned, pull = self._pulled_to_stored(given) if is_complete else self._pulled_to_full(given, traced)
        cotangent = scale.astype(returned.total.dtype)
        factor = None
        if self.loss.weighted:
            weight = self.comm.over_workers(lax.pmean, returned.weight)
            factor = jnp.where(weight > 0, weight, 1).astype(cotangent.dtype)
            cotangent = cotangent / factor
        # Multiply the cotangent by the loss scale, so that gradients in narrow types do not underflow.
        grads, values = pull(cotangent)
        getattr(self.loss, "undivided", [])[:] = self.comm.undivided_kernels()
        # A new value belongs to the mean loss of this call, so it is also divided by this call's weight.
        own_weight = jnp.where(returned.weight > 0, returned.weight, 1)
        values = self.unscaled(values, given, cotangent * own_weight)
        return returned, grads, factor, values

    def _pulled_to_stored(self, given: LossInputs):
        """Call the loss on parameters that are gathered on use, or on the full parameters of the only worker.

        Returns:
            The values that the loss returns, and a function from the cotangent of the loss to
            `(gradients, values of overwritten parameters)`. Gradients of gathered parameters are reduced already.
        """
        stored, mutable, batch, args = given
        fn, zeros, trained = self.loss_of_storage(), self.stand_ins(stored), self.trained
        overwritten = self.layout.overwritten

        def objective(values, kept):
            merged = replace_items(replace_items(stored, overwritten, kept), trained, values)
            for i, x in zeros.items():
                merged[i] = StandIn(stored[i], merged[i] if i in trained else x)
            params = jax.tree.unflatten(self.layout.treedef, merged)
            returned = fn(params, mutable, batch, *args)
            return returned.total, returned

        primals = [zeros.get(i, stored[i]) for i in trained], [stored[i] for i in overwritten]
        _, pull, returned = jax.vjp(objective, *primals, has_aux=True)
        return returned, pull

    def _pulled_to_full(self, given: LossInputs, traced: TracedLoss | None):
        """Do the same as `_pulled_to_stored`, but on full parameters. Gradients are partial sums, one per worker."""
        trained, overwritten = self.trained, self.layout.overwritten
        function, args, structures = self._flat_loss(given)
        results = [] if traced is None else traced.results
        values, follower, count = [*args, *results], self.comm.follower, len(args)
        further = (given.mutable, given.batch, *given.args)
        experts = {i: axes if self.reduces_each else () for i, axes in self.comm.experts(self.layout.params).items()}
        states = (
            param_states(given.stored, experts) + row_states(further, _OF_ROWS, follower) + [NOWHERE] * len(results)
        )
        wanted = [*trained, *(count + k for k in ([] if traced is None else traced.moving))]
        active = [i in wanted or i in overwritten for i in range(len(values))]
        run = lambda _, xs: function(xs) if traced is None else traced.run(xs[:count], xs[count:])
        rows = RowStates(states, (), follower, self.comm)
        passes = traced_passes(run, (), values, trained=(), active=active, wanted=(0,), rows=rows)
        (total, *rest), saved = passes.run((), values)
        structure = structures[0] if traced is None else traced.structure

        def pull(cotangent):
            _, found = passes.pull(self.comm, (), values, saved, [cotangent], sums=Sums.of(wanted, experts))
            of = dict(zip(passes.active_others, found, strict=True))
            return [of[i] for i in wanted], [of[i] for i in overwritten]

        return jax.tree.unflatten(structure, rest)._replace(total=total), pull

    def unscaled(self, values: list, given: LossInputs, cotangent: Array) -> list:
        """Divide the new values of overwritten parameters that are linear in the loss's cotangent by this cotangent."""
        overwritten, precision = self.layout.overwritten, self.config.precision
        is_mean = self.is_one_loss or not self.loss.weighted
        if not values or (is_mean and (precision is None or precision.loss_scale is None)):
            return values
        pairs = zip(self.layout.params, given.stored, strict=True)
        leaves = [jax.ShapeDtypeStruct(leaf.shape, x.dtype) for leaf, x in pairs]

        def loss(primals, given):
            params = jax.tree.unflatten(self.layout.treedef, replace_items(given.stored, overwritten, primals))
            return self.loss_of_params()(params, given.mutable, given.batch, *given.args).total

        return unscaled(values, loss, [leaves[i] for i in overwritten], given._replace(stored=leaves), cotangent)

    def stand_ins(self, stored: Sequence[Array]) -> dict[int, Array]:
        """Return zeros for the parameters whose gradient cannot have the form of the stored array; see `StandIn`.

        The loss is differentiated with respect to these zeros. They are needed if the parameter is in host memory, if
        the gradient has another shape, or if it is reduced later. Overwritten parameters never need them.
        """
        if not self.gathers_on_use:
            return {}
        experts = {i for i in self.comm.experts(self.layout.params) if self.layout.params[i].kind != "sharded"}
        return {
            i: jnp.zeros(self.comm.grad_shape(leaf), x.dtype)
            if leaf.kind == "sharded"
            else self.comm.zeros(leaf.shape, x.dtype)
            for i, (leaf, x) in enumerate(zip(self.layout.params, stored, strict=True))
            if (is_on_host(x) or leaf.kind != "sharded" or self.comm.grad_shape(leaf) != x.shape)
            and i not in {*self.layout.overwritten, *experts}
        }

    def reduce(self, grads: Sequence[Array]) -> list[Shaped[Array, "*local"]]:
        """Reduce-scatter the gradients, except gradients of parameters gathered on use, which are reduced already."""
        leaves = [(self.layout.params[self.layout.trained[k]], self.grads[k]) for k in self.differentiable]
        pending = [j for j, (leaf, _) in enumerate(leaves) if leaf.dim is None or not self.gathers_on_use]
        only_flat_buckets = self._comm(bucket_bytes=0)
        parts = [leaves[j][1] for j in pending]
        sums = only_flat_buckets.reduce_scatter([grads[j] for j in pending], parts)
        if not self.reduces_across_once:
            sums = only_flat_buckets.reduce_across(sums, parts)
        return replace_items(grads, pending, sums)

    def with_shards(self, grads: Sequence[Array], shards: Mapping[int, Array]) -> list[Shaped[Array, "*local"]]:
        """Add the results of `TracedLoss.pull` to gradients that are reduced."""
        wide = lambda grad, i: at_least_float32(grad) + at_least_float32(shards[i]) if i in shards else grad
        return [wide(grad, i) for grad, i in zip(grads, self.trained, strict=True)]

    def reduced(self, k: int) -> Leaf:
        """Return the layout of the gradient of trained parameter `k` before the reduction across hosts."""
        param = self.layout.params[self.layout.trained[k]]
        return self.grads[k] if param.dim is None else param
