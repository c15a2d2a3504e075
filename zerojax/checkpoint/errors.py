"""Define the errors of checkpoints."""

import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger("zerojax.checkpoint")
MAX_LENGTH = 1000


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, found or read. The run's state is unchanged."""


class ReplacedError(CheckpointError):
    """Another run, which saves to the same directory, removed or replaced the checkpoint while this run read it."""


class DamagedError(CheckpointError):
    """Files of a committed checkpoint differ from the files that were written.

    Attributes:
        step: The checkpoint's step.
        damage: `(leaf, file, problem)` for each damaged file. The leaf is empty if the file belongs to no leaf.
        intact: The newest intact checkpoint of another step. None if there is none, or if no other step was checked.
    """

    def __init__(self, message: str, *, step: int, damage: tuple = (), intact: int | None = None):
        super().__init__(message)
        self.step, self.damage, self.intact = step, damage, intact


def attempt(work: Callable[..., Any], *args: Any) -> str:
    """Call a function. Return its error as one line of text, or an empty string if it succeeds."""
    try:
        work(*args)
    except Exception as error:
        log.debug("", exc_info=True)
        return in_one_line(error)
    return ""


def in_one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:MAX_LENGTH]
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}"
