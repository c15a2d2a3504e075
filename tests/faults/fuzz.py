"""Files of checkpoints, changed: `fuzz.py FOLDER SEED COUNT`. Each is restored, or named by an error; prints the worst.

What is damaged is never restored as other numbers.
"""

import collections
import faulthandler
import linecache
import os
import random
import re
import shutil
import sys
import time
import traceback
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zerojax
from zerojax import Tuning, zero_shard
from zerojax.checkpoint import Checkpointer, CheckpointError, export, import_params

# One change's time of the processor; threads and caches beside what is allocated for a checkpoint.
SECONDS, SLACK = 10, 24 << 20


def changed_bytes(content, rng):
    """Bytes of which some were flipped, cut off, added or moved; what was done."""
    data, at = bytearray(content), rng.randrange(len(content) + 1)
    how = rng.choice(["flip", "end", "add", "zero", "double", "empty"])
    if how == "flip" and data:
        data[at % len(data)] ^= 1 << rng.randrange(8)
    elif how == "end":
        del data[at:]
    elif how == "add":
        data[at:at] = rng.randbytes(rng.choice([1, 8, 4096]))
    elif how == "zero":
        data[at : at + 64] = bytes(len(data[at : at + 64]))
    elif how == "double":
        data = data + data
    elif how == "empty":
        data = bytearray()
    return bytes(data), f"{how} at {at}"


def own(error):
    """Whether an error is one that zerojax raises itself, with words of its own."""
    if isinstance(error, CheckpointError):
        return True
    frame = traceback.extract_tb(error.__traceback__)[-1]
    here = frame.filename.startswith(str(Path(zerojax.__file__).parent))
    raises = linecache.getline(frame.filename, frame.lineno).strip().startswith("raise ")
    return here and raises and isinstance(error, ValueError | TypeError | FileNotFoundError)


def most_memory():
    return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1]) << 10


class Fuzz:
    """A checkpoint and an export of it, and what becomes of them when files change."""

    def __init__(self, root, seed):
        self.rng, self.root = random.Random(seed), root
        tx = zero_shard(optax.adam(1e-2), stage=3, tuning=Tuning(persist_below=4))
        params = {"w": jnp.arange(128.0 * 160).reshape(128, 160), "v": jnp.arange(21.0).reshape(7, 3), "b": jnp.ones(5)}
        state = tx.create({**params, "key": {"n": jnp.int32(3)}})
        self.like = zero_shard(optax.adam(1e-2), stage=1).create(jax.eval_shape(lambda: tx.unshard(state.params)))
        with Checkpointer(root / "whole") as checkpoints:
            data = {"position": 3, "seen": np.arange(4), "key": jax.random.key(1), "x": (1, b"bytes", None)}
            checkpoints.save(state, data, step=7)
        export(state, root / "whole" / "exported", file_bytes=1 << 16)
        self.files = sorted(p.relative_to(root / "whole") for p in (root / "whole").rglob("*") if p.is_file())
        self.files = [p for p in self.files if p.name != ".zerojax.lock"]
        self.size = sum((root / "whole" / p).stat().st_size for p in self.files)
        shutil.copytree(root / "whole", root / "changed", copy_function=os.link)
        self.written = set()
        self.expected = {True: self.exported(root / "whole"), False: self.restored(root / "whole")}

    def restored(self, root):
        checkpoints = Checkpointer(root, read_only=True)
        found = checkpoints.restore(self.like)
        return [*jax.tree.leaves(found.state), repr(found.data)]  # whose keys need not be comparable

    def exported(self, root):
        return jax.tree.leaves(import_params(root / "exported", self.like))

    def one(self):
        """Change a file; what was done, how it ended, and whether that is as it must be."""
        rng, root = self.rng, self.root / "changed"
        # by kind: there are many more files of arrays than others
        name = rng.choice(rng.choice(list(self.kinds().values())))
        content, done = changed_bytes((self.root / "whole" / name).read_bytes(), rng)
        self.mend()
        self.write(root / name, content)
        done = f"{name}: {done}"
        Path("/proc/self/clear_refs").write_text("5")
        before, begun = most_memory(), time.process_time()  # others may use the processor, too
        exported = name.parts[0] == "exported"
        try:
            found = (self.exported if exported else self.restored)(root)
            how = "restored"
            good = exported or all(map(same, found, self.expected[exported]))
            wanted = [(x.shape, x.dtype) for x in jax.tree.leaves(self.like.params if exported else self.like)]
            good = good and [(x.shape, x.dtype) for x in found[: len(wanted)]] == wanted
        except Exception as error:
            how, good = f"{type(error).__name__}: {str(error)[:300]}", own(error)
        seconds, memory = time.process_time() - begun, most_memory() - before
        good = good and seconds < SECONDS and memory < 2 * self.size + SLACK
        return done, f"{how} ({seconds:.1f} s, {memory >> 20} MiB)", good

    def write(self, path, content):
        path.unlink()  # which is a link to the whole one
        path.write_bytes(content)
        self.written.add(path)

    def mend(self):
        """Make all files links to the whole ones again."""
        for path in self.written:
            path.unlink()
            os.link(self.root / "whole" / path.relative_to(self.root / "changed"), path)
        self.written.clear()

    def kinds(self):
        kinds = collections.defaultdict(list)
        for path in self.files:
            kinds["shard" if path.parts[1:2] == ("arrays",) and path.name[0].isdigit() else path.name].append(path)
        return kinds


def same(a, b):
    if isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    return np.array_equal(a, b)


def main(folder, seed, count):
    warnings.simplefilter("ignore")
    fuzz, outcomes = Fuzz(Path(folder), int(seed)), collections.Counter()
    wrong = 0
    for number in range(int(count)):
        faulthandler.dump_traceback_later(60 * SECONDS, exit=True)  # where one hangs
        done, how, good = fuzz.one()
        outcomes[how.split(":")[0].split(" (")[0]] += 1
        if not good:
            wrong += 1
            print(f"WRONG {number} {done}\n    {how}", flush=True)
    print(f"{count} changes, {wrong} wrong: {dict(outcomes)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
