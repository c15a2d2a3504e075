"""Losses with Pallas kernels: attention, norms, products with parameters, losses and recurrences."""

import functools

import jax
import jax.numpy as jnp
import kernels
from jax import lax
from kernel_registry import HEAD, HEADS, MLP, QKV, TIME, WIDTH, head, heads, layer, merged, norm
from registry import Allowed

SUMMED = "a bare kernel that adds up a parameter's gradient over the rows, so that its rows are not independent"
NORMED = {**MLP, "scale": (WIDTH,), "offset": (WIDTH,)}
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


@layer("Attention", QKV)
def attention_heads_merged(where, x, w):
    """Attention of (B·H, T, 1, K) in a `shard_map`"""
    merge = lambda a: jnp.moveaxis(a, 2, 1).reshape(-1, TIME, 1, HEAD)
    o = where.per_device(kernels.flash, ROWS_3)(*map(merge, heads(x, w)))
    return merged(x, jnp.moveaxis(o.reshape(-1, HEADS, TIME, HEAD), 1, 2), w)


@layer("Attention", QKV)
def attention_vmapped(where, x, w):
    """Attention of one row, under `vmap` in a `shard_map`"""
    one = lambda q, k, v: kernels.flash(q[None], k[None], v[None])[0]
    return merged(x, where.per_device(jax.vmap(one), ROWS_3)(*heads(x, w)), w)


@layer("Attention", QKV)
def decode(where, x, w):
    """Attention of the last position to a cache, which the layer writes, in a `shard_map`"""
    q, k, v = heads(x, w)
    cache = jnp.zeros((2, x.shape[0], 2 * TIME, HEADS, HEAD), k.dtype)
    k, v = lax.dynamic_update_slice_in_dim(cache, jnp.stack([k, v]), 0, axis=2)
    o = where.per_device(kernels.decode, ROWS_3)(q[:, -1], k, v)
    return x + (o.reshape(-1, WIDTH) @ w["out"])[:, None]


@layer("Attention", QKV)
def softmax(where, x, w):
    """Attention by products, and its softmax in a `shard_map`"""
    q, k, v = heads(x, w)
    p = where.per_device(kernels.softmax, (0,))(jnp.einsum("bthd,bshd->bhts", q, k))
    return merged(x, jnp.einsum("bhts,bshd->bthd", p, v), w)


@layer("Norms", NORMED)
def layer_norm(where, x, w):
    """Layer norm in a `shard_map`, with its scale and offset as operands"""
    x = where.per_device(kernels.layer_norm, (0, None, None))(x, w["scale"], w["offset"])
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


@layer("Norms", NORMED, bare=True, shared=SUMMED)
def layer_norm_bare(where, x, w):
    """Layer norm, bare, with its scale and offset as operands"""
    x = kernels.layer_norm(x, w["scale"], w["offset"])
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


@layer("Norms", NORMED)
def rms_norm(where, x, w):
    """RMS norm in a `shard_map`; its scale is outside"""
    y = where.per_device(lambda x: kernels.rms_norm(x, jnp.ones(WIDTH, x.dtype)), (0,))(x)
    return x + jax.nn.gelu((y * w["scale"] + w["offset"]) @ w["up"]) @ w["down"]


@layer("Norms", NORMED)
def add_norm(where, x, w):
    """Residual sum and RMS norm in a `shard_map`, two rows and a parameter as operands"""
    y = jax.nn.gelu(norm(x) @ w["up"]) @ w["down"] + w["offset"]
    return where.per_device(kernels.add_norm, (0, 0, None))(x, y, w["scale"])


@layer("Norms", NORMED)
def dense_activation(where, x, w):
    """GELU alone in a `shard_map`"""
    y = where.per_device(kernels.gelu, (0,))(norm(x) @ w["up"])
    return x * w["scale"] + y @ w["down"] + w["offset"]


@layer("Products", MLP)
def linear(where, x, w):
    """Product and GELU in a `shard_map`, with a matrix as operand"""
    return x + where.per_device(kernels.linear, (0, None))(norm(x), w["up"]) @ w["down"]


@layer("Products", MLP, bare=True, shared=SUMMED)
def linear_bare(where, x, w):
    """Product and GELU, bare, with a matrix as operand"""
    return x + kernels.linear(norm(x), w["up"]) @ w["down"]


@layer("Products", {**MLP, "gate": MLP["up"]})
def glu(where, x, w):
    """Gated linear unit in a `shard_map`, with two matrices as operands"""
    return x + where.per_device(kernels.glu, (0, None, None))(norm(x), w["gate"], w["up"]) @ w["down"]


@layer("Products", MLP)
def whole_layer(where, x, w):
    """The whole layer in a `shard_map`, products outside of the kernel and inside"""
    local = lambda x, up, down: x + kernels.mlp(norm(x), up, down)
    return where.per_device(local, (0, None, None))(x, w["up"], w["down"])


@layer("Products", MLP)
def quantised(where, x, w):
    """Product with a weight in int8 in a `shard_map`"""
    return x + jax.nn.gelu(where.per_device(kernels.quantised, (0, None))(norm(x), w["up"])) @ w["down"]


@head("Losses")
def linear_xent(where, x, w, labels):
    """Product and cross entropy in one kernel, in a `shard_map`"""
    return where.per_device(kernels.linear_xent, (0, 0, None))(x, labels, w)


@head("Losses", bare=True, shared=SUMMED)
def linear_xent_bare(where, x, w, labels):
    """Product and cross entropy in one kernel, bare"""
    return kernels.linear_xent(x, labels, w)


@head("Losses")
def cross_entropy(where, x, w, labels):
    """Cross entropy of logits in a `shard_map`"""
    return where.per_device(kernels.xent, (0, 0))(x @ w, labels)


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
def mamba(where, x, w):
    """A gated recurrence over time in a `shard_map`"""
    y = norm(x)
    h = where.per_device(kernels.recurrence, (0, 0))(jax.nn.sigmoid(y @ w["decay"]), y @ w["in"])
    return x + jax.nn.silu(h) @ w["down"]


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


@layer("Recurrences", RECURRENT)
def mamba_bare(where, x, w):
    """The gated recurrence, bare"""
    y = norm(x)
    return x + jax.nn.silu(kernels.recurrence(jax.nn.sigmoid(y @ w["decay"]), y @ w["in"])) @ w["down"]


def _mixed(decay, x):
    combine = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])
    return lax.associative_scan(combine, (decay, x), axis=1)[1]


@layer("Recurrences", RECURRENT)
def associative(where, x, w):
    """The recurrence by `associative_scan`, and a kernel in a `shard_map`"""
    y = norm(x)
    h = _mixed(jax.nn.sigmoid(y @ w["decay"]), y @ w["in"])
    return x + where.per_device(functools.partial(kernels.gelu), (0,))(h) @ w["down"]
