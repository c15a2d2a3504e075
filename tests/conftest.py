"""Eight simulated devices for every test, set before JAX is imported."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
# XLA:CPU's pool of threads: with one thread a core, two programs in flight can starve each other's collectives.
os.environ.setdefault("NPROC", "32")

import contextlib
import functools
import subprocess

import jax
import pytest
from jax.sharding import AxisType


@functools.cache
def mesh_of(count):
    """A mesh of the first `count` devices on one axis."""
    return jax.make_mesh((count,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])


@pytest.fixture
def mesh():
    """All eight devices on one axis."""
    return mesh_of(8)


@contextlib.contextmanager
def mounted(path, *options):
    """Something mounted at a path, for as long as the block lasts."""
    path.mkdir(exist_ok=True)
    if subprocess.run(["mount", *options, path], check=False, capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)
