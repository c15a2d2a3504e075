"""What is released says the same of itself everywhere."""

import re
import tomllib
from pathlib import Path

import yaml
from command_line import run

import zerojax

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
