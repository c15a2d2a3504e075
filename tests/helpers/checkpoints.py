"""What several files do to a checkpoint, and expect of it and of its state."""

import json

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.checkpoint import Checkpointer
from zerojax.checkpoint.manifest import MANIFEST, MANIFEST_DIGEST, digest_line
from zerojax.checkpoint.state_leaves import state_leaves
from zerojax.layout.leaf import is_chunked
from zerojax.offload.chunked import joined

NEWEST = "step_00000002"
# Leaves of which some are packed.
SHAPES = {
    "w": ((80, 64), "float32"),  # 20,480 bytes, sharded by dim
    "odd": ((7, 13), "bfloat16"),  # padded
    "b": ((12,), "float32"),  # flat
    "c": ((), "float32"),
    "none": ((0, 5), "float32"),
    "large": ((160, 128), "float32"),
}
SHAPES = {name: jax.ShapeDtypeStruct(*one) for name, one in SHAPES.items()}
KEYS = jax.eval_shape(lambda: {"keys": jax.random.split(jax.random.key(0), 3)})


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


def sign(folder, text):
    """Give a saved step another manifest, with its digest."""
    (folder / MANIFEST).write_bytes(text)
    (folder / MANIFEST_DIGEST).write_text(digest_line(text))


def rewrite_manifest(folder, change):
    """Let a function change what the manifest of a saved step says."""
    body = json.loads((folder / MANIFEST).read_text())
    change(body)
    sign(folder, json.dumps(body).encode())


def filled(tx, shapes, step=0, **options):
    """A state of which each number tells its step, its leaf and its place; nothing is compiled."""
    leaves, structure = jax.tree.flatten(tx.create(shapes, **options))

    def fill(k, x):
        numbers = (np.arange(x.size).reshape(x.shape) + 7 * k + step) % 100
        return jax.device_put((numbers % 2 if x.dtype == bool else numbers % 8).astype(x.dtype), x.sharding)

    return jax.tree.unflatten(structure, [fill(k, x) for k, x in enumerate(leaves)])


def saved(folder, state, data=None, *, tx=None, **options):
    """Save a state, and open the folder for reading."""
    with Checkpointer(folder, tx=tx) as checkpoints:
        checkpoints.save(state, data, **options)
    return Checkpointer(folder, read_only=True)


def files_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def stored(slot):
    """A leaf's array in storage shape; of an offloaded leaf, its chunks in one."""
    return joined(slot.array) if is_chunked(slot.array) else slot.array


def logical_leaves(state):
    """Every logical leaf of a state on the host, by name, padding trimmed with NumPy."""
    leaves = {}
    for name, slot in state_leaves(state).items():
        array = stored(slot)
        host = np.asarray(jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array)
        if slot.leaf.kind == "flat":
            host = host[: slot.leaf.size].reshape(slot.leaf.shape)
        elif slot.leaf.dim is not None:
            host = host.take(range(slot.leaf.shape[slot.leaf.dim]), axis=slot.leaf.dim)
        leaves[name] = host
    return leaves


def assert_same(found, expected):
    """Bit-equal logical leaves."""
    found, expected = (x if isinstance(x, dict) else logical_leaves(x) for x in (found, expected))
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert (found[name].dtype, found[name].shape) == (x.dtype, x.shape), name
        assert found[name].tobytes() == x.tobytes(), name
