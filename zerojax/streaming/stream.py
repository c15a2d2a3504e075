"""Update the groups with offloaded state. One queue fetches, updates and writes their chunks.

While a chunk is updated, the next chunks are fetched and the previous chunks are written. At most `IN_FLIGHT` chunks
are in flight, so the device holds a few chunks, whatever the size of the model. On the host, one thread updates a
chunk, and several threads update several chunks at a time if there are enough cores.

References:
    Ren et al. 2021, arXiv 2101.06840, section 4; Rajbhandari et al. 2021, arXiv 2104.07857, section 5.
"""

import collections
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from zerojax.comm.mesh import wait_if_simulated
from zerojax.config import Config
from zerojax.offload.host import host_kind, to_memory
from zerojax.optim.partition import UpdateGroup
from zerojax.optim.sharding_plan import ShardingPlan
from zerojax.optim.traced import CONST, GRAD, SHARED
from zerojax.optim.update import StreamedInputs
from zerojax.placement.storage import is_on_host, return_to_host, to_device
from zerojax.streaming.chunk_programs import (
    GroupInputs,
    ProgramKey,
    chunks_for_host,
    gather_params,
    update_on_device,
    update_on_host,
    write_new_params,
)
from zerojax.streaming.stores import IN_FLIGHT, StateStore, abandoned_on_error

DEVICE = "device"
# The number of chunks that the host updates at a time, times `Offload.chunk_bytes`, is at most this. Without a limit,
# the copies of the chunks' parameters and gradients could fill host memory.
HOST_BYTES = 4 << 30


class StreamedUpdate:
    """The streamed update of one plan. Its programs are compiled when they first run.

    The attribute `update` says where chunks are updated: on the `"device"` or on the `"host"`.
    """

    def __init__(self, config: Config, plan: ShardingPlan, compiler_options: Mapping[str, Any] = MappingProxyType({})):
        self.config = config
        self.plan = plan
        self.update = None if config.offload is None else config.offload.update
        self.partition = plan.analysis(config).partition
        self._jit = functools.partial(jax.jit, compiler_options=dict(compiler_options) or None)
        # Returns the program that runs `run(config, key, ...)`. `donate` has indices of the arguments after `key`.
        self.program = functools.cache(
            lambda run, key, donate: self._jit(functools.partial(run, config, key), donate_argnums=donate)
        )
        self.key = functools.cache(lambda g, length: ProgramKey.of(plan, self.partition.groups[g], length))
        self._compiled: dict[Any, Callable] = {}

    @property
    def host_threads(self) -> int:
        """Return how many chunks per device the host updates at a time. In total, one per core if memory allows."""
        assert self.config.offload is not None
        devices = len(self.config.mesh.local_devices)
        # XLA computes an elementwise update on the host with one thread, so several chunks must run at a time.
        return max(1, min(cores(), HOST_BYTES // self.config.offload.chunk_bytes) // devices)

    def lower(self) -> list[Any]:
        """Lower the programs that update a chunk on the device, one program per key."""
        shared, consts = self.partition.shared_shapes, self.partition.consts
        groups = {self.key(g, n): group for g, group in enumerate(self.partition.groups) for _, n in group.chunks}
        lowered = []
        for key, group in groups.items():
            *updated, grads = key.shapes(self.config)
            inputs: Any = [shared[i] for i in group.reads(SHARED)], [consts[i] for i in group.reads(CONST)]
            program = self.program(update_on_device, key, (0, 1, 2))
            lowered.append(program.lower(*updated, GroupInputs(grads, *inputs), np.int32(0)))
        return lowered

    def run(self, inputs: StreamedInputs, store: StateStore) -> tuple[list, list]:
        """Update every chunk. Return one stored array per parameter, and one node per leaf of the state.

        The arrays in `inputs` are donated.
        """
        with abandoned_on_error(store):
            wait_if_simulated(self.config.mesh, inputs)
            # Reading `skipped` blocks, which costs little: the update must wait for the gradients anyway.
            if inputs.skipped:
                return self.skip(inputs, store)
            with ThreadPoolExecutor(self.host_threads) as threads:
                return UpdateQueue(self, inputs, store, threads).update()

    def skip(self, inputs: StreamedInputs, store: StateStore) -> tuple[list, list]:
        """Return the old parameters and the old state, because the step is skipped. Parameters on disk are None."""
        params, state = list(inputs.params), list(inputs.state)
        for group in self.partition.groups:
            for k, node in zip(group.state, store.unchanged(group), strict=True):
                state[k] = node
            pending = [inputs.pending.pop(i, None) for i in group.params]
            for i, x in zip(group.params, self.unsharded(group, pending), strict=True):
                params[self.plan.layout.trained[i]] = x
        return params, state

    def runs_on_host(self, group: UpdateGroup) -> bool:
        """Return whether the host updates `group`. Full arrays are not updated there, because they span all devices."""
        return self.update == "host" and group.chunking is not None

    def compiled(self, key: ProgramKey, *args: Any) -> Callable:
        """Return the update of a chunk on the host, compiled for the shapes and types of `args`.

        Compile in the caller's thread, because JAX's settings, such as `jax_enable_x64`, may hold for this thread only.
        """
        shapes = tuple((x.shape, x.dtype) for x in jax.tree.leaves(args))
        if (key, shapes) not in self._compiled:
            self._compiled[key, shapes] = update_on_host(self.config, key, self._jit).lower(*args).compile()
        return self._compiled[key, shapes]

    def unsharded(self, group: UpdateGroup, params: list) -> list:
        """Return `params` in their stored layouts. Gather each parameter that is less sharded than its gradient."""
        plan = self.plan
        moved = {
            j: (plan.grads[i], plan.trained.params[i])
            for j, i in enumerate(group.params)
            if plan.trained.params[i].axes != plan.grads[i].axes or plan.trained.params[i].kind != plan.grads[i].kind
        }
        if not moved:
            return params
        gather = self.program(gather_params, tuple(zip(*moved.values(), strict=True)), (0,))
        gathered = dict(zip(moved, gather([params[j] for j in moved]), strict=True))
        return [gathered.get(j, x) for j, x in enumerate(params)]


@dataclasses.dataclass
class GroupInFlight:
    """A group whose update has begun, with its parameters and its state leaves on the device, in storage shape.

    Some chunks of the parameters may be updated already.
    """

    group: UpdateGroup
    params: list
    resident: list[Array]


class Chunk(NamedTuple):
    """Chunk `n` of a group. `key` is the key of its program. The chunk begins at index `start` of the chunked dim."""

    of: GroupInFlight
    n: int
    key: ProgramKey
    start: np.int32


class UpdateQueue:
    """The queue of one step's chunks, which are fetched, updated and written. Updates on the host run in `threads`."""

    def __init__(
        self, streamed: StreamedUpdate, inputs: StreamedInputs, store: StateStore, threads: Executor | None = None
    ):
        self._streamed, self._inputs, self._store, self._threads = streamed, inputs, store, threads
        self._groups = streamed.partition.groups
        self._host = host_kind(streamed.config.mesh)
        self._params, self._state = list(inputs.params), list(inputs.state)
        self._last_reader = {i: group for group in self._groups for i in group.reads(GRAD)}
        self._to_fetch = ((group, n) for group in self._groups for n in range(len(group.chunks)))
        self._shared = [to_memory(x, self._host) for x in inputs.shared] if streamed.update == "host" else []
        self._fetching: collections.deque = collections.deque()
        self._on_host: collections.deque[tuple[Chunk, Future]] = collections.deque()
        self._returning: list[Array] = []

    def update(self) -> tuple[list, list]:
        self._fetch(IN_FLIGHT - 1)
        for g, group in enumerate(self._groups):
            in_flight = GroupInFlight(group, self._params_of(group), [self._state[k] for k in group.resident])
            update = self._begin_on_host if self._streamed.runs_on_host(group) else self._update_on_device
            for n, (start, length) in enumerate(group.chunks):
                update(Chunk(in_flight, n, self._streamed.key(g, length), np.int32(start)))
                self._fetch(1)
        self._complete_on_host(most=0)
        self._store.advance()
        return self._params, self._state

    def _fetch(self, count: int) -> None:
        for group, n in itertools.islice(self._to_fetch, count):
            self._fetching.append(self._begin(group, n))

    def _begin(self, group: UpdateGroup, n: int) -> Any:
        return self._store.fetch(group, n, self._host if self._streamed.runs_on_host(group) else DEVICE)

    def _params_of(self, group: UpdateGroup) -> list:
        return [to_device(self._inputs.pending.pop(i)) for i in group.params]

    def _inputs_of(self, group: UpdateGroup) -> GroupInputs:
        grads: list[Any] = [self._inputs.grads.get(i) for i in group.reads(GRAD)]  # None on disk
        return GroupInputs(
            grads,
            [self._inputs.shared[i] for i in group.reads(SHARED)],
            [self._streamed.partition.consts[i] for i in group.reads(CONST)],
        )

    def _update_on_device(self, chunk: Chunk) -> None:
        state, of = self._store.receive(self._fetching.popleft()), chunk.of
        program = self._streamed.program(update_on_device, chunk.key, (0, 1, 2))
        of.params, state, of.resident = program(of.params, state, of.resident, self._inputs_of(of.group), chunk.start)
        self._write(chunk, state)

    def _begin_on_host(self, chunk: Chunk) -> None:
        """Copy gradients and parameters to the host, and let a thread update the chunk there."""
        state, group = self._store.receive(self._fetching.popleft()), chunk.of.group
        inputs = self._inputs_of(group)
        chunks = self._streamed.program(chunks_for_host, chunk.key, ())(chunk.of.params, inputs.grads, chunk.start)
        params, grads = ([to_memory(x, self._host) for x in arrays] for arrays in chunks)
        shared = [self._shared[i] for i in group.reads(SHARED)]
        args = params, grads, state, shared, [to_memory(x, self._host) for x in inputs.consts]
        assert self._threads is not None
        self._on_host.append((chunk, self._threads.submit(self._streamed.compiled(chunk.key, *args), *args)))
        self._complete_on_host(most=self._streamed.host_threads - 1)

    def _complete_on_host(self, most: int) -> None:
        """Block until the host is updating at most `most` chunks. Write the results of the chunks that are done."""
        while len(self._on_host) > most:
            chunk, updated = self._on_host.popleft()
            new, state = updated.result()
            new = [to_memory(x, DEVICE) for x in new]
            program = self._streamed.program(write_new_params, chunk.key, (0,))
            chunk.of.params = program(chunk.of.params, new, chunk.start)
            self._write(chunk, state)

    def _write(self, chunk: Chunk, state: Sequence[Array]) -> None:
        """Begin to write a chunk's new state. Complete the group after its last chunk."""
        self._store.write(chunk.of.group, chunk.n, state)
        if chunk.n == len(chunk.of.group.chunks) - 1:
            self._complete(chunk.of)

    def _complete(self, of: GroupInFlight) -> None:
        """Free the gradients that no later group reads, and store the group's parameters."""
        streamed, group = self._streamed, of.group
        for i in {i for i in group.reads(GRAD) if self._last_reader[i] is group}:
            self._inputs.grads.pop(i, None)
        for k, x in zip(group.resident, of.resident, strict=True):
            self._state[k] = x
        for k, node in zip(group.state, self._store.nodes(group), strict=True):
            self._state[k] = node
        stored = dict(zip(group.params, streamed.unsharded(group, of.params), strict=True))
        of.params = []
        # Even if the update runs on the host, the parameters and gradients pass through the device.
        params = return_to_host(streamed.config, stored, streamed.plan.trained.params)
        for i, x in params.items():
            self._params[streamed.plan.layout.trained[i]] = x
        # Wait for the previous group's parameters, so that the device holds the shards of at most two groups. One group
        # is fetched and updated while the other group returns to the host.
        jax.block_until_ready(self._returning)
        self._returning = [x for x in params.values() if x is not None and is_on_host(x)]
        wait_if_simulated(streamed.config.mesh, params)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
