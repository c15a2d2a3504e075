"""Losses that name a mesh are planned for other devices, with kernels of GPUs, or refused by name."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absent_gpus import aot
from conftest import mesh_of
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo as attention_of_cudnn
from jax.experimental import pallas as pl
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from zerojax import Precision, Tuning, check, plan, zero_shard
from zerojax.gpus.devices import absent_mesh
from zerojax.planning import absent_program

WIDTH = 16
ROWS = PartitionSpec("data")


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


def traced(mesh, block, stage=3):
    tx = zero_shard(optax.adam(1e-3), stage=stage, mesh=mesh, tuning=Tuning(persist_below=0))
    return tx.train_step(loss_of(block)).trace(tx.create(PARAMS), BATCH)


def lowered(mesh, block, stage=3):
    return traced(mesh, block, stage).lower().as_text()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", CONSTRUCTS)
def test_a_loss_that_names_an_abstract_mesh_is_that_of_any_devices(name, stage):
    given, target = mesh_of(4), Mesh(np.array(jax.devices()[4:]), ("data",), axis_types=(AxisType.Auto,))
    make = CONSTRUCTS[name]
    assert lowered(target, make(given.abstract_mesh), stage) == lowered(target, make(target), stage)


@pytest.mark.parametrize("name", TYPED)
def test_a_loss_on_explicit_axes_asks_for_its_mesh(name):
    make, target = TYPED[name], mesh_of(4, kind=AxisType.Explicit)
    assert lowered(target, lambda x: make(jax.sharding.get_abstract_mesh())(x)) == lowered(target, make(target))


@pytest.mark.parametrize("named", [mesh_of(4), mesh_of(8).abstract_mesh], ids=["other devices", "other size"])
@pytest.mark.parametrize("name", CONSTRUCTS)
def test_a_mesh_of_other_devices_is_refused_by_name(name, named):
    target = Mesh(np.array(jax.devices()[4:]), ("data",), axis_types=(AxisType.Auto,))
    with pytest.raises(
        ValueError, match=r"names a mesh \{'data': .\}( at test_named_meshes.py.*)?, and .*for 4 x .*abstract_mesh"
    ):
        absent_program.lowered(traced(target, CONSTRUCTS[name](named)), target)
    absent_program.lowered(traced(target, CONSTRUCTS[name](target)), target)


@aot
def test_nothing_of_jax_stays_replaced():
    """Neither after an error, nor for another thread meanwhile."""
    before, found = attention_of_cudnn.check_compute_capability, []
    ask = lambda: found.append(attention_of_cudnn.check_compute_capability("9.0"))
    thread = threading.Thread(target=ask)

    def fails():
        with absent_program.kernels_for(absent_mesh("h200:1")):
            thread.start()
            thread.join()
            ask()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert found == [False, True]
    assert attention_of_cudnn.check_compute_capability is before


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
    """Planned from simulated devices. The kernel computes a device's rows if it stands in a shard_map."""
    mesh, specs = mesh_of(8), {"in_specs": ROWS, "out_specs": ROWS, "check_vma": False}
    block = kernel if bare else jax.shard_map(kernel, mesh=mesh.abstract_mesh, **specs)
    tx = zero_shard(optax.adam(1e-3), stage=3, mesh=mesh, tuning=Tuning(persist_below=0))
    found = plan(tx.train_step(loss_of(block)), tx.create(PARAMS), BATCH, topology="h200:8")
    assert "__gpu$xla.gpu.triton" in found.text
    assert f"f32[{32 if bare else 4},{WIDTH}]" in next(x for x in found.text.splitlines() if "xla.gpu.triton" in x)


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

    tx = zero_shard(optax.adam(1e-3), stage=3, mesh=mesh_of(4), view=view, precision=Precision.bf16())
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
def test_a_loss_on_an_abstract_mesh_is_checked_and_fitted():
    mesh = mesh_of(4)
    loss, plain = loss_of(on_rows(mesh.abstract_mesh)), loss_of(on_rows(absent_mesh("h200:4")))
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
    with pytest.raises(ValueError, match=r"names a mesh \{'data': 4\}.*for 4 x NVIDIA H200"):
        check(tx.train_step(loss_of(on_rows(mesh))), tx.create(PARAMS), BATCH, topology="h200:4")


@aot
@pytest.mark.slow
def test_a_function_with_zerojax_inside_is_planned_on_an_absent_mesh():
    """A loop written by hand, whose own shardings name the mesh, too."""

    def made(mesh):
        tx = zero_shard(optax.sgd(1e-3), stage=3, mesh=mesh, tuning=Tuning(persist_below=0))
        rows = NamedSharding(mesh, ROWS)
        step = jax.jit(tx.value_and_grad(loss_of(on_rows(mesh))), in_shardings=(None, rows))
        params = jax.eval_shape(tx.shard, PARAMS)
        params = jax.tree.map(lambda x, s: x.update(sharding=s), params, tx.shardings(PARAMS).params)
        return step, params, BATCH.update(sharding=rows)

    found = plan(*made(absent_mesh("h200:8")), topology="h200:8")
    assert "all-gather" in {c.kind for c in found.collectives}
    with pytest.raises(ValueError, match=r"on a mesh \{'data': 4\}, and 'h200:8' has 8 devices.*count=8"):
        plan(*made(mesh_of(4)), topology="h200:8")


@aot
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_hand_written_loop_is_planned_on_its_own_mesh(kind):
    """Its transformation follows the arguments to the GPUs, and the loop still runs on the devices of this machine."""
    tx = zero_shard(optax.adam(1e-3), stage=3, mesh=mesh_of(8, kind=kind), tuning=Tuning(persist_below=0))
    differentiate, loss = tx.value_and_grad(loss_of(jnp.tanh)), loss_of(jnp.tanh)

    @jax.jit
    def step(state, batch):
        params, opt_state = state
        loss, grads = differentiate(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    params = tx.shard([jnp.ones((WIDTH, WIDTH))] * 2)
    state, batch = (params, tx.init(params)), jnp.ones((32, WIDTH))
    before = step(state, batch)
    found = plan(step, state, batch, topology="h100:8")
    assert found.sent == pytest.approx(
        plan(tx.train_step(loss), tx.create(params), batch, topology="h100:8").sent, rel=0.1
    )
    assert plan(step, state, batch, topology="h100:2x4").seconds > found.seconds
    jax.tree.map(np.testing.assert_array_equal, before, step(state, batch))
    tail = jax.device_put(jnp.ones((32, WIDTH)), NamedSharding(tx.config.mesh, PartitionSpec(None, "data")))
    assert plan(jax.jit(lambda state, batch: batch + 1), (), tail, topology="h100:8").memory["batch"] == 32 * 2 * 4


@aot
def test_a_jit_of_modules_is_refused_with_what_works():
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"not JitWrapped.*nnx.split\(\(model, optimizer\)\)"):
        plan(nnx.jit(lambda model, batch: model(batch)), model, jnp.ones((8, WIDTH)), topology="h100:1")


@aot
def test_no_arrays_are_made_on_absent_gpus():
    tx = zero_shard(optax.adam(1e-3), stage=3, mesh=absent_mesh("h100:8"))
    for make in (lambda: tx.init_params(lambda: PARAMS), lambda: tx.init(tx.shard(PARAMS))):
        with pytest.raises(ValueError, match=r"8 x NVIDIA H100.*8 simulated devices.*tx.create\(jax.eval_shape"):
            make()
    assert isinstance(tx.create(PARAMS).params[0], jax.ShapeDtypeStruct)
