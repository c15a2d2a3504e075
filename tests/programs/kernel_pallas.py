"""Losses with Pallas kernels: attention, norms, products with parameters, losses and recurrences."""

import jax
import jax.numpy as jnp
import kernels
from jax import lax
from kernel_registry import MLP, QKV, WIDTH, head, heads, layer, merged, norm
from registry import Allowed

SUMMED = "a bare kernel that adds up a parameter's gradient over the rows, so that its rows are not independent"
ROWS_3 = (0, 0, 0)


@layer("Attention", QKV)
def attention(where, x, w):
    """Attention in a `shard_map`"""
    return merged(x, where.per_device(kernels.flash, ROWS_3)(*heads(x, w)), w)


@layer("Attention", QKV)
def attention_bare(where, x, w):
    """Attention, bare"""
    return merged(x, kernels.flash(*heads(x, w)), w)


@layer("Attention", QKV)
def attention_rule_outside(where, x, w):
    """Attention, a `custom_vjp` whose forward and backward pass have a `shard_map` each"""

    @jax.custom_vjp
    def op(q, k, v):
        return where.per_device(kernels.flash, ROWS_3)(q, k, v)

    fwd = lambda *args: where.per_device(kernels.flash_fwd, ROWS_3, (0, (0,) * 5))(*args)
    bwd = lambda kept, g: tuple(where.per_device(kernels.flash_backward, (0,) * 6, ROWS_3)(*kept, g))
    op.defvjp(fwd, bwd)
    return merged(x, op(*heads(x, w)), w)


@layer("Attention", QKV)
def attention_time_major(where, x, w):
    """Attention of (T, B, H, K) in a `shard_map`, which moves the rows to dim 0 itself"""
    turned = lambda a: jnp.moveaxis(a, 0, 1)
    local = lambda *args: turned(kernels.flash(*map(turned, args)))
    return merged(x, turned(where.per_device(local, (1, 1, 1), 1)(*map(turned, heads(x, w)))), w)


@layer("Products", MLP)
def linear(where, x, w):
    """Product and GELU in a `shard_map`, with a matrix as operand"""
    return x + where.per_device(kernels.linear, (0, None))(norm(x), w["up"]) @ w["down"]


@layer("Products", MLP, bare=SUMMED)
def linear_bare(where, x, w):
    """Product and GELU, bare, with a matrix as operand"""
    return x + kernels.linear(norm(x), w["up"]) @ w["down"]


@layer("Products", MLP)
def whole_layer(where, x, w):
    """The whole layer in a `shard_map`, products outside of the kernel and inside"""
    local = lambda x, up, down: x + kernels.mlp(norm(x), up, down)
    return where.per_device(local, (0, None, None))(x, w["up"], w["down"])


@layer("Products", MLP)
def quantised(where, x, w):
    """Product with a weight in int8 in a `shard_map`"""
    return x + jax.nn.gelu(where.per_device(kernels.quantised, (0, None))(norm(x), w["up"])) @ w["down"]


# In device view, the compiler makes it one product with the transpose that follows.
TRANSPOSED = (
    "in bfloat16, the product of a weight's gradient stands in a `shard_map` of zerojax, so the compiler transposes "
    "its result and widens it to float32 in one operation, before the activations of earlier layers are freed"
)


@head("Losses", exceptions={"memory": Allowed(1.12, TRANSPOSED, stages=(1,))})
def mean_inside(where, x, w, labels):
    """Product, cross entropy and the mean over all rows in a `shard_map`, with a `psum`"""

    def local(x, labels, w):
        mean = kernels.linear_xent(x, labels, w).mean()
        return lax.pmean(mean, "data") if where.view == "global" else mean

    return where.per_device(local, (0, 0, None), None)(x, labels, w)


RECURRENT = {"in": (WIDTH, WIDTH), "decay": (WIDTH, WIDTH), "down": (WIDTH, WIDTH)}


@layer("Recurrences", RECURRENT)
def mamba_chunks(where, x, w):
    """The same in a scan over chunks of time, each a kernel in a `shard_map`; the state is carried"""
    y = norm(x)
    chunks = lambda a: jnp.moveaxis(a.reshape(a.shape[0], 3, -1, WIDTH), 1, 0)
    decay, new = chunks(jax.nn.sigmoid(y @ w["decay"])), chunks(y @ w["in"])
    run = where.per_device(kernels.recurrence, (0, 0))

    def chunk(state, now):
        h = run(now[0], now[1].at[:, 0].add(now[0][:, 0] * state))
        return h[:, -1], h

    h = lax.scan(chunk, jnp.zeros_like(x[:, 0]), (decay, new))[1]
    return x + jax.nn.silu(jnp.moveaxis(h, 0, 1).reshape(x.shape)) @ w["down"]
