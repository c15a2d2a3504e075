"""Compute the bytes per device at a ZeRO stage, from the shards and by the paper's formula."""

from typing import Any, NamedTuple

from zerojax import ZeroTransformation

PARTS = {"params": "parameters", "grads": "gradients", "opt_state": "optimizer"}


class Memory(NamedTuple):
    """Bytes per device of each of `PARTS`, and of offloaded data in host memory or on disk."""

    found: dict[str, int]
    paper: dict[str, float]
    offloaded: int = 0


def stage_memory(tx: ZeroTransformation, shapes: Any, *, accumulate: int = 1) -> Memory:
    """Compute bytes per device from the shapes of the parameters alone."""
    plan, stage = tx.create(shapes).plan.along_others(tx.config.user_mesh.shape), tx.config.stage
    compute = plan.layout.compute

    state = list(zip(plan.state, plan.chunkings, strict=True))

    def gradient(leaf, compute_dtype) -> int:
        # Sums have the type of the master weights. At stage 1, gradients and sums over microbatches are full until they
        # are reduce-scattered.
        if stage == 1:
            return leaf.size * (compute_dtype if accumulate == 1 else leaf.dtype).itemsize
        return leaf.local_bytes

    found = {
        "params": sum(leaf.local_bytes for leaf in plan.layout.params),
        # Gradients exist only within a step, so no live array can be measured.
        "grads": sum(gradient(leaf, dtype) for leaf, dtype in zip(plan.grads, compute, strict=True)),
        "opt_state": sum(leaf.local_bytes for leaf, chunking in state if chunking is None),
    }
    count = sum(leaf.size for leaf in plan.layout.params)
    paper = paper_formula(count, stage, tx.config.data.workers, width=max(x.itemsize for x in compute))
    return Memory(found, paper, sum(leaf.local_bytes for leaf, chunking in state if chunking is not None))


def paper_formula(count: int, stage: int, devices: int, *, width: int) -> dict[str, float]:
    """Apply the formula of Rajbhandari et al. 2020, sections 3 and 5, for Adam: 16 bytes per parameter.

    Parameter, gradient and optimizer state take 4, 4 and 8 bytes in float32. In mixed precision they take 2, 2 and 12,
    because master weights are optimizer state. `width` is the bytes of a parameter in the compute type.
    """
    return {
        "params": width * count / (devices if stage >= 3 else 1),
        "grads": width * count / (devices if stage >= 2 else 1),
        "opt_state": (16 - 2 * width) * count / (devices if stage >= 1 else 1),
    }
