"""Losses that name the caller's devices are planned for other devices, and nothing of it is left afterwards."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absent_gpus import aot
from conftest import mesh_of, quick_or_slow
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from zerojax import Precision, Tuning, check, estimate, plan, zero_shard
from zerojax.gpus.devices import absent_mesh
from zerojax.planning.other_meshes import MovedMeshes, meshes_moved

WIDTH = 16
ROWS = PartitionSpec("data")


def mesh_with(count, explicit=False, names=("data",), shape=None):
    kind = AxisType.Explicit if explicit else AxisType.Auto
    devices = np.array(jax.devices()[:count]).reshape(shape or (count,))
    return Mesh(devices, names, axis_types=(kind,) * len(names))


def attention(x):
    return jax.nn.softmax(x @ x.T) @ x


def on_rows(mesh, f=attention):
    return jax.shard_map(f, mesh=mesh, in_specs=ROWS, out_specs=ROWS)


def with_own_derivative(mesh):
    """Only its derivative names the mesh, which JAX calls after the loss was traced."""
    f = jax.custom_vjp(jnp.tanh)
    f.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (on_rows(mesh)(g) * x,))
    return f


CONSTRUCTS = {
    "shard_map": on_rows,
    "jit": lambda mesh: jax.jit(on_rows(mesh)),
    "checkpoint": lambda mesh: jax.checkpoint(on_rows(mesh)),
    "cond": lambda mesh: lambda x: jax.lax.cond(x.sum() > 0, on_rows(mesh), lambda x: x, x),
    "scan": lambda mesh: lambda x: jax.lax.scan(lambda c, _: (on_rows(mesh)(c), None), x, length=2)[0],
    "custom_vjp": with_own_derivative,
    "constraint": lambda mesh: lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, ROWS)),
    "out_shardings": lambda mesh: jax.jit(jnp.sin, out_shardings=NamedSharding(mesh, ROWS)),
}
TYPED = {
    "shard_map": on_rows,
    "reshard": lambda mesh: lambda x: jax.sharding.reshard(x, NamedSharding(mesh, ROWS)),
    "out_sharding": lambda mesh: (
        lambda x: jnp.einsum("bw,wv->bv", x, jnp.eye(WIDTH), out_sharding=NamedSharding(mesh, ROWS))
    ),
    "constraint": CONSTRUCTS["constraint"],
}


def loss_of(block):
    def loss(params, batch):
        for w in params:
            batch = block(jnp.tanh(batch @ w))
        return jnp.mean(batch**2)

    return loss


PARAMS = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 2
BATCH = jax.ShapeDtypeStruct((32, WIDTH), jnp.float32)


def lowered(mesh, block):
    tx = zero_shard(optax.adam(1e-3), stage=3, mesh=mesh, tuning=Tuning(persist_below=0))
    return tx.train_step(loss_of(block)).lower(tx.create(PARAMS), BATCH).as_text()


GRID = [(False, name) for name in CONSTRUCTS] + [(True, name) for name in TYPED]
GRID = [(*sizes, *case) for sizes in ((8, 4), (2, 8)) for case in GRID]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("given", "target", "explicit", "name"),
    quick_or_slow(GRID, [(8, 4, False, "shard_map"), (2, 8, False, "custom_vjp"), (2, 8, True, "reshard")]),
)
def test_the_program_is_that_of_a_loss_on_the_devices_of_the_plan(given, target, explicit, name):
    """Whatever names the mesh, and whether it has more devices or fewer."""
    make = (TYPED if explicit else CONSTRUCTS)[name]
    given, target = mesh_with(given, explicit), mesh_with(target, explicit)
    block = make(given)
    with meshes_moved(MovedMeshes(given, target)) as notes:
        moved = lowered(target, block)
    assert moved == lowered(target, make(target))
    assert len(notes) == 1


def test_traces_of_a_plan_are_kept_apart():
    """JAX keeps the trace of an inner jit. The step finds its own before and after the plan, and the plan its own."""
    given, target = mesh_with(8), mesh_with(4)
    block = jax.jit(on_rows(given))
    before = lowered(given, block)
    with meshes_moved(MovedMeshes(given, target)):
        moved = lowered(target, block)
    assert moved == lowered(target, jax.jit(on_rows(target)))
    assert lowered(given, block) == before


def test_a_mesh_of_other_axes_is_refused():
    step = mesh_with(8)
    with pytest.raises(ValueError, match=r"names a mesh \{'a': 2, 'b': 4\}.*Name the axes of the step's mesh"):
        MovedMeshes(step, mesh_with(4))(mesh_with(8, names=("a", "b"), shape=(2, 4)))
    assert MovedMeshes(step, mesh_with(8))(step) == step


def test_nothing_of_jax_stays_replaced(mesh):
    """Neither after an error, nor for another thread meanwhile."""
    bind, found = Primitive.bind, []
    run = lambda: found.append(float(jax.jit(on_rows(mesh, jnp.sin))(jnp.ones((16, WIDTH))).sum()))
    thread = threading.Thread(target=run)

    def fails():
        with meshes_moved(MovedMeshes(mesh, mesh_of(4))):
            thread.start()
            thread.join()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert Primitive.bind is bind
    run()
    assert found[0] == found[1]


def test_the_estimate_of_a_loss_on_a_mesh_is_that_of_the_loss(mesh):
    """A device has its own rows, which are those of the shard_map's body."""
    found = [
        estimate(PARAMS, tx=optax.adam(1e-3), devices=8, stages=(2,), loss_fn=loss_of(block), batch=BATCH)
        for block in (on_rows(mesh), attention)
    ]
    assert found[0][2].activations == found[1][2].activations
    two = mesh_with(8, names=("data", "model"), shape=(4, 2))
    with pytest.raises(ValueError, match="a share of the rows and the whole model"):
        estimate(PARAMS, devices=8, loss_fn=loss_of(on_rows(two)), batch=BATCH)


def kernel(x):
    call = lambda x: pl.pallas_call(
        lambda x, out: out.__setitem__(..., jnp.tanh(x[...])), out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype)
    )(x)
    f = jax.custom_vjp(call)
    f.defvjp(lambda x: (call(x), None), lambda _, g: (call(g),))
    return f(x)


@aot
@pytest.mark.slow
@pytest.mark.parametrize("bare", [False, True], ids=["shard_map", "bare"])
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_kernels_are_lowered_for_the_gpus_of_the_plan(bare):
    """Planned from a mesh of one device. The kernel computes a device's rows if it stands in a shard_map."""
    mesh = mesh_with(1)
    block = kernel if bare else jax.shard_map(kernel, mesh=mesh, in_specs=ROWS, out_specs=ROWS, check_vma=False)
    tx = zero_shard(optax.adam(1e-3), stage=3, mesh=mesh, tuning=Tuning(persist_below=0))
    found = plan(tx.train_step(loss_of(block)), tx.create(PARAMS), BATCH, topology="h200:8")
    assert "__gpu$xla.gpu.triton" in found.text
    assert f"f32[{32 if bare else 4},{WIDTH}]" in next(x for x in found.text.splitlines() if "xla.gpu.triton" in x)
    assert any("names a mesh {'data': 1}, which is planned as {'data': 8}" in note for note in found.notes) != bare


@aot
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["h200:4", "b200:4"])
@pytest.mark.parametrize("view", ["global", "device"])
@pytest.mark.parametrize("around", ["nothing", "scan", "remat"])
def test_cudnn_attention_is_planned_without_cudnn(around, view, topology):
    """Forward and backward, in each view; before and after, JAX misses cuDNN."""

    def layer(batch, w):
        heads = (batch @ w)[:, :, None]
        out = jax.nn.dot_product_attention(heads, heads, heads, is_causal=True, implementation="cudnn")
        return batch + out[:, :, 0], None

    def loss(params, batch):
        if around == "scan":
            batch, _ = jax.lax.scan(layer, batch, params)
        for w in params if around != "scan" else ():
            batch, _ = (jax.checkpoint(layer) if around == "remat" else layer)(batch, w)
        return jnp.mean(batch.astype(jnp.float32) ** 2)

    tx = zero_shard(optax.adam(1e-3), stage=3, mesh=mesh_with(4), view=view, precision=Precision.bf16())
    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    params = shape.update(shape=(2, 64, 64)) if around == "scan" else [shape] * 2
    batch = jax.ShapeDtypeStruct((8, 128, 64), jnp.bfloat16)
    step, state = tx.train_step(loss), tx.create(params)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cuDNN"):
            step.lower(state, batch)
        text = plan(step, state, batch, topology=topology).text
        assert text.count('custom_call_target="__cudnn$fmhaSoftmax"') == (4 if around == "remat" else 2)
        assert text.count('custom_call_target="__cudnn$fmhaSoftmaxBackward"') == 2


@aot
@pytest.mark.slow
def test_a_loss_on_a_mesh_is_checked_and_fitted(mesh):
    loss, plain = loss_of(on_rows(mesh)), loss_of(on_rows(absent_mesh("h200:4")))
    tx = zero_shard(optax.adam(1e-3), stage=3, mesh=mesh, tuning=Tuning(persist_below=0))
    absent = zero_shard(optax.adam(1e-3), stage=3, mesh=absent_mesh("h200:4"), tuning=Tuning(persist_below=0))
    found = check(tx.train_step(loss), tx.create(PARAMS), BATCH, topology="h200:4")
    known = check(absent.train_step(plain), absent.create(PARAMS), BATCH)
    assert (found.gathered, found.reduced, found.peak, found.flops) == (
        known.gathered,
        known.reduced,
        known.peak,
        known.flops,
    )
    fit = plan.fit(tx, loss, PARAMS, BATCH, devices=4, rows=32, stages=3, offload=None)
    assert fit.plan.devices == 4


@aot
@pytest.mark.slow
def test_a_function_is_moved_from_a_mesh_of_equal_sizes():
    """A loop written by hand, whose own shardings name the mesh, and zerojax inside of it."""

    def made(count):
        mesh = mesh_with(count)
        tx = zero_shard(optax.sgd(1e-3), stage=3, mesh=mesh, tuning=Tuning(persist_below=0))
        rows = NamedSharding(mesh, ROWS)
        step = jax.jit(tx.value_and_grad(loss_of(on_rows(mesh))), in_shardings=(None, rows))
        params = jax.eval_shape(tx.shard, PARAMS)
        params = jax.tree.map(lambda x, s: x.update(sharding=s), params, tx.shardings(PARAMS).params)
        return step, params, BATCH.update(sharding=rows)

    found = plan(*made(8), topology="h200:8")
    assert "all-gather" in {c.kind for c in found.collectives}
    with pytest.raises(ValueError, match=r"on a mesh \{'data': 4\}, and 'h200:8' has 8 devices.*count=8"):
        plan(*made(4), topology="h200:8")
