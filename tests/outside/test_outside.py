"""Test files that others wrote, run with sharded optimizers; the table in `suites.py` says what they count, and why."""

import collections
import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sources
from suites import PAGE, SUITES, VERSIONS, written

HERE = Path(__file__).parent


def require(suite):
    """Skip where a file, or a module it imports, is lacking; fail where it must not be, as in .ci/run."""
    root = sources.root_of(suite.package)
    lacking = [path for path in [root / f.path for f in suite.files] if not path.exists()]
    lacking += [name for name in suite.needs if sources.importlib.util.find_spec(name) is None]
    if lacking:
        give_up = pytest.fail if os.environ.get("ZEROJAX_OUTSIDE_REQUIRED") else pytest.skip
        give_up(f"{lacking[0]} is not there: make .venv/.has-outside")


def outcomes_of(suite, folder, *, only=None):
    """Run a suite in a process of its own: for each file, `{test: (outcome, what it said)}`."""
    root = sources.root_of(suite.package)
    files = {str(root / f.path): {"names": f.names, "placed": f.placed, "versions": f.versions} for f in suite.files}
    left_out = {str(root / f.path): [r.tests for r in f.reasons if r.outcome == "left out"] for f in suite.files}
    asked = {"files": files, "mesh": suite.mesh, "left_out": left_out, "only": only}
    results = folder / "outcomes.json"
    paths = [str(HERE.parents[1]), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {
        "PYTHONPATH": os.pathsep.join(paths),
        "ZEROJAX_OUTSIDE": json.dumps(asked),
        "ZEROJAX_OUTSIDE_OUTCOMES": str(results),
    }
    # None of our settings: neither a conftest, nor the options of pyproject.toml, nor a cache. The root is that of the
    # file system, since a test of a file that is not below it has no file in its name.
    alone = ["--noconftest", "-c", os.devnull, "--rootdir", folder.anchor, "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-p", "plugin", *alone, "-q", "--tb=short", *files]
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")} | variables
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads(results.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", SUITES)
def test_what_does_not_pass_has_a_reason_and_the_counts_are_those_of_the_table(name, tmp_path):
    suite = SUITES[name]
    require(suite)
    by_file = outcomes_of(suite, tmp_path)
    same = all(sources.version(package) == version for package, version in VERSIONS.items())
    for f in suite.files:
        outcomes = by_file[f.name]
        explained = collections.Counter()
        for test, (outcome, said) in outcomes.items():
            reasons = [r for r in f.reasons if r.outcome == outcome and re.fullmatch(r.tests, test)]
            assert outcome == "passed" or reasons, f"{f.path}::{test} {outcome}: {said}"
            explained.update(reasons[:1])
        if same:
            counts = collections.Counter(outcome for outcome, _ in outcomes.values())
            found = {k: counts[k] for k in ("passed", "skipped", "failed", "left out")}
            assert found == {"passed": f.passed, "skipped": f.skipped, "failed": f.failed, "left out": f.left_out}
            assert not [r.tests for r in f.reasons if not explained[r]], f.path


@pytest.mark.slow
def test_what_is_said_to_fail_without_us_does(tmp_path):
    for suite in SUITES.values():
        require(suite)
        theirs = [f for f in suite.files if any(r.without_us for r in f.reasons)]
        if theirs:
            plain = dataclasses.replace(suite, files=tuple(dataclasses.replace(f, names=(), placed=()) for f in theirs))
            only = [r.tests for f in theirs for r in f.reasons if r.without_us]
            by_file = outcomes_of(plain, tmp_path, only=only)
            passed = [test for f in theirs for test, (x, _) in by_file[f.name].items() if x == "passed"]
            assert not passed
            assert all(by_file[f.name] for f in theirs)


def test_the_page_has_the_table():
    page = PAGE.read_text()
    assert page == written(page), "python tests/outside/suites.py"
