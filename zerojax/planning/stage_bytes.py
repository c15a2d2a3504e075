"""Bytes per device and bytes sent of one stage: sums over its layouts, activations aside.

References:
    Rajbhandari et al. 2020, arXiv 1910.02054, sections 5 and 7, table 1 and figure 1.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from typing import Any

import jax.numpy as jnp
import numpy as np

from zerojax.config import Config
from zerojax.layout.leaf import Leaf
from zerojax.layout.tree import Layout
from zerojax.optim.plan import ShardingPlan
from zerojax.placement.storage import storage_forms
from zerojax.planning.estimate_table import StageEstimate
from zerojax.train.tree_api import returned_grads

HOST = "host"  # the axis of the hosts, where a topology has several


def estimate_stage(config: Config, plan: ShardingPlan, accumulate: int) -> StageEstimate:
    """Add up how one stage shards a model.

    Args:
        config: Stage, mesh and types.
        plan: How parameters, gradients and optimizer state are sharded.
        accumulate: Microbatches a step.
    """
    gathered = gathered_bytes(config, plan.layout) if config.view == "device" else None
    plan = plan.along_others(config.user_mesh.shape)
    layout = plan.layout
    grads = zip(returned_grads(config, layout, storage_forms(layout.params)), layout.params, strict=True)
    state = list(zip(plan.state, plan.chunkings, strict=True))
    on_device = [leaf for leaf, chunking in state if chunking is None]
    chunked = sum(leaf.local_bytes for leaf, chunking in state if chunking is not None)
    masters = sum(leaf.local_bytes for leaf in on_device if leaf.path.startswith(".master"))
    on_disk = config.offload is not None and config.offload.optimizer == "disk"
    host_params = sum(leaf.local_bytes for leaf in layout.params if leaf.host)
    sent = sent_bytes(config, layout, accumulate)
    return StageEstimate(
        config.stage,
        config.data.workers,
        params=sum(leaf.local_bytes for leaf in layout.params) - host_params,
        grads=sum(dataclasses.replace(grad, dtype=leaf.dtype).local_bytes for grad, leaf in grads),
        master=masters,
        opt_state=sum(leaf.local_bytes for leaf in on_device) - masters,
        gathered=gathered_bytes(config, layout) if gathered is None else gathered,
        host=host_params + (0 if on_disk else chunked),
        disk=chunked if on_disk else 0,
        sent=sum(sent.values()),
        across=sum(count for axes, count in sent.items() if HOST in axes) if HOST in config.data.batch else None,
        backward=backward_bytes(config, plan, accumulate),
        update=(1 if config.offload else 2) * sum(grad.local_bytes for grad in plan.grads),
    )


def backward_bytes(config: Config, plan: ShardingPlan, accumulate: int) -> int:
    """Gradients on a device during the backward pass.

    That of a parameter which is gathered on use is reduce-scattered at once; all others are full, in
    the compute type, until the pass ends. Stages 0 and 1 accumulate full gradients, the others shards.
    """
    total = 0
    for grad, leaf, dtype in zip(plan.grads, plan.trained.params, plan.trained.compute, strict=True):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            continue
        itemsize = np.dtype(dtype).itemsize
        total += grad.local_bytes if leaf.kind == "sharded" else leaf.size * itemsize
        if accumulate > 1:
            elements = leaf.size if config.stage < 2 else math.prod(grad.local_shape)
            total += elements * max(reduce_itemsize(config, dtype), 4)
    return total


def gathered_bytes(config: Config, layout: Layout) -> int:
    """Parameters that stage 3 gathers at a time: the largest layer, and as much for each that is prefetched.

    A layer is all leaves whose paths agree up to the first number (`blocks_3`, `layers[3]`). A
    stack of layers cannot be told from other arrays: all of it counts as one layer.
    """
    layers: dict[str, int] = {}
    for leaf, path, dtype in zip(layout.params, layout.paths, layout.compute, strict=True):
        if leaf.kind == "sharded":
            numbered = re.match(r".*?\d+", path)
            name = numbered.group() if numbered else path
            layers[name] = layers.get(name, 0) + leaf.size * np.dtype(dtype).itemsize
    return (1 + config.prefetch) * max(layers.values(), default=0)


def sent_bytes(config: Config, layout: Layout, accumulate: int) -> dict[tuple[str, ...], float]:
    """What a device sends in a step, by mesh axes: reductions in the reduce type, gathers in the compute type.

    Over N devices `(N - 1) / N` of the logical bytes for each. Stages 0 and 1 reduce once and gather once;
    stage 2 reduces every microbatch; stage 3 gathers twice and reduces, every microbatch. In hybrid sharding shards
    are all-reduced over the other axes, once; where these divide them further they are reduce-scattered over them,
    and gathered after the update.
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
            continue  # nothing moves; NumPy knows no dtype of a key
        axes = leaf.axes if leaf.kind == "sharded" else layout.grads[i].axes
        rest = tuple(axis for axis in data.batch if axis not in axes)
        shards, others = data.size(axes), data.size(rest)
        gathered, reduced = gathered_itemsize(config, leaf, dtype), is_trained * reduce_itemsize(config, dtype)
        gathered *= 1 if is_persistent else gathers
        sent[axes] += leaf.size * (reduced * reduces + gathered) * (shards - 1) / shards
        once = reduced + is_trained * leaf.dtype.itemsize if leaf.further > 1 else 2 * reduced
        sent[rest] += leaf.size / shards * once * (others - 1) / others
    return dict(sent)


def gathered_itemsize(config: Config, leaf: Leaf, compute: Any) -> int:
    """Bytes of an element that is gathered: stage 0 gathers gradients, the others parameters."""
    if config.stage == 0:
        return reduce_itemsize(config, compute)
    return np.dtype(compute if leaf.kind == "sharded" else leaf.dtype).itemsize


def reduce_itemsize(config: Config, compute: Any) -> int:
    """Bytes of an element of a gradient in the type in which it is reduced over the devices."""
    if config.precision is None or not jnp.issubdtype(compute, jnp.floating):
        return np.dtype(compute).itemsize
    return np.dtype(config.precision.reduce).itemsize
