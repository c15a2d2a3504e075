"""A schedule is simulated: kernels on one stream and collectives on another, at the rates of a device."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import mesh_of

from zerojax import Tuning, collectives, zero_shard
from zerojax.gpus.devices import Device, Topology
from zerojax.inspect.hlo import read
from zerojax.inspect.roofline import overlap
from zerojax.inspect.timeline import Expected, simulate

H200 = Device.of(Topology.parse("h200:8"))
# A loop of five iterations around a gather hidden by a product; before it an exposed one, for which the kernels wait.
SCHEDULE = """HloModule m, is_scheduled=true, num_partitions=8

%body (state: STATE) -> STATE {
  %state = STATE parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = bf16[256,256] get-tuple-element(%state), index=1
  %ag = (bf16[256,256], bf16[2048,256]) all-gather-start(%x), dimensions={0}, EVERYONE
  %y = bf16[256,256] dot(%x, %x), ROWS_BY_COLUMNS, metadata={op_name="jvp(f)"}
  %got = bf16[2048,256] all-gather-done(%ag)
  ROOT %next = STATE tuple(%i, %y, %got)
}

%condition (state: STATE) -> pred[] {
  %state = STATE parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  ROOT %less = pred[] compare(%i, %i), direction=LT
}

ENTRY %main (a: bf16[256,256]) -> bf16[256,256] {
  %a = bf16[256,256] parameter(0)
  %zero = s32[] constant(0)
  %first = bf16[2048,256] all-gather(%a), dimensions={0}, EVERYONE
  %init = STATE tuple(%zero, %a, %first)
  %loop = STATE while(%init), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %x.1 = bf16[256,256] get-tuple-element(%loop), index=1
  ROOT %z = bf16[256,256] dot(%x.1, %x.1), ROWS_BY_COLUMNS, metadata={op_name="transpose(jvp(f))"}
}
"""
for short, long in {
    "STATE": "(s32[], bf16[256,256], bf16[2048,256])",
    "EVERYONE": "replica_groups={{0,1,2,3,4,5,6,7}}",
    "ROWS_BY_COLUMNS": "lhs_contracting_dims={1}, rhs_contracting_dims={0}",
}.items():
    SCHEDULE = SCHEDULE.replace(short, long)
MOVES = 7 / 8 * 2048 * 256 * 2 / H200.link
MULTIPLIES = max(2 * 256**3 / H200.rates["bf16"], 3 * 256 * 256 * 2 / H200.bandwidth)


def test_a_schedule_is_simulated_at_peak_rates():
    simulated = simulate(SCHEDULE, H200)
    times = {
        ("gather", "exposed"): (0, MOVES, MOVES),
        ("compute", "waiting"): (0, MOVES, MOVES),
        ("gather", "hidden"): (MOVES, 2 * MOVES, 2 * MOVES),
        ("compute", "forward"): (MOVES, MOVES + MULTIPLIES, MOVES + MULTIPLIES),
        ("compute", "backward"): (2 * MOVES, 2 * MOVES + MULTIPLIES, 2 * MOVES + MULTIPLIES),
    }
    spans = {(span.lane, span.kind): (span.begin, span.end, span.done) for span in reversed(simulated.spans)}
    assert spans == {key: pytest.approx(found) for key, found in times.items()}
    assert simulated.loops == [(pytest.approx(MOVES), pytest.approx(2 * MOVES), 5)]
    assert overlap(read(SCHEDULE)).hidden_share == pytest.approx(5 / 6)
    assert simulated.waits == {"first": pytest.approx(MOVES), "ag": pytest.approx(5 * (MOVES - MULTIPLIES))}


def test_a_collective_in_flight_around_a_loop_progresses_during_all_iterations():
    """A gather started before the loop and done after it: the kernels wait for what five iterations did not cover."""
    begun = SCHEDULE.replace("bf16[2048,256] all-gather(%a)", "(bf16[256,256], bf16[2048,256]) all-gather-start(%a)")
    awaited = "  %got.1 = bf16[2048,256] all-gather-done(%first)\n  ROOT %z"
    alone = begun.replace("%zero, %a, %first", "%zero, %a, %a").replace("  ROOT %z", awaited)
    still = "\n".join(line for line in alone.split("\n") if "%ag" not in line).replace("%i, %y, %got", "%i, %y, %y")
    simulated = simulate(still, H200)
    assert simulate(still, dataclasses.replace(H200, slowdown=0.5)).waits == simulated.waits  # slowed once, not 5 times
    (waiting,) = (span for span in simulated.spans if span.kind == "waiting")
    assert waiting.end - waiting.begin == pytest.approx(MOVES - 5 * MULTIPLIES)
    (gather,) = (span for span in simulated.spans if span.lane == "gather")
    assert (gather.begin, gather.end, gather.done) == (0, pytest.approx(waiting.end), pytest.approx(waiting.end))


@pytest.mark.parametrize("speed", [1, 1000])
def test_a_collective_slows_the_products_that_run_meanwhile(speed):
    """A product inside of a longer gather takes half as long again. A shorter gather costs a product a third of it."""
    fast = dataclasses.replace(H200, slowdown=0.5, link=speed * H200.link)
    moves, module = MOVES / speed, read(SCHEDULE)
    found = Expected.of(module, overlap(module), fast)
    slowed = 5 * (MULTIPLIES / 2 if speed == 1 else moves / 3)
    left = 5 * (moves - 1.5 * MULTIPLIES) if speed == 1 else 0
    assert found.slowed == pytest.approx(slowed)
    assert found.waits == pytest.approx(moves + left)
    assert found.exposed == pytest.approx(moves + left + slowed)
    assert (
        found.seconds == found.roofline.kernels + found.exposed == pytest.approx(6 * MULTIPLIES + found.exposed, 1e-4)
    )
    assert Expected.of(module, overlap(module), H200).slowed == 0


def test_collectives_share_one_link():
    """Of two in flight at once the second runs when the first is complete, and the kernels wait for both."""
    lines = [line for said in SCHEDULE.split("\n") for line in [said, *([second(said)] if "%ag" in said else [])]]
    simulated = simulate("\n".join(lines), H200)
    gathers = [(span.begin, span.end) for span in simulated.spans if span.lane == "gather"]
    assert gathers == [pytest.approx((begin, begin + MOVES)) for begin in (0, MOVES, 2 * MOVES)]


BRANCHES = """HloModule m, is_scheduled=true, num_partitions=8

%moved (p: f32[8,64]) -> f32[1,64] {
  %p = f32[8,64] parameter(0)
  ROOT %rs = f32[1,64] reduce-scatter(%p), dimensions={0}, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%sum
}

%short (q: f32[8,64]) -> f32[8,64] {
  ROOT %q = f32[8,64] parameter(0)
}

%long (r: f32[8,64]) -> f32[8,64] {
  %r = f32[8,64] parameter(0)
  ROOT %twice = f32[8,64] add(%r, %r)
}

ENTRY %main (a: f32[8,64], i: s32[]) -> f32[8,64] {
  %a = f32[8,64] parameter(0)
  %i = s32[] parameter(1)
  %start = ((f32[8,64]), f32[1,64]) async-start(%a), calls=%moved
  %chosen = f32[8,64] conditional(%i, %a, %a), branch_computations={%short, %long}
  %done = f32[1,64] async-done(%start)
  ROOT %out = f32[8,64] call(%chosen), to_apply=%long
}
"""


def test_wrapped_collectives_calls_and_the_longer_branch_are_simulated():
    spans = simulate(BRANCHES, H200).spans
    assert [(span.lane, span.kind, span.name) for span in spans] == [
        ("reduce-scatter", "exposed", "start"),
        ("compute", "kernel", "twice"),
        ("compute", "waiting", "start"),
        ("compute", "kernel", "twice"),
    ]


def second(line):
    return line.replace("%ag", "%ag.2").replace("%got", "%got.2")


@pytest.fixture(scope="module")
def compiled():
    """A training step of a scan over four layers, at stage 3."""
    params = {"in": jnp.zeros((16, 32)), "layers": jnp.zeros((4, 32, 32))}

    def loss(params, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x @ params["in"], params["layers"])[0] ** 2)

    tx = zero_shard(optax.adam(1e-3), stage=3, mesh=mesh_of(8), tuning=Tuning(persist_below=0))
    return tx.train_step(loss).lower(tx.create(params), jnp.zeros((64, 16))).compile()


def test_every_collective_and_every_kernel_is_simulated_once(compiled):
    simulated = simulate(compiled, H200)
    moving = [span for span in simulated.spans if span.lane != "compute"]
    assert sorted(span.name for span in moving) == sorted(c.name for c in collectives(compiled))
    assert {span.kind for span in moving} == {"exposed"}  # on CPUs collectives are synchronous
    busy = [span for span in simulated.spans if span.lane == "compute"]
    assert {span.kind for span in busy} == {"forward", "backward", "kernel", "waiting"}
    assert len({(span.name, span.kind) for span in busy}) == len(busy)
    assert [span.begin for span in busy[1:]] == pytest.approx([span.end for span in busy[:-1]])
    assert simulated.loops
