"""What the command line names: numbers, words, and objects in the user's own files."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import optax

from zerojax.config import Offload, Precision

FORM = re.compile(r"(.+\.py):(\w+)")
NAMED = 8
MAKE_STEP = "make_step"


def loaded(text: str) -> Any:
    """An object in a file: `"model.py:make_model"`.

    Args:
        text: The file, a colon, and a name that the file defines.

    Raises:
        ValueError: If there is no such file or name, or the file cannot be run.
    """
    found = FORM.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} is not understood. Give FILE.py:NAME, such as model.py:make_model.")
    path, name = Path(found.group(1)), found.group(2)
    with beside(path):
        return named_in(path, name)


def named_in(path: Path, name: str) -> Any:
    """An object in a file, which is run.

    Raises:
        ValueError: If there is no such file or name, or the file cannot be run.
    """
    if not path.is_file():
        raise ValueError(f"There is no file {path}.")
    spec = importlib.util.spec_from_file_location(f"zerojax user file {path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file. Give FILE.py or FILE.py:NAME.")
    # Dataclasses, and so Linen modules, look their module up here; under a name that hides no other module.
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        own = [key for key, value in vars(module).items() if callable(value) and value.__module__ == spec.name]
        more = f"; it defines {', '.join(own[:NAMED])}" if own else ""
        raise ValueError(f"{path} does not define {name}{more}.")
    return getattr(module, name)


@contextlib.contextmanager
def beside(path: Path) -> Iterator[None]:
    """While a file's code runs: its own imports are found, and what it prints or exits with is kept back.

    Its output would mix with what is asked for.

    Raises:
        ValueError: If it exits.
    """
    said = io.StringIO()
    sys.path.insert(0, str(path.parent))
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            yield
    except SystemExit as error:  # of argparse, which has said why
        why = said.getvalue().strip().split("\n")[-1] or f"it exits with {error.code}"
        raise ValueError(f"{path} cannot be used: {why}") from error
    finally:
        sys.path.remove(str(path.parent))


def place_of(text: str) -> tuple[Path, str]:
    """The file and the name in `"train.py"` or `"train.py:make_step"`."""
    found = FORM.fullmatch(text)
    return (Path(found[1]), found[2]) if found else (Path(text), MAKE_STEP)


def called(make: Callable[[], Any], what: str, how: str = "fails") -> Any:
    """What a user's function gives.

    Raises:
        ValueError: If it raises anything.
    """
    try:
        return make()
    except Exception as error:
        raise ValueError(f"{what} {how}: {type(error).__name__}: {error}") from error


def program(text: str, options: Sequence[str]) -> tuple:
    """What a function in a file gives: a step, its state, a batch and further arguments.

    Args:
        text: `"train.py"` or `"train.py:make_step"`; the name is `MAKE_STEP` unless given.
        options: What the file finds in `sys.argv` after its own name, while it runs.

    Raises:
        ValueError: If there is no such file or name, it fails or exits, or gives something else.
    """
    path, name = place_of(text)
    before = sys.argv
    sys.argv = [str(path), *options]
    try:
        with beside(path):
            made = called(named_in(path, name), f"{name} of {path}")
    finally:
        sys.argv = before
    if not isinstance(made, tuple) or len(made) < 3:
        raise ValueError(
            f"{name} of {path} gives {type(made).__name__}, not (step, state, batch, *args): what plan takes, of which "
            f"shapes are enough but for the step."
        )
    return made


def model(text: str) -> Any:
    """A number of parameters, or the shapes of those that a function gives.

    The function is traced, not run. It returns parameters or an nnx module; or, and then it
    is run, a Linen module and the inputs of its `init`.

    Args:
        text: `"7.5e9"` or `"model.py:make_model"`.

    Raises:
        ValueError: If it is neither, or the model cannot be traced.
    """
    try:
        return float(text)
    except ValueError:
        pass
    if not FORM.fullmatch(text):
        raise ValueError(f"{text!r} is no number of parameters, such as 7.5e9, and no FILE.py:NAME.")
    given = loaded(text)
    if not callable(given):
        return given
    with beside(place_of(text)[0]):
        return called(lambda: traced(given), text, "cannot be traced")


def traced(make: Any) -> Any:
    """The shapes of the parameters that a function without arguments makes, or of those of the module it makes."""
    try:
        return jax.eval_shape(make)
    except TypeError:  # what it makes is no tree of arrays
        module, *inputs = made if isinstance(made := make(), tuple) else (made,)
        return jax.eval_shape(module.init, jax.random.key(0), *inputs)


def transformation(text: str) -> optax.GradientTransformation:
    """An optimizer of optax by its name, or an object in a file; the learning rate does not change its state.

    Args:
        text: `"adamw"` or `"train.py:tx"`.

    Raises:
        ValueError: If there is no such optimizer.
    """
    if FORM.fullmatch(text):
        found: Any = loaded(text)
        if hasattr(found, "update"):
            return found
        with beside(place_of(text)[0]):
            return called(found, text)
    make = getattr(optax, text, None) or getattr(optax.contrib, text, None)
    if not callable(make):
        raise ValueError(
            f"optax has no optimizer {text!r}. Give one such as adamw, lion or adafactor, or FILE.py:NAME."
        )
    try:
        made = make(1e-3)
    except TypeError as error:
        raise ValueError(f"optax.{text} is not made of a learning rate alone. Give FILE.py:NAME instead.") from error
    if not isinstance(made, optax.GradientTransformation):
        raise ValueError(f"optax.{text} is no optimizer. Give one such as adamw, lion or adafactor, or FILE.py:NAME.")
    return made


def precision(text: str | None) -> Precision | None:
    """A preset of `Precision` by its name.

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


def offload(text: str | None) -> Offload | None:
    """Where optimizer state waits.

    Args:
        text: `"host"` or `"disk"`; None for the device.

    Raises:
        ValueError: If it is neither.
    """
    if text is None:
        return None
    return Offload(optimizer=text, path="." if text == "disk" else None)  # pyright: ignore[reportArgumentType]
