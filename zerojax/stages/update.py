"""The optax update, each device doing its 1/N of it, exact for every transformation.

The update runs in global view under jit: gradients, parameters and state are logical
arrays whose layouts are pinned, and the compiler divides the work. A norm over all
parameters, a factored second moment or a Newton-Schulz iteration then sees whole
matrices, as on one device. Leaves updated element by element may lie flat.

References:
    Xu et al. 2020, arXiv 2004.13336: the sharded weight update.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import optax

from ..config import Config
from ..layout.leaf import Leaf
from ..layout.padded import is_padded
from ..layout.tree import HashedOnce, Layout, match_state, owners_of
from .elementwise import elementwise_leaves
from .storage import constrain, gather, leaves_of, rules_of, shapes, store, view, write

if TYPE_CHECKING:
    from jaxtyping import Array, PyTree, Shaped


@dataclasses.dataclass(frozen=True, eq=False)
class UpdatePlan(HashedOnce):
    """How gradients and optimizer state lie during the update.

    Attributes:
        layout: Layout of the parameters.
        parts: One `Leaf` a parameter, for its gradient and its update.
        state: One `Leaf` for each leaf of the transformation's state.
        state_def: Structure of the transformation's state: its own, unchanged.
    """

    layout: Layout
    parts: tuple[Leaf, ...]
    state: tuple[Leaf, ...]
    state_def: jax.tree_util.PyTreeDef


def plan_update(config: Config, layout: Layout) -> UpdatePlan:
    """Lay out gradients and optimizer state, flat where the transformation is elementwise."""
    rules = rules_of(config)
    params = jax.tree.unflatten(layout.treedef, shapes(layout.params))
    state = jax.eval_shape(config.tx.init, params)
    owners = owners_of(state, layout)
    flat = elementwise_leaves(config.tx, params, layout.parts, owners)
    parts = tuple(
        dataclasses.replace(part, kind="whole", reason=f"{part.reason}; its update is not elementwise")
        if part.kind == "flat" and i not in flat
        else part
        for i, part in enumerate(layout.parts)
    )
    matched = match_state(state, layout, rules, owners=owners, flat=flat)
    return UpdatePlan(layout, parts, matched, jax.tree.structure(state))


def init_state(config: Config, plan: UpdatePlan, params: Sequence[Shaped[Array, "*logical"]]) -> PyTree:
    """The transformation's initial state, laid out; logical parameters in, storage out."""
    state = config.tx.init(jax.tree.unflatten(plan.layout.treedef, params))
    leaves = [store(config, x, leaf) for x, leaf in zip(jax.tree.leaves(state), plan.state, strict=True)]
    return jax.tree.unflatten(plan.state_def, leaves)


def divide(config: Config, plan: UpdatePlan, tree: PyTree) -> list[Shaped[Array, "*storage"]]:
    """Parameters or gradients, whole or divided, `Padded` or not, laid out for the update; storage shape."""
    return [
        constrain(config, x.storage, part)
        if is_padded(x) and x.storage.shape == part.storage_shape
        else store(config, x.logical() if is_padded(x) else x, part)
        for x, part in zip(leaves_of(tree), plan.parts, strict=True)
    ]


def undivide(
    config: Config, plan: UpdatePlan, divided: Sequence[Shaped[Array, "*storage"]], forms: Sequence[bool]
) -> PyTree:
    """The inverse of `divide` for parameters or updates: gather what the stage keeps whole.

    Args:
        config: Mesh and axis.
        plan: How everything lies.
        divided: One array a parameter; storage shape of `plan.parts`.
        forms: For each leaf, whether it becomes a `Padded`.

    Returns:
        A tree of the parameters' structure.
    """
    stored = plan.layout.params
    whole = [i for i, leaf in enumerate(stored) if leaf.dim is None]
    gathered = gather(config, [divided[i] for i in whole], [plan.parts[i] for i in whole])
    arrays = dict(enumerate(divided)) | dict(zip(whole, gathered, strict=True))
    return write([arrays[i] for i in range(len(stored))], plan.layout, stored, forms)


def update(
    config: Config,
    plan: UpdatePlan,
    grads: Sequence[Shaped[Array, "*storage"]],
    state: PyTree,
    params: Sequence[Shaped[Array, "*storage"]] | None,
    extra: dict,
) -> tuple[list[Shaped[Array, "*storage"]], PyTree]:
    """One step of the wrapped transformation on divided leaves.

    Args:
        config: The wrapped transformation and its mesh.
        plan: How everything lies.
        grads: Gradients; storage shape of `plan.parts`.
        state: Optimizer state in storage.
        params: Parameters; storage shape of `plan.parts`. None if `update` was given none.
        extra: Extra keyword arguments of the transformation.

    Returns:
        `(updates, state)`: updates in storage shape of `plan.parts`.
    """
    tree = plan.layout.treedef

    def views(stored, leaves):
        return [view(x, leaf) for x, leaf in zip(stored, leaves, strict=True)]

    def keep(values, leaves):
        return [store(config, x, leaf) for x, leaf in zip(values, leaves, strict=True)]

    updates, new_state = optax.with_extra_args_support(config.tx).update(
        jax.tree.unflatten(tree, views(grads, plan.parts)),
        jax.tree.unflatten(plan.state_def, views(jax.tree.leaves(state), plan.state)),
        None if params is None else jax.tree.unflatten(tree, views(params, plan.parts)),
        **extra,
    )
    kept = keep(jax.tree.leaves(new_state), plan.state)
    return keep(jax.tree.leaves(updates), plan.parts), jax.tree.unflatten(plan.state_def, kept)


def check_state(config: Config, plan: UpdatePlan, state: PyTree) -> None:
    """Refuse a state that was not made for these parameters.

    Raises:
        ValueError: Naming the first leaf that differs, what was found and what was required.
    """
    remedy = "Make a new state with init(params), or pass the parameters, stage and mesh it was made for."
    found, structure = jax.tree_util.tree_flatten_with_path(state)
    if structure != plan.state_def:
        what = tree_difference(found, plan.state)
        raise ValueError(f"The optimizer state does not belong to these parameters: it {what}. {remedy}")
    for (_, x), leaf in zip(found, plan.state, strict=True):
        # optax turns the integer moments of an integer parameter to floats at its first update
        changed = x.dtype != leaf.dtype and jnp.issubdtype(leaf.dtype, jnp.floating)
        if tuple(x.shape) != leaf.storage_shape or changed:
            raise ValueError(
                f"The optimizer state does not belong to these parameters: opt_state{leaf.path} is "
                f"{x.dtype}{list(x.shape)}, and {leaf.dtype}{list(leaf.storage_shape)} is required (storage shape; "
                f"logical {list(leaf.shape)}, {leaf.shards} shards). {remedy}"
            )


def check_params(config: Config, plan: UpdatePlan, params: PyTree) -> None:
    """Refuse parameters that are not those a plan was made for, and a plan of another stage or mesh.

    Raises:
        ValueError: Naming what differs, what was found and what was required.
    """
    rules = rules_of(config)
    if plan.layout.rules != rules:
        made = plan.layout.rules
        raise ValueError(
            f"The state was made for stage {made.stage} on {made.shards} devices (persist_below={made.persist_below}), "
            f"and the step is for stage {rules.stage} on {rules.shards} (persist_below={rules.persist_below}). "
            f"Make it with this transformation's create(params)."
        )
    found, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_padded)
    if structure != plan.layout.treedef:
        raise ValueError(
            f"The parameters are not those the state was made with: their tree "
            f"{tree_difference(found, plan.layout.params)}. Make a new state with create(params)."
        )
    for (_, x), leaf in zip(found, plan.layout.params, strict=True):
        if tuple(x.shape) != leaf.shape or x.dtype != leaf.dtype:
            raise ValueError(
                f"params{leaf.path} is {x.dtype}{list(x.shape)}, and the state was made for {leaf.dtype}"
                f"{list(leaf.shape)} (logical). Make a new state with create(params)."
            )


def tree_difference(found: Sequence, required: Sequence[Leaf]) -> str:
    """In words, how the paths of a flattened tree differ from those required."""
    paths, wanted = [jax.tree_util.keystr(path) for path, _ in found], [leaf.path for leaf in required]
    if lacking := [path for path in wanted if path not in paths]:
        return f"lacks {lacking[0]}"
    surplus = [path for path in paths if path not in wanted]
    return f"has {surplus[0]} beyond that" if surplus else "has other nodes"
