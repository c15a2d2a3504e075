"""What several files of tests/checkpoint do to the files of a checkpoint, and expect of it."""

import pytest

from zerojax.checkpoint import Checkpointer, DamagedError, export_checkpoint

NEWEST = "step_00000002"


def flip(path, offset=0, size=None):
    """Change a bit in the middle of some bytes of a file."""
    content = bytearray(path.read_bytes())
    content[offset + (len(content) if size is None else size) // 2] ^= 1 << 3
    path.write_bytes(content)


def zero(path, offset, size):
    """Make some bytes of a file zero."""
    content = bytearray(path.read_bytes())
    content[offset : offset + size] = bytes(len(content[offset : offset + size]))
    path.write_bytes(content)


def assert_refused(root, says):
    """A forged checkpoint is damaged for all that read it, and nothing is written."""
    for look in (Checkpointer(root, read_only=True).verify, lambda: export_checkpoint(root, root / "out")):
        with pytest.raises(DamagedError, match=says):
            look()
    assert not (root / "out").exists()
