"""What a matrix product costs, for the choice of what is computed once and held."""

import jax
import jax.numpy as jnp
import pytest

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
