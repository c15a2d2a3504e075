"""Derivatives of what `value_and_grad` returns, and rules of the user: Hessian-vector products, forward mode."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of, quick_or_slow
from jax.ad_checkpoint import checkpoint_name

from zerojax import Tuning, collectives, zero_shard


def weights(key):
    keys = jax.random.split(jax.random.key(key), 4)
    shapes = {"w": (8, 12), "stack": (3, 12, 12), "padded": (7, 7), "b": (4,)}
    return {name: jax.random.normal(k, shape) / 3 for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


PARAMS, VECTOR, BATCH = weights(0), weights(1), jax.random.normal(jax.random.key(2), (24, 8))


def loss(params, batch):
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w) + x, None))
    x, _ = jax.lax.scan(layer, batch @ params["w"], params["stack"])
    return jnp.mean(jnp.sin(x[:, :7] @ params["padded"]) ** 2) + jnp.mean(x[:, :4] * params["b"] ** 2)


def products(value_and_grad, params, vector):
    """The derivative of the loss along a vector, and its Hessian times the vector in two ways."""
    gradient = lambda params: value_and_grad(params, BATCH)[1]
    along = lambda params: optax.tree.vdot(gradient(params), vector)
    (slope, forward) = jax.jvp(lambda params: value_and_grad(params, BATCH), (params,), (vector,))[1]
    return slope, forward, jax.grad(along)(params)


@pytest.mark.parametrize(
    ("stage", "view"), quick_or_slow([(3, "global"), (2, "global"), (3, "device")], [(3, "global")])
)
def test_hessian_vector_products(stage, view):
    tx = zero_shard(optax.sgd(0.1), stage=stage, mesh=mesh_of(3), tuning=Tuning(persist_below=10), view=view)
    found = jax.jit(lambda p, v: products(tx.value_and_grad(loss), p, v))(tx.shard(PARAMS), tx.shard(VECTOR))
    slope, *hessian = jax.jit(lambda p, v: products(jax.value_and_grad(loss), p, v))(PARAMS, VECTOR)
    np.testing.assert_allclose(found[0], slope, rtol=1e-5)
    # sums over rows and devices are made in another order
    chex.assert_trees_all_close([tx.unshard(have) for have in found[1:]], hessian, rtol=1e-7, atol=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_no_tracer_is_left_behind(stage, mesh):
    """JAX finds leaked tracers from 0.12 on. A replicated leaf beside a sharded one had its stand-in kept."""
    params = {"w": jnp.ones((16, 8)), "bias": jnp.ones(8)}
    with jax.checking_leaks():
        tx = zero_shard(optax.sgd(0.1), stage=stage, mesh=mesh, tuning=Tuning(persist_below=10))
        gradient = tx.value_and_grad(lambda p, rows: jnp.mean((rows @ p["w"] + p["bias"]) ** 2))
        _, grads = gradient(tx.shard(params), jnp.ones((8, 16)))
    assert set(grads) == set(params)


@pytest.mark.parametrize("view", ["global", pytest.param("device", marks=pytest.mark.slow)])
def test_a_wide_cotangent_of_a_narrow_value_is_refused_by_name(view, mesh):
    """JAX's transpose rules hand it on; the parts of our backward pass cannot, and must not round it silently."""

    @jax.custom_vjp
    def total(x):
        return x.astype(jnp.float32).sum()

    total.defvjp(lambda x: (total(x), x.shape), lambda shape, g: (jnp.full(shape, g, jnp.float32),))
    tx = zero_shard(optax.sgd(0.1), stage=3, mesh=mesh, tuning=Tuning(persist_below=0), view=view)
    params = tx.shard({"w": jnp.ones((16, 4), jnp.bfloat16)})
    gradient = tx.value_and_grad(lambda p, rows: total(p["w"][jnp.array([1, 2, 1])] + rows[0]))
    with pytest.raises(TypeError, match="cotangent of float32 for a value of bfloat16"):
        gradient(params, jnp.ones(8, jnp.bfloat16))


@pytest.mark.slow
def test_what_passes_stop_gradient_has_no_backward_pass(mesh):
    """Not even where it has none, as a loop that ends when a value is reached."""

    def stopped(params, batch):
        x = batch @ params["w"]
        more, step = lambda carry: carry[0] < 3, lambda carry: (carry[0] + 1, jnp.tanh(carry[1] @ params["stack"][0]))
        return jnp.mean((x - jax.lax.stop_gradient(jax.lax.while_loop(more, step, (0, x))[1])) ** 2)

    tx = zero_shard(optax.sgd(0.1), stage=3, mesh=mesh, tuning=Tuning(persist_below=10))
    value, grads = tx.value_and_grad(stopped)(tx.shard(PARAMS), BATCH)
    expected, wanted = jax.value_and_grad(stopped)(PARAMS, BATCH)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    # sums over rows and devices are made in another order
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-6), tx.unshard(grads), wanted)


NEXT = ("jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3")


@pytest.fixture(params=["today", "next"])
def internals(request):
    """The internals that JAX uses today, and those that it will use (jax 0.12)."""
    if request.param == "next" and not hasattr(jax.config, NEXT[-1]):
        pytest.skip("this version of JAX has no other internals")
    if request.param == "next" and jax.config.jax_check_tracer_leaks:
        pytest.skip("with jax_remat3 and a policy, JAX itself leaves a tracer behind")
    before = {name: getattr(jax.config, name, None) for name in NEXT}
    for name in NEXT * (request.param == "next"):
        jax.config.update(name, True)
    yield
    for name in NEXT * (request.param == "next"):
        jax.config.update(name, before[name])


def with_rule(backward):
    """A function of a weight whose backward pass is `backward(weight, cotangent)`."""
    fn = jax.custom_vjp(jnp.sin)
    fn.defvjp(lambda w: (jnp.sin(w), w), lambda w, ct: (backward(w, ct),))
    return fn


straight_through = with_rule(lambda w, ct: jnp.where(jnp.abs(w) < 0.2, ct, 0))
clipped = with_rule(lambda w, ct: jnp.clip(ct, -1e-4, 1e-4))  # not linear: clipped terms do not add up to a clipped sum


@pytest.mark.slow
def test_functions_of_weights_with_derivatives_of_their_own_move_no_more_than_the_weights(mesh, internals):
    policy = jax.checkpoint_policies.save_only_these_names("product")
    params = {name: jax.random.normal(jax.random.key(i), (64, 64)) / 8 for i, name in enumerate("abcd")}
    batch = jax.random.normal(jax.random.key(9), (16, 64))

    def loss(p, x):
        x = jnp.tanh(x @ straight_through(p["a"]))
        block = jax.checkpoint(lambda x, w: jnp.tanh(checkpoint_name(x @ jax.nn.silu(w), "product")), policy=policy)
        x = block(x, p["b"])
        twice = clipped(p["d"])  # its two cotangents are added before they are clipped
        return jnp.mean(((x @ jax.nn.relu(p["c"])) @ twice) @ twice)

    tx = zero_shard(optax.sgd(0.1), stage=3, mesh=mesh, tuning=Tuning(persist_below=10, bucket_bytes=0))
    gradient = jax.jit(tx.value_and_grad(loss)).lower(tx.shard(params), batch).compile()
    moved, size = collectives(gradient), 64 * 64
    # The backward pass begins with `d`, and gathers the others again, if XLA does not merge both gathers.
    assert moved.moved("all-gather").elements == (7 if jax.__version_info__ >= (0, 11) else 4) * size
    assert moved.moved("reduce-scatter").elements == 3 * size
    # Both cotangents of `clipped`, because their sum must be complete before it is clipped.
    assert sum(c.elements for c in moved if c.kind == "all-reduce") < 2.01 * size
    (value, grads), (wanted, plain) = gradient(tx.shard(params), batch), jax.value_and_grad(loss)(params, batch)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    assert (np.abs(plain["d"]) == 1e-4).any()
    # sums over rows and devices are made in another order
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), tx.unshard(grads), plain)
