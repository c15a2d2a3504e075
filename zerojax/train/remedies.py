"""What JAX says of a loss that cannot run as it is, with the remedy that zerojax has for it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

DIVIDED_ALREADY = (
    "The loss function divides rows over a mesh axis (with_sharding_constraint, shard_map, or the types of an Explicit "
    "mesh), and in device view its "
    'rows are divided already. Pass view="global" to zero_shard, where it sees them all.'
)
# (view of the loss, words of JAX's, cause and remedy); without a view, in both.
REMEDIES = [
    (
        "global",
        r"unbound axis name",
        "The loss function names a mesh axis, as in lax.psum or lax.axis_index, and in global view it is on no device "
        'of its own. Drop the collective: sums are over all rows already. Or pass view="device" to zero_shard, or put '
        "the collective into a jax.shard_map.",
    ),
    (
        "device",
        r"only refer to Auto axes|[Cc]ontext mesh .*Manual.* should match the mesh|of type: AxisType.Manual",
        DIVIDED_ALREADY,
    ),
    (
        "",
        r"passed to \w+ cannot contain axis names that are of type Auto",
        "The loss function names the types of arrays (jax.sharding.reshard, out_sharding=), which takes Explicit axes, "
        "and the axes of the mesh are Auto. Use jax.lax.with_sharding_constraint, or give zero_shard a mesh with "
        "Explicit axes.",
    ),
    (
        "",
        r"Closing over inputs to shard_map|should match the aval mesh",
        "The loss function closes over an array of an Explicit mesh, and inside of it arrays are on another. Pass the "
        "array as a further argument of the loss, or close over a NumPy array.",
    ),
]


@contextlib.contextmanager
def remedies(view: str) -> Iterator[None]:
    """Add the remedy to what JAX raises while a loss is traced.

    Raises:
        ValueError: In place of JAX's error.
    """
    try:
        yield
    except (NameError, NotImplementedError, ValueError) as error:
        for only, words, remedy in REMEDIES:
            if only in ("", view) and re.search(words, str(error)):
                raise ValueError(remedy) from error
        raise
