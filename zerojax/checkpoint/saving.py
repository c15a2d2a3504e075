"""Run one asynchronous save. Copy the state to host memory, then write and commit it in a thread.

All processes take the same three steps, and agree after each step: begin, write, commit. Only the first process
makes the folder and commits it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import shutil
import threading
from pathlib import Path

import jax

from zerojax.checkpoint import arrays, directory
from zerojax.checkpoint.arrays import is_key
from zerojax.checkpoint.errors import CheckpointError, attempt, in_one_line
from zerojax.checkpoint.manifest import (
    Manifest,
    Piece,
    SavedLeaf,
    damage_in,
    damage_in_words,
    data_file,
    made_by,
    piece_of,
    write_manifest,
)
from zerojax.checkpoint.state_leaves import StateLeaf, state_leaves
from zerojax.comm.processes import Processes
from zerojax.offload import folder
from zerojax.optim.description import description_of
from zerojax.train.state import ZeroState

log = logging.getLogger("zerojax.checkpoint")
WRITTEN = ".written."  # begins the names of the files in which processes record what they wrote


class Save:
    """A save that is under way or done. `error` says why it failed, and is None otherwise."""

    def __init__(self, root: Path, step: int, *, keep: int | None, processes: Processes):
        """Prepare a save of `step` into `root`. `keep` and `processes` are those of the `Checkpointer`."""
        self.step, self.error, self.thread = step, None, None
        self._keep, self._processes = keep, processes
        self._temporary = root / directory.temporary_name(step)
        self._mark = contextlib.ExitStack()  # unlocks the folder; closing it again does nothing
        # The thread commits only after `begin` has ended. Otherwise an interrupt could meet a finished save.
        self._begun = threading.Event()
        # Not `thread.join`: if Ctrl-C interrupts a join, Python believes that the thread has ended (CPython gh-90882).
        self._done = threading.Event()

    def begin(self, state: ZeroState, data: str) -> None:
        """Copy the state to host memory, and start the thread.

        If this raises an error, even `KeyboardInterrupt`, nothing is saved, and the unfinished folder is removed.
        """
        try:
            self._begin(state, data)
        except BaseException as error:
            self.error = self._failed(error)
            if isinstance(error, CheckpointError):
                raise self.error from error
            raise
        finally:
            self._begun.set()

    def _begin(self, state: ZeroState, data: str) -> None:
        leaves = state_leaves(state)
        description = description_of(state.plan.tx, state.plan.trained)
        records = tuple(map(record_of, leaves.values()))
        manifest = Manifest(self.step, records, data=(), made_by={}, transformation=description)
        failure = attempt(self._make_folder) if self._processes.is_first else ""
        name = self._processes.agree("begin to save", failure, self._temporary.name)
        self._temporary = self._temporary.with_name(name)
        file = arrays.LeavesFile(self._temporary / f"leaves.{self._processes.index}.bin")
        # A thread tells the other processes of this failure, as it does of its own.
        failure = attempt(file.add, {name: one.array for name, one in leaves.items() if one.leaf.size})
        work = (failure, file, manifest, data)
        self.thread = threading.Thread(target=self._finish, args=work, name=f"zerojax save of step {self.step}")
        self.thread.start()

    def wait(self) -> None:
        self._done.wait()
        if self.error is not None:
            raise self.error

    def _finish(self, failure: str, file: arrays.LeavesFile, manifest: Manifest, data: str) -> None:
        try:
            self._processes.agree("write a checkpoint", failure or attempt(self._write, file, data))
            failure = attempt(self._commit, manifest) if self._processes.is_first else ""
            self._processes.agree("commit a checkpoint", failure)
        except Exception as error:
            self.error = self._failed(error)
        finally:
            self._mark.close()
            self._done.set()

    def _make_folder(self) -> None:
        self._temporary.mkdir()  # not with parents=True: if the directory was deleted, so was its lock
        self._mark.callback(folder.lock_folder(self._temporary).release)

    def _write(self, file: arrays.LeavesFile, data: str) -> None:
        """Write the files of this process, read them back to compare their digests, and record the pieces."""
        name, content = data_file(self._processes.index), data.encode()
        directory.write_synced(self._temporary / name, data)
        size, sha256 = len(content), hashlib.sha256(content).hexdigest()
        pieces = [*file.write(), ("", Piece(name, offset=0, size=size, start=(0,), shape=(size,), sha256=sha256))]
        if damage := damage_in(self._temporary, pieces):
            raise CheckpointError(damage_in_words(damage))
        text = json.dumps([(leaf, dataclasses.asdict(piece)) for leaf, piece in pieces])
        directory.write_synced(self._temporary / f"{WRITTEN}{self._processes.index}", text)

    def _commit(self, manifest: Manifest) -> None:
        self._begun.wait()
        if self.error is not None:  # `begin` was interrupted
            raise self.error
        pieces: dict[str, list[Piece]] = collections.defaultdict(list)
        for i in range(self._processes.count):
            path = self._temporary / f"{WRITTEN}{i}"
            for name, piece in json.loads(path.read_text()):
                pieces[name].append(piece_of(piece))
            path.unlink()
        leaves = tuple(dataclasses.replace(leaf, pieces=tuple(pieces[leaf.name])) for leaf in manifest.leaves)
        sizes = {leaf.name: sum(math.prod(one.shape) for one in leaf.pieces) for leaf in leaves}
        if lacking := [leaf.name for leaf in leaves if sizes[leaf.name] < math.prod(leaf.shape)]:
            raise CheckpointError(f"No process wrote all of {', '.join(lacking)}.")
        made = made_by(self._processes.count)
        manifest = dataclasses.replace(manifest, leaves=leaves, data=tuple(pieces[""]), made_by=made)
        write_manifest(manifest, self._temporary)
        folder.sync(self._temporary)
        root = self._temporary.parent
        directory.rename_later_steps(root, self.step)
        directory.commit(self._temporary, self.step)
        if failure := attempt(directory.prune, root, self._keep):
            log.warning("Older checkpoints in %s could not be removed: %s", root, failure)

    def _failed(self, error: BaseException) -> CheckpointError:
        """Return the error to raise, and remove the unfinished folder."""
        self._mark.close()
        if self._processes.is_first:
            shutil.rmtree(self._temporary, ignore_errors=True)
        root = self._temporary.parent
        try:
            newest = max(directory.steps_in(root), default=None)
            kept = "There is no checkpoint yet" if newest is None else f"The newest checkpoint is that of step {newest}"
        except OSError as unread:
            kept = f"The checkpoints that there are cannot be listed: {unread.strerror}"
        return CheckpointError(f"Saving step {self.step} to {root} failed: {in_one_line(error)}\n{kept}.")


def record_of(one: StateLeaf) -> SavedLeaf:
    key = str(jax.random.key_impl(one.array)) if is_key(one.array) else None
    return SavedLeaf(one.name, one.path, tuple(one.leaf.shape), one.dtype, one.leaf.kind, key)
