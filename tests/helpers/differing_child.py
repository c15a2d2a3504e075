"""Run by test_same_run.py, several times: processes that differ in one way after the other.

python differing_child.py PROCESSES FOLDER CASE... PORT PROCESS
"""

import importlib.metadata
import json
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

processes, folder, *names, port, process = sys.argv[1:]
processes, folder, process = int(processes), Path(folder), int(process)
jax.distributed.initialize(f"localhost:{port}", num_processes=processes, process_id=process)

from zerojax import zero_shard  # noqa: E402
from zerojax.checkpoint import Checkpointer  # noqa: E402

last = int(process == processes - 1)  # the one that differs
ROWS = np.arange(32.0, dtype=np.float32).reshape(8, 4) / 32


def loss(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def begin(tx=None, stage=3, loss=loss, params=None, **options):
    tx = zero_shard(tx or optax.sgd(1e-2), stage=stage, persist_below=1)
    return tx.train_step(loss, **options), tx.create({"w": jnp.ones((4, 16))} if params is None else params)


def train(*args, steps=1, **options):
    step, state = begin(**options)
    for _ in range(steps):
        state, metrics = step(state, ROWS, *args)
    return float(metrics["loss"])


def nothing():
    train(jax.random.key(0), steps=3, loss=lambda params, batch, key: loss(params, batch))


def learning_rate():
    train(tx=optax.sgd(0.5 * (1 + last)))


def learning_rate_in_the_state():
    train(tx=optax.inject_hyperparams(optax.sgd)(learning_rate=1e-2 * (1 + last)))


def factor_in_the_loss():
    train(loss=lambda params, batch: loss(params, batch) * (1.0 + last))


def function_in_the_loss():
    train(loss=lambda params, batch: jnp.sum((jnp.sin, jnp.cos)[last](batch @ params["w"])))


def static_flag():
    train(bool(last), loss=lambda params, batch, flag: loss(params, batch))


def key_of_dropout():
    train(jax.random.key(last), loss=lambda params, batch, key: loss(params, batch) + jax.random.uniform(key))


def initial_key(stage=0):
    tx = zero_shard(optax.sgd(1e-2), stage=stage)
    tx.init_params(lambda key: {"w": jax.random.normal(key, (4, 16))}, jax.random.key(last))


def initial_values():
    begin(params={"w": jax.random.normal(jax.random.key(last), (4, 16)), "b": jnp.ones(16)})


def shards_that_two_processes_hold():
    from jax.sharding import NamedSharding, PartitionSpec

    half = jax.process_count() // 2 or 1
    mesh = jax.make_mesh((half, jax.device_count() // half), ("copy", "data"))
    sharding = NamedSharding(mesh, PartitionSpec(None, None))
    make = lambda index: np.full((4, 16), 1.0 + last, np.float32)[index]
    begin(params={"w": jax.make_array_from_callback((4, 16), sharding, make)})


def batch_statistics():
    tx = zero_shard(optax.sgd(1e-2), stage=3)
    tx.create({"w": jnp.ones((4, 16))}, mutable={"mean": jnp.zeros(4) + last})


def step_of_save():
    _, state = begin()
    with Checkpointer(folder / "steps") as checkpoints:
        checkpoints.save(state, step=5 + last)


def interval_of_saves():
    with Checkpointer(folder / "every", every=10 + last):
        pass


def step_of_restore():
    _, state = begin()
    with Checkpointer(folder / "restored") as checkpoints:
        for number in (1, 2):
            checkpoints.save(state, step=number)
        checkpoints.restore(state, step=1 + last)


def flag_of_xla():
    before = os.environ["XLA_FLAGS"]
    os.environ["XLA_FLAGS"] = before + " --xla_allow_excess_precision=false" * last
    try:
        begin()
    finally:
        os.environ["XLA_FLAGS"] = before


def option_of_jax():
    jax.config.update("jax_default_matmul_precision", "highest" if last else None)
    try:
        begin()
    finally:
        jax.config.update("jax_default_matmul_precision", None)


def version_of_optax():
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: version(name) + ".post1" * (name == "optax" and last)
    try:
        begin()
    finally:
        importlib.metadata.version = version


def evaluation():
    _, state = begin()
    tx = zero_shard(optax.sgd(1e-2), stage=3, persist_below=1)
    tx.eval_step(lambda params, batch: jnp.max(batch @ params["w"]) - 3.5 * last)(state.params, ROWS)


def gradient():
    tx = zero_shard(optax.sgd(1e-2), stage=3, persist_below=1)
    params = tx.shard({"w": jnp.ones((4, 16))})
    tx.value_and_grad(lambda params, batch: loss(params, batch) * (2 - last))(params, ROWS)


def update():
    tx = zero_shard(optax.sgd(0.5 * (1 + last)), stage=3, persist_below=1)
    params = tx.shard({"w": jnp.ones((4, 16))})
    tx.update(params, tx.init(params), params)


def loss_that_is_trained_first():
    def other(params, batch):
        return loss(params, batch)

    train(loss=other if last else loss)


def call_that_is_made():
    if last:
        Checkpointer(folder / "calls").close()
    else:
        begin()


# What follows ends the processes.


def one_step_more():
    train(steps=3 + last)


def a_save_on_one_process():
    step, state = begin()
    checkpoints = Checkpointer(folder / "one")
    for _ in range(5):
        state, metrics = step(state, ROWS)
        if not last:
            checkpoints.save(state, step=1)
        print(float(metrics["loss"]))


def an_error_in_the_data():
    step, state = begin()
    for number in range(5):
        if last and number == 3:
            raise KeyError("no such file")
        state, metrics = step(state, ROWS)
        print(float(metrics["loss"]))


if names and names[0].startswith("ending:"):
    globals()[names[0].removeprefix("ending:")]()
    sys.exit()
for name in names:
    said = ""
    try:
        globals()[name]()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    print(json.dumps({"case": name, "said": said}), flush=True)
