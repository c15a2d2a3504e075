"""Compute a training step on one device with plain JAX and optax, as a reference without collectives of zerojax."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zerojax.comm.explicit import without_types
from zerojax.layout.leaf import replace_items
from zerojax.layout.tree import Layout
from zerojax.optim.transformation import with_extra_args
from zerojax.placement.storage import cast
from zerojax.train.batch import cast_inputs
from zerojax.train.loss import Returned
from zerojax.train.loss_scaling import ScalingState, init_scaling, unscale, update_scaling
from zerojax.train.step_program import StepProgram
from zerojax.train.typed_loss import TypedLoss, on_one_device

if TYPE_CHECKING:
    from jaxtyping import Array, Float, PyTree


class PlainState(NamedTuple):
    """The state of a run on one device, in logical shapes. Parameters have the types of the master weights."""

    params: PyTree
    opt_state: PyTree
    mutable: PyTree
    scaling: ScalingState


@dataclasses.dataclass(frozen=True)
class PlainStep:
    """The computation of `program` on one device, with all rows at once.

    `axes` has the names of the mesh axes that the loss uses. These axes are bound with size 1.
    """

    program: StepProgram
    layout: Layout
    axes: tuple[str, ...] = ()

    def init(self, params: PyTree, mutable: PyTree = None) -> PlainState:
        leaves = [jnp.asarray(x) for x in jax.tree.leaves(params)]
        params = self.layout.treedef.unflatten(cast(leaves, [leaf.dtype for leaf in self.layout.grads]))
        scaling = init_scaling(self.program.config.precision, len(self.layout.trained))
        return PlainState(params, self.program.config.tx.init(self._trained(params)), mutable, scaling)

    def value_and_grad(
        self, params: PyTree, mutable: PyTree, batch: PyTree, args: tuple, scale: Float[Array, ""] | float = 1.0
    ) -> tuple[Returned, list[Array], list[Array]]:
        """Return the loss's results, `scale` times its gradient, and the new values of overwritten parameters.

        The gradient has one array per trained parameter.
        """
        leaves = jax.tree.leaves(params)
        chosen = (*self.layout.trained, *self.layout.overwritten)

        def objective(values):
            seen = cast(replace_items(leaves, chosen, values), self.layout.compute)
            inputs = cast_inputs(self.program.config.precision, batch)
            returned = self._call(self.layout.treedef.unflatten(seen), mutable, inputs, args)
            return scale * returned.total / jax.lax.stop_gradient(returned.weight), returned

        grads, returned = jax.grad(objective, has_aux=True)([leaves[i] for i in chosen])
        count = len(self.layout.trained)
        return returned, grads[:count], grads[count:]

    def step(self, state: PlainState, batch: PyTree, args: tuple = ()) -> tuple[PlainState, dict]:
        """Return the next state and a dict with `loss` and, if the loss returns aux, `aux`. Callers jit this method."""
        config, trained = self.program.config, self.layout.trained_only()
        scale = state.scaling.scale
        returned, grads, values = self.value_and_grad(state.params, state.mutable, batch, args, scale)
        grads = cast(unscale(grads, 1 / scale), [leaf.dtype for leaf in trained.grads])
        loss = returned.total / returned.weight
        metrics = {"loss": loss, **({"aux": returned.aux} if self.program.loss.has_aux else {})}
        tree, params = trained.treedef.unflatten(grads), self._trained(state.params)
        tx = with_extra_args(config.tx)
        updates, opt_state = tx.update(tree, state.opt_state, params, value=loss)
        updated = jax.tree.leaves(optax.apply_updates(params, updates))
        leaves = replace_items(jax.tree.leaves(state.params), self.layout.trained, updated)
        params = self.layout.treedef.unflatten(replace_items(leaves, self.layout.overwritten, values))
        new = PlainState(params, opt_state, returned.mutable, state.scaling)
        if not self.program.skips_nonfinite:
            return new, metrics
        finite = jnp.stack([jnp.isfinite(jnp.sum(jnp.square(jnp.abs(g).astype(jnp.float32)))) for g in grads])
        scaling = update_scaling(state.scaling, config.precision, finite=finite, weights_valid=jnp.array(True))
        selected = jax.tree.map(lambda x, old: jnp.where(finite.all(), x, old), new, state)
        return selected._replace(scaling=scaling), metrics

    def _call(self, *args: Any) -> Returned:
        """Call the loss with `axes` bound to size 1, so that a collective over these axes returns its operand."""
        fn = TypedLoss(on_one_device(self.program.config), self.layout, self.program.loss).call
        for axis in self.axes:
            fn = jax.vmap(fn, in_axes=None, axis_name=axis, axis_size=1)  # pyright: ignore[reportArgumentType]
        first = (0,) * len(self.axes)
        return jax.tree.map(lambda x: x[first] if first else x, without_types(fn(*args)))

    def _trained(self, params: PyTree) -> Any:
        leaves = jax.tree.leaves(params)
        return self.layout.trained_only().treedef.unflatten([leaves[i] for i in self.layout.trained])
