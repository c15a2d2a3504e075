"""The object that saves and restores a run: asynchronous, verified, atomic, at any stage and number of devices."""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

from zerojax.checkpoint import data_state
from zerojax.checkpoint import directory as folders
from zerojax.checkpoint.errors import CheckpointError, no_zero_state
from zerojax.checkpoint.processes import Processes
from zerojax.checkpoint.restoring import Restored, restore
from zerojax.checkpoint.saving import Save
from zerojax.checkpoint.verifying import newest_verified, reading, retried, verify_steps
from zerojax.comm.explicit import on_auto_mesh
from zerojax.offload.lock import Lock
from zerojax.placement.unusable import problem_of
from zerojax.train.state import ZeroState

log = logging.getLogger("zerojax.checkpoint")
TIMEOUT = 600.0


class Checkpointer:
    """Saves states into a directory and restores them, at any stage, mesh and number of devices.

    A checkpoint is committed atomically, each of its files has a digest that is verified when it
    is restored, and the newest `keep` stay. All processes of a run call it alike; calls of
    several threads are serialized. What is under way when the interpreter exits is finished first.

    Attributes:
        directory: Where the checkpoints are; one run at a time writes there.
        keep: How many are kept, the newest; None is all.
        every: `save` does nothing unless this divides the step.
        timeout: Seconds after which a process that does not answer is given up.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int | None = 3,
        every: int = 1,
        timeout: float = TIMEOUT,
        read_only: bool = False,
    ):
        """Open a directory, made if it is not there.

        Args:
            directory: On a file system that all processes see; `~` is the user's.
            keep: How many checkpoints stay, the newest; None is all.
            every: In steps.
            timeout: In seconds: how long a process waits for the others while saving.
            read_only: Whether to restore alone, beside a run that writes.

        Raises:
            CheckpointError: If another run writes there, or the directory cannot be written.
            ValueError: If a number is out of range, or `directory` is empty.
        """
        for name, value in (("keep", keep), ("every", every)):
            if not (name == "keep" and value is None) and (isinstance(value, bool) or not value or value < 1):
                raise ValueError(f"Checkpointer({name}=) counts and must be at least 1, but is {value!r}.")
        if not os.fspath(directory):
            raise ValueError('Checkpointer("") names no folder. Give one, such as "runs/gpt", or "." for this one.')
        self.directory = Path(directory).expanduser().absolute()
        self.keep, self.every, self.timeout, self.read_only = keep, every, timeout, read_only
        self._processes = Processes(timeout)
        self._last_save: Save | None = None
        self._failed: list[Save] = []
        self._lock: Lock | None = None
        self._mutex = threading.RLock()
        KNOWN.add(self)
        if not read_only:
            self._open()

    def _open(self) -> None:
        """Take the lock and remove what killed saves left; on the first process."""
        self._processes.require_same("open a Checkpointer", {"keep": self.keep, "every": self.every})
        failure = ""
        if self._processes.is_first:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._lock = folders.lock(self.directory)
                for name, outcome in folders.clean(self.directory).items():
                    log.warning("%s in %s, which a killed run left, %s.", name, self.directory, outcome)
            except (OSError, CheckpointError) as error:
                failure = f"Checkpoints cannot be written to {self.directory}: {error}"
        try:
            self._processes.agree("open", failure)
        except CheckpointError:
            self._unlock()  # another process cannot
            raise
        OPEN.add(self)

    def save(self, state: ZeroState, data: Any = None, *, step: int | None = None, force: bool = False) -> bool:
        """Begin to save a state; it is written while training goes on.

        What is saved is the state as it is at this call, even if the next step donates it.
        This waits for a save that is still under way.

        Args:
            state: The state of the run.
            data: What else goes with it: a pytree, or anything with `get_state` and
                `set_state` such as an iterator of grain, or a pytree that contains some. Small:
                it is kept as JSON, one file a process.
            step: Its number, an integer of any kind; default `int(state.step)`, which waits for
                the step. A loop that counts for itself gives its count and does not wait.
            force: Whether to save though `every` does not divide the step.

        Returns:
            Whether a save was begun. It is not if `every` does not divide the step, or this
            object has saved that step already.

        Raises:
            CheckpointError: If this save cannot begin, or the one before failed: why, and
                which checkpoint is the newest. The state is unchanged.
            TypeError: If `state` is no `ZeroState`, `data` cannot be written, or `step` is no int.
            ValueError: If `step` is negative, or not the same on every process; or if `state` was donated to a step
                before.
        """
        if not isinstance(state, ZeroState):
            raise no_zero_state("save takes", state)
        if problem := problem_of(None, "state", state):
            raise ValueError(problem)
        self._require_writable()
        step = folders.step_number(state.step if step is None else step)
        with self._mutex:
            last = self._last_save
            if (step % self.every and not force) or (last is not None and last.step == step and last.error is None):
                return False
            self.wait()
            text = data_state.dumps(data)
            self._remove_again()
            self._processes.require_same("save", {"step": step})
            save = Save(self.directory, step, keep=self.keep, processes=self._processes)
            try:
                on_auto_mesh(None, save.begin, state, text)
            except BaseException:
                self._failed.append(save)
                raise
            self._last_save = save
            return True

    def restore(
        self,
        like: ZeroState,
        *,
        step: int | None = None,
        data: Any = None,
        fallback: bool = False,
        partial: bool = False,
    ) -> Restored:
        """Restore a checkpoint into the layout of a state, whatever the one it was saved in.

        Args:
            like: A state of the same model and optimizer, at any stage, on any mesh, in any
                precision: live arrays, or shapes (`tx.create(shapes)`), which take no memory.
            step: Which one; None is the newest.
            data: What data is restored into: objects with `set_state` are set, and other
                nodes used. None gives it back as it was written.
            fallback: Whether to take the newest intact checkpoint, with a warning, where the
                one asked for is damaged.
            partial: Whether to restore what matches and keep the rest of `like` where the
                two differ.

        Returns:
            The state, the data, the step, and what was not restored.

        Raises:
            CheckpointError: If there is no checkpoint, or the run that writes there replaced it
                while it was read.
            DamagedError: If it is damaged, naming leaf and file, and the newest intact one.
            TypeError: If `like` is no `ZeroState`, or `step` is no int.
            ValueError: If it is of another tree, shape, type or optimizer.
        """
        with self._mutex:
            self.wait()
            self._processes.require_same("restore", {"step": step, "fallback": fallback, "partial": partial})

            def restored() -> Restored:
                manifest = newest_verified(self.directory, step, fallback, self._processes)
                self._last_save = None  # a run that went back may save the same steps again
                with reading(self.directory, manifest):
                    return restore(
                        self.directory, manifest, like, data=data, partial=partial, processes=self._processes
                    )

            # several processes would have to agree on it, while the others read
            return retried(restored) if self._processes.count == 1 else restored()

    def latest(self) -> int | None:
        """Return the newest step that has a checkpoint, or None if no step has one."""
        return max(self.steps(), default=None)

    def steps(self) -> list[int]:
        """Return all steps that have a checkpoint, ascending."""
        return folders.steps_in(self.directory)

    def verify(self, step: int | None = None) -> list[int]:
        """Check every file of every checkpoint, or of one.

        Args:
            step: Which one; None is all.

        Returns:
            The steps that were checked, all intact.

        Raises:
            CheckpointError: If there is no such checkpoint.
            DamagedError: Naming leaf and file of the first that is damaged.
        """
        with self._mutex:
            self.wait()
            return retried(lambda: verify_steps(self.directory, step))

    def wait(self) -> None:
        """Wait until the save under way is done.

        Raises:
            CheckpointError: If it failed.
        """
        with self._mutex:
            if (save := self._last_save) is None:
                return
            try:
                save.wait()
            except CheckpointError:
                self._failed.append(save)
                self._last_save = None  # reported once
                raise

    def _require_writable(self) -> None:
        """Raise an error unless this process may save."""
        if self.read_only:
            raise CheckpointError("This Checkpointer is read_only=True. Open one without it to save.")
        if self._lock is not None and not self._lock.held:
            raise CheckpointError(
                "This Checkpointer belongs to the process that this one was forked from. Save in that process, which "
                "has the arrays on its devices, too."
            )
        if self._lock is None and self._processes.is_first:
            raise CheckpointError("This Checkpointer is closed. Open another to save.")

    def _remove_again(self) -> None:
        """Remove what writes of failed saves brought back since."""
        while self._failed:
            self._failed.pop().remove_again()

    def close(self) -> None:
        """Wait as `wait` does, and let others write to the directory."""
        with self._mutex:
            try:
                self.wait()
            finally:
                self._remove_again()
                self._unlock()

    def _unlock(self) -> None:
        OPEN.discard(self)
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _after_fork(self) -> None:
        """Give up in a forked child what stays with the parent: its lock, its saves, and a mutex another thread had."""
        self._mutex, self._last_save, self._failed = threading.RLock(), None, []

    def __enter__(self) -> Checkpointer:
        """Return the object itself."""
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Close it; a save that failed does not hide the error that ends the block."""
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            warnings.warn(str(failure), stacklevel=2)


# Those that may have a save under way, and all that there are.
OPEN: set[Checkpointer] = set()
KNOWN: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


class FailedStream:
    """A stream that cannot be flushed at the interpreter's end, which then ends with status 120.

    A save that fails after the program's last line must change the exit status, or a launcher takes the run for a
    success. Python has no other way to do that so late: `SystemExit` and errors of functions that run at exit are only
    printed. `os._exit` would set a status, but would leave out the rest of the exit, such as other libraries' files.
    """

    def __init__(self, stream: Any):
        """Write to another stream."""
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the other stream."""
        return getattr(self._stream, name)

    def flush(self) -> None:
        """Flush the other stream."""
        self._stream.flush()
        if sys.is_finalizing():
            raise OSError("A save failed.")


def after_fork() -> None:
    """Forget saves in a forked child: their threads do not exist there, and what they write belongs to the parent."""
    OPEN.clear()
    for one in list(KNOWN):
        one._after_fork()


def close_open() -> None:
    """Finish the saves under way at exit, and report failures, also by the exit status."""
    for one in list(OPEN):
        try:
            one.close()
        except CheckpointError as error:
            log.error("%s", error)
            sys.stderr = FailedStream(sys.stderr)


# Not `atexit`, which runs once the interpreter's executors are shut down: saves need them.
threading._register_atexit(close_open)  # pyright: ignore[reportAttributeAccessIssue]
os.register_at_fork(after_in_child=after_fork)
