"""Quantised and straight-through weights: shards compute them, and gathers move their own type."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import fraction, mesh_of
from flat_options import tuned
from fp8_models import HIDDEN, OPS, WIDTH, fp8, gathered
from jax import lax
from jax.experimental import pallas as pl

from zerojax import Precision, Wire, zero_shard

DEPTH, ROWS, PADDED = 3, 64, 257  # eight devices divide neither 65 nor 257
X = jax.random.normal(jax.random.key(7), (ROWS, WIDTH))


def straight(bits, estimate):
    """`quantised(w)` with the gradient of `w`. `estimate` computes both from `(w, quantised)`."""

    def fn(w):
        scale = jnp.max(jnp.abs(w)) / 2 ** (bits - 1)
        levels = jnp.clip(jnp.round(w / scale), 1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1)
        return estimate(w, levels.astype(f"int{bits}").astype(w.dtype) * scale)

    return fn


def with_rule(axis):
    """Integers of eight bits with one scale per row or column, and a rule of its own that passes the gradient on."""

    @jax.custom_vjp
    def fn(w):
        scale = jnp.max(jnp.abs(w), axis=axis, keepdims=True) / 128
        return jnp.clip(jnp.round(w / scale), -127, 127).astype(jnp.int8).astype(w.dtype) * scale

    fn.defvjp(lambda w: (fn(w), jnp.abs(w) < 0.2), lambda inside, g: (jnp.where(inside, g, 0.5 * g),))
    return fn


QUANTISERS = {
    "straight through": straight(8, lambda w, q: w + lax.stop_gradient(q - w)),
    "four bits": straight(4, lambda w, q: w + lax.stop_gradient(q - w)),
    "scale per column": with_rule(0),
    "scale per row": with_rule(1),
    "scale": with_rule(None),
    # The derivative of the cast and of the maximum is taken, too.
    "logarithm": lambda w: jnp.sign(w) * jnp.exp(jnp.round(8 * jnp.log(jnp.abs(w) + 1e-3)) / 8) * jnp.max(jnp.abs(w)),
}


def parameters(style, hidden=HIDDEN):
    """Weights whose scales are powers of two. With another scale, one ulp would round some of them to another level."""

    def weight(key, shape):
        w = jnp.clip(0.1 * jax.random.normal(key, shape), -0.25, 0.25)
        return w.at[0].set(0.25).at[:, 0].set(-0.25)

    def one(key):
        up, down = jax.random.split(key)
        return {"up": weight(up, (WIDTH, hidden)), "down": weight(down, (hidden, WIDTH))}

    layers = [one(key) for key in jax.random.split(jax.random.key(0), DEPTH)]
    return layers if style == "unrolled" else jax.tree.map(lambda *x: jnp.stack(x), *layers)


def loss_of(quantiser, style, where="inside"):
    """The loss of a residual model whose weights are quantised inside the rematerialised layers, or before them."""
    inside = quantiser if where == "inside" else lambda w: w

    def block(x, w):
        return x + jnp.tanh(x @ inside(w["up"])) @ inside(w["down"])

    def loss(layers, x):
        if where == "before":
            layers = jax.tree.map(quantiser if style == "unrolled" else jax.vmap(quantiser), layers)
        if style == "unrolled":
            for w in layers:
                x = jax.checkpoint(block)(x, w)
        else:
            x, _ = lax.scan(lambda x, w: (jax.checkpoint(block)(x, w), None), x, layers)
        return jnp.mean(x**2)

    return loss


def transformation(view="global", **options):
    options = {"mesh": mesh_of(8), "persist_below": 200} | options
    return zero_shard(optax.sgd(0.1), stage=3, view=view, **tuned(**options))


def passes(loss, params, view="global", **options):
    """Gathered bytes over the bytes of the parameters, by type."""
    tx = transformation(view, **options)
    closed = jax.make_jaxpr(tx.value_and_grad(loss))(tx.shard(params), X)
    total = sum(x.nbytes for x in jax.tree.leaves(params) if x.ndim > 1)
    return {name: size / total for name, size in gathered(closed.jaxpr).items()}


def assert_same_gradient(loss, params, view="global", tolerance=2e-6, **options):
    """The gradient equals one device's, up to the order of float32 sums over eight devices."""
    tx = transformation(view, **options)
    value, grads = jax.jit(tx.value_and_grad(loss))(tx.shard(params), X)
    expected, plain = jax.jit(jax.value_and_grad(loss))(params, X)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(tx.unshard(grads)), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance * float(jnp.abs(b).max()))


GRID = fraction(2, QUANTISERS, ("unrolled", "scanned"), ("global", "device"), ("inside", "before"))
QUICK = ("scale per row", "scanned", "device", "inside")
CASES = [QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in GRID if case != QUICK)]


@pytest.mark.parametrize(("name", "style", "view", "where"), CASES)
def test_gradients_equal_one_devices_and_a_weight_is_gathered_as_often_as_a_plain_one(name, style, view, where):
    """Leaves with padding, whose scale must not come from the padding."""
    loss, params = loss_of(QUANTISERS[name], style, where), parameters(style, PADDED)
    assert_same_gradient(loss, params, view)
    usual, found = passes(loss_of(lambda w: w, style), params, view)["float32"], passes(loss, params, view)
    if name.startswith("scale"):  # The value has eight bits. The scales of rows and columns are gathered, too.
        assert found.pop("int8") <= 1.02 * usual / 4
        assert sum(found.values()) <= 0.02
    else:
        assert found == {"float32": pytest.approx(usual, rel=0.02)}


def in_a_loop_of_microbatches(w, x):
    rows = x.reshape(8, -1, WIDTH)
    return lax.scan(lambda s, x: (s + jnp.mean((x @ QUANTISERS["scale"](w["up"])) ** 2), None), 0.0, rows)[0]


def shared_by_all_iterations(w, x):
    square = QUANTISERS["scale"](w["up"])[:, :WIDTH]
    return jnp.mean(lax.scan(lambda h, _: (jnp.tanh(h @ square), None), x, None, length=4)[0] ** 2)


def quantised_in_all_iterations(w, x):
    step = lambda h, _: (jnp.tanh(h @ QUANTISERS["scale"](w["up"])[:, :WIDTH]), None)
    return jnp.mean(lax.scan(step, x, None, length=4)[0] ** 2)


def written_to_a_ref(w, x):
    ref = jax.new_ref(jnp.zeros(()))
    ref[...] = jnp.mean((x @ QUANTISERS["scale"](w["up"])) ** 2)
    return ref[...]


def penalised(w, x):
    quantised = QUANTISERS["scale per column"](w["up"])
    penalty = jnp.sum(w["up"] ** 2) + jnp.max(jnp.abs(w["down"])) + jnp.sum(quantised**2)
    return jnp.mean(jnp.tanh(x @ quantised) ** 2) + 1e-2 * penalty


UNUSUAL = [
    in_a_loop_of_microbatches,
    shared_by_all_iterations,
    quantised_in_all_iterations,
    written_to_a_ref,
    penalised,
]


@pytest.mark.quick(1)
@pytest.mark.parametrize("view", ["global", pytest.param("device", marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss", UNUSUAL)
def test_unusual_uses_of_a_quantised_weight(loss, view):
    assert_same_gradient(loss, parameters("unrolled", PADDED)[0], view)


def test_a_weight_that_is_also_read_itself_is_not_gathered_twice():
    """Beside it, a bias is divided. It is too small to need a quantised weight."""
    params = {"w": parameters("unrolled", 256)[0]["up"], "b": jnp.ones(256)}
    both = lambda w, x: jnp.tanh(x @ QUANTISERS["scale"](w) + x @ w)
    found = passes(lambda p, x: jnp.mean((both(p["w"], x) + p["b"]) ** 2), params)
    assert found.keys() == {"float32"}


@pytest.mark.slow
def test_a_scale_of_a_small_divided_dim():
    """The scale is alike on all devices, but as large as a shard."""
    w, x = parameters("unrolled")[0]["up"][:2], X[:, :2]
    loss = lambda w, x: jnp.mean((x @ QUANTISERS["scale per column"](w)) ** 2)
    tx = transformation(mesh=mesh_of(2), persist_below=0)
    grads = tx.unshard(jax.jit(tx.value_and_grad(loss))(tx.shard(w), x)[1])
    plain = jax.grad(loss)(w, x)
    # Sums of float32 are as exact as their summands: an element whose summands cancel has fewer exact digits.
    np.testing.assert_allclose(grads, plain, atol=2e-6 * float(jnp.abs(plain).max()))


def test_a_second_derivative_is_refused():
    tx, w = transformation(), parameters("unrolled")[0]["up"]
    loss = lambda w, x: jnp.mean((x @ QUANTISERS["scale"](w)) ** 2)
    along = lambda w: jnp.vdot(tx.value_and_grad(loss)(w, X)[1], w)
    with pytest.raises(TypeError, match="second derivative of a loss with a quantised weight"):
        jax.grad(along)(tx.shard(w))


@pytest.mark.slow
@pytest.mark.parametrize("view", ["global", "device"])
@pytest.mark.parametrize("style", ["unrolled", "scanned"])
@pytest.mark.parametrize("option", ["hybrid", "further", "accumulate", "hybrid accumulate", "wire"])
def test_options_change_no_gradient(option, style, view):
    loss, params = loss_of(QUANTISERS["scale per column"], style), parameters(style, PADDED)
    options = {
        "hybrid": {"mesh": mesh_of(2, 4), "axis": ("host", "gpu"), "shard_axis": "gpu"},
        "further": {"mesh": mesh_of(2, 4), "axis": ("host", "gpu"), "params_axis": "gpu"},
        "wire": {"wire": Wire(gather="int8")},
    }.get(option.split()[0], {})
    if "accumulate" not in option:
        assert_same_gradient(loss, params, view, **options)
        return
    tx = transformation(view, **options)
    state, _ = tx.train_step(loss, accumulate=4)(tx.create(params), X)
    grads = jax.jit(jax.grad(loss))(params, X)
    for new, old, grad in zip(*map(jax.tree.leaves, (tx.unshard(state.params), params, grads)), strict=True):
        np.testing.assert_allclose(new, old - 0.1 * grad, atol=1e-6)  # float32 sums of four microbatches


@pytest.mark.slow
@pytest.mark.parametrize("view", ["global", "device"])
def test_in_bfloat16_the_cotangent_has_the_type_of_the_wide_weight(view):
    params, name = parameters("unrolled"), "scale per column"
    found = passes(loss_of(QUANTISERS[name], "unrolled"), params, view, precision=Precision.bf16())
    usual = passes(loss_of(lambda w: w, "unrolled"), params, view, precision=Precision.bf16())
    assert found["int8"] == pytest.approx(usual["bfloat16"] / 2, rel=0.02)


def quantised_product(reads_weight, *, counts=False):
    """A product that quantises the weight itself. Its backward pass reads the quantised weight, or also the weight.

    With `counts`, it also returns how many values are clipped.
    """

    @jax.custom_vjp
    def product(x, w):
        return forward(x, w)[0]

    def forward(x, w):
        scale = jnp.max(jnp.abs(w), axis=0, keepdims=True) / 128
        q = jnp.clip(jnp.round(w / scale), -127, 127).astype(jnp.int8)
        y = (x @ q.astype(x.dtype)) * scale
        return (y, jnp.sum(jnp.abs(q) == 127)) if counts else y, (x, w, q, scale)

    def backward(kept, g):
        (x, w, q, scale), g = kept, g[0] if counts else g
        of_x = g @ w.T if reads_weight else (g * scale) @ q.astype(g.dtype).T
        return of_x, x.T @ g

    product.defvjp(forward, backward)
    return product


@pytest.mark.slow
@pytest.mark.parametrize("reads_weight", [False, True])
@pytest.mark.parametrize(("style", "view"), [("unrolled", "global"), ("scanned", "device"), ("scanned", "global")])
def test_a_product_that_quantises_a_weight_itself(style, view, reads_weight):
    product = quantised_product(reads_weight)
    block = jax.checkpoint(lambda x, w: x + product(jnp.tanh(product(x, w["up"])), w["down"]))

    def loss(layers, x):
        if style == "unrolled":
            return jnp.mean(functools.reduce(block, layers, x) ** 2)
        return jnp.mean(lax.scan(lambda x, w: (block(x, w), None), x, layers)[0] ** 2)

    params = parameters(style, PADDED)
    usual = passes(loss_of(lambda w: w, style), params, view)["float32"]
    found = passes(loss, params, view)
    assert found == {"float32": usual} if reads_weight else found["int8"] == pytest.approx(usual / 4)
    assert reads_weight or found.get("float32", 0) <= 0.03  # the scales
    assert_same_gradient(loss, params, view)


def test_a_quantised_product_may_also_return_an_integer():
    """A count of clipped values has no cotangent."""
    product = quantised_product(reads_weight=False, counts=True)

    def loss(layers, x):
        results = [product(x, w["up"]) for w in layers]
        return sum(jnp.mean(y**2) + 0 * count.astype(y.dtype) for y, count in results)

    found = passes(loss, parameters("unrolled", PADDED))
    assert found["int8"] > 0
    assert found.get("float32", 0) <= 0.03  # the scales


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("op", "style", "view"), [(OPS[0], "unrolled", "global"), *((op, "scanned", "device") for op in OPS)]
)
def test_flaxs_fp8_layers_gather_float8(op, style, view):
    loss, variables = fp8(op, X, style)
    found = passes(loss, variables, view, persist_below=DEPTH * HIDDEN + 1)  # biases are not gathered
    assert list(found) == ["float8_e4m3fn"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accumulate", "view", "op", "style"), [(1, "global", OPS[0], "scanned"), (4, "device", OPS[-1], "unrolled")]
)
def test_flaxs_fp8_layers_train_as_without_shards(accumulate, view, op, style):
    """New scales and histories are the maximum over microbatches and, in device view, over devices.

    In device view, float8 rounds the cotangents of each device's own loss, so stage 0 also runs on eight devices.
    """
    loss, variables = fp8(op, X, style)
    tx = transformation(view)
    one = zero_shard(optax.sgd(0.1), stage=0, mesh=mesh_of(1 if view == "global" else 8), view=view)
    states = [t.create(variables) for t in (tx, one)]
    for _ in range(2):
        states = [t.train_step(loss, accumulate=accumulate)(s, X)[0] for t, s in zip((tx, one), states, strict=True)]
    found, expected = (t.unshard(s.params) for t, s in zip((tx, one), states, strict=True))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        # float32 sums over devices in another order. No element is rounded to another float8 here.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=jax.tree_util.keystr(path))


@pytest.mark.slow
@pytest.mark.parametrize("around", ["nothing", "remat", "scan"])
def test_a_kernel_leaves_quantised_gathers_on(around):
    """A Pallas kernel writes to refs inside, but has no effect that its results do not show."""
    params, loss = parameters("unrolled"), loss_of(with_rule(0), "unrolled")

    def body(ref, out):
        out[...] = 2 * ref[...]

    kernel = jax.custom_vjp(lambda x: pl.pallas_call(body, out_shape=x, interpret=True)(x))
    kernel.defvjp(lambda x: (kernel(x), None), lambda _, g: (2 * g,))
    looped = lambda x: jax.lax.scan(lambda x, _: (kernel(x), None), x, length=2)[0]
    run = {"nothing": kernel, "remat": jax.checkpoint(kernel), "scan": looped}[around]
    with_kernel = lambda layers, x: loss(layers, run(x))
    assert passes(with_kernel, params) == passes(loss, params)
