"""Run by test_reshard.py: a state goes around layouts on two processes, with half of each one's devices at the end.

Then what only one process cannot do is an error on both.

python reshard_child.py FOLDER PORT PROCESS
"""

import itertools
import sys
from pathlib import Path

import jax
import numpy as np
import optax

process = int(sys.argv[3])
jax.distributed.initialize(f"localhost:{sys.argv[2]}", num_processes=2, process_id=process)

from models import awkward_batches, awkward_loss, awkward_params, floats_only  # noqa: E402

from zerojax import Offload, zero_shard  # noqa: E402
from zerojax.offload.lock import DiskError  # noqa: E402


def tx_of(devices=None, **options):
    mesh = jax.make_mesh((2, len(devices or jax.devices()) // 2), ("host", "gpu"), devices=devices)
    inner = floats_only(optax.adam(1e-2))
    return zero_shard(inner, mesh=mesh, axis=("host", "gpu"), persist_below=64, **options)


def on_host(tx, state):
    trees = tx.unshard(state.params), tx.unshard(state.opt_state, state.params)
    return [np.asarray(x.addressable_data(0)) for x in jax.tree.leaves(trees)]


half = [d for d in jax.devices() if d.id % 4 < 2]
ways = [tx_of(stage=3), tx_of(stage=3, params_axis="gpu"), tx_of(half, stage=3), tx_of(stage=3)]
state = ways[0].create(awkward_params())
state, _ = ways[0].train_step(awkward_loss)(state, awkward_batches(1)[0])
expected = on_host(ways[0], state)
for old, new in itertools.pairwise(ways):
    state = old.reshard(state, to=new)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(on_host(new, state), expected, strict=True))
one = zero_shard(optax.adam(1e-2), stage=3, mesh=jax.make_mesh((4,), ("data",), devices=jax.devices()[:4]))
try:
    ways[-1].reshard(state, to=one)
except ValueError as error:
    print(error)

# Process 1 has no folder.
folder = Path(sys.argv[1])
(folder / "process_1").touch()
disk = tx_of(stage=3, offload=Offload(optimizer="disk", path=folder))
try:
    ways[-1].reshard(state, to=disk)
except DiskError as error:
    print(error)
assert not any(x.is_deleted() for x in jax.tree.leaves(state))
print("done")
