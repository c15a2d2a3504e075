"""What the published loops leave out, in one of ours.

Batches placed ahead, a schedule, an average of the weights, a teacher, and generation.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from gpt import GPT, generator

from zerojax import Tuning, zero_shard
from zerojax.data import shard_batches

ROWS, LENGTH = 16, 12
MODEL = GPT(width=32, layers=2, heads=2)


def own_rows():
    """The rows of each batch that this process reads: as many on each."""
    draw, count = np.random.default_rng(0), ROWS // jax.process_count()
    for _ in range(4):
        rows = draw.integers(0, 256, (ROWS, LENGTH + 1))
        yield rows[jax.process_index() * count :][:count]


def zero(stage, mesh=None):
    rate = optax.linear_schedule(0.0, 1e-2, 4)
    tx = zero_shard(
        optax.inject_hyperparams(optax.adamw)(rate, eps=1e-3), stage=stage, mesh=mesh, tuning=Tuning(persist_below=100)
    )
    init = lambda key: MODEL.init(key, jnp.zeros((1, LENGTH), jnp.int32))
    teacher = tx.init_params(init, jax.random.key(1))
    teach = tx.eval_step(MODEL.apply)

    def cross_entropy(params, batch):
        logits = MODEL.apply(params, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean(), logits

    def loss_fn(params, batch, teacher):
        loss, logits = cross_entropy(params, batch)
        return loss + jnp.mean((logits - jax.lax.stop_gradient(teach(teacher, batch[:, :-1]))) ** 2)

    state, step = tx.create(tx.init_params(init, jax.random.key(0))), tx.train_step(loss_fn)
    evaluate = tx.eval_step(lambda params, batch: cross_entropy(params, batch)[0])
    average, move, history = jax.tree.map(jnp.copy, state.params), jax.jit(optax.incremental_update), []
    for batch in shard_batches(own_rows(), tx, rows="process", prefetch=2):
        state, metrics = step(state, batch, teacher)
        average = jax.block_until_ready(move(state.params, average, 0.1))
        history += [metrics["loss"], metrics["learning_rate"], evaluate(average, batch)]
    drawn = generator(tx, MODEL, 4, temperature=0)(state.params, np.full((2, 3), 97), jax.random.key(2))
    weighed = jax.jit(lambda tree: sum(jnp.vdot(x, jnp.arange(x.size)) for x in jax.tree.leaves(tree)))
    return [*history, weighed(drawn), weighed(jax.tree.map(jnp.ravel, tx.unshard(state.params))) / 1e4]
