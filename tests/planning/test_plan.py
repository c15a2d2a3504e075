"""The plan: figures read off a program are the program's, and absent GPUs get the user's own step."""

import dataclasses
import json
import math
import os
import pathlib
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absent_gpus import aot
from command_line import refused, run
from conftest import mesh_of, quick_or_slow
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax import DynamicScale, Offload, Precision, Tuning, check, estimate, plan, report, zero_shard
from zerojax.budget.blocks import BlockMemory
from zerojax.gpus import devices as gpu_devices
from zerojax.gpus.devices import KINDS, Device, Topology, absent_mesh_like
from zerojax.inspect.compiled_collectives import Collective, CompiledCollectives
from zerojax.inspect.hlo import HloArray, peak_bytes, read
from zerojax.inspect.roofline import HIGHEST, Roofline, kernels
from zerojax.inspect.timeline import Expected, simulate
from zerojax.planning.absent_program import pinning_note
from zerojax.planning.compiled_plan import CompiledStep, Plan, near_limit, read_plan
from zerojax.planning.plan import largest_that_fits, next_round

ROOT = pathlib.Path(__file__).parents[2]
WIDTH, DEPTH = 256, 3
MOST = 16  # peaks asked for by a search: each is a compilation


def loss(params, batch):
    for w in params["layers"]:
        batch = jnp.tanh(batch @ w)
    return jnp.mean(batch.astype(jnp.float32) ** 2 + params["bias"])


def shapes(width=WIDTH):
    layers = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * DEPTH
    return {"layers": layers, "bias": jax.ShapeDtypeStruct((width,), jnp.float32)}


def rows(count, width=WIDTH):
    return jax.ShapeDtypeStruct((count, width), jnp.float32)


def made(mesh, **options):
    tx = zero_shard(optax.adam(1e-3), mesh=mesh, **options)
    return tx.train_step(loss), tx.create(shapes())


# What is read off a program


def counted(text):
    return {kernel.name: kernel for kernel in kernels(read(text))}


HLO = """HloModule m, is_scheduled=true

%fused (p0: f32[24,8,16], p1: s32[], p2: f32[24,4]) -> (f32[8,16], f32[24,4]) {
  %p0 = f32[24,8,16]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = f32[24,4]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %row = f32[1,4]{1,0} constant({...})
  %whole = f32[24,8,16]{2,1,0} bitcast(%p0)
  %one = f32[1,8,16]{2,1,0} dynamic-slice(%whole, %p1, %zero, %zero), dynamic_slice_sizes={1,8,16}
  %flat = f32[8,16]{1,0} bitcast(%one)
  %put = f32[24,4]{1,0} dynamic-update-slice(%p2, %row, %p1, %zero)
  ROOT %both = (f32[8,16]{1,0}, f32[24,4]{1,0}) tuple(%flat, %put)
}

ENTRY %main (a: f32[24,8,16], b: f32[16,32], c: f32[24,4], i: s32[], x: bf16[2,10,10,3], k: bf16[5,5,3,7]) -> f32[8,32] {
  %a = f32[24,8,16]{2,1,0} parameter(0)
  %b = f32[16,32]{1,0} parameter(1)
  %c = f32[24,4]{1,0} parameter(2)
  %i = s32[] parameter(3)
  %x = bf16[2,10,10,3]{3,2,1,0} parameter(4)
  %k = bf16[5,5,3,7]{3,2,1,0} parameter(5)
  %slice = (f32[8,16]{1,0}, f32[24,4]{1,0}) fusion(%a, %i, %c), kind=kLoop, calls=%fused
  %got = f32[8,16]{1,0} get-tuple-element(%slice), index=0
  %exact = f32[8,32]{1,0} dot(%got, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, operand_precision={highest,highest}
  %library = (f32[8,32]{1,0}, s8[1024]{0}) custom-call(%got, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %seen = (bf16[2,10,10,7]{3,2,1,0}, u8[0]{0}) custom-call(%x, %k), window={size=5x5 pad=2_2x2_2}, dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convForward"
  %strange = f32[8,32]{1,0} custom-call(%exact), custom_call_target="mine"
  ROOT %sum = f32[8,32]{1,0} add(%exact, %strange)
}
"""  # noqa: E501


def test_products_in_every_form_are_counted_and_of_a_slice_only_what_is_sliced():
    found = counted(HLO)
    product = 2 * 8 * 16 * 32
    assert found["exact"].operations == {HIGHEST: product}
    assert found["library"].operations == {"f32": product}
    assert found["seen"].operations == {"bf16": 2 * (2 * 10 * 10 * 7) * (5 * 5 * 3)}
    assert found["slice"].operations == found["sum"].operations == {}
    assert {name for name, kernel in found.items() if kernel.unknown} == {"strange"}

    assert found["slice"].traffic == 2 * 8 * 16 * 4 + 4 * 4 + 4  # slice in and out, row out, index in
    assert found["exact"].traffic == 4 * (8 * 16 + 16 * 32 + 8 * 32)


ASYNC = """HloModule m, is_scheduled=true

%put (p0: f32[256,16], p1: f32[8,16], p2: s32[]) -> f32[256,16] {
  %p0 = f32[256,16]{1,0} parameter(0)
  %p1 = f32[8,16]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  ROOT %dus = f32[256,16]{1,0} dynamic-update-slice(%p0, %p1, %p2, %p2)
}

ENTRY %main (a: f32[256,16], b: f32[8,16], i: s32[]) -> (f32[256,16], f32[8,16]) {
  %a = f32[256,16]{1,0} parameter(0)
  %b = f32[8,16]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %begun = ((f32[256,16]{1,0}, f32[8,16]{1,0}, s32[]), f32[256,16]{1,0}, u32[]) fusion-start(%a, %b, %i), kind=kLoop, calls=%put
  %copied = (f32[8,16]{1,0}, f32[8,16]{1,0}, u32[]) copy-start(%b)
  %ended = f32[256,16]{1,0} fusion-done(%begun)
  %copy = f32[8,16]{1,0} copy-done(%copied)
  ROOT %both = (f32[256,16]{1,0}, f32[8,16]{1,0}) tuple(%ended, %copy)
}
"""  # noqa: E501


def test_asynchronous_kernels_count_once():
    chunk = 8 * 16 * 4
    assert {name: kernel.traffic for name, kernel in counted(ASYNC).items()} == {
        "begun": 2 * chunk + 4,  # chunk in and out, index in
        "copied": 2 * chunk + 4,  # and the context
    }


@aot
def test_of_the_gradient_of_a_lookup_only_the_rows_are_added():
    table, ids = jax.ShapeDtypeStruct((50_000, 256), jnp.float32), jax.ShapeDtypeStruct((128,), jnp.int32)
    found = plan(jax.jit(jax.grad(lambda w, ids: (w[ids] ** 2).sum())), table, ids, topology="h200:1")
    zeros, row = 50_000 * 256 * 4, 256 * 4
    assert found.roofline.traffic == zeros + 128 * (3 * row + 4)  # looked up, read and written; the index


def looped(x, w):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=7)[0]


def branching(x, w):
    return jax.lax.cond(x.sum() > 0, lambda: jnp.tanh(x @ w) @ w, lambda: x @ w)


def waiting(x, w):
    return jax.lax.while_loop(lambda x: x.sum() < 4, lambda x: jnp.tanh(x @ w), x)


@pytest.mark.parametrize(
    ("f", "topology", "products", "notes"),
    [
        (looped, "h200:1", 7, []),
        (branching, "h200:1", 3, ["every branch"]),
        (waiting, "h200:1", 1, ["counted as one iteration"]),
        (looped, "h200:7", 7, []),
        (looped, "h200:12", 7, ["12 devices count as one host.*give .* h200:2x6"]),
        (looped, "h200:2x6", 7, []),
    ],
)
def test_what_the_program_does_not_fix_is_noted_and_hosts_of_more_than_eight(f, topology, products, notes):
    """On one device, where no collective says so."""
    compiled = jax.jit(f).lower(jnp.zeros((8, 64)), jnp.zeros((64, 64))).compile()
    found = read_plan(CompiledStep(compiled), topology, batch=8)
    assert sum(found.roofline.operations.values()) == products * 2 * 8 * 64 * 64
    assert all(re.search(note, said) for note, said in zip(notes, found.notes, strict=True))


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", quick_or_slow([(s,) for s in range(4)], [(0,), (3,)]))
def test_parts_are_the_bytes_of_a_device_and_add_up(stage, mesh):
    tx = zero_shard(
        optax.adam(1e-3), stage=stage, mesh=mesh, precision=Precision.bf16(), tuning=Tuning(persist_below=0)
    )
    state = tx.create(jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes()))
    compiled = tx.train_step(loss).lower(state, rows(16)).compile()
    row = estimate(shapes(), tx=optax.adam(1e-3), stages=[stage])[stage]
    found = read_plan(CompiledStep(compiled, estimate=row), "h200:8", batch=16)
    held = report(state).bytes
    assert found.memory["parameters"] == held["params"]
    moments = found.memory["optimizer state"] + found.memory.get("master weights", 0)
    assert moments == held["opt_state"] + held.get("master", 0)
    assert found.memory["batch"] == 16 * WIDTH * 4 // 8
    assert found.peak == sum(found.memory.values()) == peak_bytes(compiled)


def test_arguments_may_be_called_like_parts():
    f = jax.jit(lambda temporary, results: results @ temporary)
    compiled = f.lower(jnp.ones((64, 64)), jnp.ones((8, 64))).compile()
    found = read_plan(CompiledStep(compiled), "h200:1", batch=8)
    assert found.memory["temporary"] >= 64 * 64 * 4
    assert found.peak == peak_bytes(compiled)


FITS = "fits: 25 GB of 81 GB per GPU; 75% of the communication is hidden; 310 ms or more per step"
LARGE, COPIED = {"temporary": 98 * 10**9, "parameters": 5 * 10**9}, {"host": 10**10, "update": 1.0}
BLOCK = BlockMemory("model.py:3", 24, 10**9, 0, 0, 0, 0.0)
VERDICTS = {
    "fits": ({}, FITS),
    "copies": (
        COPIED,
        "fits: 25 GB of 81 GB per GPU and 80 GB of memory per host; 75% of the communication is hidden; 1.31 s or more "
        "per step, most of it for copies to and from host memory",
    ),
    "activations": (
        {"memory": LARGE},
        'does not fit: 103 GB of 81 GB per GPU. Use zerojax.block around each layer and train_step(memory="auto") or '
        "accumulate= or more GPUs",
    ),
    "blocks": (
        {"memory": LARGE, "blocks": (BLOCK,), "stage": 2},
        'does not fit: 103 GB of 81 GB per GPU. Use train_step(memory="auto") or accumulate= or stage 3 or more GPUs',
    ),
    "nothing to save": (
        {"memory": LARGE, "blocks": (dataclasses.replace(BLOCK, share=1.0),)},
        "does not fit: 103 GB of 81 GB per GPU. Use accumulate= or more GPUs",
    ),
    "state": (
        {"memory": {"optimizer state": 103 * 10**9}},
        'does not fit: 103 GB of 81 GB per GPU. Use Offload(optimizer="host") or more GPUs',
    ),
    "activations, and a state that is too large": (
        {"memory": {"optimizer state": 82 * 10**9, "temporary": 98 * 10**9}},
        'does not fit: 180 GB of 81 GB per GPU. Use Offload(optimizer="host") or more GPUs',
    ),
    "function": (
        {"memory": LARGE, "stage": None},
        "does not fit: 103 GB of 81 GB per GPU. Use jax.checkpoint or fewer rows or more GPUs",
    ),
}
PRINTED = f"""{FITS}
h200:2x8: 16 GPUs, 64 rows
memory, per GPU
  parameters                      5 GB
  temporary                      20 GB
  peak                           25 GB  of 81 GB usable
per step
  sent by a GPU                  19 GB
  time, at least                310 ms
  time, expected                400 ms"""


@pytest.mark.parametrize("case", VERDICTS)
def test_a_plan_begins_with_what_a_user_asks(case):
    array = HloArray("u8", (5 * 10**9,))
    moved = [
        Collective("all-gather", (array,), range(20), 1, 1, False, "", "", "", (), products=n) for n in (1, 1, 1, 0)
    ]
    roofline = Roofline({}, 0, 0.2, 0.1, 0.3, 0.02, 0.01)
    figures = {
        "topology": "h200:2x8",
        "devices": 16,
        "stage": 3,
        "batch": 64,
        "capacity": 85 * 10**9,
        "usable": 81 * 10**9,
        "memory": {"parameters": 5 * 10**9, "temporary": 20 * 10**9},
        "collectives": CompiledCollectives(moved),
        "roofline": roofline,
        "expected": Expected(dataclasses.replace(roofline, kernels=0.38), waits=0.01, slowed=0.01),
    }
    changed, verdict = VERDICTS[case]
    found = Plan(**figures | changed)
    assert (found.verdict, str(found).partition("\n")[0]) == (verdict, verdict)
    assert found.details.startswith(f"{verdict}\n")
    assert case != "fits" or str(found) == PRINTED


# The figures of GPUs


@pytest.mark.parametrize(
    ("kind", "bf16", "tf32", "float32", "memory", "bandwidth"),
    [  # the data sheets: dense, in TFLOP/s, GB and TB/s
        ("a100-80", 312, 156, 19.5, 80, 2.039),
        ("h100", 989, 494.5, 67, 80, 3.35),
        ("h200", 989, 494.5, 67, 141, 4.8),
        ("b200", 2250, 1125, 75, 180, 8),
    ],
)
def test_figures_are_those_of_the_data_sheets(kind, bf16, tf32, float32, memory, bandwidth):
    device = Device.of(Topology.parse(f"{kind}:8"))
    assert device.rate("bf16") == device.rate("f16") == pytest.approx(bf16 * 1e12, rel=0.01)
    assert device.rate("f32") == pytest.approx(tf32 * 1e12, rel=0.01)
    assert device.rate(HIGHEST) == pytest.approx(float32 * 1e12, rel=0.01)
    assert device.bandwidth == pytest.approx(bandwidth * 1e12, rel=0.01)
    assert device.memory == pytest.approx(memory * 1e9, rel=0.08)  # sheets mix GB and GiB


def test_a_ring_over_hosts_uses_all_their_adapters():
    one, eight = (Device.of(Topology.parse(text)) for text in ("h100:8", "h100:64"))
    assert one.ring_bandwidth(range(8)) == eight.ring_bandwidth(range(8)) == 450e9
    assert eight.ring_bandwidth(range(64)) == 8 * 50e9
    assert eight.ring_bandwidth(range(0, 64, 8)) == 50e9  # the same GPU of every host
    assert Device.of(Topology.parse("h100:8x1")).ring_bandwidth(range(8)) == 50e9
    assert dataclasses.replace(eight, link=1e9, network=1e9).ring_bandwidth(range(64)) == 1e9


def test_topologies_are_parsed_and_no_host_is_without_gpus():
    assert Topology.parse("h100:4x8") == Topology("h100", 4, 8)
    assert Topology.parse("h200:64") == Topology("h200", 8, 8)
    assert Topology.parse("h200:12") == Topology("h200", 1, 12)
    for text in ("h200:0", "h200:00", "h200:8x0", "h200:0x8", "h200:", "h200:8x", "h200:-8", "H200:8"):
        with pytest.raises(ValueError, match="Unknown topology"):
            Topology.parse(text)


# The search


@pytest.mark.parametrize("start", [1, 2, 33, 1000])
@pytest.mark.parametrize("usable", [0, 99, 100, 131, 5000, 10**6, 10**9 + 1])
@pytest.mark.parametrize(
    "peak",
    [lambda n: 100 + n, lambda n: 90 + 10 * n**1.5, lambda n: 100 + n // 64 * 64, lambda n: max(200, 3 * n)],
    ids=["straight", "bent", "steps", "flat"],
)
def test_the_largest_fits_and_the_next_does_not(peak, usable, start):
    asked = []

    def counting(n):
        asked.append(n)
        return peak(n)

    found = largest_that_fits(counting, usable, start=start)
    assert found == 0 or peak(found) <= usable
    assert peak(next_round(found)) > usable
    assert len(asked) == len(set(asked)) <= MOST


def test_round_counts_have_five_binary_digits():
    some = [0]
    while some[-1] < 200:
        some.append(next_round(some[-1]))
    assert some == [*range(33), *range(34, 65, 2), *range(68, 129, 4), *range(136, 201, 8)]
    assert next_round(33) == 34


# Absent GPUs


@aot
@pytest.mark.parametrize("kind", KINDS)
def test_every_gpu_can_be_compiled_for(kind):
    found = plan(jax.jit(loss), shapes(), rows(64), topology=f"{kind}:1")
    assert found.roofline.operations == {"f32": DEPTH * 2 * 64 * WIDTH**2}
    assert set(found.memory) == {"params", "batch", "temporary", "results"}
    assert found.sent == 0
    assert found.fits
    assert found.notes == ()
    assert not dataclasses.replace(found, usable=found.peak - 1).fits


@aot
@pytest.mark.parametrize(("stage", "accumulate"), quick_or_slow([(0, 1), (1, 2), (2, 2), (3, 1)], [(1, 2), (3, 1)]))
def test_a_step_is_what_the_formulas_say(stage, accumulate):
    """A state on two simulated devices is planned for sixteen absent ones."""
    deep = {"layers": [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * DEPTH}
    tx = zero_shard(
        optax.adam(1e-3), stage=stage, mesh=mesh_of(2), precision=Precision.bf16(), tuning=Tuning(prefetch=0)
    )

    def blocks(params, batch):
        for w in params["layers"]:
            batch = jax.checkpoint(lambda x, w: jnp.tanh(x @ w) @ w.T)(batch, w)
        return jnp.mean(batch.astype(jnp.float32) ** 2)

    step = tx.train_step(blocks, accumulate=accumulate)
    found = plan(step, tx.create(deep), rows(64), topology="h100:16")
    row = estimate(deep, stages=[stage], devices=16, precision=Precision.bf16(), accumulate=accumulate)[stage]
    assert found.devices == 16
    (described,) = found.blocks
    # A layer saves nothing. Its backward pass reads tanh, its derivative and the transposed weight, in bfloat16.
    elements = 64 // accumulate * WIDTH
    assert (described.calls, described.saved, described.recomputed) == (DEPTH, 0, (4 * elements + 2 * WIDTH**2) // 16)
    assert f"{DEPTH} x test_plan.py:" in found.details
    assert found.memory["parameters"] == row.params
    assert found.memory["optimizer state"] + found.memory.get("master weights", 0) == row.opt_state + row.master
    assert found.sent_formula == row.sent
    assert found.exposed == pytest.approx((1 - found.hidden) * found.sent, rel=0.02)
    if stage < 3:  # stage 3 gathers a layer once where it is used last and first
        assert found.sent == pytest.approx(row.sent, rel=0.02)
    assert found.roofline.communication == pytest.approx(found.sent / (8 * 50e9), rel=0.02)


@aot
def test_a_fused_collective_is_no_kernel(mesh):
    """XLA:GPU makes a small all-reduce a fusion with a start and a done."""
    w = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    x = jax.ShapeDtypeStruct((64, WIDTH), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    found = plan(jax.jit(jax.grad(lambda w, x: jnp.tanh(x @ w).sum())), w, x, topology="h200:8")
    assert re.search(r"fusion-start\(.*fused_all-reduce", found.text)
    assert not [name for name in counted(found.text) if name.startswith("fusion")]
    simulated = simulate(found.text, Device.of(Topology.parse("h200:8")))
    assert [span.lane for span in simulated.spans if span.kind in ("hidden", "exposed")] == ["other"]
    assert simulated.seconds == pytest.approx(found.seconds)
    assert sum(found.waits.values()) == pytest.approx(simulated.seconds - found.roofline.kernels, rel=1e-3)
    assert f"{found.waiting:.1%}: " in found.details


@aot
def test_a_step_keeps_its_parts_on_absent_gpus():
    def noisy(params, mutable, batch, key):
        noise = jax.random.normal(key, batch.shape)
        return loss(params, batch + noise), {"mean": mutable["mean"] * 0.9 + batch.mean(0)}

    tx = zero_shard(
        optax.adam(1e-3),
        stage=2,
        mesh=mesh_of(3),  # which does not divide the parameters: they are padded there, and not on absent GPUs
        precision=Precision(compute=jnp.bfloat16, loss_scale=DynamicScale()),
        trainable=lambda path, leaf: "bias" not in path,
        tuning=Tuning(persist_below=0),
    )
    arrays = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes())
    state = tx.create(arrays, mutable={"mean": jnp.zeros((WIDTH,))})
    step = tx.train_step(noisy, mutable=True)
    found = plan(step, state, np.zeros((16, WIDTH), np.float32), jax.random.key(0), topology="h200:8")
    assert found.memory["master weights"] == DEPTH * WIDTH**2 * 4 // 8
    assert found.memory["optimizer state"] == 2 * DEPTH * WIDTH**2 * 4 // 8 + 4
    assert found.memory["other state"] >= WIDTH * 4
    assert not state.step.is_deleted()
    assert json.loads(json.dumps(found.to_dict()))["peak"] == found.peak
    assert "master weights" in str(found)


@aot
@pytest.mark.filterwarnings("error")
def test_types_are_those_that_jit_gives(mesh):
    """NumPy's own are of 64 bits; a static argument may be a type."""
    f = jax.jit(lambda state, batch, dtype: (batch @ state["bias"]).astype(dtype), static_argnums=2)
    found = plan(f, {"bias": np.zeros(WIDTH)}, np.zeros((8, WIDTH)), jnp.bfloat16, topology="h200:1")
    assert found.memory["batch"] == 8 * WIDTH * 4
    step, state = made(mesh, stage=2)
    assert plan(step, state, np.zeros((8, WIDTH))).memory["batch"] == WIDTH * 4


@aot
def test_a_jitted_function_keeps_its_shardings():
    mesh = mesh_of(2, 4, names=("rows", "model"))
    w = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(None, "model")))
    x = jax.ShapeDtypeStruct((64, WIDTH), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("rows")))
    f = jax.jit(lambda w, x: jax.grad(lambda w: jnp.tanh(x @ w).sum())(w), donate_argnums=0)
    named = jax.jit(f, in_shardings=(w.sharding, x.sharding))
    found = plan(f, w, x, topology="h200:2x4")
    assert found.memory["w"] == WIDTH * WIDTH * 4 // 4
    assert found.memory["x"] == 64 * WIDTH * 4 // 2
    assert found.sent_formula is None
    assert {c.group_size for c in found.collectives} == {2}
    with pytest.raises(ValueError, match="names a mesh in in_shardings= or out_shardings=, leave them out"):
        plan(named, w, x, topology="h200:2x4")
    for arguments in ((w, x), (shapes()["bias"], rows(64))):
        with pytest.raises(ValueError, match=r"'h200:16' has 16 devices. Give .*NamedShardings on a mesh of 16"):
            plan(f, *arguments, topology="h200:16")


@pytest.mark.parametrize(
    ("names", "sizes", "axes", "resized"),
    [
        (("data",), (2,), ("data",), (8,)),
        (("rows", "model"), (1, 4), ("rows",), (2, 4)),
        (("host", "gpu"), (4, 2), ("host", "gpu"), (2, 4)),
        (("host", "gpu", "model"), (1, 4, 2), ("host", "gpu"), (2, 2, 2)),
    ],
)
def test_data_axes_are_resized_to_hosts_and_gpus(names, sizes, axes, resized, monkeypatch):
    given = Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), names)
    monkeypatch.setattr(gpu_devices, "absent_mesh", lambda text: mesh_of(8))
    assert tuple(absent_mesh_like(given, "h100:2x4", axes=axes).shape.values()) == resized


@aot
def test_a_batch_over_two_axes_is_planned_and_checked():
    tx = zero_shard(optax.adam(1e-3), stage=3, mesh=mesh_of(2, 4), axis=("host", "gpu"), tuning=Tuning(persist_below=0))
    found = plan(tx.train_step(loss), tx.create(shapes()), rows(64), topology="h100:2x8")
    row = estimate(shapes(), devices=16, stages=(3,), tuning=Tuning(persist_below=0))[3]
    assert (found.devices, found.memory["parameters"], found.sent_formula) == (16, row.params, row.sent)
    checked = check(tx.train_step(loss), tx.create(shapes()), rows(64), topology="h100:2x8")
    assert (checked.devices, checked.reduced_formula) == (16, DEPTH * WIDTH**2 + WIDTH)


@aot
@pytest.mark.slow
def test_the_largest_batch_fits_and_the_next_does_not(mesh):
    step, state = made(mesh, stage=2)
    usable = 6 * 2**20
    found = plan(step, state, rows(64), memory=usable, largest_batch=True)
    peaks = [
        plan(step, state, rows(8 * n)).peak for n in (found.largest_batch // 8, next_round(found.largest_batch // 8))
    ]
    assert peaks[0] <= usable < peaks[1]
    assert plan(step, state, rows(8), memory=10**5, largest_batch=True).largest_batch == 0


@aot
def test_offloaded_state_is_noted(mesh, tmp_path):
    for offload in (Offload(optimizer="host"), Offload(optimizer="disk", path=tmp_path / "state")):
        found = plan(*made(mesh, stage=3, offload=offload), rows(64))
        offloaded = {"host": found.host, "disk": found.disk}
        assert offloaded.pop(offload.optimizer) == 2 * DEPTH * WIDTH**2 * 4 // 8
        assert sum(offloaded.values()) == 0
        assert any("does not see memory kinds" in note for note in found.notes)
        assert found.update == pytest.approx((found.host + found.disk) / 50e9)
        assert found.seconds == found.roofline.seconds + found.update
        assert any("Offload(update=" in note for note in found.notes) == (offload.optimizer == "host")
    assert not (tmp_path / "state").exists()


@aot
@pytest.mark.slow
def test_offloaded_state_that_stays_on_the_device_is_planned(mesh, tmp_path):
    state = 2 * DEPTH * WIDTH**2 * 4 // 8
    offloads = [
        Offload(optimizer="host", update="device", device_bytes=room) for room in (None, state // DEPTH, state)
    ]  # one layer, and all
    found = [plan(*made(mesh, stage=3, offload=offload), rows(64)) for offload in offloads]
    assert [x.host for x in found] == [state, state - state // DEPTH, 0]
    assert [x.peak - found[0].peak for x in found] == [0, state // DEPTH, state]
    assert found[0].update > found[1].update > found[2].update > 0
    assert [any("fits on the device" in note for note in x.notes) for x in found] == [True, True, False]
    assert "offloaded state kept" in str(found[1])
    on_disk = Offload(optimizer="disk", path=tmp_path / "state")
    slow = plan(*made(mesh, stage=3, offload=on_disk), rows(64), rates={"disk": 1e6})
    assert slow.update == 2 * slow.disk / 1e6


# What is wrong


def test_what_cannot_be_planned_says_why(mesh, monkeypatch):
    step, state = made(mesh, stage=3)
    with pytest.raises(ValueError, match=r"Unknown topology 'v100:8'.*a100-80, b200, h100, h200"):
        plan(step, state, rows(64), topology="v100:8")
    with pytest.raises(TypeError, match="needs its ZeroState, not dict"):
        plan(step, shapes(), rows(64))
    with pytest.raises(TypeError, match=r"not function. Give jax.jit"):
        plan(loss, shapes(), rows(64))
    with pytest.raises(ValueError, match="disk must be a number above 0, per second, not 0"):
        plan(step, state, rows(64), rates={"disk": 0})
    with pytest.raises(TypeError, match="'dsk'"):
        plan(step, state, rows(64), dsk=1)
    on_disk = Offload(params="disk", optimizer="disk", path="anywhere")
    for tool in (plan, check):
        with pytest.raises(NotImplementedError, match=r"many programs.*zerojax\.estimate.*run a step"):
            tool(*made(mesh, stage=3, offload=on_disk), rows(64))
    other = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("x",)), PartitionSpec())
    mixed = jax.ShapeDtypeStruct((8, WIDTH), jnp.float32, sharding=other)
    with pytest.raises(ValueError, match="meshes of different axes"):
        plan(jax.jit(loss), state.params, mixed)
    monkeypatch.setattr(gpu_devices, "installed", lambda: False)
    with pytest.raises(ModuleNotFoundError, match=r"zerojax\[aot\]"):
        plan(step, state, rows(64))
    with pytest.raises(ValueError, match="this plan is for h200"):  # before anything is compiled
        plan(step, state, rows(64), rates={"device": "NVIDIA A100"})


@aot
def test_the_batch_must_divide(mesh):
    step, state = made(mesh, stage=3)
    with pytest.raises(ValueError, match=r"12 rows, and the axis has 8 devices"):
        plan(step, state, rows(12))
    f = jax.jit(lambda state, batch: batch[0].sum() + batch[1].sum())
    with pytest.raises(ValueError, match="different numbers of rows"):
        plan(f, shapes(), [rows(8), rows(16)], largest_batch=True)


# The command


FILE = """
import sys
import jax, jax.numpy as jnp, optax
from zerojax import zero_shard

ROWS = int(sys.argv[1]) if len(sys.argv) > 1 else 64

def loss(params, batch):
    print("tracing it")
    from mates import TWO
    return jnp.mean((batch @ params) ** TWO)

def make_step():
    print("making it")
    tx = zero_shard(optax.adam(1e-3), stage=2)
    state = tx.create(jax.ShapeDtypeStruct((128, 128), jnp.float32))
    return tx.train_step(loss), state, jax.ShapeDtypeStruct((ROWS, 128), jnp.float32)

def crossed():
    step, state, _ = make_step()
    return step, state, jax.ShapeDtypeStruct((ROWS, 100), jnp.float32)

def nothing():
    return None

def failing():
    raise KeyError("absent")

def ragged():
    step, state, batch = make_step()
    return step, state, {"x": batch, "scale": jax.ShapeDtypeStruct((), jnp.float32)}
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "mates.py").write_text("TWO = 2\n")
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


@aot
def test_a_file_is_planned_with_options_of_its_own(file):
    before = sys.argv
    outcome = run("plan", file, "--topology", "h100:4", "--json", "--", "32")
    assert outcome.exit_code == 0, outcome.output
    found = json.loads(outcome.stdout)
    assert (found["devices"], found["batch"], found["fits"]) == (4, 32, True)
    assert sys.argv is before
    outcome = run("plan", f"{file}:make_step", "--batch", "16")
    assert outcome.exit_code == 0, outcome.output
    assert outcome.stdout.startswith("fits: ")
    assert "\nh200:8: 8 GPUs, 16 rows\n" in outcome.stdout
    assert "achievable" not in outcome.stdout
    assert "achievable" in run("plan", file, "--batch", "24", "--verbose").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{file}", "--topology", "tpu:4"), "the GPUs known are a100-80, b200, h100, h200"),
        (("{file}:nothing",), "returns NoneType, not (step, state, batch, *args)"),
        (("{file}:failing",), "failing of {file} fails: KeyError: 'absent'"),
        (("{file}:ragged", "--batch", "8"), "have different numbers of rows on dim 0, or none"),
        (("{file}", "--", "many"), "cannot be run: ValueError"),
        (("{file}", "--batch", "-8"), "at least 1 row"),
        pytest.param(("{file}:crossed",), "cannot be planned: TypeError: dot_general", marks=aot),
        pytest.param(("{file}", "--batch", "12"), "12 rows, and the axis has 8 devices", marks=aot),
    ],
)
def test_what_is_wrong_is_one_line(arguments, message, file):
    said = refused("plan", *(x.replace("{file}", str(file)) for x in arguments))
    assert message.replace("{file}", str(file)) in said


def test_the_note_about_the_schedulers_limit_reads_the_option_that_raises_it():
    held = {"argument_size_in_bytes": 20e9, "output_size_in_bytes": 0, "alias_size_in_bytes": 0}
    analysis, device = SimpleNamespace(**held, temp_size_in_bytes=100e9), SimpleNamespace(memory=150e9)
    (note,) = near_limit(analysis, device)
    assert "The limit of XLA's scheduler is 95 GB" in note
    assert not list(near_limit(analysis, device, {"xla_gpu_memory_limit_slop_factor": 125}))


def test_twice_the_host_memory_that_is_needed_may_be_pinned():
    (note,) = pinning_note(17_730_000_000)
    assert note.startswith("A host pins up to 35.5 GB for 17.7 GB")
    assert "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=20 before JAX starts" in note
    assert pinning_note(0) == ()


ABSENT = """
import sys, jax
if sys.argv[1:]:
    jax.config.update("jax_platforms", "cpu")
from zerojax.gpus.devices import absent_mesh
print(absent_mesh("h100:8").size)
"""


@pytest.mark.slow
def test_the_error_without_a_gpu_names_what_works():
    pytest.importorskip("jax_plugins.xla_cuda13")
    environment = {name: x for name, x in os.environ.items() if name != "JAX_PLATFORMS"}
    if jax.devices()[0].platform == "gpu":
        pytest.skip("this machine has a GPU")
    run = lambda *args, **more: subprocess.run(
        [sys.executable, "-c", ABSENT, *args], env=environment | more, capture_output=True, text=True, check=False
    )
    assert "RuntimeError: JAX cannot describe GPUs that are absent" in run().stderr
    assert run("config").stdout == run(JAX_PLATFORMS="cpu").stdout == "8\n"
