"""Views of each row in front of the rows: as a dim that a scan carries and pools, or concatenated and flattened."""

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


def costs(loss, params, batch):
    """What the gradient costs under plain jit, and by zerojax at stage 3."""
    replicated = jax.NamedSharding(mesh(), jax.P())
    plain = jax.jit(jax.value_and_grad(loss), out_shardings=replicated).lower(placed(params), batch).compile()
    tx = zero_shard(optax.sgd(0.1), stage=3, mesh=mesh(), tuning=Tuning(persist_below=PERSIST_BELOW))
    sharded = jax.jit(tx.value_and_grad(loss)).lower(tx.shard(params), batch).compile()
    return cost_of(plain, params), cost_of(sharded, params)


@pytest.mark.slow
def test_views_that_are_pooled_in_each_layer_cost_what_they_do_under_plain_jit():
    batch = placed(structs({"x": (ROWS, VIEWS, TIME, WIDTH), "y": ids(ROWS)}), "data")

    def loss(params, batch):
        x, _ = lax.scan(largest, jnp.moveaxis(batch["x"], 1, 0), params["layers"])
        logits = x.mean(2) @ params["head"]
        return xent(logits, jnp.broadcast_to(batch["y"], logits.shape[:2])).mean()

    expected, found = costs(loss, PARAMS, batch)
    assert found.flops <= MOST_FLOPS * expected.flops
    once = sum(4 * x.size for x in jax.tree.leaves(PARAMS)) * (DEVICES - 1) / DEVICES
    assert found.gathered <= MOST_PASSES * once
    assert found.beyond <= SLACK


def test_concatenated_views_move_no_activation_after_their_dims_are_merged():
    batch = placed(structs({"x": (ROWS, 2, TIME, WIDTH)}), "data")

    def loss(params, batch):
        x = jnp.concatenate([batch["x"][:, 0], batch["x"][:, 1]]).reshape(-1, WIDTH)
        for up, down in zip(params["up"], params["down"], strict=True):
            x = x + jax.nn.gelu(x @ up) @ down
        scores = jnp.square(x).reshape(2 * ROWS, -1).mean(-1)
        return jax.nn.softplus(scores[:ROWS] - scores[ROWS:]).mean()

    layers = structs({"up": [(WIDTH, HIDDEN)] * 2, "down": [(HIDDEN, WIDTH)] * 2})
    expected, found = costs(loss, layers, batch)
    assert found.flops <= MOST_FLOPS * expected.flops
    assert found.activations <= expected.activations + SLACK
