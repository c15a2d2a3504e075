"""Layers that are alike are differentiated and lowered once, and what only looks alike is not mistaken for another."""

import contextlib
import functools
from collections import Counter

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import mesh_of
from test_rules import W, reading

from zerojax import Tuning, block, compat, jaxprs, names, signatures, zero_shard

WIDTH, LAYERS = 16, 5
PARAMS = {f"layer_{i}": jax.random.normal(jax.random.key(i), (WIDTH, WIDTH)) / 4 for i in range(LAYERS)}
ROWS = jnp.linspace(-1, 1, 8 * WIDTH).reshape(8, WIDTH)


def loss_of(scale_of, around):
    def loss(params, rows):
        for i, w in enumerate(params.values()):
            scale = scale_of(i)
            rows = around(lambda rows, w, scale=scale: jnp.tanh(scale * rows @ w))(rows, w)
        return jnp.mean(rows**2)

    return loss


AROUND = [("global", block), pytest.param("device", jax.checkpoint, marks=pytest.mark.slow)]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("scale_of", "uses"),
    [
        (lambda i: 1.5, [1, 4]),
        (lambda i: 1 + i % 2 / 2, [1, 2, 2]),
        pytest.param(lambda i: 1 + i / 8, [], marks=pytest.mark.slow),
    ],
    ids=["all", "in-turn", "none"],
)
@pytest.mark.parametrize(("view", "around"), AROUND, ids=["block", "remat"])
def test_what_is_alike_is_one_program(view, around, scale_of, uses):
    """The first layer is apart: nobody wants the cotangent of its rows."""
    loss = loss_of(scale_of, around)
    tx = zero_shard(optax.sgd(1e-2), stage=3, mesh=mesh_of(8), tuning=Tuning(persist_below=0), view=view)
    grad, shards = tx.value_and_grad(loss), tx.shard(PARAMS)
    equations = [*jaxprs.equations(jax.make_jaxpr(grad)(shards, ROWS).jaxpr)]
    for name in ("_run", "_pull"):
        bodies = Counter(id(eqn.params["jaxpr"]) for eqn in equations if eqn.params.get("name") == name)
        assert sorted(bodies.values()) == uses
    expected = jax.value_and_grad(loss)(PARAMS, ROWS)
    found, grads = grad(shards, ROWS)
    chex.assert_trees_all_close((found, tx.unshard(grads)), expected, rtol=1e-5, atol=1e-7)


def test_scopes_in_which_layers_differ_are_those_of_the_call():
    """The third product of a layer is one scope deeper in the first layer, and the second is the same in both."""
    paths = [["net/a/mlp", "net", "net/in"], ["net/b/mlp", "net", "net"]]

    def layer(x, w, scopes):
        for path in scopes:
            with contextlib.ExitStack() as stack:
                for scope in path.split("/"):
                    stack.enter_context(jax.named_scope(scope))
                x = x @ w
        return x

    def loss(v, w, x):
        for matrix, scopes in zip((v, w), paths, strict=True):
            x = jax.checkpoint(functools.partial(layer, scopes=scopes))(x, matrix)
        return x.sum()

    one, other = reading(loss, W, W)
    assert one.jaxpr is other.jaxpr
    if getattr(jax.config, "jax_remat3", False):
        pytest.skip("with jax_remat3, a remat has no scope but its equations', so equal layers are named as the first")
    in_words = lambda scopes: "/".join(scope.name for scope in scopes)
    (remat,) = one.jaxpr.eqns
    assert [in_words(names.scopes_of(eqn)) for eqn in compat.inner_jaxprs(remat)[0].eqns] == ["mlp", "net", ""]
    assert [in_words(segment.scope) for segment in (one, other)] == ["net/a+in", "net/b"]


TABLES = jnp.ones(3), jnp.ones(3)


def regrouped(x, results):
    a, b, c = jnp.split(x, 3)
    return c, *results(*jnp.split(jnp.concatenate([a, b]), 2))


def with_rule(factor):
    """A function whose derivative is another than its equations say."""
    fn = jax.custom_jvp(jnp.sin)
    fn.defjvp(lambda primals, tangents: (jnp.sin(*primals), factor * tangents[0]))
    return jax.jit(fn)


APART = {
    "operands": (lambda x: x - jnp.sin(x), lambda x: jnp.sin(x) - x),
    "number": (lambda x: x * 2.0, lambda x: x * 3.0),
    "sign of zero": (lambda x: x + 0.0, lambda x: x + -0.0),
    "constant": (lambda x: x * TABLES[0], lambda x: x * TABLES[1]),
    "parameter": (lambda x: jnp.cumsum(x), lambda x: jnp.cumsum(x[::-1])[::-1]),
    "results": (
        lambda x: regrouped(x, lambda d, e: (d, e, e + 1)),
        lambda x: regrouped(x, lambda d, e: (d, e + 1, e + 1)),
    ),
    "within a call": (jax.jit(lambda x: x * 2.0), jax.jit(lambda x: x * 3.0)),
    "within a branch": (
        lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
        lambda x: jax.lax.cond(x[0] > 0, jnp.cos, jnp.sin, x),
    ),
    "a rule of the user's": (with_rule(1.0), with_rule(2.0)),
}


@pytest.mark.parametrize(("one", "other"), APART.values(), ids=APART)
def test_what_computes_something_else_is_told_apart(one, other):
    x = jnp.ones(3)
    programs = [jax.make_jaxpr(fn)(x) for fn in (one, one, other)]
    keys = [(signatures.signature(p.jaxpr), tuple(map(id, p.consts))) for p in programs]
    assert keys[0] != keys[2]
    assert keys[0] == keys[1]
    assert hash(keys[0]) == hash(keys[1])


def test_what_has_effects_is_like_nothing():
    assert signatures.signature(jax.make_jaxpr(lambda x: jax.debug.print("{}", x))(1.0).jaxpr) is None


@pytest.mark.slow
def test_the_program_is_the_same_each_time_it_is_made():
    """Processes that make another program wait for each other forever."""

    @block
    def layer(rows, w):
        for gain in range(LAYERS):
            rows = jnp.tanh(rows @ (w * jnp.sin(rows.mean(0)) * gain)) @ (w + rows.std(0))
        return rows

    def loss(params, rows):
        for w in params.values():
            rows = layer(rows, w)
        return jnp.mean(rows**2)

    tx = zero_shard(optax.sgd(1e-2), stage=3, mesh=mesh_of(8), tuning=Tuning(persist_below=0))
    shards, traces = tx.shard(PARAMS), []  # kept: what is freed would be allocated at the same address again
    for _ in range(4):
        traces.append(jax.make_jaxpr(tx.value_and_grad(lambda *args: loss(*args)))(shards, ROWS))
    assert len({str(traced) for traced in traces}) == 1
