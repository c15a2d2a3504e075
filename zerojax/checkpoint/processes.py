"""The processes of a run agree, through jax's coordination service, within a timeout.

No device takes part, so this may happen in a thread beside the training, and a process that
died is noticed by those that wait for it.
"""

from __future__ import annotations

import itertools
import json

import jax

from zerojax.checkpoint.errors import CheckpointError
from zerojax.compat import coordination_client

# The service takes each key once in the life of a run, so the keys are numbered for as long: all processes open
# their checkpointers in the same order, and then exchange the same messages in the same order.
SERIAL = itertools.count()


class Processes:
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
    def is_first(self) -> bool:
        """Whether this process writes what is written once."""
        return self.index == 0

    def exchange(self, topic: str, message: str) -> list[str]:
        """Send a message to all others, and wait for theirs.

        Args:
            topic: What it is about, in a word.
            message: What this process sends; not empty.

        Returns:
            The message of each process, in order.

        Raises:
            CheckpointError: If a process sends nothing within the timeout, naming it.
        """
        if self.count == 1:
            return [message]
        client, key = coordination_client(), f"zerojax/checkpoint/{self._serial}/{next(self._topics)}/{topic}"

        def messages() -> dict[int, str]:
            return {int(name.rsplit("/", 1)[-1]): text for name, text in client.key_value_dir_get(f"{key}/")}

        client.key_value_set(f"{key}/{self.index}", message)
        try:
            client.wait_at_barrier(f"{key}/all", round(1000 * self.timeout))
        except Exception as error:
            silent = sorted(set(range(self.count)) - set(messages()))
            raise CheckpointError(
                f"Process {', '.join(map(str, silent)) or 'unknown'} of {self.count} did not answer within "
                f"{self.timeout:g} s: it died, or hangs, or did not call save as the others did."
            ) from error
        return [text for _, text in sorted(messages().items())]

    def agree(self, topic: str, failure: str = "", message: str = "") -> str:
        """Go on only if all processes can.

        Args:
            topic: As for `exchange`.
            failure: What failed in this process; empty if nothing did.
            message: What the first process tells the others.

        Returns:
            The message of the first process.

        Raises:
            CheckpointError: With the failures of all processes.
        """
        answers = [json.loads(text) for text in self.exchange(topic, json.dumps([failure, message]))]
        prefix = lambda i: f"process {i}: " if self.count > 1 else ""
        if failures := [f"{prefix(i)}{text}" for i, (text, _) in enumerate(answers) if text]:
            raise CheckpointError("; ".join(failures))
        return answers[0][1]
