"""What a training loop tells: the learning rate, rates, what a writer is handed, and the steps of a profile."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of

import zerojax
from zerojax import Log, Offload, Throughput, zero_shard

PARAMS = {"w": jnp.ones((16, 64)), "v": jnp.ones((64, 3)), "learning_rate": jnp.ones(())}
BATCH = jnp.ones((16, 16))
SCHEDULE = optax.linear_schedule(0.0, 1.0, 8)


def loss(params, batch):
    return jnp.mean(jnp.tanh(batch @ params["w"]) @ params["v"]) * params["learning_rate"]


def begun(tx, *, stage=3, offload=None, **options):
    tx = zero_shard(tx, stage=stage, mesh=mesh_of(8), persist_below=8, offload=offload)
    return tx.train_step(loss, **options), tx.create(PARAMS)


@pytest.mark.parametrize("offload", [None, pytest.param(Offload(optimizer="host"), marks=pytest.mark.slow)])
def test_metrics_have_the_learning_rate_of_their_step(offload):
    tx = optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.adam)(learning_rate=SCHEDULE))
    step, state = begun(tx, offload=offload, skip_nonfinite=True)
    for i, batch in enumerate([BATCH, BATCH, jnp.nan * BATCH, BATCH]):
        state, metrics = step(state, batch)
        assert metrics["learning_rate"] == SCHEDULE([0, 1, 2, 2][i])  # a skipped step leaves the schedule alone


@pytest.mark.parametrize(
    "tx",
    [
        optax.adam(SCHEDULE),  # optax keeps its count, and no rate
        pytest.param(
            optax.partition(
                {k: optax.inject_hyperparams(optax.sgd)(learning_rate=r) for k, r in (("a", 0.1), ("b", 1.0))},
                {"w": "a", "v": "b", "learning_rate": "b"},
            ),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_metrics_have_no_learning_rate_where_the_state_has_not_exactly_one(tx):
    step, state = begun(tx)
    assert "learning_rate" not in jax.eval_shape(step, state, BATCH)[1]


@pytest.fixture(scope="module")
def compiled():
    step, state = begun(optax.sgd(1e-3))
    return step.lower(state, BATCH).compile()


def test_throughput_counts_the_products_of_the_compiled_step(compiled):
    seconds = iter([100.0, 102.0, 112.0])
    rates = Throughput(compiled, model_flops=1000, peak=1e6, clock=lambda: next(seconds))
    rows, (m, k), n = 16 // 8, PARAMS["w"].shape, 3
    # Of one device's rows: x @ w and its weight gradient; z @ v and both of its gradients.
    flops = 2 * rows * (2 * m * k + 3 * k * n)
    assert rates(steps=1, tokens=160) == {}  # the clock starts when the first step is done, which compiled
    expected = {
        "step_seconds": 0.5,
        "tokens_per_second": 320.0,
        "flops_per_second": 2 * flops,
        "hfu": 2 * flops / 1e6,
        "mfu": 1000 * 320 / 8 / 1e6,
    }
    assert rates(steps=4, tokens=640) == pytest.approx(expected)
    assert set(rates(steps=4)) == set(expected) - {"tokens_per_second", "mfu"}
    assert Throughput(compiled, peak="h200").peak == Throughput(compiled, peak="h100").peak > 1e14


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peak": "h900"}, "GPUs known are a100-80"),
        ({"peak": 0.0}, "must be above 0"),
        ({"compiled": None, "peak": 1e12}, "give compiled="),
    ],
)
def test_what_utilization_cannot_be_computed_from_is_refused(options, message, compiled):
    with pytest.raises(ValueError, match=message):
        Throughput(**{"compiled": compiled} | options)


def test_a_log_hands_scalars_to_its_writer_every_so_many_steps():
    seconds, written = iter([0.0, 3.0, 5.0]), []
    throughput = Throughput(clock=lambda: next(seconds))
    log = Log(lambda values, step: written.append((step, values)), every=3, throughput=throughput)
    for i in range(1, 8):
        log(
            i,
            {"loss": jnp.array(i), "skipped": jnp.array(False), "aux": {"a": i / 2, "logits": jnp.ones(3)}},
            tokens=10,
        )
    first, second = written
    assert first == (3, {"loss": 3.0, "skipped": 0.0, "aux/a": 1.5})
    assert second == (6, {"loss": 6.0, "skipped": 0.0, "aux/a": 3.0, "step_seconds": 1.0, "tokens_per_second": 10.0})
    with pytest.raises(ValueError, match="every"):
        Log(print, every=0)


def test_a_log_describes_the_parameters_of_a_step():
    """At the steps that it writes, with padded leaves counted without their padding."""
    step, state = begun(optax.sgd(1e-3), leaf_norms=True)
    written = []
    log = Log(lambda values, step: written.append(values), every=2, stats=True)
    for i in (1, 2):
        before = jax.device_get(zerojax.logical(state.params))
        state, metrics = step(state, BATCH)
        log(i, metrics, params=state.params)
    [values] = written
    assert values["parameters"] == 16 * 64 + 64 * 3 + 1
    after = jax.device_get(zerojax.logical(state.params))
    for name, old in before.items():
        moved = np.linalg.norm(after[name] - old) / np.linalg.norm(old)
        assert values[f"update_ratios/{name}"] == pytest.approx(moved, rel=1e-3)
        assert values[f"params/{name}/mean"] == pytest.approx(after[name].mean(), rel=1e-6)
    assert not [name for name in values if name.startswith("memory/")], "a CPU counts none"
    with pytest.raises(TypeError, match=r"params=state\.params"):
        log(3, metrics)


def test_a_log_writes_the_memory_of_the_fullest_device(monkeypatch):
    class Device:
        def __init__(self, used):
            self.memory_stats = lambda: {"bytes_in_use": used, "peak_bytes_in_use": 3 * used}

    monkeypatch.setattr(jax, "local_devices", lambda: [Device(10), Device(20)])
    written = []
    zeros = {"update_norms": {"a": 1.0}, "param_norms": {"a": 0.0}}
    Log(lambda values, step: written.append(values), stats=True)(1, zeros, params=jnp.ones((2, 3)))
    [values] = written
    assert values["memory/in_use"] == 20
    assert values["memory/peak"] == 60
    assert values["update_ratios/a"] == np.inf
    assert values["parameters"] == 6


def test_a_profile_has_the_number_of_each_step(tmp_path):
    step, state = begun(optax.sgd(1e-3))
    state, _ = step(state, BATCH)
    with jax.profiler.trace(tmp_path):
        for _ in range(2):
            state, metrics = step(state, BATCH)
        metrics["loss"].block_until_ready()
    (profile,) = pathlib.Path(tmp_path).rglob("*.xplane.pb")
    events = [
        dict(event.stats)
        for plane in jax.profiler.ProfileData.from_file(str(profile)).planes
        for line in plane.lines
        for event in line.events
        if event.name == "train"
    ]
    assert [int(np.asarray(event["step_num"])) for event in events] == [1, 2]


@pytest.mark.parametrize(("value", "found"), [("warmup", "'warmup', a str"), (object, "a type")])
def test_a_log_names_what_is_no_number(value, found):
    log = Log(lambda values, step: None)
    with pytest.raises(TypeError, match=rf"metrics\['aux'\]\['phase'\] is .*{found}\. Leave it out"):
        log(1, {"loss": jnp.ones(()), "count": 3, "aux": {"phase": value}})
