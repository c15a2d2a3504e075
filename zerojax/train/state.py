"""The state of a run, which a training step takes and returns. It is a pytree that contains its sharding plan."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp

from zerojax.comm.explicit import to_explicit
from zerojax.comm.mesh import owned, replicated
from zerojax.config import Config
from zerojax.layout.chunked import is_chunked
from zerojax.offload.host import to_device
from zerojax.optim.plan import ShardingPlan
from zerojax.optim.state_forms import as_planned, state_shardings
from zerojax.placement.storage import named_tree
from zerojax.placement.unusable import problem_of
from zerojax.train.loss_scaling import ScalingState
from zerojax.units import format_bytes

if TYPE_CHECKING:
    from jaxtyping import Array, Int, PyTree


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "opt_state", "scaling", "mutable"],
    meta_fields=["plan"],
)
@dataclasses.dataclass(frozen=True, repr=False)
class ZeroState:
    """The state of a run, with parameters and optimizer state in storage.

    Attributes:
        step: Number of updates done, without skipped steps; int32 scalar.
        params: The parameters. A leaf that is padded in storage is a `Padded`.
        opt_state: The state of the wrapped transformation, in storage. With master weights, a `MasterState` that
            contains this state and the weights.
        scaling: The loss scale, and the record of skipped steps.
        mutable: The state that the loss function updates, such as batch statistics; None without `mutable=True`.
        plan: How every leaf is sharded. It belongs to the structure of the pytree and is not a leaf.

    Examples:
        >>> state = tx.create(params)
        >>> state, metrics = step(state, batch)
        >>> state.params, int(state.step)
    """

    step: Int[Array, ""]
    params: PyTree
    opt_state: PyTree
    scaling: ScalingState
    mutable: PyTree
    plan: ShardingPlan

    def __repr__(self) -> str:
        """Return the stage, and the number and size of each field's leaves. `zerojax.report` lists the leaves."""
        policy = self.plan.layout.policy
        parts = {"params": self.plan.layout.params, "opt_state": self.plan.state}
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
        """Return a `ZeroState` of `NamedSharding`s. A field with only replicated leaves has one sharding for all."""
        same = replicated(config.mesh)
        params = named_tree(config, plan.layout.treedef, plan.layout.params)
        return cls(same, params, state_shardings(config, plan), same, same, plan)  # pyright: ignore[reportArgumentType]

    def reset_skips(self) -> ZeroState:
        """Return a copy without the record of skipped steps, to continue after an error. Keep the loss scale."""
        return self.replace(scaling=self.scaling.reset_skips())

    def replace(self, **changes: Any) -> ZeroState:
        """Return a copy with some fields replaced.

        Args:
            **changes: New values of fields. `opt_state` may also be a state that `tx.init` or `tx.adopt` returned.
        """
        if "opt_state" in changes:
            changes["opt_state"] = as_planned(self.plan, changes["opt_state"])
        return dataclasses.replace(self, **changes)


def ready_state(config: Config, state: ZeroState) -> ZeroState:
    """Return `state` on the mesh. If the caller moved `state` to NumPy or to another device, move it back.

    Only `state.step` is inspected, because inspecting every leaf would take time in every step.

    Raises:
        ValueError: If the state has shapes, or an earlier step used it up. Also if the caller moved a state with
            offloaded leaves, because only `create` and `restore` can place offloaded chunks.
    """
    count = state.step
    if isinstance(count, jax.core.Tracer):
        return state
    if isinstance(count, jax.ShapeDtypeStruct):
        raise ValueError(f"{problem_of(None, 'state', state)} `lower` and `trace` of the step take shapes.")
    if isinstance(count, jax.Array) and count.is_deleted():
        raise ValueError(
            "An earlier step used up this state, because steps donate their state. Continue with the state that the "
            "step returned. If the step failed, restore the last checkpoint."
        )
    is_placed = lambda x: isinstance(x, jax.Array) and x.sharding.device_set == set(config.mesh.devices.flat)
    if is_placed(count):
        return state
    if all(map(is_placed, jax.tree.leaves((state.params, state.opt_state)))):  # the caller set only the count
        return dataclasses.replace(state, step=jax.device_put(jnp.asarray(count, jnp.int32), replicated(config.mesh)))
    if state.plan.offloaded:
        found = f"on {count.sharding}" if isinstance(count, jax.Array) else f"a {type(count).__name__}"
        raise ValueError(
            f"state.step is {found}, not on the mesh. Part of the optimizer state is offloaded, and only tx.create and "
            f"Checkpointer.restore can place it. Save and restore the state with zerojax.checkpoint."
        )
    return jax.device_put(
        jax.tree.map(owned, state), to_explicit(config.user_mesh, ZeroState.shardings(config, state.plan))
    )


def donatable(state: ZeroState) -> ZeroState:
    """Copy arrays that are several leaves of a state, because a step donates every leaf. Make arrays of numbers."""
    leaves = jax.tree.leaves(state)
    if len(set(map(id, leaves))) == len(leaves) and not any(isinstance(x, int | float) for x in leaves):
        return state
    seen: set[int] = set()

    def one(x):
        if is_chunked(x) and x.store is not None:  # leaves on disk share the version of their files
            return x
        if is_chunked(x):
            return jax.tree.map(one, x)
        if not isinstance(x, jax.Array):
            return jnp.asarray(x) if isinstance(x, int | float) else x
        if id(x) in seen:
            return jax.device_put(to_device(x).copy(), x.sharding)
        seen.add(id(x))
        return x

    return jax.tree.map(one, state, is_leaf=is_chunked)


def check_is_state(state: Any, mutable: bool) -> None:
    """Raise an error if `state` is no state of a step whose loss has mutable state or not, as `mutable` says."""
    if not isinstance(state, ZeroState):
        raise TypeError(
            f"The step takes a ZeroState, not {type(state).__name__}. Make one with tx.create(params), or use "
            f"tx.value_and_grad and tx.update in a hand-written loop."
        )
    if mutable and state.mutable is None:
        raise ValueError(
            "The loss function updates a mutable state, and this ZeroState has none. Give the initial one: "
            "tx.create(params, mutable=...)."
        )
    if not mutable and state.mutable is not None:
        raise ValueError(
            "The state has a mutable state, which this step would not update. Pass mutable=True to train_step, or "
            "make the state without it."
        )
