"""Brax's PPO: its environments, networks and loss; updates in nested scans over rollouts, epochs and minibatches."""

import functools

import jax
import jax.numpy as jnp
import optax
from brax import envs
from brax.training import acting
from brax.training.acme import running_statistics, specs
from brax.training.agents.ppo import losses
from brax.training.agents.ppo import networks as ppo_networks

from zerojax import Tuning, zero_shard

ENVS, UNROLL, MINIBATCHES, UPDATES, STEPS = 32, 4, 2, 2, 3
INNER = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-3))


@functools.cache
def parts():
    env = envs.training.wrap(envs.get_environment("fast"), episode_length=10)
    factory = functools.partial(ppo_networks.make_ppo_networks, preprocess_observations_fn=running_statistics.normalize)
    network = factory(2, env.action_size, policy_hidden_layer_sizes=(32, 32), value_hidden_layer_sizes=(48,))
    loss_fn = functools.partial(losses.compute_ppo_loss, ppo_network=network, entropy_cost=1e-2)
    return env, network, loss_fn


def init_params(key):
    _, network, _ = parts()
    policy, value = jax.random.split(key)
    return losses.PPONetworkParams(network.policy_network.init(policy), network.value_network.init(value))


def init_normalizer():
    return running_statistics.init_state(specs.Array((2,), jnp.dtype("float32")))


def rollout(params, normalizer, state, key):
    env, network, _ = parts()
    policy = ppo_networks.make_inference_fn(network)((normalizer, params.policy, params.value))
    state, data = acting.generate_unroll(env, state, policy, key, UNROLL, extra_fields=("truncation",))
    data = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), data)  # to rows of environments
    return state, data, running_statistics.update(normalizer, data.observation)


def minibatches(data, key):
    return jax.tree.map(lambda x: jax.random.permutation(key, x).reshape(MINIBATCHES, -1, *x.shape[1:]), data)


def plain():
    env, _, loss_fn = parts()
    tx = INNER
    params = init_params(jax.random.key(0))

    def minibatch_step(normalizer, carry, data):
        params, opt_state, key = carry
        key, key_loss = jax.random.split(key)
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (_, metrics), grads = grad_fn(params, normalizer, data, key_loss)
        updates, opt_state = tx.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state, key), metrics

    def sgd_step(data, normalizer, carry, _):
        params, opt_state, key = carry
        key, key_order, key_step = jax.random.split(key, 3)
        step = functools.partial(minibatch_step, normalizer)
        (params, opt_state, _), metrics = jax.lax.scan(
            step, (params, opt_state, key_step), minibatches(data, key_order)
        )
        return (params, opt_state, key), metrics

    def training_step(carry, _):
        params, opt_state, normalizer, state, key = carry
        key_sgd, key_rollout, key = jax.random.split(key, 3)
        state, data, normalizer = rollout(params, normalizer, state, key_rollout)
        step = functools.partial(sgd_step, data, normalizer)
        (params, opt_state, _), metrics = jax.lax.scan(step, (params, opt_state, key_sgd), length=UPDATES)
        return (params, opt_state, normalizer, state, key), metrics

    @jax.jit
    def train(params, opt_state, key):
        state = env.reset(jax.random.split(jax.random.PRNGKey(2), ENVS))
        carry = (params, opt_state, init_normalizer(), state, key)
        (params, *_), metrics = jax.lax.scan(training_step, carry, length=STEPS)
        return params, metrics

    params, metrics = train(params, tx.init(params), jax.random.key(1))
    return metrics, params


def zero(stage, mesh=None):
    env, _, loss_fn = parts()
    tx = zero_shard(INNER, stage=stage, mesh=mesh, tuning=Tuning(persist_below=20))
    params = tx.init_params(init_params, jax.random.key(0))

    def minibatch_step(normalizer, carry, data):
        params, opt_state, key = carry
        key, key_loss = jax.random.split(key)
        by_batch = lambda params, data, normalizer, key: loss_fn(params, normalizer, data, key)
        grad_fn = tx.value_and_grad(by_batch, has_aux=True)
        (_, metrics), grads = grad_fn(params, data, normalizer, key_loss)
        updates, opt_state = tx.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state, key), metrics

    def sgd_step(data, normalizer, carry, _):
        params, opt_state, key = carry
        key, key_order, key_step = jax.random.split(key, 3)
        step = functools.partial(minibatch_step, normalizer)
        (params, opt_state, _), metrics = jax.lax.scan(
            step, (params, opt_state, key_step), minibatches(data, key_order)
        )
        return (params, opt_state, key), metrics

    def training_step(carry, _):
        params, opt_state, normalizer, state, key = carry
        key_sgd, key_rollout, key = jax.random.split(key, 3)
        state, data, normalizer = rollout(params, normalizer, state, key_rollout)
        step = functools.partial(sgd_step, data, normalizer)
        (params, opt_state, _), metrics = jax.lax.scan(step, (params, opt_state, key_sgd), length=UPDATES)
        return (params, opt_state, normalizer, state, key), metrics

    @jax.jit
    def train(params, opt_state, key):
        state = env.reset(jax.random.split(jax.random.PRNGKey(2), ENVS))
        carry = (params, opt_state, init_normalizer(), state, key)
        (params, *_), metrics = jax.lax.scan(training_step, carry, length=STEPS)
        return params, metrics

    params, metrics = train(params, tx.init(params), jax.random.key(1))
    return metrics, tx.unshard(params)
