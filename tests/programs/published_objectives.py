"""Language models, losses and ways to train as public repositories write them."""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from layout_programs import ATTENTION, ROW_MLP, attention, over_layers, stacked, unrolled
from published_networks import HEAD_OUT
from published_programs import (
    EMBEDDED,
    NET,
    PAIRS,
    POLICY,
    TOKENS,
    log_sigmoid,
    net,
)
from registry import HEAD, HEADS, HIDDEN, MANY, OUT, ROWS, TIME, VOCABULARY, WIDTH, Allowed, ids, norm, program, xent

GROUPS = 4
LLAMA = {
    "q": (WIDTH, HEADS, HEAD * 2),
    "kv": (WIDTH, 2, GROUPS, HEAD * 2),
    "o": (HEADS, HEAD * 2, WIDTH),
    "gate": (WIDTH, HIDDEN),
    **ROW_MLP,
}


def rotated(x):
    """Rotary positions of (B, T, heads, features)."""
    a, b = jnp.split(x, 2, -1)
    angle = jnp.arange(x.shape[1])[:, None, None] * 0.1 ** jnp.arange(a.shape[-1])
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)


def grouped(x, w, mask):
    """Attention of grouped queries, and a gated MLP."""
    q, (k, v) = jnp.einsum("btd,dhk->bthk", norm(x), w["q"]), jnp.einsum("btd,dcgk->cbtgk", norm(x), w["kv"])
    q, k = rotated(q).reshape(*q.shape[:2], GROUPS, -1, q.shape[-1]), rotated(k)
    weight = jnp.where(mask[:, None, None], jnp.einsum("btghk,bsgk->bghts", q, k) / HEAD**0.5, -1e9)
    h = jnp.einsum("bghts,bsgk->btghk", jax.nn.softmax(weight), v)
    x = x + jnp.einsum("bthk,hkd->btd", h.reshape(*x.shape[:2], HEADS, -1), w["o"])
    return x + (jax.nn.silu(norm(x) @ w["gate"]) * (norm(x) @ w["up"])) @ w["down"]


PACKED = {"x": TOKENS, "segment": ids(ROWS, TIME)}
DECODER = {**EMBEDDED, "layers": stacked(LLAMA), "head": (WIDTH, VOCABULARY)}


@program("Published", DECODER, PACKED)
def packed_decoder(p, batch):
    """AI-Hypercomputer/maxtext: packed documents, grouped queries, rotary positions, a z-loss; scanned, remat"""
    segment, labels = batch["segment"], batch["x"][:, 1:]
    mask = (segment[:, :, None] == segment[:, None]) & jnp.tri(TIME, dtype=bool)
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    layer = jax.checkpoint(lambda x, w: (grouped(x, w, mask), None), policy=policy)
    logits = lax.scan(layer, p["embed"][batch["x"][:, :-1]], p["layers"])[0] @ p["head"]
    loss = xent(logits, labels) + 1e-4 * jax.nn.logsumexp(logits, -1) ** 2
    weight = segment > 0
    return jnp.sum(loss * weight) / jnp.maximum(jnp.sum(weight), 1)


HISTORY = {"x": ids(ROWS, TIME), "next": ids(ROWS, TIME), "other": ids(ROWS, TIME, 4)}


@program("Published", {"items": (1000, WIDTH), "place": (TIME, WIDTH), "layers": unrolled(ATTENTION)[:2]}, HISTORY)
def recommended_next(p, batch):
    """kang205/SASRec: the next item against sampled ones"""
    x = over_layers(lambda x, w: attention(x, w, "bt"), p["items"][batch["x"]] + p["place"], p["layers"], False)
    right = jnp.einsum("btd,btd->bt", x, p["items"][batch["next"]])
    wrong = jnp.einsum("btd,btnd->btn", x, p["items"][batch["other"]])
    there = batch["x"] > 0
    return -jnp.sum(there * (log_sigmoid(right) + log_sigmoid(-wrong).sum(-1))) / jnp.sum(there)


SPEECH = {"in": (5, WIDTH, WIDTH), "layers": unrolled(ATTENTION)[:2], "head": (WIDTH, 36)}


@program("Published", SPEECH, {"x": (ROWS, 40, WIDTH), "n": ids(ROWS), "y": ids(ROWS, 6), "m": ids(ROWS)})
def speech_ctc(p, batch):
    """speechbrain/speechbrain: a convolution over time, attention, and `optax.ctc_loss`"""
    x = lax.conv_general_dilated(batch["x"], p["in"], (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    x = over_layers(lambda x, w: attention(x, w, "bt"), x, p["layers"], False)
    ends = (jnp.arange(20) >= batch["n"][:, None]) * 1.0, (jnp.arange(6) >= batch["m"][:, None]) * 1.0
    return optax.ctc_loss(x @ p["head"], ends[0], batch["y"], ends[1]).mean()


ADAPTER = {"qkv_a": (WIDTH, 16), "qkv_b": (16, 3, HEADS, HEAD), "up_a": (WIDTH, 16), "up_b": (16, HIDDEN)}


@program("Published", {"layers": unrolled(ADAPTER)}, TOKENS, args=(POLICY,))
def low_rank(p, batch, base):
    """huggingface/peft: LoRA beside a frozen model that the loss is given"""

    def layer(x, w):
        w, a = w
        qkv = w["qkv"] + jnp.einsum("dr,rchk->dchk", a["qkv_a"], a["qkv_b"])
        return attention(x, {**w, "qkv": qkv, "up": w["up"] + a["up_a"] @ a["up_b"]}, "bt")

    x = base["embed"][batch[:, :-1]]
    for w, a in zip(base["layers"], p["layers"], strict=True):
        x = layer(x, (w, a))
    return xent(x @ base["embed"].T, batch[:, 1:]).mean()


BYOL = {"net": NET, "project": (OUT, WIDTH), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}


@program("Published", BYOL, {"x": (MANY, WIDTH), "y": (MANY, WIDTH)}, shared="a covariance over the batch")
def covariances(p, batch):
    """facebookresearch/vicreg: variance and covariance of the features over the whole batch"""
    a, b = (jax.nn.relu(net(p["net"], x) @ p["project"] @ p["up"]) @ p["down"] for x in (batch["x"], batch["y"]))

    def spread(z):
        z = z - z.mean(0)
        cov = z.T @ z / (len(z) - 1)
        off = jnp.sum(cov**2) - jnp.sum(jnp.diagonal(cov) ** 2)
        return jax.nn.relu(1 - jnp.sqrt(z.var(0) + 1e-4)).mean() + off / WIDTH

    return 25 * jnp.mean((a - b) ** 2) + spread(a) + spread(b)


SIGLIP = {"image": {"layers": unrolled(ATTENTION)[:2], **HEAD_OUT}, "text": {**EMBEDDED, **HEAD_OUT}, "scale": (2,)}


@program("Published", SIGLIP, {"x": (ROWS, TIME, WIDTH), "y": ids(ROWS, TIME)}, shared="every pair of rows is compared")
def sigmoid_pairs(p, batch):
    """google-research/big_vision: SigLIP, the sigmoid of every pair of image and text"""
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    x = over_layers(lambda x, w: attention(x, w, "bt"), batch["x"], p["image"]["layers"], False)
    a, b = unit(x.mean(1) @ p["image"]["head"]), unit(p["text"]["embed"][batch["y"]].mean(1) @ p["text"]["head"])
    logits = a @ b.T * jnp.exp(p["scale"][0]) + p["scale"][1]
    return -jnp.mean(jnp.sum(log_sigmoid(logits * (2 * jnp.eye(len(a)) - 1)), -1))


HYPER = {"code": (WIDTH, 40), "up": (40, WIDTH, 36), "down": (40, 36, 5)}


FULL = "full gradients are temporary here and results of plain jit, and the activations are small"
LARGE = {"memory": Allowed(1.4, FULL, (1, 2))}


@program("Published", HYPER, {"c": (ROWS, WIDTH), "x": (ROWS, 20, WIDTH), "y": (ROWS, 20, 5)}, exceptions=LARGE)
def hypernetwork(p, batch):
    """hardmaru/supercell: weights of a small network by another network, for each row"""
    code = jnp.tanh(batch["c"] @ p["code"])
    up, down = jnp.einsum("bc,cde->bde", code, p["up"]), jnp.einsum("bc,cde->bde", code, p["down"])
    one = lambda x, up, down: jax.nn.relu(x @ up) @ down
    return jnp.mean((jax.vmap(one)(batch["x"], up, down) - batch["y"]) ** 2)


@program("Published", {"in": (2 * WIDTH, HIDDEN), "out": (HIDDEN, WIDTH), **HEAD_OUT}, {**PAIRS, "label": ids(MANY)})
def equilibrium(p, batch):
    """locuslab/deq: a fixed point by a loop, differentiated implicitly by a rule of its own"""

    def layer(p, z, x):
        return jnp.tanh(jnp.concatenate([z, x], -1) @ p["in"]) @ p["out"] / 2

    def looped(f, start):
        return lax.fori_loop(0, 6, lambda _, z: f(z), start)

    @jax.custom_vjp
    def solve(p, x):
        return looped(lambda z: layer(p, z, x), jnp.zeros_like(x))

    def forward(p, x):
        z = solve(p, x)
        return z, (p, x, z)

    def backward(saved, g):
        p, x, z = saved
        _, of_z = jax.vjp(lambda z: layer(p, z, x), z)
        g = looped(lambda u: g + of_z(u)[0], g)
        _, of_others = jax.vjp(lambda p, x: layer(p, z, x), p, x)
        return of_others(g)

    solve.defvjp(forward, backward)
    return xent(solve({k: p[k] for k in ("in", "out")}, batch["x"]) @ p["head"], batch["label"]).mean()
