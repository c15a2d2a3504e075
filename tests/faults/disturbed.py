"""A run that is disturbed until it is ended: each round arms one fault, trains and saves for some steps.

What was reported, and what can be restored, are compared with the uninterrupted run. Faults are drawn from a seed.
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
import subprocess
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax import Narrow, Offload, Precision, Tuning, zero_shard
from zerojax.checkpoint import Checkpointer, CheckpointError, on_preemption, saving
from zerojax.checkpoint.state_leaves import state_leaves
from zerojax.layout.leaf import is_chunked
from zerojax.offload import close
from zerojax.offload.chunked import joined
from zerojax.offload.folder import DiskError
from zerojax.placement.storage import in_logical_shape

STEPS = 40
WATCHED = "open fsync rename mkdir unlink rmdir scandir pwritev preadv pwrite".split()
ERRORS = {name: getattr(errno, name) for name in ("ENOSPC", "EIO", "EMFILE", "EACCES")}
LIMITS = ["RLIMIT_FSIZE", "permission"]  # of the system: of the libraries' own calls, too
OF_SEVERAL = [*ERRORS, *LIMITS, "slow", "clock", "none", "lock lost", "stopped"]  # processes
OF_ONE = ["RLIMIT_NOFILE", "SIGINT", "SIGTERM"]  # without handles gloo ends it
FAULTS = [*OF_SEVERAL, *OF_ONE]
SMALL = [0, 200, 1 << 16]  # bytes below which leaves are packed: none, some, all
NOBODY, HANGS_S = 65534, 600
PARENT = os.getpid()  # imports this, and forks
# What the state of the way "narrow" is stored as, and what its checkpoints are restored into besides.
NARROW = Narrow("int8", masters="rounded")
OTHER_WIDTHS = [None, Narrow("float8"), Narrow("bfloat16", masters="compensated")]
SIZES = [16, 6, 5]  # of the model, which `begin` makes larger for the way "narrow"
FOREIGN = ["notes.txt", ".tmp-mywork/x", ".old-mine/x", "step_notes/x", "step_00000001.bak/x"]


class Disk:
    """The calls of Python on files whose paths begin so, of which some fail or are slow."""

    def __init__(self, folder):
        self.folder, self.calls, self.bad, self.error, self.delay = str(folder), 0, range(0), None, 0.0
        for module, name in [(io, "open"), *((os, name) for name in WATCHED)]:
            setattr(module, name, self.watched(getattr(module, name)))

    def watched(self, call):
        def watching(target=".", *args, **options):
            if self.has(target, options.get("dir_fd")):
                self.calls += 1
                if self.calls in self.bad:
                    if self.error is not None:
                        raise OSError(self.error, os.strerror(self.error), str(target))
                    time.sleep(self.delay)
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
    n, hidden, m = SIZES
    return {
        "w": jax.random.normal(keys[0], (n, hidden)),
        "v": jax.random.normal(keys[1], (hidden, m)),
        "b": jnp.zeros(m),
    }


def batch(step):
    return np.random.default_rng(step).standard_normal((4, SIZES[0]), np.float32)


def digest(state, devices=()):
    """Of all bits of a state: of logical arrays, or of the shards of some devices."""
    sha256 = hashlib.sha256()
    for one in state_leaves(state).values():
        x = joined(one.array) if is_chunked(one.array) else one.array
        shards = (
            [s.data for s in x.addressable_shards if s.device.id in devices]
            if devices
            else [in_logical_shape(x, one.leaf)]
        )
        for shard in shards:
            sha256.update(np.asarray(shard).tobytes())
    return sha256.hexdigest()


def sharded(offload=None, mesh=None, way="", state=NARROW):
    narrow = {"state": state, "precision": Precision.bf16()} if way == "narrow" else {}
    return zero_shard(optax.adam(1e-2), stage=3, mesh=mesh, tuning=Tuning(persist_below=4), offload=offload, **narrow)


def newest_epoch(folder):
    """A run trains the same steps again and again, each time in a new folder."""
    return max((int(path.name[6:]) for path in folder.glob("epoch_*")), default=0)


class Run:
    """A run, its checkpoints, and what was reported of them."""

    def __init__(self, folder, way, seed):
        self.folder, self.rng, self.one = folder, random.Random(seed), jax.process_count() == 1
        self.index, self.epoch, self.calls, self.synced = jax.process_index(), newest_epoch(folder), 100, 0
        saving.SMALL_BYTES = self.rng.choice(SMALL)
        self.preempted, self.devices = False, () if self.one else [device.id for device in jax.local_devices()]
        self.faults = FAULTS if self.one else OF_SEVERAL
        if way in ("disk", "params") and not self.one:  # a process whose state is lost ends alone
            self.faults = [fault for fault in OF_SEVERAL if fault not in LIMITS]
        offload = None
        if way not in ("device", "narrow"):
            kept = {"optimizer": way} if way != "params" else {"optimizer": "disk", "params": "disk"}
            path = None if way == "host" else folder / "state"
            offload = Offload(**kept, path=path, chunk_bytes=64, update="device")
        self.tx = sharded(offload, way=way)
        alone = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,))
        self.alone = sharded(mesh=alone if self.one else None, way=way)
        self.like = self.alone.create(jax.eval_shape(parameters))
        self.others = [sharded(way=way, state=state) for state in OTHER_WIDTHS] if way == "narrow" else []
        self.step = self.tx.train_step(loss)
        known = folder / f"reference.{self.index}.json"
        if not known.exists():
            known.write_text(json.dumps(self.uninterrupted()))
        elif self.one:
            # XLA chooses kernels in the first step, and others if it may not open files by then.
            close(self.step(self.tx.create(parameters()), batch(1))[0])
        self.reference = json.loads(known.read_text())
        self.disk = Disk(folder if self.one else folder / "epoch")

    def uninterrupted(self):
        state = self.tx.create(parameters())
        digests = [self.digest(state)]
        for i in range(1, STEPS + 1):
            state, _ = self.step(state, batch(i))
            digests.append(self.digest(state))
        close(state)
        return digests

    def digest(self, state):
        return digest(state, self.devices)

    # --- what is done -------------------------------------------------------------------------------------------

    def open(self):
        """Begin, or go on from what is there."""
        self.path = self.folder / f"epoch_{self.epoch}"
        if self.index == 0 and not list(self.path.glob("step_*[0-9]")):
            for name in FOREIGN:
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                (self.path / name).write_text(name)
        self.checkpoints = Checkpointer(self.path, keep=2, timeout=HANGS_S)
        if self.checkpoints.latest() is None:
            self.state, self.i = self.tx.create(parameters()), 0
            self.save()
        else:
            self.restore()

    def restore(self):
        like = self.tx.create(jax.eval_shape(parameters))
        self.state, data, self.i, *_ = self.checkpoints.restore(like)
        assert data == {"step": self.i}
        assert self.digest(self.state) == self.reference[self.i]
        self.report()

    def save(self):
        self.checkpoints.save(self.state, {"step": self.i}, step=self.i)
        self.checkpoints.wait()
        self.report()

    def report(self):
        """From here on this step must be there, or a later one."""
        self.confirmed = self.i
        print("saved", self.epoch, self.i, flush=True)

    def train(self, steps, between, stop):
        for _ in range(steps):
            self.state, _ = self.step(self.state, batch(self.i + 1))
            self.i += 1
            self.checkpoints.save(self.state, {"step": self.i}, step=self.i)
            between()
            if stop():
                break
        self.checkpoints.wait()
        self.report()

    def check(self):
        """What was reported is there, what is there is of the uninterrupted run, and others' files are as they were."""
        steps = self.checkpoints.steps()
        assert max(steps) >= self.confirmed, f"step {self.confirmed} was reported, and there are {steps}"
        for step in steps[:-1]:  # the newest is verified as it is restored
            self.checkpoints.verify(step)
        restored = self.checkpoints.restore(self.like)
        assert restored.step == max(steps) == restored.data["step"]
        assert self.digest(restored.state) == self.reference[restored.step], f"step {restored.step} is another"
        if self.others:
            to = self.rng.choice(self.others)
            found = self.checkpoints.restore(to.create(jax.eval_shape(parameters))).state
            converted = self.alone.reshard(restored.state, to=to, donate=False)
            assert self.digest(found) == self.digest(converted), f"step {restored.step} is another in {to.config.state}"
        for name in FOREIGN:
            assert (self.path / name).read_text() == name

    # --- how it is disturbed ------------------------------------------------------------------------------------

    def disturbed(self, fault):
        """Train for some steps with a fault; whether the state was lost."""
        steps, delay = self.rng.randint(1, 3), self.rng.uniform(0, 0.3)
        # of which processes draw equally many, though they do not call equally often
        first, lasts, room = self.rng.random() * self.calls, self.rng.choice([1, 10**9]), self.rng.randint(0, 12)
        here = self.one or self.rng.randrange(jax.process_count()) == self.index
        between, lost, before = (lambda: None), False, self.disk.calls
        with contextlib.ExitStack() as stack:
            if here and (fault in ERRORS or fault == "slow"):
                first = self.disk.calls + 1 + int(first)
                self.disk.error = ERRORS.get(fault)
                if fault == "slow":  # one call very, or many
                    self.disk.delay, lasts = (0.5, 1) if lasts == 1 else (0.01, 50)
                self.disk.bad = range(first, first + lasts)
                stack.callback(setattr, self.disk, "bad", range(0))
            if fault == "clock":
                stack.callback(setattr, time, "time", real := time.time)
                time.time = lambda: real() - 86400.0
            if here and fault.startswith("RLIMIT"):
                kind = getattr(resource, fault)
                stack.callback(resource.setrlimit, kind, limits := resource.getrlimit(kind))
                handles = max(map(int, os.listdir("/proc/self/fd")))
                resource.setrlimit(kind, (handles + room if fault == "RLIMIT_NOFILE" else 40 * room, limits[1]))
            if here and fault == "permission" and os.geteuid() == 0:  # else the folder is made read-only
                between = lambda: os.seteuid(NOBODY)
                stack.callback(os.seteuid, 0)
            elif here and fault == "permission":
                between = lambda: self.path.chmod(0o555)
                stack.callback(self.path.chmod, 0o755)
            if fault == "lock lost":
                between = self.write_beside
            if here and fault == "stopped":  # as by a debugger, or a frozen machine
                pauses = f"sleep {delay:.2f}; kill -STOP {os.getpid()}; sleep {2 * delay:.2f}; kill -CONT {os.getpid()}"
                stack.callback(subprocess.Popen(["sh", "-c", pauses]).wait)
            preemption = stack.enter_context(on_preemption([signal.SIGTERM]))
            if fault.startswith("SIG"):
                timer = threading.Timer(delay, os.kill, (os.getpid(), getattr(signal, fault)))
                stack.callback(timer.join)
                timer.start()
            try:
                self.train(steps, between, lambda: self.reached(preemption))
                self.calls = max(self.disk.calls - before, 10)
            except CheckpointError:
                pass
            except DiskError:
                lost = True
            except KeyboardInterrupt:
                if fault != "SIGINT":
                    raise
                lost = True
            self.preempted |= preemption.signal is not None and fault != "SIGTERM"
        return lost

    def reached(self, preemption):
        self.synced += 1  # of several processes it is asked with numbers that grow
        return preemption.reached(self.synced)

    def write_beside(self):
        if self.index == 0:
            (self.path / ".zerojax.lock").unlink(missing_ok=True)
        Checkpointer(self.path).close()

    def round(self, number):
        if self.i + 3 > STEPS:
            self.checkpoints.close()
            close(self.state)
            self.epoch += 1
            self.open()
        fault, lost = self.rng.choice(self.faults), True
        reopened = fault == "lock lost" or self.rng.random() < 0.3
        print(f"round {number}: {fault} after step {self.i}", flush=True)
        with contextlib.suppress(KeyboardInterrupt) if fault == "SIGINT" else contextlib.nullcontext():
            lost = self.disturbed(fault)  # an interrupt may come as late as where the fault is disarmed
        failed = raised(self.checkpoints.wait)
        assert failed is None or isinstance(failed, CheckpointError), failed
        self.check()
        if lost or isinstance(raised(lambda: self.digest(self.state)), DiskError):  # a write that was behind
            close(self.state)
            self.restore()
        assert self.digest(self.state) == self.reference[self.i]
        self.save()  # which works again
        if reopened:
            self.checkpoints.close()
            self.checkpoints = Checkpointer(self.path, keep=2, timeout=HANGS_S)
            assert not [name for name in os.listdir(self.path) if name.startswith((".tmp-step", ".old-step"))]

    def live(self):
        signal.signal(signal.SIGTERM, self.end) if self.one else None  # else jax's handler is there
        print("ready", flush=True)
        self.open()
        for number in itertools.count():
            if self.preempted or not has_parent():
                break
            faulthandler.dump_traceback_later(HANGS_S, exit=True)
            self.round(number)
        self.checkpoints.close()
        print("preempted", flush=True)

    def end(self, number, frame):
        self.preempted = True


def raised(work):
    """What a function raises, but for a request to end; None if nothing."""
    try:
        work()
    except Exception as error:
        return error


def live(folder, way, seed, index=None, port=None):
    begin(2, way)
    if index is not None:
        jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=index)
    Run(folder, way, seed).live()


def read(folder, way, processes):
    """A process that is none of the run restores what the run saves."""
    begin(2 * processes, way)
    references = [json.loads((folder / f"reference.{i}.json").read_text()) for i in range(processes)]
    like = sharded(way=way).create(jax.eval_shape(parameters))
    while has_parent():
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
        with contextlib.suppress(CheckpointError):
            restored = Checkpointer(folder / f"epoch_{newest_epoch(folder)}", read_only=True).restore(like)
            for i, reference in enumerate(references):
                devices = () if processes == 1 else [2 * i, 2 * i + 1]
                assert digest(restored.state, devices) == reference[restored.step], f"step {restored.step} is another"
            print("read", restored.step, flush=True)


def has_parent():
    """Whether what began this process is there, which would end it."""
    return os.getppid() == PARENT


def begin(devices, way):
    """What must be set before devices are used."""
    SIZES[:] = [64, 66, 65] if way == "narrow" else SIZES
    faulthandler.dump_traceback_later(HANGS_S, exit=True)
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warnings.simplefilter("ignore")
