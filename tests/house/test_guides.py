"""Idioms of the newest guides of JAX, optax and Flax NNX: stages 1 and 3 give what they give without zerojax.

Each is a small training loop. It takes the functions that differ from a `Way`, and returns the values that must agree.
"""

import functools
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of, quick_or_slow
from flax import nnx
from jax import lax

import zerojax
import zerojax.flax_nnx
from zerojax import Tuning, zero_shard

ROWS = 16
IDIOMS = {}


@dataclass(frozen=True)
class Way:
    """Plain JAX on one device, or zerojax on eight at a stage."""

    stage: int | None = None

    @property
    def plain(self):
        return self.stage is None

    def optimizer(self, tx):
        return tx if self.plain else zero_shard(tx, stage=self.stage, mesh=mesh_of(8), tuning=Tuning(persist_below=100))

    def shard(self, tx, params):
        return params if self.plain else tx.shard(params)

    def unshard(self, tx, params):
        return params if self.plain else tx.unshard(params)

    def value_and_grad(self, tx, loss):
        return jax.value_and_grad(loss) if self.plain else tx.value_and_grad(loss)


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


# With a large `eps`: the sign of a gradient that is nearly zero is not compared.
ADAM = optax.adam(3e-2, eps=1e-2)


def fit(way, loss, after=None):
    """Return the losses of some steps, and the parameters after them. `after` changes them after each step."""
    tx = way.optimizer(ADAM)
    params_ = way.shard(tx, params())
    state, losses = tx.init(params_), []

    @jax.jit
    def step(params, state, batch):
        value, grads = way.value_and_grad(tx, loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params if after is None else way.shard(tx, after(zerojax.logical(params)))), state, value

    for batch in batches():
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
    tx = way.optimizer(ADAM)
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


# Of optax.


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


# Of Flax NNX.


class Net(nnx.Module):
    """One weight is padded in storage, one is sharded evenly, biases are persistent."""

    def __init__(self, rngs, first=nnx.Linear, **options):
        self.first = first(12, 30, rngs=rngs, **options)
        self.second = nnx.Linear(30, 16, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.tanh(self.first(x)))


def model_error(model, batch):
    return jnp.mean((model(batch[0]) - batch[1]) ** 2)


def fit_module(way, model, loss=model_error, tx=None, **options):
    """Train a module in place; return the losses and the transformation."""
    tx = way.optimizer(tx or ADAM)
    if not way.plain:
        zerojax.flax_nnx.shard_module(model, tx)
    grad = nnx.value_and_grad if way.plain else partial(zerojax.flax_nnx.value_and_grad, tx)
    optimizer, losses = nnx.Optimizer(model, tx, wrt=nnx.Param), []

    @nnx.jit
    def step(model, optimizer, batch):
        value, grads = grad(loss, **options)(model, batch)
        optimizer.update(model, grads)
        return value

    for batch in batches():
        losses.append(step(model, optimizer, batch))
    return losses, tx


def state_of(way, tx, model):
    """Return the values of a module's parameters, logical."""
    return way.unshard(tx, nnx.to_pure_dict(nnx.state(model, nnx.Param)))


@idiom
def sown_penalties(way):
    """Layers sow penalties, which the loss takes out of the module again."""

    class Sowing(Net):
        def __call__(self, x):
            h = nnx.tanh(self.first(x))
            self.sow(nnx.Intermediate, "penalty", jnp.mean(h**2))
            return self.second(h)

    def loss(model, batch):
        y = model(batch[0])
        sown = nnx.pop(model, nnx.Intermediate)
        return jnp.mean((y - batch[1]) ** 2) + 0.1 * sum(jax.tree.leaves(sown))

    model = Sowing(nnx.Rngs(0))
    losses, tx = fit_module(way, model, loss)
    return losses, state_of(way, tx, model)


@idiom
def views_for_evaluation(way):
    """A view of a trained module evaluates: running averages, no dropout; the module itself stays as it is."""

    class Regular(Net):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.norm, self.drop = nnx.BatchNorm(30, rngs=rngs), nnx.Dropout(0.3, rngs=rngs)

        def __call__(self, x):
            return self.second(self.drop(nnx.tanh(self.norm(self.first(x)))))

    model = Regular(nnx.Rngs(0, dropout=1))
    losses, tx = fit_module(way, model)
    graph, params, rest = nnx.split(nnx.view(model, deterministic=True, use_running_average=True), nnx.Param, ...)
    evaluate = jax.jit if way.plain else tx.eval_step
    of_params = lambda params, batch, rest: model_error(nnx.merge(graph, params, rest), batch)
    evaluated = evaluate(of_params)(params, batches(1)[0], rest)
    more, tx = fit_module(way, model, tx=optax.sgd(0.1))
    return losses, evaluated, more, state_of(way, tx, model), nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))


@idiom
def repeated_layer(way):
    """A layer is applied in `nnx.fori_loop`."""

    class Repeated(Net):
        def __call__(self, x):
            h = nnx.tanh(self.first(x))
            again = lambda _, carry: (carry[0], nnx.tanh(self.first(carry[1][:, :12])) + carry[1])
            _, h = nnx.fori_loop(0, 3, again, (self.first, h))
            return self.second(h)

    model = Repeated(nnx.Rngs(0))
    losses, tx = fit_module(way, model)
    return losses, state_of(way, tx, model)


@idiom
def gradients_of_activations(way):
    """Perturbations, zeros that are added to activations, have their gradients: one per row."""

    class Perturbed(Net):
        def __call__(self, x):
            return self.second(nnx.tanh(self.perturb("hidden", self.first(x))))

    def loss(model, batch):
        _, zeros = nnx.capture(model_error, nnx.Perturbation)(model, batch)
        parts = nnx.split(model)
        of = lambda zeros: nnx.capture(model_error, init=zeros)(nnx.merge(*parts), batch)
        value, slopes = jax.value_and_grad(of)(zeros)
        return value + 10 * jnp.mean(slopes["hidden"][...] ** 2), nnx.to_pure_dict(slopes)

    model = Perturbed(nnx.Rngs(0))
    values, tx = fit_module(way, model, loss, has_aux=True)
    return values, state_of(way, tx, model)


QUICK = [("sharpness_aware_opaque", 3)]


@functools.cache
def plain(name):
    expected = jax.device_get(IDIOMS[name](Way()))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(expected))  # equal NaN would say nothing
    return expected


@pytest.mark.parametrize(
    ("name", "stage"), quick_or_slow([(name, (1, 3, 3)[i % 3]) for i, name in enumerate(IDIOMS)], QUICK)
)
def test_an_idiom_gives_what_it_gives_on_one_device(name, stage):
    found = jax.device_get(IDIOMS[name](Way(stage)))
    # Sums over rows are made in another order, and later steps build on them.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, plain(name))
