"""What a training step takes and returns: a pytree that carries its own plan."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.core

from zerojax.comm.explicit import to_explicit
from zerojax.comm.mesh import replicated
from zerojax.config import Config
from zerojax.optim.plan import ShardingPlan
from zerojax.optim.returned_state import as_planned
from zerojax.optim.state_memory import state_shardings
from zerojax.placement.storage import named, named_tree
from zerojax.train.loss_scaling import ScalingState
from zerojax.units import format_bytes

if TYPE_CHECKING:
    from jaxtyping import Array, Int, PyTree


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "opt_state", "scaling", "mutable", "rounding_errors"],
    meta_fields=["plan"],
)
@dataclasses.dataclass(frozen=True, repr=False)
class ZeroState:
    """Parameters and optimizer state of a run, in storage.

    Attributes:
        step: Number of updates done, skipped ones not counted; int32 scalar.
        params: The parameters; a leaf that had to be padded is a `Padded`.
        opt_state: The wrapped transformation's own state, each leaf in storage shape; with
            master weights, a `MasterState` of that state and them.
        scaling: The loss scale, and what is known of skipped steps.
        mutable: What the loss function updates beside (batch statistics); None if nothing.
        rounding_errors: What quantised reductions took from gradients, to be added to the next ones, by the path of a
            parameter; empty without `Wire(error_feedback=True)`.
        plan: How every leaf is sharded; part of the pytree's structure, not of its data.
    """

    step: Int[Array, ""]
    params: PyTree
    opt_state: PyTree
    scaling: ScalingState
    mutable: PyTree
    rounding_errors: dict[str, Array]
    plan: ShardingPlan

    def __repr__(self) -> str:
        """Return the stage, and for each part its leaves and logical bytes. `zerojax.report` has every leaf."""
        policy = self.plan.layout.policy
        parts = {"params": self.plan.layout.params, "opt_state": self.plan.state}
        parts |= {"rounding_errors": [leaf for _, leaf in self.plan.errors]} if self.plan.errors else {}
        rows = [
            f"  {name}: {len(leaves)} leaves, {format_bytes(sum(leaf.bytes for leaf in leaves))}"
            for name, leaves in parts.items()
        ]
        if self.mutable is not None:
            rows.append(f"  mutable: {len(jax.tree.leaves(self.mutable))} leaves")
        over = f"stage {policy.stage} over {policy.data.in_words()}, {policy.data.workers} devices"
        return "\n".join([f"ZeroState({over})", *rows])

    @classmethod
    def shardings(cls, config: Config, plan: ShardingPlan) -> ZeroState:
        """Return a state of `NamedSharding`s, with a single one for a part that is replicated."""
        same = replicated(config.mesh)
        params = named_tree(config, plan.layout.treedef, plan.layout.params)
        errors = {path: named(config, leaf) for path, leaf in plan.errors}
        return cls(same, params, state_shardings(config, plan), same, same, errors, plan)  # pyright: ignore[reportArgumentType]

    def reset_skips(self) -> ZeroState:
        """Return the state with its skipped steps forgotten, to continue after a step raised. The loss scale stays."""
        return self.replace(scaling=self.scaling.reset_skips())

    def replace(self, **changes) -> ZeroState:
        """Replace some fields; an `opt_state` may be one of `tx.init` or `tx.adopt`."""
        if "opt_state" in changes:
            changes["opt_state"] = as_planned(self.plan, changes["opt_state"])
        return dataclasses.replace(self, **changes)


def ready_state(config: Config, state: ZeroState) -> ZeroState:
    """Return the state as a step takes it: one that was moved by hand, to NumPy or another device, is placed again.

    The step's count stands for all of it, since looking at every leaf would cost time in every step.

    Raises:
        ValueError: If the state was donated to a step before; or if it was moved and some of it is offloaded: its
            chunks are placed by `create` and `restore` alone.
    """
    count = state.step
    if isinstance(count, jax.core.Tracer):
        return state
    if isinstance(count, jax.Array) and count.is_deleted():
        raise ValueError(
            "The state was used up by a step before. Go on with the one that step returned; if it failed instead, "
            "restore the last checkpoint."
        )
    if isinstance(count, jax.Array) and count.sharding.device_set == set(config.mesh.devices.flat):
        return state
    if state.plan.offloaded:
        found = f"on {count.sharding}" if isinstance(count, jax.Array) else f"a {type(count).__name__}"
        raise ValueError(
            f"state.step is {found}, not on the mesh, and some of the optimizer state is offloaded, which only "
            f"tx.create and Checkpointer.restore can place. Save and restore the state with zerojax.checkpoint."
        )
    return jax.device_put(state, to_explicit(config.user_mesh, ZeroState.shardings(config, state.plan)))
