"""Arguments of the command line: numbers, names, and objects in the user's own files."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import optax

from zerojax.config import Offload, Precision

REFERENCE = re.compile(r"(.+\.py):(\w+)")
MOST_NAMES = 8
MAKE_STEP = "make_step"


class InitError(ValueError):
    """A module whose `init` fails; the message says what to give."""


def load_object(text: str) -> Any:
    """Load an object from a file: `"model.py:make_model"`.

    Args:
        text: The file, a colon, and a name that the file defines.

    Raises:
        ValueError: If there is no such file or name, or the file cannot be run.
    """
    if not REFERENCE.fullmatch(text):
        raise ValueError(f"{text!r} is not understood. Give FILE.py:NAME, such as model.py:make_model.")
    path, name = split_reference(text)
    with running(path):
        return load_from_file(path, name)


def load_from_file(path: Path, name: str) -> Any:
    """Run a file and return an object that it defines.

    Raises:
        ValueError: If there is no such file or name, or the file cannot be run.
    """
    if not path.is_file():
        raise ValueError(f"There is no file {path}.")
    spec = importlib.util.spec_from_file_location(f"zerojax user file {path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file. Give FILE.py or FILE.py:NAME.")
    # Dataclasses, and so Linen modules, look their module up here; the name shadows no other module.
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        own = [key for key, value in vars(module).items() if callable(value) and value.__module__ == spec.name]
        known = f"; it defines {', '.join(own[:MOST_NAMES])}" if own else ""
        raise ValueError(f"{path} does not define {name}{known}.")
    return getattr(module, name)


@contextlib.contextmanager
def running(path: Path) -> Iterator[None]:
    """Enter a context in which a file's code runs: imports from its folder work, and its output is captured.

    What it writes past Python to standard output, as its subprocesses do, goes to standard error.

    Raises:
        ValueError: If it exits.
    """
    errors = io.StringIO()
    sys.path.insert(0, str(path.parent))
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            yield
    except SystemExit as error:
        said = error.code if isinstance(error.code, str) else errors.getvalue()  # argparse prints the reason last
        reason = said.strip().split("\n")[-1] or f"it exits with {error.code}"
        raise ValueError(f"{path} cannot be used: {reason}") from error
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        sys.path.remove(str(path.parent))


def split_reference(text: str) -> tuple[Path, str]:
    """Return the file and the name in `"train.py:make_step"`; without a name, `MAKE_STEP`."""
    match = REFERENCE.fullmatch(text)
    return (Path(match[1]), match[2]) if match else (Path(text), MAKE_STEP)


def call(make: Callable[[], Any], what: str, how: str = "fails") -> Any:
    """Call a function of the user's.

    Raises:
        ValueError: If it raises anything.
    """
    try:
        return make()
    except InitError:
        raise
    except Exception as error:
        raise ValueError(f"{what} {how}: {type(error).__name__}: {error}") from error


def load_program(text: str, options: Sequence[str]) -> tuple:
    """Call a function in a file that returns a step, its state, a batch and further arguments.

    Args:
        text: `"train.py"` or `"train.py:make_step"`; the name is `MAKE_STEP` unless given.
        options: The file's own `sys.argv[1:]`, while it runs.

    Raises:
        ValueError: If there is no such file or name, it fails or exits, or returns something else.
    """
    path, name = split_reference(text)
    before = sys.argv
    sys.argv = [str(path), *options]
    try:
        with running(path):
            made = call(load_from_file(path, name), f"{name} of {path}")
    finally:
        sys.argv = before
    if not isinstance(made, tuple) or len(made) < 3:
        raise ValueError(
            f"{name} of {path} gives {type(made).__name__}, not (step, state, batch, *args), the arguments of a "
            f"step. For plan, shapes are enough for all but the step; compare needs arrays."
        )
    return made


def load_model(text: str) -> Any:
    """Return a number of parameters, a model as it is, or the shapes of the parameters that a function returns.

    A function that returns parameters or an nnx module is traced, not run. One that returns
    a Linen module and the inputs of its `init` is run. A module, or a tree of arrays, is not called.

    Args:
        text: `"7.5e9"` or `"model.py:make_model"`.

    Raises:
        ValueError: If it is neither, or the model cannot be traced.
    """
    try:
        return float(text)
    except ValueError:
        pass
    if not REFERENCE.fullmatch(text):
        raise ValueError(f"{text!r} is no number of parameters, such as 7.5e9, and no FILE.py:NAME.")
    found = load_object(text)
    path, _ = split_reference(text)
    with running(path):
        if has_init(found) or (isinstance(found, tuple) and found and has_init(found[0])):
            return init_shapes(found, text)
        is_leaf = jax.tree.structure(found) == jax.tree.structure(0)  # Equinox modules are callable trees
        nnx = sys.modules.get("flax.nnx")
        if not is_leaf or not callable(found) or (nnx and isinstance(found, nnx.Module)):
            return found
        return call(lambda: trace_params(found, text), text, "cannot be traced")


def trace_params(make: Callable[[], Any], text: str) -> Any:
    """Return the shapes of the parameters that a function without arguments returns, or what it returns instead.

    Args:
        make: The function.
        text: Where it is, for errors.
    """
    try:
        return jax.eval_shape(make)
    except TypeError:  # it returns no tree of arrays
        made = make()
        linen = has_init(made) or (isinstance(made, tuple) and made and has_init(made[0]))
        return init_shapes(made, text) if linen else made


def has_init(model: Any) -> bool:
    """Return whether an object is initialised from a key: a Linen module, or its class."""
    linen = sys.modules.get("flax.linen")
    if isinstance(model, type):
        return linen is not None and issubclass(model, linen.Module)
    return callable(getattr(model, "init", None)) and callable(getattr(model, "apply", None))


def init_shapes(made: Any, text: str) -> Any:
    """Return the shapes of the parameters of a module, or of a tuple of a module and the inputs of its `init`.

    Raises:
        InitError: If `init` fails, as it does without inputs, or for a class.
    """
    given = made if isinstance(made, tuple) and not has_init(made) else (made,)
    module: Any = given[0]
    inputs = given[1:]
    name = module.__name__ if isinstance(module, type) else type(module).__name__
    try:
        if isinstance(module, type):
            raise TypeError(f"{name} is a class")
        return jax.eval_shape(module.init, jax.random.key(0), *inputs)
    except Exception as error:
        number = f"with {len(inputs)} input{'s' * (len(inputs) != 1)}"
        raise InitError(
            f"{text}: {name} cannot be initialised {number}: {type(error).__name__}: {error}. The parameters of a Flax "
            f"module depend on the inputs of its init. Give a function that returns an instance and the inputs, such "
            f"as def make_model(): return {name}(...), jax.ShapeDtypeStruct((1, 128), jnp.int32)."
        ) from error


def load_transformation(text: str) -> optax.GradientTransformation:
    """Load an optimizer of optax by its name, or an object from a file. The rate does not change its state.

    Args:
        text: `"adamw"` or `"train.py:tx"`.

    Raises:
        ValueError: If there is no such optimizer.
    """
    if REFERENCE.fullmatch(text):
        given: Any = load_object(text)
        if hasattr(given, "update"):
            return given
        with running(split_reference(text)[0]):
            return call(given, text)
    make = getattr(optax, text, None) or getattr(optax.contrib, text, None)
    if not callable(make):
        raise ValueError(
            f"optax has no optimizer {text!r}. Give one such as adamw, lion or adafactor, or FILE.py:NAME."
        )
    try:
        made = make(1e-3)
        if isinstance(made, optax.GradientTransformation):
            jax.eval_shape(made.init, {"w": jax.ShapeDtypeStruct((2, 2), "float32")})
    except Exception as error:  # optax.chain takes the rate for a transformation, and finds out in init
        raise ValueError(f"optax.{text} is not made of a learning rate alone. Give FILE.py:NAME instead.") from error
    if not isinstance(made, optax.GradientTransformation):
        raise ValueError(f"optax.{text} is no optimizer. Give one such as adamw, lion or adafactor, or FILE.py:NAME.")
    return made


def parse_precision(text: str | None) -> Precision | None:
    """Return a preset of `Precision` by its name.

    Args:
        text: `"fp32"`, `"bf16"` or `"fp16"`; None for none.

    Raises:
        ValueError: If it is none of these.
    """
    presets = {"fp32": Precision.fp32, "bf16": Precision.bf16, "fp16": Precision.fp16}
    if text is None:
        return None
    if text not in presets:
        raise ValueError(f"Unknown precision {text!r}. Give one of {', '.join(presets)}.")
    return presets[text]()


def parse_offload(text: str | None) -> Offload | None:
    """Return the memory that optimizer state is offloaded to.

    Args:
        text: `"host"` or `"disk"`; None for the device.

    Raises:
        ValueError: If it is neither.
    """
    if text is None:
        return None
    return Offload(optimizer=text, path="." if text == "disk" else None)  # pyright: ignore[reportArgumentType]


def parse_setting(text: str) -> tuple[str, Any]:
    """Return the path and the value of `PATH=VALUE`, such as `optimizer.params.lr=3e-4`; the value is JSON.

    Raises:
        ValueError: If there is no `=`, or the value is no JSON.
    """
    path, equals, value = text.partition("=")
    try:
        if not equals:
            raise ValueError("there is no =")
        return path, json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{text!r} is no PATH=VALUE with a value of JSON ({error}). Write optimizer.params.lr=3e-4, and a word in "
            f"double quotes: 'scheduler.type=\"WarmupLR\"'."
        ) from error
