"""Update parameters on disk chunk by chunk: read parameter, gradient and state, update, and write the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from zerojax.comm.mesh import wait_if_simulated
from zerojax.optim.partition import UpdateGroup
from zerojax.optim.traced import GRAD, PARAM
from zerojax.optim.update import UpdateInputs
from zerojax.staged.model_files import READ_AHEAD, ModelFiles
from zerojax.staged.sources import OnDisk, Trained
from zerojax.streaming.chunk_programs import update_on_device
from zerojax.streaming.stores import IN_FLIGHT, StateStore
from zerojax.streaming.stream import Chunk, StreamedUpdate, UpdateQueue

if TYPE_CHECKING:
    from jaxtyping import Array


class StagedQueue(UpdateQueue):
    """The queue of one step's chunks, whose parameters and gradients are read from files, and written to files."""

    def __init__(
        self,
        streamed: StreamedUpdate,
        inputs: UpdateInputs,
        store: StateStore,
        files: ModelFiles,
        trained: Mapping[int, Trained],
    ):
        super().__init__(streamed, inputs, store)
        self._files, self._trained = files, trained

    def _params_of(self, group: UpdateGroup) -> list:
        return [None if i in self._trained else self._inputs.pending.pop(i) for i in group.params]

    def _begin(self, group: UpdateGroup, n: int) -> tuple[Any, Mapping]:
        """Begin to read a chunk of the state, and of parameters and gradients if there are enough buffers."""
        of = [self._trained[i].param for i in group.reads(PARAM) if i in self._trained]
        of += [self._trained[i].grad for i in group.reads(GRAD) if i in self._trained]
        pieces = [piece for x in of for piece in _pieces(x, group, n)]
        fits = len(pieces) * IN_FLIGHT <= READ_AHEAD
        return super()._begin(group, n), {piece: self._files.read(*piece) for piece in pieces if fits}

    def _update_on_device(self, chunk: Chunk) -> None:
        (ticket, begun), of, trained = self._fetching.popleft(), chunk.of, self._trained
        group, inputs = of.group, self._inputs_of(of.group)
        read = lambda x: self._received(x, group, chunk.n, begun)
        on_disk = [i for i in group.params if i in trained]
        new = {i: read(trained[i].param) for i in on_disk}
        params = [new.get(i, x) for i, x in zip(group.params, of.params, strict=True)]
        grads = [
            x if x is not None else read(trained[i].grad) for i, x in zip(group.reads(GRAD), inputs.grads, strict=True)
        ]
        state = self._store.receive(ticket)
        # If the program donated the moments, XLA would first copy them: the parameters are computed later, from both.
        program = self._streamed.program(update_on_device, chunk.key, donate=False)
        params, state, of.resident = wait_if_simulated(
            self._streamed.config.mesh,
            program(params, state, of.resident, inputs._replace(grads=grads), np.int32(0)),
        )
        of.params = [None if i in trained else x for i, x in zip(group.params, params, strict=True)]
        for i, x in zip(group.params, params, strict=True):
            self._write_param(trained[i].param, group, chunk.n, x) if i in trained else None
        self._write(chunk, state)

    def _received(self, of: OnDisk, group: UpdateGroup, n: int, begun: Mapping[Any, Future]) -> Array:
        """Return a parameter or gradient for chunk `n` of a group."""
        found = [
            self._files.receive(*piece, begun[piece] if piece in begun else self._files.read(*piece), "device")
            for piece in _pieces(of, group, n)
        ]
        return of.joined(found) if group.chunking is None else found[0]

    def _write_param(self, of: OnDisk, group: UpdateGroup, n: int, new: Array) -> None:
        chunks = wait_if_simulated(self._streamed.config.mesh, of.split(new) if group.chunking is None else [new])
        for piece, chunk in zip(_pieces(of, group, n), chunks, strict=True):
            self._files.write(*piece, chunk)


def _pieces(of: OnDisk, group: UpdateGroup, n: int) -> Sequence[tuple[int, int]]:
    """Return the chunks to read for chunk `n` of a group. If the group is not chunked, return all chunks."""
    return of.pieces if group.chunking is None else [(of.index, n)]
