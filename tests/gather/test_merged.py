"""Work that a loss asks for twice is done once at stage 3, as under plain jit."""

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of, quick_or_slow

from zerojax import block, collectives, jaxprs, zero_shard
from zerojax.gather.merged import merged
from zerojax.inspect.hlo import read
from zerojax.inspect.roofline import kernels, product_flops

ROWS, WIDTH, LAYERS = 16, 64, 3


def generate(wrap, params, x):
    for w in params["generator"]:
        x = wrap(lambda w, x: jax.nn.relu(x @ w))(w, x)
    return x


def gan(wrap, params, batch):
    """Calls the generator for its own loss and once more for the critic's."""
    fooled = jnp.mean(generate(wrap, params, batch) @ jax.lax.stop_gradient(params["critic"]))
    fake = jax.lax.stop_gradient(generate(wrap, params, batch))
    return fooled + jnp.mean(jax.nn.softplus(fake @ params["critic"]))


WRAPS = {"bare": lambda fn: fn, "remat": jax.checkpoint, "block": block}


def setup(key=0):
    keys = jax.random.split(jax.random.key(key), LAYERS + 2)
    w = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys]
    return {"generator": w[:LAYERS], "critic": w[LAYERS]}, jax.random.normal(keys[-1], (ROWS, WIDTH))


@pytest.mark.quick(1)
@pytest.mark.parametrize("wrap", quick_or_slow([(name,) for name in WRAPS], [("bare",), ("block",)]))
def test_a_block_that_is_called_twice_on_the_same_is_computed_once(wrap):
    params, batch = setup()
    tx = zero_shard(optax.sgd(1e-3), stage=3, mesh=mesh_of(8), persist_below=1)
    gradient = lambda loss: jax.jit(tx.value_and_grad(loss)).lower(tx.shard(params), batch).compile()

    def once(params, batch):
        fake = generate(WRAPS[wrap], params, batch)
        fooled = jnp.mean(fake @ jax.lax.stop_gradient(params["critic"]))
        return fooled + jnp.mean(jax.nn.softplus(jax.lax.stop_gradient(fake) @ params["critic"]))

    twice, reused = gradient(lambda *args: gan(WRAPS[wrap], *args)), gradient(once)
    flops = lambda compiled: sum(product_flops(kernels(read(compiled))).values())
    assert flops(twice) == flops(reused)
    assert collectives(twice).moved().elements == collectives(reused).moved().elements


def test_gradients_are_those_of_plain_jit():
    params, batch = setup()
    tx = zero_shard(optax.sgd(1e-3), stage=3, mesh=mesh_of(8), persist_below=1)
    loss = lambda *args: gan(jax.checkpoint, *args)
    value, grads = tx.value_and_grad(loss)(tx.shard(params), batch)
    expected, plain = jax.jit(jax.value_and_grad(loss))(params, batch)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(tx.unshard(grads)), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)  # sums over devices in another order


def critic(params, x, act=jnp.tanh):
    for w in params["generator"]:
        x = act(x @ w)
    return (x @ params["critic"]).sum(-1)


stop = jax.lax.stop_gradient


def gradient_penalty(params, x):
    """R1: the critic inside of a derivative, and the same critic on the same rows outside."""
    slopes = jax.grad(lambda x: critic(params, x, jax.nn.silu).sum())(x)
    return jnp.mean(jnp.sum(slopes**2, -1)) + jnp.mean(critic(params, x, jax.nn.silu))


def penalty_after(params, x):
    """The same with the plain call first, and an activation with a derivative rule."""
    out = critic(params, x, jax.nn.relu)
    return jnp.mean(out**2) + jnp.mean(jax.grad(lambda x: critic(params, x, jax.nn.relu).sum())(x) ** 2)


def adversarial(params, x):
    """A critic for whose loss its rows are constant, and for whose other loss its parameters are."""
    fake = jnp.tanh(x @ params["generator"][0])
    return jnp.mean(critic(params, stop(fake)) ** 2) - jnp.mean(critic(stop(params), fake))


def self_taught(params, x):
    """A network that predicts the output of a copy of its own, whose parameters are constant."""
    return jnp.mean((critic(params, x) - 0.9 * critic(stop(params), x) - 1) ** 2) + jnp.mean(critic(params, x))


TWICE = {  # a loss, and its products: those of one pass of the critic, and of its derivative
    "gradient penalty": (gradient_penalty, 2 * (LAYERS + 1)),
    "penalty after": (penalty_after, 2 * (LAYERS + 1)),
    "adversarial": (adversarial, 1 + LAYERS + 1),
    "self-taught": (self_taught, LAYERS + 1),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_network_that_is_called_several_times_has_its_products_once(name):
    loss, products = TWICE[name]
    params, batch = setup()
    closed = jax.make_jaxpr(loss)(params, batch)
    found = merged(closed.jaxpr, closed.jaxpr.invars[:-1])
    run = lambda *args: jaxprs.inline_calls(found, closed.consts, *jax.tree.leaves(args))[0]
    forward = jax.make_jaxpr(lambda *args: jax.vjp(run, *args)[0])(params, batch).jaxpr
    assert sum(eqn.primitive.name == "dot_general" for eqn in jaxprs.alive(forward)) == products
    again, plain = (jax.jit(jax.value_and_grad(fn))(params, batch) for fn in (run, loss))
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)  # sums of cotangents in another order


def noise(w, x, key):
    return x @ w + jax.random.normal(key, x.shape)


def with_own_rule(slope, x):
    """Return `relu(x)` with this slope in its derivative. Each call makes a new function for the rule."""
    relu = jax.custom_jvp(lambda x: jnp.maximum(x, 0.0))
    relu.defjvp(lambda primals, tangents: (relu(*primals), slope * tangents[0]))
    return relu(x)


PAIRS = {
    "one input": (lambda w, x, k: (x @ w, x @ w), True),
    "equal inputs": (lambda w, x, k: (jnp.tanh(x) @ w, jnp.tanh(x) @ w), True),
    "one key": (lambda w, x, k: (noise(w, x, k), noise(w, x, k)), True),
    "equal rules": (lambda w, x, k: [with_own_rule(slope, x @ w) for slope in (2.0, 2.0)], True),
    "other rules": (lambda w, x, k: [with_own_rule(slope, x @ w) for slope in (2.0, 3.0)], False),
    "other inputs": (lambda w, x, k: (x @ w, (x + 1) @ w), False),
    "other keys": (lambda w, x, k: (noise(w, x, k), noise(w, x, jax.random.fold_in(k, 1))), False),
    "one is not differentiated": (lambda w, x, k: (x @ w, x @ jax.lax.stop_gradient(w)), False),
    "other types": (lambda w, x, k: (x @ w, jnp.matmul(x, w, precision="highest")), False),
    "a call": (lambda w, x, k: (x @ w, jax.jit(lambda x: (x + 1, x @ w))(x)[1]), True),
    "other calls": (lambda w, x, k: (jax.jit(lambda x: x @ w + 1)(x), jax.jit(lambda x: x @ w + 2)(x)), False),
    "integers": (lambda w, x, k: [x.astype(int) @ w.astype(int) for x in (x, stop(x))], False),
    "kept apart": (lambda w, x, k: [jax.lax.optimization_barrier(x @ w) for _ in range(2)], False),
}


@pytest.mark.parametrize("name", PAIRS)
def test_only_what_is_the_same_is_merged(name):
    fn, same = PAIRS[name]
    args = jnp.eye(4), jnp.ones((2, 4)), jax.random.key(0)
    closed = jax.make_jaxpr(fn)(*args)
    found = merged(closed.jaxpr, closed.jaxpr.invars[:1])
    assert (found.outvars[0] is found.outvars[1]) == same
    before, after = (jax.core.eval_jaxpr(jaxpr, closed.consts, *args) for jaxpr in (closed.jaxpr, found))
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_is_computed_of_weights_or_of_no_weight_stays():
    def fn(w, x):
        masks = [jnp.where(jnp.arange(4) > 1, 0.0, 1.0) * w.T for _ in range(2)]
        rows = [jnp.sin(x) for _ in range(2)]
        return [row @ mask for row, mask in zip(rows, masks, strict=True)]

    jaxpr = jax.make_jaxpr(fn)(jnp.eye(4), jnp.ones((2, 4))).jaxpr
    found = merged(jaxpr, jaxpr.invars[:1])
    count = lambda jaxpr, name: sum(eqn.primitive.name == name for eqn in jaxpr.eqns)
    assert [count(found, name) for name in ("transpose", "mul", "sin", "dot_general")] == [2, 2, 2, 1]
