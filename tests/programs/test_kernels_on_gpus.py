"""Losses with kernels of GPUs, compiled for eight H100s that are not there: as lean as in device view."""

import jax
import jax.numpy as jnp
import kernels
import optax
import pytest
from absent_gpus import aot
from jax.experimental.pallas import mosaic_gpu, triton
from jax.sharding import NamedSharding, PartitionSpec
from measured import cost_of

from zerojax import Precision, Tuning, zero_shard
from zerojax.gpus.devices import absent_mesh

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("optimized"),
    aot,
]
ROWS, TIME, WIDTH, HIDDEN, LAYERS = 256, 32, 128, 512, 3  # Triton's blocks are powers of two
PARAMS = {"scale": (WIDTH,), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}


def by_triton(x, w):
    """RMS norm and its backward pass, each a kernel that Pallas lowers to Triton."""

    def norm(x, scale):
        return kernels._rms_norm(x.astype(jnp.float32), scale.astype(jnp.float32)).astype(x.dtype)

    op = kernels.fused(norm, shared=1, compiler_params=triton.CompilerParams(num_warps=4))
    return op(x, w["scale"])


def by_mosaic(x, w):
    """A doubling by a Mosaic kernel, and its backward pass."""

    def double(x):
        def kernel(given, made):
            row = jax.lax.axis_index("row")
            made[row] = given[row] * 2

        grid = {"grid": (x.shape[0],), "grid_names": ("row",)}
        return mosaic_gpu.kernel(kernel, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), **grid)(x)

    op = jax.custom_vjp(double)
    op.defvjp(lambda x: (double(x), None), lambda _, g: (double(g),))
    return op(x) * w["scale"]


def compiled(kernel, stage, view, target):
    mesh = absent_mesh("h100:8")

    def layer(x, w):
        op = kernel
        if view == "global":
            specs = {"in_specs": (PartitionSpec("data"), PartitionSpec()), "out_specs": PartitionSpec("data")}
            op = jax.shard_map(kernel, mesh=mesh, check_vma=False, **specs)
        return x + jax.nn.gelu(op(x, w) @ w["up"]) @ w["down"]

    def loss(params, batch):
        x = batch.astype(params[0]["up"].dtype)
        for w in params:
            x = layer(x, w)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    tx = zero_shard(
        optax.sgd(0.1), stage=stage, mesh=mesh, view=view, tuning=Tuning(persist_below=1000), precision=Precision.bf16()
    )
    params = [{name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in PARAMS.items()}] * LAYERS
    rows = NamedSharding(mesh, PartitionSpec("data"))
    batch = jax.ShapeDtypeStruct((ROWS, TIME, WIDTH), jnp.float32, sharding=rows)
    program = jax.jit(tx.value_and_grad(loss)).lower(tx.shard(params), batch).compile()
    assert target in program.as_text()
    return program, params


KERNELS = {
    "triton": (by_triton, "__gpu$xla.gpu.triton"),
    "mosaic": (by_mosaic, "mosaic_gpu"),
}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_costs_what_it_costs_in_device_view(name, stage):
    kernel, target = KERNELS[name]
    costs = {view: cost_of(*compiled(kernel, stage, view, target)) for view in ("global", "device")}
    for cost in ("flops", "moved", "temporary"):
        assert getattr(costs["global"], cost) <= 1.05 * getattr(costs["device"], cost)
    assert costs["global"].labelled >= 0.95 * costs["global"].moved
