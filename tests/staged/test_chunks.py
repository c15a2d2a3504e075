"""Parameters on disk: a stack of layers has one chunk per layer, everything else has chunks of `chunk_bytes`."""

import jax
import jax.numpy as jnp
from disk_models import on_disk

from zerojax.layout.chunked import is_chunked


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


PARAMS = {
    "up": shape(128, 352),
    "down": shape(352, 128),
    "heads": shape(128, 8, 16),
    "layers": {"w": shape(4, 128, 128), "bias": shape(4, 128)},
    "adapters": {"frozen": shape(3, 128, 8), "a": shape(3, 128, 8), "scale": shape(3, 128)},
}


def test_only_stacks_have_a_chunk_per_row(tmp_path):
    tx = on_disk(tmp_path, chunk_bytes="16 KB", trainable=lambda path, leaf: "frozen" not in path)
    nodes = jax.tree_util.tree_flatten_with_path(tx.create(PARAMS).params, is_leaf=is_chunked)[0]
    chunked = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in nodes if is_chunked(x)}
    assert len(chunked) == 8
    for path, node in chunked.items():
        is_stack = path.startswith(("layers", "adapters"))
        assert node.is_by_row == is_stack, path
        if not is_stack:
            assert len(node.chunking.extents) <= 2 * -(-node.leaf.local_bytes // 16_000), path
