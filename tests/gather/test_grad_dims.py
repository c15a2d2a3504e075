"""The order of dims in which a product leaves its weight's gradient."""

import jax
import jax.numpy as jnp
import pytest

from zerojax.gather.evaluate import orders

USES = {
    "dense": (lambda w, x: x @ w, (4, 6), (2, 3, 4), (1, 0)),
    "heads": (lambda w, x: jnp.einsum("bti,ihd->bthd", x, w), (4, 2, 3), (2, 3, 4), (1, 2, 0)),
    "out of heads": (lambda w, x: jnp.einsum("bthd,hdo->bto", x, w), (2, 3, 4), (2, 5, 2, 3), (2, 0, 1)),
    "on the left": (lambda w, x: w @ x, (6, 4), (4, 3), ()),
    "experts": (lambda w, x: jnp.einsum("eti,eio->eto", x, w), (2, 4, 6), (2, 3, 4), (0, 2, 1)),
    "cast": (lambda w, x: x @ w.astype(jnp.bfloat16), (4, 6), (3, 4), (1, 0)),
    "remat": (jax.checkpoint(lambda w, x: jnp.tanh(x @ w)), (4, 6), (3, 4), (1, 0)),
    "two that agree": (lambda w, x: (x @ w, x[:1] @ w), (4, 4), (3, 4), (1, 0)),
    "two that do not": (lambda w, x: x @ w @ w.T, (4, 6), (3, 4), ()),
    "no product": (lambda w, x: x * w, (4, 6), (4, 6), ()),
}


@pytest.mark.parametrize("use", USES)
def test_the_order_is_that_of_the_product(use):
    fn, *shapes, order = USES[use]
    jaxpr = jax.make_jaxpr(fn)(*[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]).jaxpr
    assert orders(jaxpr, jaxpr.invars[:1]) == [order]


@pytest.mark.parametrize("use", ["dense", "heads", "out of heads", "experts"])
def test_the_order_undoes_the_transpose_that_jax_ends_the_gradient_with(use):
    fn, *shapes, order = USES[use]
    w, x = (jnp.ones(shape) for shape in shapes)
    pull = jax.make_jaxpr(lambda w: jax.vjp(lambda w: fn(w, x), w)[1](jnp.ones_like(fn(w, x))))(w)
    last = pull.jaxpr.eqns[-1]
    assert last.primitive.name == "transpose"
    assert [last.params["permutation"][dim] for dim in order] == list(range(w.ndim))
