"""An update whose optimizer state waits elsewhere: fetched, updated and put back piece by piece.

The pieces form one queue. While a piece is updated, the next ones are on their way in and
the last ones on their way out; nothing is started before its turn, so that the device
holds a few pieces, whatever the size of the model. On the host an update is one thread's
work, so as many pieces are updated at a time as a device has cores, a few at most.

References:
    Ren et al. 2021, arXiv 2101.06840, section 4; Rajbhandari et al. 2021, arXiv 2104.07857, section 5.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from zerojax.config import Config
from zerojax.layout.chunked import Chunking
from zerojax.layout.leaf import Leaf
from zerojax.offload.host import host_kind, is_on_host, to_device, to_memory
from zerojax.optim.offloaded import IN_FLIGHT
from zerojax.optim.partition import CONST, GRAD, SHARED, Task
from zerojax.optim.plan import ShardingPlan, choose_update, offloaded_part
from zerojax.placement.storage import named, return_to_host
from zerojax.streaming.chunk_programs import Kind, Values, gathered, incoming, on_device, outgoing
from zerojax.streaming.host_update import on_host
from zerojax.streaming.stores import StateStore

if TYPE_CHECKING:
    from jaxtyping import Array, Bool

DEVICE = "device"


class Begun(NamedTuple):
    """What the first program of a step leaves for the streamed update.

    Attributes:
        params: One array a parameter, as stored; None for those that are yet to move.
        divided: Those, by index among the trained, in storage shape of their parts.
        state: One array a leaf of the state; None for those that are offloaded.
        grads: Gradients that tasks read, by index; storage shape.
        shared: What tasks share.
        skipped: Whether the step is skipped.
    """

    params: list
    divided: dict[int, Array]
    state: list
    grads: dict[int, Array]
    shared: list
    skipped: Bool[Array, ""]


class Streamed:
    """The streamed update of one transformation: its programs, compiled when they are first needed.

    Attributes:
        config: Says where state waits and what updates it.
        plan: How everything lies.
        split: The tasks that the update is divided into.
        update: `"device"` or `"host"`.
    """

    def __init__(self, config: Config, plan: ShardingPlan):
        """Nothing is compiled yet."""
        self.config = config
        self.plan = plan
        choice = plan.choice or choose_update(config, plan)
        self.update = choice and choice.update
        self.split = offloaded_part(config, plan).split
        self.program = functools.cache(lambda make, *given: make(config, *given))
        self.kind = functools.cache(lambda t, length: Kind.of(plan, self.split.tasks[t], length))
        self._compiled: dict[Any, Callable] = {}

    @property
    def at_once(self) -> int:
        """Pieces of each device that are updated on the host at a time."""
        return max(1, min(IN_FLIGHT, cores() // len(self.config.mesh.local_devices)))

    def lower(self) -> list[Any]:
        """The programs that update a piece on the device, one a kind, lowered as `jax.jit(...).lower` does."""
        config, plan, split = self.config, self.plan, self.split
        shared = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in split.first.jaxpr.outvars[-split.shared :]]
        lowered: dict[Kind, Any] = {}
        for t, task in enumerate(split.tasks):
            for length in task.parts:
                kind = self.kind(t, length)
                if kind in lowered:
                    continue
                typed = [dataclasses.replace(plan.grads[i], dtype=plan.trained.params[i].dtype) for i in task.params]
                grads: list[Any] = [chunk_shape(config, plan.grads[i], None, 0) for i in task.reading(GRAD)]
                common: list[Any] = [shared[i] for i in task.reading(SHARED)]
                lowered[kind] = self.program(on_device, kind).lower(
                    [chunk_shape(config, leaf, None, 0) for leaf in typed],
                    [chunk_shape(config, plan.state[k], task.chunking, length) for k in task.state],
                    [chunk_shape(config, plan.state[k], None, 0) for k in task.resident],
                    Values((), grads, (), (), common, [split.consts[i] for i in task.reading(CONST)]),
                    np.int32(0),
                    jax.ShapeDtypeStruct((), bool),
                )
        return list(lowered.values())

    def run(self, begun: Begun, store: StateStore) -> tuple[list, list]:
        """Update every piece.

        Args:
            begun: From the first program; its arrays are used up.
            store: Where the state waits.

        Returns:
            `(params, state)`: one array a parameter, as stored, and one node a leaf of the state.
        """
        try:
            self.wait_if_simulated(begun)
            if self.update == "host" and begun.skipped:  # the host waits for the gradients anyway
                return self._skipped(begun, store)
            with ThreadPoolExecutor(self.at_once) as threads:
                return Run(self, begun, store, threads).update()
        except BaseException:
            store.abandon()
            raise

    def _skipped(self, begun: Begun, store: StateStore) -> tuple[list, list]:
        """A step that moves nothing."""
        params, state = list(begun.params), list(begun.state)
        for task in self.split.tasks:
            for k, node in zip(task.state, store.unchanged(task), strict=True):
                state[k] = node
            for i, x in zip(task.params, self.whole(task, [begun.divided.pop(i) for i in task.params]), strict=True):
                params[self.plan.layout.trained[i]] = x
        return params, state

    def wait_if_simulated(self, arrays: Any) -> None:
        """Simulated devices share a pool of threads, and the collectives of two programs can starve each other."""
        mesh = self.config.mesh
        if mesh.size > 1 and mesh.devices.flat[0].platform == "cpu":
            jax.block_until_ready(arrays)

    def runs_on_host(self, task: Task) -> bool:
        """A task on whole matrices goes through the device, whose programs span all devices."""
        return self.update == "host" and task.chunking is not None

    def compiled(self, kind: Kind, *args: Any) -> Callable:
        """The update of a piece on the host, compiled for such arguments.

        A thread is given nothing that is not compiled: what a caller set for its own thread,
        such as whether numbers may have 64 bits, would not hold there.
        """
        key = kind, tuple((x.shape, x.dtype) for x in jax.tree.leaves(args))
        if key not in self._compiled:
            self._compiled[key] = self.program(on_host, kind).lower(*args).compile()
        return self._compiled[key]

    def whole(self, task: Task, held: list) -> list:
        """Parameters as they are stored: gathered where the stage keeps them whole."""
        plan = self.plan
        parts = [plan.grads[i] for i in task.params]
        whole = [
            j for j, i in enumerate(task.params) if plan.trained.params[i].dim is None and parts[j].kind != "replicated"
        ]
        if not whole:
            return held
        leaves = tuple(dataclasses.replace(parts[j], path="", reason="") for j in whole)
        found = dict(zip(whole, self.program(gathered, leaves)([held[j] for j in whole]), strict=True))
        return [found.get(j, x) for j, x in enumerate(held)]


@dataclasses.dataclass
class Held:
    """What the device holds of a task under way.

    Attributes:
        params: Parameters, with the pieces that were updated so far; storage shape of their parts.
        resident: Leaves of the state that stay on the device; storage shape.
    """

    params: list[Array]
    resident: list[Array]


class Run:
    """One update, piece by piece: what is on its way in, being updated on the host, and on its way out."""

    def __init__(self, streamed: Streamed, begun: Begun, store: StateStore, threads: Executor):
        """Nothing is fetched yet; `threads` update pieces on the host."""
        self._streamed, self._begun, self._tier, self._threads = streamed, begun, store, threads
        self._tasks = streamed.split.tasks
        self._host = host_kind(streamed.config.mesh)
        self._params, self._state = list(begun.params), list(begun.state)
        self._last = {i: task for task in self._tasks for i in task.reading(GRAD)}
        self._ahead = ((task, n) for task in self._tasks for n in range(len(task.chunks)))
        self._shared = [to_memory(x, self._host) for x in begun.shared] if streamed.update == "host" else []
        self._coming: collections.deque = collections.deque()
        self._on_host: collections.deque[Callable[[], None]] = collections.deque()
        self._going: collections.deque = collections.deque()
        self._leaving: list[Array] = []

    def update(self) -> tuple[list, list]:
        """Do it; `Streamed.run` says what comes back."""
        self._fetch(IN_FLIGHT - 1)
        for t, task in enumerate(self._tasks):
            held = Held(
                [to_device(self._begun.divided.pop(i)) for i in task.params], [self._state[k] for k in task.resident]
            )
            begin = self._begin_on_host if self._streamed.runs_on_host(task) else self._on_device
            for n, (start, length) in enumerate(task.chunks):
                begin(task, n, held, self._streamed.kind(t, length), np.int32(start))
                self._fetch(1)
            del held
        self._land(most=0)
        while self._going:
            self._tier.settle(self._going.popleft())
        return self._params, self._state

    def _fetch(self, count: int) -> None:
        for task, n in itertools.islice(self._ahead, count):
            self._coming.append(self._tier.fetch(task, n, self._host if self._streamed.runs_on_host(task) else DEVICE))

    def _values(self, task: Task) -> Values:
        """What a task reads beside parameters and state."""
        return Values(
            params=(),
            grads=[self._begun.grads[i] for i in task.reading(GRAD)],
            state=(),
            resident=(),
            shared=[self._begun.shared[i] for i in task.reading(SHARED)],
            consts=[self._streamed.split.consts[i] for i in task.reading(CONST)],
        )

    def _on_device(self, task: Task, n: int, held: Held, kind: Kind, start: np.int32) -> None:
        arrays = self._tier.receive(self._coming.popleft())
        program = self._streamed.program(on_device, kind)
        held.params, arrays, held.resident = program(
            held.params, arrays, held.resident, self._values(task), start, self._begun.skipped
        )
        self._updated(task, n, held, arrays)

    def _begin_on_host(self, task: Task, n: int, held: Held, kind: Kind, start: np.int32) -> None:
        """Gradients go to the host, where a thread updates the piece."""
        arrays = self._tier.receive(self._coming.popleft())
        values = self._values(task)
        sent = self._streamed.program(outgoing, kind)(values._replace(params=held.params), start)
        params, grads = ([to_memory(x, self._host) for x in part] for part in sent)
        shared = [self._shared[i] for i in task.reading(SHARED)]
        args = params, grads, arrays, shared, [to_memory(x, self._host) for x in values.consts]
        updated = self._threads.submit(self._streamed.compiled(kind, *args), *args)
        self._on_host.append(functools.partial(self._end_on_host, task, n, held, kind, start, updated))
        self._land(most=self._streamed.at_once - 1)

    def _end_on_host(self, task: Task, n: int, held: Held, kind: Kind, start: np.int32, updated: Future) -> None:
        """New parameters come back."""
        new, arrays = updated.result()
        back = [to_memory(x, DEVICE) for x in new]
        held.params = self._streamed.program(incoming, kind)(held.params, back, start, self._begun.skipped)
        self._updated(task, n, held, arrays)

    def _land(self, most: int) -> None:
        """Wait, in the order they were begun in, until no more than `most` pieces are being updated on the host."""
        while len(self._on_host) > most:
            self._on_host.popleft()()

    def _updated(self, task: Task, n: int, held: Held, arrays: Sequence[Array]) -> None:
        """Put a piece's new state away, and after the last one the task's parameters in their place."""
        self._going.append(self._tier.stow(task, n, arrays))
        if len(self._going) >= IN_FLIGHT:
            self._tier.settle(self._going.popleft())
        if n < len(task.chunks) - 1:
            return
        for i in {i for i in task.reading(GRAD) if self._last[i] is task}:
            del self._begun.grads[i]
        for k, x in zip(task.resident, held.resident, strict=True):
            self._state[k] = x
        for k, node in zip(task.state, self._tier.nodes(task), strict=True):
            self._state[k] = node
        streamed = self._streamed
        whole, held.params = streamed.whole(task, held.params), []
        # Parameters pass through the device where the update runs on the host too, as their gradients do.
        home = return_to_host(streamed.config, dict(zip(task.params, whole, strict=True)), streamed.plan.trained.params)
        del whole
        for i, x in home.items():
            self._params[streamed.plan.layout.trained[i]] = x
        # The device holds the shards of two tasks: one arrives and is updated while the other leaves.
        jax.block_until_ready(self._leaving)
        self._leaving = [x for x in home.values() if is_on_host(x)]
        streamed.wait_if_simulated(home)


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def chunk_shape(config: Config, leaf: Leaf, chunking: Chunking | None, length: int) -> jax.ShapeDtypeStruct:
    """The shape of a piece, or of the whole, on the devices; storage shape."""
    shape = leaf.storage_shape if chunking is None else chunking.chunk_shape(leaf, length)
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=named(config, leaf))
