"""FP8 training as a whole: modules of NNX, evaluation, checkpoints, parameters in host memory, `wire=` and plans."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absent_gpus import aot
from checkpoints import saved
from conftest import mesh_of
from flax import nnx
from flax.linen import fp8_ops
from flax.nnx import bridge
from fp8_models import DEPTH, HIDDEN, WIDTH, fp8, gathered

import zerojax.flax_nnx
from zerojax import Offload, Tuning, Wire, plan, zero_shard

X = jax.random.normal(jax.random.key(7), (64, WIDTH))
OP = functools.partial(fp8_ops.Fp8DirectDotGeneralOp, amax_history_length=3)
Overwritten = nnx.variablelib.variable_type_from_name(fp8_ops.OVERWRITE_WITH_GRADIENT, allow_register=True)
DIFFERENTIATED = nnx.Any(nnx.Param, Overwritten)


def transformation(stage=3, devices=8, **options):
    return zero_shard(
        optax.sgd(0.1), stage=stage, mesh=mesh_of(devices), tuning=Tuning(persist_below=DEPTH * HIDDEN + 1), **options
    )


def types(tx, loss, params):
    """The types of all values that one gradient gathers."""
    return set(gathered(jax.make_jaxpr(tx.value_and_grad(loss))(tx.shard(params), X).jaxpr))


def linear(features, x, rngs):
    """A layer of NNX, whose product is a Linen module."""
    layer = nnx.Linear(x.shape[-1], features, rngs=rngs)
    product = bridge.ToNNX(OP(), rngs=rngs)
    layer.dot_general = nnx.data(bridge.lazy_init(product, x, layer.kernel[...], (((1,), (0,)), ((), ()))))
    return layer


class Module(nnx.Module):
    """Two FP8 layers."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up = linear(HIDDEN, X, rngs)
        self.down = linear(WIDTH, jnp.zeros((64, HIDDEN)), rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def module_loss(module, x):
    return jnp.mean((module(x) - x) ** 2)


@pytest.mark.slow
def test_nnx_trains_as_on_one_device_and_gathers_float8():
    tx, module, plain = transformation(), Module(), Module()
    graph, params, rest = nnx.split(module, DIFFERENTIATED, ...)
    assert types(tx, lambda params, x: module_loss(nnx.merge(graph, params, rest, copy=True), x), params) == {
        "float8_e4m3fn"
    }
    zerojax.flax_nnx.shard_module(module, tx, wrt=DIFFERENTIATED)
    run = nnx.Optimizer(module, tx, wrt=DIFFERENTIATED)
    gradient = zerojax.flax_nnx.value_and_grad(tx, module_loss, wrt=DIFFERENTIATED)
    plain_gradient = nnx.grad(module_loss, argnums=nnx.DiffState(0, DIFFERENTIATED))
    for _ in range(2):
        run.update(module, gradient(module, X)[1])
        grads = plain_gradient(plain, X)
        weights = nnx.state(plain, nnx.Param)
        nnx.update(plain, jax.tree.map(lambda w, g: w - 0.1 * g, weights, nnx.filter_state(grads, nnx.Param)))
        nnx.update(plain, nnx.filter_state(grads, Overwritten))
    found, expected = tx.unshard(nnx.state(module, DIFFERENTIATED)), nnx.state(plain, DIFFERENTIATED)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        # float32 sums over devices in another order. No element is rounded to another float8 here.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=jax.tree_util.keystr(path))


@pytest.mark.slow
def test_a_run_is_evaluated_saved_and_continued_elsewhere(tmp_path):
    """Scales and histories are saved and restored like weights, from eight devices to four and another stage."""
    loss, variables = fp8("Fp8DirectDotGeneralOp", X, "scanned")
    tx, other = transformation(), transformation(stage=1, devices=4)
    state, step = tx.create(variables), tx.train_step(loss)
    for _ in range(2):
        state, _ = step(state, X)
    checkpoints = saved(tmp_path, state)
    again = checkpoints.restore(tx.create(variables)).state
    moved = checkpoints.restore(other.create(variables)).state
    pair = tx.unshard(state.params), other.unshard(moved.params)
    jax.tree.map(np.testing.assert_array_equal, *pair)
    expected = jax.jit(loss)(tx.unshard(state.params), X)
    np.testing.assert_allclose(tx.eval_step(loss)(again.params, X), expected, rtol=1e-5)
    np.testing.assert_allclose(other.eval_step(loss)(moved.params, X), expected, rtol=1e-5)
    for a, b in zip(*(jax.tree.leaves(step(s, X)[0].params) for s in (state, again)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_wire_sends_float8_unchanged():
    loss, variables = fp8("Fp8DirectDotGeneralOp", X)
    grads = []
    for wire in (None, Wire(gather="int8", block=32)):
        tx = transformation(wire=wire)
        assert types(tx, loss, variables) == {"float8_e4m3fn"}
        grads.append(jax.jit(tx.value_and_grad(loss))(tx.shard(variables), X))
    jax.tree.map(np.testing.assert_array_equal, *grads)


@pytest.mark.slow
def test_parameters_in_host_memory_are_gathered_in_their_own_type():
    loss, variables = fp8("Fp8DirectDotGeneralOp", X)
    assert types(transformation(offload=Offload(optimizer="host", params="host")), loss, variables) == {"float32"}


class Wide(nn.Module):
    """Residual layers that compute in bfloat16."""

    op: type | None = None

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = x + nn.Dense(1024, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=self.op)(x)
        return x


@pytest.mark.slow
@aot
def test_a_plan_counts_float8_products_at_their_rate():
    """Compiled for GPUs that are not there: all products and gathers are float8, and take half of bfloat16's time."""
    batch, plans = jax.ShapeDtypeStruct((8 * 512, 1024), jnp.bfloat16), []
    for op in (None, fp8_ops.Fp8DirectDotGeneralOp):
        loss = lambda v, x, op=op: jnp.mean(Wide(op).apply(v, x).astype(jnp.float32) ** 2)
        tx = zero_shard(optax.adam(1e-3), stage=3, mesh=mesh_of(8), tuning=Tuning(persist_below=2000))
        variables = jax.eval_shape(Wide(op).init, jax.random.key(0), jnp.zeros((1, 1024)))
        plans.append(plan(tx.train_step(loss), tx.create(variables), batch, topology="h100:8"))
    wide, narrow = (found.roofline for found in plans)
    assert wide.operations.keys() == {"bf16"}
    assert narrow.operations.keys() == {"f8e4m3fn", "f8e5m2"}
    assert sum(narrow.operations.values()) == sum(wide.operations.values())
    assert narrow.products == pytest.approx(wide.products / 2)
    gathers = [found.collectives.of("all-gather") for found in plans]
    assert {c.dtype for c in gathers[1]} == {"f8e4m3fn"}
    assert gathers[1].moved().bytes == gathers[0].moved().bytes / 2
