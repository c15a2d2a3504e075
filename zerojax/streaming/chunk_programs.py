"""Compile the programs that update chunks. Equal chunks share one program, so a deep model needs few programs.

On the host, each device's shard of a chunk is updated separately, in one pass over memory if possible.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from zerojax.comm.mesh import constrain, to_storage
from zerojax.config import Config
from zerojax.layout.leaf import Leaf
from zerojax.offload.blocked import in_blocks
from zerojax.offload.chunked import Chunking, per_shard, slice_chunk
from zerojax.offload.host import compute_on_host, host_sharding
from zerojax.optim.elementwise import is_by_element
from zerojax.optim.equations import evaluate_as, evaluate_equations
from zerojax.optim.partition import UpdateGroup
from zerojax.optim.sharding_plan import ShardingPlan
from zerojax.optim.traced import CONST, GRAD, PARAM, SHARED, STATE, Equations
from zerojax.placement.storage import gather, leaf_sharding, unpadded


class GroupInputs(NamedTuple):
    """The gradients (in storage shape), shared values and constants that `UpdateGroup.reads` lists, in that order."""

    grads: Sequence[Array]
    shared: Sequence[Array]
    consts: Sequence[Array]


@dataclasses.dataclass(frozen=True)
class ProgramKey:
    """All properties in which two programs can differ. Chunks with equal keys share one program."""

    equations: Equations = dataclasses.field(compare=False)  # the equations of the program
    computes: tuple  # `equations.key`, which is equal for equal equations
    # for each value that the equations read, its kind and its index among the values of this kind
    reads: tuple[tuple[str, int], ...]
    # the layouts of the parameters to update; each has the type in which the parameter is updated
    params: tuple[Leaf, ...]
    stored_dtypes: tuple  # the types in which these parameters are stored
    grads: tuple[Leaf, ...]  # the layouts of the gradients
    state: tuple[Leaf, ...]  # the layouts of the offloaded state
    resident: tuple[Leaf, ...]  # the layouts of the state leaves that stay on the device and that the program replaces
    dim: int | None  # the dim that is divided into chunks; None if the program updates full arrays
    length: int  # the length of the chunk on this dim

    @classmethod
    def of(cls, plan: ShardingPlan, group: UpdateGroup, length: int) -> ProgramKey:
        """Return the key of the program for chunks of `group` with this `length`, which is 0 for full arrays."""
        equations = group.equations
        places = {PARAM: group.params, STATE: group.state} | {k: group.reads(k) for k in (GRAD, SHARED, CONST)}
        chosen = lambda leaves, indices: tuple(leaves[i] for i in indices)
        return cls(
            equations,
            equations.key,
            tuple((kind, places[kind].index(i)) for kind, i in equations.reads),
            chosen(plan.grads, group.params),
            tuple(plan.trained.params[i].dtype for i in group.params),
            chosen(plan.grads, group.reads(GRAD)),
            chosen(plan.state, group.state),
            chosen(plan.state, group.resident),
            None if group.chunking is None else group.chunking.dim,
            length,
        )

    def shapes(self, config: Config) -> tuple[list, list, list, list]:
        """Return shapes, with shardings, of the parameters, offloaded state, resident state and gradients."""

        def shape(leaf: Leaf, dtype: Any = None, *, dim: int | None = None) -> Any:
            full = leaf.storage_shape if dim is None else Chunking(dim, ()).chunk_shape(leaf, self.length)
            return jax.ShapeDtypeStruct(full, dtype or leaf.dtype, sharding=leaf_sharding(config, leaf))

        params = [shape(leaf, dtype) for leaf, dtype in zip(self.params, self.stored_dtypes, strict=True)]
        state = [shape(leaf, dim=self.dim) for leaf in self.state]
        return params, state, list(map(shape, self.resident)), list(map(shape, self.grads))


def update_on_device(
    config: Config, key: ProgramKey, params: list, state: list, resident: list, inputs: GroupInputs, start: Array
) -> tuple[list, list, list]:
    """Update a chunk on the device. Return the new `(params, state, resident)`. Traced under jit.

    The caller may donate `params`, `state` and `resident`, so that XLA needs less memory. But XLA may then copy the old
    state first, if one kernel would overwrite the old state before another kernel reads it.
    """
    num_params, num_state = len(key.params), len(key.state)
    store = to_storage if key.dim is None else constrain
    stored = lambda arrays, leaves: [store(config.mesh, x, leaf) for x, leaf in zip(arrays, leaves, strict=True)]
    old = slice_chunks(config, key, params, key.params, start)
    inputs = inputs._replace(grads=slice_chunks(config, key, inputs.grads, key.grads, start))
    if key.dim is None:
        results = evaluate_equations(config, key.equations, operands(key, old, state, inputs))
    else:
        results = updated_chunk(key, old, state, inputs)
    new_params = stored(results[:num_params], key.params)
    new_state = stored(results[num_params:], [*key.state, *key.resident])
    params = write_new_params(config, key, params, new_params, start)
    return params, new_state[:num_state], new_state[num_state:]


def updated_chunk(key: ProgramKey, params: Sequence, state: Sequence, inputs: GroupInputs) -> list:
    """Return the new parameters and the new state of a chunk, as one list."""
    shape, values = params[0].shape, operands(key, params, state, inputs)
    if any(leaf.encoding for leaf in key.state):
        from zerojax.streaming.encoded_chunks import updated_blocks

        return updated_blocks(key, values, shape)
    return [jnp.broadcast_to(x, shape) for x in evaluate_as(key.equations.jaxpr, (), values, shape)]


def operands(key: ProgramKey, params: Sequence, state: Sequence, inputs: GroupInputs) -> list:
    """Return the values that the equations read, each in the type of its layout. Full arrays lose their padding."""

    def typed(arrays: Sequence[Array], leaves: Sequence[Leaf]) -> list:
        arrays = [x if leaf.encoding else x.astype(leaf.dtype) for x, leaf in zip(arrays, leaves, strict=False)]
        return arrays if key.dim is not None else list(map(unpadded, arrays, leaves))

    grads = typed(inputs.grads, key.grads)
    of = {PARAM: typed(params, key.params), GRAD: grads, STATE: typed(state, key.state)}
    of |= {SHARED: inputs.shared, CONST: inputs.consts}
    return [of[kind][i] for kind, i in key.reads]


def chunks_for_host(
    config: Config, key: ProgramKey, params: list, grads: list, start: Array
) -> tuple[list[Array], list[Array]]:
    """Slice the chunks of parameters and of gradients for an update on the host."""
    sliced = functools.partial(slice_chunks, config, key, start=start)
    return sliced(params, key.params), sliced(grads, key.grads)


def gather_params(config: Config, layouts: tuple[Sequence[Leaf], Sequence[Leaf]], shards: list) -> list[Array]:
    """Gather updated shards. `layouts` has the layouts of the shards, and the layouts of the results."""
    return gather(config, shards, *layouts)


def slice_chunks(
    config: Config, key: ProgramKey, arrays: Sequence[Array], leaves: Sequence[Leaf], start: Int[Array, ""]
) -> list[Array]:
    """Return the chunk of each array that begins at `start`, or the full arrays if the update is not chunked."""
    dim = key.dim
    if dim is None:
        return list(arrays)
    pairs = zip(arrays, leaves, strict=True)
    return [slice_chunk(config.mesh, x, start, leaf, dim, key.length) for x, leaf in pairs]


def write_new_params(
    config: Config, key: ProgramKey, params: Sequence, new: Sequence, start: Int[Array, ""]
) -> list[Array]:
    """Return `params` with the chunks `new` written at `start`, or `new` itself if the update is not chunked."""
    dim = key.dim
    if dim is None:
        return list(new)
    return [
        write_into_shards(config, x, chunk, start, leaf, dim)
        for x, chunk, leaf in zip(params, new, key.params, strict=True)
    ]


def write_into_shards(config: Config, x: Array, chunk: Array, start: Any, leaf: Leaf, dim: int) -> Array:
    """Write a chunk into every device's shard of an array, at index `start` of `dim`."""
    write = lambda x, chunk, start: lax.dynamic_update_slice_in_dim(x, chunk, start, dim)
    return per_shard(config.mesh, write, leaf, 2)(x, chunk, start)


def update_on_host(config: Config, key: ProgramKey, jit: Callable = jax.jit) -> Callable:
    """Return a jitted function `f(params, grads, state, shared, consts)` that updates a chunk on the host.

    `f` returns the new `(params, state)`, which overwrite operands of the same type. New parameters have the type in
    which parameters are stored.
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

    same_type = all(x.dtype == dtype for x, dtype in zip(key.params, key.stored_dtypes, strict=True))
    outputs = shardings[: len(key.params)], shardings[len(key.params) :]
    donated = (0, 2) if same_type else 2
    return jit(run, donate_argnums=donated, out_shardings=outputs)


def cast_chunk(key: ProgramKey, params: list, grads: list, state: list, shared: list, consts: list) -> list:
    """Return the new parameters and the new state of a chunk, in the types in which they are stored, as one list."""
    new = updated_chunk(key, params, state, GroupInputs(grads, shared, consts))
    dtypes = [*key.stored_dtypes, *(x.dtype for x in state)]
    return [x.astype(dtype) for x, dtype in zip(new, dtypes, strict=True)]


def update_in_blocks(key: ProgramKey, params: list, grads: list, state: list, shared: list, consts: list) -> list:
    """Compute the results of `cast_chunk` block by block. The results overwrite operands of the same type."""
    operands = [*params, *grads, *state]
    i, j = len(params), len(params) + len(grads)
    block = lambda xs, shared: cast_chunk(key, xs[:i], xs[i:j], xs[j:], shared, consts)
    over = [0 if operands[0].dtype == dtype else None for dtype in key.stored_dtypes]
    return in_blocks(block, operands, shared, overwrites=[*over, *range(j, len(operands))])


def may_block(key: ProgramKey) -> bool:
    """Return whether a chunk can be updated by blocks: its equations are elementwise, and only data axes divide it."""
    eqns = key.equations.jaxpr.eqns
    elementwise = all(eqn.primitive.name == "broadcast_in_dim" or is_by_element(eqn) for eqn in eqns)
    return elementwise and not any(any(leaf.others) for leaf in (*key.params, *key.state))
