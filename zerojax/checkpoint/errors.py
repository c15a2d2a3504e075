"""What can go wrong with a checkpoint."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or there is none; the run's state is as it was."""


class DamagedError(CheckpointError):
    """Files of a committed checkpoint are not what was written.

    Attributes:
        step: Its step.
        damage: What is wrong: one `(leaf, file, what)` a file, the leaf empty where the file
            belongs to none.
        intact: The newest older or newer step that was looked for and found intact; None if
            none was looked for or found.
    """

    def __init__(self, message: str, *, step: int, damage: tuple = (), intact: int | None = None):
        """Keep the facts beside the message."""
        super().__init__(message)
        self.step, self.damage, self.intact = step, damage, intact
