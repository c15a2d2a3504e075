"""Train with plain optax on one device, and compare sharded training with it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from conftest import mesh_of

from zerojax.config import Config
from zerojax.layout.tree import layout_of
from zerojax.planning.reference import PlainStep
from zerojax.train.loss import Loss
from zerojax.train.step_program import StepOptions, StepProgram
from zerojax.zero import ZeroTransformation


def train_plain(tx: optax.GradientTransformation, loss_fn: Callable, params: Any, batches: Sequence[Any]) -> Any:
    """Train with optax alone on one device. Return the parameters after the last step, and the losses."""
    config = Config(tx, 0, mesh_of(1))
    program = StepProgram(config, StepOptions(), Loss(loss_fn))
    plain = PlainStep(program, layout_of(config, params))
    state, step, losses = plain.init(params), jax.jit(plain.step), []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state.params, losses


def assert_parity(
    tx: ZeroTransformation,
    loss_fn: Callable,
    params: Any,
    batches: Sequence[Any],
    *,
    atol: float = 2e-6,
    reference: tuple[Any, list[float]] | None = None,
    **options: Any,
) -> None:
    """Train with `tx` and with plain optax, and compare losses and parameters, up to `atol` of the largest value.

    `options` are those of the sharded `train_step`.
    """
    expected, losses = reference or train_plain(tx.config.tx, loss_fn, params, batches)
    state, step = tx.create(params), tx.train_step(loss_fn, **options)
    for batch, loss in zip(batches, losses, strict=True):
        state, metrics = step(state, batch)
        np.testing.assert_allclose(float(metrics["loss"]), loss, rtol=1e-5, err_msg="loss")
    found = jax.tree_util.tree_flatten_with_path(jax.device_get(tx.unshard(state.params)))[0]
    for (path, x), y in zip(found, jax.tree.leaves(jax.device_get(expected)), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), jax.tree_util.keystr(path)
        if x.size:
            scale = max(1.0, float(np.max(np.abs(y))))
            wide = np.complex128 if np.iscomplexobj(x) else np.float64
            worst = float(np.max(np.abs(x.astype(wide) - y.astype(wide))))
            allowed = atol * scale
            assert worst <= allowed, f"{jax.tree_util.keystr(path)} is off by {worst:.2g}; {allowed:.2g} allowed"
