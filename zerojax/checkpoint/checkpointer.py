"""Save, restore and verify the checkpoints of one directory, with the class `Checkpointer`."""

import json
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from jaxtyping import PyTree

from zerojax.checkpoint import directory as folders
from zerojax.checkpoint.best import BestFn, best_and_unread, check_metrics, copied_metrics
from zerojax.checkpoint.data_state import encode
from zerojax.checkpoint.errors import CheckpointError, attempt
from zerojax.checkpoint.loop_state import as_state
from zerojax.checkpoint.manifest import newest_verified, reading, retried, verify_steps
from zerojax.checkpoint.restoring import Restored, restore
from zerojax.checkpoint.saving import Save
from zerojax.comm.mesh import on_auto_mesh
from zerojax.comm.processes import Processes
from zerojax.config import check_count, check_word
from zerojax.offload.folder import DiskError, Lock, lock
from zerojax.placement.problems import problem_of
from zerojax.train.same_run import require_same

log = logging.getLogger("zerojax.checkpoint")


class Checkpointer:
    """Saves states into a directory and restores them, at any stage, mesh and number of devices.

    A checkpoint is committed atomically. Each of its files has a digest, which is verified before the checkpoint is
    restored. All processes of a run must make the same calls. Calls from several threads run one after the other. At
    exit, the interpreter waits for a save that is under way.

    Attributes:
        directory: The folder of the checkpoints. Only one run at a time can write to it.
        keep: How many of the newest checkpoints are kept. None keeps all checkpoints.
        every: `save` skips steps that are not multiples of `every`, unless `force=True`.
        timeout: Seconds to wait for the other processes before an error is raised.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int | None = 3,
        every: int = 1,
        timeout: float = 600.0,
        read_only: bool = False,
        best_fn: BestFn | None = None,
        best_mode: Literal["min", "max"] = "max",
        tx: Any = None,
    ):
        """Open a directory, and create it if it does not exist.

        Args:
            directory: A folder on a file system that all processes see. `~` is the user's home.
            keep: How many of the newest checkpoints to keep. None keeps all checkpoints.
            every: Save only steps that are multiples of this number.
            timeout: Seconds to wait for the other processes before an error is raised.
            read_only: Allow only restoring and verifying. Another run may write to the directory meanwhile.
            best_fn: Returns the score of a checkpoint from the metrics that were saved with it, such as
                `lambda metrics: metrics["loss"]`. The checkpoint with the best score is kept in addition to the newest.
                `save` also calls it with 0.5 for each metric, to find names that are missing.
            best_mode: Whether the smallest (`"min"`) or the largest (`"max"`) score is best. NaN is never best.
            tx: The transformation of a hand-written loop. A `ZeroState`, or a `TrainState` with it, does not need it.

        Raises:
            CheckpointError: If another run writes to the directory, or this process cannot write to it.
            TypeError: If `keep` or `every` is not an integer, `timeout` is not a number, or `best_fn` not a function.
            ValueError: If `keep`, `every` or `timeout` is too small, `directory` is empty, or `best_mode` is unknown.
        """
        if keep is not None:
            check_count("Checkpointer(keep=)", keep, "checkpoints", least=1)
        check_count("Checkpointer(every=)", every, "steps", least=1)
        if isinstance(timeout, bool) or not isinstance(timeout, int | float):
            raise TypeError(f"Checkpointer(timeout=) is a number of seconds, such as 600, not {timeout!r}.")
        if not timeout > 0:
            raise ValueError(f"Checkpointer(timeout={timeout}) must be above 0 seconds.")
        check_word("Checkpointer(best_mode=)", best_mode, ("min", "max"))
        if best_fn is not None and not callable(best_fn):
            raise TypeError(f'best_fn= is a function, such as lambda metrics: metrics["loss"], not {best_fn!r}.')
        if not os.fspath(directory):
            raise ValueError('Checkpointer("") names no folder. Give one, such as "runs/gpt", or "." for this one.')
        self.directory = Path(directory).expanduser().absolute()
        self.keep, self.every, self.timeout, self.read_only = keep, every, timeout, read_only
        self._best_fn, self._best_mode, self._tx = best_fn, best_mode, tx
        # All processes open checkpointers in the same order, so their messages have equal numbers in `Processes`.
        self._processes = Processes("checkpoint", timeout, error=CheckpointError)
        self._last_save: Save | None = None
        self._lock: Lock | None = None
        self._mutex = threading.RLock()
        KNOWN.add(self)
        if read_only:
            return
        self._require_same("open a Checkpointer", keep=keep, every=every)
        try:
            failure = attempt(self._lock_and_clean) if self._processes.is_first else ""
            self._processes.agree("open a Checkpointer", failure)
        except BaseException:
            self._unlock()
            raise
        OPEN.add(self)

    def _require_same(self, call: str, **record: Any) -> None:
        require_same(call, record, timeout=self.timeout, error=CheckpointError)

    def _lock_and_clean(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = lock(self.directory)
            folders.clean(self.directory)
        except (OSError, DiskError) as error:
            # A `DiskError` means that another run has the lock.
            remedy = " Checkpointer(..., read_only=True) restores while it is in use." * isinstance(error, DiskError)
            raise CheckpointError(f"Checkpoints cannot be written to {self.directory}: {error}{remedy}") from error

    def save(
        self,
        state: PyTree,
        data: Any = None,
        *,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        """Begin to save a state. A thread writes it while training continues.

        The values at the time of this call are saved, even if the next step donates the state. If another save is
        still under way, this call waits for that save first.

        Args:
            state: The state of the run: a `ZeroState`, a Flax `TrainState`, or any other tree with parameters and their
                optimizer state, such as `(params, opt_state)`. Other leaves are arrays, which are saved as they are.
            data: Small data to save with the state: a pytree of plain values, arrays, and objects with `get_state`
                and `set_state`, such as grain's iterators. Each process writes a JSON file with its data.
            step: The number of the step. The default, `state.step` or `state["step"]`, waits until the step is
                computed. To avoid this wait, pass the step count of the loop, which a tree without `step` needs.
            metrics: Numbers by name, for `best_fn`. This call does not wait until devices have computed them.
            force: Save even if the step is not a multiple of `every`.

        Returns:
            True if a save was started. False if the step is skipped because it is not a multiple of `every`, or because
            the last save of this object was of the same step and has not failed.

        Raises:
            CheckpointError: If this save cannot begin, or if the previous save failed. The message gives the reason
                and the newest checkpoint. The state is unchanged.
            TypeError: If a leaf of `state` is not an array, `data` cannot be written, `step` is not an integer, or a
                metric is not a real number.
            ValueError: If `step` is negative or differs between processes, if `state` was donated to a step, or if
                `state` does not have exactly one optimizer state of `tx`.
        """
        if problem := problem_of(None, "state", state) or problem_of(None, "metrics", metrics):
            raise ValueError(problem)
        if metrics is not None:
            check_metrics(metrics, self._best_fn)
        self._require_writable()
        if step is None:
            step = state.get("step") if isinstance(state, Mapping) else getattr(state, "step", None)
        step = folders.step_number(step)
        with self._mutex:
            last = self._last_save
            if (step % self.every and not force) or (last is not None and last.step == step and last.error is None):
                return False
            if self._best_fn is not None and metrics is None:
                warnings.warn("A save without metrics= is never best. If it is not evaluated, give NaN.", stacklevel=2)
            metrics = None if metrics is None else copied_metrics(metrics)
            zero_state, _ = as_state(state, self._tx)
            self.wait()
            text = json.dumps(encode(data))
            self._require_same("save", step=step)
            prune = lambda: folders.prune(self.directory, self.keep, self._spared)
            save = Save(self.directory, step, prune=prune, metrics=metrics, processes=self._processes)
            on_auto_mesh(None, save.begin, zero_state, text)
            self._last_save = save
            return True

    def _spared(self) -> list[int | None]:
        """Return the best step, followed by steps that may be better. All are kept, however old they are."""
        return [] if self._best_fn is None else best_and_unread(self.directory, self._best_fn, self._best_mode)

    def best(self) -> int | None:
        """Wait for the save under way, and return the step whose metrics are best, or None if there are no metrics.

        Raises:
            CheckpointError: If the save failed, `best_fn` raised an error, or no checkpoint has the metrics it reads.
            ValueError: If this object was made without `best_fn`.
        """
        if self._best_fn is None:
            raise ValueError("best() compares metrics by best_fn, and there is none. Give Checkpointer(..., best_fn=).")
        with self._mutex:
            self.wait()
            found: list[int | None] = [None]
            failure = attempt(lambda: found.append(self._spared()[0])) if self._processes.is_first else ""
            return json.loads(self._processes.agree("find the best checkpoint", failure, json.dumps(found[-1])))

    def restore(
        self,
        like: PyTree,
        *,
        step: int | None = None,
        data: Any = None,
        fallback: bool = False,
        partial: bool | Literal["params"] = False,
    ) -> Restored:
        """Restore a checkpoint into the layout of `like`, which may differ from the layout that was saved.

        Args:
            like: A state of the same model and optimizer, at any stage, on any mesh, in any precision. Its leaves are
                arrays, or shapes (`tx.create(shapes)`), which take no memory. It may be another kind of tree than the
                saved state: a `TrainState`, a tree with `params` and `opt_state`, or a `ZeroState`.
            step: The step to restore; None restores the newest step.
            data: A template for the saved data. Its objects with `set_state` are set to their saved states, and the
                saved values are returned in its pytree nodes. None returns the data in plain containers.
            fallback: If the checkpoint is damaged, warn, and restore the newest intact checkpoint instead.
            partial: What to do if checkpoint and `like` differ. False raises an error. True restores the leaves that
                match, including `step` and the optimizer's counts, and keeps all other leaves of `like`. `"params"`
                restores only matching parameters and mutable state, to begin a new run with the weights of another run.

        Returns:
            A `Restored` with the state, the data, the step, and the names of leaves that were not restored.

        Raises:
            CheckpointError: If there is no such checkpoint, or another run replaced the checkpoint while it was read.
            DamagedError: If the checkpoint is damaged. The message names leaf, file, and the newest intact step.
            TypeError: If `step` is not an integer, or a leaf of `like` is not an array.
            ValueError: If checkpoint and `like` differ in optimizer, or in the names, shapes or types of leaves.
        """
        check_word("restore(partial=)", partial, (False, True, "params"))
        state, back = as_state(like, self._tx)
        restored = self._restore(state, step=step, data=data, fallback=fallback, partial=partial)
        return restored._replace(state=back(restored.state))

    def _restore(
        self, like: Any, *, step: int | None, data: Any = None, fallback: bool = False, partial: bool | str = False
    ) -> Restored:
        """Restore a state, as `restore` does, or parameters alone, if `like` is a tree of parameters."""
        with self._mutex:
            self.wait()
            self._require_same("restore", step=step, fallback=fallback, partial=partial)

            def restored() -> Restored:
                manifest = newest_verified(self.directory, step, fallback, self._processes)
                self._last_save = None  # a run that went back to an earlier step may save the same steps again
                with reading(self.directory, manifest):
                    return restore(
                        self.directory, manifest, like, data=data, partial=partial, processes=self._processes
                    )

            # Several processes cannot retry, because a process that has already succeeded would not take part.
            return retried(restored) if self._processes.count == 1 else restored()

    def latest(self) -> int | None:
        """Return the newest step that has a checkpoint, or None if there is no checkpoint."""
        return max(self.steps(), default=None)

    def steps(self) -> list[int]:
        return folders.steps_in(self.directory)

    def verify(self, step: int | None = None) -> list[int]:
        """Check every file of one checkpoint, or of all checkpoints, against the file's digest.

        Args:
            step: The step to check; None checks all steps.

        Returns:
            The checked steps, all of which are intact.

        Raises:
            CheckpointError: If there is no such checkpoint.
            DamagedError: If a checkpoint is damaged. The message names the leaf and the file.
        """
        with self._mutex:
            self.wait()
            return retried(lambda: verify_steps(self.directory, step))

    def wait(self) -> None:
        """Wait until the save under way is on disk. If no save is under way, return at once.

        Raises:
            CheckpointError: If the save failed.
        """
        with self._mutex:
            if (save := self._last_save) is None:
                return
            try:
                save.wait()
            except CheckpointError:
                self._last_save = None  # so that the failure is raised only once
                raise

    def _require_writable(self) -> None:
        """Raise an error if this object cannot save: it is read-only or closed, or this process was forked."""
        if self.read_only:
            raise CheckpointError("This Checkpointer is read_only=True. Open one without it to save.")
        if self._lock is not None and not self._lock.held:
            raise CheckpointError(
                "This Checkpointer belongs to the process that this one was forked from. Save in that process: it has "
                "the devices with the arrays."
            )
        if self._lock is None and self._processes.is_first:
            raise CheckpointError("This Checkpointer is closed. Open another to save.")

    def close(self) -> None:
        """Wait for the save under way, and unlock the directory, so that other runs can write to it.

        Raises:
            CheckpointError: If the save failed.
        """
        with self._mutex:
            try:
                self.wait()
            except CheckpointError:
                self._unlock()
                raise
            self._unlock()  # not after an interrupt: the save goes on, and the exit or another `close` waits for it

    def _unlock(self) -> None:
        OPEN.discard(self)
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Close the checkpointer. If the `with` block raised an error, that error goes on, and a failed save warns."""
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            warnings.warn(str(failure), stacklevel=2)


# `OPEN` has the checkpointers that may have a save under way. `KNOWN` has all checkpointers.
OPEN: set[Checkpointer] = set()
KNOWN: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


def after_fork() -> None:
    """Forget all saves in a forked child. The threads of saves exist only in the parent, where one may hold a mutex."""
    OPEN.clear()
    for one in list(KNOWN):
        one._mutex, one._last_save = threading.RLock(), None


def close_open() -> None:
    """Finish the saves under way at exit. If a save fails, log it, because nobody can catch an error any more."""
    for one in list(OPEN):
        try:
            one.close()
        except CheckpointError as error:
            log.error("%s", error)


# Not `atexit`: its functions run after Python has shut down the thread pools that saves need.
threading._register_atexit(close_open)  # pyright: ignore[reportAttributeAccessIssue]
os.register_at_fork(after_in_child=after_fork)
