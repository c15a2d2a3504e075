"""What the compiled step moves, and what it holds: read from the program, not timed."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of, quick_or_slow
from stacked_layers import CLIPPED, DEPTH, MERGES, OPTIMIZERS, WIDTH, compiled_step, loss, make_params

from zerojax import Precision, Tuning, collectives, report, zero_shard
from zerojax.layout.tree import layout_of
from zerojax.train.params import init_programs


def gathers(stage):
    """How often each layer's matrix is gathered, all layers together."""
    if stage < 3:
        return DEPTH if stage else 0
    # forward and backward; the first layer's input has no gradient, and the last layer's matrix is kept between
    return DEPTH if MERGES else 2 * DEPTH - 2


@pytest.mark.parametrize(
    ("stage", "name", "count"), quick_or_slow(list(itertools.product(range(4), OPTIMIZERS, (3, 8))), [(3, "adamw", 3)])
)
def test_a_step_moves_as_much_as_the_paper_says(stage, name, count):
    matrices, vectors = DEPTH * WIDTH**2, DEPTH * 2 * WIDTH
    expected = 2 * (matrices + vectors) if stage < 3 else (DEPTH + gathers(3)) * WIDTH**2 + 2 * vectors
    moved = collectives(compiled_step(stage, name, count)).moved().sent_elements
    assert moved == pytest.approx(expected * (count - 1) / count, rel=0.02)
    assert expected <= (3 if stage == 3 else 2) * (matrices + vectors)


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_step_moves_what_it_moves_in_device_view(stage):
    sent = lambda view: collectives(compiled_step(stage, view=view)).moved().sent_elements
    assert sent("global") == pytest.approx(sent("device"), abs=50)  # scalars


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", [3, 2, pytest.param(1, marks=pytest.mark.slow)])
def test_each_matrix_has_its_collectives_and_small_leaves_share_one(stage):
    found = collectives(compiled_step(stage))
    assert {c.kind for c in found} == {"all-gather", "reduce-scatter", "all-reduce"}
    assert len(found.of("reduce-scatter")) == DEPTH + 1
    assert len(found.of("all-gather")) == gathers(stage) + 1
    # loss, weight and one square sum for each leaf of the norm in clipping and in the metrics
    assert found.of("all-reduce").moved().elements <= 2 + 2 * 3 * DEPTH


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "loop"), [(2, "fori_loop"), (1, "scan")])
def test_a_loop_over_steps_moves_no_more_than_the_steps(stage, loop):
    mesh = mesh_of(4, 2, names=("data", "model"))
    tx, steps = zero_shard(CLIPPED, stage=stage, mesh=mesh), 3
    step, state = tx.train_step(loss), tx.create(jax.eval_shape(make_params))
    rows = jax.ShapeDtypeStruct((steps, 8, WIDTH), jnp.float32)

    def run(state, batches):
        if loop == "scan":
            return jax.lax.scan(step, state, batches)
        return jax.lax.fori_loop(0, steps, lambda i, state: step(state, batches[i])[0], state)

    one = collectives(step.lower(state, jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype)).compile())
    all_steps = collectives(jax.jit(run, donate_argnums=0).lower(state, rows).compile())
    for kind in ("all-gather", "reduce-scatter"):
        assert all_steps.moved(kind).elements == steps * one.moved(kind).elements


USES = {
    "indexed": lambda w: w[1],
    "gathered": lambda w: w[jnp.array([1, 0])].reshape(128, 64),
    "split": lambda w: sum(jnp.split(w, 2, axis=-1)).reshape(64, 64),
    "joined": lambda w: jnp.concatenate([w[0], 2 * w[1]], axis=-1),
    "masked": lambda w: jnp.where(jnp.eye(64) > 0, w, 0.5).reshape(128, 64),
    "normed": lambda w: (w / jnp.linalg.norm(w, axis=(1, 2), keepdims=True)).reshape(128, 64),
    "padded": lambda w: jnp.pad(w[0], ((0, 0), (1, 2)), constant_values=3.0),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", quick_or_slow([(name,) for name in USES], [("indexed",), ("split",), ("masked",)]))
def test_gradients_of_a_part_of_a_parameter_are_reduce_scattered_too(name):
    params = {"w": jax.random.normal(jax.random.key(0), (2, 64, 64))}
    used = USES[name](params["w"])
    batch = jax.random.normal(jax.random.key(1), (16, used.shape[0]))
    loss = lambda params, batch: jnp.mean(jnp.tanh(batch @ USES[name](params["w"])) ** 2)
    tx = zero_shard(optax.sgd(1e-3), stage=2, mesh=mesh_of(8), tuning=Tuning(persist_below=1000))
    gradient = jax.jit(tx.value_and_grad(loss)).lower(tx.shard(params), batch).compile()
    found = collectives(gradient)
    assert found.moved("reduce-scatter").elements == params["w"].size
    assert found.moved("all-reduce").elements <= 2
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    jax.tree.map(same, gradient(tx.shard(params), batch), jax.value_and_grad(loss)(params, batch))


@pytest.mark.parametrize("groups", [1, 16])
def test_gradients_of_convolutions_are_reduce_scattered_too(groups):
    params = {"kernel": jax.ShapeDtypeStruct((8, 8, 16 // groups, 32), jnp.float32)}

    def loss(params, batch):
        conv = nn.Conv(32, (8, 8), feature_group_count=groups, use_bias=False)
        return jnp.mean(conv.apply({"params": params}, batch) ** 2)

    tx = zero_shard(optax.sgd(1e-3), stage=2, mesh=mesh_of(8), tuning=Tuning(persist_below=1000))
    batch = jax.ShapeDtypeStruct((16, 8, 8, 16), jnp.float32)
    found = collectives(tx.train_step(loss).lower(tx.create(params), batch).compile())
    assert found.moved("reduce-scatter").elements == params["kernel"].size
    assert found.moved("all-reduce").elements <= 4


@pytest.mark.slow
def test_parameters_are_born_in_their_layout(mesh):
    def init(key):
        keys = jax.random.split(key, 12)
        return [jax.random.normal(k, (256, 512)) for k in keys]

    tx = zero_shard(optax.adam(1e-3), stage=3, mesh=mesh)
    key = jax.random.key(0)
    shapes = jax.eval_shape(init, key)
    total, largest = sum(4 * x.size for x in shapes), max(4 * x.size for x in shapes)
    held = 0
    for program in init_programs(tx.config, layout_of(tx.config, shapes), init, (key,)):
        memory = program.lower(key).compile().memory_analysis()
        held += memory.output_size_in_bytes
        assert held + memory.temp_size_in_bytes <= total / 8 + largest
    assert held == pytest.approx(total / 8, rel=0.01)
    born = tx.init_params(init, jax.random.key(0))
    assert report({"params": born}).total == total / 8
    for a, b in zip(born, init(jax.random.key(0)), strict=True):
        assert jnp.allclose(a, b)


@pytest.mark.usefixtures("optimized")
def test_padding_of_wide_and_narrow_copies_costs_little():
    """A new parameter is rounded where it is stored. Rounded before it was padded, both copies were written twice."""

    def bytes_accessed(rows, columns):
        tx = zero_shard(
            optax.adamw(0.1), stage=1, mesh=mesh_of(2), precision=Precision.bf16(), tuning=Tuning(persist_below=0)
        )
        step = tx.train_step(lambda p, b: jnp.mean((b @ p["w"]).astype(jnp.float32) ** 2))
        program = step.lower(tx.create({"w": np.ones((rows, columns), "f")}), np.ones((8, rows), "f")).compile()
        analysis = program.cost_analysis()
        return (analysis[0] if isinstance(analysis, list) else analysis)["bytes accessed"]

    assert bytes_accessed(1001, 513) < 1.3 * bytes_accessed(1002, 512)
