"""What is released says the same of itself everywhere, and what it says of the version before is so."""

import functools
import re
import tomllib
from pathlib import Path

import flax.linen
import jax
import jax.numpy as jnp
import optax
import pytest
import typer.main
import yaml
from absent_gpus import aot
from command_line import run

import zerojax
import zerojax.checkpoint
import zerojax.data
import zerojax.flax_nnx
import zerojax.offload
from zerojax.cli import app

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# For those who work on the library, or a part of other extras; README names the rest.
FOR_CONTRIBUTORS = {"dev", "docs", "outside", "peers", "plot", "ports", "reference", "release"}
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]
STEPS = [step for job in WORKFLOW.values() for step in job["steps"]]


def test_one_version_everywhere():
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert newest is not None
    assert cited is not None
    assert newest[1] == cited[1] == PROJECT["version"]
    assert run("--version").output.strip() == zerojax.__version__


def test_the_readme_names_the_extras():
    named = set(re.findall(r"\[(\w+)\](?!\()", (ROOT / "README.md").read_text().partition("## Install")[2]))
    assert named == set(PROJECT["optional-dependencies"]) - FOR_CONTRIBUTORS


def test_the_license_is_the_one_cited():
    assert f"license: {PROJECT['license']}" in (ROOT / "CITATION.cff").read_text()


def test_the_workflow_runs_the_make_targets_of_the_full_run():
    runs = {step["run"] for step in STEPS if "run" in step}
    full = re.findall(r"^ *(make [a-z]+)", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert runs == {*full}
    made = re.findall(r"^([a-z]+):.* ## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {run.removeprefix("make ") for run in runs} <= {*made}
    assert "`make test` runs the tests" in (ROOT / "README.md").read_text()


def test_actions_are_pinned_by_major_version():
    used = [step["uses"] for step in STEPS if "uses" in step]
    assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", action) for action in used)
    assert len({action.partition("@")[0] for action in used}) == len({*used})  # one version of each


def test_the_workflow_covers_the_pythons_that_are_supported():
    supported = [x.rpartition(" ")[2] for x in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", x)]
    assert PROJECT["requires-python"] == f">={supported[0]}"
    assert WORKFLOW["wheel"]["strategy"]["matrix"]["python"] == supported
    assert WORKFLOW["test"]["strategy"]["matrix"]["python"] == [supported[0], supported[-1]]


def test_the_next_internals_of_jax_are_tested_by_files_that_exist():
    lists = re.findall(r"tests/gather/test_%\.py,([\w\s\\]+)\)", (ROOT / "Makefile").read_text())
    names = [name for found in lists for name in found.replace("\\", "").split()]
    assert len(lists) == 2
    assert all((ROOT / f"tests/gather/test_{name}.py").is_file() for name in names)


CHANGES = re.findall(r"^\| (`.*) \| (.*) \|$", (ROOT / "docs/upgrade.md").read_text(), re.MULTILINE)
COMMANDS = typer.main.get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
MADE = {
    "tx": "zerojax.zero_shard(optax.adamw(1e-3), stage=3)",
    "state": "tx.create(params)",
    "step": "tx.train_step(loss_fn)",
    "plan": "zerojax.plan(step, state, batch)",
    "check": "zerojax.check(step, state, batch)",
    "report": "zerojax.report(state)",
    "leaf": "report.rows[0]",
    "estimate": "zerojax.estimate(params)",
    "row": "estimate.rows[-1]",
    "fit": "tx.train_step(loss_fn, memory='1 GB').memory_fit(state, batch)",
    "mesh": "jax.make_mesh((1, 8), ('host', 'gpu'), (jax.sharding.AxisType.Auto,) * 2)",
    "twice": "{'embed': batch, 'head': batch}",
    "zero_shard": "zerojax.zero_shard",
}


def layer(w, h, train=True):
    return jnp.tanh(h @ w)


class Given(dict):
    """What the page about 0.1 takes for given. Each is made when it is first used."""

    def __missing__(self, name):
        if name not in MADE:
            raise KeyError(name)  # which Python turns into a NameError
        self[name] = eval(MADE[name], {}, self)
        return self[name]


@pytest.fixture(scope="module")
def given():
    params, x = {"layers": [jnp.eye(128)] * 2}, jnp.ones((16, 128))
    loss_fn = lambda params, x: jnp.mean(functools.reduce(lambda h, w: layer(w, h), params["layers"], x) ** 2)
    modules = {
        "flax": flax,
        "functools": functools,
        "jax": jax,
        "optax": optax,
        "zerojax": zerojax,
        "max": max,
        "str": str,
    }
    values = {"params": params, "batch": x, "x": x, "linen": flax.linen.Dense(8), "key": jax.random.key(0)}
    return Given(modules | values, layer=layer, loss_fn=loss_fn)


def of_cell(cell):
    """The expressions, commands and files of a cell. `name=` is another argument of the call before it."""
    found = []
    for text in re.findall(r"`([^`]+)`", cell):
        argument = re.fullmatch(r"\w+=", text)
        found.append(re.sub(r"\w+=(?!.*\w=).*\)$", f"{text}None)", found[-1]) if argument else text)
    return found


def exists(text, given):
    if text.startswith("zerojax "):
        _, command, *options = text.split()
        known = [name for x in COMMANDS[command].params for name in x.opts] if command in COMMANDS else []
        return command in COMMANDS and {*options} <= {*known}
    if re.fullmatch(r"\w+/[\w/]+\.\w+", text):
        return (ROOT / text).exists()
    try:
        eval(text, {}, given)
    except (AttributeError, TypeError, ValueError):
        return False
    except RuntimeError:  # of `jax.config`, because JAX has begun
        return "jax.config" in text
    return True


def needs(cells):
    """What has to be compiled for a row of the page: nothing, a step, or a step for absent GPUs."""
    texts = " ".join(text for cell in cells for text in of_cell(cell))
    return (
        "gpus" if re.search(r"\bplan[.(]", texts) else "step" if re.search(r"\b(check|compare|fit)[.(]", texts) else ""
    )


@pytest.mark.parametrize(
    "compiled", ["", pytest.param("step", marks=pytest.mark.slow), pytest.param("gpus", marks=[pytest.mark.slow, aot])]
)
def test_what_the_page_says_of_0_1_is_gone_and_what_it_says_to_write_instead_is_there(
    compiled, given, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    rows = [row for row in CHANGES if needs(row) == compiled]
    assert len(rows) > 2
    assert [text for left, _ in rows for text in of_cell(left) if exists(text, given)] == []
    assert [text for _, right in rows for text in of_cell(right) if not exists(text, given)] == []
