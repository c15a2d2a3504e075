"""What follows a partial sum in a backward pass: linear operations keep it divided, and any other operation sums it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import mesh_of
from engine_helpers import QUICK
from jax.experimental.sparse import BCOO
from jax.sharding import PartitionSpec as P

from zerojax.comm import partial_sums
from zerojax.comm.partial_sums import BackwardOptions, PartialSum, as_summands, evaluate_backward
from zerojax.dims import NOWHERE, UNKNOWN, Place, Places, on_dim

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


def mapped(after, axes=("data", "model")):
    """A parameter's gradient in a `shard_map` over all devices, ended by a `psum` and something `after` it."""
    run = lambda x, g: after(jax.lax.psum(x.T @ g, axes))
    return jax.shard_map(run, mesh=mesh_of(4, 2, names=("data", "model")), in_specs=P(axes), out_specs=P())


def ragged(x, g):
    w, sizes = jnp.zeros((3, 3, 5)), jnp.array([7, 1, 8])
    return jax.vjp(lambda w: jax.lax.ragged_dot(x, w, sizes), w)[1](g)[0]


def convolved(x, g):
    return jax.vjp(lambda w: jax.lax.conv(x, w, (1,), "SAME"), jnp.zeros((4, 2, 3)))[1](g)[0]


def grouped(x, g):
    return jax.lax.conv_general_dilated(x, g, (1,), "SAME", feature_group_count=2)


def sparse(x, g):
    places = jnp.array([[0, 1], [2, 0], [1, 3], [2, 2]])
    return jax.vjp(lambda values: x @ BCOO((values, places), shape=(3, 4)), jnp.zeros(4))[1](g)[0]


def scanned(step):
    """A loop over pairs of rows, whose constant is not 0. `step` gets the carry and a product; it returns two sums."""
    two = jnp.float32(2)

    def body(carry, pair):
        return step(carry, two * (pair[0].T @ pair[1]))

    return lambda x, g: jax.lax.scan(body, (jnp.zeros((3, 5)), jnp.zeros((3, 5))), (x, g))


PAIRS = [(2, 8, 3), (2, 8, 5)]
HALF = jnp.array([0, 2] * 4)
ROWS = [(8, 3), (8, 5)]
# `(gradient, shapes of its operands, dims of the rows in them)`. None: the dim is not known, and what is assumed fits.
GRADIENTS = {
    "rows in an inner factor": (lambda x, g: x.reshape(16, 3).T @ g.reshape(16, 5), PAIRS, (1, 1)),
    "rows of one operand": (lambda x, g: jnp.einsum("abi,abj->ij", x, g), [(4, 8, 3), (4, 8, 5)], (1, None)),
    "carry of a loop": (lambda x, g: scanned(lambda c, y: ((y, c[1] + y), None))(x, g)[0][1], PAIRS, (1, 1)),
    "stacked by a loop": (lambda x, g: scanned(lambda c, y: (c, y))(x, g)[1], PAIRS, (1, 1)),
    "no known rows": (lambda x, g: x.T @ g, ROWS, (None, None)),
    "ragged product": (ragged, [(16, 3), (16, 5)], (0, 0)),
    "convolution": (convolved, [(8, 2, 6), (8, 4, 6)], (0, 0)),
    "sparse": (sparse, [(8, 3), (8, 4)], (0, 0)),
    "lookup": (lambda i, g: jnp.zeros((3, 5)).at[:, jnp.abs(i).astype(int)].add(g.T), [(8,), (8, 3)], (0, 0)),
    "lookup of constants": (lambda g: jnp.zeros((3, 5)).at[:, HALF].add(g), [(3, 8)], (1,)),
    "lookup without known rows": (lambda g: jnp.zeros((5, 3)).at[HALF[: len(g)]].add(g), [(8, 3)], (None,)),
    "sum": (lambda g: g.sum(1), [(3, 8)], (1,)),
    "sum without known rows": (lambda g: g.sum((0, 1)), [(8, 3)], (None,)),
    "one piece after psum": (mapped(lambda y: jax.lax.split(y, (3,))[0]), ROWS, (0, 0)),
    "linear after psum": (mapped(lambda y: (3 * -y.T / 2).astype(jnp.bfloat16)), ROWS, (0, 0)),
}
COMPLETE = {
    "too few rows": (lambda x, g: x.T @ g, [(6, 3), (6, 5)], (None, None)),
    "grouped convolution": (grouped, [(2, 8, 6), (4, 4, 6)], (None, None)),
    "write into others": (lambda g: jnp.ones((5, 3)).at[HALF].add(g), [(8, 3)], (0,)),
    "lookup of rows": (lambda g: jnp.zeros((8, 5)).at[:, HALF].add(g), [(8, 8)], (0,)),
    "sum of each row": (lambda g: g.sum(1), [(8, 3)], (0,)),
    "float8 after psum": (mapped(lambda y: y.astype(jnp.float8_e4m3fn)), ROWS, (0, 0)),
    "divided by psum": (mapped(lambda y: 3 / y), ROWS, (0, 0)),
    "squared carry": (lambda x, g: sum(scanned(lambda c, y: ((c[1], y + c[0] ** 2), None))(x, g)[0]), PAIRS, (1, 1)),
    "split after psum": (mapped(lambda y: jnp.split(y, 3)[1]), ROWS, (0, 0)),
}


@functools.cache
def backward_passes():
    """Each gradient as it is left by the backward pass, that of all rows, and that of the first worker's rows."""
    cases, rng = GRADIENTS | COMPLETE, np.random.default_rng(0)
    how = BackwardOptions(mesh_of(WORKERS, 2, names=("data", "model")), ("data",))

    def found(name, args):
        fn, _, dims = cases[name]
        rows = [UNKNOWN if d is None else on_dim(d) for d in dims]
        (result,) = evaluate_backward(jax.make_jaxpr(fn)(*args), args, how, grads=[0], rows=rows)
        if None not in dims or name in COMPLETE:
            return result, fn(*args), None
        return result, fn(*args), fn(*(jnp.split(x, WORKERS, dims[0] or 0)[0] for x in args))

    # Sums of these numbers are exact.
    given = {
        name: [rng.integers(-1, 2, x).astype(np.float32) for x in shapes] for name, (_, shapes, _) in cases.items()
    }
    run = lambda given: {name: found(name, args) for name, args in given.items()}
    return jax.jit(run, compiler_options=QUICK)(given)


@pytest.mark.parametrize("name", [*GRADIENTS, *COMPLETE])
def test_a_gradient_is_a_partial_sum_if_it_is_a_sum_over_rows(name):
    found, expected, own = backward_passes()[name]
    assert found.ndim == expected.ndim + (name in GRADIENTS)
    np.testing.assert_array_equal(found.sum(0) if name in GRADIENTS else found, expected)
    if own is not None:  # what is assumed decides which rows each worker sums
        np.testing.assert_array_equal(found[0], own)
