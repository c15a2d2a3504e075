"""Batches whose dims behind the rows are divided over axes of the model's, as `batch_spec` says."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absent_gpus import aot
from conftest import mesh_of, quick_or_slow
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from zerojax import Tuning, check, collectives, compare, plan, tiled, zero_shard
from zerojax.data import check_rows_of_processes, shard_batches

SPEC = P("data", "sequence")
KEYS = jax.random.split(jax.random.key(0))
PARAMS = {"w": jax.random.normal(KEYS[0], (8, 16)) / 4, "v": jax.random.normal(KEYS[1], (16, 8)) / 4}
BATCH = {
    "x": np.random.default_rng(0).normal(size=(8, 12, 8)).astype(np.float32),
    "real": np.random.default_rng(1).random((8, 12)) < 0.8,
    "weight": np.linspace(0.5, 1.5, 8, dtype=np.float32),
}


def zero(stage=3, kind=AxisType.Auto, batch_spec=SPEC, **options):
    mesh, tuning = mesh_of(4, 2, names=("data", "sequence"), kind=kind), Tuning(persist_below=1)
    return zero_shard(optax.sgd(1.0), stage=stage, mesh=mesh, batch_spec=batch_spec, tuning=tuning, **options)


def loss(params, batch):
    """Each position by itself, but for the mean of a row."""
    h = tiled(lambda w, x: jnp.tanh(x @ w), tiles=3)(params["w"], batch["x"]) @ params["v"]
    rows = jnp.mean(h**2, axis=(1, 2), where=batch["real"][..., None])
    return jnp.mean(rows * batch["weight"])


def specs_of(tree):
    return {name: x.sharding.spec for name, x in tree.items()}


EXPECTED = {"x": SPEC, "real": SPEC, "weight": P("data")}


def test_every_leaf_is_divided_as_far_as_it_has_dims():
    tx = zero()
    step, state = tx.train_step(loss), tx.create(PARAMS)
    (placed,) = shard_batches([BATCH], tx)
    assert specs_of(placed) == EXPECTED
    for given in (BATCH, placed, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), BATCH)):
        shardings = step.lower(state, given).compile().input_shardings[0][1]
        assert {name: sharding.spec for name, sharding in shardings.items()} == EXPECTED
    in_part = zero(batch_spec={"x": SPEC, "real": P("data"), "weight": P("data")})
    assert specs_of(next(shard_batches([BATCH], in_part))) == {"x": SPEC, "real": P("data"), "weight": P("data")}


@pytest.mark.parametrize(
    ("stage", "view", "kind", "accumulate"),
    quick_or_slow(
        [
            (1, "global", AxisType.Auto, 2),
            (2, "device", AxisType.Auto, 1),
            (3, "device", AxisType.Auto, 1),
            (3, "global", AxisType.Explicit, 1),
        ],
        [(3, "global", AxisType.Auto, 1)],
    ),
)
def test_it_trains_as_on_one_device_and_gathers_no_positions(stage, view, kind, accumulate):
    tx = zero(stage, kind, view=view)
    step, state = tx.train_step(loss, accumulate=accumulate), tx.create(PARAMS)
    moved = collectives(step.lower(state, BATCH).compile())
    along_sequence = [c for c in moved if {0, 1} <= set(c.group)]
    assert {c.kind for c in along_sequence} == {"all-reduce"}  # sums over positions: gradients, and a number a row
    assert max(c.elements for c in along_sequence) <= 2 * 8 * 16 + 8
    state, metrics = step(state, BATCH)
    value, grads = jax.jit(jax.value_and_grad(loss))(PARAMS, BATCH)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    for name, x in tx.unshard(state.params).items():
        np.testing.assert_allclose(x, PARAMS[name] - grads[name], rtol=1e-5, atol=1e-6)


def test_evaluation_divides_what_divides():
    tx = zero()
    evaluate = tx.eval_step(lambda params, x: (x @ params["w"]).sum())
    for shape in ((8, 12, 8), (8, 13, 8), (3, 12, 8)):
        x = np.ones(shape, np.float32)
        np.testing.assert_allclose(evaluate(tx.shard(PARAMS), x), (x @ PARAMS["w"]).sum(), rtol=1e-5)


@pytest.mark.parametrize(
    ("batch_spec", "error", "message"),
    [
        ("sequence", TypeError, "batch_spec= is a jax.sharding.PartitionSpec of mesh axes.*not 'sequence'"),
        ({"x": SPEC, "real": None}, TypeError, "or a tree of them, not None"),
        (P("data", P.UNCONSTRAINED), TypeError, "PartitionSpec of mesh axes"),
        (P("data", "model"), ValueError, r"names axis 'model', and the axes of the mesh are \('data', 'sequence'\)"),
        (P("sequence"), ValueError, r"does not divide dim 0 over axis 'data'.*Begin it with 'data'"),
        (P(None, "sequence"), ValueError, "does not divide dim 0 over axis 'data'"),
        (P("data", "data"), ValueError, "names an axis twice"),
    ],
)
def test_what_a_mesh_cannot_do_is_refused(batch_spec, error, message):
    with pytest.raises(error, match=message):
        zero(batch_spec=batch_spec)


@pytest.mark.parametrize(
    ("batch", "batch_spec", "message"),
    [
        ({"x": np.ones((8, 13, 2))}, SPEC, r"batch\['x'\] over mesh axis 'sequence': its dim 1 .*size of 13.*12 or 14"),
        ({"x": np.ones((8, 12)), "y": np.ones(8)}, {"x": SPEC}, r"batch_spec= is the tree.*Give one spec for all"),
        ({"x": np.ones((6, 12))}, SPEC, "dim 0 has 6 rows"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(batch, batch_spec, message):
    tx = zero(batch_spec=batch_spec)
    fails = lambda params, batch: batch["x"].sum()
    for call in (
        lambda: tx.train_step(fails)(tx.create(PARAMS), batch),
        lambda: next(shard_batches([batch], tx)),
        lambda: compare(tx.train_step(fails), tx.create(PARAMS), batch),
        lambda: jax.jit(tx.value_and_grad(fails)).lower(tx.shard(PARAMS), batch),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_process_gives_its_rows_only_where_it_has_rows_of_its_own():
    devices = lambda of: np.array([SimpleNamespace(process_index=i) for i in of]).reshape(4, 2)
    mesh = lambda of: SimpleNamespace(
        devices=devices(of), axis_names=("data", "sequence"), shape={"data": 4, "sequence": 2}
    )
    check_rows_of_processes(mesh([0, 0, 0, 0, 1, 1, 1, 1]), ("data",))
    check_rows_of_processes(mesh([0, 1] * 4), ("data", "sequence"))
    with pytest.raises(ValueError, match="devices along axis 'sequence' share rows and belong to several processes"):
        check_rows_of_processes(mesh([0, 1] * 4), ("data",))


@pytest.mark.slow
@aot
def test_it_is_planned_and_checked_for_absent_gpus():
    tx = zero()
    step, state = tx.train_step(loss), tx.create(PARAMS)
    batch = jax.tree.map(lambda x: np.repeat(x, 2, 0), BATCH)
    found = plan(step, state, batch, topology="h200:16")
    leaves = {"x": 12 * 8 * 4 / 2, "real": 12 / 2, "weight": 4}  # bytes a row on a device
    assert dict(found.memory)["batch"] == 2 * sum(leaves.values())
    peak = lambda tx: check(tx.train_step(loss), tx.create(PARAMS), batch, topology="h200:16").peak
    assert peak(tx) < peak(zero(batch_spec=None))
    with pytest.raises(ValueError, match="batch_spec"):
        plan.fit(tx, loss, PARAMS, BATCH)
