"""A pytest plugin that runs a test file of others with the optimizers it makes sharded: `python -m pytest -p plugin`.

The file is executed in two parts. What it imports from is replaced, in its own namespace alone, by a view of it whose
functions return `zero_shard(tx)` where they return a transformation `tx`. Nothing of theirs is changed: inside of
optax and flax all names are as they were.
"""

import ast
import collections
import dataclasses
import functools
import inspect
import json
import os
import pathlib
import re
import sys
import types

# Eight, as optax's own sharding tests ask for, before JAX is imported; the mesh may have fewer.
if "device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from zerojax import zero_shard


@dataclasses.dataclass(frozen=True)
class Wrapping:
    """What is replaced in a file, and by what.

    Attributes:
        names: Names in the file's namespace, of modules and functions, whose transformations are sharded.
        placed: Functions of the file whose arrays are replicated over the mesh, as parameters of few elements are.
        versions: What versions some modules give, for a file that compares them as text, where "0.12" is before "0.7".
        mesh: Size, axis and type of axis of the mesh.
    """

    names: frozenset
    placed: frozenset
    versions: dict[str, str]
    mesh: tuple[int, str, str]

    def sharded(self, result):
        """A transformation is sharded; what makes one is seen through this wrapping; anything else as it is."""
        if isinstance(result, optax.GradientTransformation):
            return zero_shard(result, mesh=mesh_of(*self.mesh), axis=self.mesh[1], stage=3)
        return self.view(result) if inspect.isfunction(result) else result

    def view(self, thing):
        """A module, a function or a class of which the transformations are sharded."""
        if inspect.ismodule(thing):
            return View(thing, self)
        if thing is optax.MultiSteps:
            make = lambda steps: self.sharded(optax.MultiSteps.gradient_transformation(steps))
            return type("MultiSteps", (optax.MultiSteps,), {"gradient_transformation": make})
        return self.then(self.sharded, thing) if inspect.isfunction(thing) else thing

    def place(self, result):
        """The arrays of a result, replicated over the mesh."""
        everywhere = NamedSharding(mesh_of(*self.mesh), PartitionSpec())
        return jax.tree.map(lambda x: jax.device_put(x, everywhere) if isinstance(x, jax.Array) else x, result)

    def then(self, change, function):
        """A function whose result is changed; its signature is kept, which `optax.inject_hyperparams` reads."""

        @functools.wraps(function)
        def changed(*args, **keywords):
            return change(function(*args, **keywords))

        return changed

    def execute(self, module, tree):
        """Execute a file statement by statement, and replace each name as soon as it is bound."""
        space, path = module.__dict__, module.__file__
        waiting = dict.fromkeys(self.names, self.view)
        waiting |= {name: functools.partial(self.then, self.place) for name in self.placed}
        renumbered = lambda module, version: types.SimpleNamespace(**vars(module) | {"__version__": version})
        waiting |= {name: functools.partial(renumbered, version=version) for name, version in self.versions.items()}
        for statement in tree.body:
            exec(compile(ast.Module([statement], []), path, "exec", dont_inherit=True), space)
            for name in waiting.keys() & space.keys():
                space[name] = waiting.pop(name)(space[name])
        assert not waiting, f"{path} has no {sorted(waiting)}"


@functools.cache
def mesh_of(size, axis, kind):
    """A mesh of the first devices."""
    return jax.make_mesh((size,), (axis,), axis_types=(AxisType[kind],), devices=jax.devices()[:size])


class View(types.ModuleType):
    """A module seen through a wrapping."""

    def __init__(self, module, wrapping):
        super().__init__(module.__name__)
        self.__dict__["_seen"] = (module, wrapping)

    def __getattr__(self, name):
        module, wrapping = self.__dict__["_seen"]
        return wrapping.view(getattr(module, name))


class OutsideModule(pytest.Module):
    """A test file, executed by a wrapping."""

    def _getobj(self):
        given = json.loads(os.environ["ZEROJAX_OUTSIDE"])
        file = given["files"][str(self.path)]
        names, placed = frozenset(file["names"]), frozenset(file["placed"])
        wrapping = Wrapping(names, placed, file["versions"], tuple(given["mesh"]))
        module = types.ModuleType(f"outside_{self.path.stem}")
        module.__file__ = str(self.path)
        sys.modules[module.__name__] = module  # dataclasses look their module up
        wrapping.execute(module, ast.parse(self.path.read_text(), str(self.path)))
        return module


def pytest_pycollect_makemodule(module_path, parent):
    return OutsideModule.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(config, items):
    """Leave out what the table leaves out, by whole names of tests."""
    given = json.loads(os.environ["ZEROJAX_OUTSIDE"])
    kept, left = [], []
    for item in items:
        omitted = any(re.fullmatch(pattern, name_of(item.nodeid)) for pattern in given["left_out"][str(item.path)])
        wanted = given["only"] is None or any(re.fullmatch(p, name_of(item.nodeid)) for p in given["only"])
        (kept if wanted and not omitted else left).append(item)
        if omitted and wanted:
            OUTCOMES[item.path.name][name_of(item.nodeid)] = ("left out", "")
    items[:] = kept
    config.hook.pytest_deselected(items=left)


OUTCOMES = collections.defaultdict(dict)
WORSE = ("passed", "skipped", "failed")


def name_of(nodeid):
    """`Class::test` of a test of unittest."""
    return nodeid.split("::", 1)[1]


def pytest_runtest_logreport(report):
    """Of a test and its subtests the worst counts."""
    if report.outcome == "passed" and report.when != "call":
        return
    found, name = OUTCOMES[pathlib.Path(report.nodeid.split("::")[0]).name], name_of(report.nodeid)
    crash = getattr(report.longrepr, "reprcrash", None)
    said = crash.message if crash else str(report.longrepr or "")
    if name not in found or WORSE.index(report.outcome) > WORSE.index(found[name][0]):
        found[name] = (report.outcome, said)


def pytest_sessionfinish():
    """For the process that asked."""
    pathlib.Path(os.environ["ZEROJAX_OUTSIDE_OUTCOMES"]).write_text(json.dumps(OUTCOMES))
