"""The words of the source and of the documentation: docstrings begin with a verb, and compressed phrases stay out."""

import ast
import re
from pathlib import Path

import zerojax

PACKAGE = Path(zerojax.__file__).parent
ROOT = PACKAGE.parent
SOURCES = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A docstring that needs another one adds it here, in the imperative.
VERBS = set(
    """
    Abandon Accumulate Add All-gather Analyse Append Apply Average Begin Block Bring Build Call Cast Check Choose
    Close Combine Compare Compile Complete Compute Constrain Convert Copy Count Create Cut Decide Declare Delay Describe
    Differentiate Digest Divide Do Draw Drop Encode End Enter Estimate Evaluate Exchange Explain Fetch Find Finish
    Flatten Flush Fold Follow Forbid Forget Free Gather Give Go Group Hand Hash Import Index Initialise Interpret
    Iterate Join Keep Lay Leave Let Lift List Load Lock Lower Make Map Mark Match Measure Merge Move Multiply Name Open
    Order Pack Pad Parse Partition Pickle Pin Place Plan Prepare Print Process Publish Pull Put Raise Read Rebuild
    Receive Record Reduce Reduce-scatter Refuse Register Rematerialise Remember Remove Rename Repeat Replace
    Replicate Resolve Restore Restrict Return Rewrite Run Say Send Separate Set Shard Share Show Slice Slide Solve Sort
    Split
    Stack Stall Start Stop Store Sum Take Tell Tile Time Trace Train Transpose Undo Unlock Update Wait Warn Watch
    Wrap Write Yield
    """.split()
)
# What to say instead: everything else; does not, must not; are sent; per worker; per parameter; instead; forever.
PHRASES = re.compile(
    r"\ball else\b|\bmay not\b|\bwhat travels\b|\bsummands? an? \b|\bbytes a parameter\b|\bin its place\b|\bfor ever\b"
    r"|\bnor does\b|\bsuch as are\b|\b(its|their) kin\b"
)


def test_the_source_says_it_plainly():
    """Docstrings of functions begin with a verb; docstrings and comments have no compressed phrase."""
    documented, count = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, 0
    for path, source in SOURCES.items():
        nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
        texts = [(node, text) for node in nodes if (text := ast.get_docstring(node))]
        first = [
            text.split()[0].strip(".,:") for node, text in texts if not isinstance(node, ast.Module | ast.ClassDef)
        ]
        assert not set(first) - VERBS, path
        count += len(first)
        comments = [line.partition("#")[2] for line in source.splitlines()]
        for text in (*(text for _, text in texts), *comments):
            assert not PHRASES.search(" ".join(text.split())), f"{path}: {text}"
    assert count > 1000


def test_the_pages_say_it_plainly():
    without_programs = {path: re.sub(r"(?ms)^ *```.*?^ *```", "", path.read_text()) for path in PAGES}
    pages = {path: " ".join(text.split()) for path, text in without_programs.items()}
    assert not [f"{path}: {match[0]}" for path, text in pages.items() for match in PHRASES.finditer(text)]


def test_the_phrases_are_found():
    assert PHRASES.search("quantises what travels")
    assert not PHRASES.search("quantises everything else")
