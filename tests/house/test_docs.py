"""README and the pages in docs/: their programs run and print what they say, and they name what there is."""

import ast
import contextlib
import functools
import importlib
import inspect
import io
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from docs_given import AFTERWARDS, GIVEN

import zerojax
from zerojax.cli import app
from zerojax.config import BUCKET_BYTES, PERSIST_BELOW
from zerojax.gpus.devices import installed

ROOT = Path(zerojax.__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS)): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
KINDS = {"python", "diff", "text", ""}  # "": commands, and what programs print elsewhere
PUBLIC_MODULES = ("checkpoint", "data", "flax_nnx", "metrics", "offload")
COMPILED_FOR_GPUS = {"plan.md", "stage3.md"}  # which needs the extra `aot`
# What the devices share is not the same at stage 0, which shards nothing.
AT_STAGE_3_ONLY = re.compile(r"Offload\(|\.storage\b|\bstored\b|\.plan\b|report\(|(?<!jax)\.sharding\b|as_text\(")
PAGES_OF_STAGE_3 = {"fit.md", "move.md", "offload.md", "wire.md"}
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.M | re.S)


class Block(NamedTuple):
    """A fenced block of a page."""

    kind: str  # the language that it says it is in
    text: str  # its lines, without their indentation
    line: int  # the number of lines before it
    follows: bool  # whether only space is between it and the block before


def blocks_of(page):
    end = 0
    for found in FENCE.finditer(page):
        line = page.count("\n", 0, found.start(3))
        yield Block(found[2], textwrap.dedent(found[3]), line, not page[end : found.start()].strip())
        end = found.end()


QUOTES = {"finetune.md": "examples/finetune.py"}  # pages that quote a program, which another test runs
WITH_PROGRAMS = [
    name
    for name, page in PAGES.items()
    if any(block.kind in ("python", "diff") for block in blocks_of(page)) and name not in QUOTES
]
QUICK = ["api/commands.md", "index.md", "wire.md"]
AT_STAGE_0 = [
    name
    for name in WITH_PROGRAMS
    if name not in PAGES_OF_STAGE_3
    and any("stage=3" in block.text for block in blocks_of(PAGES[name]) if block.kind in ("python", "diff"))
]


def at_stage(stage, text):
    return text.replace("stage=3", f"stage={stage}")


def run_page(name, scope, stage=3):
    """Run the programs of a page one after the other, in one namespace; compare what they print."""
    printed = ""
    for block in blocks_of(PAGES[name]):
        only_3 = stage != 3 and block.kind in ("python", "diff") and AT_STAGE_3_ONLY.search(block.text)
        if not only_3:
            block = block._replace(text=at_stage(stage, block.text))
        elif "stage=3" not in block.text:  # it uses what another block made
            printed = None
            continue
        if block.kind == "python":
            printed = run(block.text, name, block.line, scope)
        elif block.kind == "diff":
            before, after = (run_side(way, block, name, dict(scope)) for way in "-+")
            assert len(before) > 1
            np.testing.assert_allclose(after, before, rtol=1e-4)
        elif block.kind == "text":
            assert block.follows, f"{name}:{block.line}"
            assert printed in (block.text, None), f"{name}:{block.line}"


def run(text, name, line, scope):
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile("\n" * line + text, f"docs/{name}", "exec"), scope)  # traces name the page's line
    return output.getvalue()


def run_side(way, block, name, scope):
    """The losses of the loop before (-) or after (+) a change."""
    lines = [line[1:] if line[:1] in ("", " ", way) else "" for line in block.text.splitlines()]
    run("\n".join(lines), name, block.line, scope)
    return scope["losses"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in WITH_PROGRAMS]
)
def test_the_programs_of_a_page_run(name, tmp_path, monkeypatch):
    if name in COMPILED_FOR_GPUS and (not installed() or jax.__version_info__ < (0, 11)):
        pytest.skip("needs the extra aot, of the newest jax")
    monkeypatch.chdir(tmp_path)
    scope = {}
    exec(compile(GIVEN.get(name, ""), f"given for docs/{name}", "exec"), scope)
    run_page(name, scope)
    exec(compile(AFTERWARDS.get(name, ""), f"after docs/{name}", "exec"), scope)


@pytest.mark.slow
@pytest.mark.parametrize("name", AT_STAGE_0)
def test_the_programs_of_a_page_print_the_same_at_stage_0(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {}
    exec(compile(at_stage(0, GIVEN.get(name, "")), f"given for docs/{name}", "exec"), scope)
    run_page(name, scope, stage=0)


@pytest.mark.parametrize(("page", "program"), QUOTES.items())
def test_a_page_quotes_its_program_as_it_is(page, program):
    plain = lambda text: "".join(f"{line.strip()}\n" for line in text.splitlines())
    quotes = [block.text for block in blocks_of(PAGES[page]) if block.kind == "python"]
    assert quotes
    assert [quote for quote in quotes if plain(quote) not in plain((ROOT / program).read_text())] == []


TWO_STEPS = """
 losses = []
 for seed in range(2):
     params, opt_state, loss = step(params, opt_state, rows(seed))
     losses.append(float(loss))
"""


@pytest.mark.parametrize("stage", [0, 3])
def test_the_readmes_program_prints_what_it_says(stage, tmp_path, monkeypatch):
    """And its loop gives the same losses before and after the change."""
    blocks = list(blocks_of(at_stage(stage, (ROOT / "README.md").read_text())))
    [loop], [program], [printed] = ([b for b in blocks if b.kind == kind] for kind in ("diff", "python", "text"))
    monkeypatch.chdir(tmp_path)
    scope = {}
    assert run(program.text, "README.md", program.line, scope) == printed.text
    loop = loop._replace(text=loop.text + TWO_STEPS)
    before, after = (run_side(way, loop, "README.md", dict(scope)) for way in "-+")
    np.testing.assert_allclose(after, before, rtol=1e-5)


def test_blocks_say_what_they_are():
    """So that no program is taken for something else, and not run."""
    for name, page in PAGES.items():
        blocks = list(blocks_of(page))
        assert {block.kind for block in blocks} <= KINDS, name
        assert 2 * len(blocks) == len(re.findall(r"^ *```", page, re.M)), name


def test_every_page_is_in_the_navigation_once():
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"([\w/]+\.md)$", text[text.index("\nnav:") :], re.M)
    assert sorted(listed) == sorted(PAGES)


SEARCHED = ("fine-tune", "gradient accumulation", "lora", "mixed precision", "nan", "out of memory", "resume", "slurm")


def test_what_people_search_for_is_in_a_title():
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1]
    titles = navigation + "".join(line for page in PAGES.values() for line in re.findall(r"^#+ .*\n", page, re.M))
    assert [words for words in SEARCHED if not re.search(rf"\b{words}\b", titles, re.I)] == []


def test_the_first_page_says_what_changes_and_how_it_is_run():
    assert re.findall("^## (.*)", PAGES["index.md"], re.M) == [
        "What it is",
        "What changes in your loop",
        "Run it on 8 GPUs",
        "Where to go",
    ]


def test_files_that_pages_name_are_there():
    named = (
        r"(?<!/)\b((?:benchmarks|docs|examples|notebooks|tests|zerojax)/[\w./-]*\.(?:py|sh|yaml|md|ipynb|json|png))\b"
    )
    found = {(name, path) for name, page in PAGES.items() for path in re.findall(named, page)}
    elsewhere = {"outside.md", "upgrade.md"}  # which name files of others, and of 0.1
    found = {one for one in found if one[0] not in elsewhere}
    assert len(found) > 40
    assert {(name, path) for name, path in found if not (ROOT / path).exists()} == set()


def named(path):
    """What a dotted path is; of a module and a function of one name, as `checkpoint.export`, the module."""
    parts = path.split(".")
    for count in range(len(parts) - 1, 0, -1):
        with contextlib.suppress(ModuleNotFoundError):
            return functools.reduce(getattr, parts[count:], importlib.import_module(".".join(parts[:count])))
    raise AssertionError(path)


def test_the_reference_has_what_is_public():
    pages = "".join(page for name, page in PAGES.items() if name.startswith("api/"))
    described = [named(path) for path in re.findall(r"^::: (\S+)$", pages, re.M)]
    methods = [getattr(thing, "__func__", thing) for thing in described]
    for module in (zerojax, *(importlib.import_module(f"zerojax.{name}") for name in PUBLIC_MODULES)):
        for name in module.__all__:
            thing = getattr(module, name)
            if not inspect.ismodule(thing):
                what = type(thing).__call__ if name == "plan" else thing
                assert any(what is one for one in methods), f"{module.__name__}.{name} is on no page of docs/api"


def test_the_reference_has_every_command():
    listed = re.findall(r"^\| `zerojax (\w+)", PAGES["api/commands.md"], re.M)
    assert sorted(listed) == sorted(command.callback.__name__ for command in app.registered_commands)


def test_defaults_that_a_signature_does_not_show():
    assert f"`PERSIST_BELOW` is {PERSIST_BELOW} elements" in PAGES["api/options.md"]
    assert f"`BUCKET_BYTES` {BUCKET_BYTES >> 20} MiB" in PAGES["api/options.md"]


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_fetches_nothing(tmp_path):
    pytest.importorskip("mkdocs", reason="make docs installs what builds the site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    fetched = r"<(?:script|img|iframe|source)[^>]* src=.?(?:https?:)?//[^>]*>|<link[^>]* href=.?(?:https?:)?//[^>]*>"
    for path in (*tmp_path.rglob("*.html"), *tmp_path.rglob("*.css")):
        text = path.read_text()
        assert re.findall(fetched, text) == [], path
        assert re.findall(r"@import[^;]*//|url\([\"']?(?:https?:)?//[^)]*", text) == [], path


def texts_of(path):
    """The texts in a module's source but for docstrings, with an ellipsis for each value that is filled in."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    docstrings = [node.value for node in nodes if isinstance(node, ast.Expr)]
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield "".join(x.value if isinstance(x, ast.Constant) else "…" for x in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield node.value


def test_every_symptom_begins_with_a_command():
    symptoms = PAGES["troubleshooting.md"].split("\n## Messages of zerojax\n")[0].split("\n## ")[1:]
    assert len(symptoms) >= 7
    assert [text for text in symptoms if not re.match(r".*\n\n(.*\n\n)?```", text)] == []


def test_the_messages_of_the_page_are_ours():
    ours, _ = PAGES["troubleshooting.md"].split("\n## Messages of JAX and XLA\n")
    quoted = re.findall(r"^### `(.*)`$", ours, re.M)
    assert len(quoted) == ours.count("\n### ") > 30
    texts = [text for path in (ROOT / "zerojax").rglob("*.py") for text in texts_of(path)]
    assert [stretch for stretch in quoted if not any(stretch in text for text in texts)] == []
