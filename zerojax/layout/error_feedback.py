"""Lay out the rounding errors of quantised gradients. Each group of devices that holds all shards has its own errors.

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
    """Return the layouts of the rounding errors for error feedback, by the path of the parameter.

    Each trained, quantised parameter whose gradient is reduced across groups of devices has one float32 array of
    errors. Its logical shape is `(groups, *parameter_shape)`. Dim 0 is sharded over the axes across groups, and the
    other dims like the parameter.
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
    """Return the spec of an array of errors, with data axes alone, for a `shard_map` over data axes."""
    return PartitionSpec(leaf.others[0], *leaf.local_spec[1:])
