"""Which residuals a segment keeps between its passes: activations alone, and no array that gathered parameters give."""

import jax
import jax.numpy as jnp
import pytest
from conftest import mesh_of
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from zerojax.gather.vjp import KnownRows, traced_passes

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
    "named": lambda w, x: jnp.tanh(x @ checkpoint_name(w, "weight")),
    "mask that is kept": lambda w, x: jnp.tanh(x @ (w * (x.T @ x))),
    "shard_map": in_shard_map(lambda w, x: x @ w, False),
    "shard_map with types": in_shard_map(lambda w, x: x @ w, True),
    "transposed in a shard_map": in_shard_map(transposed, False),
    "transposed in a shard_map with types": in_shard_map(transposed, True),
}
# The mask itself is of the weight's size, and depends on the rows: it is an activation.
SAVED_OF_THE_WEIGHTS_SIZE = {"mask that is kept": 1}


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_that_the_gathered_weight_gives_is_kept(name):
    run = lambda params, others: [LOSSES[name](params[0], others[0])]
    passes = traced_passes(run, [W], [X], trained=[True], active=[True], rows=KnownRows())
    saved = [var.aval.size for var in passes.forward.outvars[passes.results :]]
    assert sum(size > X.size for size in saved) == SAVED_OF_THE_WEIGHTS_SIZE.get(name, 0)
    assert passes.needed == {0}
    assert passes.needed_others == {0}
