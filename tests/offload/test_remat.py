"""Activations that a policy of JAX offloads reach the host and come back in order."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absent_gpus import aot
from conftest import quick_or_slow
from flat_options import tuned
from jax.ad_checkpoint import checkpoint_name

from zerojax import Tuning, jaxprs, zero_shard
from zerojax.gpus.devices import absent_mesh

LAYERS, ROWS, WIDTH, HIDDEN, KEPT = 5, 16, 24, 32, 40
STYLES = ["scan", "unrolled"]
# Stage 3 stacks residuals itself, in loops that differ with and without prefetch.
ENGINES = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 3": {"stage": 3},
    "stage 3, no prefetch": {"stage": 3, "prefetch": 0},
}


def layer(x, w):
    """Three named activations of three widths, by which they are distinguished."""
    x = checkpoint_name(x, "input")
    hidden = checkpoint_name(jnp.tanh(x @ w["up"]), "hidden")
    kept = checkpoint_name(jnp.sin(hidden @ w["middle"]), "kept")
    return x + jnp.cos(kept) @ w["down"]


def problem(style):
    """`(params, batch, loss_of)`; `loss_of` takes what wraps a layer."""
    keys, batch = jax.random.split(jax.random.key(0), 3), jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
    sizes = {"up": (WIDTH, HIDDEN), "middle": (HIDDEN, KEPT), "down": (KEPT, WIDTH)}
    drawn = zip(keys, sizes.items(), strict=True)
    stack = {name: jax.random.normal(key, (LAYERS, *size)) / size[0] ** 0.5 for key, (name, size) in drawn}

    def scanned(params, x, wrap):
        return jax.lax.scan(lambda x, w: (wrap(layer)(x, w), None), x, params)[0]

    def unrolled(params, x, wrap):
        for w in params:
            x = wrap(layer)(x, w)
        return x

    run = scanned if style == "scan" else unrolled
    params = stack if style == "scan" else [jax.tree.map(lambda w, i=i: w[i], stack) for i in range(LAYERS)]
    return params, batch, lambda wrap: lambda params, x: jnp.mean(run(params, x, wrap) ** 2)


def offloading(*names, save=()):
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=save,
        names_which_can_be_offloaded=names,
        offload_src="device",
        offload_dst="pinned_host",
    )


def wrapping(policy):
    return functools.partial(jax.checkpoint, policy=policy)


@functools.cache
def plain_gradients(style):
    params, batch, loss_of = problem(style)
    return jax.jit(jax.value_and_grad(loss_of(lambda f: f)))(params, batch)


def assert_same(found, expected):
    # Sums over rows in another order: float32 roundings of 6e-8, some hundred of them.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found, expected)


def on_host(atom):
    return "<host>" in str(atom.aval)


def transfers(fn, *args):
    """`(widths sent to the host, widths brought back)`, of every transfer in the traced program."""
    sent, back = [], []
    for eqn in jaxprs.equations(jax.make_jaxpr(fn)(*args).jaxpr):
        if eqn.primitive.name == "device_put":
            (source,), (target,) = eqn.invars, eqn.outvars
            if on_host(target) and not on_host(source):
                sent.append(target.aval.shape[-1])
            elif on_host(source) and not on_host(target):
                back.append(target.aval.shape[-1])
    return sent, back


def stacks(fn, *args):
    """`(width, whether on the host)` of everything stacked over the layers that a loop hands on."""
    loops = [e for e in jaxprs.equations(jax.make_jaxpr(fn)(*args).jaxpr) if e.primitive.name == "scan"]
    rows = {ROWS, ROWS // 8}
    found = [v for loop in loops for v in loop.outvars if v.aval.shape[:1] == (LAYERS,) and v.aval.shape[1] in rows]
    return {(v.aval.shape[-1], on_host(v)) for v in found}


@pytest.mark.parametrize(
    ("engine", "style"), quick_or_slow(itertools.product(["plain", *ENGINES], STYLES), [("plain", "unrolled")])
)
def test_offloading_leaves_gradients_alone(engine, style, mesh):
    params, batch, loss_of = problem(style)
    loss = loss_of(wrapping(offloading("input", "hidden", save=["kept"])))
    params, gradient = differentiated(engine, loss, params, mesh)
    assert_same(jax.jit(gradient)(params, batch), plain_gradients(style))


def differentiated(engine, loss, params, mesh):
    """The parameters as the engine stores them, and the function that differentiates the loss."""
    if engine == "plain":
        return params, jax.value_and_grad(loss)
    tx = zero_shard(optax.adamw(1e-3), mesh=mesh, **tuned(persist_below=16, **ENGINES[engine]))
    return tx.shard(params), tx.value_and_grad(loss)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("engine", ["plain", *ENGINES])
def test_exactly_the_named_activations_go_to_the_host_and_come_back(engine, style, mesh):
    params, batch, loss_of = problem(style)
    loss = loss_of(wrapping(offloading("input", "hidden", save=["kept"])))
    params, grad = differentiated(engine, loss, params, mesh)
    sent, back = transfers(grad, params, batch)
    assert set(sent) == set(back) == {WIDTH, HIDDEN}
    if style == "unrolled":
        assert sent.count(HIDDEN) == LAYERS
    else:
        assert stacks(grad, params, batch) == {(WIDTH, True), (HIDDEN, True), (KEPT, False)}


@pytest.mark.quick(1)
@pytest.mark.parametrize("prefetch", [0, 1])
def test_an_unrolled_layers_activations_have_left_when_the_next_layer_ends(prefetch, mesh):
    params, batch, loss_of = problem("unrolled")
    tx = zero_shard(optax.adamw(1e-3), mesh=mesh, tuning=Tuning(persist_below=16, prefetch=prefetch), stage=3)
    grad = tx.value_and_grad(loss_of(wrapping(offloading("hidden"))))
    closed = jax.make_jaxpr(grad)(tx.shard(params), batch)
    inlined = jax.make_jaxpr(lambda *args: jaxprs.inline_calls(closed.jaxpr, closed.consts, *args))(*closed.in_avals)
    order = list(jaxprs.equations(inlined.jaxpr))  # layers that are alike are calls of one program
    back = next(i for i, e in enumerate(order) if e.primitive.name == "device_put" and on_host(e.invars[0]))
    sent = [v for e in order[:back] if e.primitive.name == "device_put" for v in e.outvars]
    barriers = [e.invars for e in order[:back] if e.primitive.name == "optimization_barrier"]
    behind = [{v for v in operands if v in sent} for operands in barriers if any(v in sent for v in operands)]
    assert len(behind) >= LAYERS - 1  # after the last layer comes only the loss
    assert all(len(activations) == 1 for activations in behind)


@pytest.mark.slow
def test_flax_modules_take_the_policy():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(WIDTH)(checkpoint_name(jnp.tanh(nn.Dense(HIDDEN)(x)), "hidden")), None

    def model(block):
        return nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)()

    x = jnp.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
    params = model(Block).init(jax.random.key(0), x, None)
    grad_of = lambda block: jax.grad(lambda p: jnp.mean(model(block).apply(p, x, None)[0] ** 2))
    offloaded = grad_of(nn.remat(Block, policy=offloading("hidden"), prevent_cse=False))
    assert_same(jax.jit(offloaded)(params), jax.jit(grad_of(Block))(params))
    assert transfers(offloaded, params) == ([HIDDEN], [HIDDEN])


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
@aot
def test_activations_leave_a_gpus_memory():
    """XLA:CPU has one memory: only a program compiled for a GPU shows what offloading saves. Layers are unrolled.

    For a scan, see tests/budget/test_activation_budget.py.
    """
    mib, rows, width = 1 << 20, 8 * 2048, 512
    weight = jax.ShapeDtypeStruct((width, width), "float32")
    params = [weight] * LAYERS

    def layer(x, w):
        inner = checkpoint_name(jnp.tanh(checkpoint_name(x, "input") @ w), "inner")
        return jnp.sin(inner * inner) @ w.T, None

    def memory(policy):
        wrapped = jax.checkpoint(layer, policy=policy)
        run = lambda params, x: functools.reduce(lambda x, w: wrapped(x, w)[0], params, x)
        tx = zero_shard(optax.adamw(1e-3), stage=3, mesh=absent_mesh("h200:8"), tuning=Tuning(persist_below=16))
        grad = tx.value_and_grad(lambda params, x: jnp.mean(run(params, x) ** 2))
        return jax.jit(grad).lower(params, jax.ShapeDtypeStruct((rows, width), "float32")).compile().memory_analysis()

    kept = memory(jax.checkpoint_policies.save_only_these_names("input", "inner"))
    offloaded = memory(offloading("input", "inner"))
    one = (rows // 8) * width * 4
    activations = 2 * LAYERS * one
    assert kept.host_temp_size_in_bytes == 0
    assert offloaded.host_temp_size_in_bytes == activations
    # What is being copied, either way, is on the device too: two of either activation.
    assert kept.temp_size_in_bytes - offloaded.temp_size_in_bytes >= activations - 4 * one - mib
