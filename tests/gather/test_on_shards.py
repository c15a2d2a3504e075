"""Terms of parameters alone: they are exact, and the parameters are gathered as often as without them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import fraction, mesh_of
from flat_options import tuned
from jax import lax

from zerojax import Tuning, collectives, zero_shard
from zerojax.gather.on_parts import Division
from zerojax.gather.parts import FlatDim, dims_of
from zerojax.layout.leaf import is_padded

DEPTH, WIDTH, HIDDEN = 3, 25, 257  # 8 devices divide neither, so every layer has padding
LEAVES = jax.tree.leaves


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


def scaled(norm):
    """Divide each layer by a norm that needs the whole layer."""
    return lambda w: w / (norm(w) if w.ndim == 2 else jax.vmap(norm)(w)[:, None, None])


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
    "derivatives": each(lambda w: jnp.sum(lax.erf(w) * jnp.clip(w, -0.1, 0.1) ** 3 + jax.nn.silu(w.T).T)),
    "custom derivative": each(lambda w: jnp.sum(jax.nn.relu(w.ravel() - 0.1))),
    "log of padding": each(log_in_padding),
}
WHOLE = {
    "orthogonality": each(per_layer(orthogonality)),
    "spectral": changed(scaled(spectral)),
    "standardised": changed(standardised),
    "weight norm": changed(lambda w: w / jnp.linalg.norm(w, axis=-2, keepdims=True)),
}
LOSSES = {**REDUCTIONS, **WHOLE}
STYLES, VIEWS = ("unrolled", "scanned"), ("global", "device")
X = jax.random.normal(jax.random.key(1), (64, WIDTH))


@functools.cache
def sharded(view):
    return zero_shard(optax.sgd(1.0), stage=3, mesh=mesh_of(8), view=view, tuning=Tuning(persist_below=100))


def assert_gradient(found, expected):
    for a, b in zip(LEAVES(found), LEAVES(expected), strict=True):
        # Devices add up their parts in another order. Power iterations and variances amplify the rounding.
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max())


def assert_padding_is_zero(grads):
    padded = [x for x in jax.tree.leaves(grads, is_leaf=is_padded) if is_padded(x)]
    assert padded
    for x in padded:
        outside = np.array(x.storage)
        outside[tuple(map(slice, x.shape))] = 0
        assert not outside.any()


def compiled_gradient(loss, style, view):
    tx = sharded(view)
    return jax.jit(tx.value_and_grad(loss)).lower(tx.shard(parameters(style)), X).compile()


def moved(compiled):
    """`(bytes gathered, bytes reduced, collectives)` of a program, without bytes of small arrays that are reduced."""
    total = [0, 0, 0]
    for c in collectives(compiled):
        large = c.bytes >= WIDTH * 64 * 4
        total[0] += c.bytes * c.times_if_once * (c.kind == "all-gather")
        total[1] += c.bytes * c.times_if_once * large * (c.kind in ("reduce-scatter", "all-reduce"))
        total[2] += c.times_if_once
    return total


@functools.cache
def moved_without(style, view):
    return moved(compiled_gradient(base, style, view))


def iterated(w):
    """The spectral norm by a loop of power iterations."""
    normed = lambda v: v / jnp.linalg.norm(v)
    v = lax.fori_loop(0, 3, lambda _, v: normed(w.T @ normed(w @ v)), jnp.ones(w.shape[1]))
    return jnp.linalg.norm(w @ v)


def transposed(params, x):
    """The stack is transposed before its loop."""
    layers = params["layers"]
    if isinstance(layers, list):
        return base(params, x)
    turned = jax.tree.map(lambda w: jnp.swapaxes(w, 1, 2), layers)
    block = lambda x, w: (x + jnp.tanh(x @ w["up"].T) @ w["down"].T, None)
    x, _ = lax.scan(jax.checkpoint(block), x, turned)
    return jnp.mean((x @ params["head"]) ** 2)


def first(params, x):
    """The penalty comes before the model."""
    penalty = sum(per_layer(orthogonality)(w) for w in LEAVES(params["layers"]))
    return 0.1 * penalty + base(params, x)


# Further values of whole layers. The first one is computed where the layers are gathered, and not on the shards.
MORE = {
    "iterated": changed(scaled(iterated)),
    "softplus": changed(scaled(lambda w: jnp.sum(jax.nn.softplus(w.T @ w)))),
    "batched": changed(lambda w: w / (1 + jnp.mean(jnp.abs(jnp.swapaxes(w, -1, -2) @ w), (-2, -1), keepdims=True))),
    "transposed": transposed,
    "first": first,
}
UNROLLED = ("orthogonality", "first")  # A penalty on whole layers gathers a stack once more.
QUICK = [
    ("L1", "unrolled", "global"),
    ("maximum", "unrolled", "global"),
    ("inner product", "unrolled", "global"),
    ("derivatives", "unrolled", "global"),
    ("custom derivative", "scanned", "global"),
    ("log of padding", "unrolled", "device"),
]
CASES = [*QUICK, *fraction(2, LOSSES, STYLES, VIEWS)]
CASES += fraction(2, MORE, STYLES, VIEWS)
CASES = [case for case in CASES if case[0] not in UNROLLED or case[1] == "unrolled"]
CASES = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in dict.fromkeys(CASES)]


@pytest.mark.parametrize(("name", "style", "view"), CASES)
def test_a_term_of_parameters_is_exact_and_shares_the_gathers_of_the_model(name, style, view):
    loss, params, tx = {**LOSSES, **MORE}[name], parameters(style), sharded(view)
    compiled, without = compiled_gradient(loss, style, view), moved_without(style, view)
    value, grads = compiled(tx.shard(params), X)
    expected = jax.jit(jax.value_and_grad(loss))(params, X)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    assert_gradient(tx.unshard(grads), expected[1])
    assert_padding_is_zero(grads)
    gathered, reduced, count = moved(compiled)
    assert gathered <= 1.02 * without[0]
    if name == "L1":  # One collective serves all reductions. XLA may even combine it with the loss's own.
        assert count <= without[2] + 2
    # The mean and the variance of each column, and their cotangents. They are 16% of a matrix with only 25 rows.
    columns = sum(x.size // x.shape[-2] for x in LEAVES(parameters("scanned")["layers"]))
    assert name in MORE or reduced <= 1.02 * without[1] + 4 * 4 * columns * (name == "standardised")


def beside(params, x):
    """Layers that are changed by constants of all layers, and maxima that several layers have in common."""
    w = params["layers"]
    gram, constants = w @ jnp.swapaxes(w, 1, 2), jnp.arange(w.size).reshape(w.shape) / w.size
    lower = jnp.tril(constants) + jnp.eye(WIDTH)
    solved = lax.linalg.triangular_solve(lower, w, left_side=True, lower=True)
    layers = 1e-2 * jnp.tanh(gram + constants) + jnp.tanh(solved)
    x, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, layers)
    columns = w @ jnp.eye(WIDTH)
    return jnp.mean(x**2) + jnp.max(columns) - jnp.sum(jnp.min(columns, axis=(0, 1)))


@pytest.mark.quick(1)
@pytest.mark.parametrize("view", VIEWS)
def test_values_of_layers_are_exact_beside_constants_and_with_equal_maxima(view):
    """Of the maxima, two are in the first layer and one is in the second."""
    tx = sharded(view)
    layers = 0.1 * jax.random.normal(jax.random.key(2), (DEPTH, WIDTH, WIDTH)).clip(-1, 1)
    params = {"layers": layers.at[0, :2, 3].set(0.7).at[1, 4, 5].set(0.7).at[2, :, 6].set(-0.7).at[1, 2, 6].set(-0.7)}
    grads = jax.jit(tx.value_and_grad(beside))(tx.shard(params), X)[1]
    assert_gradient(tx.unshard(grads), jax.jit(jax.grad(beside))(params, X))


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "style"), [(2, "unrolled"), (8, "scanned")])
def test_gradients_of_merged_adapters_are_as_small_as_the_adapters(rank, style):
    """At rank 2, the adapters are replicated. Frozen weights are gathered, and no gradient of their size is summed."""
    params = parameters(style)
    factor = lambda w, *shape: 0.1 * jax.random.normal(jax.random.key(5), (*w.shape[:-2], *shape))
    adapters = jax.tree.map(lambda w: (factor(w, w.shape[-2], rank), factor(w, rank, w.shape[-1])), params["layers"])
    is_pair = lambda x: isinstance(x, tuple)

    def loss(params, x):
        frozen, adapters = params
        merge = lambda pair, w: w + 0.5 * (pair[0] @ pair[1])
        layers = jax.tree.map(merge, adapters, frozen["layers"], is_leaf=is_pair)
        return base({**frozen, "layers": layers}, x)

    options = {"tuning": Tuning(persist_below=1000), "trainable": lambda path, _: path.startswith("1/")}
    tx = zero_shard(optax.sgd(1.0), stage=3, mesh=mesh_of(8), **options)
    stored = tx.shard((params, adapters))
    compiled = jax.jit(tx.value_and_grad(loss)).lower(stored, X).compile()
    grads = tx.unshard(compiled(stored, X)[1])
    assert_gradient(grads[1], jax.jit(jax.grad(loss))((params, adapters), X)[1])
    reduced = sum(c.bytes * c.times_if_once for c in collectives(compiled) if "reduce" in c.kind)
    assert reduced <= 1.1 * sum(x.nbytes for x in LEAVES(adapters))


def everything(params, x):
    """A loss with reductions, values of whole parameters and changed weights together."""
    weights = jax.tree.map(lambda w: standardised(w) / (w.shape[-2] ** 0.5), params)
    penalty = sum(jnp.sum(w**2) + jnp.max(w) + jnp.var(w) + per_layer(orthogonality)(w) for w in LEAVES(params))
    return base(weights, x) + 0.1 * penalty + optax.global_norm(params)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("view", "style", "option", "accumulate"),
    [("global", "scanned", "shard_axis", 4), ("device", "unrolled", "params_axis", 1)],
)
def test_a_step_is_that_of_one_device(view, style, option, accumulate):
    hybrid = {"mesh": mesh_of(2, 4), "axis": ("host", "gpu"), option: "gpu"}
    tx = zero_shard(optax.sgd(1.0), stage=3, view=view, **tuned(persist_below=100, **hybrid))
    params = parameters(style)
    state = tx.create(jax.tree.map(jnp.copy, params))
    new = tx.unshard(tx.train_step(everything, accumulate=accumulate)(state, X)[0].params)
    expected = jax.jit(jax.grad(everything))(params, X)
    assert_gradient(jax.tree.map(jnp.subtract, params, new), expected)


def test_a_value_of_a_parameter_and_of_a_constant_is_read_before_its_block():
    """An equation that a block computes again must not read a result of the block itself."""
    constant, w = (jax.random.normal(jax.random.key(key), (rows, WIDTH)) for key, rows in ((2, 16), (3, WIDTH)))

    def loss(w, x):
        hidden = jnp.tanh(constant @ w)
        return jnp.sum((x @ hidden.T) ** 2) + jnp.sum(jnp.tanh(hidden @ w))

    tx = sharded("global")
    grads = jax.jit(tx.value_and_grad(loss))(tx.shard(w), X)[1]
    assert_gradient(tx.unshard(grads), jax.jit(jax.grad(loss))(w, X))


FLAT = {
    "sum": lambda w: jnp.sum(w.ravel()[128:256]),
    "squares": lambda w: jnp.sum(w.ravel()[:128] ** 2),
    "constant": lambda w: lax.stop_gradient(jnp.mean(jnp.abs(w.ravel()[128:256]))),
    "maximum": lambda w: jnp.max(w.ravel()[384:]),
    "shaped": lambda w: jnp.sum(w.reshape(-1)[128:256].reshape(16, 8) ** 3),
    "padded": lambda w: jnp.sum(jnp.pad(w.ravel(), (128, 256), constant_values=2.0) ** 2),
}


@pytest.mark.parametrize("name", FLAT)
def test_a_part_of_a_flattened_parameter_is_that_of_one_device(name):
    """One block of the flattened parameter: the rows of a divided dim, and no device has a part of every block."""
    params = {"w": jax.random.normal(jax.random.key(0), (4, 128))}
    loss = lambda params, x: jnp.mean((x @ params["w"]) ** 2) + FLAT[name](params["w"])
    found, grads = jax.jit(sharded("global").value_and_grad(loss))(sharded("global").shard(params), X[:, :4])
    expected, gradient = jax.value_and_grad(loss)(params, X[:, :4])
    np.testing.assert_allclose(found, expected, rtol=1e-6)  # the devices add up their rows in another order
    assert_gradient(grads, gradient)


# A function of an array, its shape and divided dim; then the dim of the result for shards, for shards with flattened
# arrays, and for layers. None: all devices have the whole result. "-": it cannot be computed on parts.
DIMS = [
    (lambda x: x.T, (8, 4), 0, (1, 1, 1)),
    (lambda x: x[:, :2] + jnp.ones((2, 8, 1)), (8, 4), 0, (1, 1, 1)),
    (lambda x: x[:3], (8, 4), 0, ("-", "-", "-")),
    (lambda x: x.reshape(8, 2, 2), (8, 4), 0, (0, 0, 0)),
    (lambda x: x.reshape(32), (8, 4), 0, ("-", FlatDim(1, 8), "-")),
    (lambda x: x.reshape(16), (2, 8), 1, ("-", FlatDim(2, 8), "-")),
    (lambda x: x.reshape(2, 16), (2, 8, 2), 1, ("-", "-", "-")),
    (lambda x: jnp.tanh(x.reshape(32)).reshape(8, 4), (8, 4), 0, ("-", 0, "-")),
    (lambda x: x.reshape(32)[:5], (8, 4), 0, ("-", "-", "-")),
    (lambda x: jnp.tanh(x.sum(0)), (8, 4), 0, (None, None, "-")),
    (lambda x: x.sum(1), (8, 4), 0, (0, 0, 0)),
    (lambda x: jnp.sort(x, 1), (8, 4), 0, ("-", "-", 0)),
    (lambda x: x @ x.T, (8, 4), 0, ("-", "-", "-")),
    (lambda x: x @ x, (8,), 0, (None, None, "-")),
    (lambda x: 2 * x, (1, 4), 0, ("-", "-", "-")),
]


@pytest.mark.parametrize(("fn", "shape", "dim", "expected"), DIMS)
def test_which_values_can_be_computed_on_parts(fn, shape, dim, expected):
    jaxpr = jax.make_jaxpr(fn)(jnp.ones(shape)).jaxpr
    found = [dims_of(jaxpr, {jaxpr.invars[0]: dim}, **on) for on in ({}, {"flattens": True}, {"layers": True})]
    assert tuple(dims.get(jaxpr.outvars[0], "-") for dims in found) == expected


@pytest.mark.parametrize("dim", [1, FlatDim(2, 5)])
def test_parts_of_an_array_in_full_are_padded_with_ones(dim):
    """5 rows in parts of 2, of which the last has one row of padding, which `fill` replaces."""
    x = jnp.arange(2 * 5 * 3.0).reshape(2, 5, 3)
    given = x if dim == 1 else x.ravel()
    parts = [Division(5, 2, 6, (), start) for start in (0, 2, 4)]
    for fill in (1, 7):
        found = [division.fill(division.part(given, dim), dim, fill) for division in parts]
        rows = jnp.concatenate([part.reshape(2, 2, 3) for part in found], 1)
        np.testing.assert_array_equal(rows, jnp.pad(x, [(0, 0), (0, 1), (0, 0)], constant_values=fill))
