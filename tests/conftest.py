"""Eight simulated devices for every test, set before JAX is imported."""

import importlib.metadata
import os
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
if "device_count" not in os.environ.get("XLA_FLAGS", ""):  # a process that `several` begins has its own number
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
# XLA:CPU's pool of threads: with one thread a core, two programs in flight can starve each other's collectives.
os.environ.setdefault("NPROC", "32")
# Compiling takes far longer than running here. Children of the tests inherit both.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
if importlib.metadata.version("jaxlib").startswith("0.10."):
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"  # 2 to 3 times as fast; unknown to later ones
# Of programs for absent GPUs, a quarter of the time: no configuration of a kernel is chosen. Figures do not change.
os.environ["XLA_FLAGS"] += " --xla_gpu_autotune_level=0"
# Equal programs are compiled once a process and its children: files of a cache are not written at once.
if "ZEROJAX_TESTS_CACHE" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="zerojax-tests-", ignore_cleanup_errors=True)
    os.environ["ZEROJAX_TESTS_CACHE"] = _cache.name
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(
    os.environ["ZEROJAX_TESTS_CACHE"], os.environ.get("PYTEST_XDIST_WORKER", "alone")
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import collections
import contextlib
import functools
import gc
import itertools
import math
import subprocess
import sys

import hypothesis
import jax
import pytest
from jax.sharding import AxisType

# A test has no time limit but that of pytest-timeout: on a busy machine, hypothesis' own limits fail at random.
hypothesis.settings.register_profile(
    "no_limits", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("no_limits")

gc.set_threshold(50_000, 20, 10)  # tracing makes many objects; collecting them as often as usual takes 6% of the time


def pytest_runtest_logreport(report):
    """Print a failure when it happens: a run that is ended before its summary must not hide it."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.when} of {report.nodeid} failed:\n{report.longreprtext}", file=sys.stderr, flush=True)


@functools.cache
def mesh_of(*sizes, names=None, kind=AxisType.Auto):
    """A mesh of the first devices: on one axis, over hosts and their GPUs, or on the axes of these names."""
    names = names or (("data",) if len(sizes) == 1 else ("host", "gpu"))
    devices = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes), devices=devices)


def shape(*dims, dtype="float32"):
    """An array's shape and type, without values."""
    return jax.ShapeDtypeStruct(dims, dtype)


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


# By default, a part of a grid's cases runs, and two of each slow test's. `ZEROJAX_GRIDS=all` runs every case, and
# `ZEROJAX_GRIDS=few` one of each slow test's.
ALL_CASES = os.environ.get("ZEROJAX_GRIDS") == "all"
SLOW_CASES = 1 if os.environ.get("ZEROJAX_GRIDS") == "few" else 2


def covering(cases):
    """The cases that are needed to show each value at each position, in order. `cases` gives the values of each."""
    shown = {case: {(i, repr(x)) for i, x in enumerate(values)} for case, values in cases.items()}
    missing, chosen = set().union(*shown.values()), set()
    while missing and not ALL_CASES:
        best = max(shown, key=lambda case: len(shown[case] & missing))
        chosen.add(best)
        missing -= shown[best]
    return [case for case in shown if ALL_CASES or case in chosen]


def quick_or_slow(cases, quick):
    """The cases in `quick`, and the others, or as many as show each of their values, marked slow."""
    others = covering({case: case for case in cases if case not in quick})
    return [*(pytest.param(*case) for case in quick), *(pytest.param(*case, marks=pytest.mark.slow) for case in others)]


def fraction(k, *dims):
    """The k-th part of a grid in which any two values of two dims still meet, where a third has k values or more.

    Without `ZEROJAX_GRIDS=all`, as many cases of it as show each value.
    """
    grid = itertools.product(*(enumerate(values) for values in dims))
    cases = [tuple(value for _, value in case) for case in grid if sum(i for i, _ in case) % k == 0]
    return covering({case: case for case in cases})


def pytest_collection_modifyitems(config, items):
    """Of a test that several parametrizations or fixtures make a grid, keep the cases that show each value of each.

    Of a slow test, keep at most `SLOW_CASES`. Pages of the documentation all run.
    Of a test that is marked `quick(n)`, all cases but the first n are slow.
    """
    grids = collections.defaultdict(dict)
    for item in items:
        if hasattr(item, "callspec"):
            name = item.nodeid.partition("[")[0], item.get_closest_marker("slow") is not None
            grids[name][item] = parts_of(item)
    kept = set()
    for (name, is_slow), grid in grids.items():
        cases = covering(grid)
        many = is_slow and not ALL_CASES and "house" not in name
        kept.update(cases[:: math.ceil(len(cases) / SLOW_CASES)] if many else cases)
        quick = cases[0].get_closest_marker("quick")
        for item in cases[quick.args[0] if quick and not is_slow else len(cases) :]:
            item.add_marker("slow")
    dropped = {item for grid in grids.values() for item in grid if item not in kept}
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]


def parts_of(item):
    """The values that a test's case has from each of its parametrizations and fixtures."""
    rest = dict(item.callspec.params)
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    lists = [[x.strip() for x in each.split(",")] if isinstance(each, str) else each for each in names]
    return [*([rest.pop(name) for name in each] for each in lists), *rest.values()]


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
