"""The processes of a run tell each other something, through jax's coordination service, within a timeout.

No device takes part, so this may happen in a thread beside the training, and a process that
died is noticed by those that wait for it.
"""

from __future__ import annotations

import collections
import itertools
import json
from collections.abc import Mapping
from typing import Any

import jax

from zerojax.compat import coordination_client

TIMEOUT_S = 300  # as long as jax.distributed.initialize waits
MOST_DIFFERENCES = 3
# The service takes each key once in the life of a run, so the keys are numbered for as long: all processes exchange the
# same messages about one purpose in the same order.
SERIALS: dict[str, Any] = collections.defaultdict(itertools.count)


class Processes:
    """All processes of the run.

    Attributes:
        index: Which this one is; number 0 does what is done once.
        count: How many there are.
        timeout: How long to wait for the others, in seconds.
    """

    def __init__(self, purpose: str, timeout: float = TIMEOUT_S):
        """Those of this run, for messages about one purpose."""
        self.index, self.count, self.timeout = jax.process_index(), jax.process_count(), timeout
        self._key, self._topics = f"zerojax/{purpose}/{next(SERIALS[purpose])}", itertools.count()

    @property
    def is_first(self) -> bool:
        """Whether this process does what is done once."""
        return self.index == 0

    def exchange(self, topic: str, message: str) -> list[str]:
        """Send a message to all others, and wait for theirs.

        Args:
            topic: What it is about, in a word.
            message: What this process sends; not empty.

        Returns:
            The message of each process, in order.

        Raises:
            TimeoutError: If a process sends nothing within the timeout, naming it.
        """
        if self.count == 1:
            return [message]
        client, key = coordination_client(), f"{self._key}/{next(self._topics)}/{topic}"

        def messages() -> dict[int, str]:
            return {int(name.rsplit("/", 1)[-1]): text for name, text in client.key_value_dir_get(f"{key}/")}

        client.key_value_set(f"{key}/{self.index}", message)
        try:
            client.wait_at_barrier(f"{key}/all", round(1000 * self.timeout))
        except Exception as error:
            silent = sorted(set(range(self.count)) - set(messages()))
            raise TimeoutError(
                f"Process {', '.join(map(str, silent)) or 'unknown'} of {self.count} did not answer within "
                f"{self.timeout:g} s: it died, or hangs, or did not {topic} as the others did."
            ) from error
        return [text for _, text in sorted(messages().items())]


def require_same(topic: str, record: Mapping[str, str]) -> None:
    """Compare what this process is about to do with what the others are, so that none waits for another in vain.

    Args:
        topic: What it is, as a verb: `"begin"`.
        record: What has to be the same, by name.

    Raises:
        ValueError: On every process, naming what differs and between which.
        TimeoutError: If a process does nothing of the kind within the timeout, naming it.
    """
    if jax.process_count() == 1:
        return
    first, *others = map(json.loads, Processes(topic, TIMEOUT_S).exchange(topic, json.dumps(dict(record))))
    for index, other in enumerate(others, start=1):
        names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if names:
            found = [f"{name} is {other.get(name, 'missing')}, not {first.get(name, 'missing')}" for name in names]
            more = f"; and {len(found) - MOST_DIFFERENCES} more" if len(found) > MOST_DIFFERENCES else ""
            raise ValueError(
                f"The processes do not {topic} alike. On process {index}, unlike 0: "
                f"{'; '.join(found[:MOST_DIFFERENCES])}{more}. Give every process the same program, options and shapes."
            )
