"""Which residuals a segment keeps between its passes: activations alone, and no array that gathered parameters give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import mesh_of
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from zerojax import jaxprs
from zerojax.comm.device_collectives import DeviceCollectives
from zerojax.gather.known_parts import divided
from zerojax.gather.vjp import KnownRows, Sums, traced_passes

ROWS, SIZE = 16, 64
W, X = jnp.ones((SIZE, SIZE)), jnp.ones((ROWS, SIZE))


def in_shard_map(fn, check_vma):
    specs = {"in_specs": (P(), P("data")), "out_specs": P("data"), "check_vma": check_vma}
    return jax.shard_map(lambda w, x: x + jnp.tanh(fn(w, x)), mesh=mesh_of(8), **specs)


def transposed(w, x):
    return x @ (2 * w.T)


LOSSES = {
    "product": lambda w, x: jnp.tanh(x @ w),
    "function of the weight": lambda w, x: x @ jnp.tanh(w).T,
    "gain per unit": lambda w, x: jnp.tanh(x @ (w * x[0])),
    "gain of a function": lambda w, x: jnp.tanh(x @ (jax.nn.relu(jnp.sin(w)) * x[:, :1].sum())),
    "gain computed here": lambda w, x: jnp.tanh(x @ (w * jnp.sin(x[0]) / jnp.exp(x[1:2].T))),
    "named": lambda w, x: jnp.tanh(x @ checkpoint_name(w, "weight")),
    "mask that is kept": lambda w, x: jnp.tanh(x @ (w * (x.T @ x))),
    "masks that are added": lambda w, x: x @ w + x @ (w + sum(jnp.cumsum(x.T @ x, i) for i in (0, 1))),
    "shard_map": in_shard_map(lambda w, x: x @ w, False),
    "shard_map with types": in_shard_map(lambda w, x: x @ w, True),
    "transposed in a shard_map": in_shard_map(transposed, False),
    "transposed in a shard_map with types": in_shard_map(transposed, True),
}
# The mask itself is of the weight's size, and depends on the rows: it is an activation. A sum with two
# masks is kept itself, because it is smaller than both masks.
SAVED_OF_THE_WEIGHTS_SIZE = {"mask that is kept": 1, "masks that are added": 1}


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_that_the_gathered_weight_gives_is_kept(name):
    run = lambda params, others: [LOSSES[name](params[0], others[0])]
    passes = traced_passes(run, [W], [X], trained=[True], active=[True], rows=KnownRows())
    saved = [var.aval.size for var in passes.forward.outvars[passes.results :]]
    assert sum(size > X.size for size in saved) == SAVED_OF_THE_WEIGHTS_SIZE.get(name, 0)
    assert passes.needed == {0}
    assert passes.needed_others == {0}

    def of_both_passes(w, x):
        found, kept = passes.run([w], [x])
        return passes.pull(DeviceCollectives(("data",), 0), [w], [x], kept, found, sums=Sums())

    found, wanted = jax.jit(lambda w, x: (of_both_passes(w, x), jax.vjp(LOSSES[name], w, x)[1](LOSSES[name](w, x))))(
        W, X
    )
    for one, plain in zip(jax.tree.leaves(found), wanted, strict=True):
        np.testing.assert_allclose(one, plain, rtol=1e-5)


def test_the_parts_of_a_shard_map_compute_what_it_computes():
    specs = {"in_specs": (P(None, "data"), P("data"), P()), "out_specs": (P(None, "data"), P(), P("data"), P())}
    body = lambda w, x, b: (2 * w, 0 * w.sum() * x.sum(), x * b, jnp.cos(b))
    mapped = jax.shard_map(body, mesh=mesh_of(8), check_vma=False, **specs)
    fn = lambda w, x, b: mapped(jnp.tanh(w), jnp.sin(x), b)
    args = W, X, jnp.arange(float(SIZE))
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    found = divided(jaxpr, [jaxpr.invars[0], jaxpr.invars[2]])
    assert [(len(eqn.invars), len(eqn.outvars)) for eqn in found.eqns] == [(1, 1), (1, 1), (2, 2), (3, 2)]
    for one, plain in zip(jax.jit(jaxprs.run, static_argnums=0)(found, (), *args), fn(*args), strict=True):
        np.testing.assert_array_equal(one, plain)
    product = jax.make_jaxpr(LOSSES["shard_map"])(W, X).jaxpr
    assert divided(jaxpr, ()) is jaxpr
    assert divided(product, product.invars[:1]) is product
