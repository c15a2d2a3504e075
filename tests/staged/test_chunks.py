"""Parameters on disk: a stack of layers has one chunk per layer, everything else has chunks of `chunk_bytes`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of

from zerojax import Offload, Precision, zero_shard
from zerojax.layout.chunked import is_chunked

NORMAL = lambda i, *shape: jax.random.normal(jax.random.key(i), shape) / shape[-2] ** 0.5
PARAMS = {
    "up": NORMAL(0, 128, 352),
    "down": NORMAL(1, 352, 128),
    "heads": NORMAL(2, 128, 8, 16),
    "layers": {"w": NORMAL(3, 4, 128, 128), "bias": NORMAL(4, 4, 128)},
    "adapters": {"frozen": NORMAL(5, 3, 128, 8), "a": NORMAL(6, 3, 128, 8), "scale": jnp.ones((3, 128))},
}
ROWS = np.asarray(jax.random.normal(jax.random.key(9), (16, 128)))


def loss(params, x):
    h = jnp.tanh(x @ params["up"]) @ params["down"]
    h, _ = jax.lax.scan(lambda h, p: (jnp.tanh(h @ p["w"] + p["bias"]), None), h, params["layers"])
    h, _ = jax.lax.scan(lambda h, p: (h + h @ p["a"] @ p["frozen"].T * p["scale"], None), h, params["adapters"])
    return jnp.mean(jnp.einsum("bi,ijk->bjk", h, params["heads"]) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [None, Precision.bf16()])
def test_only_stacks_have_a_chunk_per_row(precision, tmp_path):
    offload = Offload(optimizer="disk", params="disk", path=tmp_path, chunk_bytes="16 KB")
    options = {"stage": 3, "mesh": mesh_of(8), "persist_below": 64, "precision": precision}
    options["trainable"] = lambda path, leaf: "frozen" not in path
    tx, plain = (zero_shard(optax.sgd(0.1, momentum=0.9), offload=o, **options) for o in (offload, None))
    state, expected = tx.create(PARAMS), plain.create(PARAMS)
    nodes = jax.tree_util.tree_flatten_with_path(state.params, is_leaf=is_chunked)[0]
    counts = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in nodes if is_chunked(x)}
    for path, node in counts.items():
        is_stack = path.startswith(("layers", "adapters"))
        assert node.is_by_row == is_stack, path
        if not is_stack:
            assert len(node.chunking.extents) <= 2 * -(-node.leaf.local_bytes // 16_000), path
    step, same = tx.train_step(loss), plain.train_step(loss)
    for _ in range(3):
        (state, metrics), (expected, wanted) = step(state, ROWS), same(expected, ROWS)
        np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=1e-5 if precision is None else 2e-2)
    # Sums are in another order, in bfloat16 with 8 bits.
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 if precision is None else 2e-2)
    jax.tree.map(close, tx.unshard(state.params), plain.unshard(expected.params))
