"""`zerojax.progress`: show how far saves, restores, exports, reshards and first compilations are.

Code that takes long calls `tracking`, and `advance` while it goes on. Without a display, they do nothing. The
display only reads what it is told, so results do not depend on it.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

MEASURED_EVERY_S = 0.5
# Whatever a console raises must not end a save. Examples are a pipe whose reader has ended, a closed file, a console on
# which the user's own bars are live (a LiveError, up to rich 14.0), and an object of the user's with another `write`.
CONSOLE_ERRORS = (Exception,)

_DISPLAYS: list[Display] = []
_TASK: contextvars.ContextVar[Callable[[float], None] | None] = contextvars.ContextVar("task", default=None)


class Display:
    """Bars on a console, drawn while at least one task is under way. An error of the console never reaches the task."""

    def __init__(self, console: Console):
        """Prepare the bars. On a terminal, a bar disappears when its task ends; elsewhere each task prints one line."""
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        self._is_live, self._console = console.is_terminal or console.is_jupyter, console
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            *(BarColumn(), TaskProgressColumn(), TimeElapsedColumn()),
            console=console,
            transient=True,
            disable=not self._is_live,
            # rich would print to this console what a program prints, even if the program's output goes to a file.
            redirect_stdout=is_terminal(sys.stdout),
            redirect_stderr=is_terminal(sys.stderr),
        )
        self._lock, self._running, self._is_closed = threading.Lock(), 0, False

    def begin(self, description: str, total: float | None) -> TaskID | None:
        """Show a task. Return its number, or None if the console is closed."""
        with self._lock:
            self._running += 1
            with contextlib.suppress(*CONSOLE_ERRORS):
                if self._running == 1 and not self._is_closed:
                    self._bars.start()
                return self._bars.add_task(description, total=total)

    def update(self, task: TaskID | None, *, amount: float | None = None, completed: float | None = None) -> None:
        """Add to what is complete of a task, or set it."""
        if task is not None:
            with contextlib.suppress(*CONSOLE_ERRORS):
                self._bars.update(task, advance=amount, completed=completed)

    def end(self, task: TaskID | None, *, failed: bool) -> None:
        """Remove a task. Print a line about it, unless the bars are on a terminal."""
        with self._lock, contextlib.suppress(*CONSOLE_ERRORS):
            self._running -= 1
            if not self._running:
                self._bars.stop()
            one = next((one for one in self._bars.tasks if one.id == task), None)
            if one is None:
                return
            self._bars.remove_task(one.id)
            if not self._is_live and not self._is_closed:
                took = f"{one.description}: {'failed after' if failed else 'took'} {one.elapsed or 0:.1f} s"
                self._console.print(took, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Draw nothing any more, even if a task, such as a save in a thread, is still under way."""
        with self._lock, contextlib.suppress(*CONSOLE_ERRORS):
            self._is_closed = True
            self._bars.stop()


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is an open terminal. A program may have replaced or closed its streams."""
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):
        return False


@contextlib.contextmanager
def progress(console: Console | None = None) -> Iterator[None]:
    """Show bars for all long work of zerojax and for first compilations, while the block runs.

    Long work is saves, restores, exports, imports and `tx.reshard`.

    Only process 0 shows them, on standard error. If standard error is no terminal, such as a log file, nothing is
    shown, unless `console` is given. Bars disappear when their work ends. How long a compilation takes is unknown, so
    its bar has only the time since it began. The results are the same with and without the bars.

    Args:
        console: A console of `rich` to draw on. If it is no terminal, each task prints one line when it ends. None:
            standard error, if it is a terminal.

    Examples:
        >>> with zerojax.progress():
        ...     state = checkpoints.restore(tx.create(shapes)).state
        ...     train(state)
        >>> with zerojax.progress(rich.console.Console(file=sys.stderr)):  # lines for a log file
        ...     zerojax.checkpoint.export(state, "tuned")
    """
    from rich.console import Console

    console, is_asked = console or Console(stderr=True), console is not None
    if not (is_asked or console.is_terminal or console.is_jupyter):
        yield
        return
    display = Display(console)
    _DISPLAYS.append(display)
    try:
        yield
    finally:
        _DISPLAYS.remove(display)
        display.close()


@contextlib.contextmanager
def _showing(description: str, total: float | None = None) -> Iterator[Callable[..., None]]:
    """Show a task while the block runs. Yield `Display.update` of it, which does nothing if there is no display."""
    # Asked here, and not by `progress`, which a program may call before `jax.distributed.initialize`.
    if not _DISPLAYS or jax.process_index() > 0:
        yield lambda **_: None
        return
    display = _DISPLAYS[-1]
    task, failed = display.begin(description, total), True
    try:
        yield functools.partial(display.update, task)
        failed = False
    finally:
        display.end(task, failed=failed)


@contextlib.contextmanager
def tracking(
    description: str, total: float | None = None, *, measure: Callable[[], float] | None = None
) -> Iterator[None]:
    """Show a task while the block runs, if there is a display.

    Args:
        description: What the block does: `"Restoring step 3"`.
        total: The sum of what `advance` is called with, such as bytes. None: unknown.
        measure: A function that returns how much is complete. A thread calls it from time to time. None: the block
            calls `advance`.
    """
    over = threading.Event()
    with _showing(description, total) as update:

        def watch(measure: Callable[[], float]) -> None:
            while not over.wait(MEASURED_EVERY_S):
                with contextlib.suppress(OSError):
                    update(completed=measure())

        watcher = None if measure is None else threading.Thread(target=watch, args=(measure,), daemon=True)
        token = _TASK.set(lambda amount: update(amount=amount))
        try:
            if watcher is not None:
                watcher.start()
            yield
        finally:
            over.set()
            if watcher is not None:
                watcher.join()
            _TASK.reset(token)


def advance(amount: float) -> None:
    """Say that so much more of the task of this thread is complete. Does nothing if no task is shown."""
    if (task := _TASK.get()) is not None:
        task(amount)


def bytes_in(folder: Path) -> int:
    """Return the bytes that the files of a folder take on disk. A file that is removed meanwhile counts 0 bytes."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.lstat().st_blocks * 512
    return total
