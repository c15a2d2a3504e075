"""Where the errors of quantised gradients are kept: one partial sum per group of devices that holds all shards.

References:
    Karimireddy et al. 2019, arXiv 1901.09847, algorithm 2.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jax.sharding import PartitionSpec

from zerojax.config.data_mesh import spec_entry
from zerojax.layout.leaf import Leaf
from zerojax.layout.tree import Layout


def error_leaves(layout: Layout) -> dict[str, Leaf]:
    """Return where error feedback keeps what rounding took from the gradients of a step, in float32.

    Args:
        layout: Of all parameters; each says whether it is quantised.

    Returns:
        By the path of a parameter, for those whose gradients are reduced across: `(groups, *logical)`, sharded as
        the parameter is, its dim 0 over the axes across.
    """
    return {
        layout.paths[i]: error_leaf(leaf, layout.policy.data.batch, layout.paths[i])
        for i, leaf in enumerate(layout.params)
        if i in layout.trained and leaf.is_quantised and leaf.further > 1
    }


def error_leaf(leaf: Leaf, batch: tuple[str, ...], path: str) -> Leaf:
    """Return where the error of one parameter's gradient is kept. Gradients are summed over the axes `batch`."""
    across = tuple(axis for axis in batch if axis not in leaf.axes)
    assert leaf.dim is not None
    return dataclasses.replace(
        leaf,
        path=f"[{path!r}]",
        shape=(leaf.further, *leaf.shape),
        dtype=np.dtype(np.float32),
        dim=leaf.dim + 1,
        others=(spec_entry(across), *leaf.others),
        host=False,
        is_quantised=False,
        unquantised="",
    )


def summand_spec(leaf: Leaf) -> PartitionSpec:
    """Return the part of an error's spec that names data axes, as `shard_map` over them needs it."""
    return PartitionSpec(leaf.others[0], *leaf.local_spec[1:])
