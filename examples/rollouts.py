"""Train a policy as PPO does, while other devices collect rollouts with weights that are one step old.

    python examples/rollouts.py

Half of the devices (8 simulated ones without GPUs) train at stage 3. The other half has the policy in bfloat16, with
the names and shapes of another framework, and samples actions. Both work at the same time: each trainer keeps its shard
of the old parameters in bfloat16 while the step replaces them, and `jax.device_put` copies the shards to the workers.

The task: of the first four of eight numbers, name the largest.
"""

import sys

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from zerojax import Tuning, logical, zero_shard

NUMBERS, ACTIONS, WIDTH, ROWS, STEPS = 8, 4, 64, 256, 120
CLIP = 0.2


def init(key: jax.Array) -> dict:
    a, b = jax.random.split(key)
    return {
        "up": jax.random.normal(a, (NUMBERS, WIDTH)) / NUMBERS**0.5,
        "shift": jnp.zeros(WIDTH),
        "down": jax.random.normal(b, (WIDTH, ACTIONS)) / WIDTH,
    }


def loss(params: dict, batch: dict) -> jax.Array:
    """The clipped objective of PPO. The ratio corrects for the age of the weights that chose the actions."""
    logits = jnp.tanh(batch["x"] @ params["up"] + params["shift"]) @ params["down"]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["action"][:, None], axis=1)[:, 0]
    ratio = jnp.exp(chosen - batch["logp"])
    advantage = batch["reward"] - batch["reward"].mean()
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage).mean()


@jax.jit
def renamed(params: dict) -> dict:
    """The parameters in the names, shapes and type of the workers, sharded over the trainers as before."""
    up, shift, down = (logical(params)[name].astype(jnp.bfloat16) for name in ("up", "shift", "down"))
    return {"net.0.weight": up.T, "net.0.bias": shift, "net.2.weight": down.T}


@jax.jit
def rollout(weights: dict, key: jax.Array) -> dict:
    """Sample states, actions and rewards. It knows nothing of zerojax: `weights` are plain arrays on the workers."""
    a, b = jax.random.split(key)
    x = jax.random.normal(a, (ROWS, NUMBERS))
    hidden = jnp.tanh(x.astype(jnp.bfloat16) @ weights["net.0.weight"].T + weights["net.0.bias"])
    logp = jax.nn.log_softmax((hidden @ weights["net.2.weight"].T).astype(jnp.float32))
    action = jax.random.categorical(b, logp)
    reward = (action == x[:, :ACTIONS].argmax(1)).astype(jnp.float32)
    return {
        "x": x,
        "action": action,
        "logp": jnp.take_along_axis(logp, action[:, None], axis=1)[:, 0],
        "reward": reward,
    }


class Loop:
    """The trainer's and the workers' devices, and one iteration of both."""

    def __init__(self):
        devices = jax.devices()
        half = max(1, len(devices) // 2)
        of = lambda some: jax.make_mesh((len(some),), ("data",), (AxisType.Auto,), devices=some)
        trainers, workers = of(devices[:half]), of(devices[half:] or devices)
        self.tx = zero_shard(optax.adam(1e-2), stage=3, mesh=trainers, tuning=Tuning(persist_below=1))
        self.step = self.tx.train_step(loss)
        self.rows = NamedSharding(trainers, PartitionSpec("data"))
        self.everywhere = NamedSharding(workers, PartitionSpec())

    def handed_over(self, weights: dict) -> dict:
        """Copy tensors to the workers."""
        return jax.device_put(weights, self.everywhere)

    def iterate(self, state, weights: dict, batch: dict, key: jax.Array) -> tuple:
        """Train on a batch while the workers sample the next one with weights that are one step old."""
        sampled = rollout(weights, jax.device_put(key, self.everywhere))
        held = renamed(state.params)
        # The step uses up the old parameters, but not the held ones.
        state, _ = self.step(state, jax.device_put(batch, self.rows))
        return state, self.handed_over(held), sampled


def train(key: jax.Array, steps: int = STEPS) -> list[float]:
    """The mean reward of each batch."""
    loop = Loop()
    state = loop.tx.create(loop.tx.init_params(init, key))
    weights, rewards = loop.handed_over(renamed(state.params)), []
    batch = rollout(weights, jax.device_put(key, loop.everywhere))
    for i in range(steps):
        rewards.append(float(batch["reward"].mean()))
        state, weights, batch = loop.iterate(state, weights, batch, jax.random.fold_in(key, i + 1))
    return rewards


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    rewards = train(jax.random.key(0), int(sys.argv[1]) if len(sys.argv) > 1 else STEPS)
    print(f"Mean reward: {rewards[0]:.2f} at first, {rewards[-1]:.2f} after {len(rewards)} steps (chance: 0.25)")


if __name__ == "__main__":
    main()
