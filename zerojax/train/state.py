"""What a training step takes and returns: a pytree that carries its own plan."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax

from zerojax.comm.mesh import replicated
from zerojax.config import Config
from zerojax.optim.plan import ShardingPlan
from zerojax.optim.state_memory import state_shardings
from zerojax.placement.storage import named_tree
from zerojax.train.loss_scaling import ScalingState

if TYPE_CHECKING:
    from jaxtyping import Array, Int, PyTree


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "opt_state", "scaling", "mutable"],
    meta_fields=["plan"],
)
@dataclasses.dataclass(frozen=True)
class ZeroState:
    """Parameters and optimizer state of a run, in storage.

    Attributes:
        step: Number of updates done, skipped ones not counted; int32 scalar.
        params: The parameters; a leaf that had to be padded is a `Padded`.
        opt_state: The wrapped transformation's own state, each leaf in storage shape; with
            master weights, a `MasterState` of that state and them.
        scaling: The loss scale, and what is known of skipped steps.
        mutable: What the loss function updates beside (batch statistics); None if nothing.
        plan: How every leaf is sharded; part of the pytree's structure, not of its data.
    """

    step: Int[Array, ""]
    params: PyTree
    opt_state: PyTree
    scaling: ScalingState
    mutable: PyTree
    plan: ShardingPlan

    @classmethod
    def shardings(cls, config: Config, plan: ShardingPlan) -> ZeroState:
        """A state of `NamedSharding`s; where a part is replicated, one for all of it."""
        same = replicated(config.mesh)
        params = named_tree(config, plan.layout.treedef, plan.layout.params)
        return cls(same, params, state_shardings(config, plan), same, same, plan)  # pyright: ignore[reportArgumentType]

    def reset_skips(self) -> ZeroState:
        """The state with its skipped steps forgotten, to go on after a step raised; the loss scale stays."""
        return self.replace(scaling=self.scaling.reset_skips())

    def replace(self, **changes) -> ZeroState:
        """The state with some fields replaced."""
        return dataclasses.replace(self, **changes)
