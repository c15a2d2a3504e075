"""The pages in docs/: their programs run and print what they say, and they name what there is."""

import ast
import contextlib
import importlib
import io
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import zerojax

ROOT = Path(zerojax.__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS)): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
KINDS = {"python", "diff", "text", ""}  # "": commands, and what programs print elsewhere
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.M | re.S)


class Block(NamedTuple):
    """A fenced block of a page.

    Attributes:
        kind: The language that it says it is in.
        text: Its lines, without their indentation.
        line: Number of lines before it.
        follows: Whether only space is between it and the block before.
    """

    kind: str
    text: str
    line: int
    follows: bool


def blocks_of(page):
    end = 0
    for found in FENCE.finditer(page):
        line = page.count("\n", 0, found.start(3))
        yield Block(found[2], textwrap.dedent(found[3]), line, not page[end : found.start()].strip())
        end = found.end()


def run_page(name, scope):
    """Run the programs of a page one after the other, in one namespace; compare what they print."""
    printed = ""
    for block in blocks_of(PAGES[name]):
        if block.kind == "python":
            printed = run(block.text, name, block.line, scope)
        elif block.kind == "diff":
            before, after = (run_side(way, block, name, dict(scope)) for way in "-+")
            assert len(before) > 1
            np.testing.assert_allclose(after, before, rtol=1e-4)
        elif block.kind == "text" and block.follows:
            assert printed == block.text, f"{name}:{block.line}"


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


@pytest.mark.parametrize("name", ["start.md", "concepts.md", "evaluation.md", "coming_from.md"])
def test_the_programs_of_a_page_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(name, {})


def texts_of(path):
    """The texts in a module's source but for docstrings, with an ellipsis for each value that is filled in."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    docstrings = [node.value for node in nodes if isinstance(node, ast.Expr)]
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield "".join(x.value if isinstance(x, ast.Constant) else "…" for x in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield node.value


def test_the_messages_of_the_page_are_ours():
    ours, _ = PAGES["troubleshooting.md"].split("\n## Messages of JAX and XLA\n")
    quoted = re.findall(r"^### `(.*)`$", ours, re.M)
    assert len(quoted) == ours.count("\n### ") > 30
    texts = [text for path in (ROOT / "zerojax").rglob("*.py") for text in texts_of(path)]
    assert [stretch for stretch in quoted if not any(stretch in text for text in texts)] == []
