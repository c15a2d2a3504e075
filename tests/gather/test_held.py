"""What a matrix product costs, for the choice of what is computed once and held, and gradients of held values."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zerojax import logical, zero_shard
from zerojax.gather.held import product_flops

M, K, N = 3, 5, 7
A, B = jnp.ones((M, K)), jnp.ones((K, N))


def flops(fn, *args):
    return sum(map(product_flops, jax.make_jaxpr(fn)(*args).eqns))


@pytest.mark.parametrize(
    ("fn", "times"),
    [
        (lambda a, b: a @ b, 1),
        (lambda a, b: jnp.tanh(a @ b) + 1, 1),
        (jax.jit(lambda a, b: a @ b), 1),  # a call computes its body once
        (jax.checkpoint(lambda a, b: jax.jit(jnp.matmul)(a, b)), 1),
        (lambda a, b: jax.lax.scan(lambda c, _: (c, a @ b), 0, length=4), 4),
        (lambda a, b: jax.lax.scan(lambda c, _: (c, jax.lax.map(lambda r: r @ b, a)), 0, length=2), 2),
        (lambda a, b: a.sum() + b.sum(), 0),
    ],
)
def test_a_product_costs_two_operations_an_element_and_term_and_a_loop_its_iterations(fn, times):
    assert flops(fn, A, B) == times * 2 * M * K * N


def test_a_batch_of_products_costs_each_of_them():
    stacked = jnp.ones((2, M, K)), jnp.ones((2, K, N))
    assert flops(jnp.matmul, *stacked) == 2 * 2 * M * K * N


def test_a_nonlinear_derivative_of_a_held_value_gets_the_sum_over_all_rows(mesh):
    """In global view, the cotangent of a held value has partial sums, each of which is within the bounds."""
    clipped = jax.custom_vjp(lambda w: w)
    clipped.defvjp(lambda w: (w, None), lambda _, g: (jnp.clip(g, -0.25, 0.25),))

    def loss(p, x):
        k = clipped(p["a"]) @ p["b"]
        return jnp.mean((jnp.tanh(x @ k) @ k.T @ k) ** 2)

    a, b, x = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(24, 24), (24, 40), (16, 24)]))
    params = {"a": a / 5, "b": b / 5}
    tx = zero_shard(optax.sgd(0.1), stage=3, mesh=mesh, view="global", persist_below=100)
    found = logical(jax.jit(tx.value_and_grad(loss))(tx.shard(params), x)[1])
    expected = jax.grad(loss)(params, x)
    assert jnp.max(jnp.abs(expected["a"])) == 0.25
    for name in params:
        # float32 sums of the workers' parts are rounded in another order.
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5 * jnp.max(jnp.abs(expected[name])))
