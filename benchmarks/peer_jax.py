"""Train in JAX for `peers.py`: zerojax at stage 3, and plain `jax.jit` with replicated or with sharded parameters.

`gspmd` places parameters and state, and leaves everything else to the compiler. `gspmd-tuned` is the strongest simple
rival: a model that gathers each layer by hand in its rematerialised body. On GPUs it uses XLA's level O1 and double
buffered loops.
"""

import functools
import sys

import jax
import numpy as np
import optax
import yardstick
from jax.sharding import NamedSharding, PartitionSpec
from peer_model import ADAMW, stacked, tokens_of

from zerojax import Precision, zero_shard

WAYS = ("zerojax", "zerojax-device", "replicated", "gspmd", "gspmd-tuned")
BATCHES = 16  # made beforehand, then used in turn
TUNED = {"optimization_level": "O1", "xla_gpu_enable_while_loop_double_buffering": True}


def nested(weights):
    """A tree of dicts of leaves by path."""
    tree = {}
    for path, leaf in weights.items():
        *modules, name = path.split("/")
        functools.reduce(lambda at, module: at.setdefault(module, {}), modules, tree)[name] = leaf
    return tree


def write_weights(size, file):
    """Initial weights of the unrolled model, by path."""
    init, _, _ = yardstick.build(size, scan=False)
    leaves = jax.tree_util.tree_leaves_with_path(jax.jit(init)(jax.random.key(0)))
    np.savez(file, **{"/".join(key.key for key in path): np.asarray(leaf) for path, leaf in leaves})


class Trainer:
    """One way of training, its weights and its state; `step(i)` is the loss of the i-th batch."""

    def __init__(self, way, size, weights, *, scan):
        _, self.loss, (rows, length) = yardstick.build(size, scan=scan)
        self.tx = zero_shard(optax.adamw(**ADAMW), stage=3, **zerojax_options(way, size))
        mesh = self.tx.config.mesh
        made = {"rows": rows * mesh.size, "length": length, "vocabulary": yardstick.SIZES[size].vocabulary}
        where = NamedSharding(mesh, PartitionSpec("data"))
        self.batches = [jax.device_put(tokens_of(i, **made), where) for i in range(BATCHES)]
        params = nested(stacked(weights) if scan else weights)
        if way.startswith("zerojax"):
            self.state = self.tx.create(self.tx.shard(params))
            self.program = self.tx.train_step(self.loss)
        else:
            if way == "gspmd-tuned":
                self.loss = yardstick.gathered_by_hand(yardstick.SIZES[size], scan, mesh)
            options = TUNED if way == "gspmd-tuned" and jax.default_backend() == "gpu" else None
            self.state, self.program = plain(self.tx, self.loss, params, where, way != "replicated", options)

    def step(self, number):
        self.state, metrics = self.program(self.state, self.batches[number % BATCHES])
        jax.block_until_ready(self.state)
        return float(metrics["loss"])

    def compiled_peak(self):
        """Bytes a device needs while the compiled step runs: what it is given and gives, and what is temporary."""
        found = self.program.lower(self.state, self.batches[0]).compile().memory_analysis()
        kept = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
        return kept + found.temp_size_in_bytes

    def device_peak(self):
        """Bytes the busiest GPU held; None where the platform does not count."""
        counted = [device.memory_stats() for device in jax.local_devices()]
        return max(stats["peak_bytes_in_use"] for stats in counted) if all(counted) else None


def zerojax_options(way, size):
    half = yardstick.SIZES[size].dtype != np.float32
    view = {"view": "device"} if way == "zerojax-device" else {}
    return view | ({"precision": Precision.bf16()} if half and way.startswith("zerojax") else {})


def plain(tx, loss, params, rows, sharded, options):
    """State, and the step of plain `jax.jit` with parameters and moments where stage 3 has them, or replicated."""
    inner, whole = optax.adamw(**ADAMW), NamedSharding(tx.config.mesh, PartitionSpec())
    where = tx.shardings(jax.eval_shape(lambda: params)).params if sharded else jax.tree.map(lambda _: whole, params)
    moments = optax.tree.map_params(
        inner,
        lambda _, sharding: sharding,
        jax.eval_shape(inner.init, params),
        where,
        transform_non_params=lambda _: whole,
    )
    shardings = {"in_shardings": ((where, moments), rows), "out_shardings": ((where, moments), {"loss": whole})}

    @functools.partial(jax.jit, donate_argnums=0, compiler_options=options, **shardings)
    def step(state, batch):
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, moments = inner.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), {"loss": value}

    params = jax.device_put(params, where)
    return (params, jax.jit(inner.init, out_shardings=moments)(params)), step


if __name__ == "__main__":
    write_weights(*sys.argv[1:])
