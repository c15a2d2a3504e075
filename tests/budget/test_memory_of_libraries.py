"""A model of Linen fits into `memory=`, and trains as without it."""

import jax
import numpy as np
import optax
import pytest

from zerojax import zero_shard
from zerojax.inspect.memory import peak_bytes

pytestmark = pytest.mark.slow
ROWS, TOKENS, WIDTH, LAYERS, WORDS = 16, 32, 32, 4, 64
BATCH = jax.random.randint(jax.random.key(1), (ROWS, TOKENS), 0, WORDS)


def next_token_loss(logits, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def linen():
    """Scanned blocks with dropout, and one block under `nn.remat` with a policy of the user."""
    from flax import linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _=None):
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
            y = nn.Dropout(0.1, deterministic=False)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))
            return x + nn.Dense(WIDTH)(y), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(WORDS, WIDTH)
            rngs = {"params": True, "dropout": True}
            x, _ = nn.scan(Block, variable_axes={"params": 0}, split_rngs=rngs, length=LAYERS)()(embed(tokens), None)
            x, _ = nn.remat(Block, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)()(x)
            return embed.attend(x)

    net, key = Net(), jax.random.key(0)
    params = net.init({"params": key, "dropout": key}, BATCH[:1])["params"]
    loss = lambda p, tokens, key: next_token_loss(net.apply({"params": p}, tokens, rngs={"dropout": key}), tokens)
    return params, loss, (jax.random.key(7),)


def trained(tx, step, params, args):
    state, losses = tx.create(params), []
    for _ in range(2):
        state, metrics = step(state, BATCH, *args)
        losses.append(float(metrics["loss"]))
    return losses, jax.device_get(jax.tree.leaves(state.params))


def test_a_model_of_a_library_fits_and_trains_the_same(mesh):
    params, loss, args = linen()
    tx = zero_shard(optax.sgd(1e-2), stage=3, mesh=mesh)
    plain, state = tx.train_step(loss), tx.create(params)
    memory = int(0.8 * peak_bytes(plain.lower(state, BATCH, *args).compile()))
    step = tx.train_step(loss, memory=memory)
    fit = step.memory_fit(state, BATCH, *args)
    assert 0.85 * memory <= fit.chosen.peak <= memory
    assert len(fit.trials) <= 3
    losses, after = trained(tx, step, params, args)
    wanted, arrays = trained(tx, plain, params, args)
    # Recomputed values are rounded in another order: some ulp of the largest element.
    np.testing.assert_allclose(losses, wanted, rtol=1e-6)
    for a, b in zip(after, arrays, strict=True):
        # The gradient of a bias of keys is zero but for rounding.
        np.testing.assert_allclose(a, b, rtol=0, atol=max(1e-5 * np.abs(b).max(), 1e-9))
