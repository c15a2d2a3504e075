"""Which leaves may lie flat is read off the traced update, and never guessed."""

import chex
import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest

from zerojax import zero_shard
from zerojax.config import DataMesh, LayoutPolicy
from zerojax.layout.tree import lay_out, params_of_state
from zerojax.optim.elementwise import elementwise_leaves

PARAMS = {"matrix": jnp.ones((4, 5)), "vector": jnp.ones(5), "scalar": jnp.ones(()), "large": jnp.ones((64, 64))}
SMALL = {"matrix", "vector", "scalar"}


def flat(tx):
    """Names of the leaves found to be updated element by element."""
    layout = lay_out(PARAMS, LayoutPolicy(2, DataMesh.for_stage({"data": 8}, ("data",), 2), 100))
    state = jax.eval_shape(tx.init, PARAMS)
    return {sorted(PARAMS)[i] for i in elementwise_leaves(tx, layout, state, params_of_state(state, layout))}


def per_leaf(fn):
    """A stateless transformation that applies `fn` to each leaf."""
    return optax.stateless(lambda updates, params: jax.tree.map(fn, updates))


def warmup(count):
    """A `while` is no elementwise primitive, but its scalar result is the same for every element."""
    return jax.lax.while_loop(lambda rate: rate * count > 1, lambda rate: rate / 2, 0.1)


def needs_value(updates, state, params=None, *, value):
    return jax.tree.map(lambda g: g * value, updates), state


def measuring(measure):
    return optax.chain(optax.snapshot("measured", measure), optax.adam(1e-3))


@pytest.mark.parametrize(
    ("tx", "expected"),
    [
        (optax.adamw(optax.cosine_decay_schedule(1e-3, 10)), SMALL),
        (optax.sgd(1.0, momentum=0.9, nesterov=True), SMALL),
        (optax.lion(1e-3), SMALL),
        (optax.rmsprop(1e-3), SMALL),
        (optax.chain(optax.clip(1.0), optax.adam(1e-3)), SMALL),
        (optax.inject_hyperparams(optax.adamw)(1e-3), SMALL),
        (optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(), SMALL),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), SMALL),  # padding adds nothing to the norm
        (optax.adamw(1e-3, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)), {"vector", "scalar"}),
        (optax.masked(optax.adam(1e-3), {k: k != "vector" for k in PARAMS}), SMALL),
        (optax.lamb(1e-3), set()),  # a norm of each leaf's own update
        (
            optax.adaptive_grad_clip(0.1),
            {"vector", "scalar"},
        ),  # a norm of the whole leaf, or of its columns
        (optax.adafactor(1e-3, min_dim_size_to_factor=2), set()),
        (optax.contrib.muon(1e-3), {"vector", "scalar"}),  # matrices are orthogonalised, others are adam's
        (optax.add_noise(0.1, 0.5, jax.random.key(0)), set()),  # the draw depends on the shape
        (optax.centralize(), {"vector", "scalar"}),
        (optax.apply_if_finite(optax.adam(1e-3), 3), set()),
        (optax.normalize_by_update_norm(), SMALL),
        (per_leaf(lambda g: g * (g / 2).sum()), SMALL),  # padding adds zero to this sum, and to the next two
        (per_leaf(lambda g: g * (g**2).sum()), SMALL),
        (per_leaf(lambda g: g * jnp.where(g > 1, g, 0.0).sum()), SMALL),
        (optax.sgd(warmup), SMALL),
        (optax.stateless(lambda u, _: {**u, "vector": u["vector"] * u["scalar"]}), {"matrix", "scalar"}),
        (optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), needs_value), set()),
        (measuring(lambda u: jnp.mean(u["matrix"])), {"vector", "scalar"}),  # the state must have logical shapes
        (measuring(lambda u: u["matrix"][0]), {"vector", "scalar"}),
        (measuring(lambda u: jnp.max(u["vector"]) + u["scalar"]), {"matrix"}),
        (measuring(optax.tree.norm), SMALL),
    ],
)
def test_the_leaves_found(tx, expected):
    assert flat(tx) == expected


@pytest.mark.parametrize(
    "fn",
    [
        lambda g: jnp.cumsum(g.reshape(-1)).reshape(g.shape),
        lambda g: g - g.mean(),
        lambda g: g[::-1] if g.ndim else g + g.sum(),
        lambda g: jnp.sort(g.reshape(-1)).reshape(g.shape),
        lambda g: g * jnp.exp(g).sum(),  # padding would add exp(0)
        lambda g: g + jnp.arange(g.size, dtype=g.dtype).reshape(g.shape),
        lambda g: g * g.size,  # the program itself depends on the shape
        lambda g: g * (g / (g * 2)).sum(),  # 0/0 in the padding
        lambda g: g * (g / 0.0).sum(),
        lambda g: g * (g**-2).sum(),
        lambda g: g * jnp.where(g > 1, g, 1.0).sum(),
        lambda g: g * jnp.ones_like(g).sum(),  # a count of elements in disguise
        lambda g: g / jnp.full_like(g, 0.5).sum(),
    ],
)
def test_what_is_not_elementwise_is_refused(fn):
    assert flat(per_leaf(fn)) == set()


@pytest.mark.parametrize("rate", [1e-3, 0.0])
def test_a_traced_hyperparameter_makes_no_difference(rate):
    """A factory may be called with one under `jax.jit`, as `optax.inject_hyperparams` calls it: init has no tracer."""
    tx = lambda rate: optax.chain(optax.clip_by_global_norm(rate), optax.adamw(rate, weight_decay=rate))
    traced = []
    jax.make_jaxpr(lambda rate: traced.append(flat(tx(rate))) or rate)(rate)
    assert traced == [flat(tx(jnp.asarray(rate)))] == [SMALL]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.adam(1e-3), optax.snapshot("measured", lambda u: jax.tree.map(jnp.mean, u))),
        optax.ema(0.9),
    ],
)
@pytest.mark.parametrize("params", [jnp.asarray(2.0), {"matrix": jnp.arange(15.0).reshape(3, 5)}])
def test_the_state_is_that_of_one_device(tx, params, mesh):
    sharded = zero_shard(tx, stage=3, mesh=mesh)
    grads = jax.tree.map(lambda x: x + 1, params)
    state, expected = sharded.init(params), tx.init(params)
    for _ in range(2):
        updates, state = sharded.update(grads, state, params)
        plain, expected = tx.update(grads, expected, params)
    chex.assert_trees_all_close(updates, plain)
    logical = lambda x, like: x if x.shape == like.shape else x[: like.size].reshape(like.shape)
    chex.assert_trees_all_close(jax.tree.map(logical, state, expected), expected)


def test_hyperparameters_injected_around_a_sharded_factory(mesh):
    """The state is that of the factory without them, and the update the same."""
    factory = lambda learning_rate: zero_shard(optax.adam(learning_rate), stage=2, mesh=mesh)
    params = {"matrix": jnp.ones((3, 5))}
    injected = optax.inject_hyperparams(factory)(learning_rate=1e-2)
    updates, state = jax.jit(injected.update)(params, jax.jit(injected.init)(params), params)
    expected, plain = factory(1e-2).update(params, factory(1e-2).init(params), params)
    chex.assert_trees_all_equal_shapes_and_dtypes(state.inner_state, plain)
    chex.assert_trees_all_close((updates, state.inner_state), (expected, plain))
