"""Define `zero_shard`, which checks its options and wraps an optax transformation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Never

import optax
from jax.sharding import Mesh

from zerojax.comm.mesh import resolve_mesh
from zerojax.config import Config, resolve_axes
from zerojax.transformation import ZeroTransformation

if TYPE_CHECKING:
    from zerojax.config.batch_dims import BatchSpec
    from zerojax.config.precision import Precision
    from zerojax.config.tuning import Tuning
    from zerojax.config.wire import Wire
    from zerojax.offload.options import Offload


def zero_shard(
    tx: optax.GradientTransformation,
    *,
    stage: Literal[0, 1, 2, 3],
    mesh: Mesh | None = None,
    axis: str | tuple[str, ...] = "data",
    precision: Precision | None = None,
    trainable: Callable[[str, Any], bool] | Any = None,
    offload: Offload | None = None,
    view: Literal["global", "device"] = "global",
    tuning: Tuning | None = None,
    wire: Wire | None = None,
    batch_spec: Any = None,
    expert_axis: str | tuple[str, ...] | None = None,
    overwrite: Callable[[str, Any], bool] | Any = None,
    **unknown: Never,
) -> ZeroTransformation:
    """Shard an optax transformation, and the training around it, over mesh axes.

    Args:
        tx: Any optax transformation. Its update computes on logical arrays, so the result equals plain optax's.
        stage: 0 replicates everything. 1 shards the optimizer state, 2 also shards gradients, and 3 also parameters.
        mesh: The mesh for all results, with Auto or Explicit axes. It may consist of devices that this machine does not
            have. None: all devices on one axis. Sharding over axes that are not in `axis` is left to the compiler.
            Inside the loss, all axes are Auto.
        axis: The mesh axes that divide the rows of a batch, such as `"data"` or `("host", "gpu")`. The stage shards
            over all of them, or over those that `tuning` names.
        precision: The types in which a step computes, sums gradients and keeps parameters, such as `Precision.bf16()`.
            None: the types of the parameters and of the loss function. With master weights, put all transformations
            into `tx`: one that follows `tx` in an `optax.chain` would change rounded parameters.
        trainable: Which parameters are trained: `trainable(path, leaf) -> bool`, with a path such as
            `"params/dense/kernel"` and a `jax.ShapeDtypeStruct` of logical shape, or a tree of bools. None: all. Other
            parameters, and all integers and bools, have no gradient and no optimizer state: `tx` sees an
            `optax.MaskedNode()`. At stage 3 they are sharded, too.
        offload: Which model states are kept in host memory or on disk, such as `Offload(optimizer="host")`.
            `train_step` streams them chunk by chunk, and `update` copies all of them to the device at once. With
            `params="host"`, a hand-written loop must move parameters to `jax.memory.Space.Device` before
            `optax.apply_updates`, and the result back: `jax.device_put(result, tx.shardings(params).params)`.
        view: Which rows a loss function sees. `"global"`: all rows, as under `jax.jit` on one device. `"device"`: the
            rows of its device, as under `pmap`. The loss may then use collectives over `axis`. The losses are averaged.
        tuning: Settings of memory, bytes sent and time, such as `Tuning(prefetch=2)`. None: the defaults.
        wire: Which collectives send quantised data, such as `Wire(gather="int8", reduce="int4")`. None: none.
        batch_spec: How the batch is divided: a `PartitionSpec` that begins with `axis`, such as
            `P("data", "sequence")`, or a tree of specs, of which leaves use the first entries. None: only dim 0.
        expert_axis: The axes of `axis` over which experts stay divided, such as `"expert"`. A parameter whose sharding
            or Flax metadata names one of them is not gathered over it, and its gradient is not summed over it, at any
            stage. Over the other axes it is sharded as all parameters are. The loss uses it in a `jax.shard_map`.
        overwrite: Which parameters take their gradient as their new value, in the form of `trainable`. This option
            overrides `trainable`. A parameter whose path, or NNX class, has the name of Flax's collection
            `_overwrite_with_gradient` is always overwritten. The new value is the elementwise maximum over microbatches
            and, in device view, over devices. These parameters are replicated, keep their type, and do not count in
            gradient norms. `tx` sees an `optax.MaskedNode()` for each.
        **unknown: Nothing. The error for a field of `Tuning` says how to give it.

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
    if unknown:
        from zerojax.config.tuning import unknown_option

        raise unknown_option("zero_shard", *next(iter(unknown.items())))
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    axes = resolve_axes(axis)
    config = Config(
        tx,
        stage,
        resolve_mesh(mesh, axes),
        axes,
        expert_axis=resolve_axes(expert_axis, "expert_axis"),
        precision=precision,
        trainable=_predicate(trainable, "trainable"),
        overwrite=_predicate(overwrite, "overwrite"),
        offload=offload,
        batch_spec=_batch_spec(batch_spec),
        view=view,
        wire=wire,
        **_fields_of(tuning),
    )
    return ZeroTransformation.of(config)


def _fields_of(tuning: Tuning | None) -> dict[str, Any]:
    if tuning is None:
        return {}
    from zerojax.config.tuning import fields_of

    return fields_of(tuning)


def _predicate(chosen: Any, option: str) -> Any:
    if chosen is None or callable(chosen):
        return chosen
    from zerojax.layout.padded import stored_mask

    return stored_mask(chosen, option)


def _batch_spec(given: Any) -> BatchSpec | None:
    if given is None:
        return None
    from zerojax.config.batch_dims import BatchSpec

    return BatchSpec.of(given)
