"""In which type the uses of a parameter want it, and in which order of dims they leave its gradient."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from zerojax.gather.evaluate import Cast, as_gathered, demanded, evaluate_gathered, orders

BF16, F16 = jnp.bfloat16, jnp.float16
W, X = jnp.sin(jnp.arange(24.0)).reshape(2, 3, 4), jnp.cos(jnp.arange(12.0)).reshape(3, 4)
narrow = lambda w, x: jnp.sum(x * w.astype(BF16))


def in_loop(w, x):
    return lax.scan(lambda total, _: (total + narrow(w, x), None), 0.0, None, 2)[0]


def carried(w, x):
    return lax.scan(lambda w, _: (jnp.ones_like(w), narrow(w, x)), w, None, 2)[1].sum()


# The uses of a parameter, and the type to which all of them cast it.
USES = {
    "cast": (narrow, BF16),
    "views, cast": (lambda w, x: narrow(lax.rev(w[:, :2], (0,)).transpose(1, 0, 2), x[0]), BF16),
    "remat": (lambda w, x: jax.checkpoint(narrow)(w, x), BF16),
    "jit": (lambda w, x: jax.jit(narrow)(w, x) + narrow(w, x), BF16),
    "constant of a loop": (in_loop, BF16),
    "layers of a loop": (lambda w, x: lax.scan(lambda x, w: (x * narrow(w, x), None), x, w)[0].sum(), BF16),
    "carry of a loop": (carried, None),
    "two types": (lambda w, x: narrow(w, x) + jnp.sum(w.astype(F16)), None),
    "wide too": (lambda w, x: narrow(w, x) + jnp.sum(jnp.sin(w)), None),
    "result": (lambda w, x: (narrow(w, x), w), None),
    "no cast": (lambda w, x: jnp.sum(w * x), None),
    "as wide": (lambda w, x: jnp.sum(w.astype(jnp.int32)), None),
}


@pytest.mark.parametrize(("fn", "dtype"), USES.values(), ids=USES)
def test_uses_that_agree_on_a_type_get_the_parameter_in_it(fn, dtype):
    jaxpr = jax.make_jaxpr(fn)(W, X).jaxpr
    assert demanded(jaxpr, jaxpr.invars[:1]) == [dtype]
    if dtype is not None:
        run = jax.jit(lambda w, x: evaluate_gathered(jaxpr, (), [Cast(w.astype(dtype), w.dtype), x]))
        np.testing.assert_allclose(run(W, X)[0], jax.jit(fn)(W, X), rtol=1e-5)


def test_other_uses_of_a_narrow_parameter_widen_it():
    param = types.SimpleNamespace(wide=W.dtype)
    assert as_gathered(W, param) is W
    jaxpr = jax.make_jaxpr(lambda w: (jnp.sin(w), w.T, jax.jit(lambda w: w)(w)))(W).jaxpr
    for x in evaluate_gathered(jaxpr, (), [as_gathered(W.astype(BF16), param)]):
        assert x.dtype == W.dtype


PRODUCTS = {
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


@pytest.mark.parametrize("use", PRODUCTS)
def test_the_order_is_that_of_the_product(use):
    """It undoes the transpose with which JAX ends the gradient, unless a cast or a remat is around the product."""
    fn, *shapes, order = PRODUCTS[use]
    jaxpr = jax.make_jaxpr(fn)(*[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]).jaxpr
    assert orders(jaxpr, jaxpr.invars[:1]) == [order]
    if use in ("dense", "heads", "out of heads", "experts"):
        w, x = (jnp.ones(shape) for shape in shapes)
        last = jax.make_jaxpr(lambda w: jax.vjp(lambda w: fn(w, x), w)[1](fn(w, x)))(w).eqns[-1]
        assert [last.params["permutation"][dim] for dim in order] == list(range(w.ndim))
