"""The search for what fits: it chooses the cheapest that the check lets pass, and says why not the others."""

import dataclasses
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absent_gpus import aot

from zerojax import Offload, Precision, Tuning, estimate, plan, zero_shard
from zerojax.config import Config
from zerojax.gpus.devices import LINKS, Device, Rates, Topology, abstract_mesh
from zerojax.planning import plan as planner
from zerojax.planning.fit import COST_RESOLUTION, MOST_ROWS, PEAK_MARGIN, SearchSpace, search
from zerojax.train.fitting import DoesNotFit

PARAMS = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}  # 67 MB, and 134 MB of moments
BATCH = jax.ShapeDtypeStruct((1, 4096), jnp.float32)
HOST = Offload(optimizer="host")
MB = 1e6


@dataclasses.dataclass
class Model:
    """A loss of known cost: activations and time are linear in the rows."""

    row_bytes: float
    row_seconds: float = 1e-3
    fixed_seconds: float = 1e-3

    def cost(self, config, layout, rows):
        count = rows.shape[0]
        gathered = PARAMS["w"].size * 4 if config.stage == 3 else 0
        seconds = self.fixed_seconds + count * self.row_seconds
        activations = int(count * self.row_bytes)
        return SimpleNamespace(activations=activations, gathered=gathered, seconds=lambda device: seconds)


def searched(
    memory,
    losses=None,
    *,
    counts=(8,),
    peak=lambda candidate: candidate.peak,
    stages=(0, 1, 2, 3),
    offloads=(None, HOST),
    rows=None,
    config=None,
    rates=None,
    **options,
):
    """`(fit, candidates that were compiled)`."""
    compiled = []

    def compile_plan(candidate):
        compiled.append(candidate)
        found = peak(candidate)
        return SimpleNamespace(peak=found, usable=memory, fits=found <= memory, topology="h200:8")

    config = config or Config(optax.adam(1e-3), 0, abstract_mesh(8, ("data",)))
    space = SearchSpace("h200", stages, offloads, rows, memory, Rates.parse(rates), **options)
    losses = losses or {"loss": Model(4 * MB)}
    return search(config, losses, PARAMS, BATCH, space=space, counts=counts, compile_plan=compile_plan), compiled


@pytest.mark.parametrize("memory", [120 * MB, 200 * MB, 400 * MB, 2000 * MB])
def test_nothing_that_fits_is_cheaper(memory):
    fit, _ = searched(memory)
    assert fit.plan.fits
    fitting_ones = [c for c in fit.tried if c.peak <= memory]
    assert fit.chosen in fitting_ones
    assert all(fit.chosen.seconds <= (1 + COST_RESOLUTION) * c.seconds for c in fitting_ones)


def test_less_memory_shards_more_and_offloads_at_last():
    chosen = [searched(memory, rows=(8,))[0].chosen for memory in (2000 * MB, 180 * MB, 130 * MB, 100 * MB)]
    assert [(c.stage, c.placement) for c in chosen] == [(3, "device"), (3, "device"), (3, "device"), (3, "host")]
    below = [searched(m, rows=(8,), stages=(0, 1, 2))[0].chosen for m in (2000 * MB, 200 * MB, 145 * MB)]
    assert [(c.stage, c.placement) for c in below] == [(1, "device"), (1, "device"), (1, "host")]


def test_of_equal_cost_the_simplest_is_taken():
    fit, compiled = searched(2000 * MB, counts=(1,), rows=(4,))
    assert (fit.chosen.stage, fit.chosen.offload, fit.chosen.loss) == (0, None, "loss")
    assert len(compiled) == 1
    same = {"first": Model(4 * MB, row_seconds=1.01e-3), "second": Model(2 * MB)}
    assert searched(2000 * MB, same, rows=(8,))[0].chosen.loss == "first"
    dearer = {"first": Model(4 * MB, row_seconds=1.1e-3), "second": Model(2 * MB)}
    assert searched(2000 * MB, dearer, rows=(8,))[0].chosen.loss == "second"


def test_a_step_costs_what_is_computed_sent_updated_and_offloaded():
    fit, _ = searched(2000 * MB, rows=(16,))
    seconds = {(c.stage, c.placement): 16 * c.seconds for c in fit.tried}
    device = Device.of(Topology.parse("h200:8"))
    kernels, size = 3e-3, 4 * 4096**2
    rows = estimate(PARAMS, tx=optax.adam(1e-3))
    for stage in range(4):
        sending = (3 if stage == 3 else 2) * size * 7 / 8 / device.link
        passes = max(kernels, sending) if stage == 3 else kernels + sending
        assert seconds[stage, "device"] == pytest.approx(passes + 2 * rows[stage].resident / device.bandwidth)
    moments = 2 * size / 8
    saved = 2 * moments / device.bandwidth
    for stage in (1, 2, 3):
        offloaded = seconds[stage, "host"] - seconds[stage, "device"]
        assert offloaded == pytest.approx(moments / LINKS["h200"]["host_link"] - saved)


def test_what_stays_within_a_host_goes_over_its_links():
    device, size = Device.of(Topology.parse("h200:64")), 4 * 4096**2
    inside, across = size * 7 / 8 / device.link, size / 8 * 7 / 8 / device.network
    everywhere, within = 3 * size * 63 / 64 / (8 * device.network), 3 * inside + 2 * across
    cases = [
        ({}, everywhere, 3 / 64),
        ({"shard_axis": ("gpu",)}, within, 3 / 8),
        ({"params_axis": ("gpu",)}, within, 1 / 8 + 2 / 64),
    ]
    instant = {"loss": Model(4 * MB, row_seconds=0, fixed_seconds=0)}
    for options, sending, resident in cases:
        mesh = abstract_mesh(64, ("host", "gpu"), hosts=8)
        config = Config(optax.adam(1e-3), 3, mesh, axis=("host", "gpu"), **options)
        given = {"counts": (64,), "rows": (64,), "stages": (3,), "offloads": (None,), "config": config}
        chosen = searched(2000 * MB, instant, **given)[0].chosen
        assert 64 * chosen.seconds == pytest.approx(sending + 2 * size * resident / device.bandwidth), options


def test_remat_is_chosen_where_it_pays():
    losses = {"plain": Model(100 * MB), "remat": Model(1 * MB, row_seconds=1.3e-3)}
    assert searched(400 * MB, losses, rows=(8,))[0].chosen.loss == "plain"
    assert searched(400 * MB, losses, rows=(64,))[0].chosen.loss == "remat"
    # a longer batch may pay for what remat costs
    assert searched(400 * MB, losses)[0].chosen.loss == "remat"


def test_doubling_ends_when_nothing_is_gained_or_nothing_fits():
    rows = lambda **line: {c.rows for c in searched(4000 * MB, {"loss": Model(**line)})[0].tried}
    assert rows(row_bytes=1000 * MB) == {8, 16, 32, 64}  # of eight rows on a device nothing fits
    gains = rows(row_bytes=1, row_seconds=1, fixed_seconds=0)
    assert gains == {8, 16}
    assert max(rows(row_bytes=1, row_seconds=0)) == 8 * MOST_ROWS


def test_the_fewest_devices_are_found():
    counts = (1, 2, 4, 8, 16)
    fit, _ = searched(120 * MB, counts=counts, offloads=(None,))
    assert fit.chosen.devices == 8
    alone = searched(120 * MB, counts=(8,), offloads=(None,))[0]
    assert alone.chosen == fit.chosen
    with pytest.raises(ValueError, match="Nothing fits 1 to 4 h200"):
        searched(120 * MB, counts=counts[:3], offloads=(None,))


def test_the_compiled_step_decides():
    first = searched(2000 * MB, rows=(8,))[0].chosen
    judge = lambda candidate: int(5000 * MB) if candidate.variant == first.variant else candidate.peak

    def refuse(candidate):
        if candidate.variant == first.variant:
            raise DoesNotFit("too large", peak=5000 * MB)
        return candidate.peak

    for peak in (judge, refuse):  # a plan that does not fit, or a step with memory= that cannot be made to fit
        fit, compiled = searched(2000 * MB, rows=(8,), peak=peak)
        assert [c.variant for c in compiled] == [first.variant, fit.chosen.variant]
        assert fit.chosen.variant != first.variant
        refused = fit.tried[0]
        assert (refused.variant, refused.peak) == (first.variant, 5000 * MB)
        assert refused.verdict == "does not fit: 5 GB, compiled"


def test_precisions_are_candidates():
    """Masters in bfloat16 halve the state, and are chosen where float32 does not fit."""
    narrow = Precision(compute=jnp.bfloat16, master=jnp.bfloat16)
    options = {"rows": (8,), "stages": (3,), "offloads": (None,), "precisions": (None, narrow)}
    assert searched(2000 * MB, **options)[0].chosen.precision is None
    fit, compiled = searched(98 * MB, **options)
    assert [c.precision for c in compiled] == [None, narrow]
    assert fit.chosen.precision == narrow
    assert str(fit.chosen) == "stage 3, loss 'loss', bfloat16, state on the device, 8 rows"
    assert [line.split()[3:5] for line in str(fit).splitlines()[3:]] == [["as", "given"], ["bfloat16", "device"]]


def test_progress_says_how_many_there_are_and_how_long_they_take(capsys, monkeypatch):
    monkeypatch.setattr("time.perf_counter", itertools.count(step=20).__next__)
    judge = lambda c: 5000 * MB if c.stage == 3 else c.peak
    searched(2000 * MB, rows=(8,), offloads=(None,), stages=(1, 2, 3), peak=judge, progress=True)
    assert capsys.readouterr().err.splitlines() == [
        "plan.fit: estimating 3 candidates on h200:8",
        "plan.fit: estimated loss 'loss' with 8 rows on h200:8",
        "plan.fit: 3 of 3 may fit. They are compiled, the fastest first, until one fits",
        "plan.fit: stage 3, loss 'loss', state on the device, 8 rows: does not fit: 5 GB, compiled. "
        "The other 2 take up to 40 s",
        "plan.fit: stage 1, loss 'loss', state on the device, 8 rows: fits, 155 MB",
    ]
    searched(2000 * MB, rows=(8,))
    assert capsys.readouterr().err == ""


def test_what_is_estimated_a_little_too_large_is_compiled_all_the_same():
    options = {"rows": (8,), "stages": (3,), "offloads": (None,), "peak": lambda candidate: 1}
    peak = searched(2000 * MB, **options)[0].chosen.peak
    assert searched(peak / (1 + PEAK_MARGIN) + 1, **options)[0].chosen.peak == peak
    with pytest.raises(ValueError, match="Nothing fits"):
        searched(peak / (1 + PEAK_MARGIN) - 1, **options)


def test_nothing_is_compiled_for_what_cannot_fit_anyway():
    class Never:
        def cost(self, config, layout, rows):
            raise AssertionError

    with pytest.raises(ValueError, match=r"nearest is stage 3, .* on the host, .* needs .* MB per device, and"):
        searched(5 * MB, {"loss": Never()})


def test_batches_that_the_devices_cannot_share_are_no_candidates():
    assert {c.rows for c in searched(2000 * MB, rows=(4, 8, 12, 16))[0].tried} == {8, 16}
    with pytest.raises(ValueError, match="multiple of the devices"):
        searched(2000 * MB, rows=(4,))


def test_only_valid_combinations_are_tried():
    params = Offload(optimizer="host", params="host")
    fit, _ = searched(2000 * MB, offloads=(None, HOST, params), rows=(8,))
    combinations = {(c.stage, c.placement) for c in fit.tried}
    assert combinations == {
        *((stage, "device") for stage in range(4)),
        *((stage, "host") for stage in (1, 2, 3)),
        (3, "host + params"),
    }

    on_disk = Offload(params="disk", optimizer="disk", path="anywhere")
    with pytest.raises(NotImplementedError, match=r"many programs.*zerojax\.estimate gives the bytes"):
        searched(2000 * MB, offloads=(None, on_disk, HOST), rows=(8,))


def test_it_prints_a_line_for_each_variant():
    fit, _ = searched(320 * MB)
    lines = str(fit).splitlines()
    assert lines[0] == f"{fit.chosen} on h200:8"
    assert [line.split()[-1] for line in lines[3:]].count("chosen") == 1
    assert len(lines) == 3 + 4 + 3  # stages; and those that offload
    assert "does not fit: at least" in str(searched(120 * MB)[0])
    title, *rows = str(searched(320 * MB, {"a": Model(4 * MB)})[0]).splitlines()[2:]  # aligned, whatever it is called
    assert title.split()[:5] == ["devices", "stage", "loss", "types", "state"]
    assert all(row[title.index("state") :].startswith(("device", "host")) for row in rows)


def chain(params, batch):
    for w in params["layers"]:
        batch = jnp.tanh(batch @ w)
    return jnp.mean(batch**2)


LAYERS = {"layers": [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 4}


@aot
def test_a_chain_is_fitted_to_absent_gpus():
    batch = jax.ShapeDtypeStruct((8, 64, 512), jnp.float32)
    fit = plan.fit(optax.adam(1e-3), chain, LAYERS, batch, rows=(16,), memory=9 * MB)
    assert (fit.chosen.stage, fit.chosen.placement) == (3, "device")
    assert fit.plan.fits
    assert fit.plan.batch == 16
    assert fit.chosen.peak == pytest.approx(fit.plan.peak, rel=PEAK_MARGIN)
    with pytest.raises(
        ValueError, match=r"Nothing fits 8 h200\. .*more devices, recompute=True or a loss with remat, fewer rows"
    ):
        plan.fit(optax.adam(1e-3), chain, LAYERS, batch, rows=(16,), memory=MB)


@aot
@pytest.mark.slow
def test_fewest_gpus_of_a_transformation_with_types_of_its_own():
    tx = zero_shard(optax.adam(1e-3), stage=0, precision=Precision.bf16(), tuning=Tuning(persist_below=1))
    batch = jax.ShapeDtypeStruct((1, 64, 512), jnp.float32)
    found = {}
    for memory in (40 * MB, 12 * MB):
        fit = found[memory] = plan.fit(tx, chain, LAYERS, batch, devices=None, rows=32, memory=memory)
        assert fit.plan.peak <= memory
        assert "bf16" in {c.dtype for c in fit.plan.collectives} or fit.chosen.devices == 1
    assert found[40 * MB].chosen.devices < found[12 * MB].chosen.devices


@aot
@pytest.mark.slow
def test_steps_that_recompute_fit_where_none_does_without():
    """One candidate per stage, without a loss with remat."""
    layers = {
        "up": jax.ShapeDtypeStruct((8, 256, 1024), jnp.float32),
        "down": jax.ShapeDtypeStruct((8, 1024, 256), jnp.float32),
    }
    layer = lambda x, w: (x + jax.nn.gelu(x @ w["up"]) @ w["down"], None)
    loss = lambda params, x: jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)
    batch = jax.ShapeDtypeStruct((8, 512, 256), jnp.float32)
    fitted = lambda memory, **options: plan.fit(
        optax.adamw(1e-3), loss, layers, batch, gpu="h100", rows=64, memory=memory, offload=None, stages=3, **options
    )
    with pytest.raises(ValueError, match="Give more devices, recompute=True or a loss with remat"):
        fitted(200 * MB)
    fit = fitted(200 * MB, recompute=True)
    assert fit.chosen.memory == "auto"
    assert "memory='auto'" in str(fit.chosen)
    assert fit.plan.peak <= 200 * MB
    assert abs(fit.chosen.peak / fit.plan.peak - 1) < 0.1
    with pytest.raises(ValueError, match=r"Give more devices, fewer rows"):
        fitted(30 * MB, recompute=True)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"loss_fn": {}}, ValueError, "names no loss"),
        ({"gpu": "h900"}, ValueError, "the GPUs known are"),
        ({"devices": 0}, ValueError, "devices counts GPUs and must be at least 1"),
        ({"devices": "8"}, TypeError, "devices counts GPUs and must be an int"),
        (
            {"row": 8},
            TypeError,
            "plan.fit has no option 'row'. It has rows, precision, recompute, progress, memory, rates",
        ),
        ({"memory": 0}, ValueError, "memory=0 is no size of at least 1 bytes"),
        ({"rates": {"host_link": -50e9}}, ValueError, "host_link must be a number above 0, per second, not -5"),
        ({"rows": np.float32(8)}, TypeError, "must be an int"),
        ({"precision": "bf16"}, TypeError, "precision is a Precision, such as"),
        ({"rows": (8, 0)}, ValueError, "rows counts rows of the global batch and must be at least 1"),
        ({"batch": jax.ShapeDtypeStruct((), jnp.float32)}, ValueError, "The cheapest batch is searched in rows"),
    ],
)
def test_bad_input_is_refused(options, error, message):
    batch = jax.ShapeDtypeStruct((8, 64, 512), jnp.float32)
    given = {"tx": optax.adam(1e-3), "loss_fn": chain, "params": LAYERS, "batch": batch}
    with pytest.raises(error, match=message):
        plan.fit(**given | options)


def test_one_choice_needs_no_sequence(monkeypatch):
    monkeypatch.setattr(planner, "absent_mesh", lambda topology, axes=("data",): abstract_mesh(8, axes))
    monkeypatch.setattr(planner, "PlainGradient", lambda *args, **_: Model(4 * MB))
    monkeypatch.setattr(
        planner, "search", lambda config, losses, *args, space, **others: (space.combinations, [*losses])
    )
    fit = lambda loss=chain, **options: plan.fit(optax.adam(1e-3), loss, LAYERS, BATCH, **options)
    bf16 = Precision.bf16()
    assert fit(stages=3, offload=HOST, precision=bf16) == ([(3, HOST, bf16)], ["loss"])
    assert fit(stages=(2, 3), offload=None) == ([(2, None, None), (3, None, None)], ["loss"])
    assert fit({1: chain}, stages=3, offload=None)[1] == ["1"]  # a name is printed, whatever it is
