"""Loops over time or layers whose parameters all iterations share, compiled for GPUs that are not there."""

import jax
import jax.numpy as jnp
import optax
import pytest
from absent_gpus import aot
from jax import lax

from zerojax import Tuning, zero_shard
from zerojax.gpus.devices import absent_mesh
from zerojax.inspect.hlo import read
from zerojax.inspect.roofline import overlap

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimized"), aot]
F32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)


def compiled(loss, params, batch):
    tx = zero_shard(
        optax.sgd(1e-3), stage=3, mesh=absent_mesh("h200:8", axes=("data",)), tuning=Tuning(persist_below=1)
    )
    return jax.jit(tx.value_and_grad(loss)).lower(tx.shard(params), batch).compile()


def test_the_next_recurrent_layer_is_gathered_during_the_loop_of_this_one():
    width, layers = 2048, 6

    def cell(p, state, x):
        i, f, g, o = jnp.split(x @ p["x"] + state[0] @ p["h"], 4, -1)
        c = jax.nn.sigmoid(f) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    def loss(params, batch):
        x = jnp.moveaxis(batch, 0, 1)
        for p in params:
            x = lax.scan(lambda *args: cell(p, *args), (jnp.zeros_like(x[0]),) * 2, x)[1]  # noqa: B023
        return jnp.mean(x.astype(jnp.float32) ** 2)

    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.bfloat16)
    params = [{"x": shape(width, 4 * width), "h": shape(width, 4 * width)}] * layers
    gathers = overlap(compiled(loss, params, shape(512, 64, width))).of("all-gather")
    assert gathers.hidden_share >= 0.7  # 0 before; the first of each pass has nothing before it


def test_a_shared_head_is_not_kept_for_a_summand_that_only_the_loss_reads():
    width, words, layers = 1024, 32768, 4

    def loss(params, x):
        def body(carry, w):
            x, total = carry
            x = jnp.tanh(x @ w)
            return (x, total + jax.nn.logsumexp(x @ params["head"], -1).mean()), None

        return lax.scan(jax.checkpoint(body), (x, jnp.float32(0)), params["layers"])[0][1]

    program = compiled(loss, {"head": F32(width, words), "layers": F32(layers, width, width)}, F32(256, width))
    entry = read(program.as_text()).text.partition("\nENTRY ")[2].splitlines()
    gathers = [i for i, line in enumerate(entry) if " all-gather-done(" in line and f"[{width},{words}]" in line]
    assert len(gathers) == 2
    forward = entry[gathers[0]].split()[0]
    assert not any(forward in line for line in entry[gathers[1] :])  # its last reader is before the backward pass
