"""The barriers that order the gathers of a program, in its jaxpr, and how much is gathered at once, compiled."""

import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import mesh_of, shape
from engine_helpers import lay_out, sharded_grad
from flat_options import tuned
from jax.extend import core as jex

from zerojax import jaxprs, zero_shard
from zerojax.gather.schedule import GradScheduler

SIZE, LAYERS = 16, 4
PARAMS = [jnp.ones((SIZE, SIZE))] * LAYERS
X = jnp.ones((16, SIZE))


def loss(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


def gradient_body(prefetch):
    """The program of one device."""
    (eqn,) = jax.make_jaxpr(sharded_grad(loss, lay_out(PARAMS, [0] * LAYERS), prefetch=prefetch))(PARAMS, X).jaxpr.eqns
    (body,) = jex.jaxprs_in_params(eqn.params)
    return body


def barriers_of(prefetch):
    """For each barrier: whether it has `(a value behind a product, a gathered array before any product, a shard)`."""
    body = gradient_body(prefetch)
    shards = set(body.invars[:LAYERS])
    gathered, computed, found = set(), set(), []
    for inner in body.eqns:
        reads = [atom for atom in inner.invars if isinstance(atom, jex.Var)]
        if inner.primitive.name == "optimization_barrier":
            found.append(tuple(any(v in values for v in reads) for values in (computed, gathered, shards)))
            for values in (shards, gathered, computed):  # each result is the operand at its place
                places = [out for out, atom in zip(inner.outvars, inner.invars, strict=True) if atom in values]
                values.update(places)
        elif any(e.primitive.name == "dot_general" for e in jaxprs.with_inner(inner)) or computed.intersection(reads):
            computed.update(inner.outvars)
        elif inner.primitive.name == "all_gather" or any(v in gathered for v in reads):
            gathered.update(inner.outvars)
        elif any(v in shards for v in reads):
            shards.update(inner.outvars)
    return found


@pytest.mark.parametrize("prefetch", [1, 2])
def test_a_gather_ends_when_the_block_before_its_use_ends(prefetch):
    """Forward all layers but the first; backward those between the last, which is kept, and the first, not needed.

    One more barrier has gathered arrays: the last layer's, which wait for the loss.
    """
    found = barriers_of(prefetch)
    assert sum(computed and gathered for computed, gathered, _ in found) == (LAYERS - 1) + (LAYERS - 2) + 1


@pytest.mark.parametrize(("prefetch", "barriers"), [(0, 5), (1, 4), (2, 2)])
def test_a_gather_starts_behind_the_block_that_is_as_far_ahead(prefetch, barriers):
    """Forward, the first `prefetch + 1` gathers do not wait. Backward, one barrier may start several gathers."""
    found = barriers_of(prefetch)
    assert (False, False, True) not in found
    assert sum(computed and shard for computed, _, shard in found) == barriers


def test_the_last_gradients_are_reduced_after_those_of_the_block_before():
    """Nothing is computed after them, so they would delay a reduction that a product can hide."""
    body = gradient_body(1)
    reductions = [inner for inner in body.eqns if inner.primitive.name == "reduce_scatter"]
    assert len(reductions) == LAYERS
    behind = set(reductions[-2].outvars)
    for inner in body.eqns:
        if behind & {atom for atom in inner.invars if isinstance(atom, jex.Var)}:
            behind.update(inner.outvars)
    assert behind >= set(reductions[-1].outvars)


def test_partial_sums_are_added_up_unless_their_value_is_summed_later():
    a, b, c = jax.make_jaxpr(lambda *values: values)(*jnp.ones((3, 5))).jaxpr.invars
    grads = GradScheduler({}, None, frozenset(), {a})
    grads.add_others([a, b, c], [jnp.ones((2, 5)), jnp.ones((2, 5)), jnp.ones(5)])
    assert [grads.cotangents[v].shape for v in (a, b, c)] == [(2, 5), (5,), (5,)]


# Branches that do not wait for one another: their parameters are gathered one after the other all the same.
ROWS, WIDTH, WORDS, BRANCHES = 16, 64, 2048, 10
WEIGHT = WIDTH * WORDS * 4


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
    ("loss", "trains_all"), [(tables, True), (towers, True), (behind_one_layer, False), (each_behind_its_norm, False)]
)
def test_no_more_is_gathered_at_once_than_prefetch_says(loss, trains_all, prefetch):
    params = {"frozen": [shape(WORDS, WIDTH)] * BRANCHES, "trained": shape(WIDTH, WIDTH)}
    trainable = None if trains_all else lambda path, x: "trained" in str(path)  # frozen: no gradient orders the pass
    options = {"mesh": mesh_of(8), "persist_below": 1, "prefetch": prefetch, "trainable": trainable}
    tx = zero_shard(optax.sgd(1e-3), stage=3, **tuned(**options))
    compiled = jax.jit(tx.value_and_grad(loss)).lower(tx.shard(params), shape(ROWS, WIDTH)).compile()
    # One use and what is prefetched, and one more gradient or activation of this size.
    assert compiled.memory_analysis().temp_size_in_bytes <= (prefetch + 2.2) * WEIGHT
