"""Parameters on disk: a stack of layers has one chunk per layer, everything else has chunks of `chunk_bytes`."""

import jax
import jax.numpy as jnp
from disk_models import LOSSES, batch_of, model_params, on_disk

from zerojax.layout.chunked import is_chunked
from zerojax.offload.state_files import StateFiles
from zerojax.staged.microbatch import Microbatch


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
        assert node.chunking.is_by_row(node.leaf) == is_stack, path
        if not is_stack:
            assert len(node.chunking.extents) <= 2 * -(-node.leaf.local_bytes // 16_000), path


def test_chunks_are_copied_before_the_program_of_the_use_before_is_waited_for(tmp_path, monkeypatch):
    """So copies can run while the devices compute."""
    events, launched = [], []
    receive, ran, block = StateFiles.receive, Microbatch._ran, jax.block_until_ready

    def copy(self, *args):
        events.append(("copy", len(launched)))  # for the program that is launched next
        return receive(self, *args)

    def launch(self, results):
        events.append(("launch", len(launched)))
        launched.append(jax.tree.leaves(results))
        return ran(self, results)

    def wait(x):
        events.extend(("wait", n) for n, results in enumerate(launched) if any(x is y for y in results))
        return block(x)

    tx = on_disk(tmp_path, devices=1, chunk_bytes=4096)
    state, step = tx.create(model_params()), tx.train_step(LOSSES["loop"])
    monkeypatch.setattr(StateFiles, "receive", copy)
    monkeypatch.setattr(Microbatch, "_ran", launch)
    monkeypatch.setattr(jax, "block_until_ready", wait)
    step(state, batch_of())
    waits = [n for event, n in events if event == "wait"]
    uses = {n for event, n in events if event == "copy" and 0 < n < len(launched)}
    assert len(uses) >= 8  # three layers each way, and the parameters outside of the loop
    assert len(waits) >= len(uses)
    for n in waits:
        assert events.index(("wait", n)) > events.index(("launch", n + 1))
        if n + 1 in uses:
            assert events.index(("launch", n)) < events.index(("copy", n + 1)) < events.index(("wait", n))
