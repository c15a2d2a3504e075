"""Idioms of optax's gallery and documentation, written once for plain JAX and for zerojax, as in `guides`."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from guides import batches, error, fit, idiom, params


@idiom
def learned_learning_rate(way):
    """The gradient of a learning rate through two steps of Adam."""
    tx = way.optimizer(optax.inject_hyperparams(optax.adam)(1e-2, eps=1e-2))
    params_ = way.shard(tx, params())
    state, grad = tx.init(params_), way.value_and_grad(tx, error)
    first, second, held_out = batches()

    def after(rate, params, state):
        state = optax.tree.set(state, learning_rate=rate)
        for batch in (first, second):
            updates, state = tx.update(grad(params, batch)[1], state, params)
            params = optax.apply_updates(params, updates)
        return grad(params, held_out)[0], (params, state)

    outer, rate, seen = jax.jit(jax.value_and_grad(after, has_aux=True)), jnp.float32(0.02), []
    for _ in range(2):
        (value, (params_, state)), slope = outer(rate, params_, state)
        rate = rate * jnp.exp(-0.02 * slope)
        seen += [value, slope]
    return seen, way.unshard(tx, params_)


@idiom
def sharpness_aware_opaque(way):
    """`update` takes the gradient anew, where it needs one."""
    away = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    tx = way.optimizer(optax.contrib.sam(optax.sgd(0.1), away, sync_period=2, opaque_mode=True))
    params_ = way.shard(tx, params())
    state = tx.init(params_)

    @jax.jit
    def step(params, state, batch):
        value, grads = way.value_and_grad(tx, error)(params, batch)
        again = lambda params, _: jax.grad(error)(params, batch)
        updates, state = tx.update(grads, state, params, grad_fn=again)
        return optax.apply_updates(params, updates), state, value

    for batch in batches():
        params_, state, value = step(params_, state, batch)
    return value, way.unshard(tx, params_)


@idiom
def projected_to_simplex(way):
    """All weights together are a distribution: padding must not be a part of it."""
    return fit(way, error, after=partial(optax.projections.projection_simplex, scale=150.0))


@idiom
def momentum_by_hand(way):
    """Utilities over trees instead of a transformation: moments, norms, and an average of the iterates."""
    tx = way.optimizer(optax.identity())
    params_ = way.shard(tx, params())

    @jax.jit
    def step(params, moment, average, batch):
        value, grads = way.value_and_grad(tx, error)(params, batch)
        grads = optax.tree.scale(1 / jnp.maximum(1.0, optax.tree.norm(grads)), grads)
        moment = optax.tree.update_moment(grads, moment, 0.9, 1)
        params = optax.tree.add_scale(params, -0.5, optax.tree.bias_correction(moment, 0.9, 1))
        away = optax.tree.norm(optax.tree.sub(params, average)), optax.tree.vdot(params, moment)
        return params, moment, optax.tree.add_scale(average, 0.5, optax.tree.sub(params, average)), (value, away)

    moment, average, seen = optax.tree.zeros_like(params_), params_, []
    for batch in batches():
        params_, moment, average, values = step(params_, moment, average, batch)
        seen.append(values)
    return seen, way.unshard(tx, params_), way.unshard(tx, average)
