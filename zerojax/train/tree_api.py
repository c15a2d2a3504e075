"""Gradients and updates as trees in the caller's own form: what a hand-written loop passes around.

The training step keeps small and padded leaves sharded throughout. Here a gradient must
have the structure and shapes of its parameter, or `jax.tree.map` over both (which is
what optax and Flax do) would fail; so a leaf whose parts do not form an array of the
logical shape comes back replicated.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from zerojax.comm.events import EVENTS, first_array
from zerojax.comm.explicit import auto_context, on_auto_mesh, with_types
from zerojax.comm.mesh import row_shardings
from zerojax.config import Config
from zerojax.config.precision import common_dtype
from zerojax.layout.leaf import Leaf
from zerojax.layout.new_value import NewValue
from zerojax.layout.padded import is_padded, without_padding
from zerojax.layout.tree import Layout, has_gradient, layout_of
from zerojax.offload.host import to_device
from zerojax.optim.checks import check_state, tree_difference
from zerojax.optim.plan import plan_of_layout
from zerojax.optim.returned_state import as_planned, as_returned
from zerojax.optim.state_memory import state_shardings, state_to_device, state_to_host
from zerojax.optim.update import apply_update, shard_for_update, unshard_after_update, update
from zerojax.placement.misplaced import PlacementCheck
from zerojax.placement.storage import (
    Form,
    cast,
    constrain,
    leaves_of,
    logical,
    named_tree,
    padded_forms,
    storage_leaves,
    unflatten_params,
)
from zerojax.placement.unusable import unusable_named
from zerojax.train.arguments import separated
from zerojax.train.batch import place_batch
from zerojax.train.gradients import loss_and_grads
from zerojax.train.loss import Loss
from zerojax.train.refs import refs_named
from zerojax.train.same_run import SameCalls, types_of
from zerojax.train.view import LossInputs, View

if TYPE_CHECKING:
    from jaxtyping import Array


def returned_grads(config: Config, layout: Layout, forms: Sequence[Form | bool]) -> tuple[Leaf, ...]:
    """Return how `value_and_grad` returns each gradient: sharded at stages 2 and 3 where its form allows it."""
    return tuple(
        dataclasses.replace(part if leaf.further > 1 else leaf, dtype=leaf.dtype, host=False)
        if leaf.dim is not None
        else part
        if config.stage >= 2 and part.kind == "sharded" and (part.padding == 0 or form)
        else dataclasses.replace(part, kind="replicated", dim=None)
        for leaf, part, form in zip(layout.params, layout.grads, forms, strict=True)
    )


def value_and_grad(config: Config, loss: Loss, *, accumulate: int) -> Callable:
    """Return the function that `ZeroTransformation.value_and_grad` returns."""
    refuse_error_feedback(config)
    gradient = functools.partial(value_and_grad_tree, config, loss, accumulate=accumulate)
    jitted = jax.jit(gradient, static_argnames=("layout", "forms"))
    placed, what = PlacementCheck(), f"differentiate {getattr(loss.fn, '__name__', 'a loss')}"
    same = SameCalls(config, what, (loss.has_aux, loss.weighted, loss.mutable, accumulate))

    @functools.wraps(loss.fn, assigned=("__name__", "__qualname__", "__module__"), updated=())
    def value_and_grad(params, *args, **keywords):
        state, batch, rest = separated(args, keywords, mutable=loss.mutable)
        is_new = same.is_needed and same.is_first(types_of((params, state)), batch, rest)
        layout, rows = layout_of(config, params), place_batch(config, batch, accumulate)
        placed.first([("params", params, layout.params)], config.data.batch, stacklevel=2)
        forms = padded_forms(params)
        with refs_named(config.view), unusable_named(config.mesh, params=params, state=state, batch=rows):
            if is_new:
                lower = functools.partial(jitted.lower, params, state, rows, *rest, layout=layout, forms=forms)
                same.require_same_program(lower)
            if not same.is_needed:
                return jitted(params, state, rows, *rest, layout=layout, forms=forms)
            with EVENTS.calling(what, config.mesh) as call:
                returned = jitted(params, state, rows, *rest, layout=layout, forms=forms)
                call.result = first_array(returned)
            return returned

    return value_and_grad


def refuse_error_feedback(config: Config) -> None:
    """Refuse to differentiate without a state where a step keeps errors.

    Raises:
        ValueError: If the wire has error feedback.
    """
    if config.wire is not None and config.wire.error_feedback:
        raise ValueError(
            "Wire(error_feedback=True) keeps errors from step to step, in the ZeroState of tx.train_step, and "
            "tx.value_and_grad has no state. Use train_step, or leave error_feedback out."
        )


def value_and_grad_tree(
    config: Config,
    loss: Loss,
    params: Any,
    mutable: Any,
    batch: Any,
    *args: Any,
    layout: Layout,
    forms: tuple[Form, ...],
    accumulate: int = 1,
) -> tuple[Any, Any]:
    """Return the loss's combined results, and its gradient in the form of `params`. Traced under jit."""
    parts = returned_grads(config, layout, forms)
    run = functools.partial(differentiate, config, loss, layout, forms, accumulate=accumulate)

    def shardings(returned):
        loss = row_shardings(config.mesh, config.data, returned[0], batch)
        return loss, named_tree(config, layout.treedef, parts)

    return on_auto_mesh(config.user_mesh, run, params, mutable, batch, *with_types(args), shardings=shardings)


def differentiate(
    config: Config,
    loss: Loss,
    layout: Layout,
    forms: tuple[Form, ...],
    params: Any,
    mutable: Any,
    batch: Any,
    *args: Any,
    accumulate: int = 1,
) -> tuple[Any, Any]:
    """Compute `value_and_grad_tree` on a mesh of Auto axes."""
    parts = returned_grads(config, layout, forms)
    given = storage_leaves(params, layout.params)
    stored = cast(given, [leaf.dtype for leaf in layout.params])
    trained = [parts[i] for i in layout.trained]
    view = View(config, layout, trained, loss, accumulate)
    found = loss_and_grads(view, LossInputs(stored, mutable, batch, args), scale=1.0)
    grads = dict(zip(layout.trained, found.grads, strict=True)) | dict(
        zip(layout.overwritten, found.overwritten, strict=True)
    )
    tree = grads_in_form(config, layout, forms, grads, [x.dtype for x in given])
    return loss.returned(found.loss, found.mutable, found.aux), tree


def grads_in_form(
    config: Config, layout: Layout, forms: tuple[Form, ...], grads: Mapping[int, Array], dtypes: Sequence[Any]
) -> Any:
    """Return gradients in storage shape, given by parameter index, as a tree; zeros for missing ones."""
    parts = returned_grads(config, layout, forms)
    zeros = [jnp.zeros(part.storage_shape, dtype) for part, dtype in zip(parts, dtypes, strict=True)]
    given = [grads.get(i, zero) for i, zero in enumerate(zeros)]
    arrays = [constrain(config, x.astype(zero.dtype), part) for x, zero, part in zip(given, zeros, parts, strict=True)]
    return unflatten_params(arrays, layout, parts, forms)


def update_tree(
    config: Config, layout: Layout, forms: tuple[Form, ...], grads: Any, state: Any, params: Any, extra: dict
) -> tuple[Any, Any]:
    """Return updates in the form of the parameters, and the new state. Traced under jit.

    Raises:
        ValueError: If gradients, state and parameters are not of one tree, or master
            weights are to be updated and `params` is None.
    """
    check_grads(grads, layout)
    with auto_context(config.user_mesh):
        plan = plan_of_layout(config, layout)
    state = as_planned(plan, state)
    check_state(plan, state, may_be_wider=not plan.offloaded)
    if params is None and config.has_master_weights:
        raise ValueError("With master weights update needs the parameters: update(grads, state, params).")

    def run(grads, state, params, extra):
        state = state_to_device(config, plan, state)
        extra = without_padding(extra)
        sharded = None if params is None else shard_for_update(config, plan, params)
        reduced = shard_for_update(config, plan, grads)
        if sharded is not None and config.has_master_weights:
            stored = storage_leaves(params, layout.params)
            updated, state = apply_update(config, plan, reduced, state, sharded, extra)
            new = unshard_after_update(config, plan, updated, frozen=stored)
            updates: list[Any] = [difference(a, b) for a, b in zip(new, stored, strict=True)]
        else:
            increments, state = update(config, plan, reduced, state, sharded, extra)
            pairs = zip(storage_leaves(grads, layout.params), layout.params, strict=True)
            zeros = [zeros_for(*pair) for pair in pairs]
            updates = unshard_after_update(config, plan, increments, frozen=zeros)
        values = leaves_of(grads)
        for i in layout.overwritten:
            updates[i] = NewValue(constrain(config, logical(values[i]), layout.params[i]))
        state = as_returned(config, plan, state_to_host(config, plan, state))
        return unflatten_params(updates, layout, layout.params, forms), state

    like = jax.tree.map(lambda x: jax.typeof(x).sharding, grads if params is None else params)
    shardings = lambda _: (like, as_returned(config, plan, state_shardings(config, plan)))
    return on_auto_mesh(config.user_mesh, run, grads, state, params, extra, shardings=shardings)


def zeros_for(grad: Array, leaf: Leaf) -> Array:
    """Make the update of a parameter that is not trained; in its own type if it has no gradient.

    A float32 zero would round a large integer where `optax.apply_updates` adds it.
    """
    return jnp.zeros(leaf.storage_shape, grad.dtype if has_gradient(leaf.dtype) else leaf.dtype)


def difference(new: Array, old: Array) -> Array:
    """Return the float32 difference by which `optax.apply_updates` gets exactly from `old` to `new`."""
    if new.dtype == bool:
        return jnp.zeros_like(new)
    new, old = to_device(new), to_device(old)
    wide = common_dtype(old.dtype, jnp.float32) if jnp.issubdtype(old.dtype, jnp.inexact) else old.dtype
    return new.astype(wide) - old.astype(wide)


def check_grads(grads: Any, layout: Layout) -> None:
    """Refuse gradients of another tree or shape than the parameters.

    Raises:
        ValueError: Naming the first leaf that differs, what was found and what was required.
    """
    found, structure = jax.tree_util.tree_flatten_with_path(grads, is_leaf=is_padded)
    if structure != layout.treedef:
        raise ValueError(
            f"The gradients are not of the parameters' tree: it {tree_difference(found, layout.params)}. "
            f"Pass the gradients of the parameters given."
        )
    for (_, g), leaf in zip(found, layout.params, strict=True):
        if tuple(g.shape) != leaf.shape:
            raise ValueError(
                f"grads{leaf.path} has shape {list(g.shape)}, but its parameter has {list(leaf.shape)} (logical). "
                f"Pass gradients of the parameters given."
            )
