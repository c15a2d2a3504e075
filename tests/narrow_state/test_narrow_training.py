"""Training with encoded state: the same bits on any number of devices, at any stage, in chunks and offloaded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absent_gpus import aot
from conftest import mesh_of, shape
from jax.sharding import Mesh

from zerojax import Narrow, Offload, Precision, Tuning, collectives, estimate, plan, report, zero_shard
from zerojax.inspect.hlo import read
from zerojax.inspect.roofline import kernels
from zerojax.layout.encoding import BY_BLOCK
from zerojax.optim import partition
from zerojax.streaming import block_kernel, resident_chunks

SHAPES = {"odd": (66, 65), "stack": (2, 100, 67), "even": (72, 256), "vector": (64,), "thin": (640, 8)}
# Powers of two: a product is exact, so that it does not matter whether a program rounds it before a sum.
ADAM = optax.adamw(1e-2, b1=0.5, b2=0.5)
NARROW = {
    "int8": {"state": Narrow("int8")},
    "float8": {"state": Narrow("float8", block=64)},
    "bfloat16": {"state": Narrow("bfloat16"), "precision": Precision.bf16()},
    "rounded": {"state": Narrow("int8", masters="rounded"), "precision": Precision.bf16()},
    "compensated": {"state": Narrow("int8", masters="compensated"), "precision": Precision.bf16()},
}


def loss(params, batch):
    """Have gradients that are sums of small integers, and so exact on any number of devices."""
    return sum(jnp.sum(x * batch[name].sum(0)) for name, x in params.items())


def parameters():
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}


def batch(step, bad=False):
    rng = np.random.default_rng(step)
    rows = {name: rng.integers(-2, 3, size=(24, *shape)).astype(np.float32) for name, shape in SHAPES.items()}
    return rows | {"thin": np.full_like(rows["thin"], np.nan)} if bad else rows


def transformation(devices=8, stage=3, tx=ADAM, **options):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    return zero_shard(tx, stage=stage, mesh=mesh, tuning=Tuning(persist_below=1000), **options)


def trained(tx, steps=4, **options):
    state, step = tx.create(parameters()), tx.train_step(loss, **options)
    for i in range(steps):
        state, _ = step(state, batch(i))
    return state


def bits(state):
    """The logical elements of every leaf of the optimizer's state, and the parameters' weights."""
    found = []
    for x, leaf in zip(jax.tree.leaves(state.opt_state), state.plan.state, strict=True):
        flat = np.asarray(x)[: leaf.size].reshape(leaf.shape) if leaf.kind == "flat" else np.asarray(x)
        found.append(flat[tuple(map(slice, leaf.shape))])
    return found


@functools.cache
def reference(kind, steps=4):
    """What one device stores."""
    return bits(trained(transformation(1, **NARROW[kind]), steps))


KERNEL = "name=zerojax_narrow_update"
# Parameters are products that programs may round before they subtract them, and bfloat16 may round to a neighbour.
near = functools.partial(np.testing.assert_allclose, rtol=2.0**-7, atol=1e-5)


def decoded(tx, state):
    return jax.tree.map(np.asarray, tx.unshard(state.opt_state, state.params))


def assert_same_bits(found, wanted):
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("devices", [3, 8])
@pytest.mark.parametrize("kind", ["int8", *(pytest.param(kind, marks=pytest.mark.slow) for kind in list(NARROW)[1:])])
def test_devices_store_the_bits_of_one_device(kind, devices):
    steps = 4 if kind == "int8" else 50
    state = trained(transformation(devices, **NARROW[kind]), steps)
    assert sum(leaf.encoding is not None for leaf in state.plan.state) == (9 if kind == "rounded" else 6)
    assert any(leaf.padding for leaf in state.plan.state if leaf.encoding)
    assert_same_bits(bits(state), reference(kind, steps))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "rounded", "compensated"])
@pytest.mark.parametrize(
    "options",
    [
        {"stage": 0},
        {"stage": 1},
        {"offload": Offload(optimizer="host")},
        {"offload": Offload(optimizer="host", update="host", chunk_bytes=2048)},
        {"offload": "disk"},
        {"accumulate": 3},
    ],
    ids=str,
)
def test_stages_offloads_and_microbatches_store_the_same_bits(kind, options, tmp_path):
    step = {name: options[name] for name in options if name == "accumulate"}
    options = {name: value for name, value in options.items() if name not in step}
    if options.get("offload") == "disk":
        options["offload"] = Offload(optimizer="disk", path=tmp_path, chunk_bytes=4096)
    if step:  # sums over microbatches, and not means, so that gradients stay exact
        step["reduction"] = "sum"
    tx = transformation(8, **NARROW[kind], **options)
    state = trained(tx, **step)
    one = transformation(8, **NARROW[kind])
    wanted = trained(one)
    jax.tree.map(np.testing.assert_array_equal, decoded(tx, state), decoded(one, wanted))
    jax.tree.map(near, tx.unshard(state.params), one.unshard(wanted.params))


def test_chunks_store_the_same_bits_and_hold_one_wide_chunk(monkeypatch):
    monkeypatch.setattr(partition, "RESIDENT_BYTES", 1024)
    # Another object than `ADAM`, whose update another test has planned in larger chunks.
    tx = transformation(8, tx=optax.adamw(1e-2, b1=0.5, b2=0.5), **NARROW["int8"])
    state = tx.create(parameters())
    assert "while" in tx.train_step(loss).lower(state, batch(0)).as_text()
    assert_same_bits(bits(trained(tx)), reference("int8"))


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", NARROW)
def test_the_kernel_of_gpus_stores_the_same_bits(kind, monkeypatch):
    """Interpreted. Blocks of 65 and of 67 elements are updated in chunks, because the kernel needs powers of two."""
    kernels_in = lambda tx: str(tx.train_step(loss).trace(tx.create(parameters()), batch(0)).jaxpr).count(KERNEL)
    tx = transformation(3, tx=optax.adamw(1e-2, b1=0.5, b2=0.5), **NARROW[kind])
    assert kernels_in(tx) == 0  # on CPUs, Pallas would interpret it
    monkeypatch.setattr(resident_chunks, "runs_kernels", lambda mesh: True)
    assert kernels_in(tx) == 1
    state = trained(tx)
    # A rounding error is the rest of a product that programs may round before they subtract it.
    exact = [k for k, leaf in enumerate(state.plan.state) if leaf.encoding or kind != "compensated"]
    assert_same_bits([bits(state)[k] for k in exact], [reference(kind)[k] for k in exact])
    wanted = trained(one := transformation(1, **NARROW[kind]))
    jax.tree.map(near, tx.unshard(state.params), one.unshard(wanted.params))


@aot
@pytest.mark.parametrize("masters", ["float32", "compensated", "rounded"])
def test_a_gpu_reads_and_writes_each_array_once(masters):
    """Parameter, gradient, two moments, and a rounding error or seeds; the wide update moves 28 bytes per element."""
    elements, precision = 1024 * 1024, Precision.bf16()
    tx = zero_shard(optax.adamw(1e-3), stage=3, mesh=mesh_of(1), precision=precision, state=Narrow(masters=masters))
    state = jax.eval_shape(tx.create, {"w": shape(1024, 1024)})
    step = tx.train_step(lambda params, x: jnp.mean((x @ params["w"]).astype(jnp.float32) ** 2))
    found = plan(step, state, shape(8, 1024), topology="h200:8")
    kept = sum(found.memory.get(part, 0) for part in ("parameters", "optimizer state", "master weights"))
    stored = {"float32": 4, "compensated": 2 + 2, "rounded": 2 + 4 / 256}[masters] + 2 * 264 / 256
    assert kept == pytest.approx(stored * elements / 8, rel=1e-3)
    module = read(found.text)
    overwritten = "output_to_operand_aliasing={{0}: (0, {}), {1}: (1, {}), {2}: (2, {})"  # parameter and moments
    assert overwritten in found.text
    (update,) = [kernel for kernel in kernels(module) if kernel.name.startswith("pallas_call")]
    expected = {"float32": 4 + 4 + 4, "compensated": 4 + 2 * (2 + 2), "rounded": 4 + 2 * (2 + 4 / 256)}[masters]
    assert update.traffic == pytest.approx((expected + 4 * 264 / 256) * elements / 8, rel=1e-3)
    assert not [1 for c in module.computations.values() for i in c.instructions if "while" in i.opcode]


def test_what_pallas_compiles_is_known():
    """Beside JAX's table of what it compiles with Triton."""
    from jax._src.pallas.triton.lowering import triton_lowering_rules

    known = {primitive.name for primitive in triton_lowering_rules}
    assert known >= block_kernel.COMPILED - BY_BLOCK


def test_unused_elements_of_a_block_are_not_its_largest():
    """Rows of 65 elements are two blocks of 33. The update makes the unused element, whose gradient is 0, large."""
    keep = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, state, params=None: (grads, jax.tree.map(lambda g: jnp.where(g == 0, -1e6, g), grads)),
    )
    tx = transformation(2, tx=keep, state=Narrow("int8", block=64))
    state = tx.create({"w": jnp.ones((64, 65))})
    state, _ = tx.train_step(lambda params, batch: jnp.sum(params["w"] * batch.sum(0)))(state, np.ones((2, 64, 65)))
    np.testing.assert_allclose(decoded(tx, state)["w"], 2.0, rtol=2.0**-4)


def test_a_skipped_step_changes_no_bit():
    tx = transformation(2, **NARROW["int8"])
    state, step = tx.create(parameters()), tx.train_step(loss, skip_nonfinite=True)
    state, _ = step(state, batch(0))
    before = bits(state)
    state, metrics = step(state, batch(1, bad=True))
    assert metrics["skipped"]
    assert_same_bits(bits(state), before)


def sent(tx):
    found = collectives(tx.train_step(loss).lower(tx.create(parameters()), batch(0)).compile())
    return sorted((one.kind, str(one.arrays)) for one in found)


@pytest.mark.parametrize("optimizer", [ADAM, pytest.param(optax.contrib.muon(1e-2), marks=pytest.mark.slow)])
def test_the_update_moves_no_byte(optimizer):
    assert sent(transformation(tx=optimizer, **NARROW["int8"])) == sent(transformation(tx=optimizer))


def test_bytes_are_what_estimate_says():
    for kind, each in {
        "int8": 2 * 264 / 256,
        "rounded": 2 * 264 / 256 + 4 / 256,
        "compensated": 2 * 264 / 256 + 2,
    }.items():
        row = estimate(1e9, devices=8, stages=[3], **{"precision": Precision.bf16(), **NARROW[kind]})[3]
        assert row.master + row.opt_state == pytest.approx(each * 1e9 / 8, rel=1e-3)
        assert row.params == pytest.approx((4 if kind == "int8" else 2) * 1e9 / 8, rel=1e-3)
    params = {"w": jnp.ones((256, 512))}
    state = transformation(tx=optax.adam(1.0), **NARROW["int8"]).create(params)
    arrays = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert sum(x.addressable_shards[0].data.nbytes for x in arrays) == 2 * 256 * 2 * (256 + 8) // 8


def test_increments_below_half_a_step_are_lost_only_by_rounding_to_nearest():
    """A second moment that grows by 1/1000 of its value per step: bfloat16 has steps of 1/256."""
    tx = optax.scale_by_adam(b2=0.999)
    found = {}
    for rounding in ("nearest", "stochastic"):
        sharded = transformation(1, tx=tx, state=Narrow("bfloat16", rounding=rounding))
        params = {"w": jnp.ones((64, 64))}
        state, update = sharded.init(params), jax.jit(sharded.update)
        for scale in (1.0, 1.4, *[1.4] * 200):  # squares of 1, then of 2
            _, state = update({"w": jnp.full((64, 64), scale)}, state, params)
        found[rounding] = float(jnp.mean(optax.tree.get(sharded.unshard(state, params), "nu")["w"]))
    exact = 0.001 * 0.999**201 + 1.96 * (1 - 0.999**201)
    # 4,096 elements and 200 roundings of at most 1/128: the mean is within 1/1000
    assert found["stochastic"] == pytest.approx(exact, rel=2e-3)
    assert abs(found["nearest"] - exact) > 0.02 * exact


def test_which_leaves_are_encoded_is_chosen_and_said():
    tx = transformation(state=Narrow(where=lambda path, leaf: path.startswith("0/nu") and leaf.ndim > 2))
    state = tx.create(parameters())
    plan = state.plan
    assert "(int8 of float32[2, 100, 67] in blocks of 67)" in str(report(state))
    assert [leaf.path for leaf in plan.state if leaf.encoding] == ["[0].nu['stack']"]
    assert "int8 of float32[2, 100, 67] in blocks of 67 dim 1 over 8" in str(plan)
    assert "[0].mu['odd']  float32[66, 65]" in str(plan)


def test_state_in_float64_stays_wide():
    with jax.enable_x64(True):
        plan = transformation(**NARROW["int8"]).create({"w": np.ones((64, 64))}).plan
    assert {str(leaf.dtype) for leaf in plan.state} == {"int32", "float64"}


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: Narrow("int4"), ValueError, "Narrow\\(format=\\) is one of 'int8'"),
        (lambda: Narrow(block=16), ValueError, "at least 32"),
        (lambda: Narrow(where="nu"), TypeError, "function of \\(path, leaf\\)"),
        (lambda: transformation(state="int8"), TypeError, "state is a zerojax.Narrow, such as Narrow"),
        (lambda: transformation(state=Narrow(masters="rounded")), ValueError, "Give precision=Precision.bf16"),
        (
            lambda: transformation(state=Narrow(), offload=Offload(params="disk", optimizer="disk", path="x")),
            ValueError,
            'not possible with Offload\\(params="disk"\\)',
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(make, error, says):
    with pytest.raises(error, match=says):
        make()
