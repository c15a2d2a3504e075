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
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from ..config import Config
from ..layout.chunked import Cut
from ..layout.leaf import Leaf
from ..offload.host import arrived, host_kind, moved, waits
from ..stages.offloading import UNDER_WAY
from ..stages.split import CONST, GRAD, SHARED, Task
from ..stages.storage import homed, named
from ..stages.update import UpdatePlan, chosen_update, offloaded_part
from .hosted import on_host
from .tasks import Kind, Values, gathered, incoming, on_device, outgoing
from .tiers import Tier

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
    """The streamed update of one transformation: its programs, compiled when they are first needed."""

    def __init__(self, config: Config, plan: UpdatePlan):
        """Nothing is compiled yet."""
        self._config = config
        self._plan = plan
        choice = plan.choice or chosen_update(config, plan)
        self._update = choice and choice.update
        self._host = host_kind(config.mesh)
        self.split = offloaded_part(config, plan).split
        self._program = functools.cache(lambda make, *given: make(config, *given))
        self._kind = functools.cache(lambda t, length: Kind.of(plan, self.split.tasks[t], length))

    def lower(self) -> list[Any]:
        """The programs that update a piece on the device, one a kind, lowered as `jax.jit(...).lower` does."""
        config, plan, split = self._config, self._plan, self.split
        shared = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in split.first.jaxpr.outvars[-split.shared :]]
        lowered: dict[Kind, Any] = {}
        for t, task in enumerate(split.tasks):
            for length in task.parts:
                kind = self._kind(t, length)
                if kind in lowered:
                    continue
                typed = [dataclasses.replace(plan.parts[i], dtype=plan.trained.params[i].dtype) for i in task.params]
                grads: list[Any] = [piece_shape(config, plan.parts[i], None, 0) for i in task.reading(GRAD)]
                common: list[Any] = [shared[i] for i in task.reading(SHARED)]
                lowered[kind] = self._program(on_device, kind).lower(
                    [piece_shape(config, leaf, None, 0) for leaf in typed],
                    [piece_shape(config, plan.state[k], task.cut, length) for k in task.state],
                    [piece_shape(config, plan.state[k], None, 0) for k in task.resident],
                    Values((), grads, (), (), common, [split.consts[i] for i in task.reading(CONST)]),
                    np.int32(0),
                    jax.ShapeDtypeStruct((), bool),
                )
        return list(lowered.values())

    def run(self, begun: Begun, tier: Tier) -> tuple[list, list]:
        """Update every piece.

        Args:
            begun: From the first program; its arrays are used up.
            tier: Where the state waits.

        Returns:
            `(params, state)`: one array a parameter, as stored, and one node a leaf of the state.
        """
        try:
            return self._run(begun, tier)
        except BaseException:
            tier.abandon()
            raise

    def _run(self, begun: Begun, tier: Tier) -> tuple[list, list]:
        self._wait_if_simulated(begun)
        tasks, leaves = self.split.tasks, self._plan.trained.params
        params, state = list(begun.params), list(begun.state)
        leaving: list[Array] = []
        last = {i: t for t, task in enumerate(tasks) for i in task.reading(GRAD)}
        if self._update == "host" and begun.skipped:  # the host waits for the gradients anyway
            return self._skipped(begun, tier)
        there = [moved(x, self._host) for x in begun.shared] if self._update == "host" else []
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
                    shared = [there[i] for i in task.reading(SHARED)]
                    held, arrays = self._on_host(kind, held, arrays, others, at, begun.skipped, shared)
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
            self._wait_if_simulated(home)
            del held, home, others
        while going:
            tier.settle(going.popleft())
        return params, state

    def _wait_if_simulated(self, arrays: Any) -> None:
        """Simulated devices share a pool of threads, and the collectives of two programs can starve each other."""
        if self._config.mesh.devices.flat[0].platform == "cpu":
            jax.block_until_ready(arrays)

    def _runs_on_host(self, task: Task) -> bool:
        """A task on whole matrices goes through the device, whose programs span all devices."""
        return self._update == "host" and task.cut is not None

    def _skipped(self, begun: Begun, tier: Tier) -> tuple[list, list]:
        """A step that moves nothing."""
        params, state = list(begun.params), list(begun.state)
        for task in self.split.tasks:
            for k, node in zip(task.state, tier.unchanged(task), strict=True):
                state[k] = node
            for i, x in zip(task.params, self._whole(task, [begun.divided.pop(i) for i in task.params]), strict=True):
                params[self._plan.layout.trained[i]] = x
        return params, state

    def _on_host(
        self, kind: Kind, held: list, state: list, others: Values, start, skipped, shared: list
    ) -> tuple[list, list]:
        """Gradients go to the host, and new parameters come back."""
        params, grads = self._program(outgoing, kind)(others._replace(params=held), start)
        beside = [moved(x, self._host) for x in others.consts]
        there = [[moved(x, self._host) for x in arrays] for arrays in (params, grads)]
        new, state = self._program(on_host, kind)(*there, state, shared, beside)
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


def piece_shape(config: Config, leaf: Leaf, cut: Cut | None, length: int) -> jax.ShapeDtypeStruct:
    """The shape of a piece, or of the whole, on the devices; storage shape."""
    shape = leaf.storage_shape if cut is None else cut.piece_shape(leaf, length)
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=named(config, leaf))
