"""Idioms of optax's gallery and documentation, written once for plain JAX and for zerojax, as in `guides`."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from guides import adam, batches, error, fit, params, predict
from jax import lax

IDIOMS = {}


def idiom(function):
    IDIOMS[function.__name__] = function
    return function


@idiom
def lookahead(way):
    """The loss reads the fast weights; the optimizer has both."""
    tx = optax.lookahead(way.optimizer(adam()), sync_period=2, slow_step_size=0.5)
    inner = way.optimizer(adam())
    both = optax.LookaheadParams.init_synced(way.shard(inner, params()))
    state = tx.init(both)

    @jax.jit
    def step(both, state, batch):
        value, grads = way.value_and_grad(inner, error)(both.fast, batch)
        updates, state = tx.update(grads, state, both)
        return optax.apply_updates(both, updates), state, value

    for batch in batches(5):
        both, state, value = step(both, state, batch)
    return value, way.unshard(inner, both.fast), way.unshard(inner, both.slow)


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
def perturbed_argmax(way):
    """A loss on an argmax, which noise makes differentiable."""
    hot = lambda logits: jax.nn.one_hot(jnp.argmax(logits, -1), 16)
    soft = optax.perturbations.make_perturbed_fun(hot, num_samples=20, sigma=0.5)

    def loss(p, batch):
        chosen = soft(jax.random.key(3), predict(p, batch[0]))
        return jnp.mean((chosen - jax.nn.softmax(batch[1])) ** 2) * 10

    return fit(way, loss, optax.sgd(0.1))


@idiom
def adversarial_examples(way):
    """Inputs are moved against the model, and projected into a ball, before the loss is taken."""

    def loss(p, batch):
        x, y = batch
        away = jnp.zeros_like(x)
        for _ in range(2):
            slope = jax.grad(lambda away: error(p, (x + away, y)))(away)
            away = optax.projections.projection_linf_ball(away + jnp.tanh(100 * slope), 0.1)
        return (error(p, batch) + error(p, (x + lax.stop_gradient(away), y))) / 2

    return fit(way, loss)


@idiom
def private_gradients(way):
    """The gradient of each example is clipped, and noise is added to their mean."""
    private = optax.contrib.differentially_private_aggregate(0.5, noise_multiplier=0.1, key=jax.random.key(0))
    tx = way.optimizer(adam())
    params_ = way.shard(tx, params())
    state = private.init(params_), tx.init(params_)
    each = jax.vmap(jax.grad(lambda p, x, y: error(p, (x[None], y[None]))), in_axes=(None, 0, 0))
    of_examples = way.evaluate(tx, lambda p, batch: each(p, *batch))

    @jax.jit
    def step(params, state, batch):
        grads, outer = private.update(of_examples(params, batch), state[0], params)
        updates, inner = tx.update(grads, state[1], params)
        return optax.apply_updates(params, updates), (outer, inner)

    for batch in batches():
        params_, state = step(params_, state, batch)
    return way.unshard(tx, params_)


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


@idiom
def until_convergence(way):
    """L-BFGS in a `while_loop` that ends when the gradient is small."""
    tx, batch = way.optimizer(optax.lbfgs(memory_size=3)), batches(1)[0]
    value_fn = way.evaluate(tx, error)
    grad = way.value_and_grad(tx, error)

    def step(carry):
        params, state = carry
        value, grads = grad(params, batch)
        updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=lambda p: value_fn(p, batch))
        return optax.apply_updates(params, updates), state

    def goes_on(carry):
        count, slope = (optax.tree.get(carry[1], name) for name in ("count", "grad"))
        return (count == 0) | ((count < 4) & (optax.tree.norm(slope) > 1e-3))

    params_ = way.shard(tx, params())
    params_, state = jax.jit(lambda *carry: lax.while_loop(goes_on, step, carry))(params_, tx.init(params_))
    return optax.tree.get(state, "count"), way.unshard(tx, params_)


@idiom
def frozen_by_mask(way):
    mask = {"w": True, "b": False, "v": False, "c": True}
    rest = jax.tree.map(lambda frozen: not frozen, mask)
    tx = optax.chain(optax.transforms.selective_transform(adam(), freeze_mask=mask), optax.masked(optax.sgd(0.5), rest))
    return fit(way, error, tx)


@idiom
def target_networks(way):
    """Q-learning: one copy of the weights follows, another is replaced now and then."""
    tx = way.optimizer(adam())
    params_ = way.shard(tx, params())
    follows, replaced, state = params_, params_, tx.init(params_)

    def loss(p, batch, follows, replaced):
        best = jnp.argmax(predict(p, batch[0] + 1), axis=1)
        q = jnp.take_along_axis(predict(follows, batch[0] + 1), best[:, None], 1)[:, 0]
        return jnp.mean(optax.huber_loss(predict(p, batch[0])[:, 0], q)) + error(replaced, batch)

    @jax.jit
    def step(params, follows, replaced, state, batch, i):
        grads = way.value_and_grad(tx, loss)(params, batch, follows, replaced)[1]
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        follows = optax.incremental_update(params, follows, 0.1)
        return params, follows, optax.periodic_update(params, replaced, i, 2), state

    for i, batch in enumerate(batches(4)):
        params_, follows, replaced, state = step(params_, follows, replaced, state, batch, i)
    return [way.unshard(tx, x) for x in (params_, follows, replaced)]


@idiom
def rate_set_in_the_state(way):
    """A rate kept in the state is set from outside, and the moments begin anew."""
    tx = way.optimizer(optax.inject_hyperparams(optax.adam)(1e-2, eps=1e-2))
    params_ = way.shard(tx, params())
    state = tx.init(params_)

    @jax.jit
    def step(params, state, batch):
        updates, state = tx.update(way.value_and_grad(tx, error)(params, batch)[1], state, params)
        return optax.apply_updates(params, updates), state

    for i, batch in enumerate(batches(4)):
        if i == 2:
            fresh = optax.tree.zeros_like(optax.tree.get(state, "mu"))
            state = optax.tree.set(state, learning_rate=jnp.float32(0.1), mu=fresh)
        params_, state = step(params_, state, batch)
    return optax.tree.get(state, "learning_rate"), way.unshard(tx, params_)


# What zerojax refuses by name, with words of the refusal.


def lookahead_inside(way):
    """One transformation of both sets of weights, given the gradient of one."""
    tx = way.optimizer(optax.lookahead(adam(), sync_period=2, slow_step_size=0.5))
    both = way.shard(tx, optax.LookaheadParams.init_synced(params()))
    grads = way.value_and_grad(tx, lambda p, b: error(p.fast, b))(both, batches(1)[0])[1].fast
    return tx.update(grads, tx.init(both), both)[0]


def private_inside(way):
    """A transformation that takes the gradient of each example."""
    private = optax.contrib.differentially_private_aggregate(0.5, noise_multiplier=0.0, key=jax.random.key(0))
    tx = way.optimizer(optax.chain(private, optax.sgd(0.1)))
    params_ = way.shard(tx, params())
    each = jax.vmap(jax.grad(lambda p, x, y: error(p, (x[None], y[None]))), in_axes=(None, 0, 0))
    grads = way.evaluate(tx, lambda p, batch: each(p, *batch))(params_, batches(1)[0])
    return tx.update(grads, tx.init(params_), params_)[0]


def monitored(way):
    """A transformation whose state has another tree after its first update."""
    tx = way.optimizer(optax.chain(optax.monitor({"norm": optax.tree.norm}), adam()))
    params_ = way.shard(tx, params())
    return tx.update(way.value_and_grad(tx, error)(params_, batches(1)[0])[1], tx.init(params_), params_)


REFUSED = {
    monitored: "changes the tree of its state: what update returns has [0].measurements['norm'] beyond that",
    lookahead_inside: "it lacks .fast['b']. Pass the gradients of the parameters given",
    private_inside: "grads['b'] has shape [16, 30], but its parameter has [30]",
}
