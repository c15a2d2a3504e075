"""Run by test_packing.py, one of several processes: restore a checkpoint of small leaves, and save it again."""

import sys

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

from zerojax import zero_shard
from zerojax.checkpoint import Checkpointer

SHAPES = {
    "w": ((80, 64), "float32"),  # 20,480 bytes, sharded by dim
    "odd": ((7, 13), "bfloat16"),  # padded
    "b": ((12,), "float32"),  # flat
    "c": ((), "float32"),
    "none": ((0, 5), "float32"),
    "large": ((160, 128), "float32"),
}
SHAPES = {name: jax.ShapeDtypeStruct(*one) for name, one in SHAPES.items()}
KEYS = jax.eval_shape(lambda: {"keys": jax.random.split(jax.random.key(0), 3)})


def main(source, target, count, port, index):
    jax.distributed.initialize(f"localhost:{port}", num_processes=count, process_id=index)
    devices = sorted(jax.devices(), key=lambda one: (one.id % 2, one.id))  # a process has shards that do not adjoin
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    tx = zero_shard(optax.adam(1e-2), stage=3, mesh=mesh, persist_below=64)
    state = Checkpointer(source, read_only=True).restore(tx.create(SHAPES, mutable=KEYS)).state
    with Checkpointer(target) as checkpoints:
        checkpoints.save(state, step=2)
        checkpoints.wait()
        checkpoints.verify()
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
