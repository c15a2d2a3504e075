"""Optimizer states leave and enter: as optax has them, as bytes of Flax's; and transformations are pickled."""

import dataclasses
import os
import subprocess
import sys

import chex
import cloudpickle
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of, quick_or_slow
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax import Offload, Padded, Precision, Tuning, zero_shard

HOLE = optax.MaskedNode()
ROWS = jnp.linspace(-1, 1, 32).reshape(8, 4)
# Padded at stage 3, flat because small, persistent and flat with two dims, and of whole shards.
PARAMS = {
    "odd": jnp.linspace(-1, 1, 257 * 3).reshape(257, 3),
    "bias": jnp.linspace(0, 1, 5),
    "small": jnp.linspace(0, 2, 6).reshape(2, 3),
    "even": {"w": jnp.linspace(-2, 2, 64).reshape(4, 16)},
}
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2), optax.add_noise(0.01, 0.5, 3))


def loss(params, rows):
    odd, even = params["odd"][:4] + params["bias"][:3], params["even"]["w"][:, :3]
    return jnp.mean((rows @ (odd * even)) ** 2) + jnp.sum(params["small"] ** 2)


def used(tx, params):
    """A state of which every float differs, with negative zeros."""
    values = iter(range(1, 1000))
    one = lambda x: (x + (next(values) * jnp.linspace(-1, 1, x.size).reshape(x.shape)).astype(x.dtype)) * -0.0
    more = lambda x: one(x).at[..., :1].set(next(values) / 7) if x.ndim else x + 3
    floats = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    return jax.tree.map(lambda x: more(x) if floats(x) else x, tx.init(params))


def bits(x):
    x = jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return np.asarray(x).tobytes()


def assert_same_bits(found, expected):
    """Of one structure, shapes and types, and equal bit for bit."""
    chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert [bits(x) for x in jax.tree.leaves(found)] == [bits(x) for x in jax.tree.leaves(expected)]


OPTIONS = {
    "plain": {},
    "bf16": {"precision": Precision.bf16()},
    "frozen": {"trainable": lambda path, _: "bias" not in path, "precision": Precision.bf16()},
    "host": {"offload": Offload(optimizer="host", chunk_bytes=512)},
    "both": {"offload": Offload(optimizer="host", params="host"), "precision": Precision.bf16()},
    "disk": {"offload": Offload(optimizer="disk", path="replaced")},
}
CASES = [(stage, name) for stage in range(4) for name in OPTIONS if stage or "offload" not in OPTIONS[name]]
CASES = [(stage, name) for stage, name in CASES if stage == 3 or name != "both"]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("stage", "name"), quick_or_slow(CASES, [(2, "plain"), (3, "both")]))
def test_a_plain_state_is_placed_and_comes_back_bit_for_bit(stage, name, mesh, tmp_path):
    options = dict(OPTIONS[name])
    if name == "disk":
        options["offload"] = dataclasses.replace(options["offload"], path=str(tmp_path))
    tx = zero_shard(TX, stage=stage, mesh=mesh, tuning=Tuning(persist_below=64), **options)
    plain = used(TX, PARAMS)
    state = tx.adopt(jax.device_get(plain) if name == "bf16" else plain, PARAMS)
    expected = plain
    if name == "frozen":
        hole = lambda path, x: HOLE if "bias" in jax.tree_util.keystr(path) else x
        expected = jax.tree_util.tree_map_with_path(hole, plain)
    back = tx.unshard(state)
    assert_same_bits(back, expected)
    if tx.config.has_master_weights:  # they are not in optax's state
        assert_same_bits(tx.unshard(tx.as_params(state.master, PARAMS)), PARAMS)
    if name == "disk":
        zerojax.offload.close(state)
    again = tx.adopt(back, PARAMS)
    if name != "disk":
        assert_same_bits(again, state)
        fresh = tx.init(PARAMS)
        assert jax.tree.structure(fresh) == jax.tree.structure(state)
        assert [x.sharding for x in jax.tree.leaves(fresh)] == [x.sharding for x in jax.tree.leaves(state)]
    assert_same_bits(tx.unshard(again, jax.eval_shape(lambda: PARAMS)), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "name"), quick_or_slow([(1, "plain"), (3, "host")], [(3, "plain")]))
def test_a_run_goes_on_from_a_plain_one_and_back(stage, name, mesh):
    inner = optax.adamw(1e-2)
    plain, opt_state = PARAMS, inner.init(PARAMS)

    @jax.jit
    def alone(params, state):
        updates, state = inner.update(jax.grad(loss)(params, ROWS), state, params)
        return optax.apply_updates(params, updates), state

    plain, opt_state = alone(plain, opt_state)
    tx = zero_shard(inner, stage=stage, mesh=mesh, tuning=Tuning(persist_below=64), **OPTIONS[name])
    state = tx.create(plain, opt_state=opt_state)
    state, _ = tx.train_step(loss)(state, ROWS)
    expected = alone(plain, opt_state)
    chex.assert_trees_all_close((tx.unshard(state.params), tx.unshard(state.opt_state)), expected, rtol=1e-4, atol=1e-6)
    # a part of the state, with the parameters; the caller's arrays were copied
    found = tx.unshard(optax.tree.get(state.opt_state, "nu"), state.params)
    chex.assert_trees_all_equal(found, optax.tree.get(tx.unshard(state.opt_state), "nu"))
    assert not any(x.is_deleted() for x in jax.tree.leaves((plain, opt_state)))


def test_states_of_masked_and_narrow_runs_are_taken(mesh):
    """One of `optax.masked`; one in bfloat16, which float32 represents; and one that wide gradients made wider."""
    mask = {"odd": True, "bias": False, "small": True, "even": {"w": True}}
    tx = zero_shard(optax.adam(1e-2), stage=1, mesh=mesh, tuning=Tuning(persist_below=64), trainable=mask)
    masked = used(optax.masked(optax.adam(1e-2), mask), PARAMS)
    assert_same_bits(tx.unshard(tx.adopt(masked, PARAMS)), masked.inner_state)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    state = tx.adopt(optax.adam(1e-2).init(narrow), PARAMS)
    assert optax.tree.get(state, "nu")["odd"].dtype == jnp.float32
    wide = tx.adopt(used(optax.adam(1e-2), PARAMS), narrow)
    assert optax.tree.get(wide, "nu")["odd"].dtype == jnp.float32


def test_inside_of_jit_and_on_explicit_axes():
    mesh = mesh_of(4, 2, names=("data", "model"), kind=AxisType.Explicit)
    tx = zero_shard(optax.adam(1e-2), stage=2, mesh=mesh, tuning=Tuning(persist_below=64))
    plain = used(optax.adam(1e-2), PARAMS)
    state = jax.jit(tx.adopt)(plain, PARAMS)
    assert state[0].mu["odd"].sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)
    assert_same_bits(jax.jit(tx.unshard)(state), plain)


def test_what_is_no_plain_state_is_refused_by_name(mesh):
    tx = zero_shard(optax.adam(1e-2), stage=3, mesh=mesh, tuning=Tuning(persist_below=64))
    plain = optax.adam(1e-2).init(PARAMS)
    adam = plain[0]
    with pytest.raises(ValueError, match=r"opt_state\[0\]\.mu\['bias'\] is float32\[8\].*it is in storage already"):
        tx.adopt(tx.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match=r"opt_state\[0\]\.mu\['odd'\] is float32\[256, 3\], and float32\[257, 3\]"):
        tx.adopt((adam._replace(mu=adam.mu | {"odd": jnp.ones((256, 3))}), *plain[1:]), PARAMS)
    with pytest.raises(ValueError, match=r"it lacks \[0\]\.mu\['bias'\]"):
        tx.adopt((adam._replace(mu={}), *plain[1:]), PARAMS)
    with pytest.raises(ValueError, match=r"it has \[0\]\.mu\['other'\] beyond that"):
        tx.adopt((adam._replace(mu=adam.mu | {"other": jnp.ones(3)}), *plain[1:]), PARAMS)
    with pytest.raises(TypeError, match=r"\.nu\['bias'\] is int32, and this transformation keeps it in float32"):
        tx.adopt((adam._replace(nu=jax.tree.map(lambda x: x.astype(int), adam.nu)), *plain[1:]), PARAMS)
    with pytest.raises(ValueError, match="a ZeroState, which has both"):
        tx.unshard(tx.create(jax.eval_shape(lambda: PARAMS)))


def test_a_state_whose_shapes_are_not_known_is_refused(mesh):
    """Another process has planned nothing yet; two models may be stored alike. With the parameters both are known."""
    make = lambda: zero_shard(optax.adam(1e-2), stage=3, mesh=mesh, tuning=Tuning(persist_below=64))
    tx, params = make(), {"w": jnp.ones((257, 3))}
    state = tx.init(params)
    for part in (state, state[0]):
        assert optax.tree.get(tx.unshard(part), "mu")["w"].shape == (257, 3)
        with pytest.raises(ValueError, match=r"has not planned .*opt_state.*count, of shape \[\], and 2 more"):
            make().unshard(part)
    tx.init({"w": jnp.ones((258, 3))})
    with pytest.raises(ValueError, match="2 plans with different logical shapes"):
        tx.unshard(state)
    assert tx.unshard(state, params)[0].mu["w"].shape == (257, 3)
    with pytest.raises(ValueError, match="The state does not belong to these parameters"):
        tx.unshard(state, {"w": jnp.ones((300, 3))})
    # trees that are no states are what they were: parameters in storage, and any other arrays
    assert tx.unshard(tx.shard(params))["w"].shape == (257, 3)
    assert tx.unshard({"w": jnp.ones((264, 3))})["w"].shape == (264, 3)


def test_flax_serializes_no_node_of_ours(mesh):
    """Its bytes would be of one layout. `Checkpointer` and orbax save a state."""
    tx = zero_shard(optax.adamw(1e-2), stage=3, mesh=mesh, tuning=Tuning(persist_below=64))
    stored = tx.shard(PARAMS)
    assert isinstance(stored["odd"], Padded)
    for tree, node in ((stored, "Padded"), (tx.create(PARAMS), "ZeroState")):
        with pytest.raises(TypeError, match=rf"can not serialize '{node}'"):
            flax.serialization.to_bytes(tree)


CHILD = """
import sys, cloudpickle
tx, gradient, step, expected = cloudpickle.load(open(sys.argv[1], "rb"))
import jax
jax.config.update("jax_num_cpu_devices", 8)  # an error once JAX has a backend
import jax.numpy as jnp
mesh = tx.config.user_mesh
assert str(mesh) == expected["mesh"] and [d.id for d in mesh.devices.flat] == expected["ids"], mesh
params = {"w": jnp.linspace(-1, 1, 28).reshape(7, 4), "b": jnp.ones(4)}
assert step.config == tx.config and step.options.accumulate == 2
loss, grads = gradient(tx.shard(params), jnp.asarray(expected["rows"]))
assert abs(float(loss) - expected["loss"]) < 1e-5, loss
"""


@pytest.mark.slow
def test_a_transformation_is_pickled_for_another_process(tmp_path):
    """With functions made by it; axes and the order of devices stay, and loading starts no backend."""
    types, devices = (AxisType.Auto, AxisType.Explicit), jax.devices()[::-1]
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=types, devices=devices)
    mask, schedule = {"w": True, "b": False}, optax.linear_schedule(1e-2, 0, 10)
    tx = zero_shard(
        optax.adamw(schedule), stage=3, mesh=mesh, tuning=Tuning(persist_below=8), trainable=mask, batch_spec=P("data")
    )
    loss = lambda p, rows: jnp.mean((rows @ p["w"][:4] + p["b"]) ** 2)
    params = {"w": jnp.linspace(-1, 1, 28).reshape(7, 4), "b": jnp.ones(4)}
    expected = {"mesh": str(mesh), "ids": [d.id for d in mesh.devices.flat], "rows": np.asarray(ROWS)}
    expected["loss"] = float(loss(params, ROWS))
    what = tx, tx.value_and_grad(loss), tx.train_step(loss, accumulate=2), expected
    (tmp_path / "tx").write_bytes(cloudpickle.dumps(what))
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    subprocess.run([sys.executable, "-c", CHILD, tmp_path / "tx"], env=env, check=True, timeout=300)
    here = cloudpickle.loads(cloudpickle.dumps(tx))
    assert here.config.mesh == tx.config.mesh
    assert repr(here) == repr(tx)
