"""Simulate devices in tests, and compare any optimizer with plain optax.

`simulate_devices` must run before JAX makes its first array, so import this module and call the function at the top of
a `conftest.py`.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType

from zerojax.config import Config
from zerojax.layout.tree import layout_of
from zerojax.planning.plain_step import PlainStep
from zerojax.train.loss import Loss
from zerojax.train.step_program import StepOptions, StepProgram
from zerojax.zero import ZeroTransformation


def simulate_devices(count: int) -> None:
    """Run on `count` simulated CPU devices.

    Args:
        count: How many devices `jax.devices()` returns afterwards; at least 1.

    Raises:
        RuntimeError: If JAX has already started with another number of devices.
    """
    flag = f"--xla_force_host_platform_device_count={count}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")
    if jax.device_count() != count:
        raise RuntimeError(
            f"Cannot simulate {count} devices: JAX has already begun with {jax.device_count()}. Call simulate_devices "
            f"before the first array is made, or set XLA_FLAGS={flag}."
        )


def train_plain(tx: optax.GradientTransformation, loss_fn: Callable, params: Any, batches: Sequence[Any]) -> Any:
    """Train with optax alone on one device, as the reference for sharded training.

    Args:
        tx: The transformation.
        loss_fn: `loss_fn(params, batch)`, a mean over the rows.
        params: Logical parameters. Integers and booleans are not trained.
        batches: One global batch per step.

    Returns:
        The parameters after the last step, and the loss of each step.
    """
    config = Config(tx, 0, jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1]))
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
    accumulate: int = 1,
    atol: float = 2e-6,
    reference: tuple[Any, list[float]] | None = None,
) -> None:
    """Train with `tx` and with plain optax, and compare losses and parameters.

    Args:
        tx: The result of `zero_shard`.
        loss_fn: `loss_fn(params, batch)`, a mean over the rows.
        params: Logical parameters.
        batches: One global batch per step.
        accumulate: The number of microbatches into which each device divides its rows.
        atol: Largest allowed difference, relative to the largest magnitude in the leaf or to 1, whichever is larger.
            The default is a few units of float32 rounding, because several devices add numbers in another order.
        reference: The result of `train_plain`, if you have it already.

    Raises:
        AssertionError: If the results differ. The error names the first leaf that differs, and the difference.
    """
    expected, losses = reference or train_plain(tx.config.tx, loss_fn, params, batches)
    state, step = tx.create(params), tx.train_step(loss_fn, accumulate=accumulate)
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
