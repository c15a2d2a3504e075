"""The programs of the stages: their products are those of plain jit, and they all-reduce no cotangent of a weight."""

import jax
import jax.numpy as jnp
import pytest
from disk_models import LOSSES, batch_of, model_params, on_disk
from jax.experimental import pallas as pl

from zerojax.inspect.hlo import read
from zerojax.inspect.roofline import kernels, product_flops
from zerojax.staged.program import Stage


@pytest.fixture
def launched(monkeypatch):
    """The compiled programs of the stages in the order in which a step runs them, each after its pass."""
    found, made = [], Stage.__init__

    def recorded(kind, program):
        return lambda *args: found.append((kind, program.lower(*args).compile())) or program(*args)

    def recording(stage, *args):
        made(stage, *args)
        for kind in ("forward", "backward"):
            setattr(stage, kind, recorded(kind, getattr(stage, kind)))

    monkeypatch.setattr(Stage, "__init__", recording)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["remat_loop", "remat_one_by_one"])
def test_stages_compute_the_products_of_plain_jit(tmp_path, launched, optimized, name):
    """On one device, and none twice, except inside of the user's `jax.checkpoint`.

    Plain jit runs the loop: XLA:CPU undoes a `jax.checkpoint` of layers that run one by one.
    """
    flops_of = lambda compiled: sum(product_flops(kernels(read(compiled))).values())
    tx = on_disk(tmp_path, devices=1)
    tx.train_step(LOSSES[name])(tx.create(model_params()), batch_of())
    plain = jax.jit(jax.value_and_grad(LOSSES["remat_loop"])).lower(model_params(), batch_of()).compile()
    assert sum(flops_of(compiled) for _, compiled in launched) == flops_of(plain) > 0


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


@pytest.mark.parametrize("loss", [of_a_small_leaf, of_slices])
def test_a_stage_all_reduces_no_cotangent_of_a_weight(tmp_path, launched, loss):
    """They stay one partial sum per worker until they are gradients."""
    tx = on_disk(tmp_path, devices=2)
    tx.train_step(loss)(tx.create(params()), batch_of())
    texts = [compiled.as_text() for kind, compiled in launched if kind == "backward"]
    assert any("reduce-scatter(" in text for text in texts)
    assert not any("all-reduce(" in text for text in texts)


def of_a_kernel(params, batch):
    """A Pallas kernel computes each row by itself."""
    x, row = params["embed"][batch["tokens"]], pl.BlockSpec((1, 16), lambda i: (i, 0))
    body = lambda ref, out: out.__setitem__(..., jnp.sin(ref[...]))
    sine = jax.custom_vjp(call := pl.pallas_call(body, x, grid=len(x), in_specs=[row], out_specs=row, interpret=True))
    sine.defvjp(lambda x: (call(x), x), lambda x, g: (g * jnp.cos(x),))
    return jnp.mean((sine(x) @ params["w"]) ** 2)


def test_a_kernel_runs_on_the_rows_of_each_device(tmp_path, launched):
    tx = on_disk(tmp_path, devices=2)
    tx.train_step(of_a_kernel)(tx.create(params()), batch_of())
    assert not any("f32[48,16]" in compiled.as_text() for kind, compiled in launched)


def test_a_kernel_that_runs_all_rows_is_named(tmp_path):
    loss = lambda params, x: jnp.mean((x + jax.pure_callback(lambda x: x, x, x)) @ params["w"])
    tx = on_disk(tmp_path, devices=2)
    with pytest.warns(UserWarning, match=r"`pure_callback` at test_stages.py:\d+ runs all rows"):
        tx.train_step(loss)(tx.create(params()), jnp.zeros((64, 256, 16)))
