"""Which Pallas kernels are proved to use only their own rows. The oracle is the kernel itself, run part by part."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec

from zerojax import compat, zero_shard
from zerojax.dims import NOWHERE, on_dim
from zerojax.dims.kernels import own_rows

WORKERS, ROWS = 2, 8
X = jnp.arange(ROWS * 6.0).reshape(ROWS, 6)
W = jnp.arange(6.0)


def sine(ref, w, out):
    out[...] = jnp.sin(ref[...]) * w[...]


def numbered(axis):
    def body(ref, w, out):
        out[...] = ref[...] * w[...] + pl.program_id(axis)

    return body


def counted(ref, w, out):
    out[...] = ref[...] * w[...] / pl.num_programs(0)


def call(body, grid, x, w, out, shape=None):
    """A kernel of `X` and `W`, with `(block, index map)` of each."""
    specs = [pl.BlockSpec(*spec) for spec in (x, w, out)]
    shape = jax.ShapeDtypeStruct(shape or X.shape, X.dtype)
    return lambda x, w: pl.pallas_call(
        body, out_shape=shape, grid=grid, in_specs=specs[:2], out_specs=specs[2], interpret=True
    )(x, w)


def kept(ref, w, out, scratch):
    scratch[...] = jnp.where(pl.program_id(1) == 0, 0.0, scratch[...]) + ref[...]
    out[...] = scratch[...] * w[...]


def prefetched(w, ref, out):
    out[...] = ref[...] * w[0]


def scratch_call(grid, block, semantics=None, out=None):
    """A kernel with scratch memory, which carries a sum along the grid's second dim."""
    return lambda x, w: pl.pallas_call(
        kept,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            grid=grid,
            in_specs=[block, pl.BlockSpec((3,), lambda i, j: (j,))],
            out_specs=block,
            scratch_shapes=[pltpu.VMEM(tuple(n for n in block.block_shape if n), x.dtype)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        interpret=True,
    )(x, w)


def prefetched_call(x, w):
    """A kernel of one row, whose scalars each program reads."""
    block = pl.BlockSpec((6,), lambda i, w: (0,))
    spec = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(1,), in_specs=[block], out_specs=block)
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(prefetched, out_shape=out, grid_spec=spec, interpret=True)(w, x)


whole = ((6,), lambda *_: (0,))
half = ((3,), lambda i: (i,))
rows = lambda n: ((n, 6), lambda i, *_: (i, 0))
second = ((2, 3), lambda j, i: (i, j))
part = pl.BlockSpec((2, 3), lambda i, j: (i, j))
PROVED = {
    "a row per program": call(sine, (ROWS,), rows(1), whole, rows(1)),
    "two rows per program": call(sine, (ROWS // 2,), rows(2), whole, rows(2)),
    "a squeezed dim": call(sine, (ROWS,), ((None, 6), lambda i: (i, 0)), whole, ((None, 6), lambda i: (i, 0))),
    "the grid's second dim": call(sine, (2, ROWS // 2), second, ((3,), lambda j, i: (j,)), second),
    "the number of another dim": call(numbered(0), (2, ROWS // 2), second, ((3,), lambda j, i: (j,)), second),
    "vmapped": jax.vmap(call(sine, (1,), whole, whole, whole, (6,)), in_axes=(0, None)),
    "the number of programs, a constant": call(counted, (ROWS,), rows(1), whole, rows(1)),
    "scratch memory and vmap": jax.vmap(scratch_call((1, 2), pl.BlockSpec((3,), lambda i, j: (j,))), in_axes=(0, None)),
    "scratch memory, declared parallel": scratch_call((ROWS // 2, 2), part, ("parallel", "arbitrary")),
    "scalars and vmap": jax.vmap(prefetched_call, in_axes=(0, None)),
    "vmapped with a number": jax.vmap(call(numbered(0), (2,), half, half, half, (6,)), in_axes=(0, None)),
}
REFUSED = {
    "scratch memory": scratch_call((ROWS // 2, 2), part),
    "scratch memory, declared sequential": scratch_call((ROWS // 2, 2), part, ("arbitrary", "parallel")),
    "one program": call(sine, (), ((ROWS, 6), lambda: (0, 0)), ((6,), lambda: (0,)), ((ROWS, 6), lambda: (0, 0))),
    "the number of the program": call(numbered(0), (ROWS,), rows(1), whole, rows(1)),
    "a sum over programs": call(sine, (ROWS,), rows(1), whole, ((1, 6), lambda i: (0, 0)), (1, 6)),
    "other rows": call(sine, (ROWS,), ((1, 6), lambda i: (ROWS - 1 - i, 0)), whole, rows(1)),
    "blocks past the end": call(sine, (4,), rows(3), whole, rows(3)),
    "too few rows": call(sine, (1,), rows(ROWS), whole, rows(ROWS)),
    "a diagonal": call(sine, (2,), ((2, 3), lambda i: (i, i)), ((3,), lambda i: (i,)), ((2, 3), lambda i: (i, 0))),
}


def split_of(fn):
    (eqn,) = [eqn for eqn in compat.opened(jax.make_jaxpr(fn)(X, W))[0].eqns if eqn.primitive.name == "pallas_call"]
    return eqn, own_rows(eqn, [on_dim(0) if atom.aval.shape == X.shape else NOWHERE for atom in eqn.invars], WORKERS)


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", PROVED)
def test_a_divided_kernel_computes_its_part(name):
    eqn, split = split_of(PROVED[name])
    assert split is not None
    has_rows = [atom.aval.shape == X.shape for atom in eqn.invars]
    assert (split.dims, split.out_dims) == (tuple(0 if rows else None for rows in has_rows), (0,))
    given = lambda x: [x if rows else W for rows in has_rows]
    parts = [eqn.primitive.bind(*given(x), **split.params)[0] for x in jnp.split(X, WORKERS)]
    np.testing.assert_array_equal(jnp.concatenate(parts), PROVED[name](X, W))


@pytest.mark.skipif(
    jax.__version__.startswith("0.10."), reason="jax 0.10 interprets such kernels on the mesh of the trace"
)
def test_a_divided_kernel_makes_arrays_of_its_own(mesh):
    def even(ref, w, out):
        out[...] = jnp.where(jax.lax.broadcasted_iota(jnp.int32, out.shape, 1) % 2 == 0, ref[...], 0.0) * w[...]

    kernel = call(even, (ROWS,), rows(1), whole, rows(1))
    loss = lambda params, x: jnp.mean(kernel(x, W) @ params["v"])
    tx, params = zero_shard(optax.sgd(0.1), stage=2, mesh=mesh), {"v": jnp.ones((6, 8))}
    x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("data")))
    with warnings.catch_warnings(action="error"):  # about kernels that are not divided
        _, found = jax.jit(tx.value_and_grad(loss))(tx.shard(params), x)
    np.testing.assert_allclose(tx.unshard(found)["v"], jax.grad(loss)(params, X)["v"], rtol=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_kernels_without_a_proof_are_not_divided(name):
    assert split_of(REFUSED[name])[1] is None


def test_a_kernel_of_parameters_is_not_divided():
    eqn, _ = split_of(PROVED["a row per program"])
    assert own_rows(eqn, [NOWHERE, NOWHERE], WORKERS) is None
