"""Make the processes of a run agree about a checkpoint, so that all of them continue, or none."""

from __future__ import annotations

import json
from collections.abc import Mapping

from zerojax.checkpoint.errors import CheckpointError
from zerojax.comm import processes


class Processes(processes.Processes):
    """The processes of a run, which exchange messages for the saves and restores of one checkpointer."""

    def __init__(self, timeout: float):
        """Give this checkpointer a number. All processes open checkpointers in the same order, so the numbers agree."""
        super().__init__("checkpoint", timeout)

    def exchange(self, topic: str, message: str) -> list[str]:
        """Return the message of every process, or raise a `CheckpointError` if a process does not answer in time."""
        try:
            return super().exchange(topic, message)
        except TimeoutError as error:
            raise CheckpointError(str(error)) from error

    def require_same(self, call: str, record: Mapping[str, object]) -> None:
        """Raise a `ValueError` on every process if `call` or `record` differs between the processes."""
        try:
            processes.require_same(call, {name: str(value) for name, value in record.items()}, timeout=self.timeout)
        except TimeoutError as error:
            raise CheckpointError(str(error)) from error

    def agree(self, topic: str, failure: str = "", message: str = "") -> str:
        """Return the first process's message once all processes have succeeded.

        `topic` is the task of every process, as a verb phrase, and `failure` the error of this process, if it failed.
        Raise a `CheckpointError` that lists the failures of all processes.
        """
        answers = [json.loads(text) for text in self.exchange(topic, json.dumps([failure, message]))]
        prefix = lambda i: f"process {i}: " if self.count > 1 else ""
        if failures := [f"{prefix(i)}{text}" for i, (text, _) in enumerate(answers) if text]:
            raise CheckpointError("; ".join(failures))
        return answers[0][1]
