"""Write the executable of a step to a file, and load it instead of compiling the step.

The file is a zip file. It has a header in JSON, the lowered program as text, and the executable as
`jax.experimental.serialize_executable` gives it: XLA's bytes and a pickle of shapes and shardings. The trees of the
arguments and results come from the step that loads the file.

JAX's persistent cache cannot be filled for absent GPUs instead. The key of an entry contains the client's version and a
fingerprint of the devices, and both are known only where the GPUs are. A cache also does not say why it has no entry.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from zerojax.comm.events import is_of_all
from zerojax.comm.processes import Processes
from zerojax.gpus.devices import kind_of
from zerojax.inspect.memory import peak_bytes
from zerojax.train.compiling import CANDIDATE, CompilerOptions
from zerojax.train.fitting import StepFitting
from zerojax.train.jitted_step import JittedStep
from zerojax.train.same_run import (
    around_difference,
    environment,
    first_difference,
    lines_of,
    origin,
    placed_signature_of,
)
from zerojax.train.state import ZeroState
from zerojax.train.step_program import StepProgram
from zerojax.units import format_bytes

HEADER, PROGRAM, EXECUTABLE = "header.json", "program.mlir", "executable"
FORMAT = 1
# An executable runs only with these. Everything else in the environment changes the program, or does not matter.
OF_EXECUTABLES = ("jax", "jaxlib", "XLA_FLAGS", "LIBTPU_INIT_ARGS", "jax_disable_most_optimizations")
# Python functions that a program calls have addresses of one process.
CALLBACK = re.compile(r"@xla_\w*python\w*callback")
MOST_NAMED = 3


@dataclasses.dataclass(frozen=True)
class Header:
    """What an executable was compiled for.

    Attributes:
        environment: Versions of libraries, options of JAX and flags of XLA, by name.
        kind: The kind of the devices, such as `"h200"`.
        mesh: The sizes of the mesh axes, by name.
        devices: The ids of the devices, in the order of the mesh.
        arguments: The type and shape of each argument, by path.
        options: The compiler options.
        share: The share of activations that the blocks save. None: the step has no `memory=`.
        peak: The peak in bytes per device.
        format: The version of the file's format.
    """

    environment: Mapping[str, str]
    kind: str
    mesh: Mapping[str, int]
    devices: tuple[int, ...]
    arguments: Mapping[str, str]
    options: Mapping[str, Any]
    share: float | None = None
    peak: int = 0
    format: int = FORMAT

    @classmethod
    def of(cls, mesh: Mesh, arguments: tuple, options: Mapping[str, Any], share: float | None = None) -> Header:
        """Return the header of a step on this machine. `arguments` are the state, the batch and the other arguments."""
        kinds = {kind_of(device.device_kind) or device.device_kind for device in mesh.devices.flat}
        named, _ = jax.tree_util.tree_flatten_with_path(dict(zip(("state", "batch", "args"), arguments, strict=True)))
        described = {name_of(path): f"{getattr(x, 'dtype', type(x).__name__)}{list(np.shape(x))}" for path, x in named}
        return cls(
            {"jax": jax.__version__} | environment(),
            " and ".join(sorted(kinds)),
            dict(mesh.shape),
            tuple(device.id for device in mesh.devices.flat),
            described,
            dict(options),
            share,
        )

    def differences(self, here: Header) -> Iterator[str]:
        """Yield a sentence for each difference for which the executable cannot be that of `here`."""
        for name in OF_EXECUTABLES:
            if (of_file := self.environment.get(name)) != (present := here.environment.get(name)):
                yield f"The file was written with {name} {of_file}, and this is {name} {present}."
        for what in ("kind", "mesh", "devices"):
            if (of_file := getattr(self, what)) != (present := getattr(here, what)):
                yield f"It was compiled for the {what} {of_file}, and this is the {what} {present}."
        paths = dict.fromkeys([*self.arguments, *here.arguments])
        changed = [path for path in paths if self.arguments.get(path) != here.arguments.get(path)]
        for path in changed[:MOST_NAMED]:
            of_file, present = (of.arguments.get(path, "missing") for of in (self, here))
            yield f"{path} is {of_file} in the file, and {present} here."

    def other_differences(self, here: Header) -> str:
        """Return a sentence on versions and options of JAX that may have changed the program."""
        names = [name for name, value in self.environment.items() if here.environment.get(name) != value]
        each = [f"{name} {self.environment[name]}, now {here.environment.get(name)}" for name in names]
        return f" The file was written with {', '.join(each)}." if each else ""


def name_of(path: tuple) -> str:
    """Return a path in a dict with the keys `"state"`, `"batch"` and `"args"` as a name: `state.params['w']`."""
    return f"{path[0].key}{jax.tree_util.keystr(path[1:])}"


def check_path(path: str | os.PathLike) -> None:
    """Raise an error, before a step is compiled for minutes, if its executable cannot be written to this path."""
    if not Path(path).parent.is_dir():
        raise ValueError(f"There is no folder {Path(path).parent} for the executable. Make it first.")
    if Path(path).is_dir():
        raise ValueError(f"{os.fspath(path)} is a folder, and an executable is a file. Give a path such as step.zip.")


def check_savable(state: ZeroState) -> None:
    """Raise an error if a step with this state is several programs, or if the shapes of a state have no shardings."""
    if state.plan.offloaded:
        raise ValueError(
            "With offloaded optimizer state a step is several programs, and an executable file has one. Use "
            "zerojax.cache_compilations, which keeps all of them."
        )
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if isinstance(x, jax.ShapeDtypeStruct) and x.sharding is None:
            raise ValueError(
                f"state{jax.tree_util.keystr(path)} is a shape without a sharding, so the program would not be that of "
                f"a state on the mesh. Make the shapes with tx.create(jax.eval_shape(init))."
            )


def write(path: str | os.PathLike, header: Header, lowered: Any, compiled: Any) -> None:
    """Write an executable to a file, with its peak in the header. Only process 0 writes.

    Raises:
        ValueError: If the program calls Python functions, or JAX cannot serialise it.
    """
    text, advice = lowered.as_text(), "Use zerojax.cache_compilations instead of an executable file."
    if CALLBACK.search(text):
        raise ValueError(
            "The step calls a Python function (jax.debug.print, jax.debug.callback, io_callback or pure_callback), "
            f"which exists only in this process. Remove the call, or do not save the step. {advice}"
        )
    try:
        executable, _, _ = serialize_executable.serialize(compiled)
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"JAX does not serialise this step: {error}. {advice}") from error
    if jax.process_index() > 0:
        return
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
            file.writestr(HEADER, json.dumps(dataclasses.asdict(header) | {"peak": peak_bytes(compiled)}, indent=1))
            file.writestr(PROGRAM, text)
            file.writestr(EXECUTABLE, executable)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class NotLoaded(Exception):
    """The reason why a file is not loaded, as sentences."""


class ExecutableFile:
    """A file with the executable of a step, which the step loads at its first call."""

    def __init__(self, path: str | os.PathLike, program: StepProgram, fitting: StepFitting | None, *, required: bool):
        """Keep the path, and the program of the step that may load the file."""
        self._path, self._program, self._fitting, self._required = Path(path), program, fitting, required
        self._found: dict[Any, tuple[JittedStep, CompilerOptions] | None] = {}

    @property
    def found(self) -> list[CompilerOptions]:
        """Return the compiler options of the executable for each set of arguments for which it was loaded."""
        return [found[1] for found in self._found.values() if found is not None]

    def loaded(self, state: ZeroState, rows: Any, args: tuple) -> tuple[JittedStep, CompilerOptions] | None:
        """Return the functions of the step with the executable, and its compiler options.

        If the file is not the executable of the step for these arguments, return None and warn, once per set of shapes.

        Raises:
            ValueError: If the executable is required, and the file is not that of the step for these arguments.
        """
        # An executable does not place its arguments anew. The user may have placed the state and the arguments.
        key = placed_signature_of((state, rows, args))
        if key not in self._found:
            self._found[key] = self._load(state, rows, args)
        return self._found[key]

    def _load(self, state: ZeroState, rows: Any, args: tuple) -> tuple[JittedStep, CompilerOptions] | None:
        found, why = None, ""
        memory = None if self._fitting is None else self._fitting.memory  # asks all processes
        try:
            found = self._read(state, rows, args, memory)
        except NotLoaded as reason:
            why = str(reason)
        # Processes must run one executable: kernels and the order of collectives may differ between two.
        if is_of_all(self._program.config.mesh):
            said = Processes("executable").exchange("load an executable", why or f"digest {found and found[2]}")
            reasons = [f"On process {i}: {one}" for i, one in enumerate(said) if not one.startswith("digest ")]
            differ = len(set(said)) > 1 and not reasons
            why = (*reasons, "The processes have different files." if differ else "")[0]
        if found is not None and not why:
            return found[:2]
        failure = f"The step does not load {os.fspath(self._path)!r}. {why}"
        if self._required:
            raise ValueError(f"{failure} Save the executable again, or call step.load without required=True.")
        warnings.warn(f"{failure} It is compiled instead.", stacklevel=6)
        return None

    def _read(
        self, state: ZeroState, rows: Any, args: tuple, memory: int | None
    ) -> tuple[JittedStep, CompilerOptions, str]:
        """Return the functions with the executable, the compiler options, and a digest of the file."""
        config = self._program.config
        try:
            with zipfile.ZipFile(self._path) as file:
                fields = json.loads(file.read(HEADER))
                if fields["format"] != FORMAT:
                    raise NotLoaded(f"Its format is {fields['format']}, and this version reads {FORMAT}.")
                header = Header(**fields | {"devices": tuple(fields["devices"])})
                text, executable = file.read(PROGRAM).decode(), file.read(EXECUTABLE)
            here = Header.of(config.mesh, (state, rows, args), header.options)
            differences = list(header.differences(here))
        except OSError as error:
            raise NotLoaded(f"It cannot be read: {error}.") from error
        except (zipfile.BadZipFile, zlib.error, EOFError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise NotLoaded(f"It is no intact file of step.save: {error}.") from error
        if state.plan.offloaded or config.params_on_disk:
            raise NotLoaded("With offloaded state a step is several programs, and a file has one.")
        if differences:
            raise NotLoaded(" ".join(differences))
        jitted = self._jitted(header, memory)
        lowered = jitted.trace(state, rows, args).lower()
        if lowered.as_text() != text:
            raise NotLoaded(different_program(lowered, text) + header.other_differences(here))
        # Unpickled only now: the pickle needs the classes of the JAX version that wrote it.
        devices = list(config.mesh.devices.flat)
        try:
            run = serialize_executable.deserialize_and_load(
                executable, lowered.in_tree, lowered.out_tree, devices[0].client, devices
            )
        except Exception as error:  # unpickling raises errors of any type, and the other processes wait for an answer
            said = (str(error) or type(error).__name__).splitlines()[0]
            raise NotLoaded(f"The executable does not load: {said}.") from error
        is_fixed = self._program.options.deterministic
        options = CompilerOptions(header.options, file=os.fspath(self._path), deterministic=is_fixed)
        return jitted.with_executable(run), options, hashlib.sha256(executable).hexdigest()

    def _jitted(self, header: Header, memory: int | None) -> JittedStep:
        """Return the functions of the step with the choices of the file.

        Raises:
            NotLoaded: If the choices are not those of the step.
        """
        program, fitting, options = self._program, self._fitting, header.options
        allowed = ({}, dict(CANDIDATE)) if program.chooses_options else (dict(program.users_options),)
        if options not in allowed:
            raise NotLoaded(
                f"It was compiled with the options {options}, and the step has the options "
                f"{' or '.join(map(str, allowed))}."
            )
        if (fitting is None) != (header.share is None):
            raise NotLoaded(
                f"The file is of a step {'without' if fitting else 'with'} memory=, and this is a step "
                f"{'with' if fitting else 'without'} it."
            )
        if fitting is None or header.share is None:
            return JittedStep(program, options)
        if memory is not None and header.peak > memory:
            raise NotLoaded(
                f"The executable takes {format_bytes(header.peak)} per device, and the step may take "
                f"{format_bytes(memory)}."
            )
        return fitting.with_share(header.share).with_options(options)


def different_program(lowered: Any, text: str) -> str:
    """Return a sentence that names the first line in which a lowered program differs from the program of a file."""
    both = lines_of(lowered.as_text()), lines_of(text)
    place = first_difference(*both)
    one, other = around_difference(*(lines[place][1].strip() if place < len(lines) else "the end" for lines in both))
    where = origin(lowered.as_text, place)
    return (
        f"The loss, the optimizer or an option has changed, because the programs differ{where}: line {place + 1} is "
        f"`{one}`, and in the file `{other}`."
    )
