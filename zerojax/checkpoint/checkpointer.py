"""Save and restore a state: asynchronous, verified, whole or not at all, at any stage and number of devices."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerojax.checkpoint import arrays as disk
from zerojax.checkpoint import files, position
from zerojax.checkpoint.canonical import slots_of
from zerojax.checkpoint.errors import CheckpointError
from zerojax.checkpoint.integrity import ARRAYS, Manifest, data_file, digest_file, digests, is_digest_file, made_by
from zerojax.checkpoint.matching import records_of
from zerojax.checkpoint.peers import Peers
from zerojax.checkpoint.restoring import Restored, newest_intact, restore_step, verify_steps
from zerojax.layout.chunked import is_chunked
from zerojax.placement.chunking import joined
from zerojax.train.state import ZeroState

if TYPE_CHECKING:
    from types import TracebackType

log = logging.getLogger("zerojax.checkpoint")
TIMEOUT = 600.0
LONGEST = 1000


class Checkpointer:
    """Saves states into a folder and restores them, at any stage, mesh and number of devices.

    A checkpoint is there whole or not at all, each of its files has a digest that is checked
    when it is restored, and the newest `keep` stay. All processes of a run call it alike.

    Attributes:
        directory: Where the checkpoints lie; one run at a time writes there.
        keep: How many are kept, the newest; None is all.
        every: `save` does nothing unless this divides the step.
        timeout: Seconds after which a process that says nothing is given up.
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
        """Open a folder, made if it is not there.

        Args:
            directory: On a file system that all processes see.
            keep: How many checkpoints stay, the newest; None is all.
            every: In steps.
            timeout: In seconds: how long a process waits for the others while saving.
            read_only: Whether to restore alone, beside a run that writes.

        Raises:
            CheckpointError: If another run writes there, or the folder cannot be written.
            ValueError: If a number is out of range.
        """
        for name, value in (("keep", keep), ("every", every)):
            if not (name == "keep" and value is None) and (isinstance(value, bool) or not value or value < 1):
                raise ValueError(f"Checkpointer({name}=) counts and must be at least 1, but is {value!r}.")
        self.directory = Path(directory).absolute()
        self.keep, self.every, self.timeout, self.read_only = keep, every, timeout, read_only
        self._peers = Peers(timeout)
        self._saved: int | None = None
        self._under_way: threading.Thread | None = None
        self._trouble: CheckpointError | None = None
        self._temporary = self.directory
        self._lock = None
        if not read_only:
            self._open()

    def _open(self) -> None:
        """Take the lock and remove what killed saves left; on the first process."""
        trouble = ""
        if self._peers.first:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._lock = files.Lock(self.directory)
                for name in files.clean(self.directory):
                    log.warning("Cleaned up %s, which a killed run left in %s.", name, self.directory)
            except (OSError, CheckpointError) as error:
                trouble = f"Checkpoints cannot be written to {self.directory}: {error}"
        self._peers.agree("open", trouble)

    def save(self, state: ZeroState, data: Any = None, *, step: int | None = None, force: bool = False) -> bool:
        """Begin to save a state; it is written while training goes on.

        What is saved is the state as it is at this call, even if the next step donates it.
        This waits for a save that is still under way.

        Args:
            state: The state of the run.
            data: What else goes with it: a pytree, or anything with `get_state` and
                `set_state` such as an iterator of grain, or a pytree that holds some. Small:
                it is kept as JSON, and each process keeps its own.
            step: Its number; default `int(state.step)`, which waits for the step. A loop that
                counts for itself gives its count and does not wait.
            force: Whether to save though `every` does not divide the step.

        Returns:
            Whether a save was begun. It is not if `every` does not divide the step, or this
            object has saved that step already.

        Raises:
            CheckpointError: If this save cannot begin, or the one before failed: why, and
                which checkpoint is the newest. The state is untouched.
            TypeError: If `state` is no `ZeroState`, or `data` cannot be written.
        """
        if not isinstance(state, ZeroState):
            raise TypeError(f"save takes a ZeroState, as tx.create makes it, not {type(state).__name__}.")
        if self.read_only:
            raise CheckpointError("This Checkpointer is read_only=True. Open one without it to save.")
        if self._lock is None and self._peers.first:
            raise CheckpointError("This Checkpointer is closed. Open another to save.")
        step = int(state.step) if step is None else step
        if (step % self.every and not force) or step == self._saved:
            return False
        self.wait()
        text, self._saved = position.dumps(data), step
        self._begin(state, text, step)
        return True

    def _begin(self, state: ZeroState, data: str, step: int) -> None:
        """Copy the state off the devices, and leave the rest to a thread."""
        slots = slots_of(state)
        manifest = Manifest(step, records_of(slots), {}, made_by(self._peers.count))
        found = {r.folder: slots[r.name].array for r in manifest.leaves if r.folder}
        held = {folder: disk.raw(x) for folder, x in found.items() if not is_chunked(x)}
        far = [
            disk.Far(folder, functools.partial(joined, x), x.store is not None)
            for folder, x in found.items()
            if is_chunked(x)
        ]
        name = files.temporary_name(step)
        self._temporary = temporary = self.directory / name
        try:
            trouble = attempt(files.make, temporary, temporary / ARRAYS) if self._peers.first else ""
            self._temporary = temporary = self.directory / self._peers.agree("begin", trouble, name)
        except CheckpointError as error:
            raise self._failed(step, error) from error
        try:
            finish = disk.write(temporary / ARRAYS, held, far)
        except Exception as error:  # the others hear of it in the thread, as of any error there
            finish = functools.partial(throw, error)
        work = functools.partial(self._finish, manifest, finish, data, temporary)
        self._under_way = threading.Thread(target=work, name=f"zerojax save of step {step}")
        self._under_way.start()

    def _finish(self, manifest: Manifest, finish: Callable[[], None], data: str, temporary: Path) -> None:
        """Write, digest, commit; in the thread."""
        try:
            trouble = attempt(self._write, finish, data, temporary)
            self._peers.agree("written", trouble)
            trouble = attempt(self._digest, temporary)
            self._peers.agree("digested", trouble)
            trouble = attempt(self._commit, manifest, temporary) if self._peers.first else ""
            self._peers.agree("committed", trouble)
        except Exception as error:
            self._trouble = self._failed(manifest.step, error)

    def _write(self, finish: Callable[[], None], data: str, temporary: Path) -> None:
        finish()
        files.write_synced(temporary / data_file(self._peers.index), data)

    def _digest(self, temporary: Path) -> None:
        """Digest this process' share of the files, and see them onto the disk."""
        written = [name for name in files.files_in(temporary) if not is_digest_file(name)]
        mine = written[self._peers.index :: self._peers.count]
        found = digests(temporary, mine)
        files.sync(temporary / name for name in mine)
        files.write_synced(temporary / digest_file(self._peers.index), json.dumps(found))

    def _commit(self, manifest: Manifest, temporary: Path) -> None:
        """Put the digests together and give the folder its name."""
        found: dict[str, tuple[int, str]] = {}
        for i in range(self._peers.count):
            part = temporary / digest_file(i)
            found |= json.loads(part.read_text())
            part.unlink()
        dataclasses.replace(manifest, files=dict(sorted(found.items()))).write(temporary)
        files.sync(files.folders_in(temporary))
        for name in files.set_aside(self.directory, manifest.step):
            log.warning("%s: the run went back to before it and saved step %d.", name, manifest.step)
        files.commit(temporary, manifest.step)
        if trouble := attempt(files.prune, self.directory, self.keep):
            log.warning("Older checkpoints in %s could not be removed: %s", self.directory, trouble)

    def _failed(self, step: int, error: Exception) -> CheckpointError:
        """What happened, in words; what was begun is removed."""
        self._saved = None
        if self._peers.first:
            files.remove(self._temporary)
        newest = self.latest()
        kept = "there is no checkpoint yet" if newest is None else f"the newest checkpoint is that of step {newest}"
        return CheckpointError(
            f"Saving step {step} to {self.directory} failed: {explained(error)}\nThe state of the run is as it was, "
            f"and {kept}."
        )

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
            CheckpointError: If there is no checkpoint.
            DamagedError: If it is damaged, naming leaf and file, and the newest intact one.
            ValueError: If it is of another tree, shape, type or optimizer.
        """
        self.wait()
        chosen, manifest = newest_intact(self.directory, step, fallback, self._peers)
        self._saved = None
        return restore_step(self.directory, chosen, manifest, like, data, partial, self._peers)

    def latest(self) -> int | None:
        """The newest step that has a checkpoint; None if none has."""
        return max(self.steps(), default=None)

    def steps(self) -> list[int]:
        """All steps that have a checkpoint, ascending."""
        return files.steps_in(self.directory)

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
        self.wait()
        return verify_steps(self.directory, step)

    def wait(self) -> None:
        """Wait until the save under way is done.

        Raises:
            CheckpointError: If it failed.
        """
        if self._under_way is not None:
            self._under_way.join()
            self._under_way = None
        trouble, self._trouble = self._trouble, None
        if trouble is not None:
            raise trouble

    def close(self) -> None:
        """Wait as `wait` does, and let others write to the folder."""
        try:
            self.wait()
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def __enter__(self) -> Checkpointer:
        """The object itself."""
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close it; a save that failed does not hide the error that ends the block."""
        try:
            self.close()
        except CheckpointError as trouble:
            if error is None:
                raise
            warnings.warn(str(trouble), stacklevel=2)


def attempt(work: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Do something; what went wrong in words, empty if nothing did."""
    try:
        work(*args, **options)
    except Exception as error:
        log.debug("", exc_info=True)
        return explained(error)
    return ""


def throw(error: Exception) -> None:
    """Raise an error that was caught elsewhere."""
    raise error


def explained(error: Exception) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())[:LONGEST]
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}"
