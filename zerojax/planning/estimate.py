"""Bytes per device, and bytes sent, before anything is built: the layouts added up, for every stage side by side.

The optimizer's state is measured on the transformation itself (`jax.eval_shape` of its
`init`), laid out as training will lay it out. What is estimated is what lives from step
to step, gradients as `value_and_grad` returns them, and the parameters gathered at once
at stage 3. Activations are the model's own: given the loss and a batch, it is compiled
for one device to see them, and with them the peak of a step is known for any number.

References:
    Rajbhandari et al. 2020, arXiv 1910.02054, sections 5 and 7, table 1 and figure 1.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType

from zerojax.config import PERSIST_BELOW, STAGES, Config, LeafMask, Offload, Precision, check_count
from zerojax.layout.leaf import Leaf
from zerojax.layout.tree import Layout
from zerojax.optim.plan import ShardingPlan, make_plan
from zerojax.placement.storage import storage_forms
from zerojax.planning.activations import PlainGradient, share_of
from zerojax.train.loss import Loss
from zerojax.train.tree_api import returned_grads

if TYPE_CHECKING:
    from jaxtyping import PyTree

PARTS = ("params", "grads", "master", "opt_state")
AXIS = "data"


@dataclasses.dataclass(frozen=True)
class StageEstimate:
    """One stage on a number of devices; bytes per device.

    Attributes:
        stage: ZeRO stage.
        devices: Size of the mesh axis.
        params: Parameters, as they are stored.
        grads: Gradients, as `value_and_grad` returns them.
        master: Master weights that are kept beside narrow parameters.
        opt_state: The wrapped transformation's own state.
        gathered: Stage 3: parameters gathered at a time, of the layer in use and those prefetched;
            None for a count of parameters, which says nothing of layers.
        host: Waits in host memory, for each device.
        disk: Waits on disk, for each device.
        sent: What a device sends in a step (and receives as much).
        backward: Gradients held while they are computed: at stages 0 to 2 whole, until they are summed
            over the devices; with several microbatches the sums so far, too.
        update: The optimizer's own need: gradients as it sees them, and as much for its updates.
        activations: One device's rows, and the temporary memory of the model's own gradient
            on them; None unless the loss was given.
    """

    stage: int
    devices: int
    params: int
    grads: int
    master: int
    opt_state: int
    gathered: int | None
    host: int
    disk: int
    sent: float
    backward: int
    update: int
    activations: int | None = None

    @property
    def lasting(self) -> int:
        """Bytes that live on a device from step to step, without gradients."""
        return self.params + self.master + self.opt_state

    @property
    def peak(self) -> int | None:
        """Most bytes on a device in a step; None where activations are not known.

        What lives, and the more of what the backward pass holds (its gradients, the
        activations, what is gathered) and what the update does. At stages 1 and 2 it is an
        upper bound for unrolled layers, whose gradients may be reduced one by one. Pieces
        of an offloaded update are not in it.
        """
        if self.activations is None:
            return None
        return self.lasting + max(self.backward + self.activations + (self.gathered or 0), self.update)

    @property
    def total(self) -> int:
        """Bytes that live on a device from step to step, with gradients; without what is gathered."""
        return self.lasting + self.grads


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Stages side by side.

    Attributes:
        parameters: How many there are, in elements.
        trained: How many of them are trained.
        rows: One for each stage and number of devices, in the order asked for.
    """

    parameters: int
    trained: int
    rows: tuple[StageEstimate, ...]

    def __getitem__(self, stage: int) -> StageEstimate:
        """The row of a stage, on the first number of devices that was asked for.

        Raises:
            KeyError: If it was not asked for.
        """
        return {row.stage: row for row in reversed(self.rows)}[stage]

    def break_even_tokens(self, stage: int, *, link: float, flops: float, recomputed: bool = True) -> float:
        """Tokens per device and step from which on computing takes as long as sending.

        A token costs `6 x parameters` operations, `8 x` where the forward pass is
        recomputed; sending takes `sent / link`. With fewer tokens the devices wait for the
        link, however well the two overlap.

        Args:
            stage: Which.
            link: Bytes per second that a device sends.
            flops: Operations per second that a device reaches in practice.
            recomputed: Whether activations are recomputed in the backward pass.

        Returns:
            Tokens.
        """
        return self[stage].sent / link * flops / ((8 if recomputed else 6) * self.parameters)

    def offload_seconds(self, stage: int, *, link: float, disk: float | None = None) -> float:
        """How long a step's offloaded update takes at least, streamed through the device.

        What waits comes in and goes out once, both ways at once: `bytes / link`; from disk
        what is read is written, too: `2 x bytes / disk`. The slower of the two decides.

        Args:
            stage: Which.
            link: Bytes per second each way between host and device, per device.
            disk: Bytes per second of the disk, per device, reading and writing together.

        Returns:
            Seconds.
        """
        row = self[stage]
        seconds = (row.host + row.disk) / link
        return max(seconds, 2 * row.disk / disk) if disk else seconds

    def __str__(self) -> str:
        """A table: stages in rows, parts in columns."""
        is_on_host = [name for name in ("host", "disk") if any(getattr(row, name) for row in self.rows)]
        peaks = ["activations", "peak"] if any(row.activations is not None for row in self.rows) else []
        columns = [*PARTS, "total", "gathered", *peaks, *is_on_host, "sent"]
        lines = [f"{self.parameters:,} parameters; bytes per device"]
        lines.append("stage  devices" + "".join(f"{name:>12s}" for name in columns))
        lines += [
            f"{row.stage:5d}  {row.devices:7d}" + "".join(f"{in_words(getattr(row, name)):>12s}" for name in columns)
            for row in self.rows
        ]
        return "\n".join(lines)


def estimate(
    model: Any,
    *,
    tx: optax.GradientTransformation | None = None,
    devices: int | Sequence[int] = 8,
    stages: Sequence[int] = tuple(STAGES),
    precision: Precision | None = None,
    offload: Offload | None = None,
    persist_below: int = PERSIST_BELOW,
    prefetch: int = 1,
    trainable: Any = None,
    accumulate: int = 1,
    inputs: Sequence[Any] = (),
    loss_fn: Callable | None = None,
    batch: Any = None,
    args: Sequence[Any] = (),
    has_aux: bool = False,
    weighted: bool = False,
    gpu: str | None = None,
) -> Estimate:
    """Bytes per device and bytes sent per step, for every stage, without building anything.

    Given the loss and a batch, the peak of a step too: the gradient is compiled for one
    device (which takes seconds), and its temporary memory is the activations of any stage.

    Args:
        model: How many parameters there are (`7.5e9`; they are taken for one long vector);
            or a tree of parameters, shapes being enough; or a Flax module.
        tx: The transformation; its state is measured. Default: `optax.adam`.
        devices: How many share the model; several numbers give several rows a stage.
        stages: Which, in which order.
        precision: As for `zero_shard`. A count of parameters without one is taken for
            mixed precision in bfloat16.
        offload: As for `zero_shard`; at stage 0 nothing is offloaded.
        persist_below: As for `zero_shard`; for a count of parameters it plays no role.
        prefetch: As for `zero_shard`.
        trainable: As for `zero_shard`.
        accumulate: Microbatches a step; stages 2 and 3 send more with more of them.
        inputs: What a Linen module's `init` takes beside the key; shapes are enough.
        loss_fn: As for `train_step`; None leaves activations and peak unknown.
        batch: The global batch; shapes are enough.
        args: Further arguments of the loss.
        has_aux: As for `train_step`.
        weighted: As for `train_step`.
        gpu: An absent GPU to compile for, as `"h200"`; needs the extra `aot`. Default: the
            first device here. What XLA fuses differs between CPU and GPU, and so do activations.

    Returns:
        Rows in the order of `devices`, then of `stages`.

    Raises:
        TypeError: If the model is none of these, or a count is no integer.
        ValueError: If a count is not positive, a stage unknown, the batch cannot be divided, or
            a loss is given without a batch or for a mere count of parameters.
        ModuleNotFoundError: If `gpu` is given and the extra `aot` is not installed.

    References:
        Rajbhandari et al. 2020, arXiv 1910.02054, section 5, table 1.

    Examples:
        >>> round(estimate(7.5e9, devices=64)[1].total / 1e9, 1)
        31.4
    """
    check_count("accumulate", accumulate, "microbatches", least=1)
    number = float(model) if isinstance(model, numbers.Real) else None
    chosen: Any = trainable if trainable is None or callable(trainable) else LeafMask.of(trainable)
    tx = optax.adam(1e-3) if tx is None else tx
    precision = Precision.bf16() if number is not None and precision is None else precision
    if loss_fn is not None and number is not None:
        raise ValueError("The peak of a loss needs the tree of its parameters, not their number: jax.eval_shape(init).")
    if loss_fn is not None and not jax.tree.leaves(batch):
        raise ValueError("The peak of a loss needs the global batch, too. Give batch=; shapes are enough.")
    plain = None if loss_fn is None else PlainGradient(Loss(loss_fn, has_aux, weighted), tuple(args), gpu)
    rows, size, trained = [], 0, 0
    for count in devices if isinstance(devices, Sequence) else (devices,):
        check_count("devices", count, "devices", least=1)
        params = shapes_of(model, inputs) if number is None else vector(number, count)
        for stage in stages:
            config = Config(
                tx,
                stage,
                abstract_mesh(count, (AXIS,)),
                (AXIS,),
                persist_below=persist_below if number is None else 0,
                prefetch=prefetch,
                precision=precision,
                trainable=chosen,
                offload=offload if stage else None,
            )
            plan = make_plan(config, params)
            layout = plan.layout
            row = stage_estimate(config, layout, plan, accumulate)
            if plain is not None:
                seen = plain.seen(config, layout, share_of(batch, config, accumulate))
                row = dataclasses.replace(row, activations=seen.activations, gathered=seen.gathered)
            rows.append(row if number is None else dataclasses.replace(row, gathered=None))
            size = sum(leaf.size for leaf in layout.params)
            trained = sum(layout.params[i].size for i in layout.trained)
    if number is not None:  # without the elements that round it up
        size = trained = int(number)
    return Estimate(size, trained, tuple(rows))


def abstract_mesh(count: int, axes: tuple[str, ...]) -> Any:
    """A mesh of so many devices of no kind, to lay out for; all of them on the last axis."""
    sizes = (1,) * (len(axes) - 1) + (count,)
    return AbstractMesh(sizes, axes, axis_types=(AxisType.Auto,) * len(axes))


def vector(count: float, devices: int) -> PyTree:
    """Parameters of which only the number is known: one vector, which the devices divide.

    Raises:
        ValueError: If there is none.
    """
    if not 1 <= count < np.inf:
        raise ValueError(f"The model has {count} parameters; a count of at least 1 is required, such as 7.5e9.")
    whole = int(count)
    return {"parameters": jax.ShapeDtypeStruct((whole + -whole % devices,), jnp.float32)}


def shapes_of(model: Any, inputs: Sequence[Any]) -> PyTree:
    """The shapes of a model's parameters.

    Raises:
        TypeError: If it is no tree of arrays or shapes, and no Flax module.
    """
    if callable(getattr(model, "init", None)) and callable(getattr(model, "apply", None)):
        return jax.eval_shape(model.init, jax.random.key(0), *inputs)
    if nnx := sys.modules.get("flax.nnx"):  # who has a module of it has imported it
        model = nnx.state(model, nnx.Param) if isinstance(model, nnx.Module) else model
    leaves = jax.tree.leaves(model)
    if not leaves or not all(hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves):
        raise TypeError(
            f"estimate takes a number of parameters, a tree of arrays or shapes, or a Flax module, not "
            f"{type(model).__name__}. For example jax.eval_shape(init, key)."
        )
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model)


def stage_estimate(config: Config, layout: Layout, plan: ShardingPlan, accumulate: int) -> StageEstimate:
    """Add up the layouts of one stage."""
    grads = returned_grads(config, layout, storage_forms(layout.params))
    given = zip(grads, layout.params, strict=True)
    near = [leaf for leaf, chunking in zip(plan.state, plan.chunkings, strict=True) if chunking is None]
    far = sum(
        leaf.local_bytes for leaf, chunking in zip(plan.state, plan.chunkings, strict=True) if chunking is not None
    )
    masters = sum(leaf.local_bytes for leaf in near if leaf.path.startswith(".master"))
    on_disk = config.offload is not None and config.offload.optimizer == "disk"
    waiting = sum(leaf.local_bytes for leaf in layout.params if leaf.host)
    return StageEstimate(
        config.stage,
        config.data.workers,
        params=sum(leaf.local_bytes for leaf in layout.params) - waiting,
        grads=sum(dataclasses.replace(part, dtype=leaf.dtype).local_bytes for part, leaf in given),
        master=masters,
        opt_state=sum(leaf.local_bytes for leaf in near) - masters,
        gathered=gathered_bytes(config, layout),
        host=waiting + (0 if on_disk else far),
        disk=far if on_disk else 0,
        sent=sent_bytes(config, layout, accumulate),
        backward=backward_bytes(config, plan, accumulate),
        update=(1 if config.offload else 2) * sum(part.local_bytes for part in plan.grads),
    )


def backward_bytes(config: Config, plan: ShardingPlan, accumulate: int) -> int:
    """Gradients that a device holds while they are computed.

    What is gathered on use is reduced on the spot; all else is whole, in the type computed in, until
    the backward pass ends. Stages 0 and 1 add up whole gradients, the others what is reduced.
    """
    total = 0
    for part, leaf, dtype in zip(plan.grads, plan.trained.params, plan.trained.compute, strict=True):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            continue
        summed = reduced_type(config, np.dtype(dtype)).itemsize
        total += part.local_bytes if leaf.kind == "sharded" else leaf.size * np.dtype(dtype).itemsize
        if accumulate > 1:
            total += (leaf.size if config.stage < 2 else math.prod(part.local_shape)) * max(summed, 4)
    return total


def gathered_bytes(config: Config, layout: Layout) -> int:
    """Parameters that stage 3 gathers at a time: the largest layer, and as much for each that is prefetched.

    A layer is what the path says up to its first number (`blocks_3`, `layers[3]`). In a
    stack of layers, dim 0 of an array is not told from others: its bytes count as one layer.
    """
    layers: dict[str, int] = {}
    for leaf, path, dtype in zip(layout.params, layout.paths, layout.compute, strict=True):
        if leaf.kind == "sharded":
            found = re.match(r".*?\d+", path)
            name = found.group() if found else path
            layers[name] = layers.get(name, 0) + leaf.size * np.dtype(dtype).itemsize
    return (1 + config.prefetch) * max(layers.values(), default=0)


def sent_bytes(config: Config, layout: Layout, accumulate: int) -> float:
    """What a device sends in a step: reductions in the type they are summed in, gathers in the type computed in.

    `(N - 1) / N` of the logical bytes for each. Stages 0 and 1 reduce once and gather once;
    stage 2 reduces every microbatch; stage 3 gathers twice and reduces, every microbatch.
    """
    reduces = 1 if config.stage < 2 else accumulate
    gathers = 2 * accumulate if config.stage == 3 else 1
    if config.stage == 3 and not config.reshard_after_forward:
        gathers = accumulate
    total = 0
    for i, (leaf, dtype) in enumerate(zip(layout.params, layout.compute, strict=True)):
        trained = i in layout.trained and jnp.issubdtype(leaf.dtype, jnp.inexact)
        small = config.stage == 3 and leaf.kind != "sharded"
        if not trained and (config.stage < 3 or small):
            continue  # stays where it is; a key has no type of NumPy's
        summed = reduced_type(config, np.dtype(dtype)).itemsize
        gathered = 1 if small else gathers
        total += leaf.size * (trained * reduces * summed + gathered * gathered_itemsize(config, leaf, dtype))
    return total * (config.data.workers - 1) / config.data.workers


def gathered_itemsize(config: Config, leaf: Leaf, compute: Any) -> int:
    """Bytes of an element that is gathered: stage 0 gathers its gradients, the others parameters."""
    if config.stage == 0:
        return reduced_type(config, np.dtype(compute)).itemsize
    return np.dtype(compute if leaf.kind == "sharded" else leaf.dtype).itemsize


def reduced_type(config: Config, dtype: np.dtype) -> np.dtype:
    """The type in which gradients are summed over the devices."""
    precision = config.precision
    return dtype if precision is None or not jnp.issubdtype(dtype, jnp.floating) else np.dtype(precision.reduce)


def in_words(count: float | None) -> str:
    """Bytes in three digits and a unit of 1,000s; a dash for what is not known."""
    if count is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError
