"""The peak of a step, predicted from layouts and one device's activations, beside the compiled step's."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest
import yardstick
from conftest import mesh_of
from flat_options import tuned
from gpt import GPT, next_byte_loss

from zerojax import Precision, block, estimate, zero_shard
from zerojax.optim.sharding_plan import make_plan
from zerojax.planning.fit import PlainGradient, peak_of
from zerojax.planning.stage_bytes import estimate_stage
from zerojax.train.arguments import cast_inputs
from zerojax.train.loss import Loss

# What the prediction leaves to XLA: in which order it computes, and what it puts where something else was before.
# The figures are within 6%, mostly within 3. (Toys of unlike layers, whose peaks fall on different times, can
# be off by a quarter, and four layers of few rows by an eighth: XLA packs the gradients that stay, and what the
# GPU's compiler splits a product into, between the matrices of one layer.)
TOLERANCE = 0.1
WIDTH, TOKENS, ROWS = 64, 64, 2
NEWEST = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="jax 0.10 keeps gathered parameters of unrolled models on CPU"
)


@functools.cache
def example(depth, width=WIDTH):
    """The example's model: shapes of its parameters, and its loss."""
    model = GPT(width, depth, heads=4)
    return jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, TOKENS), jnp.int32)), next_byte_loss(model)


def windows(rows=ROWS, accumulate=1):
    return jax.ShapeDtypeStruct((8 * accumulate * rows, TOKENS + 1), jnp.int32)


def predicted(
    shapes, loss, batch, stage, *, accumulate=1, devices=8, args=(), has_aux=False, weighted=False, **options
):
    """What `plan.fit` estimates of a candidate, for the first local device."""
    config = zero_shard(optax.adamw(1e-3), stage=stage, mesh=mesh_of(devices), **tuned(**options)).config
    plan, shards = make_plan(config, shapes), devices * accumulate
    local = lambda x: x.update(shape=(x.shape[0] // shards, *x.shape[1:]))
    rows = jax.eval_shape(functools.partial(cast_inputs, config.precision), jax.tree.map(local, batch))
    gradient = PlainGradient(Loss(loss, has_aux=has_aux, weighted=weighted), args, None)
    cost = gradient.cost(config, plan.layout, rows)
    row = estimate_stage(config, plan, accumulate)
    peak = peak_of(row, cost.activations, cost.gathered)
    return SimpleNamespace(peak=peak, activations=cost.activations, gathered=cost.gathered)


def found(shapes, loss, batch, stage, *, mesh=None, accumulate=1, precision=None):
    """Arguments, results that are not donated ones, and temporary memory of the compiled step."""
    tx = zero_shard(optax.adamw(1e-3), stage=stage, mesh=mesh or mesh_of(8), precision=precision)
    lowered = tx.train_step(loss, accumulate=accumulate).lower(tx.create(shapes), batch)
    memory = lowered.compile().memory_analysis()
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return kept + memory.temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
def test_where_nothing_is_gathered_on_use_the_prediction_is_all_but_exact(stage):
    model = (*example(4), windows(), stage)
    assert predicted(*model).peak == pytest.approx(found(*model), rel=0.01)


def tiny(**style):
    init, loss, (rows, tokens) = yardstick.build("tiny", **style)
    return jax.eval_shape(init, jax.random.key(0)), loss, jax.ShapeDtypeStruct((8 * rows, tokens), jnp.int32), 3


def matrices(rows):
    def loss(params, batch):
        for w in params:
            batch = jnp.tanh(batch @ w)
        return jnp.mean(batch**2)

    shapes = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 12
    return shapes, loss, jax.ShapeDtypeStruct((8 * rows, 32, 512), jnp.float32), 3


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param(lambda: (*example(24), windows(), 3), {}, marks=pytest.mark.slow, id="the example"),
        pytest.param(
            lambda: (*example(4), windows(accumulate=2), 1), {"accumulate": 2}, marks=pytest.mark.slow, id="two parts"
        ),
        pytest.param(
            lambda: (*example(4), windows(), 2), {"precision": Precision.bf16()}, marks=pytest.mark.slow, id="bf16"
        ),
        pytest.param(lambda: (*example(4), windows(16), 3), {}, marks=pytest.mark.slow, id="mostly activations"),
        pytest.param(lambda: tiny(scan=False, remat=True), {}, marks=NEWEST, id="unrolled"),
        pytest.param(
            lambda: tiny(scan=True, remat=False), {}, marks=[NEWEST, pytest.mark.slow], id="scanned without remat"
        ),
        # Activations cannot use the buffers of sharded gradients.
        pytest.param(lambda: matrices(rows=1), {}, marks=NEWEST, id="mostly gradients"),
        pytest.param(lambda: matrices(rows=8), {}, marks=NEWEST, id="gradients and activations"),
    ],
)
def test_the_peak_is_predicted(model, options):
    assert predicted(*model(), **options).peak == pytest.approx(found(*model(), **options), rel=TOLERANCE)


def chain(layers, width=64):
    """A loss of unrolled blocks of one matrix each, and one wider at the end."""
    shapes = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers + [
        jax.ShapeDtypeStruct((width, 4 * width), jnp.float32)
    ]

    def loss(params, batch):
        for w in params:
            batch = block(lambda w, x: jnp.tanh(x @ w))(w, batch)
        return jnp.mean(batch**2)

    return shapes, loss, jax.ShapeDtypeStruct((8, width), jnp.float32)


@pytest.mark.quick(2)
@pytest.mark.parametrize(("prefetch", "matrices"), [(0, 4), (1, 5), (2, 6), (9, 8)])
def test_gathered_are_the_largest_uses_in_a_row(prefetch, matrices):
    model = (*chain(layers=4), 3)
    assert predicted(*model, prefetch=prefetch, persist_below=1).gathered == matrices * 4 * 64 * 64


@pytest.mark.slow
def test_a_stack_is_gathered_an_iteration_at_a_time_and_small_leaves_never():
    shapes, loss = example(24)
    row = predicted(shapes, loss, windows(), 3, persist_below=8192)
    layer = 12 * WIDTH**2
    assert row.gathered == 2 * 4 * layer
    ahead = predicted(shapes, loss, windows(), 3, prefetch=9)  # a loop prefetches at most one iteration
    assert ahead.gathered == 2 * 4 * (layer + 256 * WIDTH)  # and the table is used before and after it
    assert estimate(shapes, tx=optax.adamw(1e-3))[3].gathered == 2 * 4 * 24 * 4 * WIDTH**2  # only paths to go by


def test_activations_are_those_of_a_microbatch():
    shapes, loss, _ = chain(layers=2)
    rows = lambda count: jax.ShapeDtypeStruct((count, 64), jnp.float32)
    half = predicted(shapes, loss, rows(1024), 0, accumulate=2).activations
    assert half == predicted(shapes, loss, rows(512), 0).activations
    assert half < predicted(shapes, loss, rows(1024), 0).activations
    assert half == predicted(shapes, loss, rows(128), 0, devices=2).activations


def test_keys_and_what_a_loss_returns_beside():
    def loss(params, batch, key):
        kept = jax.random.bernoulli(key, 0.5, batch.shape)
        out = jnp.where(kept, batch, 0) @ params[0]
        return (jnp.sum(out**2), jnp.float32(out.size)), {"norm": jnp.sum(out)}

    shapes, batch = [jax.ShapeDtypeStruct((64, 64), jnp.float32)], jax.ShapeDtypeStruct((64, 64), jnp.float32)
    row = predicted(shapes, loss, batch, 3, args=(jax.random.key(0),), has_aux=True, weighted=True)
    assert row.peak > 0
