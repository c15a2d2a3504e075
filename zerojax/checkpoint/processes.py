"""The processes of a run agree about a checkpoint: all of them go on, or none."""

from __future__ import annotations

import json
from collections.abc import Mapping

from zerojax.checkpoint.errors import CheckpointError
from zerojax.comm import processes


class Processes(processes.Processes):
    """All processes of the run, in the saves and restores of one checkpointer."""

    def __init__(self, timeout: float):
        """Give this checkpointer a number, which is the same on all processes: they open checkpointers in one order."""
        super().__init__("checkpoint", timeout)

    def exchange(self, topic: str, message: str) -> list[str]:
        """Return the message of every process, or raise a `CheckpointError` if one does not answer."""
        try:
            return super().exchange(topic, message)
        except TimeoutError as error:
            raise CheckpointError(str(error)) from error

    def require_same(self, call: str, record: Mapping[str, object]) -> None:
        """Raise a `ValueError` on every process if they call this with different arguments."""
        try:
            processes.require_same(call, {name: str(value) for name, value in record.items()}, timeout=self.timeout)
        except TimeoutError as error:
            raise CheckpointError(str(error)) from error

    def agree(self, topic: str, failure: str = "", message: str = "") -> str:
        """Return the first process's message once all processes have succeeded.

        Args:
            topic: What every process is doing, as a verb: `"write a checkpoint"`.
            failure: What failed in this process; empty if nothing did.
            message: What the first process tells the others.

        Raises:
            CheckpointError: With the failures of all processes, if there is any.
        """
        answers = [json.loads(text) for text in self.exchange(topic, json.dumps([failure, message]))]
        prefix = lambda i: f"process {i}: " if self.count > 1 else ""
        if failures := [f"{prefix(i)}{text}" for i, (text, _) in enumerate(answers) if text]:
            raise CheckpointError("; ".join(failures))
        return answers[0][1]
