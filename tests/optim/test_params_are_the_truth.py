"""An update starts from the parameters. A master weight only adds the bits that a narrow parameter cannot hold."""

import functools

import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of, quick_or_slow
from flat_options import tuned
from flax import nnx

from zerojax import Offload, Precision, zero_shard
from zerojax.checkpoint import Checkpointer, export, import_params
from zerojax.flax_nnx import shard_module
from zerojax.optim.master_weights import current_weight

RATE = 2.0**-12  # less than half a step of bfloat16 for most weights, so that a rounded weight would not move
KEYS = jax.random.split(jax.random.key(0), 4)
# `w` and `v` are sharded, `u` is padded, and `b` is flat.
PARAMS = {
    "w": jax.random.normal(KEYS[0], (16, 64)),
    "v": jax.random.normal(KEYS[1], (16, 64)),
    "u": jax.random.normal(KEYS[2], (9, 41)),
    "b": jax.random.normal(KEYS[3], (5,)),
}
BATCH = jnp.ones((8, 1))
HOST = functools.partial(Offload, optimizer="host", chunk_bytes=256)
SLOW = {"0": (0, None), "3": (3, None), "2-host": (2, HOST(update="device"))}
QUICK = {"1": (1, None), "2": (2, None), "3-on-host": (3, HOST(update="host", params="host"))}
CASES = [pytest.param(*of, id=name) for name, of in QUICK.items()]
CASES += [pytest.param(*of, id=name, marks=pytest.mark.slow) for name, of in SLOW.items()]


def linear(params, batch):
    """Every gradient is 1, so a step of SGD subtracts `RATE` from each weight, exactly."""
    return jnp.mean(batch) * sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(params))


def made(stage, offload=None, tx=None, **options):
    options = {"precision": Precision.bf16(), "persist_below": 100, **options}
    return zero_shard(tx or optax.sgd(RATE), stage=stage, offload=offload, **tuned(**options))


def weights_of(tx, state):
    return jax.device_get(tx.unshard(tx.weights(state.params, state.opt_state)))


def expected_after(edit, weights, dtype):
    """Apply `edit` to parameters of type `dtype`. Weights whose parameter did not change keep all bits."""
    before = jax.tree.map(lambda x: jnp.asarray(x).astype(dtype), weights)
    same = lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes()

    def one(wide, old, new):
        kept = [same(a, b) for a, b in zip(np.ravel(old), np.ravel(new), strict=True)]
        return np.where(np.reshape(kept, wide.shape), wide, np.asarray(new, np.float32))

    return jax.tree.map(one, weights, before, edit(before))


def clip(params):
    return jax.tree.map(lambda x: jnp.clip(x, -0.05, 0.05), params)


def load(params):
    return jax.tree.map(lambda x: (3 * x + 1).astype(x.dtype), params)


EDITS = {
    "clipping": clip,
    "swapping": lambda params: {**params, "w": params["v"], "v": params["w"]},
    "negative zero": lambda params: jax.tree.map(lambda x: jnp.where(x > 0, -jnp.zeros_like(x), x), params),
    "not a number": lambda params: {**params, "b": params["b"].at[1].set(jnp.nan), "u": load(params["u"])},
}


def changed(state, edit):
    """Apply `edit` to the parameters of a state, as a program does between two steps."""
    new = edit(jax.device_put(state.params, jax.memory.Space.Device))
    return state.replace(params=jax.device_put(new, jax.tree.map(lambda x: x.sharding, state.params)))


def assert_same(found, expected, name=""):
    jax.tree.map(functools.partial(np.testing.assert_array_equal, err_msg=name), found, expected)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("stage", "offload"), CASES)
def test_a_step_starts_from_changed_parameters(stage, offload):
    """One program after the other changes the parameters. Unchanged elements keep the bits of their master weights."""
    tx = made(stage, offload)
    state, step = tx.create(PARAMS), tx.train_step(linear)
    for name, edit in EDITS.items():
        state, _ = step(state, BATCH)
        weights = weights_of(tx, state)
        dtype = jax.tree.leaves(state.params)[0].dtype
        state = changed(state, edit)
        expected = expected_after(edit, weights, dtype)
        assert_same(weights_of(tx, state), expected, name)
        state, _ = step(state, BATCH)
        moved = jax.tree.map(lambda x: x - np.float32(RATE), expected)
        assert_same(weights_of(tx, state), moved, name)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("stage", "narrow"), [(3, False), (1, False), (1, True)])
def test_an_update_starts_from_changed_parameters(stage, narrow):
    """In a hand-written loop, whose parameters may be wide. Averaging moves wide parameters by less than a rounding."""
    tx = made(stage)
    params = tx.shard(PARAMS)
    opt_state = tx.init(params)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params) if narrow else params
    grads = jax.tree.map(jnp.ones_like, params)
    loop = jax.jit(lambda params, state: tx.update(grads, state, params))
    for edit in (lambda params: params, clip, lambda params: optax.incremental_update(load(params), params, 1e-4)):
        weights = jax.device_get(tx.unshard(tx.weights(params, opt_state)))
        dtype = jnp.bfloat16 if narrow else jnp.float32
        rounded = jax.device_get(jax.tree.map(lambda x: x.astype(jnp.float32), tx.unshard(params)))
        params = edit(params)
        new = jax.device_get(jax.tree.map(lambda x: x.astype(jnp.float32), tx.unshard(params)))
        expected = jax.tree.map(lambda m, old, x: np.where(old == x, m, x), weights, rounded, new)
        assert_same(jax.device_get(tx.unshard(tx.weights(params, opt_state))), expected)
        updates, opt_state = loop(params, opt_state)
        params = optax.apply_updates(params, updates)
        assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
        moved = jax.tree.map(lambda x: x - np.float32(RATE), expected)
        assert_same(jax.device_get(tx.unshard(tx.weights(params, opt_state))), moved)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("stage", "offload"), [(1, None), (2, HOST(update="device"))], ids=["1", "2-host"])
def test_a_changed_state_is_saved_exported_and_moved(stage, offload, tmp_path):
    tx, to = made(stage, offload), made(3)
    state, _ = tx.train_step(linear)(tx.create(PARAMS), BATCH)
    edit = lambda params: {**params, "w": load(params["w"]), "b": load(params["b"])}
    expected = expected_after(edit, weights_of(tx, state), jnp.bfloat16)
    state = changed(state, edit)
    with Checkpointer(tmp_path / "saved") as checkpoints:
        checkpoints.save(state, step=1)
        checkpoints.wait()
        found = checkpoints.restore(to.create(jax.eval_shape(lambda: PARAMS))).state
    assert_same(weights_of(to, found), expected)
    export(state, tmp_path / "exported")
    assert_same(jax.device_get(import_params(tmp_path / "exported", jax.eval_shape(lambda: PARAMS))), expected)
    assert_same(weights_of(to, tx.reshard(state, to=to)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("params", [None, "disk"])
def test_changed_parameters_of_a_state_on_disk_count(params, tmp_path):
    """With parameters on disk, too, which an import overwrites."""
    place = Offload("disk", params=params, path=tmp_path / "run", chunk_bytes=512)
    tx = made(3 if params else 2, place, persist_below=8 if params else 100, mesh=mesh_of(2))
    given = {name: PARAMS[name] for name in "wu"}
    state, step = tx.create(given), tx.train_step(linear)
    state, _ = step(state, BATCH)
    weights = weights_of(tx, state)
    new = {"w": load(given["w"]), "u": jnp.asarray(weights["u"])}
    expected = expected_after(lambda old: jax.tree.map(lambda x, y: x.astype(y.dtype), new, old), weights, jnp.bfloat16)
    if params:
        with pytest.raises(ValueError, match=r"have no room for gradients.*import_params"):
            step(state.replace(params=tx.shard(new)), BATCH)
        export(new, tmp_path / "new")
        state = state.replace(params=import_params(tmp_path / "new", state.params))
    else:
        state = changed(state, lambda old: {**old, "w": new["w"].astype(jnp.bfloat16)})
    assert_same(weights_of(tx, state), expected)
    with Checkpointer(tmp_path / "saved") as checkpoints:
        checkpoints.save(state, step=1)
        checkpoints.wait()
        to = made(3, precision=None)
        assert_same(weights_of(to, checkpoints.restore(to.create(jax.eval_shape(lambda: given))).state), expected)
    state, _ = step(state, BATCH)
    assert_same(weights_of(tx, state), jax.tree.map(lambda x: x - np.float32(RATE), expected))


def test_a_skipped_step_keeps_changed_parameters():
    tx = made(1, precision=Precision.fp16(loss_scale=2.0**4))
    state, step = tx.create(PARAMS), tx.train_step(linear)
    state, _ = step(state, BATCH)
    expected = expected_after(clip, weights_of(tx, state), jax.tree.leaves(state.params)[0].dtype)
    state, metrics = step(changed(state, clip), jnp.inf * BATCH)
    assert metrics["skipped"]
    assert_same(weights_of(tx, state), expected)


def test_small_numbers_of_float16_are_copies():
    """Also subnormal ones, which `reduce_precision` would flush to zero."""
    tx = made(1, precision=Precision.fp16(loss_scale=1.0))
    small = jax.tree.map(lambda x: x * 1e-6, PARAMS)
    state, step = tx.create(small), tx.train_step(lambda params, batch: 0 * linear(params, batch))
    for _ in range(2):
        state, _ = step(state, BATCH)
    assert_same(weights_of(tx, state), jax.device_get(small))


@pytest.mark.parametrize("stored", [jnp.bfloat16, jnp.float16])
def test_both_neighbours_of_a_master_weight_at_a_tie_are_its_copies(stored):
    """XLA may round an update in another way for the parameter than for its master weight, and so the tie."""
    step = float(jnp.finfo(stored).eps)
    low, half, high = np.float32([1, -1]), np.float32([1 + step / 2, -1 - step / 2]), np.float32([1 + step, -1 - step])
    for master in (half, np.nextafter(half, low), np.nextafter(half, high)):
        for param in (low, high):
            np.testing.assert_array_equal(current_weight(master, param, stored), master)
        far = high + np.sign(high) * np.float32(step)
        np.testing.assert_array_equal(current_weight(master, far, stored), far)
    clearly = low + (half - low) * np.float32(0.9)
    np.testing.assert_array_equal(current_weight(clearly, low, stored), clearly)
    np.testing.assert_array_equal(current_weight(clearly, high, stored), high)


WAYS = {
    "shard": lambda tx, path: tx.shard(PARAMS),
    "import": lambda tx, path: import_params(path, tx.shard(jax.eval_shape(lambda: PARAMS))),
    "import into a state": lambda tx, path: import_params(path, tx.create(jax.eval_shape(lambda: PARAMS))),
    "init_params": lambda tx, path: tx.init_params(lambda: PARAMS),
}


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_weights_and_export_work_on_an_explicit_mesh(stage, tmp_path):
    tx = made(stage, mesh=mesh_of(8, kind=jax.sharding.AxisType.Explicit))
    state = tx.create(tx.shard(PARAMS))
    found = {"eager": tx.weights, "jitted": jax.jit(tx.weights)}
    for name, weights in found.items():
        got = weights(state.params, state.opt_state)
        assert_same(jax.device_get(tx.unshard(got)), jax.device_get(PARAMS), name)
    export(state, tmp_path)
    assert_same(
        jax.device_get(tx.unshard(import_params(tmp_path, state.params))), jax.device_get(tx.unshard(state.params))
    )


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_no_documented_way_rounds_weights_before_master_weights_are_made(stage, tmp_path):
    tx = made(stage)
    export(PARAMS, tmp_path / "given")
    for name, way in WAYS.items():
        params = way(tx, tmp_path / "given")
        assert_same(weights_of(tx, tx.create(params)), jax.device_get(PARAMS), name)
        assert_same(jax.device_get(tx.unshard(tx.weights(params, tx.init(params)))), jax.device_get(PARAMS), name)
    train = flax.training.train_state.TrainState.create(apply_fn=None, params=tx.shard(PARAMS), tx=tx)
    assert_same(jax.device_get(tx.unshard(tx.weights(train.params, train.opt_state))), jax.device_get(PARAMS))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_module_of_nnx_is_not_rounded_and_its_changes_count(stage):
    tx, module = made(stage), nnx.Linear(16, 64, use_bias=False, rngs=nnx.Rngs(0))
    kernel = np.asarray(module.kernel[...])
    shard_module(module, tx)
    optimizer = nnx.Optimizer(module, tx, wrt=nnx.Param)
    grads = jax.tree.map(jnp.ones_like, nnx.state(module, nnx.Param))
    optimizer.update(module, grads)
    found = lambda: np.asarray(tx.weights(nnx.state(module, nnx.Param), optimizer.opt_state)["kernel"][...])
    np.testing.assert_array_equal(found(), kernel - np.float32(RATE))
    module.kernel[...] = jnp.clip(module.kernel[...], -0.05, 0.05)
    optimizer.update(module, grads)
    assert found().max() <= np.float32(0.05)


PRECISIONS = {
    "none": None,
    "bf16": Precision.bf16(),
    "bf16 on the host": Precision.bf16(),
    "keep": Precision.bf16(keep=lambda path, leaf: path == "b"),
    "fp16": Precision.fp16(loss_scale=1.0),
}


@pytest.mark.parametrize(
    ("stage", "precision"),
    quick_or_slow(
        [(stage, name) for stage in range(4) for name in PRECISIONS if stage or "host" not in name], [(3, "bf16")]
    ),
)
def test_recipes_with_averages_give_the_same_numbers_at_all_stages(stage, precision):
    """A moving average kept beside the state, and the weights with which a schedule-free optimizer is evaluated."""
    make = lambda: optax.contrib.schedule_free_sgd(2.0**-6)
    offload = HOST(update="device") if "host" in precision else None
    tx, plain = made(stage, offload, tx=make(), precision=PRECISIONS[precision]), make()
    state, step = tx.create(PARAMS), tx.train_step(linear)
    average = jax.tree.map(jnp.copy, tx.weights(state.params, state.opt_state))
    params, opt_state, expected, ones = PARAMS, plain.init(PARAMS), PARAMS, jax.tree.map(jnp.ones_like, PARAMS)
    for _ in range(2):
        state, _ = step(state, BATCH)
        average = optax.incremental_update(tx.weights(state.params, state.opt_state), average, 1e-3)
        updates, opt_state = plain.update(ones, opt_state, params)
        params = optax.apply_updates(params, updates)
        expected = optax.incremental_update(params, expected, 1e-3)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)  # a few roundings of float32
    jax.tree.map(close, jax.device_get(tx.unshard(average)), expected)
    found = optax.tree_utils.tree_get(state.opt_state, "ScheduleFreeState")
    found = found._replace(z=tx.as_params(found.z, state.params))
    found = optax.contrib.schedule_free_eval_params(found, tx.weights(state.params, state.opt_state))
    jax.tree.map(close, jax.device_get(tx.unshard(found)), optax.contrib.schedule_free_eval_params(opt_state, params))
