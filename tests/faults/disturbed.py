"""A run that is disturbed, in a process of its own: `disturbed.py FOLDER WAY SEED ROUNDS [INDEX PORT]`.

Each round arms one fault, trains and saves for some steps, and holds what was reported, and what can be restored,
against the uninterrupted run. Faults and their instants are drawn from the seed. With 0 rounds it is to be killed.
"""

import contextlib
import errno
import faulthandler
import hashlib
import io
import itertools
import json
import os
import random
import resource
import shutil  # before its functions are watched  # noqa: F401
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax import Offload, zero_shard
from zerojax.checkpoint import Checkpointer, CheckpointError, on_preemption
from zerojax.checkpoint.resharding import logical
from zerojax.checkpoint.state_leaves import state_leaves
from zerojax.layout.chunked import is_chunked
from zerojax.offload import close
from zerojax.offload.folder import DiskError
from zerojax.placement.chunking import joined

STEPS = 60
WATCHED = "open fsync rename mkdir unlink rmdir scandir pwritev preadv pwrite".split()
ERRORS = {name: getattr(errno, name) for name in ("ENOSPC", "EIO", "EMFILE", "EACCES")}
OF_SEVERAL = [*ERRORS, "slow", "clock", "none"]  # processes: their saves fail together, other faults end the run
FAULTS = [*OF_SEVERAL, "RLIMIT_FSIZE", "RLIMIT_NOFILE", "second writer", "lock lost", "reader", "SIGINT", "SIGTERM"]
FOREIGN = ["notes.txt", ".tmp-mywork/x", ".old-mine/x", "step_notes/x", "step_00000001.bak/x"]


class Disk:
    """The calls of Python on files whose paths begin so, of which some fail or are slow."""

    def __init__(self, folder):
        self.folder, self.calls, self.bad, self.error = str(folder), 0, range(0), None
        for module, name in [(io, "open"), *((os, name) for name in WATCHED)]:
            setattr(module, name, self.watched(getattr(module, name)))

    def watched(self, call):
        def watching(target=".", *args, **options):
            if self.has(target, options.get("dir_fd")):
                self.calls += 1
                if self.calls in self.bad:
                    if self.error is not None:
                        raise OSError(self.error, os.strerror(self.error), str(target))
                    time.sleep(0.02)
            return call(target, *args, **options)

        return watching

    def has(self, target, base):
        if isinstance(target, int):
            return os.readlink(f"/proc/self/fd/{target}").startswith(self.folder)
        return (base is not None and self.has(base, None)) or os.fsdecode(target).startswith(self.folder)


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["w"]) @ params["v"] + params["b"]) ** 2)


def parameters():
    keys = jax.random.split(jax.random.key(0))
    return {"w": jax.random.normal(keys[0], (16, 6)), "v": jax.random.normal(keys[1], (6, 5)), "b": jnp.zeros(5)}


def batch(step):
    return np.random.default_rng(step).standard_normal((4, 16), np.float32)


def digest(state):
    """Of all bits of a state: of logical arrays, or, of several processes, this one's shards."""
    sha256 = hashlib.sha256()
    for one in state_leaves(state).values():
        x = joined(one.array) if is_chunked(one.array) else one.array
        shards = [logical(x, one.leaf)] if jax.process_count() == 1 else [s.data for s in x.addressable_shards]
        for shard in shards:
            sha256.update(np.asarray(shard).tobytes())
    return sha256.hexdigest()


class Run:
    """A run, its checkpoints, and what was reported of them."""

    def __init__(self, folder, way, seed):
        self.folder, self.rng, self.one = folder, random.Random(seed), jax.process_count() == 1
        self.index, self.epoch, self.calls = jax.process_index(), 0, 100
        offload = None
        if way != "device":
            path = folder / "state" if way == "disk" else None
            offload = Offload(optimizer=way, path=path, chunk_bytes=64, update="device")
        make = lambda offload, mesh=None: zero_shard(
            optax.adam(1e-2), stage=3, mesh=mesh, persist_below=4, offload=offload
        )
        self.tx = make(offload)
        alone = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,))
        self.like = make(None, alone if self.one else None).create(jax.eval_shape(parameters))
        self.step = self.tx.train_step(loss)
        known = folder / f"reference.{self.index}.json"
        if not known.exists():
            known.write_text(json.dumps(self.uninterrupted()))
        self.reference = json.loads(known.read_text())
        self.disk = Disk(folder if self.one else folder / "epoch")  # a process whose state is lost ends alone

    def uninterrupted(self):
        state = self.tx.create(parameters())
        digests = [digest(state)]
        for i in range(1, STEPS + 1):
            state, _ = self.step(state, batch(i))
            digests.append(digest(state))
        close(state)
        return digests

    # --- what is done -------------------------------------------------------------------------------------------

    def open(self):
        """Begin, or go on from what is there."""
        self.path = self.folder / f"epoch_{self.epoch}"
        if self.index == 0:
            for name in FOREIGN:
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                (self.path / name).write_text(name)
        self.checkpoints = Checkpointer(self.path, keep=2, timeout=60)
        if self.checkpoints.latest() is None:
            self.state, self.i = self.tx.create(parameters()), 0
            self.checkpoints.save(self.state, {"step": 0}, step=0)
            self.checkpoints.wait()
        else:
            self.restore()
        self.confirmed = self.i

    def restore(self):
        """Go back to the newest checkpoint."""
        like = self.tx.create(jax.eval_shape(parameters))
        self.state, data, self.i, *_ = self.checkpoints.restore(like)
        assert data == {"step": self.i}
        assert digest(self.state) == self.reference[self.i]

    def train(self, steps, between=lambda: None, stop=lambda step: False):
        for _ in range(steps):
            self.state, _ = self.step(self.state, batch(self.i + 1))
            self.i += 1
            self.checkpoints.save(self.state, {"step": self.i}, step=self.i)
            between()
            if stop(self.i):
                break
        self.checkpoints.wait()
        self.confirmed = self.i

    def check(self):
        """What was reported is there, what is there is of the uninterrupted run, and others' files are as they were."""
        steps = self.checkpoints.steps()
        assert max(steps) >= self.confirmed, f"step {self.confirmed} was reported, and there are {steps}"
        assert self.checkpoints.verify() == steps
        restored = self.checkpoints.restore(self.like)
        assert restored.step == max(steps) == restored.data["step"]
        assert digest(restored.state) == self.reference[restored.step], f"step {restored.step} is another"
        for name in FOREIGN:
            assert (self.path / name).read_text() == name

    # --- how it is disturbed ------------------------------------------------------------------------------------

    def disturbed(self, fault):
        """Train for some steps with a fault; whether the state was lost."""
        steps, delay = self.rng.randint(1, 3), self.rng.uniform(0, 0.3)
        first, lasts, room = self.rng.randint(1, self.calls), self.rng.choice([1, 10**9]), self.rng.randint(0, 12)
        here = self.one or self.rng.randrange(jax.process_count()) == self.index
        between, lost, before = (lambda: None), False, self.disk.calls
        with contextlib.ExitStack() as stack:
            if here and (fault in ERRORS or fault == "slow"):
                first += self.disk.calls
                self.disk.error, self.disk.bad = ERRORS.get(fault), range(first, first + lasts)
                stack.callback(setattr, self.disk, "bad", range(0))
            if fault == "clock":
                stack.callback(setattr, time, "time", real := time.time)
                time.time = lambda: real() - 86400.0
            if fault.startswith("RLIMIT"):
                kind = getattr(resource, fault)
                stack.callback(resource.setrlimit, kind, limits := resource.getrlimit(kind))
                handles = max(map(int, os.listdir("/proc/self/fd")))
                resource.setrlimit(kind, (handles + room if fault == "RLIMIT_NOFILE" else 40 * room, limits[1]))
            if fault in ("second writer", "lock lost"):
                between = lambda: self.write_beside(fault == "lock lost")
            if fault == "reader":
                stack.enter_context(self.read_beside())
            stop = stack.enter_context(on_preemption([signal.SIGTERM])).reached if self.one else lambda step: False
            if fault.startswith("SIG"):
                timer = threading.Timer(delay, os.kill, (os.getpid(), getattr(signal, fault)))
                stack.callback(timer.join)
                timer.start()
            try:
                self.train(steps, between, stop)
                self.calls = max(self.disk.calls - before, 10)
            except CheckpointError:
                pass
            except (DiskError, KeyboardInterrupt):
                lost = True
        return lost

    def write_beside(self, unlocked):
        if unlocked:
            (self.path / ".lock").unlink(missing_ok=True)
            Checkpointer(self.path).close()
            return
        try:
            Checkpointer(self.path)
        except CheckpointError:
            return
        raise AssertionError("two writers")

    @contextlib.contextmanager
    def read_beside(self):
        done, wrong = threading.Event(), []

        def read():
            while not done.is_set():
                with contextlib.suppress(CheckpointError):
                    restored = Checkpointer(self.path, read_only=True).restore(self.like)
                    if digest(restored.state) != self.reference[restored.step]:
                        wrong.append(restored.step)

        reader = threading.Thread(target=lambda: wrong.append(error) if (error := raised(read)) else None)
        reader.start()
        yield
        done.set()
        reader.join()
        assert not wrong, wrong

    def round(self, number):
        if self.i + 3 > STEPS:
            self.checkpoints.close()
            close(self.state)
            self.epoch += 1
            self.open()
        fault, lost = self.rng.choice(FAULTS if self.one else OF_SEVERAL), True
        reopened = fault == "lock lost" or self.rng.random() < 0.3
        print(f"round {number}: {fault} after step {self.i}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):  # as late as where the fault is disarmed
            lost = self.disturbed(fault)
        failed = raised(self.checkpoints.wait)
        assert failed is None or isinstance(failed, CheckpointError), failed
        self.check()
        if lost or isinstance(raised(lambda: digest(self.state)), DiskError):  # a write that was behind
            close(self.state)
            self.restore()
        assert digest(self.state) == self.reference[self.i]
        self.checkpoints.save(self.state, {"step": self.i}, step=self.i)  # which works again
        self.checkpoints.wait()
        self.confirmed = self.i
        if reopened:
            self.checkpoints.close()
            self.checkpoints = Checkpointer(self.path, keep=2, timeout=60)
            assert not [name for name in os.listdir(self.path) if name.startswith((".tmp-step", ".old-step"))]


def raised(work):
    """What a function raises; None if nothing."""
    try:
        work()
    except BaseException as error:
        return error


def main(folder, way, seed, rounds, index=None, port=None):
    if index is not None:
        jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(index))
    faulthandler.dump_traceback_later(120 + 10 * int(rounds), exit=True)
    signal.signal(signal.SIGTERM, lambda *_: None)  # one that comes after the steps
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warnings.simplefilter("ignore")
    run = Run(Path(folder), way, int(seed))
    run.open()
    print("begun", run.i, flush=True)
    if int(rounds):
        for number in range(int(rounds)):
            run.round(number)
    else:
        for i in itertools.count(run.i + 1):
            if i > STEPS:
                time.sleep(100)
            run.train(1)
            print("saved", i, flush=True)
    run.checkpoints.close()
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
