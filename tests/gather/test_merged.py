"""Work that a loss asks for twice is done once at stage 3, as under plain jit."""

import chex
import jax
import jax.core
import jax.numpy as jnp
import pytest

from zerojax import block, jaxprs
from zerojax.gather.merged import merged

ROWS, WIDTH, LAYERS = 16, 64, 3


def setup(key=0):
    keys = jax.random.split(jax.random.key(key), LAYERS + 2)
    w = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys]
    return {"generator": w[:LAYERS], "critic": w[LAYERS]}, jax.random.normal(keys[-1], (ROWS, WIDTH))


def gan(wrap):
    """A loss that calls the generator, once more for the critic."""

    def generate(params, x):
        for w in params["generator"]:
            x = wrap(lambda w, x: jax.nn.relu(x @ w))(w, x)
        return x

    def loss(params, x):
        fooled = jnp.mean(generate(params, x) @ stop(params["critic"]))
        return fooled + jnp.mean(jax.nn.softplus(stop(generate(params, x)) @ params["critic"]))

    return loss


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


TWICE = {  # a loss, and its products: those of one pass of each network, and of the critic's derivative
    "gan": (gan(lambda fn: fn), LAYERS + 1),
    "gan, remat": (gan(jax.checkpoint), LAYERS + 1),
    "gan, block": (gan(block), LAYERS + 1),
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
    alive = [eqn for one in jaxprs.alive(forward) for eqn in jaxprs.with_inner(one)]
    assert sum(eqn.primitive.name == "dot_general" for eqn in alive) == products
    again, plain = (jax.jit(jax.value_and_grad(fn))(params, batch) for fn in (run, loss))
    chex.assert_trees_all_close(again, plain, rtol=1e-7, atol=1e-6)  # sums of cotangents in another order


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
    chex.assert_trees_all_equal(before, after)


def test_what_is_computed_of_weights_or_of_no_weight_stays():
    def fn(w, x):
        masks = [jnp.where(jnp.arange(4) > 1, 0.0, 1.0) * w.T for _ in range(2)]
        rows = [jnp.sin(x) for _ in range(2)]
        return [row @ mask for row, mask in zip(rows, masks, strict=True)]

    jaxpr = jax.make_jaxpr(fn)(jnp.eye(4), jnp.ones((2, 4))).jaxpr
    found = merged(jaxpr, jaxpr.invars[:1])
    count = lambda jaxpr, name: sum(eqn.primitive.name == name for eqn in jaxpr.eqns)
    assert [count(found, name) for name in ("transpose", "mul", "sin", "dot_general")] == [2, 2, 2, 1]
