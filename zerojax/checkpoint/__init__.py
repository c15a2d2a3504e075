"""Checkpoints: saved from any stage, mesh and precision, verified, and restored into any other."""

from .checkpointer import Checkpointer
from .errors import CheckpointError, DamagedError
from .export import export, export_checkpoint, import_params
from .preemption import Preemption, on_preemption
from .restoring import Restored

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "DamagedError",
    "Preemption",
    "Restored",
    "export",
    "export_checkpoint",
    "import_params",
    "on_preemption",
]
