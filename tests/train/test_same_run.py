"""Processes that differ are all told in which way, before one of them trains on or waits for ever."""

import json
import os
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import several
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax import Offload, Tuning, zero_shard
from zerojax.checkpoint import Checkpointer
from zerojax.comm import processes
from zerojax.data import shard_batches
from zerojax.inspect.hlo import peak_bytes
from zerojax.offload import host

LAST = r"On process LAST, unlike 0: "
PROGRAM = r"ValueError: The processes do not {} alike: the programs of process LAST differ from that of process 0\. "
VALUES = r"ValueError: The processes do not {} alike\. On process LAST, unlike 0: the checksum of {} is "
STEP = r"ValueError: The processes do not step with {} alike\. " + LAST
BEGIN = r"ValueError: The processes do not begin alike\. " + LAST
# What both processes are told, by case.
SAID = {
    "nothing": "$",
    "learning_rate": PROGRAM.format("step with loss"),
    "learning_rate_in_the_state": VALUES.format("create a state", r"opt_state.hyperparams\['learning_rate'\]"),
    "factor_in_the_loss": PROGRAM.format("step with <lambda>"),
    "static_flag": STEP.format("<lambda>") + r"constant arguments is \[True\], not \[False\]",
    "initial_key": VALUES.format("initialise parameters", r"args\[0\]"),
    "initial_values": VALUES.format("begin with values", r"params\['w'\]") + r"\w{8}, not \w{8}\. ",
    "shards_that_two_processes_hold": VALUES.format("begin with values", r"params\['w'\]"),
    "batch_statistics": VALUES.format("begin with values", r"mutable\['mean'\]"),
    "step_of_save": r"ValueError: The processes do not save alike\. " + LAST + "step is 6, not 5",
    "interval_of_saves": r"ValueError: The processes do not open .*alike\. " + LAST + "every is 11, not 10",
    "step_of_restore": r"ValueError: The processes do not restore alike\. " + LAST + "step is 2, not 1",
    "flag_of_xla": BEGIN + r"XLA_FLAGS is .*--xla_allow_excess_precision=false.*, not ",
    "evaluation": PROGRAM.format("evaluate <lambda>"),
    "gradient": PROGRAM.format("differentiate <lambda>"),
    "update": PROGRAM.format("update"),
    "own_rows_as_if_all": r"ValueError: Process \d gave a batch of \[8, 4\] whose values .*shard_batches",
    "own_batches_as_if_all": r"ValueError: Process \d gave a batch of \[8, 4\] whose values .*shard_batches",
    "no_word_on_whose_rows": r'ValueError: There are 2 processes, .*rows="process" if each process reads its own',
    "positions": "$",  # nothing
    "memory": "$",
    "shared_rows": "ValueError: rows=.process.*along axis 'sequence' share rows and belong to several processes",
    "weights_of_zero": r"ValueError: The weights of a batch",
    "too_little_memory": r"MemoryError: (On process 0: )?The offloaded optimizer state needs \d+ B of host memory",
    "loss_that_is_trained_first": r"ValueError: .* Process LAST is about to step with other, and process 0 is about "
    "to step with loss",
    "call_that_is_made": r"ValueError: .* Process LAST is about to open .*, and process 0 is about to begin",
}
FOUR = "nothing learning_rate initial_values step_of_save shards_that_two_processes_hold call_that_is_made".split()


ROWS = np.arange(32.0, dtype=np.float32).reshape(8, 4) / 32


def last():
    """1 on the process that differs."""
    return int(jax.process_index() == jax.process_count() - 1)


def loss(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def begin(tx=None, stage=3, loss=loss, params=None, **options):
    tx = zero_shard(tx or optax.sgd(1e-2), stage=stage, tuning=Tuning(persist_below=1))
    return tx.train_step(loss, **options), tx.create({"w": jnp.ones((4, 16))} if params is None else params)


def train(*args, steps=1, **options):
    step, state = begin(**options)
    for _ in range(steps):
        state, metrics = step(state, ROWS, *args)
    return float(metrics["loss"])


def nothing():
    train(jax.random.key(0), steps=3, loss=lambda params, batch, key: loss(params, batch))


def learning_rate():
    train(tx=optax.sgd(0.5 * (1 + last())))


def learning_rate_in_the_state():
    train(tx=optax.inject_hyperparams(optax.sgd)(learning_rate=1e-2 * (1 + last())))


def factor_in_the_loss():
    train(loss=lambda params, batch: loss(params, batch) * (1.0 + last()))


def static_flag():
    train(bool(last()), loss=lambda params, batch, flag: loss(params, batch))


def initial_key(stage=0):
    tx = zero_shard(optax.sgd(1e-2), stage=stage)
    tx.init_params(lambda key: {"w": jax.random.normal(key, (4, 16))}, jax.random.key(last()))


def initial_values():
    begin(params={"w": jax.random.normal(jax.random.key(last()), (4, 16)), "b": jnp.ones(16)})


def shards_that_two_processes_hold():
    half = jax.process_count() // 2 or 1
    mesh = jax.make_mesh((half, jax.device_count() // half), ("copy", "data"))
    sharding = NamedSharding(mesh, PartitionSpec(None, None))
    make = lambda index: np.full((4, 16), 1.0 + last(), np.float32)[index]
    begin(params={"w": jax.make_array_from_callback((4, 16), sharding, make)})


def batch_statistics():
    tx = zero_shard(optax.sgd(1e-2), stage=3)
    tx.create({"w": jnp.ones((4, 16))}, mutable={"mean": jnp.zeros(4) + last()})


def step_of_save():
    _, state = begin()
    with Checkpointer("steps") as checkpoints:
        checkpoints.save(state, step=5 + last())


def interval_of_saves():
    with Checkpointer("every", every=10 + last()):
        pass


def step_of_restore():
    _, state = begin()
    with Checkpointer("restored") as checkpoints:
        for number in (1, 2):
            checkpoints.save(state, step=number)
        checkpoints.restore(state, step=1 + last())


def flag_of_xla():
    before = os.environ["XLA_FLAGS"]
    os.environ["XLA_FLAGS"] = before + " --xla_allow_excess_precision=false" * last()
    try:
        begin()
    finally:
        os.environ["XLA_FLAGS"] = before


def evaluation():
    _, state = begin()
    tx = zero_shard(optax.sgd(1e-2), stage=3, tuning=Tuning(persist_below=1))
    tx.eval_step(lambda params, batch: jnp.max(batch @ params["w"]) - 3.5 * last())(state.params, ROWS)


def gradient():
    tx = zero_shard(optax.sgd(1e-2), stage=3, tuning=Tuning(persist_below=1))
    params = tx.shard({"w": jnp.ones((4, 16))})
    tx.value_and_grad(lambda params, batch: loss(params, batch) * (2 - last()))(params, ROWS)


def update():
    tx = zero_shard(optax.sgd(0.5 * (1 + last())), stage=3, tuning=Tuning(persist_below=1))
    params = tx.shard({"w": jnp.ones((4, 16))})
    tx.update(params, tx.init(params), params)


def loss_that_is_trained_first():
    def other(params, batch):
        return loss(params, batch)

    train(loss=other if last() else loss)


def call_that_is_made():
    if last():
        Checkpointer("calls").close()
    else:
        begin()


def weighted(params, batch):
    return jnp.sum(batch @ params["w"]), jnp.sum(batch) * 0


def own_rows_as_if_all():
    step, state = begin()
    step(state, ROWS + last())


def own_batches_as_if_all():
    next(shard_batches([ROWS + last()], zero_shard(optax.sgd(1e-2), stage=3), rows="global"))


def no_word_on_whose_rows():
    next(shard_batches([ROWS + last()], zero_shard(optax.sgd(1e-2), stage=3)))


def weights_of_zero():
    tx = zero_shard(optax.sgd(1e-2), stage=3, tuning=Tuning(persist_below=1))
    step, state = tx.train_step(weighted, weighted=True), tx.create({"w": jnp.ones((4, 16))})
    for _ in range(2):
        state, _ = step(state, ROWS)


def too_little_memory():
    host.available_bytes = lambda: 10**9 if last() else 100
    zero_shard(optax.adam(1e-2), stage=3, tuning=Tuning(persist_below=1), offload=Offload(optimizer="host")).create(
        {"w": jnp.ones((4, 16))}
    )


def with_positions(own):
    """Rows over two devices and positions over two; `own`: each process has both devices of a row."""
    devices = np.array(jax.devices()).reshape(2, 2)
    mesh = Mesh(devices if own else devices.T, ("data", "sequence"))
    tx = zero_shard(
        optax.sgd(1e-2),
        stage=3,
        tuning=Tuning(persist_below=1),
        mesh=mesh,
        batch_spec=PartitionSpec("data", "sequence"),
    )
    batch = ROWS.reshape(4, 2, 4)
    (placed,) = shard_batches([batch[2 * last() :][:2]], tx, rows="process")
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
    if last():
        time.sleep(4)
        return
    begin()


# What follows ends the processes.


def one_step_more():
    train(steps=3 + last())


def a_save_on_one_process():
    step, state = begin()
    checkpoints = Checkpointer("one")
    for _ in range(5):
        state, metrics = step(state, ROWS)
        if not last():
            checkpoints.save(state, step=1)
        print(float(metrics["loss"]))


def an_error_in_the_data():
    step, state = begin()
    for number in range(5):
        if last() and number == 3:
            raise KeyError("no such file")
        state, metrics = step(state, ROWS)
        print(float(metrics["loss"]))


def train_on_own(*rows):
    """Train on batches of so many rows of this process."""
    step, state = begin()
    tx = zero_shard(optax.sgd(1e-2), stage=3, tuning=Tuning(persist_below=1))
    for batch in shard_batches((ROWS[:count] for count in rows), tx, rows="process"):
        state, metrics = step(state, batch)
        print(float(metrics["loss"]))
    return state


def a_loader_that_ends_first():
    train_on_own(*[4] * (4 - last()))


def a_loader_that_ends_before_a_save():
    state = train_on_own(*[4] * (4 - last()))
    Checkpointer("after").save(state, step=4 - last())


def fewer_rows_in_a_last_batch():
    train_on_own(4, 4, 4, 4 - 2 * last())


def try_cases(folder, *names):
    os.chdir(folder)
    several.try_cases([globals()[name] for name in names])


def end_with(folder, name):
    os.chdir(folder)
    globals()[name]()


@pytest.mark.slow
@pytest.mark.parametrize(("count", "cases"), [(2, [*SAID]), (4, FOUR)])
def test_all_are_told_what_differs(count, cases, tmp_path):
    told = several.by_case(several.run(try_cases, tmp_path, *cases, processes=count))
    for process in told:
        for case in cases:
            said, expected = process[case]["said"], SAID[case].replace("LAST", str(count - 1))
            assert re.match(expected, said, re.S), f"{case}: {said}"
    if "memory" in cases:
        assert len({process[f"loss {fitted}"]["said"] for process in told for fitted in (True, False)}) == 1


@pytest.mark.slow
def test_one_that_waits_is_told_for_whom(tmp_path):
    waiting = several.by_case(several.run(try_cases, tmp_path, "absent"))[0]["absent"]
    assert waiting["said"].startswith("TimeoutError: Process 1 of 2 did not answer within 2 s")
    assert waiting["seconds"] < 4


# What both processes say that end, by case, in either order.
ENDS = {
    "one_step_more": ["the end of the program on process 0", "step 3 with loss on process 1"],
    "a_save_on_one_process": ["save on process 0", "step 1 with loss on process 1"],
    "a_loader_that_ends_first": ["the end of the program on process 1", "step 3 with loss on process 0"],
    "a_loader_that_ends_before_a_save": ["open a Checkpointer on process 1", "step 3 with loss on process 0"],
    "fewer_rows_in_a_last_batch": ["step with loss on process 1", "step 3 with loss on process 0"],
    "an_error_in_the_data": ["KeyError: 'no such file'"],
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ENDS)
def test_processes_that_cannot_go_on_say_why_and_end(case, tmp_path):
    children = several.start(end_with, tmp_path, case)
    try:
        said = [one.communicate(timeout=90)[1] for one in children]  # JAX's own limits are 100 and 300 s
    finally:
        for one in children:
            one.kill()
    either = [", and ".join(parts) for parts in (ENDS[case], ENDS[case][::-1])]
    for one, errors in zip(children, said, strict=True):
        assert one.returncode not in (0, None), errors
        assert any(text in errors for text in either), errors
