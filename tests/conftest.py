"""Eight simulated devices for every test, set before JAX is imported."""

import importlib.metadata
import os
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
# XLA:CPU's pool of threads: with one thread a core, two programs in flight can starve each other's collectives.
os.environ.setdefault("NPROC", "32")
# Compiling takes far longer than running here. Children of the tests inherit both.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
if importlib.metadata.version("jaxlib").startswith("0.10."):
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"  # 2 to 3 times as fast; unknown to later ones
# Equal programs are compiled once a process and its children: files of a cache are not written at once.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="zerojax-tests-", ignore_cleanup_errors=True)
    os.environ["ZEROJAX_TESTS_CACHE"] = _cache.name
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(
    os.environ["ZEROJAX_TESTS_CACHE"], os.environ.get("PYTEST_XDIST_WORKER", "alone")
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import contextlib
import functools
import itertools
import pathlib
import subprocess
import sys

import jax
import pytest
from jax.sharding import AxisType

HELPERS = pathlib.Path(__file__).parent / "helpers"  # modules that several folders import, and children that they run


def pytest_runtest_logreport(report):
    """Print a failure when it happens: a run that is ended before its summary must not hide it."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.when} of {report.nodeid} failed:\n{report.longreprtext}", file=sys.stderr, flush=True)


@functools.cache
def mesh_of(count):
    """A mesh of the first `count` devices on one axis."""
    return jax.make_mesh((count,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])


@pytest.fixture
def mesh():
    """All eight devices on one axis."""
    return mesh_of(8)


@pytest.fixture
def optimized():
    """Compile as a user does: for tests that read what the GPU's compiler makes of a program."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def quick_or_slow(cases, quick):
    """The cases in `quick`, and the others, marked slow. Of a grid of two dims or more, half of the others.

    Of two neighbours one is taken, the first and the second in the order of Thue and Morse: so no value of a product
    is left out. With `ZEROJAX_GRIDS=all`, all are taken.
    """
    others = [case for case in dict.fromkeys(cases) if case not in quick]
    if os.environ.get("ZEROJAX_GRIDS") != "all" and any(len(case) > 1 for case in others):
        others = [case for i, case in enumerate(others) if i.bit_count() % 2 == 0]
    return [*(pytest.param(*case) for case in quick), *(pytest.param(*case, marks=pytest.mark.slow) for case in others)]


def fraction(k, *dims):
    """The k-th part of a grid in which any two values of two dims still meet, where a third has k values or more."""
    grid = itertools.product(*(enumerate(values) for values in dims))
    return [tuple(value for _, value in case) for case in grid if sum(i for i, _ in case) % k == 0]


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
