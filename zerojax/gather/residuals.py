"""What the forward pass hands the backward pass."""

import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, eq=False)
class Static:
    """Something known while tracing that travels with arrays from the forward pass to the backward."""

    value: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fixed:
    """A tree without arrays, around something static."""

    static: Static = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HostShard:
    """A shard in host memory, for `gather_on_use`.

    A cotangent lies where its primal does, and the gradient of such a shard is to be on the device:
    so what is differentiated is a stand-in, which is read by nothing.

    Attributes:
        shard: This device's part.
        standin: An array of the same shape and type on the device.
    """

    shard: Any
    device_zeros: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kept:
    """What the backward pass of one segment reads.

    Attributes:
        arrays: Residuals; a plain segment keeps its backward function here.
        operands: What the slices of the segment's weights read.
        whole: Gathered parameters kept for the backward pass; empty when they are gathered again.
        passes: A block's two passes (`Passes`); for a plain segment which results and inputs
            have cotangents.
    """

    arrays: Any
    operands: Any
    whole: Any
    passes: Static = dataclasses.field(metadata={"static": True})
