"""Each construct of a loss that is written for Explicit axes, what plain jit refuses there, and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from explicit_models import (
    AUTO,
    DIM,
    EXPLICIT,
    GPT,
    MLP,
    ROWS,
    WIDE,
    WORDS,
    P,
    assert_equals_plain_jit,
    mesh_of,
    product,
    zero,
)
from jax.sharding import NamedSharding

from zerojax import compat, jaxprs
from zerojax.comm.typed import TypedFunction, typed_mesh
from zerojax.config import with_auto_axes


@jax.custom_jvp
def clipped(x):
    return jax.sharding.reshard(jnp.clip(x, -1, 1), P("data"))


@clipped.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    slope = jax.sharding.reshard((jnp.abs(x) < 1).astype(x.dtype), jax.typeof(x).sharding)
    return clipped(x), jax.sharding.reshard(t * slope * 2, P("data"))


def with_custom_jvp(model, params, batch):
    return jnp.mean(clipped(3 * product(batch["x"], params["up"], model.model)) ** 2)


@jax.custom_jvp
def times(x, n):
    return x * n, n + 1


@times.defjvp
def _(primals, tangents):
    (x, n), (t, _) = primals, tangents
    out, after = times(x, n)
    return (out, after), (2 * t * n, jnp.zeros((), jax.dtypes.float0))


@jax.custom_vjp
def over(x, n):
    return x / n, n + 1


over.defvjp(lambda x, n: (over(x, n), n), lambda n, cotangents: (3 * cotangents[0] / n, None))


def with_integers_in_rules(model, params, batch):
    h = product(batch["x"], params["up"], model.model)
    doubled, three = times(h, jnp.sum(batch["x"] > 9, dtype=jnp.int32) + 2)
    third, four = over(doubled, three)
    return jnp.mean(jax.sharding.reshard(third, P("data")) ** 2) * four


def with_cond(model, params, batch):
    wide = lambda x: jnp.einsum("bd,df->bf", x, params["up"], **model.to("data", model.model))
    narrow = lambda x: jnp.zeros((ROWS, WIDE), x.dtype, **keyword(model.to("data", model.model))) + 2
    return jnp.mean(jax.lax.cond(jnp.sum(batch["x"]) > 0, wide, narrow, batch["x"]) ** 2)


def keyword(to):
    return {"device": NamedSharding(jax.sharding.get_abstract_mesh(), to["out_sharding"])} if to else {}


def with_loops(model, params, batch):
    def body(i, h):
        assert jax.typeof(h).sharding.spec[0] == "data"
        wide = product(h, params["up"], None)
        return h + jax.sharding.reshard(wide @ params["down"], P("data")) / 3

    h = jax.lax.fori_loop(0, 2, body, batch["x"])
    steps = jax.lax.while_loop(lambda i: i < 3, lambda i: i + 1, jnp.zeros((), jnp.int32))
    return jnp.mean(h**2) * steps


def with_shard_map(model, params, batch):
    h = product(batch["x"], params["up"], model.model)
    spec = P("data", model.model)
    h = jax.shard_map(lambda h: h - jax.lax.pmean(h, "data"), in_specs=spec, out_specs=spec)(h)
    return jnp.mean(h**2)


def with_islands(model, params, batch):
    square = jax.sharding.auto_axes(lambda h: (h @ h.T) / 9, out_sharding=P("data", None))
    return jnp.mean(square(product(batch["x"], params["up"], model.model)))


def with_a_position(model, params, batch):
    rows = jax.lax.broadcasted_iota(jnp.float32, (ROWS, WIDE), 0, out_sharding=P("data", model.model))
    flat = product(batch["x"] * 2, params["up"], model.model).reshape(ROWS, 2, WIDE // 2, **model.to("data"))
    noise = jax.random.normal(jax.random.key(0), flat.shape, **model.to("data"))
    return jnp.mean(rows) + jnp.mean(jnp.swapaxes(flat, 1, 2) ** 2) + jnp.mean(noise * flat)


def with_a_sum_to_be_taken(model, params, batch):
    h = product(batch["x"], params["up"], model.model)
    part = jnp.einsum("bf,fd->bd", h, params["down"], out_sharding=P("data", None, unreduced={"model"}))
    return jnp.mean(jnp.tanh(jax.sharding.reshard(part, P("data"))))


def with_an_auto_axis(model, params, batch):
    h = jnp.einsum("bd,df->bf", batch["x"], params["up"], out_sharding=P("data", None))
    return jnp.mean(jnp.tanh(jax.lax.with_sharding_constraint(h, P(None, "model"))))


TWO, ONE, MIXED = (EXPLICIT, EXPLICIT), (EXPLICIT,), (EXPLICIT, AUTO)
CONSTRUCTS = {
    with_custom_jvp: TWO,
    with_integers_in_rules: TWO,
    with_cond: TWO,
    with_loops: ONE,
    with_shard_map: TWO,
    with_islands: TWO,
    with_a_position: TWO,
    with_a_sum_to_be_taken: TWO,
    with_an_auto_axis: MIXED,
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("construct", CONSTRUCTS, ids=lambda f: f.__name__)
def test_constructs(construct):
    mesh = mesh_of(*CONSTRUCTS[construct])
    model = MLP(mesh)
    params, batch = model.feed_forward(3), model.batch()
    with jax.set_mesh(mesh):
        assert_equals_plain_jit(mesh, 3, functools.partial(construct, model), params, batch)


def evaluated(mesh, loss, *args):
    """A loss that is traced on the mesh, as a jaxpr on Auto axes."""
    arrays, tree = jax.tree.flatten(args)
    specs = [x.sharding.spec for x in arrays]
    flat = lambda *arrays: loss(*tree.unflatten(arrays))
    traced = TypedFunction(flat, typed_mesh(mesh), arrays, specs, ["data"])
    return on_auto_axes(mesh, lambda *xs: traced(*jax.tree.leaves(xs))[0], *args)


def on_auto_axes(mesh, fn, *args):
    with jax.sharding.use_abstract_mesh(with_auto_axes(mesh).abstract_mesh):
        return jax.make_jaxpr(fn)(*jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args))


def test_a_model_that_names_nothing_is_the_same_program():
    mesh = mesh_of(EXPLICIT)
    loss, *args = MLP(mesh_of(AUTO)).loss, MLP(mesh).params(scanned=True), MLP(mesh).batch()
    assert str(evaluated(mesh, loss, *args)) == str(on_auto_axes(mesh, loss, *args))


def test_types_become_constraints():
    """Where a sharding is named, and where a type divides rows and no operand has it; not on parameters."""
    mesh = mesh_of(EXPLICIT, EXPLICIT)
    params, batch = MLP(mesh).feed_forward(3), MLP(mesh).batch()

    def loss(params, batch):
        h = jnp.einsum("bd,df->bf", batch["x"], jnp.tanh(params["up"]), out_sharding=P("data", "model"))
        return jnp.mean(jnp.tanh(jnp.tanh(h).T)) + jnp.sum(jax.sharding.reshard(params["down"], P()))

    jaxpr, _ = compat.opened(evaluated(mesh, loss, params, batch))
    specs = [e.params["sharding"].spec for e in jaxprs.equations(jaxpr) if e.primitive.name == "sharding_constraint"]
    found = [[entry[0] if isinstance(entry, tuple) else entry for entry in spec] for spec in specs]
    assert found == [["data", "model"], ["model", "data"], [None, None]]


def test_what_plain_jit_refuses_runs_as_on_auto_axes():
    """A lookup that does not say how its result is sharded."""
    mesh = mesh_of(EXPLICIT)
    params, batch = {"table": MLP(mesh).put(0, (WORDS, DIM))}, GPT(mesh).batch()
    loss = lambda params, batch: jnp.mean(params["table"][batch["tokens"]] ** 2)
    with jax.set_mesh(mesh):
        with pytest.raises(Exception, match="out_sharding"):
            jax.jit(loss)(params, batch)
        tx = zero(mesh, 3)
        found, _ = tx.value_and_grad(loss)(tx.shard(params), batch)
    table, tokens = np.asarray(params["table"]), np.asarray(batch["tokens"])
    np.testing.assert_allclose(found, np.mean(table[tokens] ** 2), rtol=1e-5)


def broken(params, batch):
    h = jnp.einsum("bd,df->bf", batch["x"], params["up"], out_sharding=P("data"))
    return jnp.mean(h @ params["up"])


def ambiguous(params, batch):
    h = jnp.einsum("bd,df->bf", batch["x"], params["up"], out_sharding=P("data"))
    return jnp.mean(jax.sharding.reshard(params["up"], P(None, "data")) @ jax.sharding.reshard(h.T, P("data")))


@pytest.mark.parametrize(
    ("loss", "message"), [(broken, "contracting dimensions"), (ambiguous, "Contracting dimensions are sharded")]
)
def test_an_error_is_that_of_the_callers_mesh(loss, message):
    mesh = mesh_of(EXPLICIT)
    params, batch = MLP(mesh).feed_forward(0), MLP(mesh).batch()
    with jax.set_mesh(mesh):
        tx = zero(mesh, 3)
        with pytest.raises(Exception, match=message):
            jax.jit(loss)(params, batch)
        with pytest.raises(Exception, match=message):
            tx.value_and_grad(loss)(tx.shard(params), batch)
