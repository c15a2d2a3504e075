"""Compute training steps on one device with plain JAX and optax, as a reference without collectives of zerojax.

`Reference` also measures how much rounding changes the results of these steps.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from zerojax import compat, jaxprs
from zerojax.comm.mesh import without_types
from zerojax.comm.typed import TypedLoss, on_one_device
from zerojax.layout.leaf import replace_items
from zerojax.layout.tree import Layout, is_numeric, layout_of
from zerojax.optim.wrapped import with_extra_args
from zerojax.placement.storage import cast
from zerojax.train.arguments import cast_inputs
from zerojax.train.gradients import unscale
from zerojax.train.loss import Returned, ScalingState, init_scaling
from zerojax.train.loss_scaling import update_scaling
from zerojax.train.nan_lines import is_float
from zerojax.train.step import Step
from zerojax.train.step_program import StepProgram
from zerojax.zero import ZeroTransformation

QUANTITIES = ("value", "gradient", "parameters", "mutable", "aux")
REPEATS = 3

Key = tuple[str, str]
Snapshot = dict[Key, np.ndarray]


class PlainState(NamedTuple):
    """The state of a run on one device, in logical shapes. Parameters have the types of the master weights."""

    params: PyTree
    opt_state: PyTree
    mutable: PyTree
    scaling: ScalingState


class Rounding(NamedTuple):
    """An imitation of rounding: add `unit` times the largest magnitude of a gradient, with signs drawn from `key`."""

    unit: Any
    key: Any

    def of(self, grads: Sequence[Array]) -> list[Array]:
        keys = jax.random.split(self.key, max(len(grads), 1))

        def moved(g, key):
            signs = jax.random.rademacher(key, g.shape, g.real.dtype)
            return jnp.where(self.unit > 0, g + (self.unit * jnp.abs(g).max(initial=0) * signs).astype(g.dtype), g)

        return [moved(g, key) if is_float(g) else g for g, key in zip(grads, keys, strict=False)]


@dataclasses.dataclass(frozen=True)
class PlainStep:
    """The computation of `program` on one device, with all rows at once."""

    program: StepProgram
    layout: Layout
    axes: tuple[str, ...] = ()  # in device view, the mesh axes that the loss may name; they are bound with size 1

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

    def step(
        self, state: PlainState, batch: PyTree, args: tuple = (), rounding: Rounding | None = None
    ) -> tuple[PlainState, dict]:
        """Return the next state and a dict with `loss`, `gradient` and `aux`. Callers jit this method.

        `rounding` perturbs the gradients that the optimizer gets, but not the gradient in the dict.
        """
        config, trained = self.program.config, self.layout.trained_only()
        scale = state.scaling.scale
        returned, grads, values = self.value_and_grad(state.params, state.mutable, batch, args, scale)
        grads = cast(unscale(grads, 1 / scale), [leaf.dtype for leaf in trained.grads])
        loss = returned.total / returned.weight
        aux = returned.aux if self.program.loss.has_aux else None
        metrics = {"loss": loss, "gradient": trained.treedef.unflatten(grads), "aux": aux}
        given = trained.treedef.unflatten(grads if rounding is None else rounding.of(grads))
        params = self._trained(state.params)
        updates, opt_state = with_extra_args(config.tx).update(given, state.opt_state, params, value=loss)
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


@dataclasses.dataclass(frozen=True)
class Reference:
    """Training steps on one device, which begin at the state `start` and use all rows of the batch."""

    plain: PlainStep
    start: PlainState
    batch: Any
    args: tuple

    @classmethod
    def of(cls, step: Step, params: Any, mutable: Any, batch: Any, args: tuple) -> "Reference":
        """Make the reference of a training step from the step's arguments, which are copied to the host."""
        program, config = step.program, step.config
        given = to_host(ZeroTransformation.of(config).unshard(params))
        program = dataclasses.replace(program, config=dataclasses.replace(config, stage=0, offload=None))
        axes = config.data.batch if config.view == "device" else ()
        plain = PlainStep(program, layout_of(program.config, given), axes)
        return cls(plain, plain.init(given, to_host(mutable)), to_host(batch), to_host(args))

    def inputs(self, state: PlainState, worker: int | None = None) -> dict[str, Any]:
        """Return the arguments of `plain.value_and_grad`, with the rows of `worker` (None: with all rows)."""
        workers = self.plain.program.config.data.workers

        batch = self.batch
        if worker is not None:
            batch = jax.tree.map(lambda x: x.reshape(workers, len(x) // workers, *x.shape[1:])[worker], batch)
        return {"params": state.params, "mutable": state.mutable, "batch": batch, "args": self.args}

    @functools.cached_property
    def before(self) -> Snapshot:
        return snapshot(parameters=self.start.params)

    @functools.cached_property
    def unit(self) -> float:
        """Return the machine epsilon of the narrowest floating type in the gradient's computation."""
        closed = jax.make_jaxpr(lambda given: self.plain.value_and_grad(**given))(self.inputs(self.start))
        results = (var.aval for eqn in jaxprs.equations(compat.opened(closed)[0]) for var in eqn.outvars)
        dtypes = {aval.dtype for aval in results if hasattr(aval, "dtype")}
        floats = {dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)}
        return max((float(jnp.finfo(dtype).eps) for dtype in floats), default=0.0)

    @functools.cached_property
    def step(self) -> Any:
        return jax.jit(self.plain.step)

    def run(
        self, state: PlainState, steps: int, *, unit: float = 0.0, seed: int = 0
    ) -> tuple[list[PlainState], list[Snapshot]]:
        """Return the state before each step, and each step's results. `unit` and `seed` perturb as in `Rounding`."""
        states, snapshots, rounding = [], [], Rounding(jnp.float32(unit), jax.random.key(seed))
        for _ in range(steps):
            states.append(state)
            state, found = self.step(state, self.batch, self.args, rounding)
            results = {"value": found["loss"], "gradient": found["gradient"], "aux": found["aux"]}
            snapshots.append(snapshot(parameters=state.params, mutable=state.mutable, **results))
        return states, snapshots

    def noise(self, expected: Sequence[Snapshot]) -> list[dict[Key, float]]:
        """Return how much each leaf of each step changes if rounding changes the parameters and gradients.

        The change is large if terms cancel, as in the gradient of a bias before a normalisation, or if an optimizer
        divides a gradient by its magnitude.
        """
        noise = [dict.fromkeys(found, 0.0) for found in expected]
        for seed in range(REPEATS):
            random = np.random.default_rng(seed)
            params = jax.tree.map(functools.partial(self._moved, random), self.start.params)
            moved = snapshot(parameters=params)
            offset = {key: wide(x) - wide(self.before[key]) for key, x in moved.items()}
            start = self.start._replace(params=params)
            for k, found in enumerate(self.run(start, len(expected), unit=self.unit, seed=seed)[1]):
                for key, x in found.items():
                    shift = wide(x) - wide(expected[k][key]) - offset.get(key, 0.0)
                    noise[k][key] = max(noise[k][key], largest(shift))
        return noise

    def _moved(self, random: np.random.Generator, x: Any) -> Any:
        if not is_float(x):
            return x
        signs = random.choice([-1.0, 1.0], x.shape)
        return jnp.asarray((wide(np.asarray(x)) * (1 + self.unit * signs)).astype(x.dtype))


def to_host(tree: Any) -> Any:
    """Copy arrays to NumPy arrays, which jit puts on the default device. PRNG keys stay unchanged."""
    return jax.tree.map(lambda x: jax.device_get(x) if is_numeric(jnp.result_type(x)) else x, tree)


def snapshot(**trees: Any) -> Snapshot:
    """Copy results to the host. `trees` has a tree for each quantity, by the quantity's name in `QUANTITIES`."""
    return {
        (quantity, jax.tree_util.keystr(path)): np.asarray(jax.device_get(x))
        for quantity in QUANTITIES
        for path, x in jax.tree_util.tree_flatten_with_path(trees.get(quantity))[0]
        if is_numeric(jnp.result_type(x))
    }


def largest(x: np.ndarray) -> float:
    size = np.abs(wide(x))
    return float(np.max(size, initial=0.0, where=np.isfinite(size)))


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
