"""Keep tracebacks of a failed save out of the log: it raises one error, which says what they say."""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any

from zerojax.checkpoint.directory import TEMPORARY

WRITER = "/orbax/checkpoint/"
CLOSED = "Event loop is closed"


def quiet_writes() -> None:
    """Drop what orbax' threads and asyncio log of errors in writing a save's folder; records of others pass."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(is_of_another)  # once: the same filter is not added again


def is_of_another(record: logging.LogRecord) -> bool:
    """Return whether a record is about something other than orbax's error about a file of a save."""
    error: Any = record.exc_info[1] if record.exc_info else None
    files = [] if error is None else [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    # A future that nobody awaited any more is logged by asyncio when it is collected, without a traceback.
    unawaited = record.name == "asyncio" and error is not None
    by_a_write = unawaited or any(WRITER in file for file in (record.pathname, *files))
    return not (by_a_write and TEMPORARY in f"{record.getMessage()} {error}")


class QuietLoops:
    """Drops what TensorStore's threads say when a write that failed has closed the event loop of the others."""

    def __init__(self):
        """Begin to drop."""
        hook = sys.unraisablehook
        self._previous = hook._previous if isinstance(hook, QuietLoops) else hook
        sys.unraisablehook = self

    def __call__(self, unraisable: Any) -> None:
        """Hand on what is something else."""
        if not (isinstance(unraisable.exc_value, RuntimeError) and str(unraisable.exc_value) == CLOSED):
            self._previous(unraisable)

    def end(self) -> None:
        """Stop, if nobody has set another hook; after a failure the other writes may still end, so it goes on."""
        if sys.unraisablehook is self:
            sys.unraisablehook = self._previous
