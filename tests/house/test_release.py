"""What is released says the same of itself everywhere."""

import re
import tomllib
from pathlib import Path

from typer.testing import CliRunner

import zerojax
from zerojax.cli import app

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# For those who work on the library; README names the others.
FOR_CONTRIBUTORS = {"dev", "docs", "outside", "peers", "ports", "reference", "release"}


def test_one_version_everywhere():
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert newest is not None
    assert cited is not None
    assert newest[1] == cited[1] == PROJECT["version"]
    assert CliRunner().invoke(app, ["--version"]).output.strip() == zerojax.__version__


def test_the_readme_names_the_extras():
    named = set(re.findall(r"\[(\w+)\](?!\()", (ROOT / "README.md").read_text().partition("## Install")[2]))
    assert named == set(PROJECT["optional-dependencies"]) - FOR_CONTRIBUTORS


def test_the_license_is_the_one_cited():
    assert f"license: {PROJECT['license']}" in (ROOT / "CITATION.cff").read_text()
