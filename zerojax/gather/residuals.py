"""Records that go from a segment's forward pass to its backward pass, and the stand-in for a parameter.

Segments make residuals, and `run` keeps them between the passes. They are pytrees, because JAX carries them as the
residuals of the whole program.
"""

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Static:
    """A pytree without leaves: a value known while tracing that accompanies arrays to the backward pass."""

    value: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StandIn:
    """A parameter for `gather_on_use`, and zeros that are differentiated instead of it.

    JAX gives a cotangent the shape and the memory of its primal. Where a gradient needs another shape or memory, zeros
    that have it are differentiated. No equation reads them. The zeros are on the device for a shard in host memory,
    and have one partial sum per worker for a parameter whose gradient is reduced later.

    Attributes:
        value: The parameter in storage.
        zeros: Zeros with the gradient's shape and memory, and the parameter's type.
    """

    value: Any
    zeros: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockResiduals:
    """Residuals of a block, a plain segment, or a scan over layers.

    Attributes:
        saved: Activations. For a scan: stacks of them, then stacks of the carry of each iteration.
        others: Inputs of the segment that are not gathered; None for an input that the backward pass does not read.
        operands: Values that the slices of the segment's parameters read (`ShardedParam.operands`).
        gathered: The gathered parameters, if they are kept; None if the backward pass gathers them again.
        passes: The `Passes` of the segment, or of one iteration.
    """

    saved: Any
    others: Any
    operands: Any
    gathered: Any
    passes: Static
