"""Gradients behind kernels and `shard_map`s stay partial sums, and every other value is as in plain jit."""

import re
import warnings

import chex
import jax
import jax.numpy as jnp
import kernel_experts  # noqa: F401
import kernel_pallas  # noqa: F401
import kernels
import numpy as np
import optax
import pytest
from conftest import mesh_of
from jax.sharding import NamedSharding, PartitionSpec
from kernel_registry import KERNELS, MLP, QKV, TIME, WIDTH, Kernel, Where, heads, merged, norm, plain_head, plain_layer

from zerojax import Precision, Tuning, Wire, check, collectives, logical, rows, zero_shard
from zerojax.comm.collectives import LABEL, Collectives
from zerojax.comm.own_rows import on_own_rows
from zerojax.dims import NOWHERE, on_dim

QUICK = [("kernel in a scan", 2), ("product without types", 3), ("experts per device", 2), ("lost", 1)]


def of_layer(layer, weights=MLP):
    return Kernel("", "", "", layer, weights, plain_head)


def attended(**options):
    """Attention of plain JAX in a `shard_map`."""

    def layer(where, x, w):
        return merged(x, where.per_device(jax.nn.dot_product_attention, (0, 0, 0), **options)(*heads(x, w)), w)

    return of_layer(layer, QKV)


def multiplied(**options):
    """A product with a parameter in a `shard_map`."""

    def layer(where, x, w):
        product = where.per_device(lambda x, w: x @ w, (0, None), **options)
        return x + jax.nn.gelu(product(norm(x), w["up"])) @ w["down"]

    return of_layer(layer)


def shuffled(how):
    """Something is done to the rows before each layer."""
    return of_layer(lambda where, x, w: plain_layer(where, how(where.mesh, x), w))


def lost(x):
    """A kernel that returns the rows last: no shape says where they are."""
    fn = lambda x: np.moveaxis(np.asarray(x), 0, -1).reshape(TIME, -1)
    shape = jax.ShapeDtypeStruct((TIME, WIDTH * len(x)), x.dtype)
    run = jax.custom_vjp(lambda x: jax.pure_callback(fn, shape, x))
    run.defvjp(lambda x: (run(x), None), lambda _, g: (jnp.moveaxis(g.reshape(TIME, WIDTH, -1), -1, 0),))
    return run(x).reshape(TIME, WIDTH, -1)


def back(mesh, x):
    """Rows that a constraint brings back."""
    return jax.lax.with_sharding_constraint(jnp.moveaxis(lost(x), -1, 0), NamedSharding(mesh, PartitionSpec("data")))


TYPED = {"check_vma": True}
LOSSES = {
    "in a scan": (attended(**TYPED), "scan"),
    "without types": (attended(), "unrolled"),
    "kernel in a scan": (KERNELS["attention"], "scan"),
    "kernel under remat": (KERNELS["attention"], "remat"),
    "bare kernel": (KERNELS["attention_bare"], "unrolled"),
    "product in a shard_map": (multiplied(**TYPED), "unrolled"),
    "product without types": (multiplied(), "unrolled"),
    "product with a kernel": (KERNELS["linear"], "unrolled"),
    "experts per device": (KERNELS["experts_routed_inside"], "unrolled"),
    "sorted rows": (shuffled(lambda mesh, x: jnp.sort(x, 0)), "unrolled"),
    "every other row": (shuffled(lambda mesh, x: jnp.concatenate([x[::2], x[1::2]])), "unrolled"),
    "constraint": (shuffled(back), "unrolled"),
    "declared": (shuffled(lambda mesh, x: rows(jnp.moveaxis(lost(x), -1, 0))), "unrolled"),
    "lost": (shuffled(lambda mesh, x: jnp.moveaxis(lost(x), -1, 0)), "unrolled"),
}


def given(name, mesh):
    """`(loss, params, batch)`."""
    kernel, form = LOSSES[name]
    return kernel.loss(form, Where("global", mesh)), kernel.params(form), kernel.batch()


def size_of(tree):
    return sum(x.size for x in jax.tree.leaves(tree))


def lowered(loss, params, batch, stage, mesh, **options):
    tx = zero_shard(optax.sgd(0.1), stage=stage, mesh=mesh, view="global", tuning=Tuning(persist_below=100), **options)
    return jax.jit(tx.value_and_grad(loss)).lower(tx.shard(params), batch)


def reduced(text):
    """The types and elements of all explicit reduce-scatters of a program, and all-reduces of more than a scalar."""
    kinds = r"stablehlo\.(?:reduce_scatter|all_reduce)\".*?\}\) : \(tensor<((?:\d+x)*)([a-z]\w*)>"
    found = re.findall(kinds, text, re.S)
    return [(dtype, int(np.prod([int(n) for n in shape.split("x") if n], dtype=int))) for shape, dtype in found]


def unlabelled(compiled):
    """The elements of the collectives of large arrays that are not zerojax's own, by kind."""
    others = [c for c in collectives(compiled) if not LABEL.search(c.op_name)]
    return {c.kind: sum(a.elements for a in c.arrays) for c in others if max(a.elements for a in c.arrays) > 1000}


# Half of the losses are compiled and run. Of the others, the lowered text is read.
CASES = [(name, 1 + i % 3) for i, name in enumerate(LOSSES)]
SLOW = [pytest.param(*c, marks=pytest.mark.slow) for c in CASES[1::2]]


def assert_partial_sums(params, text):
    assert sum(n for _, n in reduced(text) if n > 1000) >= 0.99 * size_of(params)


@pytest.mark.parametrize(("name", "stage"), [*QUICK, *SLOW])
def test_every_gradient_is_a_partial_sum(name, stage, mesh):
    loss, params, batch = given(name, mesh)
    assert_partial_sums(params, lowered(loss, params, batch, stage, mesh).as_text())


def slice_in_a_scan(p, x):
    w = 2 * p["qkv"][:, :WIDTH].T
    return jnp.mean(jax.lax.scan(lambda x, _: (x + jnp.tanh(x @ w), x @ p["out"]), x, length=2)[1] ** 2)


def test_gradients_of_slices_of_parameters_are_partial_sums(mesh):
    kernel = KERNELS["attention"]
    params = kernel.params("unrolled")["layers"][0]
    text = lowered(slice_in_a_scan, params, kernel.batch()["x"], 3, mesh).as_text()
    assert sum(n for _, n in reduced(text)) == size_of(params)


# What the compiler gathers or exchanges in plain jit, too: rows that change places.
MOVES = "sorted every constraint declared lost"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stage"), CASES[::2])
def test_values_are_those_of_plain_jit_and_gradients_partial_sums(name, stage, mesh):
    loss, params, batch = given(name, mesh)
    program = lowered(loss, params, batch, stage, mesh)
    assert_partial_sums(params, program.as_text())
    compiled = program.compile()
    value, grads = compiled(params, batch)
    expected = jax.jit(jax.value_and_grad(loss))(params, batch)
    # float32 sums of the workers' parts are rounded in another order.
    chex.assert_trees_all_close((value, logical(grads)), expected, rtol=1e-5, atol=1e-6)
    if not any(name.startswith(word) for word in MOVES.split()):
        assert not unlabelled(compiled)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lost", "in a scan", "product in a shard_map"])
def test_microbatches_are_reduced_once_in_float32(name, mesh):
    """With `accumulate`, stage 1 reduces after the last microbatch, and in the type that `Precision` says."""
    precision = Precision(compute=jnp.bfloat16, reduce=jnp.float32)
    tx = zero_shard(
        optax.sgd(0.1), stage=1, mesh=mesh, view="global", tuning=Tuning(persist_below=100), precision=precision
    )
    loss, params, batch = given(name, mesh)
    text = tx.train_step(loss, accumulate=2).lower(tx.create(params), batch).as_text()
    found = [(dtype, n) for dtype, n in reduced(text) if n > 1000]
    assert {dtype for dtype, _ in found} == {"f32"}
    assert 0.99 * size_of(params) <= sum(n for _, n in found) <= size_of(params)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["lost", "in a scan", "kernel under remat"])
def test_wire_quantises_gradients_behind_kernels(name, mesh):
    text = lowered(*given(name, mesh), 2, mesh, wire=Wire(reduce="int8", block=16)).as_text()
    assert "all_to_all" in text
    assert not [n for dtype, n in reduced(text) if n > 1000]


def large(loss, mesh, rows=64):
    """`loss(w, x)` of arrays large enough for warnings, traced by a step."""
    tx = zero_shard(optax.sgd(0.1), stage=2, mesh=mesh, view="global")
    step = tx.train_step(loss)
    return tx.create(jnp.zeros((256, 256))), step, jnp.zeros((rows, 4, 256))


def test_a_bare_kernel_is_named_once(mesh):
    @jax.custom_vjp
    def kernel(x):
        return jax.pure_callback(lambda x: x, x, x)

    kernel.defvjp(lambda x: (kernel(x), None), lambda _, g: (g,))
    state, step, batch = large(lambda w, x: jnp.mean((kernel(x) @ w) ** 2), mesh)
    with pytest.warns(UserWarning, match=r"`pure_callback` at test_kernels.py:\d+ runs all rows") as found:
        step.lower(state, batch)
    assert len(found) == 1


def test_a_gradient_of_lost_rows_is_named(mesh):
    """A kernel that gives a parameter's gradient is run in full by every device."""

    @jax.custom_vjp
    def product(w, x):
        return x @ w

    grad = lambda x, g: jnp.einsum("btd,btf->df", x, g)
    of_host = lambda x, g: jax.pure_callback(lambda *xs: np.asarray(grad(*xs)), jax.eval_shape(grad, x, g), x, g)
    product.defvjp(lambda w, x: (x @ w, (w, x)), lambda kept, g: (of_host(kept[1], g), g @ kept[0].T))
    state, step, batch = large(lambda w, x: jnp.mean(product(w, x) ** 2), mesh, rows=32)
    with pytest.warns(UserWarning, match=r"all-reduces a gradient of shape \(256, 256\), computed at test_kernels.py"):
        step.lower(state, batch)


def test_small_and_divided_kernels_are_not_named(mesh):
    callback, spec = lambda x: jax.pure_callback(lambda x: x, x, x), PartitionSpec("data")
    inside = jax.shard_map(callback, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    kernel = jax.custom_vjp(inside)
    kernel.defvjp(lambda x: (inside(x), None), lambda _, g: (g,))
    state, step, batch = large(lambda w, x: jnp.mean((kernel(x) @ w) ** 2), mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.lower(state, batch)


@pytest.mark.slow
def test_check_finds_a_bare_kernel(mesh):
    kernel = jax.custom_vjp(lambda x: kernels.blocked(lambda x: (jnp.sin(x),), block=len(x))(x)[0])
    kernel.defvjp(lambda x: (kernel(x), x), lambda x, g: (g * jnp.cos(x),))
    state, step, batch = large(lambda w, x: jnp.mean((kernel(x) @ w) ** 2), mesh)
    with pytest.warns(UserWarning, match="runs all rows"):
        found = check(step, state, batch)
    assert any("runs all rows of the batch on every device" in finding for finding in found.findings)


def test_rows_changes_nothing_without_zerojax():
    x = jnp.arange(12.0).reshape(3, 4)
    fn = lambda x: jnp.sum(jax.checkpoint(lambda x: jnp.sin(rows(x, 1)))(x))
    np.testing.assert_array_equal(jax.grad(fn)(x), jnp.cos(x))
    np.testing.assert_array_equal(jax.vmap(lambda x: rows({"x": x}, -1)["x"])(x), x)
    np.testing.assert_array_equal(jax.lax.scan(lambda c, x: (c, rows(x)), 0, x)[1], x)
    plain = jax.jit(lambda x: x).lower(x).as_text()
    assert jax.jit(rows).lower(x).as_text() == plain.replace("jit__lambda", "jit_rows")
    with pytest.raises(ValueError, match=r"rows\(x, dim=2\) was called on an array of shape \(3, 4\)"):
        rows(x, 2)


def carried(step):
    """`step` in a loop that also scans over something and makes an array of each iteration."""
    return lambda x: jax.lax.scan(lambda c, n: (step(c) * n, c), x, jnp.arange(3.0))


def ruled(step):
    op = jax.custom_vjp(step)
    op.defvjp(lambda x: (op(x), x), lambda x, g: (g * jnp.cos(x),))
    return lambda x: jax.vjp(op, x)[0]


PLACES = {
    "alone": lambda step: step,
    "call": jax.jit,
    "remat": jax.checkpoint,
    "loop": carried,
    "branch": lambda step: lambda x: jax.lax.cond(x[0, 0] > 0, step, lambda x: x, x),
    "forward pass that calls its own derivative rule": ruled,
}


@pytest.mark.parametrize("place", PLACES)
def test_a_kernel_is_divided_wherever_it_stands(place):
    divided = []

    class Recording(Collectives):
        def per_shard(self, fn, values, dims, out_dims, axes):
            divided.append((dims, out_dims, axes))
            return values

    kernel = kernels.blocked(lambda x: (jnp.sin(x),))
    closed = jax.make_jaxpr(PLACES[place](lambda x: kernel(x)[0]))(jnp.ones((8, 4)))
    found = on_own_rows(closed, [on_dim(0)], Recording(("data",), mesh=mesh_of(2)))
    assert set(divided) == {((0,), (0,), ("data",))}
    assert (found.in_avals, found.out_avals) == (closed.in_avals, closed.out_avals)
    divided.clear()
    on_own_rows(closed, [NOWHERE], Recording(("data",), mesh=mesh_of(2)))
    assert not divided
