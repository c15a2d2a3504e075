"""Terms of parameters alone: they are exact, and the parameters are gathered as often as without them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import fraction
from engine_helpers import lay_out, stored
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from zerojax import collectives, zero_shard
from zerojax.comm.collectives import ManualCollectives
from zerojax.comm.global_collectives import GlobalCollectives
from zerojax.gather import gather_on_use

DEPTH, WIDTH, HIDDEN = 3, 25, 257  # 8 devices divide neither, so every layer has padding
LEAVES = jax.tree.leaves


@functools.cache
def mesh(*sizes):
    names = ("data",) if len(sizes) == 1 else ("host", "gpu")
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))


def parameters(style):
    keys = jax.random.split(jax.random.key(0), DEPTH)
    one = lambda key: {
        "up": jax.random.normal(key, (WIDTH, HIDDEN)) * 0.1,
        "down": jax.random.normal(jax.random.fold_in(key, 1), (HIDDEN, WIDTH)) * 0.1,
    }
    layers = [one(key) for key in keys]
    if style == "scanned":
        layers = jax.tree.map(lambda *x: jnp.stack(x), *layers)
    # Equal maxima share their cotangent.
    return {"layers": layers, "head": jnp.ones((WIDTH, 64)).at[3, 4].set(5.0).at[20, 60].set(5.0)}


def block(x, w):
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def base(params, x):
    if isinstance(params["layers"], list):
        for w in params["layers"]:
            x = jax.checkpoint(block)(x, w)
    else:
        x, _ = lax.scan(lambda x, w: (jax.checkpoint(block)(x, w), None), x, params["layers"])
    return jnp.mean((x @ params["head"]) ** 2)


def each(penalty):
    """A loss with a penalty on each leaf."""
    return lambda params, x: base(params, x) + 0.1 * sum(penalty(w) for w in LEAVES(params))


def per_layer(fn):
    return lambda w: fn(w) if w.ndim == 2 else jnp.sum(jax.vmap(fn)(w))


def orthogonality(w):
    return jnp.sum((w.T @ w - jnp.eye(w.shape[1])) ** 2)


def spectral(w):
    v = jnp.ones(w.shape[1])
    for _ in range(3):
        u = w @ v
        u = u / jnp.linalg.norm(u)
        v = w.T @ u
        v = v / jnp.linalg.norm(v)
    return u @ (w @ v)


def changed(change):
    return lambda params, x: base(jax.tree.map(change, params), x)


def standardised(w):
    return (w - jnp.mean(w, -2, keepdims=True)) / jnp.sqrt(jnp.var(w, -2, keepdims=True) + 1e-2)


def reference(w):
    return jnp.sum(jnp.full(w.shape, 0.3) * (w - jnp.full(w.shape, 0.1)) ** 2)


def log_in_padding(w):
    """The chain and its derivative are infinite in padding, which is zero, also for the scalar."""
    return jnp.sum(jnp.log(jnp.abs(w) + jnp.mean(w) - jnp.mean(w)))


REDUCTIONS = {
    "L2": each(lambda w: jnp.sum(w**2)),
    "L1": each(lambda w: jnp.sum(jnp.abs(w))),
    "norm": each(jnp.linalg.norm),
    "global norm": lambda params, x: base(params, x) + optax.global_norm(params),
    "inner product": each(lambda w: jnp.vdot(w, w)),
    "reference": each(reference),
    "variance": each(jnp.var),
    "maximum": each(lambda w: jnp.max(jnp.abs(w))),
    "minimum": each(lambda w: jnp.min(jnp.exp(w))),
    "norms of rows": each(lambda w: jnp.sum(jnp.sqrt(jnp.sum(w**2, axis=-1)))),
    "norms of columns": each(lambda w: jnp.sum(jnp.sqrt(jnp.sum(w**2, axis=-2)))),
    "sorted maxima of rows": each(lambda w: jnp.sum(jnp.cumsum(jnp.max(w, axis=-1)))),
    "logsumexp": each(jax.nn.logsumexp),
    "log of padding": each(log_in_padding),
}
WHOLE = {
    "orthogonality": each(per_layer(orthogonality)),
    "spectral": changed(lambda w: w / (spectral(w) if w.ndim == 2 else jax.vmap(spectral)(w)[:, None, None])),
    "standardised": changed(standardised),
    "weight norm": changed(lambda w: w / jnp.linalg.norm(w, axis=-2, keepdims=True)),
}
LOSSES = {**REDUCTIONS, **WHOLE}
STYLES, VIEWS = ("unrolled", "scanned"), ("global", "device")
X = jax.random.normal(jax.random.key(1), (64, WIDTH))


@functools.cache
def sharded(view):
    return zero_shard(optax.sgd(1.0), stage=3, mesh=mesh(8), view=view, persist_below=100)


def assert_gradient(found, expected):
    for a, b in zip(LEAVES(found), LEAVES(expected), strict=True):
        # Devices add up their parts in another order. Power iterations and variances amplify the rounding.
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max())


QUICK = [
    ("variance", "unrolled", "device"),
    ("maximum", "unrolled", "global"),
    ("log of padding", "unrolled", "device"),
    ("sorted maxima of rows", "unrolled", "global"),
    ("standardised", "unrolled", "global"),
    ("orthogonality", "unrolled", "device"),
]
EVERY = list(dict.fromkeys([*QUICK, *fraction(2, LOSSES, STYLES, VIEWS)]))
CASES = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in EVERY]


@pytest.mark.parametrize(("name", "style", "view"), CASES)
def test_the_gradient_is_that_of_one_device(name, style, view):
    params, tx = parameters(style), sharded(view)
    value, grads = jax.jit(tx.value_and_grad(LOSSES[name]))(tx.shard(params), X)
    expected = jax.jit(jax.value_and_grad(LOSSES[name]))(params, X)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    assert_gradient(tx.unshard(grads), expected[1])


def gathered(loss, style, view):
    """`(bytes gathered, bytes reduced, collectives)` of a compiled gradient, without collectives of small arrays."""
    tx, total = sharded(view), [0, 0, 0]
    compiled = jax.jit(tx.value_and_grad(loss)).lower(tx.shard(parameters(style)), X).compile()
    for c in collectives(compiled):
        large = c.bytes >= WIDTH * 64 * 4
        total[0] += c.bytes * c.times_if_once * (c.kind == "all-gather")
        total[1] += c.bytes * c.times_if_once * large * (c.kind in ("reduce-scatter", "all-reduce"))
        total[2] += c.times_if_once
    return total


@functools.cache
def gathered_without(style, view):
    return gathered(base, style, view)


ONE_GATHER_MORE = [("orthogonality", "scanned"), ("spectral", "scanned")]
FREE = [case for case in fraction(2, LOSSES, STYLES, VIEWS) if case[:2] not in ONE_GATHER_MORE]
FREE = [pytest.param(*case, marks=() if case == FREE[0] else pytest.mark.slow) for case in FREE]


@pytest.mark.parametrize(("name", "style", "view"), FREE)
def test_parameters_are_gathered_as_often_as_without_the_term(name, style, view):
    (passes, reduced, _), without = gathered(LOSSES[name], style, view), gathered_without(style, view)
    assert passes <= 1.02 * without[0]
    # The mean and the variance of each column, and their cotangents. They are 16% of a matrix with only 25 rows.
    columns = sum(x.size // x.shape[-2] for x in LEAVES(parameters("scanned")["layers"]))
    assert reduced <= 1.02 * without[1] + 4 * 4 * columns * (name == "standardised")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["orthogonality", "spectral"])
def test_a_stack_that_is_needed_whole_is_gathered_once_more_in_each_pass(name):
    passes, without = gathered(LOSSES[name], "scanned", "global"), gathered_without("scanned", "global")
    stacks = sum(4 * DEPTH * x.size // DEPTH for x in LEAVES(parameters("scanned")["layers"]))
    assert passes[0] <= without[0] + 2 * 1.05 * stacks  # 264 of 257 columns are gathered


@pytest.mark.parametrize("view", VIEWS)
def test_one_collective_serves_all_reductions(view):
    """XLA may even combine it with the loss's own."""
    assert gathered(REDUCTIONS["L1"], "unrolled", view)[2] <= gathered_without("unrolled", view)[2] + 2


def everything(params, x):
    """A loss with reductions, values of whole parameters and changed weights together."""
    weights = jax.tree.map(lambda w: standardised(w) / (w.shape[-2] ** 0.5), params)
    penalty = sum(jnp.sum(w**2) + jnp.max(w) + jnp.var(w) + per_layer(orthogonality)(w) for w in LEAVES(params))
    return base(weights, x) + 0.1 * penalty + optax.global_norm(params)


OPTIONS = {
    "plain": {},
    "hybrid": {"axis": ("host", "gpu"), "shard_axis": "gpu"},
    "params_axis": {"axis": ("host", "gpu"), "params_axis": "gpu"},
}


@pytest.mark.slow
@pytest.mark.parametrize(("view", "style", "options", "accumulate"), fraction(2, VIEWS, STYLES, OPTIONS, [1, 4]))
def test_a_step_is_that_of_one_device(view, style, options, accumulate):
    sizes = (8,) if options == "plain" else (2, 4)
    tx = zero_shard(optax.sgd(1.0), stage=3, view=view, persist_below=100, mesh=mesh(*sizes), **OPTIONS[options])
    params = parameters(style)
    state = tx.create(jax.tree.map(jnp.copy, params))
    new = tx.unshard(tx.train_step(everything, accumulate=accumulate)(state, X)[0].params)
    expected = jax.jit(jax.grad(everything))(params, X)
    assert_gradient(jax.tree.map(jnp.subtract, params, new), expected)


def second_order(w, x):
    return jnp.sum(jnp.tanh(x @ w)) + jnp.sum(w**4) + jnp.max(w**2) * jnp.min(w) + jax.nn.logsumexp(w)


@pytest.mark.parametrize("order", ["forward over reverse", pytest.param("reverse twice", marks=pytest.mark.slow)])
@pytest.mark.parametrize("view", VIEWS)
def test_a_second_derivative_is_that_of_one_device(view, order):
    w, tangent = (jax.random.normal(jax.random.key(i), (HIDDEN, WIDTH)) for i in range(2))
    x = jnp.full((8, HIDDEN), 0.1)
    setup = lay_out(w, 0)
    comm = GlobalCollectives(("data",), mesh=setup.mesh) if view == "global" else ManualCollectives(("data",))
    rows = (0,) if view == "global" else ()

    def along(loss, w, tangent, x):
        gradient = lambda w: jax.grad(loss)(w, x)
        if order == "reverse twice":
            return jax.grad(lambda w: jnp.vdot(gradient(w), tangent))(w)
        return jax.jvp(gradient, (w,), (tangent,))[1]

    on_shards = functools.partial(along, gather_on_use(second_order, setup.layout, comm=comm, of_rows=rows))
    if view == "device":  # Each device has one of 8 equal losses of all rows.
        specs = P("data"), P("data"), P()
        mapped = jax.shard_map(on_shards, mesh=setup.mesh, in_specs=specs, out_specs=P("data"), check_vma=False)
        on_shards = lambda *args: mapped(*args) / 8
    found = jax.jit(on_shards)(stored(w, setup), stored(tangent, setup), x)
    expected = jax.jit(functools.partial(along, second_order))(w, tangent, x)
    np.testing.assert_allclose(found[:HIDDEN], expected, rtol=1e-4, atol=1e-5)


def test_a_value_of_a_parameter_and_of_a_constant_is_read_before_its_block():
    """An equation that a block computes again must not read a result of the block itself."""
    constant, w = (
        jax.random.normal(jax.random.key(2), (16, WIDTH)),
        jax.random.normal(jax.random.key(3), (WIDTH, WIDTH)),
    )

    def loss(w, x):
        hidden = jnp.tanh(constant @ w)
        return jnp.sum((x @ hidden.T) ** 2) + jnp.sum(jnp.tanh(hidden @ w))

    tx = sharded("global")
    grads = jax.jit(tx.value_and_grad(loss))(tx.shard(w), X)[1]
    assert_gradient(tx.unshard(grads), jax.jit(jax.grad(loss))(w, X))
