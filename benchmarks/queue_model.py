"""Model the queues of a GPU that updates offloaded state: record the calls of a step, and compute their time.

A GPU runs programs one after another, and has one engine that copies to the device and one that copies to the host.
`record` runs the update of `streaming/stream.py` with stand-ins for arrays, so that the model replays its real order.
`python queue_model.py` prints the table of docs/offload.md in a minute, on a CPU.
"""

from __future__ import annotations

import collections
import functools
import itertools
import types
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax import Offload, Precision, zero_shard
from zerojax.offload.chunked import Chunked, chunked
from zerojax.optim.update import StreamedInputs
from zerojax.streaming.stores import HostStateStore, chunk_bytes
from zerojax.streaming.stream import DEVICE, StreamedUpdate, UpdateQueue

RUN, IN, OUT, WAIT = "program", "to device", "to host", "wait"
LAUNCH = 15e-6  # seconds that a program takes in addition to its memory traffic


class Call(NamedTuple):
    """One call of a step.

    Attributes:
        queue: `RUN`: a program, `IN` or `OUT`: a copy, or `WAIT`: Python waits for `needs`.
        size: Bytes that a copy moves, or that a program reads and writes, per device.
        needs: Positions of earlier calls whose results this call needs.
        seconds: The time of a program. None: its bytes and the bandwidth of device memory decide.
    """

    queue: str
    size: int = 0
    needs: tuple[int, ...] = ()
    seconds: float | None = None


class Rates(NamedTuple):
    """Bytes per second: of the link in each direction, if one or both are busy, and of device memory."""

    alone: float
    both: float
    memory: float


# One H100, 2026-11-26: 17.73 GB of state in host memory, forward and backward passes of 338 ms, 733 ms per step. The
# link copies 50 GB/s in one direction, and 43 GB/s in each direction if both are busy.
STATE, PASSES, MEASURED = 17.73e9, 0.338, 0.733
H100 = Rates(alone=50e9, both=43e9, memory=2.4e12)


class Recorded:
    """A stand-in for an array of `size` bytes per device. `made` has the position of the call that makes it."""

    def __init__(self, calls: list[Call], size: int, kind: str, made: tuple[int, ...] = ()):
        self._calls, self.size, self.made = calls, size, made
        self.sharding = types.SimpleNamespace(memory_kind=kind)
        self.is_deleted, self.delete = lambda: False, lambda: None

    def block_until_ready(self) -> None:
        self._calls.append(Call(WAIT, needs=self.made))


class RecordedUpdate(StreamedUpdate):
    """A streamed update on the device, whose programs are recorded and not run."""

    def __init__(self, streamed: StreamedUpdate, calls: list[Call]):
        """Take the plan of `streamed`. Append each call to `calls`."""
        vars(self).update(vars(streamed), update="device")
        self.program = lambda run, key, donate: self._record
        self._calls = calls

    def _record(self, params: list, state: list[Recorded], resident: list, *_: Any) -> tuple[list, list, list]:
        # The state is read and written. The parameter and its gradient add little, and the link decides anyway.
        needs = tuple(position for x in state for position in x.made)
        made = appended(self._calls, Call(RUN, 2 * sum(x.size for x in state), needs))
        return params, [Recorded(self._calls, x.size, DEVICE, made) for x in state], resident


def appended(calls: list[Call], call: Call) -> tuple[int]:
    """Append a call. Return its position."""
    calls.append(call)
    return (len(calls) - 1,)


def record(streamed: StreamedUpdate, passes: float, steps: int = 1) -> list[list[Call]]:
    """Return the calls of some steps whose first program, the forward and backward passes, takes `passes` seconds.

    Positions in `Call.needs` count the calls of all steps.
    """
    calls: list[Call] = []
    config, plan, partition = streamed.config, streamed.plan, streamed.partition
    update, ends = RecordedUpdate(streamed, calls), [0]

    def copy(x: Recorded, kind: str) -> Recorded:
        queue = IN if kind == DEVICE else OUT
        made = x.made if x.sharding.memory_kind == kind else appended(calls, Call(queue, x.size, x.made))
        return Recorded(calls, x.size, kind, made)

    def first(k: int) -> Chunked:
        sizes = [chunk_bytes(plan, k, n) for n in range(len(plan.offloaded[k].extents))]
        return chunked(config, [Recorded(calls, size, "host") for size in sizes], plan.state[k], plan.offloaded[k])

    state: list[Any] = [first(k) if k in plan.offloaded else None for k in range(len(plan.state))]
    for _ in range(steps):
        store = HostStateStore(config, plan, state)
        calls.append(Call(RUN, seconds=passes))
        pending: Any = {i: np.float32(0) for group in partition.groups for i in group.params}
        grads: Any = dict.fromkeys(partition.grads, np.float32(0))
        params, shared = [None] * len(plan.layout.params), [None] * len(partition.shared_shapes)
        inputs = StreamedInputs(params, pending, state, grads, shared, None)
        threads: Any = None  # only updates on the host use threads
        with mock.patch("zerojax.streaming.stores.to_memory", copy):
            _, state = UpdateQueue(update, inputs, store, threads).update()
        ends.append(len(calls))
    return [calls[start:end] for start, end in itertools.pairwise(ends)]


def replay(calls: Sequence[Call], rates: Rates) -> list[float]:
    """Return when each call ends, in seconds. Each queue is first in, first out.

    A copy to the device begins after the program that was enqueued last before it, because XLA reuses device memory
    only after the programs that may still read it. Python enqueues a call after all waits before it.
    """
    ends: list[float | None] = [None] * len(calls)
    queues = collections.defaultdict[str, collections.deque](collections.deque)
    last: dict[str, int] = {}
    after: list[list[int]] = []
    for position, call in enumerate(calls):
        before = [WAIT, RUN] if call.queue == IN else [WAIT]
        after.append([*call.needs, *(last[queue] for queue in before if queue in last)])
        last[call.queue] = position
        queues[call.queue].append(position)
    own = lambda call: call.size / rates.memory + LAUNCH if call.seconds is None else call.seconds
    left = [own(x) if x.queue == RUN else float(x.size) for x in calls]
    now = 0.0
    while any(queues.values()):
        heads = {queue: waiting[0] for queue, waiting in queues.items() if waiting}
        ready = {queue: i for queue, i in heads.items() if all(ends[j] is not None for j in after[i])}
        link = rates.both if IN in ready and OUT in ready else rates.alone
        speed = {queue: link if queue in (IN, OUT) else 1.0 for queue in ready}
        passed = min(left[i] / speed[queue] for queue, i in ready.items())
        now += passed
        for queue, i in ready.items():
            left[i] -= passed * speed[queue]
            if left[i] <= 1e-9 * speed[queue]:  # a nanosecond
                ends[i] = now
                queues[queue].popleft()
    return [end for end in ends if end is not None]


def simulated_seconds(streamed: StreamedUpdate, passes: float, rates: Rates) -> float:
    """Return the time of a step with state in host memory that the device updates."""
    steps = record(streamed, passes, steps=3)  # the first step also moves the chunks that will stay on the device
    ends = replay([call for step in steps for call in step], rates)
    return max(ends) - max(ends[: -len(steps[-1])])


@functools.cache
def adamw(share: float = 0.0, *, leaves: int = 24, rows: int = 30_000) -> StreamedUpdate:
    """Return the update of AdamW with master weights: 12 bytes per parameter, by default `STATE` bytes.

    `share` of `STATE` stays on the device.
    """
    kept: Any = {"device_bytes": share * STATE} if share else {}
    offload = Offload(optimizer="host", update="device", **kept)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    tx = zero_shard(optax.adamw(1e-3), stage=3, mesh=mesh, precision=Precision.bf16(), offload=offload)
    state = tx.create({f"w{i}": jax.ShapeDtypeStruct((rows, 2048), jnp.float32) for i in range(leaves)})
    return StreamedUpdate(tx.config, state.plan)


def main() -> None:
    """Print the time of a step for each share of the state that stays on the device."""
    for share in (0.0, 0.25, 0.5, 1.1):
        print(f"{min(share, 1):4.0%} on the device: {simulated_seconds(adamw(share), PASSES, H100) * 1e3:4.0f} ms")


if __name__ == "__main__":
    main()
