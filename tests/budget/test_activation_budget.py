"""`zerojax.remat`: exact, within its budget, and with the fewest FLOPs repeated that the budget allows."""

import functools
import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import zerojax
import zerojax.flax
from zerojax import compat, zero_shard
from zerojax.budget.choice import choose
from zerojax.budget.graph import PREFIX, graph_of
from zerojax.gpus.devices import HOST_LINKS, Device, kind_of
from zerojax.gpus.topology import Topology, absent_mesh, installed
from zerojax.units import parse_bytes

WIDTH, ROWS = 8, 4


def attention(params, x):
    """A block with products, softmax, a norm and a residual stream."""
    h = x - x.mean(-1, keepdims=True)
    q, k, v = (h @ params[name] for name in "qkv")
    weights = jax.nn.softmax(q @ k.T)
    x = x + jnp.tanh(weights @ v @ params["o"])
    return x + jax.nn.gelu(x @ params["up"]) @ params["up"].T


def given(width=WIDTH, rows=ROWS):
    keys = iter(jax.random.split(jax.random.key(0), 8))
    normal = lambda *shape: jax.random.normal(next(keys), shape) / width**0.5
    params = {name: normal(width, width) for name in "qkvo"} | {"up": normal(width, 2 * width)}
    return params, normal(rows, width)


def compared(fn, plain, *args):
    """Assert equal values and gradients in float64, to some thousand roundings of the largest entry."""
    with jax.enable_x64(True):
        args = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), args)
        objective = lambda f: lambda *args: jnp.sum(f(*args) ** 2)
        found, wanted = (jax.jit(jax.value_and_grad(objective(f)))(*args) for f in (fn, plain))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == np.float64
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * np.abs(b).max())


def saved_bytes(fn, *args):
    """Bytes that a call keeps for its backward pass, besides its arguments."""
    kept = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(fn, *args)[1], *args))
    shapes = [(x.shape, x.dtype) for x in jax.tree.leaves(args)]
    total = 0
    for x in kept:
        if (x.shape, x.dtype) in shapes:
            shapes.remove((x.shape, x.dtype))
        elif hasattr(x.dtype, "itemsize"):
            total += x.size * x.dtype.itemsize
    return total


@pytest.mark.slow
def test_it_composes():
    """With scan, vmap, itself, jit inside, keyword and static arguments, and dropout of the same masks."""

    def layer(params, x, flag, *, key):
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.tanh(jax.jit(attention)(params, jnp.where(keep, x, 0.0) if flag == "drop" else x))

    def model(remat):
        fn = remat(layer, static_argnums=2)
        nested = remat(lambda params, x, key: fn(params, fn(params, x, "keep", key=key), "drop", key=key))

        def body(x, key):
            return nested(PARAMS, x, key), None

        def run(params, xs):
            keys = jax.random.split(jax.random.key(3), 3)
            one = lambda x: jax.lax.scan(lambda x, key: (nested(params, x, key), None), x, keys)[0]
            return jax.vmap(one)(xs)

        return run

    PARAMS, x = given()
    plain = lambda fn, **_: fn
    compared(model(functools.partial(zerojax.remat, budget=300)), model(plain), PARAMS, jnp.stack([x, 2 * x]))


def test_a_larger_budget_never_costs_more_and_is_kept():
    args, flops = given(), []
    most = zerojax.remat(attention, budget=0).choice(*args).most_bytes
    for budget in np.linspace(0, 1.1 * most, 20):
        fn = zerojax.remat(attention, budget=int(budget))
        choice = fn.choice(*args)
        flops.append(choice.flops)
        assert choice.saved_bytes <= budget
        assert saved_bytes(fn, *args) <= max(choice.saved_bytes, 0 if budget < most else most)
    assert flops == sorted(flops, reverse=True)
    assert flops[0] == choice.most_flops > 4 * flops[-2]


def test_no_choice_is_cheaper():
    """Beside every set of values that fits, for a block that is small enough to try them all."""

    def block(w, x):
        return jnp.sin(jnp.tanh(x @ w) @ w) * jnp.exp(x)

    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((WIDTH, WIDTH), (ROWS, WIDTH))]
    graph = graph_of(*compat.opened(jax.make_jaxpr(block)(*avals)), avals)
    for budget in (0, 128, 256, 384, 512):
        best = min(
            repeated(graph, chosen)
            for count in range(budget // 128 + 1)
            for chosen in itertools.combinations(graph.values, count)
        )
        found = choose(graph, budget, fates={}, repeat_collectives=False)
        named = [value for value in graph.values if value.name in found.saved]
        assert repeated(graph, named) == pytest.approx(best, rel=1e-3)


def repeated(graph, saved):
    """The cost of computing everything again that the backward pass reads and that is not saved."""
    kept, needed = {value.equation for value in saved}, set()
    pending = list(graph.residuals)
    while pending:
        i = pending.pop()
        if i not in kept and i not in needed:
            needed.add(i)
            pending.extend(graph.equations[i].reads)
    return sum(graph.equations[i].cost for i in needed)


def test_names_of_the_user_are_obeyed():
    def block(w, x):
        first = checkpoint_name(jnp.tanh(x @ w), "first")
        return checkpoint_name(jnp.tanh(first @ w), "second") @ w

    params, x = given()
    saved = lambda **fates: zerojax.remat(block, budget=128, named=fates).choice(params["q"], x).saved
    assert saved(first="save") == ("first",)
    assert saved(second="save") == ("second",)
    assert all(name.startswith(PREFIX) for name in saved())
    ample = zerojax.remat(block, budget=300, named={"first": "recompute"})
    assert "first" not in ample.choice(params["q"], x).saved
    compared(ample, block, params["q"], x)
    with pytest.raises(ValueError, match="256"):
        zerojax.remat(block, budget=200, named={"first": "save", "second": "save"})(params["q"], x)


def test_values_may_wait_in_host_memory():
    args = given()
    plan = lambda **options: zerojax.remat(attention, **options).choice(*args)
    fn = zerojax.remat(attention, budget=128, offload=256)
    choice = fn.choice(*args)
    assert 0 < choice.offloaded_bytes <= 256
    assert choice.flops < plan(budget=128).flops
    assert plan(budget=128, offload=1 << 30).flops <= choice.flops
    compared(fn, attention, *args)
    assert "<host>" in str(jax.make_jaxpr(jax.grad(lambda *args: fn(*args).sum()))(*args))


def test_no_more_is_offloaded_than_the_link_copies_in_time():
    """Wider blocks compute more FLOPs per byte. So their values have time to leave and to come back."""

    def copied(width):
        shapes = jax.eval_shape(lambda: given(width, rows=512))
        choice = zerojax.remat(attention, budget=0, offload="auto").choice(*shapes)
        return choice, zerojax.remat(attention, budget=0, offload="1 TB").choice(*shapes)

    per_flop = HOST_LINKS["h200"] / Device.of(Topology.parse("h200:1")).rates["bf16"]
    (narrow, _), (wide, unlimited) = copied(64), copied(8192)
    assert narrow.offloaded_bytes < 64 * 512 * 4  # not even one activation
    assert 8192 * 512 * 4 <= wide.offloaded_bytes <= per_flop * wide.most_flops < unlimited.offloaded_bytes
    assert wide.flops < wide.most_flops
    named = zerojax.remat(attention, budget=0, offload="auto", named={"x": "offload"})
    assert named.choice(*given()).offloaded_bytes == 0
    kinds = {"NVIDIA A100-SXM4-80GB": "a100-80", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA B200": "b200", "cpu": None}
    assert {name: kind_of(name) for name in kinds} == kinds


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
@pytest.mark.skipif(not installed() or jax.__version_info__ < (0, 11), reason="needs the extra aot, of the newest jax")
def test_offloaded_values_are_in_the_host_memory_of_absent_gpus():
    """The compiled program has a host buffer for each byte of the choice, and the device is relieved of it."""
    layers, width, rows = 4, 1024, 8 * 1024
    params = jax.eval_shape(lambda: jax.tree.map(lambda w: jnp.stack([w] * layers), given(width)[0]))
    x = jax.ShapeDtypeStruct((rows, width), jnp.float32)

    def block(w, x):
        return x + jnp.sin(jnp.tanh(x @ w["up"]) ** 2) @ w["up"].T

    def compiled(remat):
        loss = lambda params, x: jnp.sum(jax.lax.scan(lambda x, w: (remat(w, x), None), x, params)[0] ** 2)
        grad = zero_shard(optax.adam(1e-3), stage=3, mesh=absent_mesh("h200:8")).value_and_grad(loss)
        program = jax.jit(grad).lower(params, x).compile()
        return program.memory_analysis()

    kept, offloaded = (
        zerojax.remat(block, prevent_cse=False, **options)
        for options in ({"budget": "1 GB"}, {"budget": 0, "offload": 2 * rows * 2 * width * 4})
    )
    one = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape[1:], w.dtype), params)
    choice, (there, here) = offloaded.choice(one, x), (compiled(fn) for fn in (offloaded, kept))
    assert choice.offloaded_bytes > 0
    assert here.host_temp_size_in_bytes == 0
    assert there.host_temp_size_in_bytes == layers * choice.offloaded_bytes // 8
    assert here.temp_size_in_bytes - there.temp_size_in_bytes > (layers - 2) * choice.offloaded_bytes // 8


def test_collectives_are_not_repeated(mesh):
    def block(w, x):
        return jnp.sin(jax.lax.psum(jnp.tanh(x @ w), "data")) * x

    def program(**options):
        fn = zerojax.remat(block, **options)
        local = lambda w, x: jax.grad(lambda w: fn(w, x).sum())(w)
        mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
        return str(jax.make_jaxpr(mapped)(jnp.ones((WIDTH, WIDTH)), jnp.ones((8 * ROWS, WIDTH))))

    forward_and_transpose = program(budget="1 GiB").count("psum")
    assert program(budget=128).count("psum") == forward_and_transpose
    assert program(budget=0, repeat_collectives=True).count("psum") == forward_and_transpose + 1
    with pytest.raises(ValueError, match="repeat_collectives"):
        program(budget=0)


def test_blocks_that_compute_the_same_are_analysed_once(monkeypatch):
    import zerojax.budget.remat as module

    calls = []
    monkeypatch.setattr(module, "choose", lambda *args, **kwargs: calls.append(1) or choose(*args, **kwargs))
    params, x = given()
    fn = zerojax.remat(attention, budget=500)
    jax.eval_shape(lambda x: fn(params, fn(params, fn(params, x))), x)
    assert len(calls) == 1


def test_sizes_and_fates_are_checked():
    assert parse_bytes("x", "1 GiB") == 2**30
    assert parse_bytes("x", "1.5 MB") == 1_500_000
    assert parse_bytes("x", "72GB") == 72 * 10**9
    assert parse_bytes("x", 7e3) == 7000
    for wrong in ("", "1 XB", "-1 GB", "GB", -1, float("nan")):
        with pytest.raises(ValueError, match="no size"):
            zerojax.remat(attention, budget=wrong)
    with pytest.raises(TypeError, match="budget"):
        zerojax.remat(attention, budget=None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="keep"):
        zerojax.remat(attention, budget=0, named={"x": "keep"})  # pyright: ignore[reportArgumentType]


class Net(nn.Module):
    """Two scanned blocks with dropout, a flag and a counter."""

    budget: float | None

    @nn.compact
    def __call__(self, x, train):
        block = Block if self.budget is None else zerojax.flax.remat(Block, budget=self.budget, static_argnums=2)
        axes: Any = {"params": 0, "counts": 0}
        broadcast: Any = nn.broadcast
        rngs: Any = {"params": True, "dropout": True}
        blocks = nn.scan(block, variable_axes=axes, split_rngs=rngs, length=2, in_axes=broadcast)
        x, _ = blocks(name="blocks")(x, train)
        return x


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        count = self.variable("counts", "calls", jnp.zeros, ())
        count.value += 1
        h = nn.Dropout(0.5, deterministic=not train)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))))
        return x + nn.Dense(WIDTH)(h), None


@pytest.mark.slow
def test_linen_modules_are_rematerialised():
    def run(budget):
        net, x = Net(budget), jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
        variables = net.init(jax.random.key(0), x, False)

        def loss(params):
            given, rngs = {**variables, "params": params}, {"dropout": jax.random.key(2)}
            out, changed = net.apply(given, x, True, rngs=rngs, mutable="counts")
            return jnp.sum(out**2), changed

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"])

    found, wanted = run(200), run(None)
    # The same masks, or gradients would be quite other ones; XLA may fuse a recomputed value otherwise.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, wanted)


def test_a_linen_budget_is_checked_where_it_is_given():
    with pytest.raises(ValueError, match="no size"):
        zerojax.flax.remat(Block, budget="much")
