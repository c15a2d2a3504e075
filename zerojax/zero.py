"""Define `zero_shard`, which checks its options and wraps an optax transformation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import optax
from jax.sharding import Mesh

from zerojax.comm.mesh import resolve_axes, resolve_mesh
from zerojax.config import BUCKET_BYTES, PERSIST_BELOW, Config
from zerojax.transformation import ZeroTransformation

if TYPE_CHECKING:
    from zerojax.config.batch_dims import BatchSpec
    from zerojax.config.precision import Precision
    from zerojax.config.wire import Wire
    from zerojax.offload.options import Offload


def zero_shard(
    tx: optax.GradientTransformation,
    *,
    stage: Literal[0, 1, 2, 3],
    mesh: Mesh | None = None,
    axis: str | tuple[str, ...] = "data",
    shard_axis: str | tuple[str, ...] | None = None,
    params_axis: str | tuple[str, ...] | None = None,
    expert_axis: str | tuple[str, ...] | None = None,
    persist_below: int = PERSIST_BELOW,
    prefetch: int = 1,
    bucket_bytes: int | str = BUCKET_BYTES,
    reshard_after_forward: bool = True,
    precision: Precision | None = None,
    trainable: Callable[[str, Any], bool] | Any = None,
    overwrite: Callable[[str, Any], bool] | Any = None,
    offload: Offload | None = None,
    batch_spec: Any = None,
    view: Literal["global", "device"] = "global",
    wire: Wire | None = None,
    matrix_updates: Literal["auto", "owner", "sharded"] = "auto",
) -> ZeroTransformation:
    """Shard an optax transformation, and the training around it, over mesh axes.

    Args:
        tx: Any optax transformation. Its update computes on logical arrays, so the result equals plain optax's.
        stage: 0 replicates everything. 1 shards the optimizer state, 2 also shards gradients, and 3 also parameters.
        mesh: The mesh for all results, with Auto or Explicit axes. It may consist of devices that this machine does not
            have. None: all devices on one axis. Sharding over axes that are not in `axis` is left to the compiler.
            Inside the loss, all axes are Auto.
        axis: The mesh axes that divide the rows of a batch, such as `"data"` or `("host", "gpu")`.
        shard_axis: The axes of `axis` over which the stage shards, such as `"gpu"`. Over the other axes, everything is
            replicated (hybrid sharding, HSDP). None: all axes of `axis`.
        params_axis: Stage 3: the axes of `axis` over which parameters are sharded and gathered, such as `"gpu"`, within
            a host. Gradients and optimizer state are sharded over all of `axis`. None: all of these axes.
        expert_axis: The axes of `axis` over which experts stay divided, such as `"expert"`. A parameter whose sharding
            or Flax metadata names one of them is not gathered over it, and its gradient is not summed over it, at any
            stage. Over the other axes it is sharded as all parameters are. The loss uses it in a `jax.shard_map`.
        persist_below: A leaf with fewer elements is not sharded along a dim. Its parameter stays replicated at stage 3.
            If its update is elementwise, its gradient and optimizer state are flattened, and sharded in this form.
        prefetch: Stage 3: how many uses ahead a parameter's gather may start; 0 disables prefetch. Each use ahead costs
            the memory of about one gathered layer. A scan always prefetches one iteration ahead.
        bucket_bytes: Leaves of a layer share one collective, up to this number of logical bytes, or `"64 MiB"`.
        reshard_after_forward: Stage 3: whether gathered parameters are freed after the forward pass, and gathered again
            for the backward pass. If False, they are kept, and a step moves 2 times the parameters' bytes, not 3 times.
        precision: The types in which a step computes, sums gradients and keeps parameters, such as `Precision.bf16()`.
            None: the types of the parameters and of the loss function. With master weights, put all transformations
            into `tx`: one that follows `tx` in an `optax.chain` would change rounded parameters.
        trainable: Which parameters are trained: `trainable(path, leaf) -> bool`, with a path such as
            `"params/dense/kernel"` and a `jax.ShapeDtypeStruct` of logical shape, or a tree of bools. None: all. Other
            parameters, and all integers and bools, have no gradient and no optimizer state: `tx` sees an
            `optax.MaskedNode()`. At stage 3 they are sharded, too.
        overwrite: Which parameters take their gradient as their new value, in the form of `trainable`. This option
            overrides `trainable`. A parameter whose path, or NNX class, has the name of Flax's collection
            `_overwrite_with_gradient` is always overwritten. The new value is the elementwise maximum over microbatches
            and, in device view, over devices. These parameters are replicated, keep their type, and do not count in
            gradient norms. `tx` sees an `optax.MaskedNode()` for each.
        offload: Which model states are kept in host memory or on disk, such as `Offload(optimizer="host")`.
            `train_step` streams them chunk by chunk, and `update` copies all of them to the device at once. With
            `params="host"`, a hand-written loop must move parameters to `jax.memory.Space.Device` before
            `optax.apply_updates`, and the result back: `jax.device_put(result, tx.shardings(params).params)`.
        batch_spec: How the batch is divided: a `PartitionSpec` that begins with `axis`, such as
            `P("data", "sequence")`, or a tree of specs, of which leaves use the first entries. None: only dim 0.
        view: Which rows a loss function sees. `"global"`: all rows, as under `jax.jit` on one device. `"device"`: the
            rows of its device, as under `pmap`. The loss may then use collectives over `axis`. The losses are averaged.
        wire: Which collectives send quantised data, such as `Wire(gather="int8", reduce="int4")`. None: none.
        matrix_updates: Which devices compute updates that multiply matrices, such as Muon's. `"owner"`: one device per
            matrix, or a few devices per matrix if there are fewer matrices than devices. `"sharded"`: all devices share
            each product. `"auto"`: the choice with the shorter estimated time, which `zerojax.report` shows.

    Returns:
        An `optax.GradientTransformationExtraArgs` with the methods of `ZeroTransformation`.

    Raises:
        TypeError: If `tx` is not an optax transformation, or an option has a wrong type.
        ValueError: If the stage is unknown, options contradict each other, or a mesh axis is missing or Manual.

    Examples:
        >>> tx = zero_shard(optax.adamw(3e-4), stage=3)
        >>> state, step = tx.create(tx.init_params(model_init, key)), tx.train_step(loss_fn)
        >>> state, metrics = step(state, batch)
    """
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    axes = resolve_axes(axis)
    config = Config(
        tx,
        stage,
        resolve_mesh(mesh, axes),
        axes,
        resolve_axes(shard_axis, "shard_axis"),
        resolve_axes(params_axis, "params_axis"),
        resolve_axes(expert_axis, "expert_axis"),
        persist_below=persist_below,
        prefetch=prefetch,
        bucket_bytes=_parsed_bytes(bucket_bytes),
        reshard_after_forward=reshard_after_forward,
        precision=precision,
        trainable=_predicate(trainable, "trainable"),
        overwrite=_predicate(overwrite, "overwrite"),
        offload=offload,
        batch_spec=_batch_spec(batch_spec),
        view=view,
        wire=wire,
        matrix_updates=matrix_updates,
    )
    return ZeroTransformation.of(config)


def _parsed_bytes(given: int | str) -> int:
    if given == BUCKET_BYTES:
        return BUCKET_BYTES
    from zerojax.units import parse_bytes

    return parse_bytes("bucket_bytes", given)


def _predicate(chosen: Any, option: str) -> Callable[[str, Any], bool] | None:
    if chosen is None or callable(chosen):
        return chosen
    from zerojax.layout.padded import stored_mask

    return stored_mask(chosen, option)


def _batch_spec(given: Any) -> BatchSpec | None:
    if given is None:
        return None
    from zerojax.config.batch_dims import BatchSpec

    return BatchSpec.of(given)
