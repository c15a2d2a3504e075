"""Update parameters on disk chunk by chunk: read parameter, gradient and state, update, and write the results."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from zerojax.comm.mesh import wait_if_simulated
from zerojax.config import Config
from zerojax.optim.partition import UpdateGroup
from zerojax.optim.plan import ShardingPlan, partitioned_update
from zerojax.optim.traced import CONST, GRAD, PARAM, SHARED
from zerojax.staged.model_files import READ_AHEAD, ModelFiles
from zerojax.staged.sources import OnDisk
from zerojax.streaming.chunk_programs import GroupInputs, ProgramKey, update_on_device
from zerojax.streaming.stores import StateStore

if TYPE_CHECKING:
    from jaxtyping import Array

_AHEAD = 2  # the number of chunks that are read ahead of the chunk that is updated


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained parameter on disk, and its gradient on disk."""

    param: OnDisk
    grad: OnDisk


class StagedUpdate:
    """The programs that update the parameters of one plan. They are compiled when they are first needed."""

    def __init__(self, config: Config, plan: ShardingPlan, trained: Mapping[int, Trained]):
        """Store the plan. `trained` contains the trained parameters on disk, by index among all trained parameters."""
        self._config, self._plan, self._trained = config, plan, trained
        self.partition = partitioned_update(config, plan)
        self._program = functools.cache(lambda key: update_on_device(config, key, donate=False))
        self._key = functools.cache(lambda g, length: self._key_of(self.partition.groups[g], length))

    def _key_of(self, group: UpdateGroup, length: int) -> ProgramKey:
        """Return the key of the program that updates the chunks of `group` with this `length`."""
        return ProgramKey.of(self._plan, group, length)

    def run(
        self, files: ModelFiles, store: StateStore | None, shared: Sequence[Array], resident: dict, others: dict
    ) -> tuple[dict[int, Any], dict[int, Array]]:
        """Update every chunk.

        Args:
            files: The files of parameters and gradients.
            store: The store of the optimizer state on disk. None if there is no such state.
            shared: The values that several groups read, such as a norm of all gradients.
            resident: The leaves of the state on the devices, by index.
            others: Parameters and gradients on the devices that groups read, by `("param", i)` and `("grad", i)`.

        Returns:
            `(state, params)`: the new state leaves, and the new values of parameters on the devices, by index.
        """
        new_state: dict[int, Any] = {}
        new_params: dict[int, Array] = {}
        ahead = self._reading(files, store)
        queue: collections.deque = collections.deque()
        writing: collections.deque = collections.deque()
        try:
            for _ in range(_AHEAD):
                queue.extend([x] if (x := next(ahead, None)) else [])
            while queue:
                g, n, begun, fetched = queue.popleft()
                group = self.partition.groups[g]
                arrays = self._received(files, group, n, begun)
                state = store.receive(fetched) if store is not None and group.state else []
                queue.extend([x] if (x := next(ahead, None)) else [])
                (_, length) = group.chunks[n]
                params = [arrays[i] if i in self._trained else others["param", i] for i in group.params]
                grads = [arrays[~i] if i in self._trained else others["grad", i] for i in group.reads(GRAD)]
                inputs = GroupInputs(
                    grads,
                    [shared[i] for i in group.reads(SHARED)],
                    [self.partition.consts[i] for i in group.reads(CONST)],
                )
                kept = [resident[k] for k in group.resident]
                params, state, kept = self._program(self._key(g, length))(
                    params, state, kept, inputs, np.int32(0), None
                )
                wait_if_simulated(self._config.mesh, (params, state, kept))
                new_state |= zip(group.resident, kept, strict=True)
                new_params |= {i: x for i, x in zip(group.params, params, strict=True) if i not in self._trained}
                self._write_params(files, group, n, params)
                if store is not None and group.state:
                    writing.append(store.write(group, n, state))
                    if len(writing) > 1:
                        store.complete(writing.popleft())
                if n == len(group.chunks) - 1 and store is not None:
                    new_state |= zip(group.state, store.nodes(group), strict=True)
            while writing and store is not None:
                store.complete(writing.popleft())
        finally:
            for _, _, begun, _ in queue:
                for reading in begun.values():
                    reading.add_done_callback(lambda read: read.exception() or read.result().release())
        return new_state, new_params

    def _reading(self, files: ModelFiles, store: StateStore | None) -> Iterator[tuple]:
        """Yield the chunks in the order of the update, each after its reads have begun."""
        for g, group in enumerate(self.partition.groups):
            for n in range(len(group.chunks)):
                begun = {piece: files.read(*piece) for piece in self._pieces(group, n)} if self._fits(group) else {}
                yield g, n, begun, store.fetch(group, n, "device") if store is not None and group.state else None

    def _fits(self, group: UpdateGroup) -> bool:
        """Return whether there are enough buffers to read ahead the chunks of `_AHEAD + 1` executions of a group."""
        return len(self._pieces(group, 0)) * (_AHEAD + 1) <= READ_AHEAD

    def _pieces(self, group: UpdateGroup, n: int) -> list[tuple[int, int]]:
        """Return the chunks to read for chunk `n` of a group. If the group is not chunked, return all chunks."""
        of = [self._trained[i].param for i in group.reads(PARAM) if i in self._trained]
        of += [self._trained[i].grad for i in group.reads(GRAD) if i in self._trained]
        return [(x.index, n) for x in of] if group.chunking is not None else [p for x in of for p in x.pieces]

    def _received(self, files: ModelFiles, group: UpdateGroup, n: int, begun: Mapping[Any, Future]) -> dict[int, Array]:
        """Return the arrays for chunk `n` of a group: parameters by index `i`, and gradients by `~i`."""

        def one(of: OnDisk) -> Array:
            pieces = [(of.index, n)] if group.chunking is not None else of.pieces
            found = [files.receive(*p, begun[p] if p in begun else files.read(*p), "device") for p in pieces]
            return found[0] if group.chunking is not None else of.joined(found)

        params = {i: one(self._trained[i].param) for i in group.params if i in self._trained}
        return params | {~i: one(self._trained[i].grad) for i in group.reads(GRAD) if i in self._trained}

    def _write_params(self, files: ModelFiles, group: UpdateGroup, n: int, params: Sequence[Array]) -> None:
        for i, x in zip(group.params, params, strict=True):
            if i not in self._trained:
                continue
            of = self._trained[i].param
            chunks = {n: x} if group.chunking is not None else dict(enumerate(of.split(x)))
            wait_if_simulated(self._config.mesh, list(chunks.values()))
            for m, chunk in chunks.items():
                files.write(of.index, m, chunk)
