"""Run one asynchronous save. Copy the state to host memory, then write, digest and commit it in a thread.

Small leaves are packed: each process writes its small leaves into one file, and the manifest locates each leaf. The
other leaves are written by `arrays.py`.

All processes take the same four steps, and agree after each step: begin, write, digest, commit. Only the first process
makes the folder and commits it.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax
import numpy as np

from zerojax.checkpoint import arrays, directory
from zerojax.checkpoint.arrays import is_key
from zerojax.checkpoint.errors import CheckpointError, attempt, in_one_line
from zerojax.checkpoint.manifest import (
    ARRAYS,
    Manifest,
    PackedPiece,
    SavedLeaf,
    damage_in,
    damage_in_words,
    data_file,
    digest,
    lacking,
    made_by,
    parse_piece,
    write_manifest,
)
from zerojax.checkpoint.state_leaves import StateLeaf, state_leaves
from zerojax.comm.processes import Processes
from zerojax.offload.chunked import Chunked, joined
from zerojax.offload.folder import lock_folder
from zerojax.optim.description import description_of
from zerojax.train.state import ZeroState

log = logging.getLogger("zerojax.checkpoint")

# A leaf whose storage has at most this many bytes is packed, because a folder per leaf and a file per shard would cost
# milliseconds for each leaf. The limit is low, because the copy delays training. OCDBT also packs leaves into few
# files, but was rejected, because a damaged byte in such a file cannot be traced to a leaf.
SMALL_BYTES = 64 << 10
MAX_FOLDER_NAME = 200
DIGESTS = ".digests."
# Types of JAX that TensorStore cannot write. TensorStore does write int4 and every floating type.
UNSAVED = frozenset({"int1", "uint1", "int2", "uint2", "uint4"})

# A part of a leaf's storage that this process writes: the leaf's name, the index of the first element, and the values.
Box = tuple[str, tuple[int, ...], np.ndarray]


class Save:
    """A save that is under way or done. If the save failed, `error` is the error to raise; otherwise None."""

    def __init__(self, root: Path, step: int, *, prune: Callable[[], None], metrics: Any, processes: Processes):
        """Prepare a save of `step` into `root`.

        `prune` removes old checkpoints. Devices may still compute `metrics`, for which only the thread waits.
        """
        self.step, self.error, self.thread = step, None, None
        self._prune, self._metrics, self._processes = prune, metrics, processes
        self._temporary = root / directory.temporary_name(step)
        self._mark = contextlib.ExitStack()  # unlocks the folder; closing it again does nothing
        self._pieces: list[tuple[str, PackedPiece]] = []  # the pieces that this process writes, by leaf
        # The thread commits only after `begin` has ended. Otherwise an interrupted `begin` could have saved the state.
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
            self.error = CheckpointError("interrupted")  # before anything else, because another interrupt may follow
            self.error = self._failed(error)
            if isinstance(error, CheckpointError):
                raise self.error from error
            raise
        finally:
            self._begun.set()

    def _begin(self, state: ZeroState, data: str) -> None:
        leaves = state_leaves(state)
        description = description_of(state.plan.tx, state.plan.trained)
        manifest = Manifest(self.step, saved_leaves(leaves), files={}, made_by={}, transformation=description)
        failure = attempt(self._make_folders) if self._processes.is_first else ""
        name = self._processes.agree("begin to save", failure, self._temporary.name)
        self._temporary = self._temporary.with_name(name)
        by_folder = {one.folder: leaves[one.name].array for one in manifest.leaves if one.folder}
        small = {one.name: leaves[one.name].array for one in manifest.leaves if not one.folder and not one.is_empty}
        failure, write = "", lambda: None
        try:
            packed = copied(small)
            finish = arrays.write_leaves(self._temporary / ARRAYS, by_folder)
            write = functools.partial(self._write, packed, finish, data)
        except Exception as error:  # the thread tells the other processes, as it does for its own errors
            failure = in_one_line(error)
        work = (failure, write, manifest)
        self.thread = threading.Thread(target=self._finish, args=work, name=f"zerojax save of step {self.step}")
        self.thread.start()

    def wait(self) -> None:
        self._done.wait()
        if self.error is not None:
            raise self.error

    def _finish(self, failure: str, write: Callable[[], None], manifest: Manifest) -> None:
        try:
            self._processes.agree("write a checkpoint", failure or attempt(write))
            self._processes.agree("digest a checkpoint", attempt(self._digest))
            failure = attempt(self._commit, manifest) if self._processes.is_first else ""
            self._processes.agree("commit a checkpoint", failure)
        except Exception as error:
            self.error = self._failed(error)
        finally:
            self._mark.close()
            self._done.set()

    def _make_folders(self) -> None:
        self._temporary.mkdir()  # not with parents=True: if the directory was deleted, so was its lock
        self._mark.callback(lock_folder(self._temporary).release)
        (self._temporary / ARRAYS).mkdir()

    def _write(self, packed: list[Box], finish: Callable[[], None], data: str) -> None:
        if packed:
            self._pieces = write_packed(self._temporary / f"packed.{self._processes.index}.bin", packed)
        finish()
        directory.write_synced(self._temporary / data_file(self._processes.index), data)

    def _digest(self) -> None:
        """Digest this process's share of the files, and block until they are on disk."""
        written = [name for name in directory.files_in(self._temporary) if not name.startswith(DIGESTS)]
        share = written[self._processes.index :: self._processes.count]
        with ThreadPoolExecutor(8) as pool:
            sums = dict(zip(share, pool.map(lambda name: digest(self._temporary / name), share), strict=True))
        directory.sync_all(self._temporary / name for name in share)
        pieces = [(name, dataclasses.asdict(piece)) for name, piece in self._pieces]
        text = json.dumps({"files": sums, "pieces": pieces})
        directory.write_synced(self._temporary / f"{DIGESTS}{self._processes.index}.json", text)

    def _commit(self, manifest: Manifest) -> None:
        self._begun.wait()
        if self.error is not None:  # `begin` was interrupted
            raise self.error
        files: dict[str, tuple[int, str]] = {}
        pieces: dict[str, list[PackedPiece]] = collections.defaultdict(list)
        for i in range(self._processes.count):
            path = self._temporary / f"{DIGESTS}{i}.json"
            digested = json.loads(path.read_text())
            files |= digested["files"]
            for name, piece in digested["pieces"]:
                pieces[name].append(parse_piece(piece))
            path.unlink()
        leaves = tuple(dataclasses.replace(leaf, pieces=tuple(pieces[leaf.name])) for leaf in manifest.leaves)
        made = made_by(self._processes.count)
        metrics = self._metrics and {name: float(x) for name, x in self._metrics.items()}
        files = dict(sorted(files.items()))
        manifest = dataclasses.replace(manifest, leaves=leaves, files=files, made_by=made, metrics=metrics)
        damage = lacking(self._temporary, manifest)
        # The digests of packed leaves were computed from memory, perhaps on other hosts, so the files may differ.
        if damage := damage or damage_in(self._temporary, manifest, manifest.packed()):
            raise CheckpointError(damage_in_words(damage))
        write_manifest(manifest, self._temporary)
        directory.sync_all(Path(folder) for folder, _, _ in os.walk(self._temporary))
        root = self._temporary.parent
        directory.rename_later_steps(root, self.step)
        directory.commit(self._temporary, self.step)
        if failure := attempt(self._prune):
            log.warning("Older checkpoints in %s could not be removed: %s", root, failure)

    def _failed(self, error: BaseException) -> CheckpointError:
        """Return the error to raise, and remove the unfinished folder."""
        self._mark.close()
        if self._processes.is_first:
            attempt(directory.remove, self._temporary)
        root = self._temporary.parent
        try:
            newest = max(directory.steps_in(root), default=None)
            kept = "There is no checkpoint yet" if newest is None else f"The newest checkpoint is that of step {newest}"
        except OSError as unread:
            kept = f"The checkpoints that there are cannot be listed: {unread.strerror}"
        return CheckpointError(f"Saving step {self.step} to {root} failed: {in_one_line(error)}\n{kept}.")


def copied(leaves: Mapping[str, jax.Array | Chunked]) -> list[Box]:
    """Copy this process's part of named leaves to host memory: whole arrays, or the shards with replica ID 0.

    A PRNG key is copied as its key data. The chunks of an offloaded leaf are first joined on the devices, one leaf at a
    time to save device memory.
    """
    jax.copy_to_host_async([x for x in leaves.values() if not isinstance(x, Chunked)])
    boxes: list[Box] = []
    for name, x in leaves.items():
        x = joined(x) if isinstance(x, Chunked) else x
        x = jax.random.key_data(x) if is_key(x) else x
        if x.is_fully_addressable:
            boxes.append((name, (0,) * x.ndim, np.array(x)))
            continue
        shards = [shard for shard in x.addressable_shards if shard.replica_id == 0]
        boxes += [(name, tuple(i.start or 0 for i in shard.index), np.array(shard.data)) for shard in shards]
    return boxes


def write_packed(path: Path, boxes: Sequence[Box]) -> list[tuple[str, PackedPiece]]:
    """Write boxes one after the other into a file. Return their pieces, each with the name of its leaf."""
    pieces = []
    with path.open("wb") as file:
        for name, start, values in boxes:
            raw = values.reshape(-1).view(np.uint8).data
            piece = PackedPiece(path.name, file.tell(), start, values.shape, hashlib.sha256(raw).hexdigest())
            pieces.append((name, piece))
            file.write(raw)
    return pieces


def saved_leaves(leaves: dict[str, StateLeaf]) -> tuple[SavedLeaf, ...]:
    """Return the records of a state's leaves. Each large leaf gets a folder; small and empty leaves get none."""
    taken: set[str] = set()
    saved = []
    for one in leaves.values():
        if one.dtype in UNSAVED:
            wider = "uint8" if one.dtype.startswith("u") else "int8"
            raise CheckpointError(
                f"{one.name} is {one.dtype}, a type that checkpoints cannot store: TensorStore, which writes the "
                f"files, does not know it. Keep the leaf as {wider}, and cast it in the loss."
            )
        folder = ""
        if one.leaf.size and math.prod(one.leaf.storage_shape) * one.leaf.dtype.itemsize > SMALL_BYTES:
            folder = ".".join(quote(key, safe="") for key in one.path).replace("~", "%7E")[:MAX_FOLDER_NAME]
            if folder.lower() in taken:  # in lower case, because some file systems do not distinguish case
                folder = f"{folder}~{len(taken)}"
            taken.add(folder.lower())
        saved.append(record_of(one, folder))
    return tuple(saved)


def record_of(one: StateLeaf, folder: str = "") -> SavedLeaf:
    key = str(jax.random.key_impl(one.array)) if is_key(one.array) else None
    return SavedLeaf(
        one.name, one.path, tuple(one.leaf.shape), one.dtype, one.leaf.kind, folder, key, encoding=one.leaf.encoding
    )
