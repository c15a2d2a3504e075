"""Loss and gradient over all devices, with explicit collectives inside `shard_map`.

Each device differentiates the loss of its own rows; the gradients are reduce-scattered,
so that a device ends with its part of their mean. At stage 3 the loss is first rewritten
to gather each parameter where it is used (`gather`), and differentiating a gather gives
the reduce-scatter.

A device may take its rows in microbatches, one after the other. Stage 1 adds their whole
gradients up and reduces once; stages 2 and 3 reduce-scatter each, and hold 1/N.

References:
    Rajbhandari et al. 2020, arXiv 1910.02054, section 5.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from zerojax.comm.collectives import ManualCollectives
from zerojax.comm.wire import Wire
from zerojax.config import Config
from zerojax.config.data_mesh import spec_entry
from zerojax.gather import HostShard, gather_on_use
from zerojax.layout.leaf import Leaf
from zerojax.layout.tree import Layout
from zerojax.offload.host import is_on_host
from zerojax.placement.storage import cast
from zerojax.train.batch import check_args, check_batch, fold_keys
from zerojax.train.loss import Loss, at_least_float32, mean_mutable, weighted_mean

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, PyTree, Shaped


class Gradients(NamedTuple):
    """What a step's forward and backward passes find, over all devices and microbatches.

    Attributes:
        loss: The mean loss.
        grads: Its gradient, one array a trained parameter, in storage shape of its part;
            zeros for integers. NaN if the weights cannot divide.
        aux: Averaged, weighted where the loss is.
        mutable: The new mutable state, averaged over the devices.
        weighable: Whether no weight is negative and their sum is positive.
        squares: For each trained parameter, the sum of its gradient's squares, float32.
    """

    loss: Float[Array, ""]
    grads: list[Shaped[Array, "*storage"]]
    aux: PyTree
    mutable: PyTree
    weights_valid: Bool[Array, ""]
    squares: Float[Array, " trained"]


@dataclasses.dataclass(frozen=True)
class Pass:
    """How one device differentiates one microbatch.

    Attributes:
        config: Mesh axis, stage and types.
        layout: Layout of the parameters.
        parts: How the gradient of each trained parameter is left.
        loss: The loss function.
        accumulate: Microbatches a device.
    """

    config: Config
    layout: Layout
    parts: Sequence[Leaf]
    loss: Loss
    accumulate: int

    @property
    def floats(self) -> list[int]:
        """Which of the trained parameters can be differentiated, as indices into `layout.trained`."""
        leaves = self.layout.params
        return [k for k, i in enumerate(self.layout.trained) if jnp.issubdtype(leaves[i].dtype, jnp.inexact)]

    @property
    def count(self) -> int:
        """How many microbatches the devices have together."""
        return self.config.data.workers * self.accumulate

    @property
    def reduces_each(self) -> bool:
        """Whether gradients are summed over the devices microbatch by microbatch."""
        return self.config.stage >= 2 or self.accumulate == 1

    @property
    def comm(self) -> ManualCollectives:
        """How this device exchanges leaves with the others."""
        precision = self.config.precision
        wire = Wire(None if precision is None else precision.reduce)
        return ManualCollectives(self.config.data.batch, self.config.bucket_bytes, wire)

    def seen(self) -> Callable:
        """The loss function of parameters as stored: cast, and at stage 3 gathered where they are used."""
        config, layout = self.config, self.layout

        def call(params, mutable, batch, *args):
            if config.precision is not None:
                params = jax.tree.unflatten(layout.treedef, cast(jax.tree.leaves(params), layout.compute))
            return self.loss.call(params, mutable, batch, args)

        if not any(leaf.kind == "sharded" for leaf in layout.params):
            return call
        return gather_on_use(
            call,
            jax.tree.unflatten(layout.treedef, layout.params),
            comm=self.comm,
            prefetch=config.prefetch,
            reshard_after_forward=config.reshard_after_forward,
        )

    def differentiate(self, stored: Sequence[Array], mutable: PyTree, batch: PyTree, args: tuple, scale: Array):
        """Loss and gradient of one microbatch.

        Returns:
            `(returned, grads, factor)`: the sum of `grads` over the devices is `scale` times
            the microbatch's share of the gradient. If the loss is weighted, it is that of the
            total, divided by `factor`: what the total has to be divided by is known only
            after the last microbatch.
        """
        fn = self.seen()
        moving = [self.layout.trained[k] for k in self.floats]
        far = frozenset(i for i, x in enumerate(stored) if is_on_host(x))
        device_zeros = lambda x: jnp.zeros(x.shape, x.dtype)

        def objective(values):
            merged = dict(enumerate(stored)) | dict(zip(moving, values, strict=True))
            merged |= {i: HostShard(stored[i], merged[i] if i in moving else device_zeros(stored[i])) for i in far}
            params = jax.tree.unflatten(self.layout.treedef, [merged[i] for i in range(len(stored))])
            returned = fn(params, mutable, batch, *args)
            return returned.total, returned

        primals = [device_zeros(stored[i]) if i in far else stored[i] for i in moving]
        total, pull, returned = jax.vjp(objective, primals, has_aux=True)
        if self.loss.weighted:
            weight = self.comm.psum(returned.weight)
            factor = divisor = jnp.where(weight > 0, weight, 1).astype(total.dtype)
        else:  # known without asking the devices: no collective stands between the two passes
            factor, divisor = None, self.count
        # Scaling the cotangent and not the gradients keeps narrow types in range and saves a pass over them.
        (grads,) = pull(scale.astype(total.dtype) / divisor)
        return returned, grads, factor

    def reduce(self, grads: Sequence[Array]) -> list[Shaped[Array, "*local"]]:
        """Each device's part of the summed gradients; a leaf gathered on use is summed already."""
        leaves = [(self.layout.params[self.layout.trained[k]], self.parts[k]) for k in self.floats]
        here = [j for j, (leaf, _) in enumerate(leaves) if leaf.dim is None]
        one_by_one = dataclasses.replace(self.comm, bucket_bytes=0)
        sums = one_by_one.reduce_scatter([grads[j] for j in here], [leaves[j][1] for j in here])
        done = dict(enumerate(grads)) | dict(zip(here, sums, strict=True))
        return [done[j] for j in range(len(grads))]


def loss_and_grads(
    config: Config,
    layout: Layout,
    parts: Sequence[Leaf],
    loss: Loss,
    stored: Sequence[Shaped[Array, "*storage"]],
    batch: PyTree,
    args: tuple,
    *,
    mutable: PyTree = None,
    scale: Float[Array, ""] | float = 1.0,
    accumulate: int = 1,
) -> Gradients:
    """Mean loss and its gradient over all devices.

    Args:
        config: Mesh, axis, stage and types.
        layout: Layout of the parameters.
        parts: How the gradient of each trained parameter is left: one `Leaf` each.
        loss: The loss function.
        stored: Parameters; storage shape.
        batch: Every leaf is divided on dim 0 over the axis.
        args: Further arguments, whole on every device; PRNG keys are folded with the
            device's index, and with the microbatch's if there are several.
        mutable: What the loss function updates beside; whole on every device.
        scale: What the loss is multiplied by while gradients are computed and summed;
            they are divided by it afterwards.
        accumulate: Into how many microbatches each device divides its rows.
    """
    check_batch(batch, config.data, accumulate)
    check_args(args)
    one = Pass(config, layout, parts, loss, accumulate)

    def local(stored, batch, args, mutable, scale):
        return local_gradients(one, stored, batch, args, mutable, scale)

    whole = PartitionSpec()
    untyped: Any = whole
    specs: Any = Gradients(*[untyped] * 6)._replace(grads=[part.local_spec for part in parts])
    return jax.shard_map(
        local,
        mesh=config.mesh,
        in_specs=(
            [leaf.local_spec for leaf in layout.params],
            PartitionSpec(spec_entry(config.data.batch)),
            whole,
            whole,
            whole,
        ),
        out_specs=specs,
        axis_names=set(config.data.batch),
        check_vma=False,
    )(list(stored), batch, args, mutable, jnp.asarray(scale, jnp.float32))


def local_gradients(one: Pass, stored, batch, args, mutable, scale) -> Gradients:
    """`loss_and_grads` as one device sees it: local shapes in and out."""
    axes, weighted = one.config.data.batch, one.loss.weighted
    args = fold_keys(args, lax.axis_index(axes))
    if one.accumulate == 1:
        returned, grads, factor = one.differentiate(stored, mutable, batch, args, scale)
        grads, mutable = one.reduce(grads), returned.mutable
        returned = jax.tree.map(lambda x: jnp.asarray(x)[None], returned._replace(mutable=None))
    else:
        returned, grads, mutable = accumulated(one, stored, batch, args, mutable, scale)
        factor = None
    total, weights, aux, _ = returned
    if weighted:
        total, weight, below = one.comm.psum((total.sum(), weights.sum(), (weights < 0).sum(dtype=weights.dtype)))
        weights_valid = (weight > 0) & (below == 0)
        # What cannot be divided by becomes NaN, which nobody takes for a gradient.
        weight = jnp.where(weights_valid, weight, jnp.nan)
        unscale = (1 if factor is None else factor) / weight / scale
    else:
        total, weight, weights_valid = one.comm.psum(total.sum()), one.count, jnp.array(True)
        unscale = 1 / scale
    wide = [at_least_float32(g) for g in grads]
    found = dict(zip(one.floats, [g * unscale.astype(g.dtype) for g in wide], strict=True))
    grads = [found[k] if k in found else jnp.zeros(part.local_shape, part.dtype) for k, part in enumerate(one.parts)]
    aux, mutable = weighted_mean(aux, weights, weight, axes), mean_mutable(mutable, axes)
    return Gradients(total / weight, grads, aux, mutable, weights_valid, squares_of(grads, one.parts, one.comm))


def accumulated(one: Pass, stored, batch, args, mutable, scale):
    """Differentiate the microbatches one after the other.

    Returns:
        `(returned, grads, mutable)`: what the loss function returned, microbatches on dim 0;
        `scale` times the gradient of the sum over devices and microbatches, local shape of
        the parts; the last mutable state.
    """

    def start(k) -> Array:
        leaf = one.layout.params[one.layout.trained[k]]
        shape = one.parts[k].local_shape if one.reduces_each else leaf.local_shape
        wide = jnp.promote_types(leaf.dtype, jnp.float32)
        return jnp.zeros(shape, wide if one.config.precision is None else one.comm.wire.reduce_dtype(leaf.dtype))

    def turn(carry, microbatch):
        sums, mutable = carry
        number, rows = microbatch
        returned, grads, factor = one.differentiate(stored, mutable, rows, fold_keys(args, number), scale)
        if one.reduces_each:
            grads = one.reduce(grads)
        if factor is not None:
            grads = [at_least_float32(g) * factor for g in grads]
        sums = [s + g.astype(s.dtype) for s, g in zip(sums, grads, strict=True)]
        return (sums, returned.mutable), returned._replace(mutable=None)

    split = lambda x: x.reshape(one.accumulate, x.shape[0] // one.accumulate, *x.shape[1:])
    microbatches = (jnp.arange(one.accumulate), jax.tree.map(split, batch))
    (sums, mutable), returned = lax.scan(turn, ([start(k) for k in one.floats], mutable), microbatches)
    return returned, sums if one.reduces_each else one.reduce(sums), mutable


def squares_of(grads: Sequence[Array], parts: Sequence[Leaf], comm: ManualCollectives) -> Float[Array, " trained"]:
    """Sum of squares of each gradient, in float32; one collective for all of them."""
    here = jnp.asarray([jnp.sum(jnp.square(jnp.abs(g).astype(jnp.float32))) for g in grads])
    whole = jnp.asarray([part.kind == "replicated" for part in parts], bool)
    return jnp.where(whole, here, comm.psum(jnp.where(whole, 0, here)))
