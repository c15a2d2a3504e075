"""Processes that do not do the same are told so, and do not wait for each other for ever."""

import json
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import several
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from zerojax import Offload, Tuning, zero_shard
from zerojax.comm import processes
from zerojax.data import shard_batches
from zerojax.inspect.hlo import peak_bytes
from zerojax.offload import host

pytestmark = pytest.mark.slow
DIFFERS = r"ValueError: The processes do not {} alike\. On process 1, unlike 0: "
BEGIN, STEP = DIFFERS.format("begin"), DIFFERS.format("step with loss")
SAID = {
    "other_stage": rf"{BEGIN}stage is 1, not 3;",
    "other_width": rf"{BEGIN}params\['w'\] is float32\[4, 24\], sharded, not float32\[4, 16\], sharded",
    "other_rows": rf"{STEP}\['batch'\] is float32\[4, 4\], not float32\[8, 4\]\.",
    "other_options": rf"{STEP}options is StepOptions\(accumulate=2.* not StepOptions\(accumulate=1",
    "own_rows_as_if_all": r"ValueError: Process \d gave a batch of \[8, 4\] whose values .*shard_batches",
    "own_batches_as_if_all": r"ValueError: Process \d gave a batch of \[8, 4\] whose values .*shard_batches",
    "no_word_on_whose_rows": r'ValueError: There are 2 processes, .*rows="process" if each process reads its own',
    "another_step": rf"{STEP}step is 0, not 1",
    "positions": "$",  # nothing
    "memory": "$",
    "shared_rows": "ValueError: rows=.process.*along axis 'sequence' share rows and belong to several processes",
    "weights_of_zero": r"ValueError: The weights of a batch",
    "too_little_memory": r"MemoryError: (On process 0: )?The offloaded optimizer state needs \d+ B of host memory",
}


ROWS = np.arange(32.0, dtype=np.float32).reshape(8, 4)


def begin(stage=3, width=16, **options):
    tx = zero_shard(optax.sgd(1e-2), stage=stage, tuning=Tuning(persist_below=1))
    return tx.train_step(loss, **options), tx.create({"w": jnp.ones((4, width))})


def loss(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def weighted(params, batch):
    return jnp.sum(batch @ params["w"]), jnp.sum(batch) * 0


def other_stage():
    begin(stage=3 - 2 * jax.process_index())


def other_width():
    begin(width=16 + 8 * jax.process_index())


def other_rows():
    step, state = begin()
    step(state, ROWS[: 8 - 4 * jax.process_index()])


def other_options():
    step, state = begin(accumulate=1 + jax.process_index())
    step(state, ROWS)


def own_rows_as_if_all():
    step, state = begin()
    step(state, ROWS + jax.process_index())


def own_batches_as_if_all():
    next(shard_batches([ROWS + jax.process_index()], zero_shard(optax.sgd(1e-2), stage=3), rows="global"))


def no_word_on_whose_rows():
    next(shard_batches([ROWS + jax.process_index()], zero_shard(optax.sgd(1e-2), stage=3)))


def another_step():
    step, state = begin()
    state, _ = step(state, ROWS)
    again, fresh = begin(accumulate=2)
    again(fresh if jax.process_index() else state, ROWS)


def weights_of_zero():
    tx = zero_shard(optax.sgd(1e-2), stage=3, tuning=Tuning(persist_below=1))
    step, state = tx.train_step(weighted, weighted=True), tx.create({"w": jnp.ones((4, 16))})
    for _ in range(2):
        state, _ = step(state, ROWS)


def too_little_memory():
    host.available_bytes = lambda: 10**9 if jax.process_index() else 100
    zero_shard(optax.adam(1e-2), stage=3, tuning=Tuning(persist_below=1), offload=Offload(optimizer="host")).create(
        {"w": jnp.ones((4, 16))}
    )


def with_positions(own):
    """Rows over two devices and positions over two; `own`: each process has both devices of a row."""
    devices = np.array(jax.devices()).reshape(2, 2)
    mesh = Mesh(devices if own else devices.T, ("data", "sequence"))
    tx = zero_shard(
        optax.sgd(1e-2), stage=3, tuning=Tuning(persist_below=1), mesh=mesh, batch_spec=P("data", "sequence")
    )
    batch = ROWS.reshape(4, 2, 4)
    (placed,) = shard_batches([batch[2 * jax.process_index() :][:2]], tx, rows="process")
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

    tx = zero_shard(optax.sgd(1e-2), stage=3, tuning=Tuning(persist_below=1))
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
    if jax.process_index():
        time.sleep(4)
        return
    begin()


CASES = [*SAID, "absent"]


def try_all():
    several.try_cases([globals()[name] for name in CASES])


@pytest.fixture(scope="module")
def told():
    """What each process said, by case."""
    return several.by_case(several.run(try_all))


def test_both_are_told_what_differs(told):
    for process in told:
        for case, said in SAID.items():
            assert re.match(said, process[case]["said"], re.S), (case, process[case]["said"])


def test_both_train_with_memory_as_without(told):
    assert len({process[f"loss {fitted}"]["said"] for process in told for fitted in (True, False)}) == 1


def test_one_that_waits_is_told_for_whom(told):
    waiting = told[0]["absent"]
    assert waiting["said"].startswith("TimeoutError: Process 1 of 2 did not answer within 2 s")
    assert waiting["seconds"] < 4
