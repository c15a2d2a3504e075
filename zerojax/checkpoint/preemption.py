"""Let a signal, such as the SIGTERM of a preemption, tell the training loop to save and end."""

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator, Sequence

import jax

log = logging.getLogger("zerojax.checkpoint")


class Preemption:
    """Says whether a signal has asked the run to end.

    Attributes:
        signal: Name of the received signal, or None.
    """

    def __init__(self):
        self.signal: str | None = None

    def reached(self, step: int) -> bool:
        """Return whether to save and leave the training loop after this step. Call this method once per step.

        All processes return True at the same step, even if only one received the signal: they agree through JAX's
        preemption service.

        Args:
            step: The number of the step that has just ended, the same on all processes.
        """
        if jax.process_count() == 1:
            return self.signal is not None
        from jax.experimental import multihost_utils

        if self.signal is None and multihost_utils.reached_preemption_sync_point(step):
            self.signal = "SIGTERM"
        return self.signal is not None


@contextlib.contextmanager
def on_preemption(signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT)) -> Iterator[Preemption]:
    """Let the training loop finish its step, save and leave when a signal comes.

    The first signal is only recorded. A second signal of the same kind has its usual effect, so a second Ctrl-C stops
    the run at once. With several processes, JAX's preemption service handles SIGTERM, and all other signals keep their
    usual effect, because the processes could not agree on a step.

    Args:
        signals: The signals that ask the run to end.

    Yields:
        A `Preemption`. Call its `reached(step)` after each step.

    Raises:
        ValueError: If this is not the main thread, which is the only one that receives signals.

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
        raise ValueError("on_preemption must be called in the main thread: no other thread receives signals.")

    def note(number, frame):
        preemption.signal = signal.Signals(number).name
        signal.signal(number, before[number])
        log.warning("%s: saving after this step, then leaving. A second signal stops at once.", preemption.signal)

    # All previous handlers are recorded first, because a signal may come as soon as its handler is set.
    before = {one: signal.getsignal(one) for one in signals if jax.process_count() == 1}
    try:
        for one in before:
            signal.signal(one, note)
        yield preemption
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
