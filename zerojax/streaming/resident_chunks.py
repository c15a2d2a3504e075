"""Update encoded state that stays on the device, so that only one chunk is wide at a time.

On GPUs, one kernel updates a parameter and its state if it can; see `block_kernel`. Otherwise, a loop in the step's
program updates the chunks of a streamed update. A group that cannot be divided into chunks is widened whole.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array

from zerojax.config import Config
from zerojax.offload.chunked import slice_chunk
from zerojax.optim.equations import update_first_group
from zerojax.optim.partition import UpdateGroup
from zerojax.optim.sharding_plan import ShardingPlan
from zerojax.optim.traced import CONST, GRAD, SHARED
from zerojax.optim.update import ResidentResults
from zerojax.placement.storage import to_device
from zerojax.streaming.chunk_programs import GroupInputs, ProgramKey, update_on_device, write_into_shards


def runs_kernels(mesh: Mesh) -> bool:
    """Return whether Pallas can compile for these devices with Triton. They must be NVIDIA's GPUs, Ampere or later.

    A later version of JAX will remove Triton. The result is then False.
    """
    device = mesh.devices.flat[0]
    version = str(getattr(device, "compute_capability", "")).partition(".")[0]
    known = device.platform == "gpu" and version.isdigit() and int(version) >= 8
    return known and importlib.util.find_spec("jax.experimental.pallas.triton") is not None


def update_in_chunks(
    config: Config, plan: ShardingPlan, grads: Sequence, state: Sequence, params: Sequence, value: Array
) -> ResidentResults:
    """Run a whole update without offloaded state. The arguments are those of `resident_update`."""
    partition = plan.analysis(config).partition
    of_groups = {k for group in partition.groups for k in group.state}
    first = [None if k in of_groups else x for k, x in enumerate(state)]
    new_params, leaves, shared, _ = update_first_group(config, plan, grads, first, params, value)
    for group in partition.groups:
        given = [grads[i] for i in group.reads(GRAD)], [shared[i] for i in group.reads(SHARED)]
        inputs = GroupInputs(*given, [partition.consts[i] for i in group.reads(CONST)])
        old = [to_device(params[i]) for i in group.params]
        pieces = updated_group(
            config, plan, group, old, [state[k] for k in group.state], [state[k] for k in group.resident], inputs
        )
        new, replaced, resident = pieces
        new_params |= zip(group.params, new, strict=True)
        for k, x in zip((*group.state, *group.resident), (*replaced, *resident), strict=True):
            leaves[k] = x
    return ResidentResults(new_params, leaves, [], ())


def updated_group(
    config: Config,
    plan: ShardingPlan,
    group: UpdateGroup,
    params: list,
    state: list,
    resident: list,
    inputs: GroupInputs,
) -> tuple[list, list, list]:
    """Update a group in one kernel, or in a loop over its chunks. Return the new `(params, state, resident)`."""
    chunking, key = group.chunking, ProgramKey.of(plan, group, 0)
    if chunking is not None and runs_kernels(config.mesh):
        from zerojax.streaming.block_kernel import may_be_kernel, updated_in_kernel

        if may_be_kernel(key, inputs):
            new = updated_in_kernel(config, key, params, state, inputs)
            return new[: len(params)], new[len(params) :], resident
    if chunking is None or len(chunking.extents) == 1:
        key = key if chunking is None else ProgramKey.of(plan, group, chunking.extents[0])
        return update_on_device(config, key, params, state, resident, inputs, jnp.int32(0))
    length, layouts = chunking.extents[0], [plan.state[k] for k in group.state]

    def one(start: Any, length: int, params: list, state: list) -> tuple[list, list]:
        key = ProgramKey.of(plan, group, length)
        chunks = [
            slice_chunk(config.mesh, x, start, of, chunking.dim, length) for x, of in zip(state, layouts, strict=True)
        ]
        # Several kernels read a chunk. Without the barrier, each would slice it out of the array, and XLA would copy
        # the whole array before it writes the new chunk.
        chunks = lax.optimization_barrier(chunks)
        params, new, _ = update_on_device(config, key, params, chunks, [], inputs, start)
        trios = zip(state, new, layouts, strict=True)
        return params, [write_into_shards(config, x, chunk, start, of, chunking.dim) for x, chunk, of in trios]

    equal = sum(extent == length for extent in chunking.extents)
    body = lambda n, carry: one(n * length, length, *carry)
    params, state = lax.fori_loop(0, equal, body, (params, state))
    for start, rest in chunking.chunks[equal:]:
        params, state = one(jnp.int32(start), rest, params, state)
    return params, state, resident
