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
    plan, stage = tx.create(shapes).plan, tx.config.stage
    found = {
        "params": sum(leaf.local_bytes for leaf in plan.layout.params),
        # Gradients live within a step only: of them the layout is all there is to ask for.
        "grads": sum(leaf.local_bytes if stage >= 2 else leaf.bytes for leaf in plan.parts),
        "opt_state": sum(leaf.local_bytes for leaf in plan.state),
    }
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))
    return Memory(found, paper_formula(count, stage, tx.config.shards))


def paper_formula(count: int, stage: int, devices: int) -> dict[str, float]:
    """Rajbhandari et al. 2020, section 5, for float32 and Adam: 4, 4 and 8 bytes a parameter."""
    return {
        "params": 4 * count / (devices if stage >= 3 else 1),
        "grads": 4 * count / (devices if stage >= 2 else 1),
        "opt_state": 8 * count / (devices if stage >= 1 else 1),
    }
