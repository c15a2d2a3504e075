"""Compute elementwise updates on the host in one pass over memory.

XLA:CPU writes each output of an elementwise program in a separate loop, and each loop reads its operands from memory
again. So AdamW moves 40 bytes per parameter, although 28 are enough. This file instead runs one loop over blocks that
fit into the first cache. Each output overwrites an operand that no later output reads. Newer versions of XLA:CPU
compile this loop into one kernel, in which the arithmetic of a block overlaps with the loads of the next block. Older
versions run the loop's body as many small kernels, which is slow, so with them the function is evaluated on full
arrays. A function is also evaluated on full arrays if there is no safe order of the outputs. For example, with momentum
and weight decay, the new parameter and the new momentum both read the old parameter and the old momentum.
"""

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
LOOPS_BECOME_KERNELS = jax.__version_info__ >= (0, 12)  # whether XLA:CPU compiles the loop into one kernel


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
    full = lambda: list(fn(list(wide), list(scalars)))
    if size <= block or not LOOPS_BECOME_KERNELS:
        return full()
    flat = [jax.ShapeDtypeStruct((size,), x.dtype) for x in wide]
    # Use shapes, because JAX cannot combine arrays in host memory with blocks that are only shapes.
    like = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), weak_type=jax.typeof(x).weak_type) for x in scalars]
    jaxpr, _ = compat.opened(jax.make_jaxpr(lambda wide, scalars: list(fn(wide, scalars)))(flat, like))
    order = _in_place(jaxpr, len(wide), overwrites)
    if order is None:
        return full()
    dtypes = [atom.aval.dtype for atom in jaxpr.outvars]
    outputs = _loop(fn, [x.reshape(-1) for x in wide], scalars, overwrites, dtypes, block, order)
    return [x.reshape(shape) for x in outputs]


def _loop(fn, wide, scalars, overwrites, dtypes, block, order):
    """Process the blocks of flat operands in order. All blocks have the same size, so the last two may overlap."""
    size = wide[0].size
    kept = {i: x for i, x in enumerate(wide) if i not in overwrites}
    fresh = lambda dtype: _in_memory_of(jnp.zeros(size, dtype), wide[0])
    carry = tuple(fresh(d) if i is None else wide[i] for i, d in zip(overwrites, dtypes, strict=True))

    def write(x, new, i, start):
        if size % block:
            done = _in_memory_of(start + jnp.arange(block) < i * block, wide[0])
            new = jnp.where(done, lax.dynamic_slice(x, (start,), (block,)), new)
        return lax.dynamic_update_slice(x, new, (start,))

    def body(i, carry):
        """Compute each output right before it is written. The barrier keeps the outputs in order."""
        start, here = jnp.minimum(i * block, size - block), kept
        for k in order:
            operands = [carry[overwrites.index(i)] if i in overwrites else here[i] for i in range(len(wide))]
            blocks = [lax.dynamic_slice(x, (start,), (block,)) for x in operands]
            new = write(carry[k], fn(blocks, list(scalars))[k], i, start)
            here, carry = lax.optimization_barrier((here, (*carry[:k], new, *carry[k + 1 :])))
        return carry

    return lax.fori_loop(0, -(-size // block), body, carry)


def _in_place(jaxpr, wide, overwrites) -> list[int] | None:
    """Return an order in which no output overwrites an operand that a later output reads, or None if there is none.

    In any other order, XLA would first copy full arrays.
    """
    reads: dict[Any, frozenset[int]] = {var: frozenset([i]) for i, var in enumerate(jaxpr.invars[:wide])}
    read_by = lambda atom: frozenset() if compat.is_literal(atom) else reads.get(atom, frozenset())
    for eqn in jaxpr.eqns:
        reads |= dict.fromkeys(eqn.outvars, frozenset().union(*map(read_by, eqn.invars)))
    read = list(map(read_by, jaxpr.outvars))
    before = {k: [j for j in range(len(read)) if j != k and i in read[j]] for k, i in enumerate(overwrites)}
    try:
        return list(TopologicalSorter(before).static_order())
    except CycleError:
        return None


def _in_memory_of(x, other):
    """Return `x` in the memory of `other`, because JAX does not combine arrays in host and device memory."""
    space = jax.typeof(other).memory_space
    return x if jax.typeof(x).memory_space == space else jax.device_put(x, space)
