"""Run the reference steps of a comparison on one device, and measure how much rounding changes their results.

A transformation that keeps gradients is chained before the optimizer, so that `compare` sees the gradients of steps.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax import compat, jaxprs
from zerojax.inspect.nonfinite import is_float
from zerojax.layout.tree import is_numeric, layout_of
from zerojax.planning.comparison import Key, Snapshot, largest, snapshot, wide
from zerojax.planning.plain_step import PlainState, PlainStep
from zerojax.train.step import Step
from zerojax.zero import ZeroTransformation

REPEATS = 3


def keeping_gradients(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return `tx` after a transformation that stores the last gradients, as the first leaves of the joint state."""

    def init(params):
        return jax.tree.map(jnp.zeros_like, params)

    def update(updates, state, params=None):
        return updates, updates

    return optax.chain(optax.GradientTransformation(init, update), tx)


class Rounding(NamedTuple):
    """The state of `rounding_gradients`.

    Each element of a gradient changes by `unit` times the gradient's largest magnitude. `key` draws the signs.
    """

    unit: Any
    key: Any


def rounding_gradients() -> optax.GradientTransformation:
    """Return a transformation that perturbs gradients as its state says. At first, `unit` is 0: no change."""

    def init(params):
        return Rounding(jnp.zeros(()), jax.random.key(0))

    def update(updates, state, params=None):
        keys = iter(jax.random.split(state.key, max(len(jax.tree.leaves(updates)), 1)))

        def moved(g):
            signs = jax.random.rademacher(next(keys), g.shape, g.real.dtype)
            return jnp.where(state.unit > 0, g + (state.unit * jnp.abs(g).max(initial=0) * signs).astype(g.dtype), g)

        return jax.tree.map(lambda g: moved(g) if is_float(g) else g, updates), state

    return optax.GradientTransformation(init, update)


@dataclasses.dataclass(frozen=True)
class Reference:
    """Training steps on one device, which begin at the state `start` and use all rows of the batch."""

    plain: PlainStep
    start: PlainState
    batch: Any
    args: tuple

    @classmethod
    def of(cls, step: Step, params: Any, mutable: Any, batch: Any, args: tuple) -> Reference:
        """Make the reference of a training step from the step's arguments, which are copied to the host."""
        program, config = step.program, step.config
        given = to_host(ZeroTransformation.of(config).unshard(params))
        tx = keeping_gradients(optax.chain(rounding_gradients(), config.tx))
        program = dataclasses.replace(program, config=dataclasses.replace(config, stage=0, offload=None, tx=tx))
        plain = PlainStep(program, layout_of(program.config, given))
        made = cls(plain, plain.init(given, to_host(mutable)), to_host(batch), to_host(args))
        try:
            jax.eval_shape(plain.value_and_grad, **made.inputs(made.start))
        except NameError:  # in device view a loss may name the mesh axes
            return dataclasses.replace(made, plain=dataclasses.replace(plain, axes=config.data.batch))
        return made

    def inputs(self, state: PlainState, worker: int | None = None) -> dict[str, Any]:
        """Return the arguments of `plain.value_and_grad`, with the rows of `worker`, or with all rows if it is None."""
        workers = self.plain.program.config.data.workers

        def share(x: Any) -> Any:
            rows = len(x) // workers
            return x if worker is None else x[worker * rows : (worker + 1) * rows]

        batch = jax.tree.map(share, self.batch)
        return {"params": state.params, "mutable": state.mutable, "batch": batch, "args": self.args}

    @functools.cached_property
    def before(self) -> Snapshot:
        return snapshot({}, None, self.start.params, None)

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

    def run(self, state: PlainState, steps: int) -> tuple[list[PlainState], list[Snapshot]]:
        states, snapshots = [], []
        for _ in range(steps):
            states.append(state)
            state, metrics = self.step(state, self.batch, self.args)
            snapshots.append(snapshot(metrics, state.opt_state[0], state.params, state.mutable))
        return states, snapshots

    def noise(self, expected: Sequence[Snapshot]) -> list[dict[Key, float]]:
        """Return how much each leaf of each step changes if rounding changes the parameters and gradients.

        The change is large if terms cancel, as in the gradient of a bias before a normalisation, or if an optimizer
        divides a gradient by its magnitude.
        """
        noise = [dict.fromkeys(found, 0.0) for found in expected]
        for seed in range(REPEATS):
            kept, (_, *others) = self.start.opt_state
            rounding = Rounding(jnp.float32(self.unit), jax.random.key(seed))
            params = jax.tree.map(self._moved(seed), self.start.params)
            start = self.start._replace(params=params, opt_state=(kept, (rounding, *others)))
            offset = {
                key: wide(x) - wide(self.before[key]) for key, x in snapshot({}, None, start.params, None).items()
            }
            for k, found in enumerate(self.run(start, len(expected))[1]):
                for key, x in found.items():
                    shift = wide(x) - wide(expected[k][key]) - offset.get(key, 0.0)
                    noise[k][key] = max(noise[k][key], largest(shift))
        return noise

    def _moved(self, seed: int) -> Any:
        random = np.random.default_rng(seed)

        def one(x: Any) -> Any:
            signs = random.choice([-1.0, 1.0], x.shape)
            return jnp.asarray((wide(np.asarray(x)) * (1 + self.unit * signs)).astype(x.dtype)) if is_float(x) else x

        return one


def to_host(tree: Any) -> Any:
    """Copy arrays to NumPy arrays, which jit puts on the default device. PRNG keys stay unchanged."""
    return jax.tree.map(lambda x: jax.device_get(x) if is_numeric(jnp.result_type(x)) else x, tree)
