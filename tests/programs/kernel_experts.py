"""Losses with experts that drop no token, and with attention over devices that divide the time steps."""

import math

import jax
import jax.numpy as jnp
import kernels
from jax import lax
from jax.sharding import PartitionSpec
from kernel_registry import DEVICES, HIDDEN, QKV, SEQUENCE, WIDTH, heads, layer, merged, norm
from registry import Allowed

EXPERTS = 6
EXPERT = {"gate": (WIDTH, EXPERTS), "up": (EXPERTS, WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH)}
TOP_K = "a `lax.top_k` outside of the `shard_map`"
OF_ALL = (
    "with microbatches, each device gathers and adds up the gradients of all experts, and plain `jit` only of its own. "
    "Experts on an axis (`expert_axis=`) stay divided"
)
SORTED = "a sort of all tokens by their experts"


def dropless(ragged_dot=lax.ragged_dot):
    """Tokens sorted by expert, two ragged products, and a scatter back."""

    def run(x, gates, chosen, up, down):
        tokens, who = x.reshape(-1, WIDTH), chosen.reshape(-1)
        order = jnp.argsort(who, stable=True)
        sizes = jnp.bincount(who, length=EXPERTS).astype(jnp.int32)
        token = order // chosen.shape[-1]
        h = ragged_dot(jax.nn.gelu(ragged_dot(tokens[token], up, sizes)), down, sizes)
        h = h * gates.reshape(-1)[order][:, None]
        return jnp.zeros_like(tokens).at[token].add(h.astype(x.dtype)).reshape(x.shape)

    return run


def routed(x, w):
    """The two best experts of each token, and their gates."""
    scores = jax.nn.softmax((norm(x) @ w["gate"]).astype(jnp.float32))
    gates, chosen = lax.top_k(scores, 2)
    return gates.astype(x.dtype), chosen


@layer("Experts", EXPERT, shared=TOP_K)
def experts(where, x, w):
    """Experts of each device's tokens in a `shard_map`: sort, `ragged_dot`, scatter"""
    run = where.per_device(dropless(), (0, 0, 0, None, None))
    return x + run(norm(x), *routed(x, w), w["up"], w["down"])


@layer("Experts", EXPERT)
def experts_routed_inside(where, x, w):
    """The same, and the router in the `shard_map`, too"""

    def local(x, gate, up, down):
        return x + dropless()(norm(x), *routed(x, {"gate": gate}), up, down)

    return where.per_device(local, (0, None, None, None))(x, w["gate"], w["up"], w["down"])


@layer("Experts", EXPERT, bare=True, shared=SORTED)
def experts_bare(where, x, w):
    """The same, bare: sort, `ragged_dot` and scatter of all tokens"""
    return x + dropless()(norm(x), *routed(x, w), w["up"], w["down"])


@layer(
    "Experts",
    {"gate": (WIDTH, DEVICES), "up": (DEVICES, WIDTH, HIDDEN), "down": (DEVICES, HIDDEN, WIDTH)},
    views=("global",),
    exceptions={limit: Allowed(1.5, OF_ALL, stages=(1,)) for limit in ("bytes", "memory")},
)
def experts_exchanged(where, x, w):
    """Experts over the data axis in a `shard_map`, with two `all_to_all`s"""
    gates, chosen = routed(x, w)
    weights = jnp.sum(jax.nn.one_hot(chosen, DEVICES, dtype=x.dtype) * gates[..., None], -2)

    def all_experts(x, weights, up, down):
        h = jnp.einsum("ebtf,efd->ebtd", jax.nn.gelu(jnp.einsum("btd,edf->ebtf", x, up)), down)
        return jnp.einsum("ebtd,bte->btd", h, weights)

    def local(x, weights, up, down):
        copies = jnp.where(weights > 0, 1, 0).astype(x.dtype)
        sent = lax.all_to_all(jnp.einsum("btd,bte->ebtd", x, copies), "data", 0, 0)
        h = lax.all_to_all(jax.nn.gelu(sent @ up[0]) @ down[0], "data", 0, 0)
        return jnp.einsum("ebtd,bte->btd", h, weights)

    if where.view == "global":
        rows = PartitionSpec("data")
        run = jax.shard_map(local, mesh=where.mesh, in_specs=(rows,) * 4, out_specs=rows, check_vma=False)
    else:
        run = all_experts
    return x + run(norm(x), weights, w["up"], w["down"])


def _whole(q, k, v):
    p = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) / math.sqrt(q.shape[-1]))
    return jnp.einsum("bhts,bshd->bthd", p.astype(v.dtype), v)


def _ring(q, k, v):
    top, total, o = -jnp.inf, 0.0, 0.0
    for step in range(SEQUENCE):
        scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) / math.sqrt(q.shape[-1])
        new = lax.stop_gradient(jnp.maximum(top, scores.max(-1, keepdims=True)))
        p, old = jnp.exp(scores - new), jnp.exp(top - new)
        total = total * old + p.sum(-1, keepdims=True)
        o = o * old + jnp.einsum("bhts,bshd->bhtd", p, v.astype(jnp.float32))
        top = new
        if step + 1 < SEQUENCE:
            k, v = (lax.ppermute(a, "sequence", [(i, (i + 1) % SEQUENCE) for i in range(SEQUENCE)]) for a in (k, v))
    return jnp.moveaxis(o / total, 1, 2).astype(q.dtype)


@layer("Sequences over devices", QKV, sequence=True)
def ring(where, x, w):
    """Ring attention: `ppermute` in a `shard_map` over rows and time steps"""
    run = _whole if where.view == "one" else where.over_sequence(_ring, 3)
    return merged(x, run(*heads(x, w)), w)


@layer("Sequences over devices", QKV, sequence=True)
def ulysses(where, x, w):
    """Ulysses: `all_to_all`s around a Pallas kernel in a `shard_map` over rows and time steps"""

    def exchanged(q, k, v):
        to_heads = lambda a: lax.all_to_all(a, "sequence", 2, 1, tiled=True)
        return lax.all_to_all(kernels.flash(*map(to_heads, (q, k, v))), "sequence", 1, 2, tiled=True)

    halves = [a.reshape(*a.shape[:2], 2 * a.shape[2], -1) for a in heads(x, w)]
    run = kernels.flash if where.view == "one" else where.over_sequence(exchanged, 3)
    return merged(x, run(*halves), w)
