"""Compute elementwise updates on the host in one pass over memory.

XLA:CPU writes each output of an elementwise program in a separate loop, and each loop reads its operands from memory
again. So AdamW moves 40 bytes per parameter, although 28 are enough. This file instead runs one loop over blocks that
fit into the first cache. Each output overwrites an operand that no later output reads. Newer versions of XLA:CPU
compile this loop into one kernel, in which the arithmetic of a block overlaps with the loads of the next block. Older
versions run the loop's body as many small kernels, which is slow. With these versions, the function is evaluated on
full arrays.
"""

import functools
import math
from collections.abc import Callable, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from zerojax import compat

BLOCK_BYTES = 512  # bytes per block of the widest operand


def in_blocks(
    fn: Callable[[list, list], Sequence[Any]],
    wide: Sequence[Shaped[Array, "..."]],
    scalars: Sequence[Any] = (),
    *,
    overwrites: Sequence[int | None],
) -> list[Shaped[Array, "..."]]:
    """Evaluate an elementwise function block by block. Its outputs overwrite operands.

    Call this inside `jax.jit`, and donate the overwritten operands, because operands that are not donated are copied
    first. The loop runs on one thread. To use several cores, run programs for several arrays in several Python threads.

    Args:
        fn: An elementwise function `fn(wide_blocks, scalars) -> outputs`. It is traced for blocks of one dim, and every
            output has the length of a block.
        wide: Arrays of one shape, on one device and in one kind of memory. Their dtypes may differ.
        scalars: Values that every element reads. They are passed to `fn` unchanged.
        overwrites: For each output, the index in `wide` of an operand with the same dtype, which the output overwrites;
            None for a new buffer.

    Returns:
        The same outputs as `jax.jit(fn)` on full arrays. They may be rounded differently if the compiler contracts a
        multiply-add in only one of the two programs.
    """
    shape, size = wide[0].shape, math.prod(wide[0].shape)
    block = max(1, BLOCK_BYTES // max(x.dtype.itemsize for x in wide))
    if size <= block or not loops_become_kernels():
        return list(fn(list(wide), list(scalars)))
    flat = [jax.ShapeDtypeStruct((size,), x.dtype) for x in wide]
    # Use shapes, because JAX cannot combine arrays in host memory with blocks that are only shapes.
    like = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), weak_type=jax.typeof(x).weak_type) for x in scalars]
    dtypes = [x.dtype for x in jax.eval_shape(lambda xs, ys: list(fn(list(xs), list(ys))), flat, like)]
    outputs = _loop(fn, [x.reshape(-1) for x in wide], scalars, tuple(overwrites), dtypes, block)
    return [x.reshape(shape) for x in outputs]


@functools.cache
def loops_become_kernels() -> bool:
    """Return whether this XLA:CPU compiles the loop into one kernel. Find out by compiling a small loop."""
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # there is no CPU backend, so nothing will run on it
        return False
    x = jax.ShapeDtypeStruct((1024,), jnp.float32)
    probe = lambda x: _loop(lambda xs, _: [xs[0] + 1], [x], (), (0,), [x.dtype], 128)
    with jax.default_device(device), jax.ensure_compile_time_eval():
        text = jax.jit(probe).lower(x).compile().as_text()
    return "xla_cpu_small_call" in (text or "")


def _loop(fn, wide, scalars, overwrites, dtypes, block):
    """Process the blocks of flat operands in order. The last block may overlap the previous block."""
    size = wide[0].size
    kept = {i: x for i, x in enumerate(wide) if i not in overwrites}
    fresh = lambda dtype: _in_memory_of(jnp.zeros(size, dtype), wide[0])
    carry = tuple(fresh(d) if i is None else wide[i] for i, d in zip(overwrites, dtypes, strict=True))
    order = _in_place(fn, wide, scalars, overwrites, block)

    def compute(start, kept, carry):
        operands = [carry[overwrites.index(i)] if i in overwrites else kept[i] for i in range(len(wide))]
        return tuple(fn([_slice(x, start, block) for x in operands], list(scalars)))

    def skip(start, kept, carry):
        return tuple(_slice(x, start, block) for x in carry)

    def write(x, new, i, start):
        if size % block:
            done = _in_memory_of(start + jnp.arange(block) < i * block, wide[0])
            new = jnp.where(done, _slice(x, start, block), new)
        return lax.dynamic_update_slice(x, new, (start,))

    def one_by_one(i, carry):
        """Compute each output right before it is written. The barrier keeps the outputs in order."""
        start, here = jnp.minimum(i * block, size - block), kept
        for k in order or ():
            new = write(carry[k], compute(start, here, carry)[k], i, start)
            here, carry = lax.optimization_barrier((here, (*carry[:k], new, *carry[k + 1 :])))
        return carry

    def together(i, carry):
        """Compute all outputs in a `cond` that is always true, so that XLA does not overwrite an operand too early."""
        start = jnp.minimum(i * block, size - block)
        outputs = lax.cond(i >= 0, compute, skip, start, kept, carry)
        return tuple(write(x, new, i, start) for x, new in zip(carry, outputs, strict=True))

    return lax.fori_loop(0, -(-size // block), together if order is None else one_by_one, carry)


def _in_place(fn, wide, scalars, overwrites, block) -> list[int] | None:
    """Order the outputs so that none overwrites an operand that a later output reads, or return None if impossible.

    In any other order, XLA would first copy full arrays.
    """
    first = [_slice(x, 0, block) for x in wide]
    jaxpr, _ = compat.opened(jax.make_jaxpr(lambda wide, scalars: list(fn(wide, scalars)))(first, list(scalars)))
    reads: dict[Any, frozenset[int]] = {var: frozenset([i]) for i, var in enumerate(jaxpr.invars[: len(wide)])}
    read_by = lambda atom: frozenset() if compat.is_literal(atom) else reads.get(atom, frozenset())
    for eqn in jaxpr.eqns:
        reads |= dict.fromkeys(eqn.outvars, frozenset().union(*map(read_by, eqn.invars)))
    read = list(map(read_by, jaxpr.outvars))
    before = {k: [j for j in range(len(read)) if j != k and i in read[j]] for k, i in enumerate(overwrites)}
    try:
        return list(TopologicalSorter(before).static_order())
    except CycleError:
        return None


def _slice(x, start, block):
    return lax.dynamic_slice(x, (start,), (block,))


def _in_memory_of(x, other):
    """Return `x` in the memory of `other`, because JAX does not combine arrays in host and device memory."""
    space = jax.typeof(other).memory_space
    return x if jax.typeof(x).memory_space == space else jax.device_put(x, space)
