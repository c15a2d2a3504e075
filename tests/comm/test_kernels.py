"""Gradients behind kernels and `shard_map`s stay partial sums, and every other value is as in plain jit."""

import re
import warnings

import jax
import jax.numpy as jnp
import kernel_losses as losses
import numpy as np
import optax
import pytest
from conftest import quick_or_slow
from jax.sharding import PartitionSpec

from zerojax import Precision, Wire, check, collectives, logical, rows, zero_shard
from zerojax.comm.collectives import LABEL

# What these losses do not read, or only multiply by zero, has no gradient to reduce.
UNREAD = {"experts": {"qkv"}, "product": {"qkv", "experts"}}
QUICK = [("kernel in a scan", 2), ("product without types", 3), ("experts per device", 2), ("lost", 1)]


def read_by(name):
    """The parameters that a loss reads."""
    unread = next((unread for kind, unread in UNREAD.items() if name.startswith(kind)), {"experts"})
    params = losses.make_params()
    found = {key: x for key, x in params.items() if key not in unread and key != "layers"}
    return [found, [{k: x for k, x in layer.items() if k not in unread} for layer in params["layers"]]]


def lowered(loss, stage, mesh, **options):
    tx = zero_shard(optax.sgd(0.1), stage=stage, mesh=mesh, view="global", persist_below=100, **options)
    params = tx.shard(losses.make_params())
    return params, jax.jit(tx.value_and_grad(loss)).lower(params, losses.make_batch())


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
CASES = [(name, 1 + i % 3) for i, name in enumerate(losses.LOSSES)]
SLOW = [pytest.param(*c, marks=pytest.mark.slow) for c in CASES[1::2]]


def assert_partial_sums(name, text):
    many = sum(n for _, n in reduced(text) if n > 1000)
    assert many >= 0.99 * sum(x.size for x in jax.tree.leaves(read_by(name)))


@pytest.mark.parametrize(("name", "stage"), [*QUICK, *SLOW])
def test_every_gradient_is_a_partial_sum(name, stage, mesh):
    assert_partial_sums(name, lowered(losses.LOSSES[name](mesh), stage, mesh)[1].as_text())


def slice_in_a_scan(p, x):
    w = 2 * p["qkv"][:, : losses.WIDTH].T
    return jnp.mean(jax.lax.scan(lambda x, _: (x + jnp.tanh(x @ w), x @ p["up"]), x, length=2)[1] ** 2)


def test_gradients_of_slices_of_parameters_are_partial_sums(mesh):
    tx = zero_shard(optax.sgd(0.1), stage=3, mesh=mesh, view="global", persist_below=100)
    params = {key: losses.make_params()["layers"][0][key] for key in ("qkv", "up")}
    text = jax.jit(tx.value_and_grad(slice_in_a_scan)).lower(tx.shard(params), losses.make_batch()).as_text()
    assert sum(n for _, n in reduced(text)) == sum(x.size for x in params.values())


# What the compiler gathers or exchanges in plain jit, too: rows that change places.
MOVES = "sorted every constraint declared lost"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stage"), CASES[::2])
def test_values_are_those_of_plain_jit_and_gradients_partial_sums(name, stage, mesh):
    loss = losses.LOSSES[name](mesh)
    params, program = lowered(loss, stage, mesh)
    assert_partial_sums(name, program.as_text())
    compiled = program.compile()
    value, grads = compiled(params, losses.make_batch())
    expected = jax.jit(jax.value_and_grad(loss))(losses.make_params(), losses.make_batch())
    jax.tree.map(
        # float32 sums of the workers' parts are rounded in another order.
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        (value, logical(grads)),
        expected,
    )
    if not any(name.startswith(word) for word in MOVES.split()):
        assert not unlabelled(compiled)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", quick_or_slow([(n,) for n in ("lost", "in a scan", "product in a shard_map")], [("lost",)])
)
def test_microbatches_are_reduced_once_in_float32(name, mesh):
    """With `accumulate`, stage 1 reduces after the last microbatch, and in the type that `Precision` says."""
    precision = Precision(compute=jnp.bfloat16, reduce=jnp.float32)
    tx = zero_shard(optax.sgd(0.1), stage=1, mesh=mesh, view="global", persist_below=100, precision=precision)
    step = tx.train_step(losses.LOSSES[name](mesh), accumulate=2)
    text = step.lower(tx.create(losses.make_params()), losses.make_batch()).as_text()
    found = [(dtype, n) for dtype, n in reduced(text) if n > 1000]
    least, most = (sum(x.size for x in jax.tree.leaves(tree)) for tree in (read_by(name), losses.make_params()))
    assert {dtype for dtype, _ in found} == {"f32"}
    assert 0.99 * least <= sum(n for _, n in found) <= most


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["lost", "in a scan", "kernel under remat"])
def test_wire_quantises_gradients_behind_kernels(name, mesh):
    text = lowered(losses.LOSSES[name](mesh), 2, mesh, wire=Wire(reduce="int8", block=16))[1].as_text()
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
    loss = lambda w, x: jnp.mean((kernel(x) @ w) ** 2)
    state, step, batch = large(loss, mesh)
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
    inside = jax.shard_map(
        lambda x: jax.pure_callback(lambda x: x, x, x),
        mesh=mesh,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec("data"),
        check_vma=False,
    )
    kernel = jax.custom_vjp(inside)
    kernel.defvjp(lambda x: (inside(x), None), lambda _, g: (g,))
    state, step, batch = large(lambda w, x: jnp.mean((kernel(x) @ w) ** 2), mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.lower(state, batch)


@pytest.mark.slow
def test_check_finds_a_bare_kernel(mesh):
    tx = zero_shard(optax.sgd(0.1), stage=2, mesh=mesh, view="global")
    kernel = jax.custom_vjp(losses.kernel(jnp.sin))
    kernel.defvjp(lambda x: (kernel(x), x), lambda x, g: (g * jnp.cos(x),))
    step, state = tx.train_step(lambda w, x: jnp.mean((kernel(x) @ w) ** 2)), tx.create(jnp.zeros((256, 256)))
    with pytest.warns(UserWarning, match="runs all rows"):
        found = check(step, state, jnp.zeros((64, 4, 256)))
    assert any("runs all rows of the batch on every device" in finding for finding in found.findings)


def test_rows_changes_nothing_without_zerojax():
    x = jnp.arange(12.0).reshape(3, 4)
    fn = lambda x: jnp.sum(jax.checkpoint(lambda x: jnp.sin(rows(x, 1)))(x))
    np.testing.assert_array_equal(jax.grad(fn)(x), jnp.cos(x))
    np.testing.assert_array_equal(jax.vmap(lambda x: rows({"x": x}, -1)["x"])(x), x)
    np.testing.assert_array_equal(jax.lax.scan(lambda c, x: (c, rows(x)), 0, x)[1], x)
    assert jax.jit(rows).lower(x).as_text() == jax.jit(lambda x: x).lower(x).as_text().replace(
        "jit__lambda", "jit_rows"
    )
    with pytest.raises(ValueError, match=r"rows\(x, dim=2\) was called on an array of shape \(3, 4\)"):
        rows(x, 2)
