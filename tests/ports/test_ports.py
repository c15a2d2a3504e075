"""Whole loops of published programs, written anew: on a mesh their losses are those of one device.

Each port has its loop twice: `plain`, for one device, and `zero`; `docs/ports.md` counts how they differ.
"""

import ast
import difflib
import functools
import importlib
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import several
from conftest import mesh_of

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "ports.md"
# The library that a port needs; those of the second table use its training loop.
PORTS = {
    "mnist": "flax",
    "imagenet": "flax",
    "gemma": "flax",
    "equinox_gpt": "equinox",
    "cookbook": "jax",
    "haiku_net": "haiku",
    "brax_ppo": "brax",
    "haliax_gpt": "haliax",
    "dp_sgd": "jax_privacy",
    "numpyro_vae": "numpyro",
    "flowjax_fit": "flowjax",
    "blackjax_vi": "blackjax",
}


def on_page():
    """`[lines, changed lines]` and the largest difference of each port; None where the page's text says it of all."""
    found = {}
    for name, rest in re.findall(r"^\| `(\w+)` \|(.*)\|$", PAGE.read_text(), re.M):
        cells = [cell.strip() for cell in rest.split("|")]
        bound = re.fullmatch(r"\d+e-\d+", cells[-1])
        found[name] = [int(cell) for cell in cells if cell.isdigit()], float(bound[0]) if bound else None
    return found


def port_of(name):
    """Skipped where its library is not installed."""
    pytest.importorskip(PORTS[name])
    return importlib.import_module(name)


@functools.cache
def plain(name):
    return jax.device_get(port_of(name).plain())


def assert_close(found, expected, within=1e-5):
    """Each leaf relative to its largest element. Sums are taken in another order."""

    def same(path, found, expected):
        assert np.abs(found - expected).max() <= within * np.abs(expected).max(), jax.tree_util.keystr(path)

    jax.tree.map_with_path(same, jax.device_get(found), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PORTS][:6])
def test_losses_and_metrics_are_those_of_one_device(name):
    assert_close(port_of(name).zero(3), plain(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PORTS][6:])
def test_losses_and_parameters_of_libraries_are_those_of_one_device(name):
    assert_close(port_of(name).zero(3), plain(name), on_page()[name][1])


@pytest.mark.slow
def test_on_a_mesh_of_one():
    assert_close(port_of("mnist").zero(3, mesh_of(1)), plain("mnist"))


@pytest.mark.slow
def test_what_the_loops_leave_out_is_on_a_mesh_as_on_one_device():
    assert_close(importlib.import_module("everyday").zero(3, mesh_of(8)), of_everyday())


@functools.cache
def of_everyday():
    return jax.device_get(importlib.import_module("everyday").zero(0, mesh_of(1)))


def print_losses(*names):
    assert jax.device_count() == 8
    for name in names:
        history = importlib.import_module(name).zero(3)
        print(json.dumps({name: [float(x) for x in jax.tree.leaves(history)]}), flush=True)


@pytest.mark.slow
def test_on_two_processes():
    """A loop, and that of every day, on four devices of each."""
    names = ["mnist", "everyday"]
    for out in several.run(print_losses, *names, devices=4):
        found = {name: history for line in several.printed(out) for name, history in line.items()}
        assert [*found] == names
        for name, history in found.items():
            expected = of_everyday() if name == "everyday" else plain(name)
            assert_close(history, [float(x) for x in jax.tree.leaves(expected)])


def lines_of(source, name):
    """Of a function's body."""
    function = next(f for f in ast.parse(source).body if isinstance(f, ast.FunctionDef) and f.name == name)
    lines = source.splitlines()[function.body[0].lineno - 1 : function.end_lineno]
    return [line for line in lines if line.strip()]


def changed(old, new):
    """How many lines of the one had to be changed, added or dropped for the other."""
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return sum(max(b - a, d - c) for kind, a, b, c, d in blocks if kind != "equal")


def test_the_page_counts_the_lines():
    found = on_page()
    assert [*found] == [*PORTS]
    for name, (counts, bound) in found.items():
        source = (HERE / f"{name}.py").read_text()
        plain, zero = (lines_of(source, way) for way in ("plain", "zero"))
        assert counts == [len(plain), changed(plain, zero)], name
        assert bound is None or bound <= 1e-5
    changes = {zero for (_, zero), bound in found.values() if bound is None}
    assert f"{min(changes)} to {max(changes)} lines changed" in (PAGE.parents[1] / "README.md").read_text()
