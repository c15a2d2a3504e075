"""Lay out the rounding errors of quantised gradients: one partial sum per group of devices that holds all shards.

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
    """Return the layout of the errors that error feedback keeps, in float32, by the path of the parameter.

    There is one error array per quantised parameter whose gradient is reduced across groups of devices. Its logical
    shape is `(groups, *parameter's)`. It is sharded like the parameter, and dim 0 over the axes across groups.
    """
    found = {}
    for i, leaf in enumerate(layout.params):
        if i in layout.trained and leaf.is_quantised and leaf.further > 1:
            assert leaf.dim is not None
            across = tuple(axis for axis in layout.policy.data.batch if axis not in leaf.axes)
            found[layout.paths[i]] = dataclasses.replace(
                leaf,
                path=f"[{layout.paths[i]!r}]",
                shape=(leaf.further, *leaf.shape),
                dtype=np.dtype(np.float32),
                dim=leaf.dim + 1,
                others=(spec_entry(across), *leaf.others),
                host=False,
                is_quantised=False,
                unquantised="",
            )
    return found


def summand_spec(leaf: Leaf) -> PartitionSpec:
    """Return the part of an error's spec that names data axes, for `shard_map` over these axes."""
    return PartitionSpec(leaf.others[0], *leaf.local_spec[1:])
