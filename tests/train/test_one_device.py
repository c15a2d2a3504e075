"""On one device nothing is gathered and nothing reduced: every stage is the plain program, and costs as much."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import optax
import pytest
import yardstick
from conftest import mesh_of
from models import awkward_batches, awkward_loss, awkward_params, floats_only
from parity import assert_parity
from programs import TABLE

from zerojax import Offload, Tuning, zero_shard

TINY = {"layers": 3, "tokens": 8, "width": 32, "vocabulary": 64}
WAYS = {"unrolled": {"scan": False}, "scanned": {"scan": True}, "no remat": {"scan": True, "remat": False}}
# Everything but arithmetic by element: a step multiplies each gradient by the inverse of the loss scale, a constant 1.
STRUCTURE = re.compile(
    r"= \"?stablehlo\.(dot_general|while|transpose|concatenate|slice|dynamic_slice|dynamic_update_slice|gather|scatter"
    r"|pad|reshape|optimization_barrier|all_gather|all_reduce|reduce_scatter|all_to_all|tanh|exponential"
    r"|custom_call @(?!Sh))"
)


@functools.cache
def model(way):
    """`(loss, params, batch)` of the yardstick, as shapes."""
    init, loss, shape = yardstick.build("tiny", **WAYS[way], **TINY)
    return loss, jax.eval_shape(init, jax.random.key(0)), jax.ShapeDtypeStruct((2, *shape[1:]), jnp.int32)


def operations(lowered):
    """How often a lowered program has each operation of `STRUCTURE`."""
    return Counter(STRUCTURE.findall(lowered.as_text()))


@functools.cache
def of_plain_gradient(way):
    loss, params, batch = model(way)
    return operations(jax.jit(jax.value_and_grad(loss)).lower(params, batch))


@pytest.mark.quick(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", [3, 2, 1, 0])
def test_the_gradient_is_that_of_plain_jit(stage, way):
    loss, params, batch = model(way)
    tx = zero_shard(optax.adamw(1e-3), stage=stage, mesh=mesh_of(1), tuning=Tuning(persist_below=100))
    lowered = jax.jit(tx.value_and_grad(loss)).lower(tx.shard(params), batch)
    assert operations(lowered) == of_plain_gradient(way)


@pytest.mark.quick(1)
@pytest.mark.parametrize("axes", [(1, 4), (4, 1)])
@pytest.mark.parametrize("stage", [3, 2])
def test_an_axis_of_one_device_adds_nothing_to_hybrid_sharding(stage, axes):
    """A host of one GPU gathers nothing, and one host alone reduces nothing across hosts."""
    loss, params, batch = model("scanned")
    batch = jax.ShapeDtypeStruct((8, *batch.shape[1:]), batch.dtype)

    def text(shard_axis, stage, sizes):
        options = {"mesh": mesh_of(*sizes), "axis": ("host", "gpu"), "tuning": Tuning(shard_axis=shard_axis)}
        tx = zero_shard(optax.sgd(1.0), stage=stage, **options)
        return operations(jax.jit(tx.value_and_grad(loss)).lower(tx.shard(params), batch))

    if axes == (1, 4):  # as if the axis of hosts did not exist
        assert text("gpu", stage, axes) == text(("host", "gpu"), stage, axes)
    else:  # every device has all of each parameter, so there is nothing to gather on use
        assert "all_gather" not in text("gpu", stage, axes)


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("view", ["global", "device"])
def test_values_are_those_of_plain_optax(stage, view):
    optimizer = floats_only(optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)))
    tx = zero_shard(optimizer, stage=stage, mesh=mesh_of(1), tuning=Tuning(persist_below=50), view=view)
    assert_parity(tx, awkward_loss, awkward_params(), awkward_batches(3), accumulate=2)


@pytest.mark.slow
def test_parameters_in_host_memory_are_still_copied_at_each_use():
    """Their one device holds them in full, but not in its own memory."""
    loss, params, batch = model("scanned")
    tx = zero_shard(
        optax.sgd(1.0),
        stage=3,
        mesh=mesh_of(1),
        offload=Offload("host", params="host"),
        tuning=Tuning(persist_below=100),
    )
    jaxpr = jax.make_jaxpr(tx.value_and_grad(loss))(tx.shard(params), batch)
    assert str(jaxpr).count("device_put") >= 2 * 3  # both passes copy the stacks, the embedding and its tied reading


YARDSTICKS = {"yardstick": "unrolled", "yardstick_scan": "scanned"}


def program(name):
    """`(loss, params, batch)` of the yardstick, or of a program of the table with fewer rows, as shapes."""
    if name in YARDSTICKS:
        return model(YARDSTICKS[name])
    found = TABLE[name]
    params, batch, _ = found.shapes()
    return found.loss, params, jax.tree.map(lambda x: jax.ShapeDtypeStruct((16, *x.shape[1:]), x.dtype), batch)


def costs(compiled):
    """`(products, fusions, bytes read and written, temporary memory)` of a compiled program."""
    names = Counter(re.findall(r"= \S+ ([a-z-]+)\(", compiled.as_text()))
    accessed, temporary = compiled.cost_analysis()["bytes accessed"], compiled.memory_analysis().temp_size_in_bytes
    return names["dot"], names["fusion"], accessed, temporary


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage"),
    [("yardstick", 1), ("yardstick_scan", 2), ("yardstick", 3), ("eqx_gpt", 3), ("moe_tokens_scan", 3)],
)
def test_a_step_costs_what_plain_optax_costs(name, stage, optimized):
    loss, params, batch = program(name)
    optimizer = optax.adamw(1e-3)

    def plain(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, {"loss": value, "grad_norm": optax.tree.norm(grads)}

    given = params, jax.eval_shape(optimizer.init, params), batch
    usual = costs(jax.jit(plain, donate_argnums=(0, 1)).lower(*given).compile())
    tx = zero_shard(optimizer, stage=stage, mesh=mesh_of(1))
    found = costs(tx.train_step(loss).lower(jax.eval_shape(tx.create, params), batch).compile())
    # A step also counts itself, and says whether its loss is finite: a few scalars, in up to 3 fusions.
    scalars = (0, 3, 1024, 1024)
    assert all(a <= 1.02 * b + more for a, b, more in zip(found, usual, scalars, strict=True)), (found, usual)
