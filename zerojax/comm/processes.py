"""Exchange messages between the processes of a run, through JAX's coordination service, within a timeout.

This needs no device, so a thread can do it while the main thread trains. A process notices if a process that it waits
for has died.
"""

import collections
import itertools
import json
import time
from collections.abc import Mapping
from typing import Any

import jax

from zerojax.comm.events import EVENTS, Call
from zerojax.internals import coordination_client

TIMEOUT_S = 300  # as long as jax.distributed.initialize waits
MOST_DIFFERENCES = 3
LOOK_EVERY_S = 1.0
# The service accepts each key only once per run, so keys are numbered. The numbers agree, because all processes
# exchange the messages about one purpose in the same order.
SERIALS: dict[str, Any] = collections.defaultdict(itertools.count)


class Processes:
    """The processes of the run. This process has the index `index`, and waits up to `timeout` seconds for messages."""

    def __init__(self, purpose: str, timeout: float | None = None, call: Call | None = None):
        self.index, self.count = jax.process_index(), jax.process_count()
        self.timeout = TIMEOUT_S if timeout is None else timeout
        place = f"call/{call.number}" if call and call.number >= 0 else f"{purpose}/{next(SERIALS[purpose])}"
        self._key, self._topics = f"zerojax/{place}", itertools.count()

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def exchange(self, topic: str, message: str) -> list[str]:
        """Send a message to all other processes, and return the message of each process, in the order of their indices.

        `topic` is a verb that says what this process is about to do. Raise a `TimeoutError` that names a process that
        sends nothing within the timeout, or has ended, and a `ValueError` if another process makes a different call.
        """
        if self.count == 1:
            return [message]
        client, key = coordination_client(), f"{self._key}/{next(self._topics)}"
        client.key_value_set(f"{key}/{self.index}", json.dumps([topic, message]))
        begun, found = time.monotonic(), {}
        while len(found) < self.count:
            found = {
                int(name.rsplit("/", 1)[-1]): json.loads(text) for name, text in client.key_value_dir_get(f"{key}/")
            }
            missing = sorted(set(range(self.count)) - set(found))
            left = self.timeout - (time.monotonic() - begun)
            if missing and left <= 0:
                raise TimeoutError(
                    f"Process {', '.join(map(str, missing))} of {self.count} did not answer within "
                    f"{self.timeout:g} s: it died, or hangs, or did not {topic} as the others did."
                )
            if missing:
                self._wait_for(missing, f"{key}/{missing[0]}", min(left, LOOK_EVERY_S), topic)
        for index, (theirs, _) in found.items():
            if theirs != found[0][0]:
                raise ValueError(
                    f"The processes do not make the same calls. Process {index} is about to {theirs}, and process 0 is "
                    f"about to {found[0][0]}. Let every process create, train, evaluate and save in the same order, as "
                    f"often."
                )
        return [text for _, (_, text) in sorted(found.items())]

    def _wait_for(self, missing: list[int], key: str, seconds: float, topic: str) -> None:
        """Wait a while for a message. Raise an error if a missing process ended, or makes a different call."""
        begun = time.monotonic()
        try:
            coordination_client().blocking_key_value_get(key, max(1, round(1000 * seconds)))
        except jax.errors.JaxRuntimeError:
            if time.monotonic() - begun < 0.9 * seconds:  # The service failed before the time was over.
                raise
            EVENTS.publish()
            if ended := {index: why for index, why in EVENTS.failures().items() if index in missing}:
                index, why = min(ended.items())
                raise TimeoutError(f"Process {index} of {self.count} ended before it did {topic}: {why}") from None
            if difference := EVENTS.difference():
                raise ValueError(difference) from None


def require_same(topic: str, record: Mapping[str, str], *, partial: bool = False, timeout: float | None = None) -> None:
    """Check that all processes are about to do the same thing, so that no process waits for another in vain.

    `record` has values that must be the same on all processes, by name. If `partial` is true, a name may be missing on
    some. If a value differs, every process raises a `ValueError`. `topic` and other errors are as in `exchange`.
    """
    if jax.process_count() == 1:
        return
    processes = Processes(topic, timeout, EVENTS.begin(topic))
    records = [json.loads(text) for text in processes.exchange(topic, json.dumps(dict(record)))]
    if difference := first_difference(records, partial=partial):
        index, reference, names = difference
        one, other = records[reference], records[index]
        found = [f"{name} is {other.get(name, 'missing')}, not {one.get(name, 'missing')}" for name in names]
        more = f"; and {len(found) - MOST_DIFFERENCES} more" if len(found) > MOST_DIFFERENCES else ""
        raise ValueError(
            f"The processes do not {topic} alike. On process {index}, unlike {reference}: "
            f"{'; '.join(found[:MOST_DIFFERENCES])}{more}. Give every process the same program, options, values "
            f"and shapes."
        )


def first_difference(records: list[dict[str, str]], *, partial: bool = False) -> tuple[int, int, list[str]] | None:
    """Return `(process, other process, names that differ)` for the first record that differs, or None."""
    first_with: dict[str, int] = {}
    for index, record in enumerate(records):
        names = record if partial else {**records[0], **record}
        against = {name: first_with.setdefault(name, index if partial else 0) for name in names}
        differ = [name for name in names if records[against[name]].get(name) != record.get(name)]
        if differ:
            reference = against[differ[0]]
            return index, reference, [name for name in differ if against[name] == reference]
    return None
