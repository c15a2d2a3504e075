"""Which residuals a segment keeps between its passes: activations alone, and no array that gathered parameters give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from zerojax.comm.collectives import Collectives
from zerojax.gather import traced_passes

ROWS, SIZE = 4, 8
W = jax.random.normal(jax.random.key(0), (SIZE, SIZE))
X = jax.random.normal(jax.random.key(1), (ROWS, SIZE))

LOSSES = {
    "product": lambda w, x: jnp.tanh(x @ w),
    "function of the weight": lambda w, x: x @ jnp.tanh(w).T,
    "gain per unit": lambda w, x: jnp.tanh(x @ (w * x[0])),
    "named": lambda w, x: jnp.tanh(x @ checkpoint_name(w, "weight")),
    "mask that is kept": lambda w, x: jnp.tanh(x @ (w * (x.T @ x))),
}
# The mask itself is of the weight's size, and depends on the rows: it is an activation.
SAVED_OF_THE_WEIGHTS_SIZE = {"mask that is kept": 1}


def passes_of(loss):
    run = lambda params, others: [loss(params[0], others[0])]
    return traced_passes(run, [W], [X], trained=[True], active=[True])


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_that_the_gathered_weight_gives_is_kept(name):
    passes = passes_of(LOSSES[name])
    saved = [var.aval.shape for var in passes.forward.jaxpr.outvars[passes.results :]]
    assert saved.count(W.shape) == SAVED_OF_THE_WEIGHTS_SIZE.get(name, 0)
    assert passes.needed == {0}
    assert passes.needed_others == {0}


@pytest.mark.parametrize("name", LOSSES)
def test_the_two_passes_are_the_function_and_its_derivative(name):
    passes = passes_of(LOSSES[name])
    (result,), saved = passes.run([W], [X])
    expected, pull = jax.vjp(LOSSES[name], W, X)
    cotangent = jnp.cos(expected)
    comm = Collectives.__new__(Collectives)  # `backward` reads no field of it
    (to_w,), (to_x,) = passes.pull(comm, [W], [X], saved, [cotangent])
    np.testing.assert_array_equal(result, expected)
    for ours, jaxs in zip((to_w, to_x), pull(cotangent), strict=True):
        np.testing.assert_allclose(ours, jaxs, rtol=1e-6, atol=1e-6)  # other order of the same float32 operations
