"""Preemption: a signal lets the training loop save and end."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator, Sequence

import jax

log = logging.getLogger("zerojax.checkpoint")


class Preemption:
    """Whether the run was asked to end.

    Attributes:
        signal: Name of the signal that asked; None if none did.
    """

    def __init__(self):
        """Start with no request."""
        self.signal: str | None = None

    def reached(self, step: int) -> bool:
        """Return whether to save and leave after this step.

        All processes return True at the same step, though only one got the signal: they agree
        through jax's preemption service. Call it once a step.

        Args:
            step: The number of the step just done, the same on all processes.
        """
        if jax.process_count() == 1:
            return self.signal is not None
        from jax.experimental import multihost_utils

        if self.signal is None and multihost_utils.reached_preemption_sync_point(step):
            self.signal = "SIGTERM"
        return self.signal is not None


@contextlib.contextmanager
def on_preemption(signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT)) -> Iterator[Preemption]:
    """Let the loop inside finish its step, save and leave when a signal comes.

    The first signal is only recorded; a second one of the same kind has its usual effect, so
    that Ctrl-C twice stops at once. With several processes SIGTERM is left to jax's preemption
    service, and other signals are not handled, since the processes could not agree on them.

    Args:
        signals: Which signals ask the run to end.

    Yields:
        A `Preemption`, whose `reached(step)` is asked after each step.

    Raises:
        ValueError: If this is not the main thread, which alone can receive signals.

    Examples:
        >>> with on_preemption() as preemption:
        ...     for i in range(start, steps):
        ...         state, metrics = step(state, batch)
        ...         stop = preemption.reached(i)
        ...         checkpoints.save(state, data, step=i, force=stop)
        ...         if stop:
        ...             break
    """
    preemption = Preemption()
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("on_preemption must be called in the main thread: no other receives signals.")

    def note(number, frame):
        preemption.signal = signal.Signals(number).name
        signal.signal(number, before[number])
        log.warning("%s: saving after this step, then leaving. Once more stops at once.", preemption.signal)

    # a signal may come as soon as its handler is set
    before = {one: signal.getsignal(one) for one in signals if jax.process_count() == 1}
    try:
        for one in before:
            signal.signal(one, note)
        yield preemption
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
