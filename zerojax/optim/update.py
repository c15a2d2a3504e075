"""The optax update, each device doing its 1/N of it, exact for every transformation.

The update runs in global view under jit: gradients, parameters and state are logical
arrays whose layouts are pinned, and the compiler divides the work. A norm over all
parameters, a factored second moment or a Newton-Schulz iteration then sees full
matrices, as on one device. Leaves updated element by element may be flat.

References:
    Xu et al. 2020, arXiv 2004.13336: the sharded weight update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zerojax import jaxprs
from zerojax.comm.mesh import constrain, to_storage
from zerojax.config import Config
from zerojax.config.precision import common_dtype
from zerojax.layout.leaf import Leaf
from zerojax.layout.padded import is_padded
from zerojax.offload.host import is_on_host, to_device
from zerojax.optim.evaluate import evaluate
from zerojax.optim.flat_update import FlatUpdate, is_traced
from zerojax.optim.guarded import TransformationError
from zerojax.optim.owned import owned_update
from zerojax.optim.plan import ShardingPlan, partitioned_update
from zerojax.optim.traced import CONST, EXTRA, GRAD, PARAM, STATE
from zerojax.placement.storage import cast, gather, leaves_of, logical, unpadded

if TYPE_CHECKING:
    from jaxtyping import Array, PyTree, Shaped


def shard_for_update(config: Config, plan: ShardingPlan, tree: PyTree) -> list[Shaped[Array, "*storage"]]:
    """Return the trained leaves of parameters or gradients, in any form, sharded for the update, in storage shape.

    A parameter in host memory already has its gradient's sharding, and stays there.
    """
    leaves = leaves_of(tree)

    def one(x, leaf: Leaf):
        value = x.storage if is_padded(x) else x
        if value.shape == leaf.storage_shape and (is_padded(x) or is_on_host(value)):
            return value if is_on_host(value) else constrain(config.mesh, value, leaf)
        return to_storage(config.mesh, logical(x), leaf)

    return [one(leaves[i], leaf) for i, leaf in zip(plan.layout.trained, plan.grads, strict=True)]


def unshard_after_update(
    config: Config,
    plan: ShardingPlan,
    updated: Sequence[Shaped[Array, "*storage"] | None],
    frozen: Sequence[Shaped[Array, "*storage"]],
) -> list[Any]:
    """Undo `shard_for_update`: gather leaves that are replicated, or sharded over fewer axes, between steps.

    Of `frozen`, one array a parameter, those that are not trained are taken; None in `updated` makes None.
    """
    arrays = {k: x for k, x in enumerate(updated) if x is not None}
    leaves = plan.trained.params
    moved = [k for k, leaf in enumerate(leaves) if k in arrays and (leaf.dim is None or leaf.further > 1)]
    pick = lambda items: [items[k] for k in moved]
    gathered = gather(config, pick(arrays), pick(plan.grads), pick(leaves))
    arrays |= dict(zip(moved, gathered, strict=True))
    params = dict(enumerate(frozen)) | {i: arrays.get(k) for k, i in enumerate(plan.layout.trained)}
    return [params[i] for i in range(len(plan.layout.params))]


def update(
    config: Config,
    plan: ShardingPlan,
    grads: Sequence[Shaped[Array, "*storage"]],
    state: PyTree,
    params: Sequence[Shaped[Array, "*storage"]] | None,
    extra: dict,
) -> tuple[list[Shaped[Array, "*storage"]], PyTree]:
    """Run one step of the optimizer on sharded leaves.

    Gradients, parameters and updates are in storage shape of `plan.grads`. With master weights
    the updates that are returned are the new parameters. A gradient that is wider than its parameter stays so.

    Raises:
        TypeError: If wide gradients make a leaf of the state wider than it began, and it is offloaded.
    """

    def views(stored, leaves):
        return [unpadded(x, leaf) for x, leaf in zip(stored, leaves, strict=True)]

    def keep(values, leaves):
        return [to_storage(config.mesh, x, leaf) for x, leaf in zip(values, leaves, strict=True)]

    types = [part.dtype for part in plan.grads]
    wide = [common_dtype(x.dtype, dtype) for x, dtype in zip(grads, types, strict=True)]
    params = None if params is None else [to_device(x) for x in params]
    updates, new_state = logical_update(
        config,
        plan,
        views(cast(grads, wide), plan.grads),
        views(jax.tree.leaves(state), plan.state),
        None if params is None else views(cast(params, types), plan.grads),
        extra,
    )
    if wide != types and plan.offloaded:
        check_state_dtypes(new_state, plan.state)
    return keep(updates, plan.grads), jax.tree.unflatten(plan.state_def, keep(new_state, plan.state))


def logical_update(
    config: Config, plan: ShardingPlan, grads: list, state: list, params: list | None, extra: dict
) -> tuple[list[Array], list[Array]]:
    """Return `(updates, state)` of the wrapped transformation for logical arrays, with matrices computed by owners."""
    flat = FlatUpdate(config, plan.trained, plan.leaves, plan.state_def)
    # Without a report of matrices the plan could not know what owners compute, for want of arguments.
    if plan.matrices is None or plan.matrices.owned:
        trace = flat.tracer(grads, state, params, extra)
        try:
            traced = trace()
        except TransformationError:  # it needs the mesh's context, or is wrong: then it fails below, in its own words
            return flat(grads, state, params, extra)
        if found := owned_update(config, plan.leaves, traced, trace).groups:
            arrays = filter(is_traced, jax.tree.leaves(extra))
            consts = jaxprs.as_jax_values(traced.consts)
            values = [*grads, *state, *(params or ()), *arrays, *consts]
            results = evaluate(config, traced.all_equations(found), values)
            return results[: len(grads)], results[len(grads) :]
    return flat(grads, state, params, extra)


def check_state_dtypes(state: Sequence[Array], leaves: Sequence[Leaf]) -> None:
    """Refuse a state that gradients wider than their parameters have made wider than `init` made it.

    Raises:
        TypeError: Naming the first leaf that changed.
    """
    for x, leaf in zip(state, leaves, strict=True):
        if x.dtype != leaf.dtype and jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"Gradients that are wider than their parameters make opt_state{leaf.path} {x.dtype}, and init made it "
                f"{leaf.dtype}, as it is offloaded. Cast the gradients to the parameters' type, or keep both wide: "
                f"precision=Precision.bf16() has float32 master weights."
            )


def apply_update(
    config: Config,
    plan: ShardingPlan,
    grads: Sequence[Shaped[Array, "*storage"]],
    state: PyTree,
    params: Sequence[Shaped[Array, "*storage"]],
    extra: dict,
) -> tuple[list[Shaped[Array, "*storage"]], PyTree]:
    """Return the trained parameters after one step, in their stored type, and the state; see `update`."""
    params = [to_device(x) for x in params]
    updates, state = update(config, plan, grads, state, params, extra)
    moved: Any = updates if config.has_master_weights else optax.apply_updates(list(params), updates)
    return cast(moved, [leaf.dtype for leaf in plan.trained.params]), state


class Updated(NamedTuple):
    """The update of everything whose state is on the device.

    Attributes:
        params: Trained parameters that it updates, by index; storage shape of their shards.
        state: One array per leaf of the state: the new one, or the old one if a later group replaces it; None for
            offloaded leaves.
        shared: Values that the groups with offloaded state share.
        grads: Indices of the gradients that these groups read.
    """

    params: dict[int, Array]
    state: list
    shared: list
    grads: tuple[int, ...]


def resident_update(
    config: Config, plan: ShardingPlan, grads: Sequence, state: Sequence, params: Sequence, value: Array
) -> Updated:
    """Update everything whose state is on the device.

    Args:
        config: The wrapped transformation.
        plan: How everything is sharded.
        grads: One gradient per trained parameter; storage shape of its shards.
        state: One array per leaf of the state; None for offloaded leaves.
        params: The trained parameters, as their gradients.
        value: The loss.
    """
    if all(x is not None for x in state):
        tree = jax.tree.unflatten(plan.state_def, state)
        updated, tree = apply_update(config, plan, grads, tree, params, {"value": value})
        return Updated(dict(enumerate(updated)), jax.tree.leaves(tree), [], ())
    partition = partitioned_update(config, plan)
    read = {
        GRAD: lambda i: unpadded(grads[i], plan.grads[i]),
        PARAM: lambda i: unpadded(to_device(params[i]).astype(plan.grads[i].dtype), plan.grads[i]),
        STATE: lambda k: unpadded(state[k], plan.state[k]),
        EXTRA: lambda _: value.astype(jnp.float32),
        CONST: lambda i: partition.consts[i],
    }
    results = iter(evaluate(config, partition.resident, [read[kind](i) for kind, i in partition.resident.reads]))
    new_params = {i: to_storage(config.mesh, next(results), plan.grads[i]) for i in partition.resident_params}
    new_state = {k: to_storage(config.mesh, next(results), plan.state[k]) for k in partition.resident_state}
    leaves = [new_state.get(k, x) for k, x in enumerate(state)]
    return Updated(new_params, leaves, list(results), partition.grads)
