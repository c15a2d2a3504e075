"""Warn if the analysis lost the rows of a loss, so that devices compute or reduce more than necessary.

The messages name the user's line, so Python shows each of them once.
"""

import math
import warnings
from typing import Any

from zerojax import compat
from zerojax.dims import Follower
from zerojax.dims.guess import LARGE


def warn_of_kernels(follower: Follower | None, record: list[str]) -> None:
    """Warn about kernels that every device runs on all rows. Replace the contents of `record` by the warnings."""
    record[:] = [
        f"`{eqn.primitive.name}` at {_line(eqn)} runs all rows of the batch on every device, and its operands are "
        "gathered for that: the compiler cannot divide it. Put it into a jax.shard_map over the data axes, for example "
        'jax.shard_map(kernel, mesh=mesh, in_specs=P("data"), out_specs=P("data"))'
        for eqn in ([] if follower is None else follower.undivided.values())
    ]
    for words in record:
        warnings.warn(f"{words}.", stacklevel=2)


def warn_of_gradient(shape: tuple[int, ...], eqn: Any) -> None:
    if math.prod(shape) < LARGE:
        return
    warnings.warn(
        f"The compiler all-reduces a gradient of shape {shape}, computed at {_line(eqn)}, because zerojax cannot find "
        "the rows of the batch there. If a kernel or callback computes it, put that into a jax.shard_map over the data "
        "axes. Otherwise call zerojax.rows(x, dim) on the activations that the parameter is multiplied with.",
        stacklevel=2,
    )


def _line(eqn: Any) -> str:
    return compat.line_of(eqn) or "an unknown line"
