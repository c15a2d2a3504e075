"""Trace a step with parameters on disk. The trace lists all programs, reads and writes in the order of the step.

The code of the step runs on tracers, with files that do not exist. Each program that Python launches becomes one
equation of the trace. A read becomes a `device_put` of the argument that represents a chunk. A write becomes a
`device_put` whose result is not used.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from zerojax.comm.explicit import auto_context, to_auto, with_types
from zerojax.config import Config
from zerojax.optim.partition import UpdateGroup
from zerojax.optim.plan import ShardingPlan
from zerojax.placement.storage import named
from zerojax.staged.model_files import COPYING, ModelFiles
from zerojax.staged.state import files_of_run
from zerojax.streaming.stream import UpdateInputs
from zerojax.train.batch import place_batch
from zerojax.train.staged_step import StagedStep
from zerojax.train.state import ZeroState
from zerojax.train.step import Step

if TYPE_CHECKING:
    from jaxtyping import Array

ChunkKey = tuple[str, int, int]  # the kind of the leaf, "model" or "state"; its number; the number of the chunk


@dataclasses.dataclass(frozen=True)
class StepTrace:
    """A traced step."""

    jaxpr: Any  # the trace
    inputs: Mapping[Any, Any]  # the arguments of the step, most of which are shapes with shardings, by variable
    names: Mapping[Any, str]  # the names of these arguments, such as `state.step`, by variable
    chunks: Mapping[Any, jax.ShapeDtypeStruct]  # the shapes of the chunks on disk, by variable
    consts: Mapping[Any, Any]  # the arrays that the step closes over, by variable


def trace_step(step: Step, state: ZeroState, batch: Any, args: tuple) -> StepTrace:
    config, plan = step.config, state.plan
    staged, files = UnskippedStep(step.program, plan), files_of_run(config, plan)
    chunks = dict(chunk_shapes(config, plan, files))
    rows = place_batch(config, batch, step.options.accumulate)
    with auto_context(config.user_mesh):
        given = to_auto((state, rows, with_types(args)))

        def run(chunks, state, rows, args):
            return staged.on_files(state, rows, args, TracedFiles(chunks), TracedStore(chunks))

        closed = jax.make_jaxpr(run)(chunks, *given)
    leaves = jax.tree_util.tree_leaves_with_path(given)
    variables = closed.jaxpr.invars
    on_disk, others = variables[: len(chunks)], variables[len(chunks) :]
    parts = ("state", "batch", "args")
    names = [parts[path[0].idx] + jax.tree_util.keystr(path[1:]) for path, _ in leaves]
    return StepTrace(
        closed.jaxpr,
        dict(zip(others, [x for _, x in leaves], strict=True)),
        dict(zip(others, names, strict=True)),
        dict(zip(on_disk, jax.tree.leaves(chunks), strict=True)),
        dict(zip(closed.jaxpr.constvars, closed.consts, strict=True)),
    )


def chunk_shapes(
    config: Config, plan: ShardingPlan, files: ModelFiles
) -> Iterator[tuple[ChunkKey, jax.ShapeDtypeStruct]]:
    kept: dict[Any, tuple] = {("model", k): files.leaf(k) for k in files.numbers}
    for k, chunking in plan.offloaded.items():
        kept["state", k] = plan.state[k], chunking, named(config, plan.state[k])
    for (kind, k), (leaf, chunking, sharding) in kept.items():
        for n, shape in enumerate(chunking.chunk_shapes(leaf)):
            yield (kind, k, n), jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)


class UnskippedStep(StagedStep):
    """A step for a trace. It is never skipped, because a skipped step runs fewer programs."""

    def on_files(self, state: ZeroState, batch: Any, args: tuple, files: Any, store: Any) -> tuple[ZeroState, dict]:
        return self._run(state, files, store, batch, args)

    def _is_skipped(self, inputs: UpdateInputs) -> bool:
        return False


class TracedFiles:
    """The files of parameters and gradients in a trace. See `ModelFiles` for the methods."""

    def __init__(self, chunks: Mapping[ChunkKey, Array]):
        self._chunks = chunks
        self._copying: collections.deque[Array] = collections.deque()

    def read(self, k: int, n: int) -> None:
        """Do nothing: a read ahead uses host memory only."""

    def receive(self, k: int, n: int, reading: None, kind: str) -> Array:
        return jax.device_put(self._chunks["model", k, n])

    def write(self, k: int, n: int, array: Array) -> None:
        """Copy a chunk to host memory. As in `ModelFiles.write`, later writes may begin before this copy ends."""
        self._copying.append(array)
        if len(self._copying) > COPYING:
            jax.device_put(self._copying.popleft())

    def nodes(self) -> dict:
        return {}

    def advance(self) -> None:
        while self._copying:
            jax.device_put(self._copying.popleft())


class TracedStore:
    """The store of the optimizer state in a trace. See `StateStore` for the methods."""

    def __init__(self, chunks: Mapping[ChunkKey, Array]):
        self._chunks = chunks

    def fetch(self, group: UpdateGroup, n: int, kind: str) -> list[ChunkKey]:
        return [("state", k, n) for k in group.state]

    def receive(self, ticket: list[ChunkKey]) -> list[Array]:
        return [jax.device_put(self._chunks[key]) for key in ticket]

    def write(self, group: UpdateGroup, n: int, arrays: Sequence[Array]) -> Sequence[Array]:
        return arrays

    def complete(self, ticket: Sequence[Array]) -> None:
        for x in ticket:
            jax.device_put(x)

    def nodes(self, group: UpdateGroup) -> list[None]:
        return [None] * len(group.state)
