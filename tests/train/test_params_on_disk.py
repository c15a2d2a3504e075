"""Stage 3 with `Offload(params="disk")`: a step in stages, whose parameters, gradients and state are in files."""

import itertools

import constructs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import quick_or_slow
from disk_models import LOSSES, batch_of, model_params, on_disk, sharded
from matrix_optimizers import shampoo

import zerojax
from zerojax import Offload, Precision
from zerojax.layout.leaf import is_chunked
from zerojax.staged.chunk_update import ChunkGradients
from zerojax.staged.microbatch import Microbatch
from zerojax.staged.model_files import ModelFiles, files_of

ATOL = 2e-6  # as `assert_parity`: a few units of float32 rounding, which other programs order differently


def mostly_slow(names, *quick):
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


def trained(tx, loss, steps=3, batch=batch_of, args=(), params=model_params, start=None, **options):
    """The logical state after a few steps, and each step's metrics."""
    step, state, found = tx.train_step(loss, **options), tx.create(params(), mutable=start), []
    for seed in range(steps):
        state, metrics = step(state, batch(seed), *args)
        found.append(jax.device_get(metrics))
    everything = tx.unshard(state.params), tx.unshard(state.opt_state, state.params), state.mutable, state.step
    return jax.device_get(everything), found


def assert_close(found, wanted, atol=ATOL):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.shape, x.dtype) == (y.shape, y.dtype), jax.tree_util.keystr(path)
        scale = max(1.0, float(np.max(np.abs(y.astype(np.float64))))) if y.size else 1
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(x.astype(np.float64), y.astype(np.float64), rtol=0, atol=atol * scale, err_msg=name)


def assert_trains_the_same(path, loss, tx=None, devices=8, beside=None, atol=ATOL, chunk_bytes=512, **options):
    """As in memory, where `beside` says how parameters and state are kept."""
    config = {name: options.pop(name) for name in ("precision", "trainable") if name in options}
    disk = on_disk(path, tx and tx(), devices, chunk_bytes=chunk_bytes, **config)
    memory = sharded(tx and tx(), devices, offload=beside, **config)
    have, found = trained(disk, loss, **options)
    want, wanted = trained(memory, loss, **options)
    unknown = {"param_norms", "update_norms"}  # files are updated chunk by chunk
    wanted = [{name: x for name, x in one.items() if name not in unknown} for one in wanted]
    assert_close([one["loss"] for one in found], [one["loss"] for one in wanted], atol)
    assert_close(found, wanted, max(atol, ATOL))  # norms are float32
    assert_close(have, want, atol)
    return wanted


@pytest.mark.parametrize(("name", "devices"), quick_or_slow(itertools.product(LOSSES, [1, 3, 8]), []))
def test_twenty_steps_equal_those_in_memory(tmp_path, name, devices):
    """In float64, because Adam divides a gradient by its size, and one unit of float32 may become a step of its own."""
    with jax.enable_x64(True):  # float64 rounds at 1e-16; steps amplify it
        wanted = assert_trains_the_same(tmp_path, LOSSES[name], devices=devices, steps=20, atol=1e-11)
    assert wanted[-1]["loss"] < 0.5 * wanted[0]["loss"]


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(1e-1),
    "momentum": lambda: optax.sgd(1e-1, momentum=0.9),
    "lion": lambda: optax.lion(1e-3),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "each leaf clipped": lambda: optax.chain(optax.clip_by_block_rms(0.01), optax.adamw(1e-2)),
    "clipped twice": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), optax.normalize_by_update_norm(), optax.sgd(0.1)
    ),
    "lamb": lambda: optax.lamb(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "muon": lambda: optax.contrib.muon(1e-2),
    "shampoo": lambda: shampoo(1e-2),
    "schedule": lambda: optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-2, 1e-3, 3)),
    "finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
    "adaptive clip": lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.adam(1e-2)),
    "plateau": lambda: optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(OPTIMIZERS, "adafactor"))
def test_every_transformation_trains_the_same(tmp_path, name):
    tx = OPTIMIZERS[name]
    assert_trains_the_same(tmp_path, LOSSES["remat_loop"], tx, devices=3 if name != "muon" else 8)


def scaled(grad):
    """Divided by scalars that padding would change."""
    return grad * jnp.max(-grad) / (jnp.sum(jnp.exp(-grad)) + jnp.min(-jnp.cos(grad)) + jnp.any(grad == 0))


def test_padding_is_in_no_reduction(tmp_path):
    """A vector is divided into chunks along its sharded dim, so the padding of the last shard is in several chunks."""
    loss = lambda params, batch: jnp.mean((batch @ jnp.exp(params["w"])) ** 2)
    given = {"params": lambda: {"w": -jnp.arange(70.0) / 70}, "batch": lambda seed: jnp.ones((16, 70)) + seed}
    tx = lambda: optax.chain(optax.stateless(lambda tree, _: jax.tree.map(scaled, tree)), optax.trace(0.9))
    assert_trains_the_same(tmp_path, loss, tx, devices=8, chunk_bytes=8, accumulate=2, **given)


def noisy(params, batch, key):
    by = jax.random.uniform(key, (48 if batch["tokens"].shape[0] == 48 else 24,))
    return LOSSES["loop"](params, batch) * (1 + by.mean())


def weighted(params, batch):
    return LOSSES["loop"](params, batch) * batch["tokens"].sum(), batch["tokens"].sum().astype(jnp.float32)


def with_everything(params, state, batch, key):
    total, weight = weighted(params, batch)
    total = total * (1 + jax.random.uniform(key))
    state = {"seen": state["seen"] + 1, "mean": 0.9 * state["mean"] + 0.1 * total}
    return (total, weight), state, {"double": 2 * total, "sum": zerojax.metrics.Sum(weight)}


STEPS = {
    "everything": (
        with_everything,
        {
            "start": {"seen": jnp.zeros((), jnp.int32), "mean": jnp.zeros(())},
            "args": (jax.random.key(3),),
            "trainable": lambda path, _: "w" not in path,
            "precision": Precision(loss_scale=256.0),
            **dict.fromkeys(("mutable", "has_aux", "weighted", "leaf_norms", "skip_nonfinite"), True),
            "accumulate": 2,
            "devices": 3,
            "steps": 2,
        },
    ),
    "microbatches": (LOSSES["one_by_one"], {"accumulate": 2}),
    "weights": (weighted, {"weighted": True}),
    "keys": (noisy, {"args": (jax.random.key(3),)}),
}


@pytest.mark.parametrize("name", mostly_slow(STEPS, "everything"))
def test_every_kind_of_step_trains_the_same(tmp_path, name):
    loss, options = STEPS[name]
    assert_trains_the_same(tmp_path, loss, **options)


PRECISIONS = {"bf16": Precision.bf16(), "fp16": Precision.fp16(loss_scale=256.0)}


@pytest.mark.parametrize(
    ("name", "precision"), quick_or_slow(itertools.product(["remat_loop", "one_by_one"], PRECISIONS), [])
)
def test_master_weights_train_the_same(tmp_path, name, precision):
    """Compared with state in host memory, since both store narrow parameters; bfloat16 rounds at 1/256."""
    beside = Offload(optimizer="host", update="device")
    options = {"precision": PRECISIONS[precision], "beside": beside, "atol": 1e-2}
    assert_trains_the_same(tmp_path, LOSSES[name], **options)


@pytest.mark.slow
def test_a_skipped_step_changes_and_moves_nothing(tmp_path):
    tx = on_disk(tmp_path)
    step = tx.train_step(lambda params, batch: LOSSES["loop"](params, batch) * batch["by"].mean(), skip_nonfinite=True)
    state = tx.create(model_params())
    first = jax.device_get((tx.unshard(state.params), tx.unshard(state.opt_state, state.params)))
    state, metrics = step(state, {**batch_of(), "by": jnp.full((48,), jnp.inf)})
    assert metrics["skipped"]
    found = jax.device_get((tx.unshard(state.params), tx.unshard(state.opt_state, state.params)))
    jax.tree.map(np.testing.assert_array_equal, found, first)
    state, metrics = step(state, {**batch_of(), "by": jnp.ones((48,))})
    assert not metrics["skipped"]


@pytest.mark.slow
def test_evaluation_streams_and_equals_that_in_memory(tmp_path):
    """With a batch that the devices divide, and one that they do not."""
    disk, memory = on_disk(tmp_path), sharded()

    def predict(params, batch, scale):
        return {
            "logits": params["embed"][batch["tokens"]] @ params["embed"].T * scale,
            "loss": LOSSES["loop"](params, batch),
        }

    have, want = disk.eval_step(predict), memory.eval_step(predict)
    state = disk.create(model_params())
    for rows in (batch_of(), {"tokens": batch_of()["tokens"][:7]}):
        found, wanted = have(state.params, rows, 2.0), want(memory.shard(model_params()), rows, 2.0)
        assert_close(jax.device_get(found), jax.device_get(wanted))


def test_parameters_are_initialised_into_files(tmp_path):
    tx = on_disk(tmp_path, precision=Precision.bf16())
    given = model_params()
    params = tx.init_params(lambda: given)
    assert is_chunked(params["embed"])
    assert params["embed"].dtype == jnp.float32
    assert_close(jax.device_get(tx.unshard(params)), model_params(), atol=0)
    state = tx.create(params)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model_params())
    assert_close(jax.device_get(tx.unshard(state.params)), jax.device_get(narrow), atol=0)
    masters = tx.unshard(tx.weights(state.params, state.opt_state))
    assert_close(jax.device_get(masters), model_params(), atol=0)


WIDE, DEEP = 24, 3


def odd_params():
    keys = iter(jax.random.split(jax.random.key(5), 20))
    draw = lambda *shape: jax.random.normal(next(keys), shape) / 5
    return {
        "embed": draw(26, WIDE),
        "stack": {"w": draw(DEEP, WIDE, WIDE), "v": draw(DEEP, WIDE, WIDE)},
        "list": [draw(WIDE, WIDE) for _ in range(DEEP)],
        "shared": draw(WIDE, WIDE),
    }


def embedded(params, batch):
    return params["embed"][batch["tokens"]]


def squares(x, params, batch):
    return jnp.mean((x @ params["embed"].T) ** 2)


def transposed_stack(params, batch):
    x, _ = jax.lax.scan(
        lambda x, w: (x + jnp.tanh(x @ w), None), embedded(params, batch), jnp.swapaxes(params["stack"]["w"], 1, 2)
    )
    return squares(x, params, batch)


def of_a_while_loop(params, batch):
    x = jax.lax.fori_loop(0, 3, lambda i, x: x + jnp.tanh(x @ params["shared"]), embedded(params, batch))
    first, more = params["stack"]["v"][0], lambda carry: (carry[0] < 5) & (jnp.abs(carry[1]).max() > 1e-3)
    last = jax.lax.while_loop(more, lambda carry: (carry[0] + 1, jnp.tanh(carry[1] @ first)), (0, x))
    return squares(x + jax.lax.stop_gradient(last[1]), params, batch)


def of_time_steps(params, batch):
    first, rows = params["stack"]["w"][0], embedded(params, batch).reshape(3, 16, WIDE)
    x, _ = jax.lax.scan(lambda x, row: (x + jnp.tanh((x + row) @ first), None), jnp.zeros((16, WIDE)), rows)
    return squares(x, params, batch)


def microbatches_of_its_own(params, batch):
    def one(total, tokens):
        x = params["embed"][tokens]
        for w in params["list"]:
            x = x + jnp.tanh(x @ w)
        return total + jnp.mean((x @ params["embed"].T) ** 2), None

    return jax.lax.scan(one, jnp.zeros(()), batch["tokens"].reshape(2, -1))[0] / 2


def within_a_branch(params, batch):
    x = embedded(params, batch)
    x = jax.lax.cond(batch["tokens"][0] > 12, lambda: x @ params["shared"], lambda: x @ params["list"][0])
    return squares(x, params, batch)


def convolved(params, batch):
    images = embedded(params, batch).reshape(len(batch["tokens"]), 4, 6, 1)
    kernel = params["shared"].reshape(4, 6, 1, WIDE)
    x = jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return squares(jnp.tanh(x).mean((1, 2)), params, batch)


def taught(params, batch):
    """A teacher is a part of the parameters whose gradient is stopped. The codes pass straight through."""
    x = embedded(params, batch)
    student, teacher = x + jnp.tanh(x @ params["list"][0]), x + jnp.tanh(x @ params["list"][1])
    near = params["shared"][jnp.argmin(jnp.sum((student[:, None] - params["shared"]) ** 2, -1), -1)]
    through = student + jax.lax.stop_gradient(near - student) - jax.lax.stop_gradient(teacher)
    return jnp.mean(through**2) + jnp.mean((jax.lax.stop_gradient(student) - near) ** 2)


ODD = [transposed_stack, of_a_while_loop, of_time_steps, microbatches_of_its_own, within_a_branch, convolved, taught]
CONSTRUCTS = [constructs.TABLE[name] for name in ("scan_everything", "indexed", "penalty", "changed_weights")]


@pytest.mark.parametrize("loss", mostly_slow([*ODD, *CONSTRUCTS]))
def test_odd_losses_train_the_same(tmp_path, loss):
    """Parameters that a loss does not use have gradients of zeros, and still decay."""
    rows = {"params": constructs.make_params, "batch": lambda seed: jax.random.normal(jax.random.key(seed), (48, 8))}
    assert_trains_the_same(tmp_path, loss, **(rows if loss in CONSTRUCTS else {"params": odd_params}))


def test_a_stack_with_too_many_layers_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("zerojax.offload.chunked.MOST_ROWS", 1)
    tx = on_disk(tmp_path, devices=2)
    with pytest.raises(ValueError, match=r"A loop reads params\['layers'\]\['w'\].* of at most \d+ layers"):
        tx.train_step(LOSSES["loop"])(tx.create(model_params()), batch_of(0))


def moved(step, state, seeds):
    """The state after some steps, and what each step read and wrote of parameters and gradients."""
    files, found = files_of(state.params), []
    for seed in seeds:
        before = files.moved
        state, _ = step(state, batch_of(seed))
        files.flush()
        found.append(tuple(b - a for a, b in zip(before, files.moved, strict=True)))
    return state, found


@pytest.mark.parametrize("precision", [None, pytest.param(Precision.bf16(), marks=pytest.mark.slow, id="bf16")])
def test_a_step_moves_what_the_formula_says(tmp_path, precision):
    """With one chunk per leaf and layer. The last segment keeps its parameter for the backward pass."""
    tx = on_disk(tmp_path / "a", devices=2, chunk_bytes=1 << 20, precision=precision)
    state = tx.create(model_params())
    _, found = moved(tx.train_step(LOSSES["loop"]), state, range(2))
    layer, embed, uneven = 4096, 4096, 4096  # a block of the disk each
    total = 3 * layer + embed + uneven
    # Forward: lookup, layers, head, `uneven`. Backward: `uneven` was kept, and the lookup's gradient reads nothing.
    passes = embed + 3 * layer + embed + uneven + embed + 3 * layer
    assert found[0] == found[1]
    assert found[0][1] == 2 * total
    assert found[0][0] == passes + 2 * total


def test_an_eval_step_reads_parameters_in_any_chunks(tmp_path):
    makers = [on_disk(tmp_path / str(size), devices=2, chunk_bytes=size) for size in (256, 512)]
    evaluate = makers[0].eval_step(LOSSES["loop"])
    small, large = (evaluate(tx.create(model_params()).params, batch_of()) for tx in makers)
    np.testing.assert_allclose(small, large, rtol=ATOL)


@pytest.mark.slow
def test_host_memory_takes_the_place_of_files(tmp_path):
    """First for parameters, which are read most; with enough of it nothing moves, and the numbers are the same."""
    states, counts = [], []
    for name, host_bytes in (("none", None), ("some", "150 kB"), ("all", "8 MB")):
        tx = on_disk(tmp_path / name, devices=2, host_bytes=host_bytes)
        state, found = moved(tx.train_step(LOSSES["loop"]), tx.create(model_params()), range(2))
        files = files_of(state.params)
        moments = next(filter(is_chunked, jax.tree.leaves(state.opt_state, is_leaf=is_chunked)))
        buffers = files.buffer_bytes + moments.leaf_files.state_files.buffer_bytes
        held = sum(x.nbytes for arrays in files._store._in_memory.values() for x in arrays)
        assert held == 0 if host_bytes is None else buffers + held <= tx.config.offload.host_bytes
        states.append(jax.device_get(tx.unshard(state.params)))
        counts.append(found[-1][0])
    assert counts[0] > counts[1] > counts[2] == 0
    for state in states[1:]:
        assert_close(state, states[0], atol=0)


@pytest.mark.slow
def test_gradients_are_written_while_the_next_stage_runs(tmp_path, monkeypatch):
    events = []

    def recorded(owner, name, event):
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: events.append(event) or call(*args))

    tx = on_disk(tmp_path, devices=1)
    step, state = tx.train_step(LOSSES["one_by_one"]), tx.create(model_params())
    recorded(Microbatch, "_ran", "stage")
    recorded(ChunkGradients, "add", "add")
    recorded(ModelFiles, "write", "write")
    recorded(ChunkGradients, "end", "end")
    step(state, batch_of(0))
    before_end = events[: events.index("end")]
    assert before_end.count("write") > 1
    assert ("add", "write") not in itertools.pairwise(before_end)  # always a stage in between


def test_the_report_says_what_is_on_disk(tmp_path):
    tx = on_disk(tmp_path, devices=2)
    report = zerojax.report(tx.create(model_params()))
    assert report.disk["params"] > 0
    assert "in files" in str(report)
