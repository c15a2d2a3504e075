"""Branches that do not wait for one another: their parameters are gathered one after the other all the same."""

import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import mesh_of

from zerojax import zero_shard

ROWS, WIDTH, SIZE, BRANCHES = 16, 64, 2048, 10
WEIGHT = WIDTH * SIZE * 4


def tables(params, batch):
    return jnp.mean(sum(table[batch[:, i].astype(int)] for i, table in enumerate(params["frozen"])) ** 2)


def towers(params, batch):
    return jnp.mean(sum(jnp.tanh(batch @ w.T).sum(-1) for w in params["frozen"]) ** 2)


def behind_one_layer(params, batch):
    x = batch @ params["trained"]
    return towers(params, x) + jnp.mean(x**2)


def each_behind_its_norm(params, batch):
    x = batch @ params["trained"]
    scaled = [x / jnp.sqrt(i + jnp.mean(x**2, -1, keepdims=True)) for i in range(BRANCHES)]
    return sum(towers({"frozen": [w]}, x) for x, w in zip(scaled, params["frozen"], strict=True))


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="on CPU, jax 0.10 drops the barriers")
@pytest.mark.parametrize("prefetch", [0, 1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("loss", "trains_all"),
    [(tables, True), (towers, True), (behind_one_layer, False), (each_behind_its_norm, False)],
)
def test_no_more_is_gathered_at_once_than_prefetch_says(loss, trains_all, prefetch):
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    params = {"frozen": [shape(SIZE, WIDTH)] * BRANCHES, "trained": shape(WIDTH, WIDTH)}
    trainable = None if trains_all else lambda path, x: "trained" in str(path)  # frozen: no gradient orders the pass
    options = {"mesh": mesh_of(8), "persist_below": 1, "prefetch": prefetch, "trainable": trainable}
    tx = zero_shard(optax.sgd(1e-3), stage=3, **options)
    compiled = jax.jit(tx.value_and_grad(loss)).lower(tx.shard(params), shape(ROWS, WIDTH)).compile()
    # One use and what is prefetched, and one more gradient or activation of this size.
    assert compiled.memory_analysis().temp_size_in_bytes <= (prefetch + 2.2) * WEIGHT
