"""Run by test_disk_kills.py, to be killed: runs with parameters on disk, in processes that one template forks.

A line of standard input has the arguments of `run`. The template imports what a run needs, so a run costs little more
than its steps.
"""

import hashlib
import itertools
import os
import sys
import time
from pathlib import Path

import jax
import numpy as np
from disk_models import LOSSES, batch_of, model_params, on_disk

from zerojax.checkpoint import Checkpointer, saving
from zerojax.checkpoint.state_leaves import state_leaves
from zerojax.layout.chunked import is_chunked
from zerojax.offload import chunks
from zerojax.placement.chunking import joined
from zerojax.staged.update import StagedUpdate


def digest(state):
    found = hashlib.sha256()
    for name, one in state_leaves(state).items():
        stored = np.asarray(joined(one.array) if is_chunked(one.array) else one.array)
        logical = stored if one.leaf.kind == "flat" else stored[tuple(map(slice, one.leaf.shape))]
        found.update(name.encode() + logical.tobytes())
    return found.hexdigest()


def say(*words):
    """Print a line at once, from any thread."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def mark(owner, name, phase):
    """Print the name of a phase when it begins."""
    work = getattr(owner, name)

    def marked(*args, **options):
        say(phase)
        return work(*args, **options)

    setattr(owner, name, marked)


class Transfers:
    """Counts the transfers of chunks, by all threads, and prints `now` at the number `moment`."""

    def __init__(self, moment):
        self.moment, self.numbers, self.transfer = moment, itertools.count(), chunks.transfer
        chunks.transfer = self

    def __call__(self, *args, **options):
        if next(self.numbers) == self.moment:
            say("now")
        return self.transfer(*args, **options)


def run(folder, steps, moment, is_reference):
    """Restore the newest checkpoint, print its digest, and train some steps, each of which is saved.

    The reference saves none, and prints the digest of each state.
    """
    saving.SMALL_BYTES = 1000  # so that leaves on disk are copied, and not packed
    tx = on_disk(folder / "run", devices=2)
    step = tx.train_step(LOSSES["loop"])
    with Checkpointer(folder / "checkpoints", keep=2) as checkpoints:
        if checkpoints.latest() is None:
            checkpoints.save(tx.create(model_params()), step=0)
            checkpoints.wait()
        state, _, start, *_ = checkpoints.restore(tx.create(jax.eval_shape(model_params)))
        say("digest", start, digest(state))
        state, _ = step(state, batch_of(start))  # everything is compiled before the steps that are measured
        state = checkpoints.restore(state).state
        for owner, name, phase in (
            (StagedUpdate, "on_files", "update"),
            (saving.Save, "_write", "copying"),
            (saving.Save, "_digest", "digesting"),
            (saving.Save, "_commit", "committing"),
        ):
            mark(owner, name, phase)
        transfers, begun = Transfers(moment), time.perf_counter()
        for i in range(start, start + steps):
            say("passes")
            state, _ = step(state, batch_of(i))
            if is_reference:
                say("digest", i + 1, digest(state))
            else:
                say("saving")
                checkpoints.save(state, step=i + 1)
        checkpoints.wait()
        say("measured", next(transfers.numbers), time.perf_counter() - begun)


def serve():
    for line in sys.stdin:
        folder, *numbers = line.split()
        child = os.fork()
        if not child:
            status = 1
            try:
                run(Path(folder), *map(int, numbers))
                status = 0
            finally:
                os._exit(status)
        say("pid", child)
        _, status = os.waitpid(child, 0)
        say("ended", os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    serve()
