"""Simulate devices in tests.

`simulate_devices` must run before JAX makes its first array, so import this module and call the function at the top of
a `conftest.py`. `zerojax.compare` compares a step with plain JAX and optax on one device.
"""

import os

import jax


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
