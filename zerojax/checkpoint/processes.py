"""The processes of a run agree about a checkpoint: all of them go on, or none."""

from __future__ import annotations

import json
from collections.abc import Mapping

from zerojax.checkpoint.errors import CheckpointError
from zerojax.comm import processes


class Processes(processes.Processes):
    """All processes of the run, about one checkpointer's saves and restores."""

    def __init__(self, timeout: float):
        """Count this checkpointer: all processes of a run open their checkpointers in the same order."""
        super().__init__("checkpoint", timeout)

    def exchange(self, topic: str, message: str) -> list[str]:
        """Exchange messages between processes. A silent process is a `CheckpointError`."""
        try:
            return super().exchange(topic, message)
        except TimeoutError as error:
            raise CheckpointError(str(error).replace(f"did not {topic}", "did not call save")) from error

    def require_same(self, call: str, record: Mapping[str, object]) -> None:
        """Compare the arguments of a call, before anything is written.

        Raises:
            ValueError: On every process, if they differ.
            CheckpointError: If a process does not make this call.
        """
        try:
            processes.require_same(call, {name: str(value) for name, value in record.items()}, timeout=self.timeout)
        except TimeoutError as error:
            raise CheckpointError(str(error)) from error

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
