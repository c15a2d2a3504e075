"""Keep tracebacks of a failed save out of the log: the save raises one error, which has the same reason."""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any

from zerojax.checkpoint.directory import TEMPORARY

WRITER = "/orbax/checkpoint/"
CLOSED = "Event loop is closed"


def quiet_writes() -> None:
    """Drop what orbax's threads and asyncio log about errors in writing a save's folder."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(is_of_another)  # a logger takes the same filter only once


def is_of_another(record: logging.LogRecord) -> bool:
    """Return whether a log record is not about an error in writing a file of a save."""
    error: Any = record.exc_info[1] if record.exc_info else None
    files = [] if error is None else [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    # When asyncio collects a future that nobody awaited, it logs the future's error without a traceback.
    unawaited = record.name == "asyncio" and error is not None
    by_a_write = unawaited or any(WRITER in file for file in (record.pathname, *files))
    return not (by_a_write and TEMPORARY in f"{record.getMessage()} {error}")


class QuietLoops:
    """A `sys.unraisablehook` that drops one error of TensorStore's threads.

    A write that failed closes the event loop of the other writes, and each of them then complains about that.
    """

    def __init__(self):
        """Begin to drop the error."""
        hook = sys.unraisablehook
        self._previous = hook._previous if isinstance(hook, QuietLoops) else hook
        sys.unraisablehook = self

    def __call__(self, unraisable: Any) -> None:
        """Hand every other error to the previous hook."""
        if not (isinstance(unraisable.exc_value, RuntimeError) and str(unraisable.exc_value) == CLOSED):
            self._previous(unraisable)

    def end(self) -> None:
        """Restore the previous hook, unless somebody has set another one. Not called after a failed save."""
        if sys.unraisablehook is self:
            sys.unraisablehook = self._previous
