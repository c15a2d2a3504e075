"""At the edges of what a loss may do, N devices give what one gives: statistics and indices of parameters."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import mesh_of, quick_or_slow
from jax.sharding import PartitionSpec

from zerojax import Offload, Precision, Tuning, zero_shard

ROWS = jnp.linspace(-1, 1, 32).reshape(8, 4)


def pooled(w):
    return jax.lax.reduce_window(w, -jnp.inf, jax.lax.max, (2,) * w.ndim, (1,) * w.ndim, "VALID")


def start(w, rows, more):
    """The first index, which only the rows say, `more` before the end of dim 0."""
    return jnp.argmax(rows[:, 0]) - 7 + w.shape[0] - more


# Of a parameter and the rows; every device computes their gradients alike.
OF_PARAMETERS = {
    "percentile": lambda w, rows: jnp.percentile(w, 30, axis=0),
    "pooled": lambda w, rows: pooled(w),
    "behind": lambda w, rows: jax.lax.dynamic_slice_in_dim(w, start(w, rows, -3), 2, 0),
    "before": lambda w, rows: jax.lax.dynamic_index_in_dim(w, -start(w, rows, 0) - 30, 0),
    "in": lambda w, rows: jax.lax.dynamic_update_slice_in_dim(jnp.ones((40, *w.shape[1:])), w, start(w, rows, -29), 0),
    "some": lambda w, rows: w.at[jnp.array([0, 12, -30]) + start(w, rows, w.shape[0])].get(mode="clip"),
}


QUICK = [(3, (10, 3, 2))]


def with_all(params, rows):
    """Each function of parameters of its own, so that one program has them all."""
    values = {name: OF_PARAMETERS[name](w, rows) for name, w in params.items() if name != "weights"}
    return jnp.mean((rows @ params["weights"]) ** 2) + sum(jnp.sum(x**2) for x in values.values())


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "shape"), quick_or_slow([(1, (10, 3, 2)), (1, (16, 3)), (3, (16, 3))], QUICK))
def test_gradients_that_all_devices_compute_alike(stage, shape, mesh, optimized):
    """Of leaves that are padded, and of others."""
    params = {name: jax.random.normal(jax.random.key(i), shape) for i, name in enumerate(OF_PARAMETERS)}
    params["weights"] = jnp.ones((4, 4))
    tx = zero_shard(optax.sgd(0.1), stage=stage, mesh=mesh, tuning=Tuning(persist_below=0))
    expected = jax.jit(jax.value_and_grad(with_all))(params, ROWS)
    found, grads = tx.value_and_grad(with_all)(tx.shard(params), ROWS)
    chex.assert_trees_all_close((found, tx.unshard(grads)), expected, rtol=1e-5, atol=1e-6)


STACK = {
    "stack": jax.random.normal(jax.random.key(1), (3, 4, 4)),
    "matrix": jax.random.normal(jax.random.key(2), (4, 4)),
}


def narrow(params, rows, dtype=jnp.float8_e5m2):
    """Products with float8 copies of parameters, in a loop and outside."""
    step = lambda h, w: (jnp.tanh(h @ w.astype(dtype).astype(h.dtype)), None)
    rows, _ = jax.lax.scan(step, step(rows, params["matrix"])[0], params["stack"])
    return jnp.mean(rows**2)


def test_a_gradient_that_is_rounded_to_float8_is_rounded_once_it_is_summed(mesh):
    tx = zero_shard(optax.sgd(0.1), stage=3, mesh=mesh, tuning=Tuning(persist_below=0))
    expected = jax.jit(jax.value_and_grad(narrow))(STACK, ROWS)
    found, grads = tx.value_and_grad(narrow)(tx.shard(STACK), ROWS)
    chex.assert_trees_all_close((found, tx.unshard(grads)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_float8_gradients_are_summed_in_a_wider_type(mesh):
    """In device view each device rounds its own; what they add up to must not be rounded to three digits again."""
    w = {"w": jnp.ones((8, 8))}
    rows = jnp.repeat(2.0 ** (3 - jnp.arange(8.0))[:, None], 8, axis=1)  # eight binary digits in all, as bfloat16 has
    loss = lambda p, rows: jnp.sum(rows @ p["w"].astype(jnp.float8_e4m3fn).astype(jnp.float32))
    for stage in (1, 3):
        tx = zero_shard(optax.sgd(0.1), stage=stage, mesh=mesh, tuning=Tuning(persist_below=0), view="device")
        _, grads = tx.value_and_grad(loss)(tx.shard(w), rows)
        chex.assert_trees_all_close(tx.unshard(grads)["w"], jnp.full((8, 8), jnp.mean(rows[:, 0])), rtol=1e-6)


@pytest.mark.slow
def test_types_are_promoted_although_a_user_forbids_it(mesh):
    batch = {"rows": ROWS, "weight": jnp.ones(8)}

    def loss(params, batch):
        losses = jnp.mean((batch["rows"] @ params["w"]) ** 2, axis=1).astype(jnp.float32)
        return jnp.sum(losses * batch["weight"]), jnp.sum(batch["weight"])

    with jax.numpy_dtype_promotion("strict"):
        tx = zero_shard(
            optax.sgd(0.1, momentum=0.9), stage=1, mesh=mesh, precision=Precision.fp16(), tuning=Tuning(persist_below=0)
        )
        state = tx.create({"w": jnp.eye(4)})
        state, metrics = tx.train_step(loss, weighted=True)(state, batch)
    assert metrics["loss"] == pytest.approx(float(jnp.mean(ROWS**2)), rel=1e-3)


@pytest.mark.quick(1)
@pytest.mark.parametrize("offload", [None, Offload(optimizer="host", params="host")], ids=["device", "host"])
def test_a_gradient_through_eval_step_is_that_of_its_function(offload, mesh):
    """Of persistent leaves and sharded ones, of a batch, and of a second model; a vector is pulled back."""
    params = {"matrix": jnp.linspace(-1, 1, 64).reshape(16, 4), "gain": jnp.arange(4.0), "scale": jnp.float32(2)}

    def student_and_teacher(params, rows, teacher):
        of = lambda p: p["scale"] * jnp.tanh(rows @ p["matrix"][:4] * p["gain"])
        return jnp.mean((of(params) - of(teacher)) ** 2, axis=1)

    tx = zero_shard(optax.sgd(0.1), stage=3, mesh=mesh, tuning=Tuning(persist_below=8), offload=offload)
    call, weights = tx.eval_step(student_and_teacher), jnp.arange(8.0)
    teacher = jax.tree.map(jnp.sin, params)
    expected, pull = jax.vjp(jax.jit(student_and_teacher), params, ROWS, teacher)
    found, pull_sharded = jax.vjp(call, tx.shard(params), ROWS, teacher)
    grads, *others = pull_sharded(weights)
    chex.assert_trees_all_close((found, (tx.unshard(grads), *others)), (expected, pull(weights)), rtol=1e-5, atol=1e-6)
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jvp(lambda p: call(p, ROWS, teacher), (tx.shard(params),), (tx.shard(params),))


@pytest.mark.quick(1)
@pytest.mark.parametrize("view", ["global", "device"])
def test_a_shard_map_over_another_axis_within_the_model(view):
    mesh = mesh_of(4, 2, names=("data", "model"))
    whole, columns = PartitionSpec(), PartitionSpec(None, "model")

    def plain(params, batch):
        return jnp.tanh(batch @ params["w"]).sum() / batch.shape[0]

    def loss(params, batch):
        part = jax.shard_map(
            lambda w, x: jax.lax.psum(jnp.tanh(x @ w).sum(), "model"),
            mesh=mesh if view == "global" else jax.sharding.get_abstract_mesh(),
            in_specs=(columns, whole),
            out_specs=whole,
            axis_names={"model"},
            check_vma=False,
        )
        return part(params["w"], batch) / batch.shape[0]

    params, rows = {"w": jax.random.normal(jax.random.key(1), (16, 32))}, jax.random.normal(jax.random.key(0), (16, 16))
    tx = zero_shard(optax.sgd(0.1), stage=3, mesh=mesh, tuning=Tuning(persist_below=20), view=view)
    found, grads = tx.value_and_grad(loss)(tx.shard(params), rows)
    expected = jax.jit(jax.value_and_grad(plain))(params, rows)
    chex.assert_trees_all_close((found, tx.unshard(grads)), expected, rtol=1e-5, atol=2e-6)
