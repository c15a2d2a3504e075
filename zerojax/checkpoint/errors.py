"""Define the errors of checkpoints, and make all processes of a run raise them together, so that all go on, or none."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from zerojax.comm import processes

log = logging.getLogger("zerojax.checkpoint")
MAX_LENGTH = 1000


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, found or read. The run's state is unchanged."""


class ReplacedError(CheckpointError):
    """Another run, which saves to the same directory, removed or replaced the checkpoint while it was read."""


class DamagedError(CheckpointError):
    """Files of a committed checkpoint differ from the files that were written.

    Attributes:
        step: The checkpoint's step.
        damage: `(leaf, file, problem)` for each damaged file. The leaf is empty if the file belongs to no leaf.
        intact: The newest intact checkpoint of another step. None if there is none, or if no other step was checked.
    """

    def __init__(self, message: str, *, step: int, damage: tuple = (), intact: int | None = None):
        super().__init__(message)
        self.step, self.damage, self.intact = step, damage, intact


def no_zero_state(wanted: str, found: Any) -> TypeError:
    """Return the error for a value that is not the wanted `ZeroState`."""
    return TypeError(
        f"{wanted} a ZeroState, as tx.create makes it for tx.train_step, not {type(found).__name__}. The state of your "
        f"own loop, such as a TrainState, is a tree of sharded arrays: orbax.checkpoint.StandardCheckpointer saves it "
        f"as it is, and restores it for this stage and mesh."
    )


def attempt(work: Callable[..., Any], *args: Any) -> str:
    """Call a function. Return its error as one line of text, or an empty string if it succeeds."""
    try:
        work(*args)
    except Exception as error:
        log.debug("", exc_info=True)
        return in_one_line(error)
    return ""


def in_one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:MAX_LENGTH]
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}"


class CheckpointProcesses(processes.Processes):
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
