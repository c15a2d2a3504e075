"""Run the stages of a program forward and backward, and read chunks from disk ahead."""

import collections
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from zerojax import compat
from zerojax.comm.mesh import wait_if_simulated
from zerojax.staged.chunk_update import ChunkGradients
from zerojax.staged.model_files import READ_AHEAD, ChunkId, DiskShard, ModelFiles
from zerojax.staged.program import Item, StagedProgram

# The number of stages that the devices may still be running, or have queued, while Python prepares the next stage.
_RUNNING = 1


class Reader:
    """Reads chunks from disk to the devices. A use is one execution of a stage that reads chunks.

    Chunks for later uses are read ahead. A chunk stays on the devices if the next use needs it too. So the last block
    of the forward pass is not read again for the backward pass.
    """

    def __init__(self, files: ModelFiles, reads: Sequence[tuple[ChunkId, ...]]):
        """Begin to read. `reads` lists the chunks of each use, in the order of the uses."""
        self._files = files
        self._uses = collections.deque(reads)
        before = [(), *reads]
        new = [chunk_id for use, last in zip(reads, before, strict=False) for chunk_id in use if chunk_id not in last]
        self._ahead = collections.deque(new)
        self._reading: collections.deque[tuple[ChunkId, Future]] = collections.deque()
        self._chunks: dict[ChunkId, Array] = {}
        self._read_ahead()

    def take(self) -> dict[ChunkId, Array]:
        """Return the chunks of the next use."""
        use = self._uses.popleft()
        self._chunks = {chunk_id: x for chunk_id, x in self._chunks.items() if chunk_id in use}
        for chunk_id in use:
            if chunk_id not in self._chunks:
                found, reading = self._reading.popleft()
                assert found == chunk_id
                self._chunks[chunk_id] = self._files.receive(*chunk_id, reading, "device")
                self._read_ahead()
        return self._chunks

    def _read_ahead(self) -> None:
        while self._ahead and len(self._reading) < READ_AHEAD - 1:
            chunk_id = self._ahead.popleft()
            self._reading.append((chunk_id, self._files.read(*chunk_id)))


class Microbatch:
    """One forward pass and one backward pass of a staged program."""

    def __init__(self, staged: StagedProgram, reader: Reader, sink: ChunkGradients | None):
        """Begin. `reader` reads the chunks of both passes. `sink` gets the gradients; None means no backward pass."""
        self._staged, self._reader, self._sink, self._mesh = staged, reader, sink, staged.mesh
        self._env: dict = {}
        self._kept: dict[Any, Any] = {}
        self._cotangents: dict = {}
        self._running: collections.deque = collections.deque()

    def forward(self, args: Mapping[int, Array]) -> list:
        """Return the program's results. `args` contains the arguments that are not on disk, by index."""
        staged, env = self._staged, self._env
        env.update({staged.program.invars[i]: x for i, x in args.items()})
        last_read, arguments = staged.last_read, set(env)
        for index, item in enumerate(staged.items):
            env.update(zip(item.segment.results, self._forward(item), strict=True))
            for v in [v for v in env if last_read.get(v, -1) <= index and v not in arguments]:
                del env[v]
        outs = staged.program.outs
        return [jnp.asarray(a.val) if compat.is_literal(a) else env[a] for a in outs]

    def backward(self, cotangent: Array) -> dict[int, Array]:
        """Return the cotangents of the arguments not on disk, by index. `cotangent` is that of the first result."""
        staged = self._staged
        if staged.backward:
            self._cotangents[staged.program.outs[0]] = cotangent
        for item in staged.backward:
            self._backward(item)
            for key in item.segment.results:
                self._cotangents.pop(key, None)
        return {i: self._cotangents[v] for i, v in enumerate(staged.program.invars) if v in self._cotangents}

    def _ran(self, results: Any) -> Any:
        """Return the results of a stage, after the devices have finished the stage before it.

        Without this wait, Python would run ahead of the devices and copy the shards of all stages to them.
        """
        # All results of a program become ready together. Wait for the smallest: keeping it takes little memory.
        self._running.extend(sorted(jax.tree.leaves(results), key=lambda x: x.size)[:1])
        if len(self._running) > _RUNNING:
            oldest = self._running.popleft()
            if not oldest.is_deleted():
                jax.block_until_ready(oldest)
        return wait_if_simulated(self._mesh, results)

    def _shards(self, sources: Sequence[DiskShard]) -> list[Array]:
        chunks = self._reader.take() if sources else {}
        return wait_if_simulated(self._mesh, [source.joined(chunks) for source in sources])

    def _add_grads(self, sources: Sequence[DiskShard], grads: Sequence[Array | None]) -> None:
        assert self._sink is not None
        # Write the gradients of the previous stage. If Python wrote the gradients of this stage here, it would wait for
        # this stage, and the devices would be idle until the next stage's shards have arrived.
        self._sink.write()
        for source, grad in zip(sources, grads, strict=True):
            if grad is not None:
                for chunk_id, x in wait_if_simulated(self._mesh, source.split(grad)).items():
                    self._sink.add(chunk_id, x)

    def _add(self, key: Any, cotangent: Array | None) -> None:
        if cotangent is not None and key in self._staged.live:
            if (found := self._cotangents.get(key)) is not None:
                cotangent = wait_if_simulated(self._mesh, self._staged.add(found, cotangent))
            self._cotangents[key] = cotangent

    def _forward(self, item: Item) -> list:
        stage, operands = item.stage, [self._env[v] for v in item.stage.operands]
        others = [self._env[v] for v in item.segment.others]
        results, saved = self._ran(stage.forward(self._shards(item.sources), others, operands))
        if stage.passes is not None:
            self._kept[item] = [others[i] for i in stage.kept], saved, operands
        return results

    def _backward(self, item: Item) -> None:
        others, saved, operands = self._kept.pop(item)
        cotangents = [self._cotangents.get(key) for key in item.segment.results]
        shards = self._shards(item.needed)
        to_params, to_others = self._ran(item.stage.backward(shards, others, saved, cotangents, operands))
        del shards
        for key, x in zip(item.segment.others, to_others, strict=True):
            self._add(key, x)
        self._add_grads(item.sources, to_params)
