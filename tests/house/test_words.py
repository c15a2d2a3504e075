"""The words of the source and of the documentation: docstrings begin with a verb, and compressed phrases stay out."""

import ast
import io
import re
import tokenize
from pathlib import Path

import zerojax

PACKAGE = Path(zerojax.__file__).parent
ROOT = PACKAGE.parent
MODULES = sorted(PACKAGE.rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A docstring that needs another one adds it here, in the imperative.
VERBS = set(
    """
    Abandon Accumulate Add All-gather Analyse Append Apply Average Begin Block Bring Build Call Cast Check Choose
    Close Combine Compare Compile Complete Compute Constrain Convert Copy Count Create Cut Decide Delay Describe
    Differentiate Digest Divide Do Draw Drop Encode End Enter Estimate Evaluate Exchange Explain Fetch Find Finish
    Flatten Flush Fold Follow Forbid Forget Free Gather Give Go Group Hand Hash Import Index Initialise Interpret
    Iterate Join Keep Lay Let Lift List Load Lock Lower Make Map Mark Match Measure Merge Move Multiply Name Open Order
    Pack Pad Parse Partition Pickle Pin Place Plan Prepare Print Process Publish Pull Put Raise Read Rebuild
    Receive Record Reduce Reduce-scatter Refuse Register Rematerialise Remember Remove Rename Repeat Replace
    Replicate Resolve Restore Restrict Return Rewrite Run Say Send Separate Set Shard Share Show Slice Slide Sort Split
    Stack Stall Start Stop Store Sum Take Tell Tile Time Trace Train Transpose Undo Unlock Update Wait Warn Watch
    Wrap Write Yield
    """.split()
)
# What to say instead: everything else; does not, must not; are sent; per worker; per parameter; instead; forever.
PHRASES = re.compile(
    r"\ball else\b|\bmay not\b|\bwhat travels\b|\bsummands? an? \b|\bbytes a parameter\b|\bin its place\b|\bfor ever\b"
    r"|\bnor does\b|\bsuch as are\b|\b(its|their) kin\b"
)


def functions(path):
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_docstrings_begin_with_a_verb():
    described = [
        (path, node, text) for path in MODULES for node in functions(path) if (text := ast.get_docstring(node))
    ]
    assert len(described) > 1000
    first = [(f"{path}:{node.lineno}", text.split()[0].strip(".,:")) for path, node, text in described]
    assert not [f"{where}: {word}" for where, word in first if word not in VERBS]


def prose(path):
    """The docstrings and comments of a module, each with its line."""
    source = path.read_text()
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def test_the_source_says_it_plainly():
    every = [(f"{path}:{line}", " ".join(text.split())) for path in MODULES for line, text in prose(path)]
    assert not [f"{where}: {match[0]}" for where, text in every if (match := PHRASES.search(text))]


def test_the_pages_say_it_plainly():
    without_programs = {path: re.sub(r"(?ms)^ *```.*?^ *```", "", path.read_text()) for path in PAGES}
    pages = {path: " ".join(text.split()) for path, text in without_programs.items()}
    assert not [f"{path}: {match[0]}" for path, text in pages.items() for match in PHRASES.finditer(text)]


def test_the_phrases_are_found():
    assert PHRASES.search("quantises what travels")
    assert not PHRASES.search("quantises everything else")
