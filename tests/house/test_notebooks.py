"""The notebooks run from a clean kernel, and store what they show.

python tests/house/test_notebooks.py [NAME ...]    stores them anew; on the newest jax, with the extra `aot`
"""

import base64
import copy
import os
import pathlib
import re
import sys
import tempfile

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).parents[2]
NAMES = ["01_zero_in_pictures", "02_fit_a_model"]
# Pictures of the documentation: the last one that a notebook draws with a function of `notebooks/drawing.py`.
PICTURES = {"timeline": "01_zero_in_pictures", "frontier": "02_fit_a_model"}
SET_BY_TESTS = ("XLA_FLAGS", "JAX_", "NPROC")
PYTHON = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}


def path_of(name):
    return ROOT / "notebooks" / f"{name}.ipynb"


def executed(name, folder):
    """A notebook, run in a folder by a kernel that knows nothing of what the tests set, or the user of Jupyter."""
    given = {key: x for key, x in os.environ.items() if not key.startswith(SET_BY_TESTS)}
    environment = given | {"IPYTHONDIR": str(folder), "PYTHONPATH": f"{ROOT}:{ROOT / 'notebooks'}"}
    environment["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"  # compiles faster, and changes no stored figure
    notebook = copy.deepcopy(nbformat.read(path_of(name), as_version=4))
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=900, coalesce_streams=True, record_timing=False, resources=resources).execute(
        env=environment
    )
    notebook.metadata = PYTHON
    return notebook


def shown(notebook):
    """What each cell of code shows: its text, and how many pictures."""
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    pictures = lambda o: "image/png" in o.get("data", {})
    text = lambda o: "" if pictures(o) else o.get("text") or o["data"]["text/plain"]
    return [("".join(map(text, of_cell)), sum(map(pictures, of_cell))) for of_cell in outputs]


def last_picture(kind):
    """The last picture of this kind in its notebook, as a PNG."""
    cells = nbformat.read(path_of(PICTURES[kind]), as_version=4).cells
    drawn = [o for cell in cells if f"drawing.{kind}(" in cell.source for o in cell.outputs if "data" in o]
    return base64.b64decode(drawn[-1]["data"]["image/png"])


def picture_path(kind):
    return ROOT / "docs" / f"{kind}.png"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_from_a_clean_kernel(name, tmp_path):
    """Without an error or a warning; and shows what is stored, where its first cell prints the stored versions."""
    fresh = executed(name, tmp_path)
    assert not [o for cell in fresh.cells for o in cell.get("outputs", ()) if o.get("name") == "stderr"]
    before, after = shown(nbformat.read(path_of(name), as_version=4)), shown(fresh)
    if before[0] == after[0]:
        assert after == before
    for (stored_text, stored_pictures), (text, pictures) in zip(before, after, strict=True):
        assert stored_pictures >= pictures
        assert stored_text or not text


@pytest.mark.parametrize("name", NAMES)
def test_it_stores_what_it_shows_and_nothing_else(name):
    """Outputs of one run from top to bottom; no trace of the machine; small."""
    notebook = nbformat.read(path_of(name), as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell, (text, pictures) in zip(cells, shown(notebook), strict=True):
        assert pictures == cell.source.count("drawing.")
        assert not re.search(r"/(home|root|tmp|usr|work)|site-packages|Warning|Error", text)
    assert notebook.metadata == PYTHON
    assert not [cell for cell in notebook.cells if cell.metadata]
    assert path_of(name).stat().st_size < 500_000


@pytest.mark.parametrize("kind", PICTURES)
def test_pictures_of_the_documentation_are_the_notebooks(kind):
    assert picture_path(kind).read_bytes() == last_picture(kind)


if __name__ == "__main__":
    for name in sys.argv[1:] or NAMES:
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(executed(name, folder), path_of(name))
    for kind in PICTURES:
        picture_path(kind).write_bytes(last_picture(kind))
