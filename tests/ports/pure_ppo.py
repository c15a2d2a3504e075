"""PPO as PureJaxRL has it: one jitted `train(key)` with environments, rollouts and updates inside, seeds by `vmap`."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from zerojax import zero_shard

ENVS, STEPS, EPOCHS, MINIBATCHES, UPDATES, SEEDS = 16, 4, 2, 2, 2, 2
GAMMA, LAMBDA, CLIP, ENTROPY = 0.99, 0.95, 0.2, 0.01
INNER = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(optax.linear_schedule(3e-3, 0.0, 8), eps=1e-5))


class Transition(NamedTuple):
    done: jax.Array
    action: jax.Array
    value: jax.Array
    reward: jax.Array
    log_prob: jax.Array
    obs: jax.Array


class ActorCritic(nn.Module):
    @nn.compact
    def __call__(self, x):
        def tower(outputs, scale):
            h = x
            for _ in range(2):
                h = nn.tanh(nn.Dense(32, kernel_init=nn.initializers.orthogonal(2**0.5))(h))
            return nn.Dense(outputs, kernel_init=nn.initializers.orthogonal(scale))(h)

        return tower(3, 0.01), tower(1, 1.0)[:, 0]


def reset(key):
    """A point on a line, which is to stay near zero."""
    return jax.random.uniform(key, (2,), minval=-1.0)


def env_step(key, state, action):
    velocity = state[1] + 0.2 * (action - 1)
    state = jnp.stack([state[0] + 0.3 * velocity, velocity])
    done = jnp.abs(state[0]) > 2
    return jnp.where(done, reset(key), state), 1 - jnp.abs(state[0]), done


def gae(batch, last):
    def step(carry, t):
        advantage, value = carry
        delta = t.reward + GAMMA * value * (1 - t.done) - t.value
        advantage = delta + GAMMA * LAMBDA * (1 - t.done) * advantage
        return (advantage, t.value), advantage

    _, advantages = jax.lax.scan(step, (jnp.zeros_like(last), last), batch, reverse=True)
    return advantages, advantages + batch.value


def ppo_loss(network, params, batch):
    seen, advantages, targets = batch
    logits, value = network.apply(params, seen.obs)
    log_probs = jax.nn.log_softmax(logits)
    ratio = jnp.exp(jnp.take_along_axis(log_probs, seen.action[:, None], 1)[:, 0] - seen.log_prob)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    actor = -jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages).mean()
    clipped = seen.value + (value - seen.value).clip(-CLIP, CLIP)
    critic = 0.5 * jnp.maximum((value - targets) ** 2, (clipped - targets) ** 2).mean()
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
    return actor + 0.5 * critic - ENTROPY * entropy, jnp.stack([actor, critic, entropy])


def rollout(state, env_state, key):
    def step(carry, _):
        env_state, key = carry
        key, key_action, key_step = jax.random.split(key, 3)
        logits, value = state.apply_fn(state.params, env_state)
        action = jax.random.categorical(key_action, logits)
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
        stepped, reward, done = jax.vmap(env_step)(jax.random.split(key_step, ENVS), env_state, action)
        return (stepped, key), Transition(done, action, value, reward, log_prob, env_state)

    (env_state, _), seen = jax.lax.scan(step, (env_state, key), length=STEPS)
    return env_state, seen


def shuffled(key, batch):
    order = jax.random.permutation(key, ENVS * STEPS)
    rows = lambda x: x.reshape(ENVS * STEPS, *x.shape[2:])[order].reshape(MINIBATCHES, -1, *x.shape[2:])
    return jax.tree.map(rows, batch)


def plain():
    network = ActorCritic()

    def update_minibatch(state, batch):
        def loss_fn(params, batch):
            return ppo_loss(network, params, batch)

        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        loss, grads = grad_fn(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    def update_step(carry, _):
        state, env_state, key = carry
        key, key_rollout, key_epochs = jax.random.split(key, 3)
        env_state, seen = rollout(state, env_state, key_rollout)
        batch = (seen, *gae(seen, state.apply_fn(state.params, env_state)[1]))
        epoch = lambda state, key: jax.lax.scan(update_minibatch, state, shuffled(key, batch))
        state, losses = jax.lax.scan(epoch, state, jax.random.split(key_epochs, EPOCHS))
        return (state, env_state, key), (losses, seen.reward.mean())

    def train(key):
        key, key_params, key_envs = jax.random.split(key, 3)
        params = network.init(key_params, jnp.zeros((1, 2)))
        state = TrainState.create(apply_fn=network.apply, params=params, tx=INNER)
        env_state = jax.vmap(reset)(jax.random.split(key_envs, ENVS))
        (state, *_), metrics = jax.lax.scan(update_step, (state, env_state, key), length=UPDATES)
        return metrics, state.params

    return jax.jit(jax.vmap(train))(jax.random.split(jax.random.key(0), SEEDS))


def zero(stage, mesh=None):
    network, tx = ActorCritic(), zero_shard(INNER, stage=stage, mesh=mesh, persist_below=20)

    def update_minibatch(state, batch):
        def loss_fn(params, batch):
            return ppo_loss(network, params, batch)

        grad_fn = tx.value_and_grad(loss_fn, has_aux=True)
        loss, grads = grad_fn(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    def update_step(carry, _):
        state, env_state, key = carry
        key, key_rollout, key_epochs = jax.random.split(key, 3)
        env_state, seen = rollout(state, env_state, key_rollout)
        batch = (seen, *gae(seen, state.apply_fn(state.params, env_state)[1]))
        epoch = lambda state, key: jax.lax.scan(update_minibatch, state, shuffled(key, batch))
        state, losses = jax.lax.scan(epoch, state, jax.random.split(key_epochs, EPOCHS))
        return (state, env_state, key), (losses, seen.reward.mean())

    def train(key):
        key, key_params, key_envs = jax.random.split(key, 3)
        params = tx.init_params(network.init, key_params, jnp.zeros((1, 2)))
        state = TrainState.create(apply_fn=network.apply, params=params, tx=tx)
        env_state = jax.vmap(reset)(jax.random.split(key_envs, ENVS))
        (state, *_), metrics = jax.lax.scan(update_step, (state, env_state, key), length=UPDATES)
        return metrics, state.params

    return jax.jit(jax.vmap(train))(jax.random.split(jax.random.key(0), SEEDS))
