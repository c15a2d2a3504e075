"""What follows a partial sum in a backward pass: linear operations keep it divided, and any other operation sums it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import mesh_of
from jax.experimental.sparse import BCOO

from zerojax.comm import partial_sums
from zerojax.comm.partial_sums import BackwardOptions, PartialSum, as_summands, evaluate_backward
from zerojax.dims import NOWHERE, Place, Places

WORKERS = 4
OTHER = jnp.arange(6.0).reshape(2, 3) - 2
INDICES = jnp.array([[1], [0]])
NUMBERS = jax.lax.ScatterDimensionNumbers((1,), (0,), (0,))

KEPT = {
    "add": lambda x: x + OTHER,
    "subtract": lambda x: OTHER - x,
    "concatenate": lambda x: jnp.concatenate([OTHER, x]),
    "write into others": lambda x: jax.lax.dynamic_update_slice(jnp.ones((4, 3)), x, (1, 0)),
    "pad": lambda x: jax.lax.pad(x, OTHER[0, 0], [(1, 0, 0), (0, 2, 0)]),
    "select": lambda x: jnp.where(OTHER > 0, x, OTHER),
    "scatter": lambda x: jax.lax.scatter_add(OTHER, INDICES, x, NUMBERS),
    "divide": lambda x: x / 3,
    "multiply": lambda x: x * OTHER,
    "product": lambda x: x @ OTHER.T,
    "narrow": lambda x: x.astype(jnp.bfloat16),
    "complex number": lambda x: jnp.real(jax.lax.complex(x, OTHER) * (2 + 1j)),
    "conjugate": lambda x: jnp.imag(jax.lax.conj(x * 1j)),
    "running sum": lambda x: jnp.cumsum(x, 0),
    "lookup": lambda x: x[jnp.array([1, 0, 1])],
    "fourier transform": lambda x: jnp.real(jnp.fft.rfft(x)),
}
SUMMED = {
    "round to float8": lambda x: x.astype(jnp.float8_e4m3fn),
    "round to integers": lambda x: x.astype(jnp.int32),
    "round to few bits": lambda x: jax.lax.reduce_precision(x, 5, 2),
    "square": lambda x: x * x,
    "divide by": lambda x: OTHER / x,
    "exponential": jnp.exp,
}


def four_workers():
    return BackwardOptions(mesh_of(WORKERS), ("data",))


@pytest.mark.parametrize("operation", [*KEPT, *SUMMED])
def test_operations_on_a_partial_sum(operation):
    fn = {**KEPT, **SUMMED}[operation]
    rows = jnp.arange(WORKERS * 6.0).reshape(WORKERS, 2, 3) / 16 + 1
    closed = jax.make_jaxpr(fn)(rows[0])
    (found,) = evaluate_backward(closed, [PartialSum(rows)], four_workers(), grads=[0], rows=[NOWHERE])
    expected = fn(rows.sum(0))
    assert found.ndim == expected.ndim + (operation in KEPT)
    total = found.astype(jnp.float32).sum(0) if operation in KEPT else found.astype(jnp.float32)
    # bfloat16 rounds each of the four rows to 8 bits.
    np.testing.assert_allclose(total, expected.astype(jnp.float32), rtol=2e-2 if operation == "narrow" else 1e-6)


def test_as_summands_gives_the_sum_to_the_first_worker():
    rows = as_summands(OTHER, WORKERS)
    assert rows.shape == (WORKERS, 2, 3)
    np.testing.assert_array_equal(rows[0], OTHER)
    assert not rows[1:].any()


@pytest.mark.slow
def test_the_gradient_of_a_sparse_weight_is_a_partial_sum():
    places = jnp.array([[0, 1], [2, 0], [1, 3], [2, 2]])
    loss = lambda values, x: jnp.sum((x @ BCOO((values, places), shape=(3, 4))) ** 2)
    given = jnp.arange(4.0) - 1, jnp.arange(24.0).reshape(8, 3) / 9
    rows = [NOWHERE, Places(frozenset({Place(0)}))]
    closed = jax.make_jaxpr(jax.grad(loss))(*given)
    (found,) = evaluate_backward(closed, given, four_workers(), grads=[0], rows=rows)
    assert found.shape == (WORKERS, 4)
    np.testing.assert_allclose(found.sum(0), jax.grad(loss)(*given), rtol=1e-6)  # products in another order


def test_a_sum_over_rows_that_every_row_reads_again_is_no_partial_sum(monkeypatch):
    summed = []

    def backward(given, hidden):  # of `(h @ w) - (h @ w).mean(0)`
        return hidden.T @ (given - jnp.mean(given, 0))

    def sum_per_worker(eqn, *_):
        summed.append(eqn.primitive.name)
        return jnp.zeros((WORKERS, *eqn.outvars[0].aval.shape))

    monkeypatch.setattr(partial_sums, "sum_per_worker", sum_per_worker)
    args, rows = [jnp.ones((8, 3)), jnp.ones((8, 5))], [Places(frozenset({Place(0)}))] * 2
    evaluate_backward(jax.make_jaxpr(backward)(*args), args, four_workers(), grads=[0], rows=rows)
    assert summed == ["dot_general"]
