"""Stage 3 with `Offload(params="host")`: shards are in host memory, and fetched where they are gathered."""

import dataclasses

import chex
import disk_models
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import fraction
from disk_models import LAYERS, LOSSES, batch_of, model_params

from zerojax import Offload, Precision
from zerojax.layout.leaf import is_chunked

BOTH = Offload(optimizer="host", params="host", update="device")
STATE = dataclasses.replace(BOTH, params=None)
scanned, unrolled = LOSSES["remat_loop"], LOSSES["one_by_one"]


def sharded(offload, devices=8, tx=None, **options):
    return disk_models.sharded(tx, devices, offload=offload, **options)


def trained(tx, loss, steps=2, **options):
    """The state after a few steps, and each step's metrics."""
    step, state, found = tx.train_step(loss, **options), tx.create(model_params()), []
    for seed in range(steps):
        state, metrics = step(state, batch_of(seed))
        found.append(metrics)
    return state, found


def kinds(params):
    found = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x.sharding.memory_kind for path, x in found}


def assert_on_host(params):
    """What is sharded is in host memory, what persists is not."""
    small = {path for path in kinds(params) if "bias" in path}
    wanted = {path: "device" if path in small else "pinned_host" for path in kinds(params)}
    assert kinds(params) == wanted
    assert len(small) == 1


def assert_training_is_the_same(loss, steps=2, accumulate=1, offload=BOTH, **options):
    on_host, on_device = sharded(offload, **options), sharded(dataclasses.replace(offload, params=None), **options)
    have, found = trained(on_host, loss, steps, accumulate=accumulate)
    want, wanted = trained(on_device, loss, steps, accumulate=accumulate)
    assert_on_host(have.params)
    chex.assert_trees_all_equal(on_host.unshard(have.params), on_device.unshard(want.params))
    chex.assert_trees_all_equal(found, wanted)
    first = on_host.unshard(on_host.shard(model_params()))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a != b).any()), on_host.unshard(have.params), first)))


PRECISIONS = {"float32": None, "bf16": Precision.bf16(), "fp16": Precision.fp16(loss_scale=256.0)}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision", "devices"), fraction(2, LOSSES, PRECISIONS, (3, 8)))
def test_every_model_and_precision_trains_the_same(name, precision, devices):
    assert_training_is_the_same(LOSSES[name], steps=3, devices=devices, precision=PRECISIONS[precision])


SETTINGS = {
    "microbatches": {"accumulate": 2},
    "chunks": {"offload": dataclasses.replace(BOTH, chunk_bytes=128)},
    "update on the host": {"offload": dataclasses.replace(BOTH, update="host", chunk_bytes=128)},
    "part of the state": {"offload": dataclasses.replace(BOTH, fraction=0.4)},  # parameters go back from either program
    "no prefetch": {"prefetch": 0},
    "prefetch 2": {"prefetch": 2},
    "each leaf alone": {"bucket_bytes": 0},
    "kept": {"reshard_after_forward": False},
    "clipped": {"tx": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))},
    "reads parameters": {"tx": optax.lamb(1e-2)},
    "full matrices": {"tx": optax.adafactor(1e-2, min_dim_size_to_factor=4)},
    "no state": {"tx": optax.sgd(1e-1)},
}


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "name"), fraction(2, SETTINGS, ["remat_loop", "one_by_one"]))
def test_every_setting_trains_the_same(setting, name):
    assert_training_is_the_same(LOSSES[name], **SETTINGS[setting])


def test_parameters_are_in_host_memory_however_they_are_made():
    tx, params = sharded(BOTH), model_params()
    for made in (tx.init_params(lambda: params), tx.shard(params), tx.shard(jax.tree.map(np.asarray, params))):
        assert_on_host(made)
        chex.assert_trees_all_equal(tx.unshard(made), params)
    shapes = jax.eval_shape(lambda: params)
    assert_on_host(tx.shard(shapes))
    assert_on_host(tx.create(shapes).params)
    where = tx.shardings(params)
    assert where.params["embed"].memory_kind == "pinned_host"
    assert {sharding.memory_kind for sharding in jax.tree.leaves(where.grads)} <= {None, "device"}


@pytest.mark.slow
def test_state_made_from_parameters_on_the_host_is_their_own():
    """The copy shares nothing with what it was made of, and takes another device count's padding too."""
    tx, params = sharded(BOTH, precision=Precision.bf16()), model_params()
    of_three = sharded(BOTH, devices=3).shard(params)
    first = tx.create(of_three)
    assert_on_host(first.params)
    wide = tx.unshard(tx.init_params(lambda: params))
    second = tx.create(tx.init_params(lambda: params))
    chex.assert_trees_all_equal(tx.unshard(first.params), jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    chex.assert_trees_all_equal(wide, params)
    masters = [[x for x in jax.tree.leaves(s.opt_state) if x.ndim] for s in (first, second)]
    chex.assert_trees_all_equal(*masters)
    kept = tx.shard(second.params)
    jax.tree.map(lambda x: x.delete(), second.params)
    chex.assert_trees_all_equal(tx.unshard(kept), tx.unshard(first.params))


@pytest.mark.slow
def test_what_is_frozen_stays_where_and_as_it_is():
    frozen = lambda path, _: "w" not in path
    tx = sharded(BOTH, trainable=frozen)
    state, _ = trained(tx, scanned)
    assert_on_host(state.params)
    found, params = tx.unshard(state.params), model_params()
    chex.assert_trees_all_equal(found["layers"]["w"], params["layers"]["w"])
    on_device, _ = trained(sharded(STATE, trainable=frozen), scanned)
    chex.assert_trees_all_equal(found, tx.unshard(on_device.params))
    assert (found["embed"] != params["embed"]).any()


def test_a_skipped_step_leaves_parameters_bit_for_bit():
    tx = sharded(BOTH)
    step = tx.train_step(lambda params, batch: unrolled(params, batch) * batch["by"].mean(), skip_nonfinite=True)
    rows = {**batch_of(), "by": jnp.full((48,), jnp.inf)}
    state, metrics = step(tx.create(model_params()), rows)
    assert metrics["skipped"]
    assert_on_host(state.params)
    chex.assert_trees_all_equal(tx.unshard(state.params), model_params())


@pytest.mark.slow
def test_a_loop_written_by_hand():
    """`value_and_grad` and `update` take parameters in host memory; what they give is on the device."""

    def run(tx):
        params, gradient = tx.shard(model_params()), tx.value_and_grad(unrolled)
        where, state = tx.shardings(params).params, tx.init(tx.shard(model_params()))
        for seed in range(2):
            _, grads = gradient(params, batch_of(seed))
            updates, state = tx.update(grads, state, params)
            assert set(kinds((grads, updates)).values()) == {"device"}
            moved = optax.apply_updates(jax.device_put(params, jax.memory.Space.Device), updates)
            params = jax.device_put(moved, where)
        return params

    on_host = run(sharded(BOTH))
    assert_on_host(on_host)
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, on_host), jax.tree.map(np.asarray, run(sharded(STATE))))


def transfers(jaxpr, loops=0):
    """`(loops around it, shape)` of each array that a traced program brings from host memory to the device."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "device_put":
            spaces = [atoms[0].aval.memory_space for atoms in (eqn.invars, eqn.outvars)]
            if spaces == [jax.memory.Space.Host, jax.memory.Space.Device]:
                yield loops, eqn.invars[0].aval.shape
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from transfers(inner, loops + (eqn.primitive.name == "scan"))


def gradient_transfers(loss):
    """In device view, where the shape of an array in the program is that of one device's shard."""
    tx = sharded(BOTH, view="device")
    closed = jax.make_jaxpr(tx.value_and_grad(loss))(tx.shard(model_params()), batch_of())
    return list(transfers(getattr(closed, "jaxpr", closed)))


ROW = (16, 3)  # one device's shard of one layer's matrix, on its last dim


def test_in_a_loop_each_iteration_fetches_its_own_layer():
    found = gradient_transfers(scanned)
    assert [shape for loops, shape in found if loops] == [ROW, ROW]  # one in each pass' loop
    assert (LAYERS, *ROW) not in [shape for _, shape in found]
    # both passes have one iteration in their loop and two peeled ones, which fetch for themselves
    assert [shape for loops, shape in found if not loops].count(ROW) == 4


def test_an_unrolled_layer_is_fetched_once_a_use_and_pass():
    found = [shape for _, shape in gradient_transfers(LOSSES["remat_one_by_one"])]
    assert found.count(ROW) == 2 * LAYERS
    assert (LAYERS, *ROW) not in found


def test_a_step_passes_parameters_on_within_host_memory():
    """Donated, they keep their place: no copy of them is made on either side."""
    tx = sharded(BOTH)
    state, step = tx.create(model_params()), tx.train_step(scanned)
    leaves = jax.tree.leaves(state.opt_state, is_leaf=is_chunked)
    here = state.replace(opt_state=[None if is_chunked(x) else x for x in leaves])
    traced = step._executor.resident.trace(here, batch_of())
    text = traced.lower(lowering_platforms=("cuda",)).as_text().split("@main", 1)[1].split("{\n", 1)[0]
    arguments, results = text.split("->", 1)
    assert arguments.count('"pinned_host"') == results.count('"pinned_host"') == 3
    aliased = [one for one in arguments.split("%arg") if '"pinned_host"' in one]
    assert all("aliasing_output" in one or "buffer_donor" in one for one in aliased)


def test_a_state_of_parameters_on_the_device_is_refused():
    state = sharded(STATE).create(model_params())
    with pytest.raises(ValueError, match=r"compute type\), and the step .*compute type, parameters on the host\)"):
        sharded(BOTH).train_step(scanned)(state, batch_of())
