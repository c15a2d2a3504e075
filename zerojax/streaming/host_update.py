"""Update a chunk in host memory. Each device's shard is updated separately, in one pass over memory if possible."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec

from zerojax.config import Config
from zerojax.offload.blocked import in_blocks
from zerojax.offload.host import compute_on_host, host_sharding
from zerojax.optim.elementwise import is_by_element
from zerojax.streaming.chunk_programs import GroupInputs, ProgramKey, updated_chunk


def update_on_host(config: Config, key: ProgramKey, *, jit: Callable = jax.jit) -> Callable:
    """Return a function `f(params, grads, state, shared, consts) -> (params, state)` that updates a chunk on the host.

    The results overwrite operands of the same type. New parameters have the type in which they are stored. `jit` is
    `jax.jit`, with the compiler options of the function.
    """
    leaves = [*key.params, *key.state]
    shardings = [host_sharding(config.mesh, leaf.spec) for leaf in leaves]
    sharded, replicated = key.params[0].local_spec, PartitionSpec()
    compute = update_in_blocks if may_block(key) else cast_chunk

    def run(params, grads, state, shared, consts):
        # Use a shard_map, because otherwise a block of an array could span several devices.
        local = jax.shard_map(
            compute_on_host(functools.partial(compute, key)),
            mesh=config.mesh,
            in_specs=(sharded, sharded, sharded, replicated, replicated),
            out_specs=sharded,
            axis_names=set(config.data.batch),
            check_vma=False,
        )
        new = local(params, grads, state, shared, consts)
        return new[: len(key.params)], new[len(key.params) :]

    # New parameters overwrite the old parameters, or gradients if the update does not read parameters.
    overwritten = 0 if key.reads_params else 1
    same_type = all(x.dtype == dtype for x, dtype in zip(key.params, key.stored_dtypes, strict=True))
    outputs = shardings[: len(key.params)], shardings[len(key.params) :]
    donated = (overwritten, 2) if same_type else 2
    return jit(run, donate_argnums=donated, out_shardings=outputs)


def cast_chunk(key: ProgramKey, params: list, grads: list, state: list, shared: list, consts: list) -> list:
    """Return the new parameters and the new state of a chunk, in the types in which they are stored, as one list."""
    new = updated_chunk(key, params, state, GroupInputs(grads, shared, consts))
    dtypes = [*key.stored_dtypes, *(x.dtype for x in state)]
    return [x.astype(dtype) for x, dtype in zip(new, dtypes, strict=True)]


def update_in_blocks(key: ProgramKey, params: list, grads: list, state: list, shared: list, consts: list) -> list:
    """Compute the results of `cast_chunk` block by block. The results overwrite operands of the same type."""
    operands = [*params, *grads, *state]
    ends = len(params), len(params) + len(grads)

    def block(operands: list, shared: list) -> list:
        return cast_chunk(key, operands[: ends[0]], operands[ends[0] : ends[1]], operands[ends[1] :], shared, consts)

    over = [0 if ends[1] and operands[0].dtype == dtype else None for dtype in key.stored_dtypes]
    return in_blocks(block, operands, shared, overwrites=[*over, *range(ends[1], len(operands))])


def may_block(key: ProgramKey) -> bool:
    """Return whether the blocks of a chunk can be updated one by one, because all equations are elementwise."""
    eqns = key.equations.jaxpr.eqns
    elementwise = all(eqn.primitive.name == "broadcast_in_dim" or is_by_element(eqn) for eqn in eqns)
    return elementwise and not any(any(leaf.others) for leaf in (*key.params, *key.state))
