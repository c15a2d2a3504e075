"""Networks as public repositories write them: recurrent, state-space, vision, scientific and generative ones."""

import jax
import jax.numpy as jnp
from jax import lax
from layout_programs import ATTENTION, ROW_MLP, attention, over_layers, stacked, unrolled
from published_programs import EMBEDDED, KEY, SERIES, TOKENS, stop
from registry import HEAD, HEADS, OUT, ROWS, TIME, VOCABULARY, WIDTH, Allowed, ids, norm, program, xent

HEAD_OUT = {"head": (WIDTH, OUT)}
IMAGES = {"x": (ROWS, 16, 16, 5), "y": ids(ROWS)}


def mlp(x, w):
    """A residual block of rows `x @ W`."""
    return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"]


def tied(p, x, batch):
    """Cross-entropy with logits by the embedding."""
    return xent(norm(x) @ p["embed"].T, batch[:, 1:]).mean()


RWKV = {"rkv": (3, WIDTH, WIDTH), "decay": (WIDTH,), "bonus": (WIDTH,), "out": (WIDTH, WIDTH), **ROW_MLP}


def time_mixed(x, w):
    """A block of RWKV: each token mixed with the one before, and a weighted mean over the past in a loop."""
    h = norm(x)
    h = (h + jnp.pad(h, ((0, 0), (1, 0), (0, 0)))[:, :-1]) / 2
    r, k, v = jnp.einsum("btd,cde->ctbe", h, w["rkv"])

    def step(carry, kv):
        top, bottom = carry
        k, v = jnp.exp(kv[0]), kv[1]
        now = jnp.exp(w["bonus"]) * k
        seen = (top + now * v) / (bottom + now)
        fade = jnp.exp(-jnp.exp(w["decay"]))
        return (fade * top + k * v, fade * bottom + k), seen

    zeros = jnp.zeros_like(k[0])
    seen = lax.scan(step, (zeros, zeros), (k, v))[1]
    x = x + (jax.nn.sigmoid(r) * seen).swapaxes(0, 1) @ w["out"]
    return x + jnp.square(jax.nn.relu(norm(x) @ w["up"])) @ w["down"]


PEELED = (
    "the first and last layers stand outside of the loop, and XLA unrolls the one that remains. Seven layers need 1.36"
)


@program("Published", {**EMBEDDED, "layers": stacked(RWKV)}, TOKENS, exceptions={"memory": Allowed(1.7, PEELED, (3,))})
def rwkv(p, batch):
    """BlinkDL/RWKV-LM: a loop over time in a scan over layers"""
    return tied(p, over_layers(time_mixed, p["embed"][batch[:, :-1]], p["layers"]), batch)


S5 = {"decay": (40,), "b": (WIDTH, 40, 2), "c": (40, WIDTH, 2), **ROW_MLP}


def diagonal(x, w):
    """A complex diagonal state-space layer."""
    a = jnp.exp(-jnp.exp(w["decay"]) + 1j * jnp.arange(40.0))
    u = norm(x) @ (w["b"][..., 0] + 1j * w["b"][..., 1])
    join = lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1])
    _, state = lax.associative_scan(join, (jnp.broadcast_to(a, u.shape), u), axis=1)
    return mlp(x + jnp.real(state @ (w["c"][..., 0] + 1j * w["c"][..., 1])), w)


@program("Published", {**HEAD_OUT, "layers": unrolled(S5)}, SERIES)
def s5(p, batch):
    """lindermanlab/S5: complex diagonal states, by an associative scan"""
    x = over_layers(diagonal, batch["x"], p["layers"], False)
    return xent(x.mean(1) @ p["head"], batch["y"]).mean()


RSSM = {"post": (WIDTH + 112, 96), "gru": (3, 96 + 112, 112), "prior": (112, 96), "out": (112 + 96, WIDTH)}


@program("Published", RSSM, {"x": (ROWS, TIME, WIDTH)}, args=KEY)
def world_model(p, batch, key):
    """danijar/dreamerv3: a recurrent state with categorical samples, straight-through, and a balanced divergence"""

    def step(carry, x):
        h, z = carry
        r, u, n = jnp.einsum("bd,cde->cbe", jnp.concatenate([z, h], -1), p["gru"])
        h = h + jax.nn.sigmoid(u - 1) * (jnp.tanh(jax.nn.sigmoid(r) * n) - h)
        prior = jax.nn.log_softmax((h @ p["prior"]).reshape(-1, 6, 16))
        post = jax.nn.log_softmax((jnp.concatenate([x[0], h], -1) @ p["post"]).reshape(-1, 6, 16))
        hot = jax.nn.one_hot(jnp.argmax(post + x[1], -1), 16)
        z = (hot + jnp.exp(post) - stop(jnp.exp(post))).reshape(-1, 96)
        divergence = lambda a, b: jnp.sum(jnp.exp(a) * (a - b), (-2, -1))
        kl = divergence(stop(post), prior) + 0.1 * divergence(post, stop(prior))
        return (h, z), (jnp.concatenate([h, z], -1) @ p["out"], kl)

    x = batch["x"].swapaxes(0, 1)
    start = jnp.zeros((x.shape[1], 112)), jnp.zeros((x.shape[1], 96))
    noise = jax.random.gumbel(key, (*x.shape[:2], 6, 16))
    _, (seen, kl) = lax.scan(step, start, (x, noise))
    return jnp.mean((seen - x) ** 2) + kl.mean()


BAHDANAU = {**EMBEDDED, "enc": (WIDTH, 112), "query": (112, 64), "key": (112, 64), "score": (64,)}


@program(
    "Published",
    {**BAHDANAU, "gru": (3, WIDTH + 2 * 112, 112), "head": (112, VOCABULARY)},
    {"x": ids(ROWS, 32), "y": TOKENS},
)
def seq2seq(p, batch):
    """google/seq2seq: a recurrent decoder that attends to the encoder's states at every step"""
    seen = jnp.tanh(p["embed"][batch["x"]] @ p["enc"])
    keys = seen @ p["key"]

    def step(h, x):
        score = jnp.tanh(keys + (h @ p["query"])[:, None]) @ p["score"]
        context = jnp.einsum("bs,bsd->bd", jax.nn.softmax(score), seen)
        r, u, n = jnp.einsum("bd,cde->cbe", jnp.concatenate([x, context, h], -1), p["gru"])
        h = h + jax.nn.sigmoid(u) * (jnp.tanh(jax.nn.sigmoid(r) * n) - h)
        return h, h

    start = seen.mean(1)
    h = lax.scan(step, start, p["embed"][batch["y"][:, :-1].T])[1]
    return xent(h @ p["head"], batch["y"][:, 1:].T).mean()


MAE = {"patch": (WIDTH, WIDTH), "mask": (WIDTH,), "place": (TIME, WIDTH), "head": (WIDTH, WIDTH)}


@program(
    "Published",
    {**MAE, "encoder": unrolled(ATTENTION)[:2], "decoder": unrolled(ATTENTION)[:1]},
    {"x": (ROWS, TIME, WIDTH)},
    args=KEY,
)
def masked_autoencoder(p, batch, key):
    """facebookresearch/mae: a quarter of the patches, chosen by sorted noise, and all of them restored"""
    order = jnp.argsort(jax.random.uniform(key, batch["x"].shape[:2]), 1)
    back = jnp.argsort(order, 1)[..., None]
    x = batch["x"] @ p["patch"] + p["place"]
    layer = lambda x, w: attention(x, w, "bt")
    kept = over_layers(layer, jnp.take_along_axis(x, order[:, :6, None], 1), p["encoder"], False)
    masked = jnp.broadcast_to(p["mask"], (len(x), TIME - 6, WIDTH))
    x = jnp.take_along_axis(jnp.concatenate([kept, masked], 1), back, 1) + p["place"]
    x = over_layers(layer, x, p["decoder"], False) @ p["head"]
    return jnp.mean((back[..., 0] >= 6) * jnp.mean((x - batch["x"]) ** 2, -1))


SWIN = {"patch": (5, WIDTH), "layers": unrolled(ATTENTION)[:2], "merge": (4 * WIDTH, WIDTH), "low": ATTENTION}


@program("Published", {**SWIN, **HEAD_OUT}, IMAGES)
def shifted_windows(p, batch):
    """microsoft/Swin-Transformer: windows joined to the rows, shifted by `jnp.roll`, and patches merged"""

    def windowed(x, w, size=4):
        b, n, _, d = x.shape
        parts = x.reshape(b, n // size, size, n // size, size, d).transpose(0, 1, 3, 2, 4, 5)
        parts = attention(parts.reshape(-1, size * size, d), w, "bt")
        parts = parts.reshape(b, n // size, n // size, size, size, d).transpose(0, 1, 3, 2, 4, 5)
        return parts.reshape(x.shape)

    x = batch["x"] @ p["patch"]
    x = windowed(x, p["layers"][0])
    x = jnp.roll(windowed(jnp.roll(x, (-2, -2), (1, 2)), p["layers"][1]), (2, 2), (1, 2))
    x = jnp.concatenate([x[:, i::2, j::2] for i in range(2) for j in range(2)], -1) @ p["merge"]
    return xent(windowed(x, p["low"]).mean((1, 2)) @ p["head"], batch["y"]).mean()


CODES = {"in": (3, 3, 5, 40), "down": (3, 3, 40, 56), "codes": (96, 56), "up": (3, 3, 56, 40), "out": (3, 3, 40, 5)}


def conv(x, w, stride=1):
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


@program("Published", CODES, {"x": (ROWS, 16, 16, 5)})
def vector_quantised(p, batch):
    """CompVis/taming-transformers: the nearest code, straight-through, with both losses of the codes"""
    z = conv(jax.nn.silu(conv(batch["x"], p["in"], 2)), p["down"])
    far = jnp.sum(z**2, -1, keepdims=True) - 2 * z @ p["codes"].T + jnp.sum(p["codes"] ** 2, -1)
    q = p["codes"][jnp.argmin(far, -1)]
    commitment = 0.25 * jnp.mean((stop(q) - z) ** 2) + jnp.mean((q - stop(z)) ** 2)
    z = z + stop(q - z)
    z = jnp.repeat(jnp.repeat(jax.nn.silu(conv(z, p["up"])), 2, 1), 2, 2)
    return jnp.mean((conv(z, p["out"]) - batch["x"]) ** 2) + commitment


CROSS = {"query": (WIDTH, HEADS, HEAD), "kv": (WIDTH, 2, HEADS, HEAD), "back": (HEADS, HEAD, WIDTH), **ATTENTION}
PERCEIVER = {"in": (WIDTH, WIDTH), "latents": (14, WIDTH), "layers": unrolled(CROSS)[:2], **HEAD_OUT}


@program("Published", PERCEIVER, {"x": (ROWS, 56, WIDTH), "y": ids(ROWS)})
def perceiver(p, batch):
    """google-deepmind/deepmind-research: Perceiver, latents that attend to a long input again and again"""
    seen = batch["x"] @ p["in"]
    x = jnp.broadcast_to(p["latents"], (len(seen), 14, WIDTH))
    for w in p["layers"]:
        q, (k, v) = jnp.einsum("btd,dhk->bthk", norm(x), w["query"]), jnp.einsum("bsd,dchk->cbshk", seen, w["kv"])
        weight = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k) / HEAD**0.5)
        x = attention(x + jnp.einsum("bhts,bshk,hkd->btd", weight, v, w["back"]), w, "bt")
    return xent(x.mean(1) @ p["head"], batch["y"]).mean()


MODES = {"re": (6, 4, 40, 40), "im": (6, 4, 40, 40), "skip": (40, 40)}
FNO = {"in": (5, 40), "layers": unrolled(MODES), "out": (40, 5)}


@program("Published", FNO, {"x": (ROWS, 16, 16, 5)})
def fourier_operator(p, batch):
    """neuraloperator/neuraloperator: products with the lowest modes of a Fourier transform"""
    x = batch["x"] @ p["in"]
    for w in p["layers"]:
        modes = jnp.fft.rfft2(x, axes=(1, 2))
        low = jnp.einsum("bxyd,xyde->bxye", modes[:, :6, :4], lax.complex(w["re"], w["im"]))
        low = jnp.zeros_like(modes).at[:, :6, :4].set(low)
        x = jax.nn.gelu(jnp.fft.irfft2(low, s=(16, 16), axes=(1, 2)) + x @ w["skip"])
    return jnp.mean((x @ p["out"] - batch["x"]) ** 2)
