"""Text that a loop in Python generates from parameters on disk is the text that it generates in memory."""

import jax
import numpy as np
import optax
import pytest
from disk_models import on_disk, sharded
from gpt import GPT, generator

MODEL, COUNT = GPT(width=32, layers=2, heads=2), 4
PROMPTS = np.random.default_rng(1).integers(256, size=(8, 5))


@pytest.fixture(scope="module")
def params():
    """Blocks that change the stream so much that what follows is not the last byte again."""
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(MODEL.init, jax.random.key(0), PROMPTS)
    return jax.tree.map(lambda x: random.standard_normal(x.shape, np.float32), shapes)


def generated(tx, params):
    """Bytes that are drawn after each prompt, and their logits, with a cache of keys and values."""

    def forward(params, tokens, cache, caching):
        logits, cache = caching.apply(params | cache, tokens, mutable=["cache"])
        return logits[:, -1], cache

    step, caching = tx.eval_step(forward), MODEL.clone(context=PROMPTS.shape[1] + COUNT)
    logits, cache = step(params, PROMPTS, {}, caching)
    drawn, scores = [], []
    for key in jax.random.split(jax.random.key(2), COUNT):
        byte = jax.random.categorical(key, logits / 20.0)
        drawn.append(jax.device_get(byte))
        scores.append(jax.device_get(logits))
        logits, cache = step(params, byte[:, None], cache, caching)
    return np.array(drawn).T, np.array(scores)


@pytest.mark.slow
def test_text_is_that_of_parameters_in_memory(tmp_path, params):
    disk, memory = on_disk(tmp_path, optax.identity(), devices=2), sharded(optax.identity(), devices=2)
    drawn, logits = generated(disk, disk.shard(params))
    expected, wanted = generated(memory, memory.shard(params))
    assert len(np.unique(drawn)) > 3
    np.testing.assert_array_equal(drawn, expected)
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())  # float32 sums


def test_an_eval_step_inside_of_jit_says_why_it_cannot_run(tmp_path, params):
    tx = on_disk(tmp_path, optax.identity(), devices=2)
    with pytest.raises(TypeError, match="Call it from Python"):
        generator(tx, MODEL, COUNT)(tx.shard(params), PROMPTS, jax.random.key(0))
