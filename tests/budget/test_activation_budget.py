"""`zerojax.remat_within`: exact, within its budget, and with the fewest FLOPs repeated that the budget allows."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from remat_budget import saved_bytes

import zerojax
from zerojax import compat
from zerojax.budget.graph import choose_saved, graph_of
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


def test_a_larger_budget_never_costs_more_and_is_kept():
    args, flops = given(), []
    most = zerojax.remat_within(attention, budget=0).choice(*args).most_bytes
    for budget in np.linspace(0, 1.1 * most, 20):
        fn = zerojax.remat_within(attention, budget=int(budget))
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
        found = choose_saved(graph, budget)
        named = [value for value in graph.values if value.name in found.saved]
        assert repeated(graph, named) == pytest.approx(best, rel=1e-3)


def test_a_loop_saves_products_and_not_what_kernels_compute_anyway():
    """With room for everything, the scores of attention and the sums of its softmax are computed again."""

    def block(qkv, out, x):
        q, k, v = jnp.split(x @ qkv, 3, -1)
        return jax.nn.softmax(q @ k.T) @ v @ out

    rows, wide, narrow = 128, 512, 64
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((wide, 3 * narrow), (narrow, wide), (rows, wide))]
    graph = graph_of(*compat.opened(jax.make_jaxpr(block)(*avals)), avals)
    in_loop, elsewhere = (choose_saved(graph, graph.bytes, in_loop=on) for on in (True, False))
    qkv, attended, scores = 4 * rows * 3 * narrow, 4 * rows * narrow, 4 * rows * rows
    assert in_loop.saved_bytes == qkv + attended <= elsewhere.saved_bytes - scores


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


def test_collectives_are_not_repeated(mesh):
    def block(w, x):
        return jnp.sin(jax.lax.psum(jnp.tanh(x @ w), "data")) * x

    def program(**options):
        fn = zerojax.remat_within(block, **options)
        local = lambda w, x: jax.grad(lambda w: fn(w, x).sum())(w)
        mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
        return str(jax.make_jaxpr(mapped)(jnp.ones((WIDTH, WIDTH)), jnp.ones((8 * ROWS, WIDTH))))

    assert program(budget=128).count("psum") == program(budget="1 GiB").count("psum")
    with pytest.raises(ValueError, match=r"allows 0 bytes per call, and the results of collectives.* need 128"):
        program(budget=0)


def test_blocks_that_compute_the_same_are_analysed_once(monkeypatch):
    import zerojax.budget.remat as module

    calls = []
    monkeypatch.setattr(
        module, "choose_saved", lambda *args, **kwargs: calls.append(1) or choose_saved(*args, **kwargs)
    )
    params, x = given()
    fn = zerojax.remat_within(attention, budget=500)
    jax.eval_shape(lambda x: fn(params, fn(params, fn(params, x))), x)
    assert len(calls) == 1


def test_sizes_are_checked():
    assert parse_bytes("x", "1 GiB") == 2**30
    assert parse_bytes("x", "1.5 MB") == 1_500_000
    assert parse_bytes("x", "72GB") == 72 * 10**9
    assert parse_bytes("x", 7e3) == 7000
    for wrong in ("", "1 XB", "-1 GB", "GB", -1, float("nan")):
        with pytest.raises(ValueError, match="no size"):
            zerojax.remat_within(attention, budget=wrong)
    with pytest.raises(TypeError, match="budget"):
        zerojax.remat_within(attention, budget=None)  # pyright: ignore[reportArgumentType]
