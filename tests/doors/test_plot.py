"""Pictures draw the numbers they are made of."""

import dataclasses
import io
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from command_line import run
from conftest import mesh_of
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from models import awkward_params

from zerojax import Offload, collectives, estimate, plot, zero_shard
from zerojax.gpus.devices import Device, Links
from zerojax.gpus.topology import Topology
from zerojax.inspect.expected import Expected
from zerojax.inspect.hlo import read
from zerojax.inspect.overlap import Overlap, overlap
from zerojax.inspect.roofline import Roofline
from zerojax.inspect.timeline import Span, merge_short, simulate
from zerojax.planning.compiled_plan import Plan

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
MOVES = 7 / 8 * 2048 * 256 * 2 / H200.links.link
MULTIPLIES = max(2 * 256**3 / H200.rates["bf16"], 3 * 256 * 256 * 2 / H200.bandwidth)


def png(figure):
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def test_memory_is_stacked_by_part():
    found = estimate(7.5e9, devices=(64, 8), offload=Offload(optimizer="host"))
    figure = plot.memory(found)
    (axes,) = figure.axes
    bars = zip(*axes.containers, strict=True)
    ends = [max(bar.get_x() + bar.get_width() for bar in stage) for stage in bars]
    for i, row in enumerate(found.rows[:4]):
        assert ends[i] == pytest.approx((row.total + row.host) / 1e9)
    assert [text.get_text() for text in axes.texts] == ["120 GB", "30 GB", "15.2 GB", "469 MB"]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["parameters", "gradients", "master weights", "optimizer state", "in host memory"]
    assert axes.get_xlabel() == "GB per device"
    assert png(figure).startswith(b"\x89PNG")


def test_units_suit_the_sizes():
    (axes,) = plot.memory(estimate(1e6, stages=(0,)), capacity=24e6).axes
    assert axes.get_xlabel() == "MB per device"
    assert max(bar.get_x() + bar.get_width() for bar in axes.patches) == pytest.approx(16)
    assert axes.lines[0].get_xdata() == [24, 24]
    assert axes.get_legend().get_texts()[0].get_text() == "a device's 24 MB"


def test_shards_are_those_of_the_arrays(mesh):
    params = {"sharded": jnp.zeros((16, 24)), "replicated": jnp.zeros(())}
    stored = zero_shard(optax.sgd(1.0), stage=3, mesh=mesh, persist_below=50).shard(params)
    leaves = {name: plot.LeafShards.of((jax.tree_util.DictKey(name),), x) for name, x in stored.items()}
    assert leaves["sharded"].name == "sharded"
    assert leaves["sharded"].shards == [(i, i / 8, (i + 1) / 8) for i in range(8)]
    assert not leaves["sharded"].is_replicated
    assert leaves["replicated"].is_replicated


def test_a_leaf_on_some_devices_is_not_replicated_on_all():
    first, second, *_ = jax.devices()
    texts = lambda state: [text.get_text() for text in plot.shards(state).axes[0].texts]
    placed = {"a": jax.device_put(jnp.zeros(9), first), "b": jax.device_put(jnp.zeros(9), second)}
    assert texts(placed) == [f"on device {first.id}", f"on device {second.id}"]
    assert texts({"a": placed["a"]}) == ["replicated"]


@pytest.mark.parametrize("spec", [("data", "model"), ("data",)])
def test_no_device_is_drawn_over_another(spec):
    both = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
    leaf = jax.device_put(jnp.zeros((8, 8)), NamedSharding(both, PartitionSpec(*spec)))
    (axes,) = plot.shards({"leaf": leaf}).axes
    bars = [bar.get_bbox() for bar in axes.patches if bar.get_width() == 0.25]
    assert len(bars) == 8
    assert sum(bar.width * bar.height for bar in bars) == pytest.approx(0.7)
    assert len({(bar.x0, round(bar.y0, 6)) for bar in bars}) == 8


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("state", [{}, jnp.ones(())], ids=["empty", "scalar"])
def test_nothing_to_draw_is_an_empty_picture(state):
    assert png(plot.shards(state)).startswith(b"\x89PNG")


@pytest.mark.slow
def test_shards_of_an_offloaded_state(mesh):
    offload = Offload(optimizer="host")
    state = zero_shard(optax.adam(1e-3), stage=3, mesh=mesh, persist_below=50, offload=offload).create(awkward_params())
    figure = plot.shards(state)
    (axes,) = figure.axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert "params['tied']" in names
    assert "opt_state[0].mu['tied']" in names
    assert names.index("params['tied']") < names.index("opt_state[0].mu['tied']")
    assert "params['scale']" not in names
    hatched = [bar for bar in axes.patches if bar.get_hatch()]
    assert len(hatched) == 8 * 2 * 4  # eight devices, two moments, four large leaves
    assert png(figure).startswith(b"\x89PNG")


def test_the_command_draws(tmp_path):
    outcome = run("estimate", "7.5e9", "--png", tmp_path / "memory.png")
    assert outcome.exit_code == 0
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    outcome = run("estimate", "7.5e9", "--png", tmp_path / "no" / "memory.png")
    assert outcome.exit_code == 2
    assert "there is no folder" in outcome.stderr


def test_a_leaf_without_elements_is_not_drawn():
    assert plot.LeafShards.of((), np.zeros(3)) is None
    assert plot.LeafShards.of((), jnp.zeros((0, 3))) is None


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
    (loop,) = simulated.loops
    assert (loop.begin, loop.end, loop.trip_count, loop.depth) == (pytest.approx(MOVES), pytest.approx(2 * MOVES), 5, 0)
    assert simulated.hidden_share == pytest.approx(5 / 6)
    waits = {collective.name: seconds for collective, seconds in simulated.waits.items()}
    assert waits == {"first": pytest.approx(MOVES), "ag": pytest.approx(5 * (MOVES - MULTIPLIES))}


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
    fast = dataclasses.replace(H200, slowdown=0.5, links=Links(speed * H200.links.link, H200.links.network))
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
    twice = Expected.total([(found, 2)])
    assert (twice.slowed, twice.seconds) == (pytest.approx(2 * slowed), pytest.approx(2 * found.seconds))
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

    tx = zero_shard(optax.adam(1e-3), stage=3, mesh=mesh_of(8), persist_below=0)
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


def test_a_timeline_is_drawn_of_a_program_a_text_or_a_plan(compiled):
    texts = []
    for given in (compiled, compiled.as_text(), types.SimpleNamespace(text=compiled.as_text(), topology="h100:8")):
        figure = plot.timeline(given)
        (axes,) = figure.axes
        lanes = [label.get_text() for label in axes.get_yticklabels()]
        assert lanes[:3] == ["compute", "gather", "reduce-scatter"]
        texts.append((figure.get_suptitle(), axes.get_xlabel().split(",")[1]))
        assert png(figure).startswith(b"\x89PNG")
    assert "0% of the collective bytes" in texts[0][0]
    assert texts[0] == texts[1]
    assert "h200:8" in texts[0][1]
    assert "h100:8" in texts[2][1]
    figure = plot.timeline(SCHEDULE)
    assert [text.get_text() for text in figure.axes[0].texts] == ["× 5 iterations"]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "gather, hidden" in legend
    assert "exposed: hidden by no product" in legend


def test_a_frontier_has_a_line_of_budgets_and_a_point_for_every_other_plan():
    def planned(gigabytes, seconds):
        figures = Roofline({}, 0, 0.0, 0.0, seconds, 0.0, 0.0)
        memory = {"temporary": int(gigabytes * 1e9)}
        return Plan("h200:8", 8, 64, memory, 141 * 10**9, 134 * 10**9, Overlap(()), figures, Expected(figures, 0, 0))

    budgets, policy, chosen = [planned(90, 1.2), planned(30, 1.5)], planned(60, 1.4), planned(50, 1.3)
    figure = plot.frontier(budgets, policies={"dots_saveable": policy}, chosen=chosen, memory=55e9)
    (axes,) = figure.axes
    drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    assert drawn["zerojax, by budget"] == ([30, 90], [1.5, 1.2])
    assert drawn["dots_saveable"] == ([60], [1.4])
    assert drawn["chosen by memory="] == ([50], [1.3])
    assert drawn["memory=55 GB"][0] == [55, 55]
    assert "GB" in axes.get_xlabel()
    assert plot.frontier(budgets).axes[0].get_ylabel().endswith(" s")
    assert plot.frontier([planned(1, 0.002)]).axes[0].lines[0].get_ydata() == pytest.approx([2])
    with pytest.raises(ValueError, match="compares plans"):
        plot.frontier([])


def test_short_spans_are_merged():
    short = [Span("compute", "kernel" if i % 3 else "forward", float(i), i + 1.0, i + 1.0, "") for i in range(1000)]
    seen = merge_short(short, 10)
    assert len(seen) == 100
    assert {bar.kind for bar in seen} == {"kernel"}
    assert [bar.begin for bar in seen] == [10.0 * i for i in range(100)]
    assert merge_short(short, 0.5) == short
    lonely = dataclasses.replace(short[0], begin=500.0, end=500.0)
    assert [bar.end for bar in merge_short([short[0], lonely], 10)] == [10, 510]


def test_a_notebook_shows_a_figure_by_itself():
    assert plot.memory(estimate(1e6))._repr_png_().startswith(b"\x89PNG")


def test_other_things_than_estimates_and_programs_of_cpus_are_named():
    tx = zero_shard(optax.sgd(0.1), stage=3, mesh=mesh_of(8), persist_below=1)
    state = tx.create({"w": jnp.ones((16, 8))})
    with pytest.raises(TypeError, match=r"not a ZeroState.*zerojax.plot.shards\(state\)"):
        plot.memory(state)
    assert plot.shards(state)  # as the message says
    step = tx.train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2))
    figure = plot.timeline(step.lower(state, jnp.ones((16, 16))).compile())
    assert "nothing overlaps, as in all programs for CPUs" in {x.get_text() for x in figure.legends[0].get_texts()}


def test_a_result_is_printed_before_matplotlib_is_missed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    plot.notebook_figure.cache_clear()
    outcome = run("estimate", "7.5e9", "--png", tmp_path / "memory.png")
    plot.notebook_figure.cache_clear()
    assert outcome.exit_code == 2
    assert "stage" in outcome.stdout
    assert "pip install 'zerojax[plot]'" in outcome.stderr
