"""The processes of a run agree, through jax's coordination service, within a stated time.

No device takes part, so that it may happen in a thread beside the training, and a process that
died is noticed by those that wait for it.
"""

from __future__ import annotations

import itertools
import json

import jax

from zerojax.checkpoint.errors import CheckpointError
from zerojax.compat import coordination_client

# The service knows each key once in the life of a run, so the keys are numbered for as long: all processes open
# their checkpointers in the same order, and each then says the same things in the same order.
SERIAL = itertools.count()


class Peers:
    """All processes of the run.

    Attributes:
        index: Which this one is; number 0 writes what is written once.
        count: How many there are.
        timeout: How long to wait for the others, in seconds.
    """

    def __init__(self, timeout: float):
        """Those of this run."""
        self.index, self.count, self.timeout = jax.process_index(), jax.process_count(), timeout
        self._serial, self._topics = next(SERIAL), itertools.count()

    @property
    def first(self) -> bool:
        """Whether this process writes what is written once."""
        return self.index == 0

    def tell(self, topic: str, message: str) -> list[str]:
        """Tell all others something, and wait until each has said what it has to say.

        Args:
            topic: What it is about, in a word.
            message: What this process says; not empty.

        Returns:
            What each process said, in order.

        Raises:
            CheckpointError: If a process says nothing within the timeout, naming it.
        """
        if self.count == 1:
            return [message]
        client, key = coordination_client(), f"zerojax/checkpoint/{self._serial}/{next(self._topics)}/{topic}"
        client.key_value_set(f"{key}/{self.index}", message)
        try:
            client.wait_at_barrier(f"{key}/all", round(1000 * self.timeout))
        except Exception as error:
            said = {int(name.rsplit("/", 1)[-1]) for name, _ in client.key_value_dir_get(f"{key}/")}
            silent = sorted(set(range(self.count)) - said)
            raise CheckpointError(
                f"Process {', '.join(map(str, silent)) or 'unknown'} of {self.count} said nothing for "
                f"{self.timeout:g} s: it died, or hangs, or did not call save as the others did."
            ) from error
        said = {int(name.rsplit("/", 1)[-1]): text for name, text in client.key_value_dir_get(f"{key}/")}
        return [said[i] for i in range(self.count)]

    def agree(self, topic: str, trouble: str = "", message: str = "") -> str:
        """Go on only if all processes can.

        Args:
            topic: As for `tell`.
            trouble: What keeps this process from going on; empty if nothing does.
            message: What the first process tells the others.

        Returns:
            The message of the first process.

        Raises:
            CheckpointError: With the trouble of those that have any.
        """
        told = [json.loads(text) for text in self.tell(topic, json.dumps([trouble, message]))]
        who = lambda i: f"process {i}: " if self.count > 1 else ""
        if all_trouble := [f"{who(i)}{text}" for i, (text, _) in enumerate(told) if text]:
            raise CheckpointError("; ".join(all_trouble))
        return told[0][1]
