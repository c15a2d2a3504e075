"""Idioms of JAX's guides, each a small training loop written once for plain JAX and for zerojax.

An idiom takes `way`, which has the functions that differ, and returns the values that must agree.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from conftest import mesh_of
from flax import nnx
from jax import lax

import zerojax
import zerojax.flax
from zerojax import zero_shard

ROWS = 16
IDIOMS = {}


class Plain:
    """One device: JAX's and optax's own functions."""

    def optimizer(self, tx):
        return tx

    def shard(self, tx, params):
        return params

    def value_and_grad(self, tx, loss, **options):
        return jax.value_and_grad(loss, **options)

    def unshard(self, tx, params):
        return params

    def logical(self, tree):
        return tree

    def evaluate(self, tx, fn):
        return jax.jit(fn)

    def shard_module(self, module, tx, wrt=nnx.Param):
        pass

    def module_grad(self, tx, loss, **options):
        return nnx.value_and_grad(loss, **options)


@dataclass(frozen=True)
class Zero:
    """Eight devices at a stage."""

    stage: int

    def optimizer(self, tx):
        return zero_shard(tx, stage=self.stage, mesh=mesh_of(8), persist_below=100)

    def shard(self, tx, params):
        return tx.shard(params)

    def value_and_grad(self, tx, loss, **options):
        return tx.value_and_grad(loss, **options)

    def unshard(self, tx, params):
        return tx.unshard(params)

    def logical(self, tree):
        return zerojax.logical(tree)

    def evaluate(self, tx, fn):
        return tx.eval_step(fn)

    def shard_module(self, module, tx, wrt=nnx.Param):
        zerojax.flax.shard_module(module, tx, wrt=wrt)

    def module_grad(self, tx, loss, **options):
        return zerojax.flax.value_and_grad(tx, loss, **options)


def idiom(function):
    IDIOMS[function.__name__] = function
    return function


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def params():
    """Padded in storage, sharded evenly, and persistent."""
    return {"w": normal(0, 12, 30) / 4, "b": normal(1, 30) / 4, "v": normal(2, 30, 16) / 4, "c": jnp.zeros(16)}


def batches(steps=3):
    return [(normal(10 + i, ROWS, 12), normal(50 + i, ROWS, 16)) for i in range(steps)]


def predict(p, x):
    return jnp.tanh(x @ p["w"] + p["b"]) @ p["v"] + p["c"]


def error(p, batch):
    return jnp.mean((predict(p, batch[0]) - batch[1]) ** 2)


def adam(rate=3e-2):
    """With a large `eps`: the sign of a gradient that is nearly zero is not compared."""
    return optax.adam(rate, eps=1e-2)


def fit(way, loss, tx=None, start=None, after=None, steps=3, **options):
    """Return the losses of some steps, and the parameters after them."""
    tx = way.optimizer(tx or adam())
    params_ = way.shard(tx, params() if start is None else start)
    state, losses = tx.init(params_), []

    @jax.jit
    def step(params, state, batch):
        value, grads = way.value_and_grad(tx, loss, **options)(params, batch)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params if after is None else way.shard(tx, after(way.logical(params)))), state, value

    for batch in batches(steps):
        params_, state, value = step(params_, state, batch)
        losses.append(value)
    return losses, way.unshard(tx, params_)


@idiom
def linear_solve(way):
    """Ridge regression on learned features by conjugate gradients, differentiated implicitly."""

    def loss(p, batch):
        features = jnp.tanh(batch[0] @ p["w"] + p["b"])
        matrix = lambda u: features.T @ (features @ u) / ROWS + u
        head, _ = jax.scipy.sparse.linalg.cg(matrix, features.T @ batch[1] / ROWS + p["v"], maxiter=40, tol=1e-7)
        return jnp.mean((features @ head - batch[1]) ** 2)

    return fit(way, loss)


@idiom
def newton_direction(way):
    """A Newton step by conjugate gradients, with products of the linearized gradient."""
    tx = way.optimizer(optax.sgd(0.5))
    params_ = way.shard(tx, params())

    @jax.jit
    def step(params, batch):
        grads, product = jax.linearize(lambda p: way.value_and_grad(tx, error)(p, batch)[1], params)
        damped = lambda v: optax.tree.add(product(v), v)
        direction, _ = jax.scipy.sparse.linalg.cg(damped, grads, maxiter=4)
        return optax.apply_updates(params, tx.update(direction, tx.init(params), params)[0])

    for batch in batches(2):
        params_ = step(params_, batch)
    return way.unshard(tx, params_)


@idiom
def epoch_in_a_scan(way):
    """Steps in a scan over stacked batches, each with a key folded from its number."""
    tx = way.optimizer(adam())
    params_ = way.shard(tx, params())

    def loss(p, batch, key):
        return error(p, (batch[0] + 0.1 * jax.random.normal(key, batch[0].shape), batch[1]))

    def step(carry, batch):
        params, state, i = carry
        value, grads = way.value_and_grad(tx, loss)(params, batch, jax.random.fold_in(jax.random.key(0), i))
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state, i + 1), value

    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches())
    (params_, *_), losses = jax.jit(partial(lax.scan, step))((params_, tx.init(params_), 0), stacked)
    return losses, way.unshard(tx, params_)
