"""Transformations around `tx` see storage; a warning names those whose result may depend on padding."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of, quick_or_slow

import zerojax
from zerojax import zero_shard

PARAMS = {"w": jax.random.normal(jax.random.key(0), (16, 9)), "u": jnp.ones((14, 3)), "b": jnp.ones(3)}
GRADS = jax.tree.map(lambda x: jnp.cos(7 * x), PARAMS)


def updates_of(transformation, params, grads):
    """Two updates; returns the second, and what was warned of."""
    state = transformation.init(params)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            updates, state = transformation.update(grads, state, params)
    return zerojax.logical(updates), [str(one.message) for one in caught]


def sharded(count=7):
    tx = zero_shard(optax.sgd(0.1), stage=3, mesh=mesh_of(count), persist_below=10)
    return tx, tx.shard(PARAMS), tx.shard(GRADS)


LOOKS_AT_SHAPES = {
    "clip_by_block_rms": (optax.clip_by_block_rms(0.1), optax.chain),
    "scale_by_param_block_rms": (optax.scale_by_param_block_rms(), lambda one, tx: optax.chain(tx, one)),
    "masked": (
        optax.masked(optax.clip_by_block_rms(0.1), lambda tree: jax.tree.map(lambda _: True, tree)),
        optax.chain,
    ),
}


@pytest.mark.parametrize("name", quick_or_slow([(name,) for name in LOOKS_AT_SHAPES], [("scale_by_param_block_rms",)]))
def test_what_counts_padding_is_named_once(name):
    one, chain = LOOKS_AT_SHAPES[name]
    tx, params, grads = sharded()
    _, warned = updates_of(chain(one, tx), params, grads)
    (message,) = warned
    assert message.startswith(f"{name} runs outside of zero_shard")
    assert "params['w'] in storage: padded from [16, 9] to " in message
    assert "Chain it inside: zero_shard(optax.chain" in message


@pytest.mark.parametrize("nested", [False, True])
def test_named_and_nested_chains_are_seen(nested):
    tx, params, grads = sharded()
    one = optax.clip_by_block_rms(0.2)
    around = optax.chain(optax.scale(2.0), one, optax.chain(tx)) if nested else optax.named_chain(("a", one), ("b", tx))
    assert [text.split()[0] for text in updates_of(around, params, grads)[1]] == ["clip_by_block_rms"]


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(optax.clip_by_global_norm(0.1), marks=pytest.mark.slow),
        optax.scale_by_adam(),
        pytest.param(optax.add_decayed_weights(0.1), marks=pytest.mark.slow),
    ],
    ids=["global-norm", "adam", "decay"],
)
def test_what_is_exact_on_storage_is_not_warned_of(one):
    tx, params, grads = sharded()
    found, warned = updates_of(optax.chain(one, tx), params, grads)
    expected, _ = updates_of(optax.chain(one, optax.sgd(0.1)), PARAMS, GRADS)
    assert not warned
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), found, expected)


def test_chained_inside_or_without_padding_nothing_is_warned_of():
    """And the numbers are those of plain optax."""
    expected, _ = updates_of(optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)), PARAMS, GRADS)
    _, params, grads = sharded()
    inside = zero_shard(
        optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)), stage=3, mesh=mesh_of(7), persist_below=10
    )
    even, even_params, even_grads = sharded(2)
    for chain, *given in (
        (inside, params, grads),
        (optax.chain(optax.clip_by_block_rms(0.1), even), even_params, even_grads),
    ):
        found, warned = updates_of(chain, *given)
        assert not warned
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), found, expected)
