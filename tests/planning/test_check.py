"""The contract checker: no findings where the contract is kept; else it names leaf and line."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest
import yardstick
from flat_options import tuned
from jax import lax

import zerojax.inspect.compiled_collectives as collectives_module
from zerojax import check, zero_shard
from zerojax.config import PERSIST_BELOW
from zerojax.units import format_bytes

OLD = jax.__version_info__ < (0, 11)


def tiny(scan=True):
    init, loss, (rows, length) = yardstick.build("tiny", scan=scan, width=128, tokens=32, head=32)
    return loss, jax.eval_shape(init, jax.random.key(0)), jax.ShapeDtypeStruct((8 * rows, length), jnp.int32)


SGD = optax.sgd(1e-3)


def checked(mesh, loss, params, batch, tx=SGD, **options):
    tx = zero_shard(tx, mesh=mesh, **tuned(**{"stage": 3, "persist_below": 1, **options}))
    return check(tx.train_step(loss), tx.create(params), batch)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_model_that_keeps_its_contract_has_no_findings(stage, mesh):
    found = checked(mesh, *tiny(), optax.adam(1e-3), stage=stage, persist_below=PERSIST_BELOW)
    assert found.ok, found
    assert found.gathered == pytest.approx(found.gathered_formula, rel=0.02)
    assert str(found).startswith(f"as stage {stage} should be: {format_bytes(found.peak)} per device\n")


@pytest.mark.skipif(OLD, reason="on CPU, jax 0.10 merges the gathers of an unrolled model")
def test_a_parameter_used_in_many_places_is_named(mesh):
    params = dict.fromkeys(("wide", "other"), jax.ShapeDtypeStruct((256, 256), jnp.float32))

    def loss(params, batch):
        for _ in range(6):  # gathered for each, forward and backward: two parameters are more than the largest block
            batch = jnp.tanh(jnp.tanh(batch @ params["wide"]) @ params["other"])
        return batch.mean()

    batch = jax.ShapeDtypeStruct((8, 256), jnp.float32)
    found = checked(mesh, loss, params, batch, optax.adam(1e-3), prefetch=0, persist_below=PERSIST_BELOW)
    assert not found.ok
    first = str(found).partition("\n")[0]
    assert first.startswith("not as stage 3 should be: ")
    assert "gathered beyond the contract. Most: ['wide'] test_check.py:" in str(found)
    assert first.endswith("use it in one layer, or join its uses in one zerojax.block.")


LAYERS, WIDTH = 24, 64
STACK = {"st": jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)}
SQUARE = {"w": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)}
X = jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)


def layer(x, w):
    return jnp.tanh(x @ w)


def layers(stack, x):
    return lax.scan(lambda x, w: (layer(x, w), None), x, stack)[0].mean()


def pruned(p, x):
    w = p["w"] * jax.random.bernoulli(jax.random.key(0), 0.5, p["w"].shape)
    return layer(layer(x, w), w).mean()


@pytest.mark.slow
def test_noise_on_a_stack_is_read_row_by_row(mesh):
    """The backward pass computes each changed layer again, so that it is not kept."""
    noisy = lambda p, x: layers(p["st"] + x[0, 0] * jax.random.normal(jax.random.key(0), p["st"].shape), x)
    found = checked(mesh, noisy, STACK, X)
    assert found.ok, found


CHANGED = {
    "mask": lambda w: w * (jnp.arange(WIDTH) % 3 > 0),
    "weight norm": lambda w: w / jnp.linalg.norm(w, axis=0) * jnp.arange(WIDTH),
}


@pytest.mark.skipif(OLD, reason="on CPU, jax 0.10 keeps what is gathered, too")
@pytest.mark.parametrize("change", CHANGED)
def test_a_weight_that_something_small_changes_is_not_kept(change, mesh):
    def peak(change):
        def loss(params, x):
            for w in params:
                x = layer(x, change(w))
            return x.mean()

        found = checked(mesh, loss, [SQUARE["w"]] * LAYERS, X)
        assert found.ok, found
        return found.peak

    # Kept for the backward pass, the changed weights would be as many bytes again as the parameters, and more.
    assert peak(CHANGED[change]) < peak(lambda w: w) + 3 * WIDTH * WIDTH * 4


def test_what_is_gathered_whole_or_kept_is_named_with_a_remedy(mesh):
    found = checked(mesh, pruned, SQUARE, X)
    assert not found.ok
    named = r"\['w'\] test_check.py:\d+ \(16\.4 kB\)"
    assert re.search(rf"{named} is gathered whole, or kept .*Scan over a stack", str(found)), found


def test_a_loss_that_names_an_axis_cannot_be_compared_with_plain_jit(mesh):
    with pytest.raises(ValueError, match=r"names a mesh axis.*Check it without"):
        checked(mesh, lambda p, x: lax.pmean(x @ p["w"], "data").sum(), SQUARE, X, view="device")


def test_a_models_line_is_named_in_a_clone_that_is_called_as_the_library_is():
    """Of collectives that the engine did not label."""
    frames = (f"{collectives_module.__file__}:7", "/home/me/zerojax/examples/model.py:3")
    assert (
        collectives_module.cause_of(SimpleNamespace(op_name="", frames=frames, name="all-reduce.1", arrays=[1]))
        == frames[1]
    )
