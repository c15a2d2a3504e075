"""What can go wrong with a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger("zerojax.checkpoint")
MAX_LENGTH = 1000


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or does not exist; the run's state is unchanged."""


class ReplacedError(CheckpointError):
    """A checkpoint was removed or replaced while it was read, by a run that writes beside."""


class DamagedError(CheckpointError):
    """Files of a committed checkpoint are not what was written.

    Attributes:
        step: Its step.
        damage: `(leaf, file, what)` for each damaged file; the leaf is empty where the file
            belongs to none.
        intact: The newest other step that was verified; None if none was looked for, or none
            is intact.
    """

    def __init__(self, message: str, *, step: int, damage: tuple = (), intact: int | None = None):
        """Keep the facts beside the message."""
        super().__init__(message)
        self.step, self.damage, self.intact = step, damage, intact


def no_zero_state(wanted: str, found: Any) -> TypeError:
    """Return the error for a value that is not the wanted `ZeroState`."""
    return TypeError(
        f"{wanted} a ZeroState, as tx.create makes it for tx.train_step, not {type(found).__name__}. The state of a "
        f"loop of your own, such as a TrainState, is a tree of sharded arrays: orbax.checkpoint.StandardCheckpointer "
        f"saves it as it is, and restores it for this stage and mesh."
    )


def attempt(work: Callable[..., Any], *args: Any) -> str:
    """Call a function; its error in one line, empty if there was none."""
    try:
        work(*args)
    except Exception as error:
        log.debug("", exc_info=True)
        return in_one_line(error)
    return ""


def in_one_line(error: BaseException) -> str:
    """Return an error's type and text."""
    text = " ".join(str(error).split())[:MAX_LENGTH]
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}"
