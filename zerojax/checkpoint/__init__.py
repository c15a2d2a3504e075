"""Checkpoints: saved from any stage, mesh and precision, verified, and restored into any other."""

from .checkpointer import Checkpointer
from .errors import CheckpointError, DamagedError
from .restoring import Restored

__all__ = ["CheckpointError", "Checkpointer", "DamagedError", "Restored"]
