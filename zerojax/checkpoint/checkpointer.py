"""The object that users hold: it saves, restores and verifies the checkpoints of one directory."""

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
from zerojax.offload.lock import DiskError, Lock, lock
from zerojax.placement.unusable import problem_of
from zerojax.train.state import ZeroState

log = logging.getLogger("zerojax.checkpoint")
TIMEOUT = 600.0


class Checkpointer:
    """Saves states into a directory and restores them, at any stage, mesh and number of devices.

    A checkpoint is committed atomically. Each of its files has a digest, which is verified before the checkpoint is
    restored. All processes of a run make the same calls; calls from several threads run one after the other. At exit,
    the interpreter waits for a save that is under way.

    Attributes:
        directory: The folder of the checkpoints. One run at a time writes there.
        keep: How many checkpoints are kept, the newest ones; None keeps all.
        every: `save` does nothing unless this divides the step.
        timeout: Seconds to wait for a process that does not answer.
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
        """Open a directory, and create it if it does not exist.

        Args:
            directory: A folder on a file system that all processes see. `~` is the user's home.
            keep: How many checkpoints to keep, the newest ones; None keeps all.
            every: Save only steps that this number divides.
            timeout: Seconds that a process waits for the others.
            read_only: Only restore and verify, while another run may write to the directory.

        Raises:
            CheckpointError: If another run writes there, or the directory cannot be written.
            ValueError: If `keep` or `every` is below 1, or `directory` is empty.
        """
        for name, value in (("keep", keep), ("every", every)):
            if not (name == "keep" and value is None) and (isinstance(value, bool) or not value or value < 1):
                raise ValueError(f"Checkpointer({name}={value!r}) is no count. Give an integer of at least 1.")
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
        """Take the directory's lock on the first process, and remove what killed saves left."""
        self._processes.require_same("open a Checkpointer", {"keep": self.keep, "every": self.every})
        failure = ""
        if self._processes.is_first:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._lock = lock(self.directory)
                for name, outcome in folders.clean(self.directory).items():
                    log.warning("%s in %s, which a killed run left, %s.", name, self.directory, outcome)
            except OSError as error:
                failure = f"Checkpoints cannot be written to {self.directory}: {error}"
            except DiskError as error:  # another run has the lock, or another program wrote `.lock`
                failure = f"Checkpoints cannot be written to {self.directory}: {error} "
                failure += "Checkpointer(..., read_only=True) restores beside it."
        try:
            self._processes.agree("open a Checkpointer", failure)
        except CheckpointError:
            self._unlock()  # another process failed
            raise
        OPEN.add(self)

    def save(self, state: ZeroState, data: Any = None, *, step: int | None = None, force: bool = False) -> bool:
        """Begin to save a state. It is written while training goes on.

        The state is saved as it is at this call, even if the next step donates it. If another save is still under
        way, this call waits for it first.

        Args:
            state: The state of the run.
            data: Anything small that belongs to the run: a pytree of plain values and arrays, or of objects with
                `get_state` and `set_state`, such as iterators of grain. It is kept as JSON, one file per process.
            step: The number of the step. The default, `int(state.step)`, waits until the step is computed; a loop
                that counts its own steps gives its count and does not wait.
            force: Save even if `every` does not divide the step.

        Returns:
            Whether a save was begun. False if `every` does not divide the step, or if this object has already saved
            that step.

        Raises:
            CheckpointError: If this save cannot begin, or the save before failed. The message says why, and which
                checkpoint is the newest. The state is unchanged.
            TypeError: If `state` is no `ZeroState`, `data` cannot be written, or `step` is no integer.
            ValueError: If `step` is negative or differs between processes, or if `state` was donated to a step.
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
        """Restore a checkpoint into the layout of a state, whatever layout it was saved in.

        Args:
            like: A state of the same model and optimizer, at any stage, on any mesh, in any precision. It holds live
                arrays, or shapes (`tx.create(shapes)`), which take no memory.
            step: The step to restore; None restores the newest.
            data: A template for the saved data. Objects with `set_state` are set to what was saved, and the nodes of
                the template are rebuilt. None returns the data as it was written.
            fallback: If the checkpoint is damaged, take the newest intact one, with a warning.
            partial: Where checkpoint and `like` differ, restore the leaves that match and keep the others of `like`.

        Returns:
            The state, the data, the step, and the names of leaves that were not restored.

        Raises:
            CheckpointError: If there is no checkpoint, or another run replaced it while it was read.
            DamagedError: If the checkpoint is damaged. Names leaf and file, and the newest intact step.
            TypeError: If `like` is no `ZeroState`, or `step` is no integer.
            ValueError: If the checkpoint is of another tree, shape, type or optimizer.
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

            # Several processes cannot retry: a process that has read everything would not take part again.
            return retried(restored) if self._processes.count == 1 else restored()

    def latest(self) -> int | None:
        """Return the newest step that has a checkpoint, or None if there is no checkpoint."""
        return max(self.steps(), default=None)

    def steps(self) -> list[int]:
        """Return all steps that have a checkpoint, ascending."""
        return folders.steps_in(self.directory)

    def verify(self, step: int | None = None) -> list[int]:
        """Check every file of one checkpoint, or of all, against its digest.

        Args:
            step: The step to check; None checks all.

        Returns:
            The steps that were checked, all intact.

        Raises:
            CheckpointError: If there is no such checkpoint.
            DamagedError: At the first damaged checkpoint. Names leaf and file.
        """
        with self._mutex:
            self.wait()
            return retried(lambda: verify_steps(self.directory, step))

    def wait(self) -> None:
        """Wait until the save under way is on disk.

        Raises:
            CheckpointError: If the save failed.
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
                "This Checkpointer belongs to the process that this one was forked from. Save in that process: it has "
                "the devices with the arrays."
            )
        if self._lock is None and self._processes.is_first:
            raise CheckpointError("This Checkpointer is closed. Open another to save.")

    def _remove_again(self) -> None:
        """Remove files of failed saves that were written after the failure."""
        while self._failed:
            self._failed.pop().remove_again()

    def close(self) -> None:
        """Wait for the save under way, and let other runs write to the directory.

        Raises:
            CheckpointError: If the save failed.
        """
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

    def __enter__(self) -> Checkpointer:
        """Return the object itself."""
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Close the checkpointer. If an error ends the block, a failed save only warns, so that it hides no error."""
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            warnings.warn(str(failure), stacklevel=2)


# Checkpointers that may have a save under way, and all checkpointers.
OPEN: set[Checkpointer] = set()
KNOWN: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


class FailedStream:
    """A stream whose last flush fails, so that the interpreter ends with status 120.

    A save may fail after the program's last line, and a launcher must not take that run for a success. At that point
    Python prints any error that an exit function raises, `SystemExit` included, and still ends with status 0.
    `os._exit` would set a status, but it would skip the exit functions of other libraries.
    """

    def __init__(self, stream: Any):
        """Wrap a stream."""
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        """Return the wrapped stream's attribute."""
        return getattr(self._stream, name)

    def flush(self) -> None:
        """Flush the wrapped stream, and raise an error if the interpreter is ending."""
        self._stream.flush()
        if sys.is_finalizing():
            raise OSError("A save failed.")


def after_fork() -> None:
    """Forget all saves in a forked child: their threads exist only in the parent, and one may hold a mutex there."""
    OPEN.clear()
    for one in list(KNOWN):
        one._mutex, one._last_save, one._failed = threading.RLock(), None, []


def close_open() -> None:
    """Finish the saves under way at exit. A save that fails is logged and changes the exit status."""
    for one in list(OPEN):
        try:
            one.close()
        except CheckpointError as error:
            log.error("%s", error)
            sys.stderr = FailedStream(sys.stderr)


# Not `atexit`: its functions run after Python has shut down the thread pools that saves need.
threading._register_atexit(close_open)  # pyright: ignore[reportAttributeAccessIssue]
os.register_at_fork(after_in_child=after_fork)
