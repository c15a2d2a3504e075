"""Bytes per device at a ZeRO stage: found, and by the paper's formula."""

import math
from typing import Any, NamedTuple

import jax

from zerojax import ZeroTransformation

PARTS = {"params": "parameters", "grads": "gradients", "opt_state": "optimizer"}


class Memory(NamedTuple):
    """Bytes per device of each of `PARTS`."""

    found: dict[str, int]
    paper: dict[str, float]


def stage_memory(tx: ZeroTransformation, shapes: Any) -> Memory:
    """What each device would hold, laid out from the parameters' shapes alone."""
    state = tx.create(shapes)
    # Gradients live within a step only: of them the layout is all there is to ask for.
    grads = jax.tree.map(
        lambda sharding, stored: sum(local_bytes(x.shape, x.dtype, sharding) for x in jax.tree.leaves(stored)),
        tx.shardings(shapes).grads,
        state.params,
    )
    found = {
        part: sum(local_bytes(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(getattr(state, part)))
        for part in ("params", "opt_state")
    }
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))
    return Memory(
        found | {"grads": sum(jax.tree.leaves(grads))}, paper_formula(count, tx.config.stage, tx.config.shards)
    )


def paper_formula(count: int, stage: int, devices: int) -> dict[str, float]:
    """Rajbhandari et al. 2020, section 5, for float32 and Adam: 4, 4 and 8 bytes a parameter."""
    return {
        "params": 4 * count / (devices if stage >= 3 else 1),
        "grads": 4 * count / (devices if stage >= 2 else 1),
        "opt_state": 8 * count / (devices if stage >= 1 else 1),
    }


def local_bytes(shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding) -> int:
    """Bytes of one device's part of an array."""
    return math.prod(sharding.shard_shape(shape)) * dtype.itemsize
