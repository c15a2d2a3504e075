"""A step that takes longer than it may ends its process, which says what it waits for: a scheduler restarts the run.

A process that died, or hangs, makes all others wait in their next collective for as long as they live.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax

from zerojax.compat import coordination_client

EXIT_STATUS = 75  # EX_TEMPFAIL of sysexits.h: to be tried again
PUBLISHED_EVERY_S = 1.0
LABELS_WITHIN_S = 120.0


@dataclasses.dataclass
class WatchedStep:
    """A step that has begun.

    Attributes:
        number: Which call this is, from 0.
        result: Something that it computes; None until it is dispatched.
        failed: Whether it raised.
    """

    number: int
    result: Any = None
    failed: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether the step is done, well or not."""
        return self.failed or (self.result is not None and (self.result.is_deleted() or self.result.is_ready()))


class Watchdog:
    """Waits for the steps of one loss, in a thread; each has its time from the end of the one before.

    Attributes:
        timeout: Seconds that a step may take.
    """

    def __init__(self, timeout: float, collectives: Callable[[], list[str]]):
        """Nothing is watched yet; `collectives()` gives the labels of a step's collectives, in order."""
        self.timeout, self._collectives = timeout, collectives
        self._steps: queue.SimpleQueue[WatchedStep | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self, number: int, *, compiles: bool) -> Iterator[WatchedStep]:
        """Watch what is done inside, and the `result` that it leaves; while it `compiles`, that does not count."""
        step = WatchedStep(number)
        if not compiles:
            self._watch(step)
        try:
            yield step
        except BaseException:
            step.failed = True
            raise
        if compiles:
            self._watch(step)

    def _watch(self, step: WatchedStep) -> None:
        if self._thread is None:
            work = _Waiting(self._steps, self.timeout, self._collectives)
            self._thread = threading.Thread(target=work.run, name="zerojax watchdog", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._steps.put, None)
        self._steps.put(step)


class _Waiting:
    """The thread's work; it holds no reference to the `Watchdog`, whose end ends it."""

    def __init__(self, steps: queue.SimpleQueue, timeout: float, collectives: Callable[[], list[str]]):
        self._steps, self._timeout, self._collectives = steps, timeout, collectives
        self._number, self._published, self._published_at = -1, -1, 0.0

    def run(self) -> None:
        """Wait for step after step."""
        while True:
            try:
                step = self._steps.get(timeout=PUBLISHED_EVERY_S)
            except queue.Empty:
                self._publish()
                continue
            if step is None:
                return
            self._number, begun = step.number, time.monotonic()
            while not step.has_ended:
                if time.monotonic() - begun > self._timeout:
                    self._end(step)
                self._publish()
                time.sleep(min(0.05, self._timeout / 20))

    def _publish(self) -> None:
        """Tell the others which step this process is in; no more often than they need to know."""
        now = time.monotonic()
        if jax.process_count() > 1 and self._number > self._published and now > self._published_at + PUBLISHED_EVERY_S:
            with suppress(Exception):  # the process that keeps it may be gone, which the timeout tells
                coordination_client().key_value_set(f"{_KEY}/{jax.process_index()}", str(self._number), True)
            self._published, self._published_at = self._number, now

    def _end(self, step: WatchedStep) -> None:
        """Say what is known, and end the process."""
        say = lambda text: print(text, file=sys.stderr, flush=True)
        index, count = jax.process_index(), jax.process_count()
        say(
            f"zerojax: step {step.number} did not end within timeout={self._timeout:g} s on process {index} of {count}."
        )
        for other, number in _numbers(count).items():
            if other != index and number < step.number:
                at = "no step" if number < 0 else f"step {number}"
                say(f"zerojax: process {other} was last seen in {at}: process {index} waits for it in a collective.")
        faulthandler.dump_traceback(sys.stderr)
        # The program is compiled once more, for its text: that may hang as the step does.
        thread = threading.Thread(target=self._say_collectives, args=(say,), daemon=True)
        thread.start()
        thread.join(LABELS_WITHIN_S)
        os._exit(EXIT_STATUS)

    def _say_collectives(self, say: Callable[[str], None]) -> None:
        with suppress(Exception):
            first, *rest = self._collectives()
            say(f"zerojax: the first collective of a step is {first}; {len(rest)} follow.")


_KEY = "zerojax/watchdog"  # no purpose of `comm.processes`


def _numbers(count: int) -> dict[int, int]:
    """The step that each process was last seen in; -1 for none."""
    found = dict.fromkeys(range(count), -1)
    if count > 1:
        with suppress(Exception):
            seen = coordination_client().key_value_dir_get(f"{_KEY}/")
            found |= {int(name.rsplit("/", 1)[-1]): int(number) for name, number in seen}
    return found
