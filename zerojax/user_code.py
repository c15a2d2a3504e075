"""What the command line names: numbers, words, and objects in the user's own files."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import jax
import optax

from .config import Offload, Precision

FORM = re.compile(r"(.+\.py):(\w+)")
NAMED = 8


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
    if not path.is_file():
        raise ValueError(f"There is no file {path}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # its own imports, as if it had been run
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.parent))
    if not hasattr(module, name):
        own = [key for key, value in vars(module).items() if callable(value) and value.__module__ == path.stem]
        more = f"; it defines {', '.join(own[:NAMED])}" if own else ""
        raise ValueError(f"{path} does not define {name}{more}.")
    return getattr(module, name)


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
    try:
        return traced(given)
    except Exception as error:
        raise ValueError(f"{text} cannot be traced: {type(error).__name__}: {error}") from error


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
        return found if hasattr(found, "update") else found()
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
