"""A scan over layers that carries (views, rows, time, width), and pools over the views inside each layer."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from measured import MOST_FLOPS, MOST_PASSES, PERSIST_BELOW, SLACK, cost_of, mesh, placed
from registry import DEVICES, HIDDEN, LAYERS, OUT, ROWS, TIME, WIDTH, ids, structs, xent

from zerojax import Tuning, zero_shard

VIEWS = 4
LAYER = {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH), "pool": (LAYERS, WIDTH, WIDTH)}
PARAMS = structs({"layers": LAYER, "head": (WIDTH, OUT)})


def largest(x, w):
    """Add the largest value over the views to each of them."""
    h = jax.nn.gelu(x @ w["up"]) @ w["down"]
    return x + jnp.broadcast_to(h.max(0) @ w["pool"], h.shape), None


@pytest.mark.slow
def test_views_that_are_pooled_in_each_layer_cost_what_they_do_under_plain_jit():
    batch = placed(structs({"x": (ROWS, VIEWS, TIME, WIDTH), "y": ids(ROWS)}), "data")

    def loss(params, batch):
        x, _ = lax.scan(largest, jnp.moveaxis(batch["x"], 1, 0), params["layers"])
        logits = x.mean(2) @ params["head"]
        return xent(logits, jnp.broadcast_to(batch["y"], logits.shape[:2])).mean()

    replicated = jax.NamedSharding(mesh(), jax.P())
    plain = jax.jit(jax.value_and_grad(loss), out_shardings=replicated).lower(placed(PARAMS), batch).compile()
    tx = zero_shard(optax.sgd(0.1), stage=3, mesh=mesh(), tuning=Tuning(persist_below=PERSIST_BELOW))
    sharded = jax.jit(tx.value_and_grad(loss)).lower(tx.shard(PARAMS), batch).compile()
    expected, found = cost_of(plain, PARAMS), cost_of(sharded, PARAMS)
    assert found.flops <= MOST_FLOPS * expected.flops
    once = sum(4 * x.size for x in jax.tree.leaves(PARAMS)) * (DEVICES - 1) / DEVICES
    assert found.gathered <= MOST_PASSES * once
    assert found.beyond <= SLACK
