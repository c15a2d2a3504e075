"""The parity doctor: what one device and the mesh compute alike passes; what differs, or is not finite, is named."""

import inspect
import json
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from command_line import run
from conftest import mesh_of

from zerojax import Precision, Tuning, compare, zero_shard

PARAMS = {"w": jax.random.normal(jax.random.key(0), (16, 8)) / 4, "b": jnp.full(8, 0.1)}
BATCH = jax.random.normal(jax.random.key(1), (32, 16))


def tx(stage=3, **options):
    return zero_shard(optax.adam(1e-2), stage=stage, mesh=mesh_of(8), tuning=Tuning(persist_below=50), **options)


def compared(tx, loss, params, batch, *args, stages=(0, 1, 2, 3), mutable=None, **options):
    step = tx.train_step(loss, mutable=mutable is not None, **options)
    return compare(step, tx.create(params, mutable=mutable), batch, *args, stages=stages)


def in_batch_negatives(params, batch):
    z = jnp.tanh(batch @ params["w"] + params["b"])
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(z @ z.T)))


def everything_that_a_step_takes(params, mutable, batch, temperature):
    """A weighted loss with mutable state, aux, an argument, and a bias whose gradient is zero but for rounding."""
    h = batch @ params["w"] + params["b"]
    h = jnp.tanh((h - h.mean(1, keepdims=True)) * temperature + params["frozen"])
    mean = 0.9 * mutable["mean"] + 0.1 * h.mean(0)
    return (jnp.sum(h**4), jnp.float32(len(batch))), {"mean": mean}, {"size": jnp.mean(h**2)}


@pytest.mark.slow
def test_a_healthy_model_passes_at_all_stages():
    params = {**PARAMS, "b": jnp.float32(0.1), "frozen": jnp.ones(8)}
    found = compared(
        tx(trainable=lambda path, _: path != "frozen"),
        everything_that_a_step_takes,
        params,
        BATCH,
        jnp.float32(2.0),
        mutable={"mean": jnp.zeros(8)},
        has_aux=True,
        weighted=True,
    )
    assert found.ok, found
    assert found.tolerance == 1e-5
    assert {leaf.stage for leaf in found.leaves} == {0, 1, 2, 3}
    compared_leaves = {"value", "gradient['b']", "gradient['w']", "mutable['mean']", "aux['size']"}
    compared_leaves |= {f"parameters['{name}']" for name in params}
    assert {leaf.quantity + leaf.path for leaf in found.leaves} == compared_leaves
    assert [line.split()[-1] for line in str(found).splitlines()[3:]] == ["same"] * 4


@pytest.mark.slow
def test_rows_that_meet_are_reported_with_value_and_gradient():
    found = compared(tx(view="device"), in_batch_negatives, PARAMS, BATCH, stages=3)
    assert not found.ok
    first = [(d.step, d.quantity + d.path) for d in found.differing[:3]]
    assert first == [(1, "value"), (1, "gradient['b']"), (1, "gradient['w']")]
    assert min(d.difference for d in found.differing[:3]) > 0.1
    assert re.search(r"step 1  value .*\(allowed 1\.0e-05\)  stage 3", str(found))
    assert "rows meet in it" in str(found)


@pytest.mark.slow
def test_a_loss_that_gathers_the_rows_itself_passes():
    def loss(params, batch):
        z = jnp.tanh(batch @ params["w"] + params["b"])
        every = jax.lax.all_gather(z, "data", tiled=True)
        same = jnp.arange(len(z))[:, None] + len(z) * jax.lax.axis_index("data") == jnp.arange(len(every))
        return -jnp.sum(jnp.where(same, jax.nn.log_softmax(z @ every.T), 0)) / len(z)

    found = compared(tx(view="device"), loss, PARAMS, BATCH, stages=3)
    assert found.ok, found


@pytest.mark.slow
def test_narrow_types_are_allowed_their_rounding():
    def loss(params, batch):
        return jnp.mean(jnp.tanh(batch.astype(jnp.bfloat16) @ params["w"]).astype(jnp.float32) ** 2)

    found = compared(tx(precision=Precision.bf16()), loss, {"w": PARAMS["w"]}, BATCH, stages=3, accumulate=2)
    assert found.ok, found
    assert found.tolerance == 2 * 2**-7
    assert max(leaf.difference for leaf in found.leaves) > 1e-5


def normalised(params, batch):
    def layer(h, w):
        h = h @ w
        h = h / jnp.linalg.norm(h, axis=-1, keepdims=True)
        return h, None

    return jnp.mean(jax.lax.scan(layer, batch, params["layers"])[0] ** 4)


def line_of(fn, text):
    lines, first = inspect.getsourcelines(fn)
    (index,) = [i for i, line in enumerate(lines) if text in line]
    return f"test_compare.py:{first + index}"


@pytest.mark.slow
def test_a_nan_is_located_to_the_line_of_the_model():
    layers = {"layers": jnp.stack([jnp.eye(16)] * 3)}
    found = compared(tx(), normalised, layers, BATCH.at[5].set(0), stages=0)
    assert not found.ok
    assert (found.nonfinite.stage, found.nonfinite.step, found.nonfinite.quantity) == (None, 1, "value")
    origin = found.nonfinite.origins[-1]
    assert (origin.kind, origin.primitive, origin.where) == ("nan", "div", line_of(normalised, "linalg.norm"))
    assert str(found).endswith(f"value of step 1 on one device: the first nan is made by div at {origin.where}")


def test_a_nan_of_the_mesh_alone_is_located_too():
    def loss(params, batch):
        return jnp.mean(batch @ params["w"]) + jnp.var(batch, ddof=1, axis=0).mean()

    found = compared(tx(view="device"), loss, {"w": PARAMS["w"]}, BATCH[:8], stages=0)
    assert (found.nonfinite.stage, found.nonfinite.quantity) == (0, "value")
    assert found.nonfinite.origins[-1].where == line_of(loss, "jnp.var")
    assert "at stage 0, and finite on one device" in str(found)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"state": PARAMS}, TypeError, "a state of tx.create, not Step and dict"),
        (
            {"state": tx().create(jax.eval_shape(lambda: PARAMS))},
            ValueError,
            r"params\['b'\] is a shape, float32\[8\].*Give arrays",
        ),
        ({"batch": BATCH[:30]}, ValueError, "its dim 0 has 30 rows"),
        ({"stages": ()}, ValueError, "stages= names no ZeRO stage"),
        ({"stages": (0, 4)}, ValueError, "Unknown ZeRO stage 4"),
    ],
)
def test_wrong_input_is_refused(changes, error, message):
    of_step = tx()
    given = {"step": of_step.train_step(in_batch_negatives), "state": of_step.create(PARAMS), "batch": BATCH}
    with pytest.raises(error, match=message):
        compare(**given | changes)


# What the command line finds in this file.


def make_step(loss=lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)):
    return tx(view="device").train_step(loss), tx(view="device").create(PARAMS), BATCH


def parting():
    return make_step(in_batch_negatives)


def shapes():
    return jax.eval_shape(lambda: 0), *make_step()[1:]


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("", 0, "0           "),
        (":parting", 1, "DIFFERS"),
        (":shapes", 2, "compare takes a step of tx.train_step"),
        ("", 0, {"ok": True, "devices": 8}),
    ],
)
def test_the_command_line_says_so_by_its_exit_status_and_in_json(name, status, said):
    as_json = isinstance(said, dict)
    outcome = run("compare", f"{__file__}{name}", "--stage", "0", *["--json"] * as_json)
    assert outcome.exit_code == status, outcome.output
    assert said.items() <= json.loads(outcome.output).items() if as_json else said in outcome.output
