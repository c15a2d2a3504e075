"""Define `zero_shard`, and the `ZeroTransformation` that it returns, which creates states and training steps."""

import functools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Never

import optax
from jax.sharding import Mesh

from zerojax.comm.mesh import resolve_mesh
from zerojax.config import Config, resolve_axes
from zerojax.config.data_mesh import spec_entry
from zerojax.train.loss import Loss
from zerojax.train.state import ZeroState, create
from zerojax.train.step import Step
from zerojax.train.step_program import StepOptions
from zerojax.transformation import TreeTransformation, init, update

if TYPE_CHECKING:
    from zerojax.config.batch_dims import BatchSpec
    from zerojax.config.precision import Precision
    from zerojax.config.tuning import Tuning
    from zerojax.config.wire import Wire
    from zerojax.narrow_state.option import Narrow
    from zerojax.offload.options import Offload


def zero_shard(
    tx: optax.GradientTransformation,
    *,
    stage: Literal[0, 1, 2, 3],
    mesh: Mesh | None = None,
    axis: str | tuple[str, ...] = "data",
    precision: "Precision | None" = None,
    trainable: Callable[[str, Any], bool] | Any = None,
    offload: "Offload | None" = None,
    view: Literal["global", "device"] = "global",
    tuning: "Tuning | None" = None,
    wire: "Wire | None" = None,
    batch_spec: Any = None,
    expert_axis: str | tuple[str, ...] | None = None,
    overwrite: Callable[[str, Any], bool] | Any = None,
    state: "Narrow | None" = None,
    **unknown: Never,
) -> "ZeroTransformation":
    """Shard an optax transformation, and the training around it, over mesh axes.

    Args:
        tx: Any optax transformation. Its update computes on logical arrays, so the result is that of plain optax.
        stage: 0 replicates everything. 1 shards the optimizer state, 2 also shards gradients, and 3 also parameters.
        mesh: The mesh for all results, with Auto or Explicit axes. It may consist of devices that this machine does not
            have. None: all devices on one axis. Sharding over axes that are not in `axis` is left to the compiler. In
            global view, the loss sees the types of Explicit axes.
        axis: The mesh axes that divide the rows of a batch, such as `"data"` or `("host", "gpu")`. The stage shards
            over all of them, or over those that `tuning` names.
        precision: The types in which a step computes, sums gradients and keeps parameters, such as `Precision.bf16()`.
            None: the types of the parameters and of the loss function. With master weights, put all transformations
            into `tx`: any that follows `tx` in an `optax.chain` would change rounded parameters.
        trainable: Which parameters are trained: `trainable(path, leaf) -> bool`, with a path such as
            `"params/dense/kernel"` and a `jax.ShapeDtypeStruct` of logical shape, or a tree of bools. None: all. Other
            parameters, and all integers and bools, have no gradient and no optimizer state: `tx` sees an
            `optax.MaskedNode()`. At stage 3 they are sharded, too.
        offload: Which model states are kept in host memory or on disk, such as `Offload(optimizer="host")`.
            `train_step` streams them chunk by chunk, and `update` copies all of them to the device at once. With
            `params="host"`, a hand-written loop must move parameters to `jax.memory.Space.Device` before
            `optax.apply_updates`, and the result back: `jax.device_put(result, tx.shardings(params).params)`.
        view: Which rows a loss function sees. `"global"`: all rows, as under `jax.jit` on one device. `"device"`: only
            one device's rows, as under `pmap`. Such a loss may use collectives over `axis`. Its values are averaged.
        tuning: Settings of memory, bytes sent and time, such as `Tuning(prefetch=2)`. None: the defaults.
        wire: Which collectives send quantised data, such as `Wire(gather="int8", reduce="int4")`. None: none.
        batch_spec: How the batch is divided: a `PartitionSpec` that begins with `axis`, such as
            `P("data", "sequence")`, or a tree of specs. A leaf with fewer dims uses the first entries of its spec.
            None: only dim 0 is divided.
        expert_axis: The axes in `axis` over which experts stay divided, such as `"expert"`. If the sharding or Flax
            metadata of a parameter names such an axis, no stage gathers the parameter, or sums its gradient, over this
            axis. Over other axes it is sharded as usual. The loss uses such parameters in a `jax.shard_map`.
        overwrite: Which parameters take their gradient as their new value. It has the form of `trainable`, and
            overrides `trainable`. A parameter whose path, or NNX class, has the name of Flax's collection
            `_overwrite_with_gradient` always does so. The new value is the elementwise maximum over microbatches
            and, in device view, over devices. These parameters are replicated, keep their type, and do not count in
            gradient norms. `tx` sees an `optax.MaskedNode()` for each.
        state: How optimizer state and master weights are stored, such as `Narrow("int8")`. None: as `tx` makes them.
        **unknown: Not accepted. The error for a field of `Tuning` says how to pass it.

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
    if "ZEROJAX_PROCESSES" in os.environ:  # `zerojax launch` sets it
        from zerojax.launcher import check_joined

        check_joined()
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
        state=state,
        **_fields_of(tuning),
    )
    return ZeroTransformation.of(config)


def _fields_of(tuning: "Tuning | None") -> dict[str, Any]:
    if tuning is None:
        return {}
    from zerojax.config.tuning import fields_of

    return fields_of(tuning)


def _predicate(chosen: Any, option: str) -> Any:
    if chosen is None or callable(chosen):
        return chosen
    from zerojax.layout.padded import stored_mask

    return stored_mask(chosen, option)


def _batch_spec(given: Any) -> "BatchSpec | None":
    if given is None:
        return None
    from zerojax.config.batch_dims import BatchSpec

    return BatchSpec.of(given)


class ZeroTransformation(TreeTransformation):
    """A transformation that optax accepts like its own, and that shards parameters, gradients and its own state."""

    @classmethod
    def of(cls, config: Config) -> "ZeroTransformation":
        # The partials contain `config`, so an object that pickle rebuilds from `init` and `update` has `config`, too.
        return cls(functools.partial(init, config), functools.partial(update, config))

    @property
    def config(self) -> Config:
        """Return the configuration, with the wrapped transformation, the mesh and all options."""
        return self.init.args[0]  # pyright: ignore[reportAttributeAccessIssue]

    def __repr__(self) -> str:
        """Return a text with the stage, mesh and axis, because the functions in the tuple have no useful repr."""
        c, mesh = self.config, dict(self.config.mesh.shape)
        tuning = f"Tuning(persist_below={c.persist_below})"
        return f"zero_shard(stage={c.stage}, mesh={mesh}, axis={spec_entry(c.axis)!r}, tuning={tuning})"

    def create(self, params: Any, *, mutable: Any = None, opt_state: Any = None) -> ZeroState:
        """Create the state of a new run at step 0, with the parameters in storage and an optimizer state.

        Args:
            params: Logical parameters, parameters in storage, or shapes. Master weights are unrounded copies, and
                `state.params` are copies in the stored types. Delete the originals to free their memory.
            mutable: The initial mutable state, such as batch statistics, for a loss with `mutable=True`: a tree of
                arrays, which every device holds in full.
            opt_state: A plain optax state to continue from, as for `adopt`. None: a fresh state.

        Returns:
            The state to pass to the step that `train_step` returns.
        """
        return create(self.config, params, mutable, opt_state)

    def train_step(
        self,
        loss_fn: Callable,
        *,
        accumulate: int = 1,
        reduction: Literal["mean", "sum"] | None = None,
        has_aux: bool = False,
        weighted: bool = False,
        mutable: bool = False,
        skip_nonfinite: bool = False,
        max_skips: int | None = None,
        leaf_norms: bool = False,
        timeout: float | None = None,
        memory: float | str | None = None,
        compiler_options: Mapping[str, Any] | Literal["auto"] = "auto",
    ) -> Step:
        """Return a jitted training step that donates its state.

        Args:
            loss_fn: As for `value_and_grad`. With `mutable`, it is `loss_fn(params, mutable, batch, *args)`.
            accumulate: As for `value_and_grad`. At stages 0 and 1, each device adds up full gradients, which are
                reduced once per step. At stages 2 and 3, the gradients of each microbatch are reduce-scattered.
            reduction: As for `value_and_grad`.
            has_aux: As for `value_and_grad`. The combined aux is `metrics["aux"]`.
            weighted: As for `value_and_grad`. Invalid weights skip a step, and a later call raises an error.
            mutable: Whether the loss updates `state.mutable`. Each microbatch gets the state that the previous one
                returned. In device view, float leaves are averaged over devices at the end. Other leaves must be equal.
                In device view or with microbatches, pass PRNG keys in `*args`: keys in the state are not folded.
            skip_nonfinite: Whether a step whose gradient norm is not finite leaves the state unchanged, bit for bit.
                Always on with a loss scale.
            max_skips: If more than `max_skips` steps in a row are skipped, the next call raises an error. Implies
                `skip_nonfinite`, and makes each call wait for the previous step. None: no limit.
            leaf_norms: Whether the metrics include, for each parameter, the norm of its gradient and, without offload,
                of its stored value and change. A frozen parameter has `optax.MaskedNode()` instead of a norm.
            timeout: Seconds that a step may take, without compilation. If a step takes longer, the process prints which
                process it waits for, and exits with status 75. None: with several processes, it prints this after
                1800 s, and does not exit. `float("inf")`: no limit.
            memory: The bytes per device that the compiled step may take, such as `"72 GB"`, or `"auto"` for the memory
                that JAX may use on the device. The blocks of the loss save as many activations as fit, and recompute
                all others. Blocks are functions under `zerojax.block` or bodies of scans, without `jax.checkpoint`.
                The first call with new shapes compiles up to four times.
            compiler_options: Options of XLA by name. With `"auto"`, a step on GPUs with hybrid sharding may run two
                collectives at once, and NCCL computes small sums on more than 32 GPUs.

        Returns:
            `step(state, batch, *args, **keywords) -> (state, metrics)`; see `zerojax.train.step.Step`.

        Raises:
            TypeError: If an option has a wrong type.
            ValueError: If an option is out of range or not for this configuration, or `memory` does not suffice.
        """
        options = StepOptions(accumulate, skip_nonfinite, max_skips, leaf_norms, timeout, memory, compiler_options)
        return Step(self.config, Loss(loss_fn, has_aux, weighted, mutable, reduction), options)
