"""Make a state that the caller moved or changed usable in a step, or refuse the state."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.comm.mesh import owned, replicated, to_explicit
from zerojax.config import Config
from zerojax.layout.leaf import is_chunked, shapes_of_chunked
from zerojax.optim.mismatch import check_plan
from zerojax.placement.problems import problem_of
from zerojax.placement.storage import is_placed, to_device
from zerojax.train.state import ZeroState


def raise_unusable_state(state: Any, mutable: bool) -> None:
    """Raise the error for a state that `StepProgram.check_state` refuses. `mutable` is the step's `Loss.mutable`."""
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


def placed_again(config: Config, state: ZeroState) -> ZeroState:
    """Move a state back to the mesh, after the caller moved all arrays or only `state.step` to NumPy or other devices.

    Raises:
        ValueError: If the leaves are shapes, or an earlier step donated them. Also if the state was made for another
            mesh, or if the caller moved a state with offloaded leaves, because only `create` and `restore` can place
            offloaded chunks.
    """
    count = state.step
    if isinstance(count, jax.ShapeDtypeStruct):
        raise ValueError(f"{problem_of(None, 'state', state)} `lower` and `trace` of the step take shapes.")
    if isinstance(count, jax.Array) and count.is_deleted():
        raise ValueError(
            "An earlier step used up this state, because steps donate their state. Continue with the state that the "
            "step returned. If the step failed, restore the last checkpoint."
        )
    arrays = jax.tree.leaves((state.params, state.opt_state))
    if all(is_placed(config.mesh, x) for x in arrays):  # the caller set only the count
        return dataclasses.replace(state, step=jax.device_put(jnp.asarray(count, jnp.int32), replicated(config.mesh)))
    check_plan(config, state.plan, shapes_of_chunked(state.params))  # JAX's error would not say what differs
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
    """Copy arrays that occur in several leaves, because a step donates every leaf. Convert Python numbers to arrays."""
    seen: set[int] = set()

    def one(x):
        if is_chunked(x) and x.leaf_files is not None:  # leaves on disk share one array, the version of their files
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
