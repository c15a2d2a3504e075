"""Several models in one program, each a short function: an average of weights, a teacher, a GAN, tied weights.

    python examples/several_models.py             all four at stage 3, on all devices or 8 simulated ones
    python examples/several_models.py gan         one of them

Each model has only two matrices, so that little code is not about sharding.
"""

import sys
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax

from zerojax import Tuning, zero_shard

WIDTH, ROWS, STEPS = 64, 32, 150
zero = partial(zero_shard, stage=3, tuning=Tuning(persist_below=1))


def average(key: jax.Array) -> tuple[float, float]:
    """The loss of noisy weights, and of their moving average."""
    tx = zero(optax.sgd(0.1))
    state, move = tx.create(tx.init_params(network(4, 1), key)), jax.jit(optax.incremental_update)
    step, judge, weights = tx.train_step(square_loss), tx.eval_step(square_loss), jax.tree.map(jnp.copy, state.params)
    for k in jax.random.split(key, STEPS):
        state, _ = step(state, noisy(k))
        weights = jax.block_until_ready(move(state.params, weights, 0.05))
    return float(judge(state.params, noisy(key, 0.0))), float(judge(weights, noisy(key, 0.0)))


def distill(key: jax.Array) -> tuple[float, float]:
    """The distance of a student from its teacher, before and after. The teacher's weights are only sharded."""
    tx = zero(optax.adam(1e-2))
    teacher = tx.init_params(network(4, 3), key)
    teach = tx.eval_step(forward)

    def loss(params, x, teacher):
        return jnp.mean((forward(params, x) - jax.lax.stop_gradient(teach(teacher, x))) ** 2)

    state, step, losses = tx.create(tx.init_params(network(4, 3), jax.random.fold_in(key, 1))), tx.train_step(loss), []
    for k in jax.random.split(key, STEPS):
        state, metrics = step(state, jax.random.normal(k, (ROWS, 4)), teacher)
        losses.append(float(metrics["loss"]))
    return losses[0], losses[-1]


def gan(key: jax.Array) -> tuple[float, float]:
    """The distance between the means of generated and real points, before and after. One step has two states."""
    tx = zero(optax.adam(1e-2, b1=0.5))
    generate, judge = tx.eval_step(forward), tx.eval_step(forward)

    def critic_loss(critic, points, generator, noise):
        fake = generate(generator, noise)
        return jnp.mean(jax.nn.softplus(-forward(critic, points)) + jax.nn.softplus(forward(critic, fake)))

    def generator_loss(generator, noise, critic):
        return jnp.mean(jax.nn.softplus(-judge(critic, forward(generator, noise))))

    critic_step, generator_step = tx.train_step(critic_loss), tx.train_step(generator_loss)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(generator, critic, key):
        points, noise = 3 + jax.random.normal(key, (ROWS, 2)), jax.random.uniform(jax.random.fold_in(key, 1), (ROWS, 4))
        critic, _ = critic_step(critic, points, generator.params, noise)
        generator, _ = generator_step(generator, noise, critic.params)
        return generator, critic

    def distance(generator) -> float:
        return float(jnp.abs(generate(generator.params, jax.random.uniform(key, (1024, 4))).mean(0) - 3).max())

    generator, critic = tx.create(tx.init_params(network(4, 2), key)), tx.create(tx.init_params(network(2, 1), key))
    before = distance(generator)
    for k in jax.random.split(key, STEPS):
        generator, critic = jax.block_until_ready(step(generator, critic, k))  # simulated devices run one at a time
    return before, distance(generator)


def tied(key: jax.Array) -> tuple[float, float]:
    """The loss of a network that decodes with the transpose of its encoder's matrix, before and after."""
    tx = zero(optax.adam(1e-2))

    def loss(params, x):
        return jnp.mean((jnp.tanh(x @ params["table"]) @ params["table"].T - x) ** 2)

    state, step, losses = tx.create({"table": jax.random.normal(key, (8, WIDTH)) / 8}), tx.train_step(loss), []
    for k in jax.random.split(key, STEPS):
        state, metrics = step(state, jax.random.normal(k, (ROWS, 8)))
        losses.append(float(metrics["loss"]))
    return losses[0], losses[-1]


def network(inputs: int, outputs: int) -> Callable:
    def init(key: jax.Array) -> dict:
        a, b = jax.random.split(key)
        return {
            "up": jax.random.normal(a, (inputs, WIDTH)),
            "down": jax.random.normal(b, (WIDTH, outputs)) / WIDTH**0.5,
        }

    return init


def forward(params: dict, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["up"]) @ params["down"]


def noisy(key: jax.Array, noise: float = 2.0) -> tuple[jax.Array, jax.Array]:
    x = jax.random.normal(key, (ROWS, 4))
    return x, x.sum(1, keepdims=True) + noise * jax.random.normal(jax.random.fold_in(key, 1), (ROWS, 1))


def square_loss(params: dict, batch: tuple) -> jax.Array:
    x, y = batch
    return jnp.mean((forward(params, x) - y) ** 2)


EXAMPLES: dict[str, Callable] = {f.__name__: f for f in (average, distill, gan, tied)}


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    for name in sys.argv[1:] or EXAMPLES:
        before, after = EXAMPLES[name](jax.random.key(0))
        about = str(EXAMPLES[name].__doc__).partition(". ")[0]
        print(f"{name:8s} {before:.3f} -> {after:.3f}    {about}")


if __name__ == "__main__":
    main()
