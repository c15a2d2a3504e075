"""What follows a partial sum in a backward pass: linear operations keep it divided, and any other operation sums it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.comm.partial_sums import Evaluation, PartialSum, as_rows, evaluate
from zerojax.dims import NOWHERE

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
}
SUMMED = {
    "round to float8": lambda x: x.astype(jnp.float8_e4m3fn),
    "square": lambda x: x * x,
    "divide by": lambda x: OTHER / x,
    "exponential": jnp.exp,
}


@pytest.mark.parametrize("operation", [*KEPT, *SUMMED])
def test_operations_on_a_partial_sum(operation):
    fn = {**KEPT, **SUMMED}[operation]
    rows = jnp.arange(WORKERS * 6.0).reshape(WORKERS, 2, 3) / 16 + 1
    closed = jax.make_jaxpr(fn)(rows[0])
    (found,) = evaluate(closed, [PartialSum(rows)], Evaluation(WORKERS, lambda *_: rows), grads=[0], rows=[NOWHERE])
    expected = fn(rows.sum(0))
    assert found.ndim == expected.ndim + (operation in KEPT)
    total = found.astype(jnp.float32).sum(0) if operation in KEPT else found.astype(jnp.float32)
    # bfloat16 rounds each of the four rows to 8 bits.
    np.testing.assert_allclose(total, expected.astype(jnp.float32), rtol=2e-2 if operation == "narrow" else 1e-6)


def test_as_rows_gives_the_sum_to_the_first_worker():
    rows = as_rows(OTHER, WORKERS)
    assert rows.shape == (WORKERS, 2, 3)
    np.testing.assert_array_equal(rows[0], OTHER)
    assert not rows[1:].any()
