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
class StandIn:
    """A parameter, and zeros that are differentiated instead, for `gather_on_use`.

    A cotangent has the shape and the memory of its primal. Where a gradient needs another shape or
    memory, zeros that have it stand in, and nothing reads them: on the device for a shard in host memory, and with one
    partial sum per worker for a parameter whose gradient is reduced later.

    Attributes:
        value: The parameter in storage.
        zeros: Of the shape and in the memory of the gradient, in the parameter's type.
    """

    value: Any
    zeros: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NestedResiduals:
    """Residuals of a loop that runs a program of its own in each iteration.

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
