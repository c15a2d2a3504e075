"""What the forward pass hands the backward pass."""

import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, eq=False)
class Static:
    """Something known while tracing that goes with arrays from the forward pass to the backward."""

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

    A cotangent is in the memory of its primal, and the gradient of such a shard is to be on
    the device: so what is differentiated is an array of zeros, which nothing reads.

    Attributes:
        shard: This device's shard.
        device_zeros: An array of the same shape and type on the device.
    """

    shard: Any
    device_zeros: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PlainResiduals:
    """Residuals of a segment that uses no sharded parameter.

    Attributes:
        pull: Its backward function.
        active: Which results and which inputs have cotangents.
    """

    pull: Any
    active: Static = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockResiduals:
    """Residuals of a segment that gathers parameters.

    Attributes:
        saved: Activations; of a scan stacks of them, and after them the carry of each iteration.
        others: Inputs of the segment, None for those that the backward pass does not read.
        operands: What the slices of the segment's parameters read.
        gathered: Gathered parameters that are kept; None if they are gathered again.
        passes: The two passes (`Passes`).
    """

    saved: Any
    others: Any
    operands: Any
    gathered: Any
    passes: Static = dataclasses.field(metadata={"static": True})
