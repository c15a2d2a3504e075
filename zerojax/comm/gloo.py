"""Avoid the reduce-scatter between CPU processes of jaxlib before 0.12, whose sums may be wrong.

The algorithm comes from the library Gloo. It sends from a buffer, and then writes its own result to the buffer's start,
without waiting until the buffer has been sent. So if a process sends more slowly than it receives, another process adds
a part of that result instead of gradients, without any error. Chunks from 2 MiB on were wrong between two hosts of
which one has a slower link. Gloo's other collectives wait until their buffers have been sent. After
`jax.distributed.initialize`, JAX uses Gloo also between the CPU devices of one process.
"""

from collections.abc import Sequence

import jax
import jaxlib.version
from jax import Array, lax

REPAIRED = (0, 12)  # the first jaxlib with another algorithm


def psum_scatter(x: Array, axes: str | Sequence[str], *, scatter_dimension: int, tiled: bool = False) -> Array:
    """Call `lax.psum_scatter`. Where its sums may be wrong, send the same bytes by an all-to-all, and then sum."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    on_cpus = device is not None and device.platform == "cpu" and jax.distributed.is_initialized()
    if not on_cpus or jaxlib.version.__version_info__ >= REPAIRED:
        return lax.psum_scatter(x, axes, scatter_dimension=scatter_dimension, tiled=tiled)
    dim, count = scatter_dimension, lax.axis_size(axes)
    arrived = lax.all_to_all(x, axes, dim, dim, tiled=True)
    stacked = arrived.reshape(*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :])
    summed = stacked.sum(dim, dtype=x.dtype)
    return summed if tiled else summed.squeeze(dim)
