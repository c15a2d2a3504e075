"""Training loops of other libraries: results are those of one device.

Each port has its loop twice: `plain` for one device, and `zero`. `docs/ports.md` counts how they differ, and says how
closely the results agree.
"""

import functools
import importlib
import re

import jax
import numpy as np
import pytest
from conftest import mesh_of
from test_ports import HERE, PAGE, changed, lines_of

# The library that a port needs.
LIBRARIES = {
    "brax_ppo": "brax",
    "haliax_gpt": "haliax",
    "dp_sgd": "jax_privacy",
    "numpyro_vae": "numpyro",
    "flowjax_fit": "flowjax",
    "blackjax_vi": "blackjax",
}
ROW = re.compile(r"^\| `(\w+)` \| .* \| (\d+) \| (\d+) \| .* \| (\S+) \|$", re.M)


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARIES)
def test_losses_and_parameters_are_those_of_one_device(name):
    """Each leaf relative to its largest element."""
    pytest.importorskip(LIBRARIES[name])
    port = importlib.import_module(name)
    within = {name: float(bound) for name, _, _, bound in ROW.findall(PAGE.read_text())}[name]
    found, expected = jax.device_get((port.zero(3, mesh_of(8)), port.plain()))
    jax.tree.map_with_path(functools.partial(assert_close, within), found, expected)


def assert_close(within, path, found, expected):
    scale = np.abs(expected).max()
    assert np.abs(found - expected).max() <= within * scale, jax.tree_util.keystr(path)


def test_the_page_counts_the_lines_of_libraries():
    found = {}
    for name, lines, differ, bound in ROW.findall(PAGE.read_text()):
        assert float(bound) <= 1e-5
        found[name] = (int(lines), int(differ))
    loops = {
        name: [lines_of((HERE / f"{name}.py").read_text(), way) for way in ("plain", "zero")] for name in LIBRARIES
    }
    assert found == {name: (len(plain), changed(plain, zero)) for name, (plain, zero) in loops.items()}
