"""The Llama example: published weights, read into shards, give the published model's logits."""

import json
import sys

import jax
import llama
import numpy as np
import optax
import pytest
from conftest import mesh_of
from safetensors.numpy import load_file, save_file

from zerojax import Tuning, zero_shard
from zerojax.checkpoint import export, import_params

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TOKENS = np.random.default_rng(1).integers(SIZES["vocab_size"], size=(8, 12)).astype(np.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Random weights under the published names, in the published shapes."""
    folder, rng = tmp_path_factory.mktemp("llama"), np.random.default_rng(0)
    draw = lambda *shape: (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)
    tensors = {"model.embed_tokens.weight": draw(61, 32) * 6, "model.norm.weight": 1 + draw(32)}
    for i in range(2):
        shapes = {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32)}
        layer = {f"self_attn.{name}.weight": draw(*shape) for name, shape in shapes.items()}
        layer |= {f"mlp.{name}.weight": draw(48, 32) for name in ("gate_proj", "up_proj")}
        layer |= {"mlp.down_proj.weight": draw(32, 48), "self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
        layer |= {f"{name}_layernorm.weight": 1 + draw(32) for name in ("input", "post_attention")}
        tensors |= {f"model.layers.{i}.{name}": x for name, x in layer.items()}
    save_file(tensors | {"lm_head.weight": draw(61, 32)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(SIZES | {"rope_parameters": LLAMA_3}))
    return folder


def reference(tensors, tokens):
    """The published model, position by position where that is plainer; float64."""
    w = {name: x.astype(np.float64) for name, x in tensors.items()}
    norm = lambda x, scale: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale
    frequency = 500.0 ** (-np.arange(4) / 4)
    for k, f in enumerate(frequency):  # low: divided by 8; high: as it is; between: some of both
        cycles = 64 * f / (2 * np.pi)
        smooth = (cycles - 1) / (4 - 1)
        frequency[k] = f / 8 if cycles < 1 else f if cycles > 4 else (1 - smooth) * f / 8 + smooth * f
    rotation = np.exp(1j * np.arange(tokens.shape[1])[:, None, None] * frequency)

    def rotate(x):
        rotated = (x[..., :4] + 1j * x[..., 4:]) * rotation
        return np.concatenate([rotated.real, rotated.imag], -1)

    x = w["model.embed_tokens.weight"][tokens]
    for i in range(2):
        layer = {name.removeprefix(f"model.layers.{i}."): a for name, a in w.items() if f".{i}." in name}
        h = norm(x, layer["input_layernorm.weight"])
        q, k, v = ((h @ layer[f"self_attn.{n}_proj.weight"].T).reshape(*h.shape[:2], -1, 8) for n in "qkv")
        k, v = (np.repeat(a, 2, axis=2) for a in (rotate(k), v))  # two heads share one of keys and values
        scores = np.einsum("bqhd,bkhd->bhqk", rotate(q), k) / np.sqrt(8)
        scores[..., np.triu(np.ones(scores.shape[-2:], bool), 1)] = -np.inf
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        attended = np.einsum("bhqk,bkhd->bqhd", scores / scores.sum(-1, keepdims=True), v)
        x = x + attended.reshape(x.shape) @ layer["self_attn.o_proj.weight"].T
        h = norm(x, layer["post_attention_layernorm.weight"])
        gate = h @ layer["mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
    return norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


def read(folder, stage, count=8):
    config = llama.read_config(folder)
    tx = zero_shard(optax.identity(), stage=stage, mesh=mesh_of(count), tuning=Tuning(persist_below=64))
    params = import_params(folder, tx.shard(llama.shapes_of(config)), mapping=llama.published(config))
    return params, tx.eval_step(lambda params, tokens: llama.Llama(config).apply(params, tokens))(params, TOKENS)


@pytest.mark.slow
def test_published_weights_give_the_published_models_logits_and_go_back(folder, tmp_path):
    params, logits = read(folder, stage=3)
    tensors = load_file(folder / "model.safetensors")
    np.testing.assert_allclose(logits, reference(tensors, TOKENS), atol=1e-4)  # float32 against float64; up to 10
    mapping = llama.published(llama.read_config(folder))
    (written,) = export(jax.tree.map(np.asarray, params), tmp_path / "out", mapping=mapping)
    expected = {name: x for name, x in tensors.items() if "inv_freq" not in name}
    found = load_file(written)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)


@pytest.mark.slow
def test_the_script_continues_as_the_published_model_would(folder, monkeypatch, capsys):
    monkeypatch.setattr(llama, "mesh_of", lambda count: mesh_of(count or 8))  # JAX has begun with eight
    monkeypatch.setattr(sys, "argv", ["llama.py", str(folder), "--tokens", "1", "5", "--new", "4"])
    llama.main()
    tokens = [int(token) for token in capsys.readouterr().out.split()]
    logits = reference(load_file(folder / "model.safetensors"), np.array([tokens]))
    assert tokens[:2] == [1, 5]
    assert tokens[2:] == logits[0, 1:-1].argmax(-1).tolist()


def test_a_config_that_this_model_is_not_is_refused(folder, tmp_path):
    for change in ({"attention_bias": True}, {"hidden_act": "gelu"}, {"rope_parameters": {"rope_type": "yarn"}}):
        (tmp_path / "config.json").write_text(json.dumps(SIZES | {"rope_theta": 1e4} | change))
        with pytest.raises(SystemExit, match="has biases, an activation or a position embedding that is not here"):
            llama.read_config(tmp_path)
    old = json.loads((folder / "config.json").read_text())
    old["rope_theta"] = old["rope_parameters"]["rope_theta"]
    old["rope_scaling"] = old.pop("rope_parameters")
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert llama.read_config(tmp_path) == llama.read_config(folder)
