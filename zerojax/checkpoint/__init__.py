"""Save, verify and restore checkpoints. Stage, mesh and precision may differ between save and restore.

Each task has a main file. Read that file first, then the files named after it:

save      `saving.py` runs one save. `directory.py` names the folders and commits them atomically, and `arrays.py`
          writes large leaves through orbax.
restore   `restoring.py` compares a verified checkpoint with the target state, and reads each leaf into its new layout.
verify    `manifest.py` describes a checkpoint, and checks every file against its digest.
export    `export.py` writes parameters. `safetensors.py` reads and writes the files, and `mapping.py` renames leaves.
import    `importing.py` reads parameters from safetensors, also with `safetensors.py` and `mapping.py`.
reshard   `live.py` moves a live state into another layout, with the comparison and the conversions of restore.

`checkpointer.py` has the object that users call. It saves, restores and verifies, one call at a time. `state_leaves.py`
turns a state into named logical leaves, and converts a leaf to another layout; `data_state.py` writes the position of a
data loader. `errors.py` has the errors. `preemption.py` lets a signal start a last save.
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
    return sorted([*__all__, "__doc__", "__name__", "__file__"])
