"""NNX's transforms inside a loss: they write all variables back, and only those that changed count as assigned."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax.flax_nnx
from zerojax import Tuning, zero_shard

ROWS = jax.random.normal(jax.random.key(0), (8, 4))


class Stack(nnx.Module):
    """A scan over layers under remat, statistics within a jit, and a branch with both."""

    def __init__(self, rngs):
        self.layers = nnx.vmap(lambda rngs: nnx.Linear(4, 4, rngs=rngs))(rngs.split(3))
        self.norm, self.head = nnx.BatchNorm(4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        layer = nnx.remat(lambda layer, x: jnp.tanh(layer(x)))
        x = nnx.scan(lambda x, layers: layer(layers, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
        x = nnx.jit(lambda norm, x: norm(x))(self.norm, x)
        apply = nnx.jit(nnx.remat(lambda head, x: head(x)))
        return nnx.cond(jnp.sum(x) > 1e6, lambda head, x: x, apply, self.head, x)


def loss_fn(model, x):
    return jnp.mean(model(x) ** 2)


@pytest.mark.slow
def test_what_a_transform_writes_back_unchanged_is_not_assigned(mesh):
    plain, sharded = Stack(nnx.Rngs(0)), Stack(nnx.Rngs(0))
    tx = zero_shard(optax.sgd(0.1), stage=3, mesh=mesh, tuning=Tuning(persist_below=0))
    zerojax.flax_nnx.shard_module(sharded, tx)
    expected, grads = nnx.value_and_grad(loss_fn)(plain, ROWS)
    found, found_grads = zerojax.flax_nnx.value_and_grad(tx, loss_fn)(sharded, ROWS)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    pure = nnx.to_pure_dict
    compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    jax.tree.map(compare, pure(tx.unshard(found_grads)), pure(grads))
    compare(sharded.norm.mean[...], plain.norm.mean[...])


@pytest.mark.parametrize("change", [lambda x: 2 * x, jnp.flip, lambda x: x.at[0].set(1)])
def test_what_a_transform_changes_is_refused(change, mesh):
    def scaled(layer, x):
        layer.kernel[...] = change(layer.kernel[...])
        return layer(x)

    loss = lambda model, x: jnp.mean(nnx.jit(nnx.remat(scaled))(model, x) ** 2)
    tx = zero_shard(optax.sgd(0.1), stage=1, mesh=mesh)
    with pytest.raises(TypeError, match="assigns to kernel of argument 0"):
        zerojax.flax_nnx.value_and_grad(tx, loss)(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), ROWS)
