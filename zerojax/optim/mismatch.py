"""Check that a state, and the sharding plan with which it was made, fit a step. Errors explain the difference."""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from zerojax import compat
from zerojax.compat import common_dtype
from zerojax.config import Config, LayoutPolicy
from zerojax.layout.leaf import Leaf, is_chunked, is_padded
from zerojax.layout.tree import Layout, layout_of
from zerojax.optim.sharding_plan import ShardingPlan
from zerojax.optim.wrapped import wrapped_tx
from zerojax.placement.problems import tree_difference
from zerojax.placement.storage import shapes


def check_leaves_of_state(plan: ShardingPlan, state: PyTree, *, may_be_wider: bool) -> None:
    """Raise a `ValueError` for the first leaf of `state` that differs from the plan.

    With `may_be_wider`, a float leaf may have a wider type than `init` gave it. An update returns such a state if the
    gradients are wider than the parameters.
    """
    remedy = "Make a new state with init(params), or pass the parameters, stage and mesh it was made for."
    found, structure = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_chunked)
    if structure != plan.state_def:
        what = tree_difference(found, plan.state)
        raise ValueError(f"The optimizer state does not belong to these parameters: it {what}. {remedy}")
    for (_, x), leaf, chunking in zip(found, plan.state, plan.chunkings, strict=True):
        if (x.chunking if is_chunked(x) else None) != chunking:
            where = f"offloaded in {len(x.chunking.extents)} chunks" if is_chunked(x) else "on the device"
            wanted = f"offloaded in {len(chunking.extents)} chunks" if chunking else "on the device"
            raise ValueError(f"opt_state{leaf.path} is {where}, and this transformation has it {wanted}. {remedy}")
        changed = x.dtype != leaf.dtype and jnp.issubdtype(leaf.dtype, jnp.floating)
        changed = changed and not (may_be_wider and common_dtype(x.dtype, leaf.dtype) == x.dtype)
        if changed and tuple(x.shape) == leaf.storage_shape:
            raise ValueError(
                f"opt_state{leaf.path} is {x.dtype}, and init made it {leaf.dtype}. If an update returned this state, "
                f"the transformation changes the type of its state, as optax.inject_hyperparams does for parameters of "
                f"several types. Give all parameters one type, or let the transformation keep it, as mu_dtype= of "
                f"optax.adamw does."
            )
        if tuple(x.shape) != leaf.storage_shape:
            raise ValueError(
                f"The optimizer state does not belong to these parameters: opt_state{leaf.path} is "
                f"{x.dtype}{list(x.shape)}, and {leaf.dtype}{list(leaf.storage_shape)} is required (storage shape; "
                f"logical {list(leaf.shape)}, {leaf.shards} shards). {remedy}"
            )


def check_state_dtypes(state: Sequence[Array], leaves: Sequence[Leaf]) -> None:
    """Raise a `TypeError` for the first state leaf whose float type is not the type that `init` gave it."""
    for x, leaf in zip(state, leaves, strict=True):
        if x.dtype != leaf.dtype and jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"Gradients that are wider than their parameters make opt_state{leaf.path} {x.dtype}, and init made it "
                f"{leaf.dtype}. The type of an offloaded leaf cannot change. Cast the gradients to the parameters' "
                f"type, or keep both wide: precision=Precision.bf16() has float32 master weights."
            )


def check_plan(config: Config, plan: ShardingPlan, params: PyTree) -> None:
    """Raise a `ValueError` unless the plan was made for these parameters and for the configuration of the step."""
    policy = config.layout_policy
    if plan.layout.policy != policy:
        made = plan.layout.policy
        raise ValueError(
            f"The state was made for {policy_in_words(made)}, and the step is for {policy_in_words(policy)}. "
            f"Make it with this transformation's create(params), or move a live state with reshard(state, to=tx) of "
            f"the transformation that made it."
        )
    found, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_padded)
    if structure != plan.layout.treedef:
        raise ValueError(
            f"The state was not made with these parameters: their tree "
            f"{tree_difference(found, plan.layout.params)}. Make a new state with create(params)."
        )
    for (_, x), leaf in zip(found, plan.layout.params, strict=True):
        if tuple(x.shape) == leaf.shape and x.dtype != leaf.dtype:
            raise ValueError(
                f"params{leaf.path} is {x.dtype}, and the state was made for {leaf.dtype}. Cast new values to the type "
                f"of the state: x.astype({leaf.dtype}). To begin from {x.dtype} weights without rounding, give them to "
                f"create(params, opt_state=tx.unshard(state.opt_state))."
            )
        if tuple(x.shape) != leaf.shape:
            raise ValueError(
                f"params{leaf.path} is {x.dtype}{list(x.shape)}, and the state was made for {leaf.dtype}"
                f"{list(leaf.shape)} (logical). Make a new state with create(params)."
            )
    for found, required in zip(roles(layout_of(config, params)), roles(plan.layout), strict=True):
        if found != required:
            raise ValueError(
                f"The state was made with another precision= or trainable= than the step: {required}, and the step "
                f"needs {found}. Make a new state with this transformation's create(params)."
            )
    trained = plan.trained
    init = wrapped_tx(config, trained).init
    state = compat.eval_shape(init, jax.tree.unflatten(trained.treedef, shapes(trained.grads)))
    if jax.tree.structure(state) != plan.state_def:
        found = jax.tree_util.tree_flatten_with_path(state)[0]
        raise ValueError(
            f"The state was made with another transformation than the step's, whose state "
            f"{tree_difference(found, plan.state)}. Make a new state with this transformation's create(params)."
        )


def policy_in_words(policy: LayoutPolicy) -> str:
    """Describe a layout policy for an error message."""
    further = ", parameters in the compute type" * (policy.stage == 3 and policy.stores_compute_dtype)
    further += ", parameters on the host" * policy.params_on_host + ", state=Narrow(...)" * policy.encodes_state
    data = policy.data
    return (
        f"stage {policy.stage} on {data.workers} devices over {data.in_words()} of a mesh {dict(data.sizes)} "
        f"(persist_below={policy.persist_below}{further})"
    )


def roles(layout: Layout) -> Iterator[str]:
    """Yield a text per parameter that says whether it is trained, the type of its gradient, and its compute type."""
    for i, (part, compute) in enumerate(zip(layout.grads, layout.compute, strict=True)):
        yield f"params{part.path} {layout.why_not_trained(i) or 'trained'}, {part.dtype} computed in {compute}"
