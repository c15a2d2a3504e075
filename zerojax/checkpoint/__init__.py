"""Save, verify and restore checkpoints. Stage, mesh and precision may differ between save and restore.

To learn how a task is done, read the first file of its entry, then the other files of the entry:

save      `saving.py` runs one save. `directory.py` names the folder and commits it atomically. `arrays.py` writes
          large leaves through orbax.
remove    `directory.py` removes old checkpoints (`prune`). `saving.py` calls `prune` after each commit.
best      `best.py` finds the best checkpoint by its metrics, which are in the manifest. `prune` keeps it.
restore   `restoring.py` compares a verified checkpoint with the target state, and reads each leaf into its new layout.
verify    `manifest.py` describes a checkpoint, and checks every file against the digest in this description.
export    `export.py` writes parameters. `safetensors.py` reads and writes the files, and `mapping.py` renames leaves.
import    `importing.py` reads parameters, through `safetensors.py` and `mapping.py` like export. It also reads the
          parameters of another run's checkpoint, through `restoring.py`.
reshard   `live.py` moves a state in memory into another layout, and compares leaves with `match` of `restoring.py`.

`checkpointer.py` has the object that users call. The object saves, restores and verifies, one call at a time.
`loop_state.py` turns the tree of a hand-written loop into a state. `state_leaves.py` turns a state into named logical
leaves, and converts a leaf to another layout. `data_state.py` writes the position of a data loader. `preemption.py`
lets a signal start a last save. `errors.py` has the errors.
"""

from zerojax.checkpoint.checkpointer import Checkpointer
from zerojax.checkpoint.errors import CheckpointError, DamagedError
from zerojax.checkpoint.export import export, export_checkpoint
from zerojax.checkpoint.importing import import_params, restore_params
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
    "restore_params",
]


def __dir__() -> list[str]:
    return sorted([*__all__, "__doc__", "__name__", "__file__"])
