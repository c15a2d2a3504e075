"""Compute the bytes per device, and the bytes sent, at one stage, from its layouts. Activations are not included.

References:
    Rajbhandari et al. 2020, arXiv 1910.02054, sections 5 and 7, table 1 and figure 1.
"""

import dataclasses
import math
import re
from collections import defaultdict
from typing import Any

import jax.numpy as jnp
import numpy as np

from zerojax.comm.quantised import codec_of
from zerojax.config import Config
from zerojax.config.data_mesh import axes_of
from zerojax.layout.leaf import Leaf
from zerojax.layout.tree import Layout
from zerojax.optim.sharding_plan import ShardingPlan
from zerojax.placement.storage import storage_forms
from zerojax.streaming.stores import kept_on_device
from zerojax.train.tree_api import TreeForm

HOST = "host"  # the mesh axis of a topology's hosts


@dataclasses.dataclass(frozen=True)
class StageEstimate:
    """The bytes per device of one stage on a number of devices.

    `backward` includes the sums of gradients over microbatches. At stages 0 to 2, gradients are full until reduced.
    """

    stage: int  # ZeRO stage
    devices: int  # number of data-parallel workers
    params: int  # stored parameters
    grads: int  # gradients, as `value_and_grad` returns them
    master: int  # master weights, where parameters are stored in a narrower type
    opt_state: int  # state of the wrapped transformation
    gathered: int | None  # at stage 3, the layers in use and prefetched. None if the model is a number of parameters
    host: int  # bytes offloaded to host memory
    disk: int  # bytes offloaded to disk
    sent: float  # bytes that a device sends per step; it receives as many
    across: float | None  # the part of `sent` in collectives over several hosts. None if the hosts are unknown
    backward: int  # gradients during the backward pass
    update: int  # gradients in the optimizer's type, and without an offload, as many bytes of updates
    read: int = 0  # bytes that a step reads from disk, at most
    written: int = 0  # bytes that a step writes to disk

    @property
    def resident(self) -> int:
        """Return the bytes on a device between steps, which are the model states without gradients."""
        return self.params + self.master + self.opt_state

    @property
    def total(self) -> int:
        """Return the bytes of all model states on a device. This includes gradients, but not gathered parameters."""
        return self.resident + self.grads


def estimate_stage(config: Config, plan: ShardingPlan, accumulate: int) -> StageEstimate:
    """Add up the bytes of one stage, with `accumulate` microbatches per step."""
    whole = plan.layout
    chunks_kept = sum(kept_on_device(config, plan).values())
    plan = plan.along_others(config.user_mesh.shape)
    layout = plan.layout
    grads = zip(TreeForm(config, layout, storage_forms(layout.params)).grads, layout.params, strict=True)
    state = list(zip(plan.state, plan.chunkings, strict=True))
    on_device = [leaf for leaf, chunking in state if chunking is None]
    chunked = sum(leaf.local_bytes for leaf, chunking in state if chunking is not None)
    masters = sum(leaf.local_bytes for leaf in on_device if leaf.path.startswith(".master"))
    on_disk = config.offload is not None and config.offload.optimizer == "disk"
    host_params = sum(leaf.local_bytes for leaf in layout.params if leaf.host)
    disk_params, disk_grads, read, written = disk_bytes(config, plan, accumulate)
    sent = sent_bytes(config, layout, accumulate, whole)
    return StageEstimate(
        config.stage,
        config.data.workers,
        params=sum(leaf.local_bytes for leaf in layout.params) - host_params - disk_params,
        grads=sum(
            dataclasses.replace(grad, dtype=leaf.dtype).local_bytes
            for grad, leaf in grads
            if not (config.params_on_disk and leaf.kind == "sharded")
        ),
        master=masters,
        opt_state=sum(leaf.local_bytes for leaf in on_device) - masters + chunks_kept,
        gathered=gathered_bytes(config, whole if config.view == "device" else layout),
        host=host_params + (0 if on_disk else chunked - chunks_kept),
        disk=(chunked if on_disk else 0) + disk_params + disk_grads,
        sent=sum(sent.values()),
        across=sum(count for axes, count in sent.items() if HOST in axes) if HOST in config.data.batch else None,
        backward=backward_bytes(config, plan, accumulate),
        update=(1 if config.offload else 2) * sum(plan.grads[k].local_bytes for k in grads_on_device(config, plan)),
        read=read + (chunked if on_disk else 0),
        written=written + (chunked if on_disk else 0),
    )


def disk_bytes(config: Config, plan: ShardingPlan, accumulate: int) -> tuple[int, int, int, int]:
    """Return four sizes per device: parameters and gradients on disk, and the bytes that a step reads and writes.

    The bytes read are an upper bound: the last block of the forward pass counts as read twice, but is read once.
    """
    if not config.params_on_disk:
        return 0, 0, 0, 0
    layout, inexact = plan.layout, jnp.inexact
    params = sum(leaf.local_bytes for leaf in layout.params if leaf.kind == "sharded")
    of_trained = [(k, layout.params[i]) for k, i in enumerate(layout.trained)]
    trained = [(k, leaf) for k, leaf in of_trained if leaf.kind == "sharded" and jnp.issubdtype(leaf.dtype, inexact)]
    updated = sum(leaf.local_bytes for _, leaf in trained)
    grads = sum(math.prod(plan.grads[k].local_shape) * max(4, plan.grads[k].dtype.itemsize) for k, _ in trained)
    read = 2 * accumulate * params + (accumulate - 1) * grads + updated + grads
    return params, grads, read, accumulate * grads + updated


def grads_on_device(config: Config, plan: ShardingPlan) -> list[int]:
    leaves = enumerate(plan.trained.params)
    return [k for k, leaf in leaves if not (config.params_on_disk and leaf.kind == "sharded")]


def backward_bytes(config: Config, plan: ShardingPlan, accumulate: int) -> int:
    """Return bytes of gradients on a device during the backward pass.

    The gradient of a parameter that is gathered on use is reduce-scattered at once. All other gradients are full, in
    the compute type, until the pass ends. Stages 0 and 1 accumulate full gradients; stages 2 and 3 accumulate shards.
    """
    total = 0
    for k in grads_on_device(config, plan):
        grad, leaf, dtype = plan.grads[k], plan.trained.params[k], plan.trained.compute[k]
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            continue
        itemsize = np.dtype(dtype).itemsize
        total += grad.local_bytes if leaf.kind == "sharded" else leaf.size * itemsize
        if accumulate > 1:
            elements = leaf.size if config.stage < 2 else math.prod(grad.local_shape)
            total += elements * max(reduce_itemsize(config, dtype), 4)
    return total


def gathered_bytes(config: Config, layout: Layout) -> int:
    """Return the bytes of parameters that stage 3 gathers at the same time: `1 + prefetch` times the largest layer.

    A layer has all leaves whose paths agree up to the first number (`blocks_3`, `layers[3]`). A stack is one layer.
    """
    layers: dict[str, int] = {}
    for leaf, path, dtype in zip(layout.params, layout.paths, layout.compute, strict=True):
        if leaf.kind == "sharded":
            numbered = re.match(r".*?\d+", path)
            name = numbered.group() if numbered else path
            layers[name] = layers.get(name, 0) + leaf.size * np.dtype(dtype).itemsize
    return (1 + config.prefetch) * max(layers.values(), default=0)


def sent_bytes(config: Config, layout: Layout, accumulate: int, whole: Layout) -> dict[tuple[str, ...], float]:
    """Return bytes that a device sends per step, by mesh axes.

    `whole` is the layout on the entire mesh, and `layout` is restricted to one index of the non-data axes. Over the
    axes that divide a leaf in `whole` but not in `layout` (experts), nothing of the leaf is sent.

    Reductions send the reduce type, and gathers send the compute type. Over N devices, each device sends `(N - 1) / N`
    of the logical bytes. Stages 0 and 1 reduce once and gather once. Stage 2 reduces once per microbatch. Stage 3
    gathers twice and reduces once per microbatch. In hybrid sharding, shards are also all-reduced over the remaining
    data axes, once per step. If the remaining axes divide gradients further, shards are not all-reduced over them, but
    reduce-scattered, and gathered after the update. Quantised bytes include scales and padding, summed over the axes.
    """
    data = config.data
    sent: dict[tuple[str, ...], float] = defaultdict(float)
    reduces = 1 if config.stage < 2 else accumulate
    gathers = 2 * accumulate if config.stage == 3 else 1
    if config.stage == 3 and not config.reshard_after_forward:
        gathers = accumulate
    for i, (leaf, dtype) in enumerate(zip(layout.params, layout.compute, strict=True)):
        is_trained = i in layout.trained and jnp.issubdtype(leaf.dtype, jnp.inexact)
        is_persistent = config.stage == 3 and leaf.kind != "sharded"
        if not is_trained and (config.stage < 3 or is_persistent):
            continue  # nothing moves. NumPy also has no itemsize for a PRNG key.
        divided, stay = leaf if leaf.kind == "sharded" else layout.grads[i], axes_of(whole.params[i].others)
        rest = tuple(axis for axis in data.batch if axis not in {*divided.axes, *stay})
        reduced = reduce_itemsize(config, dtype)
        # Stage 0 gathers gradients. The other stages gather parameters.
        parameter = np.dtype(dtype if leaf.kind == "sharded" else leaf.dtype).itemsize
        gathered = parameter if config.stage else reduced
        moved = [(gather_sent(config, divided, gathered), 1 if is_persistent else gathers)]
        if is_trained:
            moved.append((reduce_sent(config, divided, reduced), reduces))
            shard = leaf.size / data.size(divided.axes) * (data.size(rest) - 1) / data.size(rest)
            if leaf.further > 1:
                moved.append((reduce_sent(config, leaf.divided(data.batch), reduced), 1))
            moved.append(({rest: shard * (leaf.dtype.itemsize if leaf.further > 1 else 2 * reduced)}, 1))
        for counts, times in moved:
            for axes, count in counts.items():
                sent[axes] += count * times
    return dict(sent)


def gather_sent(config: Config, leaf: Leaf, itemsize: int) -> dict[tuple[str, ...], float]:
    """Return bytes that a device sends to gather a leaf once, by mesh axes."""
    codec = codec_of(config.wire, leaf, gathers=True)
    if codec is None:
        return {leaf.axes: leaf.size * itemsize * (leaf.shards - 1) / leaf.shards}
    shard, first = codec.bytes(math.prod(leaf.local_shape)), config.data.size(codec.over)
    plain = tuple(axis for axis in leaf.axes if axis not in codec.over)
    return {codec.over: (first - 1) * shard, plain: (leaf.shards - first) * shard}


def reduce_sent(config: Config, leaf: Leaf, itemsize: int) -> dict[tuple[str, ...], float]:
    """Return bytes that a device sends to reduce-scatter a gradient once, by mesh axes."""
    codec = codec_of(config.wire, leaf, gathers=False)
    if codec is None:
        return {leaf.axes: leaf.size * itemsize * (leaf.shards - 1) / leaf.shards}
    sent, rows, shard = {}, leaf.shards, math.prod(leaf.local_shape)
    for axis in reversed(leaf.axes):  # each hop sends only the rows that remain after the previous hop
        size = config.data.size((axis,))
        is_narrow, rows = axis in codec.over, rows // size
        sent[axis,] = (size - 1) * rows * (codec.bytes(shard) if is_narrow else shard * itemsize)
        itemsize = np.dtype(np.float32).itemsize if is_narrow else itemsize
    return sent


def reduce_itemsize(config: Config, compute: Any) -> int:
    """Return the bytes per element of a gradient, in the type in which the devices reduce the gradient."""
    if config.precision is None or not jnp.issubdtype(compute, jnp.floating):
        return np.dtype(compute).itemsize
    return np.dtype(config.precision.reduce).itemsize
