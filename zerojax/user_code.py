"""Read arguments of the command line, such as numbers, names, and objects in the user's files."""

import contextlib
import importlib.util
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import optax

from zerojax.config.precision import Precision
from zerojax.offload.options import Offload

REFERENCE = re.compile(r"(.+\.py):(\w+)")
MOST_NAMES = 8
MAKE_STEP = "make_step"
PRESETS = ("fp32", "bf16", "fp16")  # the presets of `Precision`


def load_object(text: str) -> Any:
    """Load the object that text such as `"model.py:make_model"` names: a file, and a name that the file defines."""
    if not REFERENCE.fullmatch(text):
        raise ValueError(f"{text!r} is not understood. Give FILE.py:NAME, such as model.py:make_model.")
    path, name = split_reference(text)
    with running(path):
        return load_from_file(path, name)


def load_from_file(path: Path, name: str) -> Any:
    """Run a file, and return the object that it defines under a name. Raise a `ValueError` if this fails."""
    if not path.is_file():
        raise ValueError(f"There is no file {path}.")
    spec = importlib.util.spec_from_file_location(f"zerojax user file {path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file. Give FILE.py or FILE.py:NAME.")
    # Dataclasses, such as Linen modules, look up their module in sys.modules. A name with spaces shadows no module.
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
def running(path: Path, options: Sequence[str] = ()) -> Iterator[None]:
    """Enter a context to run the code of `path`, with its folder in `sys.path` and `options` as `sys.argv[1:]`.

    The code's output is captured. Output that bypasses Python, such as a subprocess's, is sent to standard error,
    because standard output is for results. A `SystemExit` becomes a `ValueError`.
    """
    errors, before = io.StringIO(), sys.argv
    sys.argv = [str(path), *options]
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
        sys.argv = before
        sys.path.remove(str(path.parent))


def split_reference(text: str) -> tuple[Path, str]:
    match = REFERENCE.fullmatch(text)
    return (Path(match[1]), match[2]) if match else (Path(text), MAKE_STEP)


def call_user_code(make: Callable[[], Any], what: str, how: str = "fails") -> Any:
    """Call a function of the user. Convert any error to a `ValueError` whose message begins with `what` and `how`."""
    try:
        return make()
    except Exception as error:
        raise ValueError(f"{what} {how}: {type(error).__name__}: {error}") from error


def load_program(text: str, options: Sequence[str]) -> tuple:
    """Call the function that text such as `"train.py:make_step"` names. Return its results: a step and arguments."""
    path, name = split_reference(text)
    with running(path, options):
        made = call_user_code(load_from_file(path, name), f"{name} of {path}")
    if not isinstance(made, tuple) or len(made) < 3:
        raise ValueError(
            f"{name} of {path} returns {type(made).__name__}, not (step, state, batch, *args): a step and its "
            f"arguments. For plan, the arguments may be shapes; compare needs arrays."
        )
    return made


def load_model(text: str) -> Any:
    """Return a number for text such as `"7.5e9"`, or a model or its shapes for text such as `"model.py:make_model"`.

    If the text names a function, the function is traced, and shapes are returned. Other objects are returned unchanged.
    """
    with contextlib.suppress(ValueError):
        return float(text)
    if not REFERENCE.fullmatch(text):
        raise ValueError(f"{text!r} is no number of parameters, such as 7.5e9, and no FILE.py:NAME.")
    found = load_object(text)
    is_leaf = jax.tree.structure(found) == jax.tree.structure(0)  # an Equinox module is callable, but is also a tree
    nnx = sys.modules.get("flax.nnx")
    if not is_leaf or not callable(found) or (nnx and isinstance(found, nnx.Module)):
        return found
    with running(split_reference(text)[0]):
        return call_user_code(lambda: jax.eval_shape(found), text, "cannot be traced")


def load_transformation(text: str) -> optax.GradientTransformation:
    """Load an optimizer from optax by a name such as `"adamw"`, or from a file by text such as `"train.py:tx"`."""
    remedy = "Give one that needs only a learning rate, such as adamw, lion or adafactor, or FILE.py:NAME."
    if REFERENCE.fullmatch(text):
        given: Any = load_object(text)
        made: Any = given
        if callable(given) and not hasattr(given, "update"):
            with running(split_reference(text)[0]):
                made = call_user_code(given, text)
        if not (hasattr(made, "init") and hasattr(made, "update")):
            raise ValueError(
                f"{text} is a {type(made).__name__}, which lacks the init and update of an optax transformation. Give "
                f"one, or a function without arguments that returns one."
            )
        return made
    make = getattr(optax, text, None) or getattr(optax.contrib, text, None)
    if not callable(make):
        raise ValueError(f"optax has no optimizer {text!r}. {remedy}")
    try:
        made = make(1e-3)
        jax.eval_shape(made.init, {"w": jax.ShapeDtypeStruct((2, 2), "float32")})
    except Exception as error:  # optax.chain accepts the learning rate as a transformation, and only `init` fails
        raise ValueError(f"optax.{text}(1e-3) is no optimizer: {type(error).__name__}: {error}. {remedy}") from error
    return made


def parse_precision(text: str | None) -> Precision | None:
    if text is not None and text not in PRESETS:
        raise ValueError(f"Unknown precision {text!r}. Give one of {', '.join(PRESETS)}.")
    return None if text is None else getattr(Precision, text)()


def parse_offload(text: str | None) -> Offload | None:
    if text is None:
        return None
    where: Any = text.removesuffix("+params")
    return Offload(optimizer=where, params=None if where == text else where, path="." if where == "disk" else None)
