"""Keep other libraries' tracebacks of a failed save out of the log. The save itself raises an error with the reason."""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any

from zerojax.checkpoint.directory import TEMPORARY

WRITER = "/orbax/checkpoint/"
CLOSED = "Event loop is closed"


def quiet_writes() -> None:
    """Drop the log records of orbax's threads and of asyncio about errors in writing a save's folder."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(is_of_another)  # adding a filter again has no effect


def is_of_another(record: logging.LogRecord) -> bool:
    """Return False for a log record about an error in writing a file of a save, and True for any other record."""
    error: Any = record.exc_info[1] if record.exc_info else None
    files = [] if error is None else [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    # When asyncio collects a future that nobody awaited, it logs the future's error without a traceback.
    unawaited = record.name == "asyncio" and error is not None
    by_a_write = unawaited or any(WRITER in file for file in (record.pathname, *files))
    return not (by_a_write and TEMPORARY in f"{record.getMessage()} {error}")


class QuietLoops:
    """A `sys.unraisablehook` that drops the error "Event loop is closed" of TensorStore's threads.

    A failed write closes the event loop of the other writes, and each of them then raises this error.
    """

    def __init__(self):
        """Set this object as the hook."""
        hook = sys.unraisablehook
        self._previous = hook._previous if isinstance(hook, QuietLoops) else hook
        sys.unraisablehook = self

    def __call__(self, unraisable: Any) -> None:
        """Drop the error "Event loop is closed". Hand every other error to the previous hook."""
        if not (isinstance(unraisable.exc_value, RuntimeError) and str(unraisable.exc_value) == CLOSED):
            self._previous(unraisable)

    def end(self) -> None:
        """Restore the previous hook, unless another hook was set meanwhile. After a failed save, the hook stays."""
        if sys.unraisablehook is self:
            sys.unraisablehook = self._previous
