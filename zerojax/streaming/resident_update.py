"""The part of an update that needs no offloaded state: traced in the program that computes the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from zerojax.config import Config
from zerojax.offload.host import to_device
from zerojax.optim.plan import ShardingPlan, offloaded_update
from zerojax.optim.traced import CONST, EXTRA, GRAD, PARAM, STATE
from zerojax.placement.storage import to_storage, unpadded

if TYPE_CHECKING:
    from jaxtyping import Array


class ResidentUpdate(NamedTuple):
    """What `resident_update` gives.

    Attributes:
        params: Trained parameters that are updated, by index; storage shape of their shards.
        state: One array a leaf of the state: the new one, or the old where a group replaces
            it; None for one that is offloaded.
        shared: What the groups share.
        grads: Indices of the gradients that the groups read.
    """

    params: dict[int, Array]
    state: list
    shared: list
    grads: tuple[int, ...]


def resident_update(
    config: Config, plan: ShardingPlan, grads: Sequence, state: Sequence, params: Sequence, value: Array
) -> ResidentUpdate:
    """Update what depends on no offloaded state, which is None in `state`; gradients and parameters in storage."""
    partition = offloaded_update(config, plan)
    read = {
        GRAD: lambda i: unpadded(grads[i], plan.grads[i]),
        PARAM: lambda i: unpadded(to_device(params[i]).astype(plan.grads[i].dtype), plan.grads[i]),
        STATE: lambda k: unpadded(state[k], plan.state[k]),
        EXTRA: lambda _: value,
        CONST: lambda i: partition.consts[i],
    }
    results = iter(partition.resident.evaluate([read[kind](i) for kind, i in partition.resident.reads]))
    new_params = {i: to_storage(config, next(results), plan.grads[i]) for i in partition.resident_params}
    new_state = {k: to_storage(config, next(results), plan.state[k]) for k in partition.resident_state}
    leaves = [new_state.get(k, x) for k, x in enumerate(state)]
    return ResidentUpdate(new_params, leaves, list(results), partition.grads)
