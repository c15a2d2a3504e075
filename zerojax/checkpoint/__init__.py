"""Checkpoints: save a run at any stage, mesh and precision, verify it, and restore it into any other.

Each ability starts in one file. Read it first, then the files that it names:

save      `saving.py`: one save. `directory.py` has the folders and their atomic commit, `arrays.py` writes large
          leaves through orbax, `packing.py` writes small leaves into one file per process.
restore   `restoring.py`: from a verified checkpoint to a state. `matching.py` compares the saved leaves and optimizer
          with the state that is wanted, `resharding.py` converts a leaf to another layout.
verify    `verifying.py`: every file against its digest, and every leaf against its files. `soundness.py` refuses a
          forged manifest before anything is allocated.
export    `export.py`: parameters as safetensors. `safetensors.py` has the files, `mapping.py` renames parameters.
import    `importing.py`: parameters from safetensors, through the same two files.

`checkpointer.py` is the object that users hold: it calls save, restore and verify, one at a time. `state_leaves.py`
turns a state into named logical leaves; `records.py` and `manifest.py` describe them on disk; `data_state.py` writes
the position of a data loader. `processes.py` lets all processes go on, or none. `preemption.py` turns a signal into a
last save.
"""

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
