"""Both cotangents of a product of activations are computed before one is read, and the cotangents of weights later."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of

from zerojax import Tuning, compat, jaxprs, zero_shard
from zerojax.gather.paired import with_pairs

WIDTH, TOKENS, ROWS, LAYERS = 32, 48, 8, 3


def attention(w, x):
    q, k, v = x @ w["q"], x @ w["k"], x @ w["v"]
    scores = jnp.einsum("btd,bsd->bts", q, k) / WIDTH**0.5
    return x + jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), v)


def loss(params, x, *, remat=False):
    layer = jax.checkpoint(attention) if remat else attention
    return jnp.mean(jax.lax.scan(lambda x, w: (layer(w, x), None), x, params)[0] ** 2)


def weights(*leading):
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (*leading, WIDTH, WIDTH)
    return {name: jax.random.normal(key, shape) / WIDTH**0.5 for name, key in zip("qkv", keys, strict=True)}


def barriers(jaxpr):
    """The numbers of elements that pass each barrier."""
    found = [e for e in jaxprs.equations(jaxpr) if e.primitive.name == "optimization_barrier"]
    return [sorted(v.aval.size for v in e.outvars) for e in found]


@pytest.mark.quick(1)
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("view", ["global", "device"])
def test_a_scan_computes_both_cotangents_of_the_probabilities_product(view, remat):
    """With hybrid sharding, the second step is peeled, too, instead of a loop of one iteration."""
    mesh, tuning = mesh_of(2, 4), Tuning(persist_below=0, shard_axis="gpu")
    tx = zero_shard(optax.sgd(1.0), stage=3, mesh=mesh, axis=("host", "gpu"), view=view, tuning=tuning)
    params, x = weights(LAYERS), jax.random.normal(jax.random.key(1), (ROWS, TOKENS, WIDTH))
    step = jax.jit(tx.value_and_grad(lambda params, x: loss(params, x, remat=remat)))
    traced = step.trace(tx.shard(params), x)
    rows = ROWS if view == "global" else ROWS // mesh.size
    # The first step, the iterations of the loop, and the last step.
    assert barriers(compat.opened(traced.jaxpr)[0]).count([rows * TOKENS * WIDTH, rows * TOKENS * TOKENS]) == 3
    value, grads = step(tx.shard(params), x)
    wanted, plain = jax.value_and_grad(loss)(params, x)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(tx.unshard(grads)), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize(("is_weight", "pairs"), [(False, 1), (True, 0)])
def test_the_cotangent_of_a_weight_may_be_computed_late(is_weight, pairs):
    product = lambda a, b: jnp.einsum("xbd,xfd->xbf", a, b)  # a product of experts, or of two activations
    a, b = jnp.ones((2, 8, 4)), jnp.ones((2, 16, 4))
    ct = jnp.ones((2, 8, 16))

    def backward(a, b, ct):
        return jax.vjp(product, jnp.sin(a), jnp.cos(b))[1](ct)

    jaxpr, consts = compat.opened(jax.make_jaxpr(backward)(a, b, ct))
    jaxpr = with_pairs(jaxpr, [False, is_weight, False])
    assert len(barriers(jaxpr)) == pairs
    for found, wanted in zip(jaxprs.run(jaxpr, consts, a, b, ct), backward(a, b, ct), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_differentiated_checkpoint_stays_behind_a_barrier():
    """Otherwise XLA may compute its forward pass again long before its cotangent is known."""
    w, x = weights(), jnp.ones((ROWS, TOKENS, WIDTH))
    y, pull = jax.vjp(jax.checkpoint(attention), w, x)
    jaxpr = with_pairs(compat.opened(jax.make_jaxpr(pull)(y))[0], [False])
    (again,) = (eqn for eqn in jaxprs.equations(jaxpr) if compat.is_remat(eqn))
    behind = {var for eqn in jaxpr.eqns if eqn.primitive.name == "optimization_barrier" for var in eqn.outvars}
    # With `jax_remat3`, the barrier is an equation. Otherwise the mark makes JAX lower one.
    assert compat.params_of(again).get("differentiated") or behind.issuperset(again.invars)
    assert barriers(jaxpr)[-1] == [ROWS * TOKENS * WIDTH, ROWS * TOKENS * TOKENS]
