"""Parameters on disk: a stack has one chunk per layer. A loop reads one per iteration, or raises an error."""

import jax
import jax.numpy as jnp
import pytest
from conftest import shape
from disk_models import LOSSES, batch_of, layer, model_params, on_disk

from zerojax.layout.leaf import is_chunked
from zerojax.offload.state_files import StateFiles
from zerojax.staged.microbatch import Microbatch

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


def squares(x, params):
    return jnp.mean((x @ params["embed"].T) ** 2)


def of_a_scan_in_remat(params, batch):
    run = jax.checkpoint(lambda stack, x: jax.lax.scan(lambda x, weights: (layer(weights, x), None), x, stack)[0])
    return squares(run(params["layers"], params["embed"][batch["tokens"]]), params)


def of_microbatches(params, batch):
    rows = batch["tokens"].reshape(2, -1, *batch["tokens"].shape[1:])
    total, _ = jax.lax.scan(lambda sum, t: (sum + LOSSES["loop"](params, batch | {"tokens": t}), None), 0.0, rows)
    return total / 2


def of_a_stack_that_is_carried(params, batch):
    def step(carry, _):
        w, x = carry
        return (0.9 * w, x + jnp.tanh(x @ w[0]) @ w[0].T), None

    start = params["layers"]["w"], params["embed"][batch["tokens"]]
    return squares(jax.lax.scan(step, start, length=2)[0][1], params)


def of_a_stack_that_the_loss_makes(params, batch):
    x, stack = params["embed"][batch["tokens"]], jnp.stack([params["layers"]["w"][i] for i in range(2)])
    return squares(jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w) @ w.T, None), x, stack)[0], params)


def of_a_stack_that_is_sharded_over_its_layers(params, batch):
    x = params["embed"][batch["tokens"]]
    return squares(jax.lax.scan(lambda x, w: (x * jnp.tanh(w), None), x, params["embed"])[0], params)


STACK = r"\['layers'\]\['w'\]"
REFUSED = {
    of_a_scan_in_remat: STACK,
    of_microbatches: STACK,
    of_a_stack_that_is_carried: STACK,
    of_a_stack_that_the_loss_makes: STACK,
    of_a_stack_that_is_sharded_over_its_layers: r"\['embed'\]",
}


@pytest.mark.parametrize("loss", REFUSED)
def test_a_stack_that_is_not_read_one_layer_per_iteration_is_refused(tmp_path, loss):
    tx = on_disk(tmp_path, devices=2)
    state = tx.create(model_params())
    with pytest.raises(ValueError, match=rf"A loop reads params{REFUSED[loss]}, but not one layer per iteration"):
        tx.train_step(loss)(state, batch_of())
    with pytest.raises(ValueError, match=r"put jax\.checkpoint around one layer"):
        tx.eval_step(loss)(state.params, batch_of())
