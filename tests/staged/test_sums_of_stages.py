"""Cotangents of weights stay one partial sum per worker until they are gradients: stages all-reduce none of them."""

import jax
import jax.numpy as jnp
import pytest
from disk_models import batch_of, on_disk

from zerojax.staged.stage import Stage


def params():
    keys = jax.random.split(jax.random.key(0), 3)
    draw = lambda key, *shape: jax.random.normal(key, shape) / 4
    return {
        "embed": draw(keys[0], 26, 16),
        "w": draw(keys[1], 16, 24),
        "deep": draw(keys[2], 64, 2, 3),
        "scale": jnp.ones(16),
    }


def of_a_small_leaf(params, batch):
    """Of which two segments read a copy in bf16."""
    embed, w, scale = (params[name].astype(jnp.bfloat16) for name in ("embed", "w", "scale"))
    x = embed[batch["tokens"]] * scale
    return jnp.mean(((jnp.tanh(x @ w)[:, :16] * scale) @ w).astype(jnp.float32) ** 2)


def of_slices(params, batch):
    """Of a stack that is sharded over its layers, so that it is gathered before it is sliced."""
    x = params["embed"][batch["tokens"]] @ params["w"]
    return jnp.mean((jnp.tanh(x[:, :2] @ params["deep"][0]) - jnp.sin(x[:, 2:4] @ params["deep"][5])) ** 2)


CASES = {"a small leaf in bf16": of_a_small_leaf, "slices of a stack": of_slices}


@pytest.mark.parametrize("name", CASES)
def test_a_stage_all_reduces_no_cotangent_of_a_weight(tmp_path, monkeypatch, name):
    texts, made = [], Stage.__init__

    def recording(stage, *args):
        made(stage, *args)
        program = stage.backward
        stage.backward = lambda *args: texts.append(program.lower(*args).compile().as_text()) or program(*args)

    monkeypatch.setattr(Stage, "__init__", recording)
    tx = on_disk(tmp_path, devices=2)
    tx.train_step(CASES[name])(tx.create(params()), batch_of())
    assert any("reduce-scatter(" in text for text in texts)
    assert not any("all-reduce(" in text for text in texts)
