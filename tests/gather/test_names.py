"""The compiled step has the user's name scopes and source lines, as plain jit has: profiles and errors show them."""

import functools
import re
import traceback
from collections import Counter

import jax
import jax.numpy as jnp
import optax
import pytest
from absent_gpus import aot
from conftest import mesh_of
from flax import linen
from jax.sharding import NamedSharding, PartitionSpec

from zerojax import Tuning, zero_shard
from zerojax.gpus.devices import absent_mesh

WIDTH, ROWS = 16, 16
LAYER = re.compile(r"(?:Layer|Remat|Dense)_\d|Stack|Head|Linen")  # the scopes of the user's modules
# XLA names instructions that it adds itself by their kind and a number: `broadcast.7`.
OF_XLA = re.compile(r"(^|/)[a-z-]+\.\d+$")


def layer(w, x):
    return x + jnp.tanh(x @ w)


def named(w, x, name):
    with jax.named_scope(name):
        return layer(w, x)


def functions(params, x):
    """Unrolled layers, layers under remat, and a scan of layers."""
    for i, w in enumerate(params["unrolled"]):
        x = named(w, x, f"Layer_{i}")
    for i, w in enumerate(params["remat"]):
        x = jax.checkpoint(functools.partial(named, name=f"Remat_{i}"))(w, x)
    with jax.named_scope("Stack"):
        x, _ = jax.lax.scan(lambda x, w: (layer(w, x), None), x, params["stack"])
    with jax.named_scope("Head"):
        return jnp.mean((x @ params["head"]) ** 2)


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        for _ in range(2):
            x = x + jnp.tanh(linen.Dense(WIDTH)(x))
        return jnp.mean(linen.Dense(2 * WIDTH, name="Head")(x) ** 2)


@functools.cache
def given(name):
    """The loss, the parameters, and the rows of a model."""
    x = jnp.ones((ROWS, WIDTH))
    if name == "linen":
        return lambda params, x: Linen().apply(params, x), Linen().init(jax.random.key(0), x), x
    two, stack = [jnp.ones((WIDTH, WIDTH))] * 2, jnp.ones((3, WIDTH, WIDTH))
    return functions, {"unrolled": two, "remat": two, "stack": stack, "head": jnp.ones((WIDTH, 2 * WIDTH))}, x


@functools.cache
def plain(name):
    loss, params, x = given(name)
    rows = NamedSharding(mesh_of(8), PartitionSpec("data"))
    step = jax.jit(jax.value_and_grad(loss), out_shardings=NamedSharding(mesh_of(8), PartitionSpec()))
    return step.lower(params, jax.device_put(x, rows)).compile().as_text()


def by_zerojax(name, stage, view, mesh):
    loss, params, x = given(name)
    tx = zero_shard(optax.sgd(0.1), stage=stage, mesh=mesh, view=view, tuning=Tuning(persist_below=0))
    params, x = jax.eval_shape(lambda: (params, x))
    return tx.train_step(loss).lower(tx.create(params), x).compile().as_text()


def instructions(text, kinds):
    """`(op name, source file and line)` of the instructions of these kinds that JAX named."""
    table = lambda title, pattern: {
        int(m[1]): m for m in re.finditer(pattern, text.partition(f"\n{title}\n")[2].partition("\n\n")[0])
    }
    files = table("FileNames", r'(\d+) "(.*)"')
    places = table("FileLocations", r"(\d+) \{file_name_id=(\d+) .*?line=(\d+)")
    frames = table("StackFrames", r"(\d+) \{file_location_id=(\d+)")
    for line in text.splitlines():
        found = re.search(rf' (?:{kinds})\(.*op_name="([^"]*)"(?:.*stack_frame_id=(\d+))?', line)
        if found and not OF_XLA.search(found[1]):
            place = places[int(frames[int(found[2])][2])] if found[2] else None
            yield found[1], (files[int(place[2])][2], int(place[3])) if place else ("", 0)


def require_names(text, products):
    """Each product names a module of the user's, and each other fusion a module or work of zerojax's own."""
    assert not [name for name, _ in instructions(text, products) if not LAYER.search(name)]
    assert not [name for name, _ in instructions(text, "fusion") if not LAYER.search(name) and "zerojax_" not in name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "stage", "view"), [("functions", 3, "global"), ("functions", 2, "device"), ("linen", 3, "global")]
)
def test_products_and_fusions_have_the_names_and_lines_of_plain_jit(model, stage, view, mesh, optimized):
    text = by_zerojax(model, stage, view, mesh)
    require_names(text, "dot")
    found, wanted = list(instructions(text, "dot")), list(instructions(plain(model), "dot"))
    of = lambda products: Counter(LAYER.findall(name)[-1] for name, _ in products)
    layers = lambda counts: {name: count for name, count in counts.items() if name != "Stack"}
    # A scan's first and last iterations run outside of the loop at stage 3.
    assert of(found).keys() == of(wanted).keys()
    assert layers(of(found)) == layers(of(wanted))
    # XLA may give a gradient's product the line of its transpose, which of a remat is the line of the call.
    assert {line for _, line in found} >= {line for _, line in wanted}
    assert {file for _, (file, _) in found} == {file for _, (file, _) in wanted}


@pytest.mark.slow
@aot
def test_on_gpus_each_kernel_is_named(optimized):
    text = by_zerojax("functions", 3, "global", absent_mesh("h100:8"))
    require_names(text, "dot|custom-call")
    shown = {layer for name, _ in instructions(text, "dot|custom-call") for layer in LAYER.findall(name)}
    assert shown >= {"Layer_0", "Layer_1", "Remat_0", "Remat_1", "Stack", "Head"}


def failing(params, x):
    for w in params:
        x = jnp.log(x @ w - 1e3)  # a NaN
    return x.sum()


def failing_in_remat(params, x):
    layer = jax.checkpoint(lambda x, w: jnp.log(x @ w - 1e3))
    return layer(layer(x, params[0]), params[1]).sum()


def failing_in_jit(params, x):
    layer = jax.jit(lambda x, w: jnp.log(x @ w - 1e3))
    return layer(layer(x, params[0]), params[1]).sum()


def failing_in_derivative(params, x):
    x = jnp.sqrt(x @ params[0] - WIDTH)  # of zeros, whose derivative is infinite
    return (x @ params[1] * 0).sum()


FAILING = {failing: 2, failing_in_remat: 1, failing_in_jit: 1, failing_in_derivative: 1}  # the line of the NaN
NANS = [(failing, 3, "global"), (failing, 3, "device")]
NANS += [(loss, 2 + i % 2, "global") for i, loss in enumerate([*FAILING][1:])]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("loss", "stage", "view"), NANS)
def test_an_error_of_debug_nans_has_the_users_line(loss, stage, view, mesh):
    tx = zero_shard(optax.sgd(0.1), stage=stage, mesh=mesh, view=view, tuning=Tuning(persist_below=0))
    state = tx.create([jnp.ones((WIDTH, WIDTH))] * 2)
    step = tx.train_step(loss)
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as error:
        step(state, jnp.ones((ROWS, WIDTH)))
    line = loss.__code__.co_firstlineno + FAILING[loss]
    shown = "".join(traceback.format_exception(error.value))
    # In device view JAX tests only the results of a `shard_map`, and zerojax evaluates the loss without it.
    assert (f"{__file__}, line {line}, in " if view == "global" else f"made by log at test_names.py:{line}") in shown


def wrong_shape(params, x):
    for w in params:
        x = x @ w + jnp.ones(3)  # the shapes do not fit
    return x.sum()


@jax.custom_vjp
def wrong_rule(x):
    return x


def pull(_, cotangent):
    return (cotangent @ jnp.ones(3),)  # the shapes do not fit


wrong_rule.defvjp(lambda x: (x, None), pull)


def wrong_derivative(params, x):
    for w in params:
        x = wrong_rule(x @ w)
    return x.sum()


@pytest.mark.parametrize(("loss", "fails"), [(wrong_shape, (wrong_shape, 2)), (wrong_derivative, (pull, 1))])
@pytest.mark.parametrize(("stage", "view"), [(2, "global"), (3, "global"), (2, "device"), (3, "device")])
def test_an_error_while_tracing_has_the_users_line(stage, view, loss, fails, mesh):
    tx = zero_shard(optax.sgd(0.1), stage=stage, mesh=mesh, view=view, tuning=Tuning(persist_below=0))
    state = tx.create([jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 2)
    with pytest.raises((TypeError, ValueError), match=r"Incompatible shapes|dot_general requires") as error:
        tx.train_step(loss).trace(state, jnp.ones((ROWS, WIDTH)))
    function, lines = fails
    frames = traceback.extract_tb(error.value.__traceback__)
    assert (__file__, function.__code__.co_firstlineno + lines) in [(frame.filename, frame.lineno) for frame in frames]
