"""Run by test_streamed_checkpoints.py in a process of its own, to be killed: a run with optimizer state on disk."""

import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import optax
from models import awkward_batches, awkward_loss, awkward_params

from zerojax import Offload, zero_shard
from zerojax.checkpoint import Checkpointer
from zerojax.checkpoint.export import export


def main(folder, steps):
    """Train to a step, from the newest checkpoint on, saving every third step; at the end write the parameters."""
    offload = Offload(optimizer="disk", path=folder / "state", chunk_bytes=200, update="device")
    tx = zero_shard(optax.adamw(1e-2), stage=3, persist_below=20, offload=offload)
    state, step, done = tx.create(awkward_params()), tx.train_step(awkward_loss), 0
    with Checkpointer(folder / "checkpoints", keep=1, every=3) as checkpoints:
        if checkpoints.latest():
            state, _, done, *_ = checkpoints.restore(state)
        for i, batch in enumerate(awkward_batches(steps), 1):
            if i <= done:
                continue
            state, metrics = step(state, batch)
            float(metrics["loss"])
            print("step", i, flush=True)
            checkpoints.save(state, step=i)
    shutil.rmtree(folder / "parameters", ignore_errors=True)  # of a run that was killed after its last step
    export(state, folder / "parameters")
    np.save(folder / "moments.npy", np.concatenate([np.ravel(x) for x in moments(state)]))


def moments(state):
    from zerojax.checkpoint.state_leaves import state_leaves
    from zerojax.layout.chunked import is_chunked
    from zerojax.placement.chunking import joined
    from zerojax.placement.storage import in_logical_shape

    leaves = [leaf for name, leaf in state_leaves(state).items() if name.startswith("opt_state")]
    return [in_logical_shape(joined(x.array) if is_chunked(x.array) else x.array, x.leaf) for x in leaves]


if __name__ == "__main__":
    jax.config.update("jax_compilation_cache_dir", str(Path(sys.argv[1]).parent / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
