"""Models written for Explicit axes (`out_sharding`, `reshard`, `typeof`): what plain jit gives on the same mesh."""

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
    WIDE,
    P,
    assert_equals_plain_jit,
    context,
    mesh_of,
    product,
    zero,
)

from zerojax import compat
from zerojax.dims import NOWHERE, Follower, on_dim
from zerojax.inspect.compiled_collectives import collectives
from zerojax.metrics import PerRow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "parallel", "stage", "scanned"),
    [(GPT, True, 3, True), (GPT, False, 1, False), (MLP, False, 2, False), (MLP, True, 0, True)],
)
def test_equals_plain_jit(kind, parallel, stage, scanned):
    set_mesh = (stage + scanned + parallel) % 2 == 0
    mesh = mesh_of(*[EXPLICIT] * (1 + parallel))
    model = kind(mesh, named=not set_mesh)
    params, batch = model.params(scanned), model.batch()
    with context(mesh, set_mesh):
        assert_equals_plain_jit(mesh, stage, model.loss, params, batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "parallel", "stage", "scanned"), [(GPT, True, 2, False), (MLP, False, 3, True), (MLP, True, 1, True)]
)
def test_moves_the_bytes_of_the_auto_twin(kind, parallel, stage, scanned):
    def moved(axes):
        mesh = mesh_of(*[axes] * (1 + parallel))
        model = kind(mesh)
        with jax.set_mesh(mesh):
            tx = zero(mesh, stage)
            lowered = tx.train_step(model.loss).lower(tx.create(model.params(scanned)), model.batch())
        found = {}
        for c in collectives(lowered.compile()):
            found[c.kind] = found.get(c.kind, 0) + c.bytes * c.times_if_once
        return found

    assert moved(EXPLICIT) == moved(AUTO)


def test_results_have_the_types_of_plain_jit():
    """Aux and what `eval_step` returns; arguments are seen with their types."""
    mesh = mesh_of(EXPLICIT, EXPLICIT)
    model = GPT(mesh)
    params, batch = model.params(scanned=True), model.batch()
    bias = model.put(1, (WIDE,), "model")

    def loss(params, batch, bias):
        assert jax.typeof(bias).sharding.spec == P("model")
        h = product(params["embedding"].at[batch["tokens"][:, 0]].get(out_sharding=P("data")), up, "model")
        return jnp.mean((h + bias) ** 2), {"hidden": h, "columns": h.mean(0), "rows": PerRow(h.mean(1))}

    up = model.put(2, (DIM, WIDE), None, "model")  # closed over
    with jax.set_mesh(mesh):
        plain = jax.jit(lambda *args: loss(*args))(params, batch, bias)
        aux = plain[1] | {"rows": plain[1]["rows"].tree}
        tx = zero(mesh, 2)
        stored = tx.shard(params)
        (value, found), _ = tx.value_and_grad(loss, has_aux=True)(stored, batch, bias)
        np.testing.assert_allclose(value, plain[0], rtol=1e-5)
        state, step = tx.create(params), tx.train_step(loss, has_aux=True, accumulate=1)
        _, metrics = step(state, batch, bias)
        logits = jax.jit(model.logits)(params, batch)
        shown = tx.eval_step(model.logits)(stored, batch)
    for ours in (found, metrics["aux"]):
        jax.tree.map(assert_same, ours, aux)
    assert_same(shown, logits)


def assert_same(ours, plain):
    np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)
    assert ours.sharding == plain.sharding


@pytest.mark.parametrize("kind", [MLP, GPT])
def test_rows_are_followed_to_where_types_have_the_data_axis(kind):
    """What `zerojax.dims` says of each value of a gradient, held against the types that JAX gives it."""
    mesh = mesh_of(EXPLICIT, EXPLICIT)
    model = kind(mesh)
    params, batch = model.params(scanned=False), model.batch()
    with jax.set_mesh(mesh):
        jaxpr, _ = compat.opened(jax.make_jaxpr(jax.grad(model.loss))(params, batch))
    rows = len(jax.tree.leaves(params)) * [NOWHERE] + len(jax.tree.leaves(batch)) * [on_dim(0)]
    found, typed = Follower(mesh.shape["data"]).row_dims(jaxpr, rows), 0
    for var in (var for eqn in jaxpr.eqns for var in eqn.outvars):
        spec = var.aval.sharding.spec
        dims = {dim for dim, names in enumerate(spec) if "data" in (names if isinstance(names, tuple) else (names,))}
        # A type may leave a value whole that holds rows, and divide one that is the same for all of them.
        assert dims <= {place.dim for place in found[var].places} | found[var].uniform, var.aval.str_short()
        typed += bool(dims)
    assert typed > 10


@pytest.mark.slow
def test_microbatches():
    mesh = mesh_of(EXPLICIT, EXPLICIT)
    model = MLP(mesh)
    params, batch = model.params(scanned=False), model.batch()

    def loss(params, batch):
        return model.loss(params, batch), PerRow(jnp.tanh(batch["x"]))

    with jax.set_mesh(mesh):
        (value, rows), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch)
        tx = zero(mesh, 3)
        (found, shown), ours = tx.value_and_grad(loss, has_aux=True, accumulate=2)(tx.shard(params), batch)
        np.testing.assert_allclose(found, value, rtol=1e-5)
        assert_same(shown, rows.tree)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), tx.unshard(ours), grads)


def test_device_view():
    """The data axes are Manual there: types name the others, and what names these is refused."""
    mesh = mesh_of(EXPLICIT, EXPLICIT)
    model = MLP(mesh)
    params, batch = model.params(scanned=False), model.batch()

    def loss(params, batch):
        (w,) = params["layers"][:1]
        h = jnp.einsum("bd,df->bf", batch["x"], w["up"], out_sharding=P(None, "model"))
        assert jax.typeof(h).sharding.spec == P(None, "model")
        return jnp.mean(jax.sharding.reshard(h, P()) ** 2)

    with jax.set_mesh(mesh):
        assert_equals_plain_jit(mesh, 3, lambda p, b: jnp.mean((b["x"] @ p["layers"][0]["up"]) ** 2), params, batch)
        expected = jnp.mean((batch["x"] @ params["layers"][0]["up"]) ** 2)
        tx = zero(mesh, 3, view="device")
        stored = tx.shard(params)
        found, _ = tx.value_and_grad(loss)(stored, batch)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        with pytest.raises(ValueError, match="Manual"):  # what JAX says: docs/troubleshooting.md
            tx.value_and_grad(model.loss)(stored, batch)


def test_types_of_a_batch_with_fewer_rows_on_a_device_than_devices():
    """In device view, `batch_spec` divides one device's part over the other axes."""
    mesh = mesh_of(EXPLICIT, EXPLICIT)
    seen = []

    def loss(params, batch):
        seen.append(jax.typeof(batch).sharding.spec)
        return jnp.mean(jnp.einsum("rsi,ij->rsj", batch, params["w"]) ** 2)

    axes = mesh.axis_names
    tx = zero(mesh, 3, view="device", batch_spec=P(*axes))
    rows = mesh.shape[axes[0]]
    tx.train_step(loss)(tx.create({"w": jnp.ones((8, 8))}), np.ones((rows, 4 * mesh.shape[axes[1]], 8), np.float32))
    assert {spec[1] for spec in seen} == {axes[1]}
