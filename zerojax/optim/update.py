"""Make the optimizer's state, and run the update. Each of N devices does 1/N of the work.

The result is exact for every transformation, because the update runs in global view under `jit`. Gradients, parameters
and state are logical arrays with fixed layouts, and the compiler divides the work. So a norm over all parameters, a
factored second moment or a Newton-Schulz iteration sees full matrices, as on one device. A leaf that is updated element
by element may be stored flat. Owners (a device, or a few) may compute the part of an update that needs a full matrix.

References:
    Xu et al. 2020, arXiv 2004.13336: the sharded weight update.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree, Shaped

from zerojax import names
from zerojax.comm.collectives import UPDATE
from zerojax.comm.mesh import constrain, to_storage
from zerojax.compat import common_dtype
from zerojax.config import Config
from zerojax.layout.leaf import Leaf, is_padded, replace_items
from zerojax.optim.sharding_plan import ShardingPlan, state_shardings
from zerojax.optim.wrapped import new_params, wrapped_tx
from zerojax.placement.storage import cast, gather, is_on_host, leaves_of, logical_array, to_device, unpadded


def init_state(config: Config, plan: ShardingPlan, stored: Sequence[Shaped[Array, "*storage"]]) -> PyTree:
    """Make the first state in one program, sharded as `plan` says. The device holds all state at once."""

    def init(stored):
        state = first_leaves(config, plan, [to_device(x) for x in stored])
        leaves = [to_storage(config.mesh, x, leaf) for x, leaf in zip(state, plan.state, strict=True)]
        return state_to_host(config, plan, jax.tree.unflatten(plan.state_def, leaves))

    return jax.jit(init, out_shardings=state_shardings(config, plan))(list(stored))


def first_leaves(config: Config, plan: ShardingPlan, stored: Sequence[Shaped[Array, "*storage"]]) -> list:
    """Return the leaves of the wrapped transformation's first state, without padding. Call this under `jax.jit`."""
    layout = plan.layout
    params = [unpadded(stored[i], layout.params[i]) for i in layout.trained]
    wide = cast(params, [leaf.dtype for leaf in plan.grads])
    return jax.tree.leaves(wrapped_tx(config, plan.trained).init(jax.tree.unflatten(plan.trained.treedef, wide)))


def state_to_device(config: Config, plan: ShardingPlan, state: PyTree) -> PyTree:
    """Return the state with the chunks of all offloaded leaves copied to the device and joined.

    Only `tx.update`, and a step inside another program, need all state at once. Any other step streams the state chunk
    by chunk (`streaming/stream.py`).
    """
    if not plan.offloaded:
        return state
    from zerojax.optim.returned_state import all_on_device

    return all_on_device(config, plan, state)


def state_to_host(config: Config, plan: ShardingPlan, state: PyTree) -> PyTree:
    """Undo `state_to_device`."""
    if not plan.offloaded:
        return state
    from zerojax.optim.returned_state import all_on_host

    return all_on_host(config, plan, state)


def check_state(plan: ShardingPlan, state: PyTree, *, may_be_wider: bool = False) -> None:
    """Raise a `ValueError` unless `state` is as the plan says; see `mismatch.check_leaves_of_state`."""
    leaves, structure = jax.tree.flatten(state)
    is_planned = lambda x, leaf: (x.shape, x.dtype) == (leaf.storage_shape, leaf.dtype)
    if plan.offloaded or structure != plan.state_def or not all(map(is_planned, leaves, plan.state)):
        from zerojax.optim.mismatch import check_leaves_of_state

        check_leaves_of_state(plan, state, may_be_wider=may_be_wider)


def check_params(config: Config, plan: ShardingPlan, params: PyTree) -> None:
    """Raise a `ValueError` unless the plan was made for these parameters and for the configuration of the step."""
    leaves, structure = jax.tree.flatten(params, is_leaf=is_padded)
    is_planned = lambda x, leaf: (tuple(x.shape), x.dtype) == (leaf.shape, leaf.dtype)
    fit = structure == plan.layout.treedef and all(map(is_planned, leaves, plan.layout.params))
    if not fit or config.plans.get(plan.layout) != plan:
        from zerojax.optim.mismatch import check_plan

        check_plan(config, plan, params)


@jax.named_scope(names.SHARDS)
def shard_for_update(config: Config, plan: ShardingPlan, tree: PyTree) -> list[Shaped[Array, "*storage"]]:
    """Shard the trained leaves of a tree of parameters or gradients for the update. Return them in storage shape.

    The tree may be in logical or storage form. A parameter in host memory already has the sharding of its gradient, and
    stays in host memory.
    """

    def one(x, leaf: Leaf):
        value = x.storage if is_padded(x) else x
        if value.shape != leaf.storage_shape:
            return to_storage(config.mesh, logical_array(x), leaf)
        return value if is_on_host(value) else constrain(config.mesh, value, leaf)

    leaves = leaves_of(tree)
    return [one(leaves[i], leaf) for i, leaf in zip(plan.layout.trained, plan.grads, strict=True)]


@jax.named_scope(names.SHARDS)
def unshard_after_update(
    config: Config,
    plan: ShardingPlan,
    updated: Sequence[Shaped[Array, "*storage"] | None],
    frozen: Sequence[Shaped[Array, "*storage"]],
) -> list[Any]:
    """Undo `shard_for_update`: gather each parameter that is stored replicated, or sharded over fewer mesh axes.

    `updated` has one array, or None, per trained parameter. `frozen` has one array per parameter. Return a copy of
    `frozen` in which the elements of `updated` replace the trained parameters.
    """
    arrays = {k: x for k, x in enumerate(updated) if x is not None}
    leaves = plan.trained.params
    moved = [k for k in arrays if leaves[k].dim is None or leaves[k].further > 1]
    pick = lambda items: [items[k] for k in moved]
    arrays |= dict(zip(moved, gather(config, pick(arrays), pick(plan.grads), pick(leaves)), strict=True))
    return replace_items(frozen, plan.layout.trained, map(arrays.get, range(len(leaves))))


def update_shards(
    config: Config,
    plan: ShardingPlan,
    grads: Sequence[Shaped[Array, "*storage"]],
    state: PyTree,
    params: Sequence[Shaped[Array, "*storage"]] | None,
    extra: dict,
    *,
    applies: bool = False,
) -> tuple[list[Shaped[Array, "*storage"]], PyTree]:
    """Run one step of the optimizer on sharded leaves, and return `(updates, state)`.

    Gradients, parameters and updates have the storage shapes of `plan.grads`. With `applies`, the new parameters in
    their stored types are returned instead of updates. A gradient that is wider than its parameter stays wide.

    Raises:
        TypeError: If state is offloaded, and wide gradients make a leaf of the state wider than `init` made it.
    """
    views = lambda stored, leaves: list(map(unpadded, stored, leaves))
    keep = lambda values, leaves: [to_storage(config.mesh, x, leaf) for x, leaf in zip(values, leaves, strict=True)]
    types = [part.dtype for part in plan.grads]
    wide = [common_dtype(x.dtype, dtype) for x, dtype in zip(grads, types, strict=True)]
    run: Callable = plan.update(config, applies=False)  # `new_params` applies the updates below, in storage
    params = None if params is None else [to_device(x) for x in params]
    if plan.may_have_owners:
        from zerojax.optim.equations import update_by_owners

        run = functools.partial(update_by_owners, run)
    results, new_state = run(
        views(cast(grads, wide), plan.grads),
        views(jax.tree.leaves(state), plan.state),
        None if params is None else views(cast(params, types), plan.grads),
        extra,
    )
    if wide != types and plan.offloaded:
        from zerojax.optim.mismatch import check_state_dtypes

        check_state_dtypes(new_state, plan.state)
    results = keep(results, plan.grads)
    if applies:  # after `keep`, in storage shape: otherwise XLA would pad a wide and a narrow copy of each parameter
        results = new_params(config, plan.trained, results, params)
    return results, jax.tree.unflatten(plan.state_def, keep(new_state, plan.state))


@jax.named_scope(UPDATE)
def roll_back(ok: Bool[Array, ""], new: PyTree, old: PyTree) -> PyTree:
    """Return the arrays of `new` if `ok` is true, and otherwise the arrays of `old`, bit for bit."""
    return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)


class ResidentResults(NamedTuple):
    """The result of an update's first group, which needs no offloaded state.

    Attributes:
        params: The trained parameters that the group updates, by index. They are sharded like their gradients.
        state: One array per leaf of the state: the new array, or the old array if another group replaces this leaf.
            None for offloaded leaves.
        shared: The shared values, which the other groups read.
        grads: The indices of the gradients that the other groups read.
    """

    params: dict[int, Array]
    state: list
    shared: list
    grads: tuple[int, ...]


class StreamedInputs(NamedTuple):
    """The results of a step's first program that the streamed update reads."""

    params: list  # one array per parameter, as stored; None for the parameters in `pending`
    # the parameters that the groups will update, by index among the trained parameters, sharded like their gradients
    pending: dict[int, Array]
    state: list  # one array per leaf of the state; None for offloaded leaves
    grads: dict[int, Array]  # the gradients that the groups read, by index, in storage shape
    shared: list  # the shared values, which several groups may read
    skipped: Bool[Array, ""] | None  # whether the step is skipped; None if steps are never skipped


def resident_update(
    config: Config, plan: ShardingPlan, grads: Sequence, state: Sequence, params: Sequence, value: Array
) -> ResidentResults:
    """Compute the first group of the update, which needs no offloaded state. `value` is the loss.

    `grads` and `params` have the storage shapes and shardings of `plan.grads`. `state` has None for offloaded leaves.
    """
    if any(x is None for x in state):
        from zerojax.optim.equations import update_first_group

        return ResidentResults(*update_first_group(config, plan, grads, state, params, value))
    tree = jax.tree.unflatten(plan.state_def, state)
    updated, tree = update_shards(config, plan, grads, tree, params, {"value": value}, applies=True)
    return ResidentResults(dict(enumerate(updated)), jax.tree.leaves(tree), [], ())
