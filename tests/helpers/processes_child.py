"""Run by test_processes.py, twice: what processes are told that do not do the same.

python processes_child.py PORT PROCESS
"""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

process = int(sys.argv[2])
jax.distributed.initialize(f"localhost:{sys.argv[1]}", num_processes=2, process_id=process)

from zerojax import Offload, zero_shard  # noqa: E402
from zerojax.comm import processes  # noqa: E402
from zerojax.data import shard_batches  # noqa: E402
from zerojax.inspect.hlo import peak_bytes  # noqa: E402
from zerojax.offload import host  # noqa: E402

ROWS = np.arange(32.0, dtype=np.float32).reshape(8, 4)


def begin(stage=3, width=16, **options):
    tx = zero_shard(optax.sgd(1e-2), stage=stage, persist_below=1)
    return tx.train_step(loss, **options), tx.create({"w": jnp.ones((4, width))})


def loss(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def weighted(params, batch):
    return jnp.sum(batch @ params["w"]), jnp.sum(batch) * 0


def other_stage():
    begin(stage=3 - 2 * process)


def other_width():
    begin(width=16 + 8 * process)


def other_rows():
    step, state = begin()
    step(state, ROWS[: 8 - 4 * process])


def other_options():
    step, state = begin(accumulate=1 + process)
    step(state, ROWS)


def own_rows_as_if_all():
    step, state = begin()
    step(state, ROWS + process)


def own_batches_as_if_all():
    next(shard_batches([ROWS + process], zero_shard(optax.sgd(1e-2), stage=3), rows="global"))


def no_word_on_whose_rows():
    next(shard_batches([ROWS + process], zero_shard(optax.sgd(1e-2), stage=3)))


def another_step():
    step, state = begin()
    state, _ = step(state, ROWS)
    again, fresh = begin(accumulate=2)
    again(fresh if process else state, ROWS)


def weights_of_zero():
    tx = zero_shard(optax.sgd(1e-2), stage=3, persist_below=1)
    step, state = tx.train_step(weighted, weighted=True), tx.create({"w": jnp.ones((4, 16))})
    for _ in range(2):
        state, _ = step(state, ROWS)


def too_little_memory():
    host.available_bytes = lambda: 10**9 if process else 100
    zero_shard(optax.adam(1e-2), stage=3, persist_below=1, offload=Offload(optimizer="host")).create(
        {"w": jnp.ones((4, 16))}
    )


def with_positions(own):
    """Rows over two devices and positions over two; `own`: each process has both devices of a row."""
    devices = np.array(jax.devices()).reshape(2, 2)
    mesh = Mesh(devices if own else devices.T, ("data", "sequence"))
    tx = zero_shard(optax.sgd(1e-2), stage=3, persist_below=1, mesh=mesh, batch_spec=P("data", "sequence"))
    batch = ROWS.reshape(4, 2, 4)
    (placed,) = shard_batches([batch[2 * process :][:2]], tx, rows="process")
    (whole,) = shard_batches([batch], tx, rows="global")
    for given in (placed, whole, batch):
        _, metrics = tx.train_step(loss)(tx.create({"w": jnp.ones((4, 16))}), given)
        np.testing.assert_allclose(metrics["loss"], (ROWS.sum(-1) ** 2).mean())


def positions():
    with_positions(own=True)


def shared_rows():
    with_positions(own=False)


def memory():
    """Both choose the same share, and train as without `memory=`."""
    params = {"up": jnp.full((4, 16, 64), 0.1), "down": jnp.full((4, 64, 16), 0.1)}

    def layer(x, w):
        return x + jnp.tanh(jnp.sin(x @ w["up"])) @ w["down"], None

    def scanned(params, x):
        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    tx = zero_shard(optax.sgd(1e-2), stage=3, persist_below=1)
    batch = np.linspace(0, 1, 64 * 16, dtype=np.float32).reshape(64, 16)
    plain, state = tx.train_step(scanned), tx.create(params)
    limit = int(0.8 * peak_bytes(plain.lower(state, batch).compile()))
    step = tx.train_step(scanned, memory=limit)
    fit = step.memory_fit(state, batch)
    assert fit.chosen.peak <= limit
    shares = processes.Processes("shares").exchange("compare shares", str(fit.chosen.share))
    assert len(set(shares)) == 1
    for one, begun in ((step, state), (plain, tx.create(params))):
        state, metrics = one(begun, batch)
        print(json.dumps({"case": f"loss {one is step}", "said": f"{metrics['loss']:.6g}"}), flush=True)


def absent():
    processes.TIMEOUT_S = 2
    if process:
        time.sleep(4)
        return
    begin()


CASES = (
    other_stage,
    other_width,
    other_rows,
    other_options,
    own_rows_as_if_all,
    own_batches_as_if_all,
    no_word_on_whose_rows,
    another_step,
    weights_of_zero,
    too_little_memory,
    positions,
    shared_rows,
    memory,
    absent,
)
if __name__ == "__main__":
    for case in CASES:
        begun, said = time.monotonic(), ""
        try:
            case()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        print(json.dumps({"case": case.__name__, "said": said, "seconds": time.monotonic() - begun}), flush=True)
