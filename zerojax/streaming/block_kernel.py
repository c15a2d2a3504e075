"""Update a parameter and its encoded state on a GPU, in one Pallas kernel that reads and writes each array once.

A block's scale must be known before its elements are rounded. So XLA would compile at least two kernels, and write wide
arrays to memory between them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import PartitionSpec
from jaxtyping import Array

from zerojax import compat, jaxprs
from zerojax.comm.mesh import mapped
from zerojax.config import Config
from zerojax.layout.encoding import BY_BLOCK
from zerojax.layout.leaf import Leaf
from zerojax.narrow_state.rounding import EncodedBlocks
from zerojax.streaming.chunk_programs import GroupInputs, ProgramKey, operands
from zerojax.streaming.encoded_chunks import evaluated_blocks

ROWS = 8  # blocks per program of the grid. With blocks of 256, each of its 128 threads has 16 elements of an array
MOST = 2**31  # the kernel's indices are integers of 32 bits
# Primitives of updates that Pallas compiles with Triton. An update that has another one runs in chunks instead.
COMPILED = BY_BLOCK | frozenset(
    "abs add add_any and bitcast_convert_type broadcast_in_dim clamp cond convert_element_type div eq exp exp2 ge gt "
    "integer_pow is_finite le log log1p logistic lt max min mul ne neg not or pow rsqrt select_n sign sqrt shift_left "
    "shift_right_logical square sub tanh xor".split()
)


def may_be_kernel(key: ProgramKey, inputs: GroupInputs) -> bool:
    """Return whether the kernel can run this update. If not, it runs in chunks."""
    first = _encoding_of(key)
    return (
        not (first.unused or first.width & (first.width - 1))  # the lengths of Triton's arrays are powers of two
        and math.prod(key.params[0].local_shape) < MOST
        and all(jnp.shape(x) == () for x in (*inputs.shared, *inputs.consts))
        # calls are inlined
        and all(
            eqn.primitive.name in COMPILED or compat.evaluated(eqn) is not None
            for eqn in jaxprs.equations(key.equations.jaxpr)
        )
    )


def _encoding_of(key: ProgramKey) -> Any:
    return next(leaf.encoding for leaf in key.state if leaf.encoding)


def updated_in_kernel(
    config: Config, key: ProgramKey, params: Sequence, state: Sequence, inputs: GroupInputs
) -> list[Array]:
    """Update whole arrays in one kernel per device, and return the new parameter and the new state.

    The arguments are as in `chunk_programs.update_on_device`. Arrays whose type does not change are overwritten.
    """
    layouts = [*key.params, *key.state, *key.grads]
    scalars = [jnp.reshape(x, 1) for x in (*inputs.shared, *inputs.consts)]
    on_cpu = config.mesh.devices.flat[0].platform == "cpu"  # in tests
    call = functools.partial(_call, key, _encoding_of(key).width, len(inputs.shared), on_cpu)
    specs = [leaf.spec for leaf in layouts]
    run = mapped(
        call,
        mesh=config.mesh,
        in_specs=(*specs, *(PartitionSpec() for _ in scalars)),
        out_specs=specs[: len(params) + len(state)],
        axis_names=set(config.mesh.axis_names),
    )
    return list(run(*params, *state, *inputs.grads, *scalars))


def _call(key: ProgramKey, width: int, shared: int, interpret: bool, *arrays: Array) -> list[Array]:
    """Run the kernel on one device. `arrays` are its shards, `shared` shared scalars, and constants, of shape `[1]`."""
    leaves = [*key.params, *key.state, *key.grads]
    written = leaves[: len(key.params) + len(key.state)]
    count = arrays[0].size // width
    rows = math.gcd(count, ROWS)
    flat = [x.reshape(count, -1) for x in arrays[: len(leaves)]]
    scalars = arrays[len(leaves) :]
    dtypes = [*key.stored_dtypes, *(leaf.dtype for leaf in key.state)]
    block = lambda x: pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
    new = pl.pallas_call(
        functools.partial(_kernel, key, (rows, width), shared, interpret),
        [jax.ShapeDtypeStruct(x.shape, dtype) for x, dtype in zip(flat, dtypes, strict=False)],
        grid=(count // rows,),
        in_specs=[*map(block, flat), *(pl.BlockSpec((1,), lambda i: (0,)) for _ in scalars)],
        out_specs=[block(x) for x in flat[: len(written)]],
        input_output_aliases={i: i for i, dtype in enumerate(dtypes) if flat[i].dtype == dtype},
        compiler_params=triton.CompilerParams(),
        interpret=interpret,
        name="zerojax_narrow_update",
    )(*flat, *scalars)
    return [x.reshape(old.shape) for x, old in zip(new, arrays, strict=False)]


def _kernel(key: ProgramKey, shape: tuple[int, int], shared: int, interpret: bool, *refs: Any) -> None:
    """Update `shape[0]` blocks of `shape[1]` elements. `refs` has the inputs of `_call`, then the results."""
    p, s = len(key.params), len(key.state)
    leaves = [*key.params, *key.state, *key.grads]
    arrays = [_loaded(ref, leaf) for ref, leaf in zip(refs, leaves, strict=False)]
    scalars = [ref[0] for ref in refs[len(leaves) : len(refs) - p - s]]
    inputs = GroupInputs(arrays[p + s :], scalars[:shared], scalars[shared:])
    new = evaluated_blocks(key, operands(key, arrays[:p], arrays[p : p + s], inputs), shape)
    if not interpret:  # Several threads load a scale. None must store the new one before all have loaded the old one.
        triton.debug_barrier()
    for ref, leaf, x in zip(refs[len(refs) - p - s :], leaves, new, strict=False):
        _store(ref, leaf, x)


def _loaded(ref: Any, leaf: Leaf) -> Any:
    if (of := leaf.encoding) is None:
        return ref[...]
    bits = 8 * of.code_dtype.itemsize

    def word(n: int) -> Array:
        parts = [
            ref[:, pl.ds(of.codes + n * 32 // bits + i, 1)].astype(jnp.uint32) << i * bits for i in range(32 // bits)
        ]
        return functools.reduce(jnp.bitwise_or, parts)

    codes = ref[:, pl.ds(0, of.codes)] if of.codes else None
    scales = lax.bitcast_convert_type(word(0), jnp.float32) if of.is_scaled else None
    return EncodedBlocks(codes, scales, word(int(of.is_scaled)) if of.has_seeds else None)


def _store(ref: Any, leaf: Leaf, x: Any) -> None:
    if (of := leaf.encoding) is None:
        ref[...] = x.astype(ref.dtype)
        return
    if of.codes:
        ref[:, pl.ds(0, of.codes)] = x.codes
    bits = 8 * of.code_dtype.itemsize
    for n, word in enumerate(word for word in x[1:] if word is not None):
        start, word = of.codes + n * 32 // bits, lax.bitcast_convert_type(word, jnp.uint32)
        for i in range(32 // bits):
            ref[:, pl.ds(start + i, 1)] = (word >> i * bits).astype(of.code_dtype)
