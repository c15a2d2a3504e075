"""What a training step takes and gives back: a pytree that knows its own layout."""

import dataclasses
import functools
from typing import Any

import jax

from ..stages.update import UpdatePlan


@functools.partial(jax.tree_util.register_dataclass, data_fields=["step", "params", "opt_state"], meta_fields=["plan"])
@dataclasses.dataclass(frozen=True)
class ZeroState:
    """Parameters and optimizer state of a run, in storage.

    Attributes:
        step: Number of updates done; int32 scalar.
        params: The parameters; a leaf that had to be padded is a `Padded`.
        opt_state: The wrapped transformation's own state, each leaf in storage shape.
        plan: How every leaf lies; part of the pytree's structure, not of its data.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    plan: UpdatePlan

    def replace(self, **changes) -> "ZeroState":
        """The state with some fields replaced."""
        return dataclasses.replace(self, **changes)
