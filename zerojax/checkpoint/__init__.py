"""Checkpoints: saved from any stage, mesh and precision, verified, and restored into any other."""

from zerojax.checkpoint.checkpointer import Checkpointer
from zerojax.checkpoint.errors import CheckpointError, DamagedError
from zerojax.checkpoint.export import export, export_checkpoint
from zerojax.checkpoint.importing import import_params
from zerojax.checkpoint.preemption import Preemption, on_preemption
from zerojax.checkpoint.restoring import Restored

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


def __dir__() -> list[str]:
    """Return the public surface."""
    return sorted([*__all__, "__doc__", "__name__", "__file__"])
