"""An update whose optimizer state waits elsewhere: fetched, updated and put back piece by piece.

The pieces form one queue. While a piece is updated, the next ones are on their way in and
the last ones on their way out; nothing is started before its turn, so that the device
holds a few pieces, whatever the size of the model.

References:
    Ren et al. 2021, arXiv 2101.06840, section 4; Rajbhandari et al. 2021, arXiv 2104.07857, section 5.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import numpy as np

from ..config import Config
from ..layout.chunked import Chunked, Cut, is_chunked
from ..offload.host import arrived, host_kind, moved, waits
from ..stages.offloading import UNDER_WAY
from ..stages.split import CONST, GRAD, SHARED, Task
from ..stages.storage import homed
from ..stages.update import UpdatePlan, offloaded_part
from .tasks import Kind, Values, gathered, incoming, on_device, on_host, outgoing

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, PyTree

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


class Tier(Protocol):
    """Where offloaded state waits."""

    def fetch(self, task: Task, piece: int, kind: str) -> Any:
        """Begin to bring the state of a task's piece into a kind of memory."""
        ...

    def receive(self, ticket: Any) -> list[Array]:
        """What `fetch` brings, one array a leaf."""
        ...

    def stow(self, task: Task, piece: int, arrays: Sequence[Array]) -> Any:
        """Begin to put the new state of a piece away."""
        ...

    def settle(self, ticket: Any) -> None:
        """Wait until what `stow` began is done."""
        ...

    def nodes(self, task: Task) -> list[PyTree]:
        """The new nodes of the state's tree, one a leaf of the task."""
        ...


class Streamed:
    """The streamed update of one transformation: its programs, compiled when they are first needed."""

    def __init__(self, config: Config, plan: UpdatePlan, update: str):
        """Nothing is compiled yet; `update` is `"device"` or `"host"`."""
        self._config = config
        self._plan = plan
        self._update = update
        self._host = host_kind(config.mesh)
        self.split = offloaded_part(config, plan).split
        self._program = functools.cache(lambda make, *given: make(config, *given))
        self._kind = functools.cache(lambda t, length: Kind.of(plan, self.split.tasks[t], length))

    def run(self, begun: Begun, tier: Tier) -> tuple[list, list]:
        """Update every piece.

        Args:
            begun: From the first program; its arrays are used up.
            tier: Where the state waits.

        Returns:
            `(params, state)`: one array a parameter, as stored, and one node a leaf of the state.
        """
        tasks, leaves = self.split.tasks, self._plan.trained.params
        params, state = list(begun.params), list(begun.state)
        leaving: list[Array] = []
        last = {i: t for t, task in enumerate(tasks) for i in task.reading(GRAD)}
        there = self._shared_on_host(begun)
        coming, going = collections.deque(), collections.deque()
        ahead = ((t, n) for t, task in enumerate(tasks) for n in range(len(task.pieces)))

        def fetch(count: int) -> None:
            for t, n in itertools.islice(ahead, count):
                coming.append(tier.fetch(tasks[t], n, self._host if self._runs_on_host(tasks[t]) else DEVICE))

        fetch(UNDER_WAY - 1)
        for t, task in enumerate(tasks):
            held = [arrived(begun.divided.pop(i)) for i in task.params]
            kept = [state[k] for k in task.resident]
            others = Values(
                params=(),
                grads=[begun.grads[i] for i in task.reading(GRAD)],
                state=(),
                resident=(),
                shared=[begun.shared[i] for i in task.reading(SHARED)],
                consts=[self.split.consts[i] for i in task.reading(CONST)],
            )
            for n, (start, length) in enumerate(task.pieces):
                arrays = tier.receive(coming.popleft())
                kind, at = self._kind(t, length), np.int32(start)
                if self._runs_on_host(task):
                    shared, skipped = [there[0][i] for i in task.reading(SHARED)], there[1]
                    held, arrays = self._on_host(kind, held, arrays, others, at, begun.skipped, shared, skipped)
                else:
                    program = self._program(on_device, kind)
                    held, arrays, kept = program(held, arrays, kept, others, at, begun.skipped)
                going.append(tier.stow(task, n, arrays))
                del arrays
                fetch(1)
                if len(going) >= UNDER_WAY:
                    tier.settle(going.popleft())
            for i in {i for i in task.reading(GRAD) if last[i] == t}:
                del begun.grads[i]
            for k, x in zip(task.resident, kept, strict=True):
                state[k] = x
            for k, node in zip(task.state, tier.nodes(task), strict=True):
                state[k] = node
            # Parameters pass through the device where the update runs on the host too, as their gradients do.
            home = homed(self._config, dict(zip(task.params, self._whole(task, held), strict=True)), leaves)
            for i, x in home.items():
                params[self._plan.layout.trained[i]] = x
            # The device holds the shards of two tasks: one arrives and is updated while the other leaves.
            jax.block_until_ready(leaving)
            leaving = [x for x in home.values() if waits(x)]
            del held, home
        while going:
            tier.settle(going.popleft())
        return params, state

    def _runs_on_host(self, task: Task) -> bool:
        """A task on whole matrices goes through the device, whose programs span all devices."""
        return self._update == "host" and task.cut is not None

    def _shared_on_host(self, begun: Begun) -> tuple[list, Any]:
        if self._update != "host":
            return [], None
        return [moved(x, self._host) for x in begun.shared], moved(begun.skipped, self._host)

    def _on_host(
        self, kind: Kind, held: list, state: list, others: Values, start, skipped, shared: list, skipped_there
    ) -> tuple[list, list]:
        """Gradients go to the host, and new parameters come back."""
        params, grads = self._program(outgoing, kind)(others._replace(params=held), start)
        there = others._replace(
            params=[moved(x, self._host) for x in params],
            grads=[moved(x, self._host) for x in grads],
            shared=shared,
            consts=[moved(x, self._host) for x in others.consts],
        )
        new, state = self._program(on_host, kind)(state, there, skipped_there)
        back = [moved(x, DEVICE) for x in new]
        return self._program(incoming, kind)(held, back, start, skipped), state

    def _whole(self, task: Task, held: list) -> list:
        """Parameters as they are stored: gathered where the stage keeps them whole."""
        plan = self._plan
        parts = [plan.parts[i] for i in task.params]
        whole = [
            j for j, i in enumerate(task.params) if plan.trained.params[i].dim is None and parts[j].kind != "whole"
        ]
        if not whole:
            return held
        leaves = tuple(dataclasses.replace(parts[j], path="", reason="") for j in whole)
        found = dict(zip(whole, self._program(gathered, leaves)([held[j] for j in whole]), strict=True))
        return [found.get(j, x) for j, x in enumerate(held)]


class HostTier:
    """State in host memory, in `Chunked` nodes; those passed in are used up."""

    def __init__(self, plan: UpdatePlan, kind: str, nodes: Sequence[Any] = ()):
        """`kind` is the kind of host memory; `nodes` has one node a leaf of the state, none for a first state."""
        self._plan = plan
        self._kind = kind
        self._old = {k: list(node.pieces) for k, node in enumerate(nodes) if is_chunked(node)}
        self._new: dict[int, list[Array]] = collections.defaultdict(list)

    def fetch(self, task: Task, piece: int, kind: str) -> list[Array]:
        """As `Tier`."""
        return [moved(self._old[k][piece], kind) for k in task.state]

    def receive(self, ticket: list[Array]) -> list[Array]:
        """As `Tier`."""
        return ticket

    def stow(self, task: Task, piece: int, arrays: Sequence[Array]) -> tuple[list, list]:
        """As `Tier`."""
        new = [moved(x, self._kind) for x in arrays]
        for k, x in zip(task.state, new, strict=True):
            self._new[k].append(x)
        return new, [self._old[k][piece] for k in task.state if k in self._old]

    def settle(self, ticket: tuple[list, list]) -> None:
        """As `Tier`; the old pieces are given back, as those of a donated array are."""
        new, old = ticket
        jax.block_until_ready(new)
        for x in old:
            if not x.is_deleted():
                x.delete()

    def nodes(self, task: Task) -> list[Chunked]:
        """As `Tier`."""
        plan = self._plan
        return [Chunked(tuple(self._new.pop(k)), plan.state[k], plan.cuts[k] or Cut(0, ())) for k in task.state]
