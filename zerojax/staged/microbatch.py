"""Run the stages of a program forward and backward, and read chunks from disk ahead."""

from __future__ import annotations

import collections
import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from zerojax import compat
from zerojax.comm.collectives import Collectives
from zerojax.comm.mesh import wait_if_simulated
from zerojax.gather.segments import Gathered
from zerojax.staged.loop import StagedLoop
from zerojax.staged.model_files import READ_AHEAD, ModelFiles
from zerojax.staged.program import StagedBlock, StagedProgram
from zerojax.staged.sources import Piece, Source
from zerojax.staged.whole import WholeStage

if TYPE_CHECKING:
    from jaxtyping import Array


# The number of stages that the devices may still be running, or have queued, while Python prepares the next stage.
_RUNNING = 1


class Sink(Protocol):
    """An object that accepts the gradients of chunks."""

    def add(self, piece: Piece, grad: Array) -> None: ...

    def write(self) -> None: ...


class Reader:
    """Reads chunks from disk to the devices. A use is one execution of a stage that reads chunks.

    Chunks for later uses are read ahead. A chunk stays on the devices if the next use needs it too. So the last block
    of the forward pass is not read again for the backward pass.
    """

    def __init__(self, files: ModelFiles, reads: Sequence[tuple[Piece, ...]]):
        """Begin to read. `reads` lists the chunks of each use, in the order of the uses."""
        self._files = files
        self._uses = collections.deque(reads)
        before = [(), *reads]
        new = [piece for use, last in zip(reads, before, strict=False) for piece in use if piece not in last]
        self._ahead = collections.deque(new)
        self._reading: collections.deque[tuple[Piece, Future]] = collections.deque()
        self._chunks: dict[Piece, Array] = {}
        self._read_ahead()

    def take(self) -> dict[Piece, Array]:
        """Return the chunks of the next use."""
        use = self._uses.popleft()
        self._chunks = {piece: x for piece, x in self._chunks.items() if piece in use}
        for piece in use:
            if piece not in self._chunks:
                found, reading = self._reading.popleft()
                assert found == piece
                self._chunks[piece] = self._files.receive(*piece, reading, "device")
                self._read_ahead()
        return self._chunks

    def close(self) -> None:
        """Give back the buffers of chunks that were read but not taken, because an error ended the step."""
        while self._reading:
            _, reading = self._reading.popleft()
            reading.add_done_callback(lambda read: read.exception() or read.result().release())

    def _read_ahead(self) -> None:
        while self._ahead and len(self._reading) < READ_AHEAD - 1:
            piece = self._ahead.popleft()
            self._reading.append((piece, self._files.read(*piece)))


@functools.lru_cache(maxsize=8)
def _adding(comm: Collectives) -> Any:
    return jax.jit(comm.add)


@jax.jit
def _row(stack, index):
    return lax.dynamic_index_in_dim(stack, index, 0, keepdims=False)


@functools.partial(jax.jit, static_argnums=1)
def _stacked(rows, dim):
    return jnp.stack(rows, dim)


class Microbatch:
    """One forward pass and one backward pass of a staged program."""

    def __init__(self, staged: StagedProgram, reader: Reader, comm: Collectives, mesh: Mesh, sink: Sink):
        """Store the arguments.

        Args:
            staged: The program to run.
            reader: The reader of the chunks of both passes.
            comm: The collectives, which add two cotangents of one variable.
            mesh: The mesh. If its devices are simulated, each program ends before the next one starts.
            sink: The object that accepts the gradients of chunks.
        """
        self._staged, self._reader, self._sink, self._mesh = staged, reader, sink, mesh
        self._add_two = _adding(comm)
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
            if isinstance(item, StagedLoop):
                results = self._loop_forward(item)
            elif isinstance(item, WholeStage):
                results = self._whole_forward(item)
            else:
                results = self._block_forward(item)
            env.update(zip(item.segment.results, results, strict=True))
            for v in [v for v in env if last_read.get(v, -1) <= index and v not in arguments]:
                del env[v]
        outs = staged.program.outs
        return [env[a] if isinstance(a, Gathered) or not compat.is_literal(a) else jnp.asarray(a.val) for a in outs]

    def backward(self, cotangent: Array) -> dict[int, Array]:
        """Return the cotangents of the arguments not on disk, by index, for a cotangent of the first result."""
        staged = self._staged
        if staged.backward:
            self._cotangents[staged.program.outs[0]] = cotangent
        for item in staged.backward:
            if isinstance(item, StagedLoop):
                self._loop_backward(item)
            elif isinstance(item, WholeStage):
                self._whole_backward(item)
            else:
                self._block_backward(item)
            for key in item.segment.results:
                self._cotangents.pop(key, None)
        return {i: self._cotangents[v] for i, v in enumerate(staged.program.invars) if v in self._cotangents}

    def _wait(self, arrays: Any) -> Any:
        wait_if_simulated(self._mesh, arrays)
        return arrays

    def _ran(self, results: Any) -> Any:
        """Return the results of a stage, after the devices have finished the stage before it.

        Without this wait, Python would run ahead of the devices and copy the shards of all stages to them.
        """
        # All results of a program become ready together. Wait for the smallest: keeping it takes little memory.
        self._running.extend(sorted(jax.tree.leaves(results), key=lambda x: x.size)[:1])
        if len(self._running) > _RUNNING:
            oldest = self._running.popleft()
            if not isinstance(oldest, jax.core.Tracer) and not oldest.is_deleted():  # a plan traces the step
                jax.block_until_ready(oldest)
        return self._wait(results)

    def _operands(self, item: Any) -> dict:
        return {v: self._env[v] for v in item.segment.operands}

    def _shards(self, sources: Sequence[Source], operands: Mapping) -> list[Array]:
        chunks = self._reader.take() if sources else {}
        return self._wait([source.shard(chunks, operands) for source in sources])

    def _add_grads(self, sources: Sequence[Source], grads: Sequence[Array | None], operands: Mapping) -> None:
        # Write the gradients of the previous stage. If Python wrote the gradients of this stage here, it would wait for
        # this stage, and the devices would be idle until the next stage's shards have arrived.
        self._sink.write()
        for source, grad in zip(sources, grads, strict=True):
            if grad is not None:
                for piece, x in self._wait(source.grad_chunks(grad, operands)).items():
                    self._sink.add(piece, x)

    def _add(self, key: Any, cotangent: Array | None) -> None:
        if cotangent is not None and key in self._staged.live:
            found = self._cotangents.get(key)
            self._cotangents[key] = cotangent if found is None else self._wait(self._add_two(found, cotangent))

    def _block_forward(self, item: StagedBlock) -> list:
        operands, others = self._operands(item), [self._env[v] for v in item.segment.others]
        results, saved = self._ran(item.stage.forward(self._shards(item.sources, operands), others))
        if item.stage.passes is not None:
            self._kept[item] = saved, [others[i] for i in item.stage.kept], operands
        return results

    def _block_backward(self, item: StagedBlock) -> None:
        saved, others, operands = self._kept.pop(item)
        shards = self._shards([item.sources[i] for i in item.stage.needed], operands)
        cotangents = [self._cotangents.get(key) for key in item.segment.results]
        to_params, to_others = self._ran(item.stage.backward(shards, others, saved, cotangents))
        del shards
        for key, x in zip(item.segment.others, to_others, strict=True):
            self._add(key, x)
        self._add_grads(item.sources, to_params, operands)

    def _whole_forward(self, item: WholeStage) -> list:
        operands, inputs = self._operands(item), [self._env[v] for v in item.inputs]
        results, residuals = self._ran(item.forward(self._whole_shards(item, operands), inputs))
        if item.is_differentiated:
            self._kept[item] = residuals, operands
        return results

    def _whole_backward(self, item: WholeStage) -> None:
        residuals, operands = self._kept.pop(item)
        cotangents = [self._cotangents.get(key) for key in item.segment.results]
        inputs = [operands.get(v) for v in item.inputs]
        shards = self._whole_shards(item, operands)
        to_shards, to_others = self._ran(item.backward(shards, inputs, residuals, cotangents))
        for key, x in zip(item.segment.others, to_others, strict=True):
            self._add(key, x)
        for root, grads in zip(item.trained, to_shards, strict=True):
            self._add_grads(item.roots[root], grads, operands)

    def _whole_shards(self, item: WholeStage, operands: Mapping) -> list[list[Array]]:
        shards = iter(self._shards(item.sources, operands))
        return [[next(shards) for _ in sources] for sources in item.roots.values()]

    def _loop_forward(self, item: StagedLoop) -> list:
        loop, stage, operands = item.loop, item.stage, self._operands(item)
        consts, carry, slices = item.values(self._env)
        written: list[list] = [[] for _ in range(loop.length)]
        kept = []
        for iteration in range(loop.length):
            layer = loop.layer(iteration)
            others = [*consts, *carry, *(_row(x, layer) for x in slices), *item.consts]
            results, saved = self._ran(stage.forward(self._shards(item.sources(iteration), operands), others))
            carry, written[layer] = results[: loop.carry], results[loop.carry :]
            if stage.passes is not None:
                kept.append((saved, [others[i] for i in stage.kept]))
        self._kept[item] = kept, operands
        outs = {i: x for i, x in enumerate(carry) if i in loop.results}
        for i in loop.results:
            if i >= loop.carry:
                outs[i] = self._wait(_stacked([rows[i - loop.carry] for rows in written], 0))
        return [outs[i] for i in loop.results]

    def _loop_backward(self, item: StagedLoop) -> None:
        loop, stage, (kept, operands) = item.loop, item.stage, self._kept.pop(item)
        passes = stage.passes
        assert passes is not None
        given = {i: self._cotangents.get(key) for i, key in zip(loop.results, item.segment.results, strict=True)}
        avals = [v.aval for v in passes.forward.jaxpr.outvars[: passes.results]]
        cotangents: list[Any] = [None] * len(avals)
        for i in passes.active_results:
            if i < loop.carry:
                x = given.get(i)
                cotangents[i] = compat.zero_cotangent(avals[i].shape, avals[i].dtype) if x is None else x
        inner = loop.consts + loop.carry
        sums: dict[int, Array] = {}
        rows: dict[int, list] = collections.defaultdict(lambda: [None] * loop.length)
        for iteration in reversed(range(loop.length)):
            layer = loop.layer(iteration)
            for i in passes.active_results:
                if i >= loop.carry and given.get(i) is not None:
                    cotangents[i] = _row(given[i], layer)
            saved, others = kept.pop()
            sources = item.sources(iteration)
            shards = self._shards([sources[i] for i in stage.needed], operands)
            to_params, to_others = self._ran(stage.backward(shards, others, saved, cotangents))
            del shards
            self._add_grads(sources, to_params, operands)
            for i, x in enumerate(to_others[: len(loop.others)]):
                if x is None:
                    continue
                if i < loop.consts:
                    sums[i] = self._wait(self._add_two(sums[i], x)) if i in sums else x
                elif i < inner:
                    cotangents[i - loop.consts] = x
                else:
                    rows[i][layer] = x
        for i, x in sums.items():
            self._add_other(item, i, x)
        for i in range(loop.carry):
            self._add_other(item, loop.consts + i, cotangents[i])
        for i, xs in rows.items():
            rank = passes.other_shapes[i].ndim
            self._add_other(item, i, self._wait(_stacked(xs, xs[0].ndim - rank)))

    def _add_other(self, item: StagedLoop, i: int, cotangent: Array | None) -> None:
        place = item.loop.others[i]
        if place is not None:
            self._add(item.segment.others[place], cotangent)
