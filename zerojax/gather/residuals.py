"""Records that go from a segment's forward pass to its backward pass, and the stand-in for a parameter.

Segments make residuals, and `run` keeps them between the passes. The records are pytrees, because JAX treats them as
the residuals of the whole program.
"""

import dataclasses
from typing import Any

import jax


# `eq=False` compares by identity. The structure of a pytree must be hashable, but the value may be a list.
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Static:
    """A pytree without leaves. It passes a value that is known while tracing to the backward pass."""

    value: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StandIn:
    """A parameter for `gather_on_use`, and zeros that are differentiated instead of the parameter.

    JAX gives a cotangent the shape and the memory of its primal. If a gradient needs another shape or memory, zeros in
    that shape and memory are differentiated instead. No equation reads the zeros. For a shard in host memory, the zeros
    are on the device. If a gradient is reduced after the pass, the zeros may have a dim of partial sums in front.

    Attributes:
        value: The parameter in storage.
        zeros: Zeros with the gradient's shape and memory, and the parameter's type.
    """

    value: Any
    zeros: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockResiduals:
    """Residuals of a segment."""

    # The saved residuals of `Passes.run`. For a scan, a pair `(saved, carried)` of stacks of these residuals, and
    # stacks of the carry with which each iteration started. For reductions, their results.
    saved: Any
    others: Any  # inputs of the segment that are not gathered; None for an input that the backward pass does not read
    operands: Any  # values that the slices of the segment's parameters read (`ShardedParam.operands`)
    # None if the backward pass gathers the parameters again, else the list of gathered parameters. For a scan, a pair
    # `(shared, kept)` of parameters that every iteration uses, and stacks of gathered layers.
    gathered: Any
    # The `Passes` of the segment, or of one iteration of a scan. For reductions, the indices of the moving sources.
    passes: Static
