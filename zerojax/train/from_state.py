"""Read the loss and gradient that a line search stored in the optimizer state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from zerojax.comm.explicit import auto_context, on_auto_mesh, with_types
from zerojax.comm.mesh import replicated, to_storage
from zerojax.layout.tree import Layout, layout_of
from zerojax.optim.checks import check_state
from zerojax.optim.plan import plan_of_layout
from zerojax.optim.state_forms import as_planned, seen_in, state_to_device
from zerojax.placement.storage import in_logical_shape, leaves_of, padded_forms
from zerojax.train.arguments import separated
from zerojax.train.batch import place_batch
from zerojax.train.loss import Loss
from zerojax.train.tree_api import TreeForm

if TYPE_CHECKING:
    from jaxtyping import Array


def value_and_grad_from_state(tx: Any, loss_fn: Callable) -> Callable:
    """Return a function like that of `optax.value_and_grad_from_state`, which reuses a line search's loss and gradient.

    A line search evaluates the loss at the parameters that it chooses, and stores the loss and its gradient in the
    state. The loss is differentiated anew only if the stored loss is not finite, as in the first step. Optax's own
    function fails for padded leaves, because the state has their gradients in storage shape.

    Args:
        tx: A transformation that `zero_shard` made from a line search that stores gradients, such as `optax.lbfgs()`.
        loss_fn: `loss_fn(params, batch, *args)`, as for `tx.value_and_grad`. It returns a scalar.

    Returns:
        `fn(params, batch, *args, state, **keywords) -> (loss, grads)`. `grads` has the structure of `params`.

    Raises:
        ValueError: When `fn` is called, if the state has no loss and gradient, or a parameter is overwritten.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> from zerojax import zero_shard
        >>> tx, params = zero_shard(optax.lbfgs(), stage=1), {"w": jnp.ones(2)}
        >>> loss = lambda params, x: jnp.sum((params["w"] - 3) ** 2)
        >>> gradient, evaluate, state = value_and_grad_from_state(tx, loss), tx.eval_step(loss), tx.init(params)
        >>> x = jnp.zeros((jax.device_count(), 1))
        >>> for _ in range(2):
        ...     value, grad = gradient(params, x, state=state)
        ...     extra = {"value": value, "grad": grad, "value_fn": lambda p: loss(p, x)}
        ...     updates, state = tx.update(grad, state, params, **extra)
        ...     params = optax.apply_updates(params, updates)
        >>> params["w"].round(3)
        Array([3., 3.], dtype=float32)
    """
    config, loss = tx.config, Loss(loss_fn)
    jitted = jax.jit(functools.partial(from_state, loss), static_argnames="form")

    @functools.wraps(loss_fn, assigned=("__name__", "__qualname__", "__module__"), updated=())
    def from_state_or_loss(params: Any, *args: Any, state: Any, **keywords: Any) -> tuple[Any, Any]:
        _, batch, rest = separated(args, keywords)
        form = TreeForm(config, layout_of(config, params, **seen_in(state)), padded_forms(params))
        return jitted(params, state, place_batch(config, batch, 1), *rest, form=form)

    return from_state_or_loss


def from_state(loss: Loss, params: Any, state: Any, batch: Any, *args: Any, form: TreeForm) -> tuple[Any, Any]:
    """Return the stored loss and gradient. Compute both anew if the stored loss is not finite. Traced under jit."""
    config, layout = form.config, form.layout
    with auto_context(config.user_mesh):
        plan = plan_of_layout(config, layout)
    state = as_planned(plan, state)
    check_state(plan, state, may_be_wider=not plan.offloaded)
    dtypes = [x.dtype for x in leaves_of(params)]

    def run(params: Any, state: Any, batch: Any, *args: Any) -> tuple[Any, Any]:
        state = state_to_device(config, plan, state)
        value, grads = stored_gradient(layout, state, jax.tree.unflatten(plan.state_def, plan.state))
        found = {i: to_storage(config.mesh, x, form.grads[i]) for i, x in grads.items()}

        def compute() -> tuple[Any, Any]:
            computed, tree = form.differentiate(loss, 1, params, None, batch, *args)
            return computed.astype(value.dtype), tree

        return lax.cond(jnp.isfinite(value), lambda: (value, form.gradient_tree(found, dtypes)), compute)

    shardings = lambda _: (replicated(config.mesh), form.grad_shardings)
    return on_auto_mesh(config.user_mesh, run, params, state, batch, *with_types(args), shardings=shardings)


def stored_gradient(layout: Layout, state: Any, leaves: Any) -> tuple[Array, Mapping[int, Array]]:
    """Read the loss, and the logical gradient of each parameter by index, from an optimizer state in storage.

    `leaves` is a tree of `Leaf`s with the structure of the state.
    """
    if layout.overwritten:
        raise ValueError(
            f"params{layout.params[layout.overwritten[0]].path} takes its gradient as the new value, and a line search "
            "does not store that. Use tx.value_and_grad."
        )
    value, grad = optax.tree.get(state, "value"), optax.tree.get(state, "grad")
    if value is None or grad is None:
        raise ValueError(
            "The optimizer state has no value and gradient: the transformation has no line search, or does not store "
            "them. Wrap optax.lbfgs() or optax.scale_by_backtracking_linesearch(..., store_grad=True), or "
            "use tx.value_and_grad."
        )
    pairs = zip(jax.tree.leaves(grad), jax.tree.leaves(optax.tree.get(leaves, "grad")), strict=True)
    return value, dict(zip(layout.trained, [in_logical_shape(*pair) for pair in pairs], strict=True))
