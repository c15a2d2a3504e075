"""Networks as public repositories write them: recurrent, state-space, vision, scientific and generative ones."""

import jax
import jax.numpy as jnp
from jax import lax
from layout_programs import ATTENTION, ROW_MLP, attention, over_layers, stacked, unrolled
from published_programs import EMBEDDED, KEY, SECOND, SERIES, TOKENS, passes, stop, waves
from registry import HEAD, HEADS, MANY, OUT, ROWS, TIME, VOCABULARY, WIDTH, Allowed, ids, norm, program, xent

HEAD_OUT = {"head": (WIDTH, OUT)}
IMAGES = {"x": (ROWS, 16, 16, 5), "y": ids(ROWS)}


def mlp(x, w):
    """A residual block of rows `x @ W`."""
    return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"]


def tied(p, x, batch):
    """Cross-entropy with logits by the embedding."""
    return xent(norm(x) @ p["embed"].T, batch[:, 1:]).mean()


# Recurrent and state-space models.

STATE = 16
MAMBA = {"in": (WIDTH, 2 * WIDTH), "conv": (4, WIDTH), "bc": (WIDTH, 2 * STATE), "dt": (WIDTH, WIDTH)}


def selective(x, w):
    """A block of a selective state-space model, by an associative scan over time."""
    h, gate = jnp.split(norm(x) @ w["in"], 2, -1)
    h = sum(jnp.pad(h, ((0, 0), (3 - i, 0), (0, 0)))[:, : h.shape[1]] * w["conv"][i] for i in range(4))
    h = jax.nn.silu(h)
    b, c = jnp.split(h @ w["bc"], 2, -1)
    dt = jax.nn.softplus(h @ w["dt"])
    decay = jnp.exp(-dt[..., None] * jnp.arange(1.0, STATE + 1))
    join = lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1])
    _, state = lax.associative_scan(join, (decay, (dt * h)[..., None] * b[:, :, None]), axis=1)
    return x + (jnp.einsum("btds,bts->btd", state, c) * jax.nn.silu(gate)) @ w["out"]


@program("Published", {**EMBEDDED, "layers": unrolled({**MAMBA, "out": (WIDTH, WIDTH)})}, TOKENS)
def mamba(p, batch):
    """state-spaces/mamba: a causal convolution, and a selective scan over time"""
    return tied(p, over_layers(selective, p["embed"][batch[:, :-1]], p["layers"]), batch)


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


# Vision.

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


GUIDED = {"in": (3, 3, 5, 40), "down": (3, 3, 40, WIDTH), "up": (3, 3, WIDTH + 40, 40), "out": (3, 3, 40, 5)}


@program("Published", {**GUIDED, "mid": ATTENTION, "class": (OUT, WIDTH), "time": (32, WIDTH)}, IMAGES, args=KEY)
def guided_diffusion(p, batch, key):
    """openai/guided-diffusion: a U-Net with group norms and attention, the class dropped at random"""
    k, m, n = jax.random.split(key, 3)
    t, x = jax.random.uniform(k, (len(batch["x"]),)), batch["x"]
    noise, dropped = jax.random.normal(m, x.shape), jax.random.bernoulli(n, 0.1, t.shape)
    c = p["class"][batch["y"]] * (1 - dropped[:, None]) + waves(t) @ p["time"]
    grouped = lambda x: norm(x.reshape(*x.shape[:3], 10, -1), (1, 2, 4)).reshape(x.shape)
    high = conv(x + t[:, None, None, None] * noise, p["in"])
    low = conv(jax.nn.silu(grouped(high)), p["down"], 2) + c[:, None, None]
    low = attention(low.reshape(len(x), -1, WIDTH), p["mid"], "bt").reshape(low.shape)
    back = jnp.concatenate([jax.image.resize(low, (len(x), 16, 16, WIDTH), "nearest"), high], -1)
    return jnp.mean((conv(jax.nn.silu(grouped(conv(back, p["up"]))), p["out"]) - noise) ** 2)


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


# Science.

PAIR = 48
TRIANGLE = {"qkv": (PAIR, 3, 6, 7), "bias": (PAIR, 6), "o": (6, 7, PAIR), "sides": (2, PAIR, 40), "back": (40, PAIR)}


def triangular(x, w):
    """Attention along the rows of pairs with a bias by the third side, and a product over triangles."""
    q, k, v = jnp.einsum("bijd,dchk->cbijhk", norm(x), w["qkv"])
    weight = jnp.einsum("bijhk,bilhk->bihjl", q, k) / 7**0.5 + jnp.einsum("bjld,dh->bhjl", x, w["bias"])[:, None]
    x = x + jnp.einsum("bihjl,bilhk,hkd->bijd", jax.nn.softmax(weight), v, w["o"])
    left, right = jnp.einsum("bijd,cde->cbije", norm(x), w["sides"])
    return x + norm(jnp.einsum("bile,bjle->bije", left, jax.nn.sigmoid(right))) @ w["back"]


@program("Published", {"single": (WIDTH, 2, PAIR), "layers": unrolled(TRIANGLE), "bins": (PAIR, 40)}, SERIES)
def evoformer(p, batch):
    """google-deepmind/alphafold: triangle attention and triangle products of pairs, under `jax.checkpoint`"""
    left, right = jnp.einsum("btd,dce->cbte", batch["x"], p["single"])
    x = over_layers(triangular, left[:, :, None] + right[:, None], p["layers"])
    logits = (x + x.swapaxes(1, 2)) @ p["bins"]
    return xent(logits, jnp.broadcast_to(batch["y"][:, None, None] % 40, logits.shape[:3])).mean()


ATOMS = {"r": (ROWS, 20, 3), "kind": ids(ROWS, 20), "force": (ROWS, 20, 3), "energy": (ROWS,)}
SCHNET = {"embed": (36, WIDTH), "layers": unrolled({"filter": (32, WIDTH), "in": (WIDTH, WIDTH), **ROW_MLP})[:2]}


@program("Published", {**SCHNET, "head": (WIDTH, 1)}, ATOMS, exceptions=passes(3.3, SECOND))
def atom_forces(p, batch):
    """atomistic-machine-learning/schnetpack: energies, and forces as their gradient"""

    def energy(r):
        x = p["embed"][batch["kind"]]
        d = jnp.sqrt(jnp.sum((r[:, :, None] - r[:, None]) ** 2, -1) + 1e-6)
        spread = jnp.exp(-((d[..., None] - jnp.arange(32.0) / 4) ** 2))
        for w in p["layers"]:
            x = x + jnp.einsum("bijd,bjd->bid", jnp.tanh(spread @ w["filter"]), x @ w["in"])
            x = x + jnp.tanh(x @ w["up"]) @ w["down"]
        return jnp.sum(jnp.tanh(x) @ p["head"], (1, 2))

    e, back = jax.vjp(energy, batch["r"])
    (force,) = back(jnp.ones_like(e))
    return jnp.mean((e - batch["energy"]) ** 2) + jnp.mean((force + batch["force"]) ** 2)


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


FIELD = {"in": (WIDTH + 1, 176), "out": (176, WIDTH), "head": (WIDTH, OUT)}


@program("Published", FIELD, {"x": (MANY, WIDTH), "y": ids(MANY)})
def neural_ode(p, batch):
    """patrick-kidger/diffrax: four steps of Runge-Kutta, which call the same network, in a scan"""

    def field(t, x):
        return jnp.tanh(jnp.concatenate([x, jnp.broadcast_to(t, (len(x), 1))], -1) @ p["in"]) @ p["out"]

    @jax.checkpoint
    def step(x, t):
        a = field(t, x)
        b = field(t + 0.125, x + a / 8)
        c = field(t + 0.125, x + b / 8)
        d = field(t + 0.25, x + c / 4)
        return x + (a + 2 * b + 2 * c + d) / 24, None

    x, _ = lax.scan(step, batch["x"], jnp.arange(4) / 4)
    return xent(x @ p["head"], batch["y"]).mean()


COUPLING = {"in": (WIDTH // 2, 176), "scale": (176, WIDTH // 2), "shift": (176, WIDTH // 2)}


@program("Published", stacked(COUPLING), {"x": (MANY, WIDTH)})
def coupling_flow(p, batch):
    """danielward27/flowjax: a scan over coupling layers, with the sum of their log determinants"""

    def layer(carry, w):
        x, total = carry
        a, b = jnp.split(x, 2, -1)
        h = jax.nn.relu(a @ w["in"])
        scale = jnp.tanh(h @ w["scale"])
        b = b * jnp.exp(scale) + h @ w["shift"]
        return (jnp.concatenate([b, a], -1), total + scale.sum(-1)), None

    start = batch["x"], jnp.zeros(len(batch["x"]))
    (x, total), _ = lax.scan(layer, start, p)
    return jnp.mean(jnp.sum(x**2, -1) / 2 - total)
