"""The notebooks run from a clean kernel, and store what they show."""

import copy
import pathlib
import re

import nbformat
import pytest
from nbclient import NotebookClient

from zerojax.planning.topology import installed

ROOT = pathlib.Path(__file__).parents[1]
NAMES = ["01_zero_in_pictures", "02_fit_a_model"]
COMPILES = {"02_fit_a_model"} if installed() else set()  # for absent GPUs, which takes a while


def read(name):
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def shown(notebook):
    """What each cell of code shows: its text, and how many pictures."""
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    text = lambda o: o.get("text") or (o["data"]["text/plain"] if "image/png" not in o["data"] else "")
    pictures = lambda o: "image/png" in o.get("data", {})
    return [("".join(map(text, of_cell)), sum(map(pictures, of_cell))) for of_cell in outputs]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in COMPILES else ()) for n in NAMES])
def test_it_runs_from_a_clean_kernel(name, tmp_path, monkeypatch):
    """Without an error; and to the stored text and pictures where versions are those that its first cell prints."""
    for variable in ("XLA_FLAGS", "JAX_PLATFORMS", "NPROC"):  # a reader has set none of what the tests need
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    stored = read(name)
    fresh = copy.deepcopy(stored)
    NotebookClient(fresh, timeout=300, coalesce_streams=True, resources={"metadata": {"path": tmp_path}}).execute()
    before, after = shown(stored), shown(fresh)
    assert not [o for cell in fresh.cells for o in cell.get("outputs", ()) if o.get("name") == "stderr"]
    if before[0] == after[0]:
        assert after == before
    for (stored_text, stored_pictures), (text, pictures) in zip(before, after, strict=True):
        assert stored_pictures >= pictures
        assert stored_text or not text


@pytest.mark.parametrize("name", NAMES)
def test_it_stores_what_it_shows_and_nothing_else(name):
    """Outputs, in order, of a run without warnings; no trace of the machine; small."""
    notebook, path = read(name), ROOT / "notebooks" / f"{name}.ipynb"
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell, (text, pictures) in zip(cells, shown(notebook), strict=True):
        assert pictures == cell.source.count("zerojax.plot.")
        assert not re.search(r"/(home|root|tmp|usr|work)|site-packages|Warning|Error", text)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert not [cell for cell in notebook.cells if cell.metadata]
    assert path.stat().st_size < 500_000
