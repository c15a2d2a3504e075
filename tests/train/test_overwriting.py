"""Leaves that take their gradient as the new value: Flax's FP8 layers, and whatever `overwrite=` names."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of
from flax.linen import fp8_ops
from flax.training.train_state import TrainState

from zerojax import Offload, Precision, Tuning, compat, report, zero_shard
from zerojax.layout.tree import layout_of
from zerojax.train.loss import Loss, LossInputs, View
from zerojax.train.overwriting import Dependence, dependence, without_scale

slow = functools.partial(pytest.param, marks=pytest.mark.slow)
OWG = fp8_ops.OVERWRITE_WITH_GRADIENT
WIDTH = 16


class Model(nn.Module):
    """Two FP8 layers, whose histories are of three steps."""

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            dot_general = functools.partial(fp8_ops.Fp8DirectDotGeneralOp, amax_history_length=3)
            x = jnp.tanh(nn.Dense(WIDTH, dot_general_cls=dot_general)(x))
        return x


def loss(variables, batch):
    return jnp.mean((Model().apply(variables, batch["x"]) - batch["y"]) ** 2)


def batches(count=4, rows=8):
    keys = jax.random.split(jax.random.key(1), (count, 2))
    return [{"x": 3 * jax.random.normal(a, (rows, WIDTH)), "y": jax.random.normal(b, (rows, WIDTH))} for a, b in keys]


VARIABLES = Model().init(jax.random.key(0), batches()[0]["x"])


def optimizer():
    return optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, weight_decay=0.1))


def zero(stage, **options):
    return zero_shard(optimizer(), stage=stage, mesh=mesh_of(4), tuning=Tuning(persist_below=20), **options)


@functools.cache
def plain(parts=1):
    """Flax's own loop on one device; of several parts of a batch, the mean of gradients and the maximum of values."""
    state = TrainState.create(apply_fn=None, params=VARIABLES, tx=optimizer())
    gradient = jax.jit(jax.grad(loss))
    for batch in batches():
        rows = jax.tree.map(lambda x: x.reshape(parts, -1, WIDTH), batch)
        each = [gradient(state.params, jax.tree.map(lambda x, k=k: x[k], rows)) for k in range(parts)]
        mean = jax.tree.map(lambda *xs: sum(xs) / parts, *[g["params"] for g in each])
        most = jax.tree.map(lambda *xs: functools.reduce(jnp.maximum, xs), *[g[OWG] for g in each])
        state = state.apply_gradients(grads={"params": mean, OWG: most})
    return jax.device_get(state.params)


def assert_close(found, expected, *, without="-"):
    """Equal up to the order of sums; after four steps, none of which rounded to another number of 8 bits here."""
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(found), strict=True):
        if without not in jax.tree_util.keystr(path):
            np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-6, err_msg=jax.tree_util.keystr(path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "options", "parts"),
    [
        (1, {}, 1),
        (3, {"offload": Offload(optimizer="host", params="host")}, 1),
        (3, {"view": "device"}, 4),  # also the largest cotangents, which each device sees as `pmap` shows them
    ],
)
def test_a_run_equals_flaxs_own(stage, options, parts):
    tx = zero(stage, **options, trainable=lambda path, leaf: path.startswith("params"))
    state, step = tx.create(VARIABLES), tx.train_step(loss)
    for batch in batches():
        state, _ = step(state, batch)
    assert_close(tx.unshard(state.params), plain(parts))
    assert str(state.plan).count("overwritten with its gradient") == str(report(state)).count("overwritten") * 2 == 12
    assert not any(OWG in leaf.path for leaf in (*state.plan.grads, *state.plan.state))


@pytest.mark.slow
def test_layers_shared_by_the_iterations_of_a_loop_take_the_maximum_of_their_uses():
    """Flax has a type for that, whose values autodiff does not add: stage 3's loops must ask it, too."""

    def looped(variables, batch):
        shared = jax.tree.map(lambda x: jax.lax.convert_element_type(x, fp8_ops.fm32), variables[OWG])
        apply = lambda x: Model().apply({"params": variables["params"], OWG: shared}, x)
        x, _ = jax.lax.scan(lambda x, _: (apply(x), None), batch["x"], length=2)
        return jnp.mean((x - batch["y"]) ** 2)

    tx, batch = zero(3), batches(1)[0]
    expected = jax.jit(jax.grad(looped))(plain(), batch)[OWG]
    assert_close(tx.value_and_grad(looped)(tx.shard(plain()), batch)[1][OWG], expected)
    assert all(np.all(x != 0) for x in jax.tree.leaves(expected))


@jax.custom_vjp
def observed(x, extremes):
    """Return `x`; the gradient of `extremes` is its least and its largest element, which are to replace it."""
    del extremes
    return x


observed.defvjp(lambda x, _: (x, x), lambda x, g: (g, jnp.stack([x.min(), x.max()])))


@pytest.mark.slow
def test_values_keep_their_type_and_no_norm_counts_them():
    precision = Precision.bf16(loss_scale=4.0)
    tx = zero(2, precision=precision)
    state, step = tx.create(VARIABLES), tx.train_step(loss, leaf_norms=True)
    narrow = lambda p, b: loss(
        {"params": jax.tree.map(lambda x: x.astype(precision.compute), p["params"]), OWG: p[OWG]}, b
    )
    for batch in batches(2):
        before = tx.unshard(state.params)
        state, metrics = step(state, batch)
        after, batch = tx.unshard(state.params)[OWG], jax.tree.map(lambda x: x.astype(precision.compute), batch)
        expected = jax.jit(jax.grad(narrow))(before, batch)[OWG]
        assert_close(after, expected, without="output_grad")
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(after))
    norms = jax.tree.leaves(metrics["grad_norms"])
    assert len(norms) == len(jax.tree.leaves(VARIABLES["params"]))
    np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(norms), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "accumulate", "options"),
    [slow(1, 1, {"precision": Precision.fp32(loss_scale=8.0)}), (3, 2, {}), slow(3, 1, {"view": "device"})],
)
def test_a_plain_derivative_is_that_of_the_loss_itself(stage, accumulate, options):
    """It is not scaled with the cotangent, and a value that does not depend on the cotangent is not unscaled."""

    def fn(p, batch):
        h = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), h.sum()), batch, jnp.stack([p["w"]] * 2))[0]
        linear = jax.lax.scan(lambda s, x: (s + x @ p["sums"], x[0]), 0.0, jnp.concatenate([h[:, :2] * 3, -h[:, 2:4]]))
        return jnp.mean(observed(h, p["extremes"])) + linear[0] / batch.shape[0]

    w = jnp.linspace(-1, 1, WIDTH * WIDTH).reshape(WIDTH, WIDTH)
    params = {"w": w, "extremes": jnp.zeros(2), "sums": jnp.ones(2)}
    tx = zero(stage, overwrite=lambda path, leaf: path != "w", **options)
    batch = jnp.tile(jnp.sin(jnp.arange(WIDTH * 1.0)), (8, 1))  # all parts are alike
    state, _ = tx.train_step(fn, accumulate=accumulate)(tx.create(params), batch)
    expected = jax.grad(fn)(params, batch)
    for name in ("extremes", "sums"):
        np.testing.assert_allclose(state.params[name], expected[name], rtol=1e-5)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (lambda cotangent, x: 2 * cotangent * x, Dependence.LINEAR),
        (lambda cotangent, x: cotangent / x, Dependence.LINEAR),
        (lambda cotangent, x: x / cotangent, Dependence.OTHER),
        (lambda cotangent, x: cotangent * cotangent, Dependence.OTHER),
        (lambda cotangent, x: cotangent * x - 3 * cotangent, Dependence.LINEAR),
        (lambda cotangent, x: cotangent - x, Dependence.OTHER),
        (lambda cotangent, x: x - cotangent, Dependence.OTHER),
        (lambda cotangent, x: jnp.abs(cotangent), Dependence.OTHER),
        (lambda cotangent, x: jnp.stack([cotangent, -cotangent]), Dependence.LINEAR),
        (lambda cotangent, x: jnp.stack([cotangent, x]), Dependence.OTHER),
        (lambda cotangent, x: jnp.concatenate([jnp.tile(cotangent, 2), jnp.real(cotangent)[None]]), Dependence.LINEAR),
        (lambda cotangent, x: jnp.where(x > 0, cotangent, 0.0), Dependence.LINEAR),
        (lambda cotangent, x: jnp.where(cotangent > 0, x, 0.0), Dependence.OTHER),
        (lambda cotangent, x: jnp.sin(x), Dependence.CONSTANT),
        (lambda cotangent, x: jnp.zeros(()) * 1.0, Dependence.ZERO),
        (lambda cotangent, x: jax.lax.fori_loop(0, 3, lambda _, y: y + cotangent, 0.0), Dependence.LINEAR),
        (lambda cotangent, x: jax.lax.fori_loop(0, 3, lambda _, y: y * cotangent, x), Dependence.OTHER),
    ],
)
def test_how_a_value_depends_on_the_cotangent(value, kind):
    jaxpr, _ = compat.opened(jax.make_jaxpr(value)(1.0, 2.0))
    assert dependence(jaxpr, [Dependence.LINEAR, Dependence.CONSTANT]) == [kind]


def test_a_derivative_is_linear_in_the_cotangent_and_a_statistic_does_not_depend_on_it():
    loss = lambda primals, rows: jnp.sum(observed(rows, primals[1]) * primals[0])
    backward = lambda cotangent, primals, rows: jax.vjp(lambda x: loss(x, rows), primals)[1](cotangent)
    jaxpr, _ = compat.opened(jax.make_jaxpr(backward)(8.0, [3.0, jnp.zeros(2)], jnp.arange(5.0)))
    found = dependence(jaxpr, [Dependence.LINEAR, *[Dependence.CONSTANT] * 3])
    assert found == [Dependence.LINEAR, Dependence.CONSTANT]


@pytest.mark.parametrize(
    ("options", "weighted", "accumulate", "divides"),
    [
        ({}, True, 2, True),
        ({}, True, 1, False),
        ({"precision": Precision.fp32(loss_scale=8.0)}, False, 1, True),
        ({"precision": Precision.fp32()}, False, 2, False),
    ],
)
def test_only_a_derivative_is_divided_by_the_cotangent(options, weighted, accumulate, divides):
    params = {"extremes": jnp.zeros(2), "sums": jnp.ones(5), "w": jnp.ones((5, 41))}
    fn = lambda p, batch: jnp.sum(observed(batch * p["sums"], p["extremes"]) @ p["w"])
    loss = Loss((lambda p, batch: (fn(p, batch), 2.0)) if weighted else fn, weighted=weighted)
    tx = zero(3, overwrite=lambda path, leaf: path != "w", **options)
    view = View(tx.config, layout_of(tx.config, params), (), loss, accumulate)
    values, given = [jnp.full(2, 8.0), jnp.full(5, 8.0)], jax.tree.leaves(tx.shard(params))
    found = without_scale(view, values, LossInputs(given, None, jnp.ones((8, 5)), ()), jnp.float32(4))
    assert [x.tolist() for x in found] == [[8.0] * 2, [8.0 / 4 if divides else 8.0] * 5]
