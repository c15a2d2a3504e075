"""The shape of the house: imports point down, what is public is described in plain words."""

import ast
import collections
import functools
import importlib.metadata
import inspect
import itertools
import operator
import pathlib
import pydoc
import re
import subprocess
import sys

import pytest

import zerojax

ROOT = pathlib.Path(zerojax.__file__).parent
FLOORS = [
    {"version", "primitives", "gpus", "units", "metrics", "internals", "launcher"},
    {"compat"},
    {"names"},
    {"compilations", "config", "jaxprs", "signatures"},
    {"layout"},
    {"dims", "narrow_state"},
    {"comm"},
    {"placement"},
    {"gather"},
    {"offload", "budget"},
    {"optim"},
    {"streaming"},
    {"staged", "inspect"},
    {"train"},
    {"checkpoint"},
    {"transformation"},
    {"zero"},
    {"planning"},
    {"data", "user_code", "doctor"},
    {"__init__", "flax_nnx"},
    {"cli"},
    {"__main__"},
]
FLOOR = {room: i for i, rooms in enumerate(FLOORS) for room in rooms}
LISTS_OPTIONS = {"zero_shard", "train_step"}
MODULES = sorted(ROOT.rglob("*.py"))
NODES = {path: list(ast.walk(ast.parse(path.read_text()))) for path in MODULES}


def imported(path):
    """Modules of zerojax that a module imports from, at any depth of its code, as their names below `zerojax`."""
    for node in NODES[path]:
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            if node.module.split(".")[0] == "zerojax":
                module = tuple(node.module.split(".")[1:])
                yield from ((*module, alias.name) for alias in node.names)
                yield module


def test_test_files_import_from_test_files_of_their_own_folder_only():
    """Pytest puts a folder on the path when it collects it: an import from another folder depends on the order."""
    for path in (ROOT.parent / "tests").rglob("test_*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        names = {x.module for x in nodes if isinstance(x, ast.ImportFrom)} | {
            alias.name for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.Import) for alias in x.names
        }
        missing = {x for x in names if x and x.startswith("test_") and not (path.parent / f"{x}.py").exists()}
        assert not missing, (path, missing)


def test_names_of_test_files_occur_once():
    """Pytest imports them without their folder, so the second of a name is not collected."""
    names = sorted(path.name for path in (ROOT.parent / "tests").rglob("test_*.py"))
    assert len(names) == len(set(names)), [a for a, b in itertools.pairwise(names) if a == b]


def test_what_notebooks_benchmarks_and_examples_import_is_there():
    """Their own tests are slow, so a name that was moved would be missed for long."""
    for folder in ("notebooks", "benchmarks", "examples", "docs", "tests"):
        for path in (ROOT.parent / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "zerojax":
                    module = importlib.import_module(node.module)
                    for name in (alias.name for alias in node.names if not hasattr(module, alias.name)):
                        importlib.import_module(f"{node.module}.{name}")  # otherwise it is a module


def test_no_source_text_is_executed():
    for path, nodes in NODES.items():
        called = {x.func.id for x in nodes if isinstance(x, ast.Call) and isinstance(x.func, ast.Name)}
        assert not called & {"exec", "eval", "compile", "__import__"}, path


def test_imports_point_only_downwards():
    for path in MODULES:
        room = path.relative_to(ROOT).with_suffix("").parts[0]
        assert room in FLOOR, f"{room} has no floor"
        for other in {module[0] for module in imported(path) if module}:
            assert other == room or FLOOR[other] < FLOOR[room], f"{path} imports {other}, which is not below it"


def test_no_modules_import_each_other_in_a_circle():
    files = {path.with_suffix(""): path for path in MODULES} | {p.parent: p for p in MODULES if p.name == "__init__.py"}
    # Submodules load their package first, so what a package imports for its users is no circle.
    plain = [path for path in MODULES if path.name != "__init__.py"]
    graph = {path: {files[m] for names in imported(path) if (m := ROOT.joinpath(*names)) in files} for path in plain}
    while leaves := {path for path, imported in graph.items() if not imported & graph.keys()}:
        graph = {path: imported for path, imported in graph.items() if path not in leaves}
    assert not sorted(str(path.relative_to(ROOT)) for path in graph)


def private_of_jax(path):
    """What a module imports of `jax._src`, by its full name."""
    for node in NODES[path]:
        if isinstance(node, ast.ImportFrom) and node.module.startswith("jax._"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("jax._"))
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            yield from (x.value for x in node.args if isinstance(x, ast.Constant) and x.value.startswith("jax._"))


def test_what_is_private_of_jax_is_listed_with_its_reason():
    page = (ROOT.parent / "CONTRIBUTING.md").read_text().partition("## What is private of JAX")[2].partition("\n## ")[0]
    assert {*re.findall(r"`(jax\._src\.[\w.]+)`", page)} == {name for path in MODULES for name in private_of_jax(path)}
    for path in MODULES:
        if path.name not in ("compat.py", "internals.py", "absent_program.py"):
            assert not re.search(r"jax\._src|_getframe|currentframe|__name__ [!=]= ", path.read_text()), path


def public_objects():
    for name in zerojax.__all__:
        thing = getattr(zerojax, name)
        yield name, thing
        if inspect.isclass(thing) and thing.__module__.startswith("zerojax"):
            own = (vars(cls) for cls in reversed(thing.__mro__) if cls.__module__.startswith("zerojax"))
            members = functools.reduce(operator.or_, map(dict, own)).items()
            yield from ((f"{name}.{m}", f) for m, f in members if inspect.isfunction(f) and not m.startswith("_"))


def test_what_is_public_is_described():
    for name, thing in public_objects():
        assert inspect.getdoc(thing), f"{name} has no docstring"
        if inspect.isfunction(thing) and thing.__module__.startswith("zerojax"):
            needs = [p for p in inspect.signature(thing).parameters if p not in ("self", "cls", "changes")]
            for parameter in needs:
                assert f"{parameter}:" in inspect.getdoc(thing), f"{name} does not describe {parameter}"


def test_an_old_name_says_the_new_one():
    importlib.import_module("zerojax.flax_nnx")
    for old, new in zerojax._RENAMED.items():
        with pytest.raises(AttributeError, match=f"no attribute '{old}', which is now zerojax.{new}"):
            getattr(zerojax, old)
        assert functools.reduce(getattr, new.split("."), zerojax)


def test_importing_costs_little():
    code = "import jax, optax, sys; before = set(sys.modules); import zerojax; print(*set(sys.modules) - before)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"flax", "matplotlib", "rich", "orbax", "torch", "tensorstore", "scipy"} & {m.split(".")[0] for m in loaded}
    assert not heavy


def test_help_imports_nothing_heavy():
    """So that it answers at once."""
    command = [sys.executable, "-X", "importtime", "-m", "zerojax", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "zerojax.cli" in done.stderr.split()
    assert all(command in done.stdout for command in ("estimate", "plan", "compare", "doctor", "verify", "export"))
    assert not {"jax", "jaxlib", "numpy", "optax", "flax", "matplotlib", "orbax"} & set(done.stderr.split())


def test_help_and_completion_show_the_surface():
    """And not what the module imports for itself."""
    assert set(zerojax.__all__) | {"__version__"} == {
        name for name in dir(zerojax) if not name.startswith("__") or name == "__version__"
    }
    assert all(getattr(zerojax, name) is not None for name in dir(zerojax))
    for name in ("checkpoint", "data", "flax_nnx", "metrics", "offload"):
        module = importlib.import_module(f"zerojax.{name}")
        public = [name for name in dir(module) if not name.startswith("__")]
        assert sorted(module.__all__) == public
        assert all(getattr(module, name).__doc__ for name in public)
    documentation = pydoc.render_doc(zerojax)
    assert "zero_shard" in documentation
    assert not re.search(r"\b(TYPE_CHECKING|import_module)\b", documentation)


def test_the_version_is_known_without_an_installation(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.delitem(vars(zerojax), "__version__", raising=False)
    assert zerojax.__version__ == "0+source"
    monkeypatch.delitem(vars(zerojax), "__version__")


def test_one_name_is_one_file_one_class_and_one_function():
    """But for the commands, which have the names of the functions that they call, and for private functions."""
    top = [x for path, (module, *_) in NODES.items() if path.name != "cli.py" for x in module.body]
    functions = [x.name for x in top if isinstance(x, ast.FunctionDef) and not x.name.startswith("_")]
    classes = [x.name for nodes in NODES.values() for x in nodes if isinstance(x, ast.ClassDef)]
    files = [path.name for path in MODULES if path.name != "__init__.py"]
    for names in (functions, classes, files):
        assert not [name for name, count in collections.Counter(names).items() if count > 1]


def test_no_file_function_or_parameter_list_is_long():
    """A file has at most 400 lines, a function 80, and a parameter list 8 entries.

    But for the two functions that list options, and the commands, whose parameters are their flags.
    """
    assert len((ROOT.parent / "README.md").read_text().splitlines()) <= 150
    for path, nodes in NODES.items():
        assert len(path.read_text().splitlines()) <= 400, path
        for node in nodes:
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 80 or node.name in LISTS_OPTIONS, (path, node.name)
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = len([x for x in given if x.arg not in ("self", "cls")])
                assert count <= 8 or node.name in LISTS_OPTIONS or path.name == "cli.py", (path, node.name, count)


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
    Replicate Resolve Restore Restrict Return Rewrite Round Run Say Send Separate Set Shard Share Show Slice Slide Solve
    Sort Split Stack Stall Start Stop Store Sum Take Tell Tile Time Trace Train Transpose Undo Unlock Update Wait Warn
    Watch Wrap Write Yield
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
    for path, nodes in NODES.items():
        texts = [(node, text) for node in nodes if isinstance(node, documented) and (text := ast.get_docstring(node))]
        first = [
            text.split()[0].strip(".,:") for node, text in texts if not isinstance(node, ast.Module | ast.ClassDef)
        ]
        assert not set(first) - VERBS, path
        count += len(first)
        comments = [line.partition("#")[2] for line in path.read_text().splitlines()]
        for text in (*(text for _, text in texts), *comments):
            assert not PHRASES.search(" ".join(text.split())), f"{path}: {text}"
    assert count > 1000


def test_the_pages_say_it_plainly():
    files = [ROOT.parent / "README.md", ROOT.parent / "CONTRIBUTING.md", *(ROOT.parent / "docs").rglob("*.md")]
    without_programs = {path: re.sub(r"(?ms)^ *```.*?^ *```", "", path.read_text()) for path in files}
    pages = {path: " ".join(text.split()) for path, text in without_programs.items()}
    assert not [f"{path}: {match[0]}" for path, text in pages.items() for match in PHRASES.finditer(text)]


def test_the_phrases_are_found():
    assert PHRASES.search("quantises what travels")
    assert not PHRASES.search("quantises everything else")
