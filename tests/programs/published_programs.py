"""Programs as public repositories write them, which each line of the table names; written anew from their structure."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from layout_programs import ATTENTION, ROW_MLP, attended, attention, over_layers, stacked, unrolled
from registry import HEAD, HEADS, MANY, OUT, ROWS, TIME, VOCABULARY, WIDTH, Allowed, enter, ids, norm, program, xent

stop, log_sigmoid = lax.stop_gradient, jax.nn.log_sigmoid
SERIES = {"x": (ROWS, TIME, WIDTH), "y": ids(ROWS)}
PAIRS = {"x": (MANY, WIDTH), "y": (MANY, WIDTH)}
TOKENS = ids(ROWS, TIME + 1)
KEY = (jax.eval_shape(jax.random.key, 0),)
NET = {"layers": unrolled(ROW_MLP), "head": (WIDTH, OUT)}
FLOW = {"layers": unrolled(ROW_MLP), "head": (WIDTH, WIDTH), "time": (32, WIDTH)}
EMBEDDED = {"embed": (VOCABULARY, WIDTH)}
INDEXED = "the compiler gathers the index of `x[jnp.arange(B), i]`"


def passes(most, why):
    """An exception: so many gathers of all parameters at stage 3."""
    return {"passes": Allowed(most, why, (3,))}


def calls(most, count):
    """An exception: so many gathers, because the loss calls a network so often."""
    return passes(most, f"the loss calls a network {count} on different rows, and each call gathers its parameters")


TIED = "the embedding is read in several places"


def net(p, x):
    """Residual blocks of rows `x @ W`, and a head."""
    for w in p["layers"]:
        x = x + jax.nn.silu(x @ w["up"]) @ w["down"]
    return x @ p["head"]


def waves(t):
    """Features of one time per row."""
    return jnp.sin(t[:, None] * 2.0 ** jnp.arange(32))


# A scan over layers that reads an activation from outside.

MODULATED = {**ATTENTION, "mod": (WIDTH, 6 * WIDTH)}
DIFFUSED = {"x": (ROWS, TIME, WIDTH), "t": (ROWS,), "noise": (ROWS, TIME, WIDTH)}


def modulated(c):
    """A block of a diffusion transformer, whose norms are scaled and shifted by the condition `c`."""

    def layer(x, w):
        a, b, g, d, e, f = jnp.split((jax.nn.silu(c) @ w["mod"])[:, None], 6, -1)
        x = x + g * attended(norm(x) * (1 + a) + b, w, "bt")
        return x + f * (jax.nn.gelu((norm(x) * (1 + d) + e) @ w["up"]) @ w["down"])

    return layer


def diffused(p, batch, remat):
    c = jnp.tanh(waves(batch["t"]) @ p["time"]) @ p["cond"]
    x = batch["x"] + batch["t"][:, None, None] * batch["noise"]
    x = over_layers(modulated(c), x, p["layers"], remat)
    return jnp.mean((x @ p["head"] - batch["noise"]) ** 2)


DIT = {"time": (32, WIDTH), "cond": (WIDTH, WIDTH), "head": (WIDTH, WIDTH)}


for name, layers, remat, about in (
    ("dit_scan", stacked(MODULATED), False, "facebookresearch/DiT: layers scanned, the condition read by each"),
    ("dit_remat", stacked(MODULATED), True, "the same under `jax.checkpoint`"),
    ("dit_unrolled", unrolled(MODULATED), False, "the same, unrolled"),
):
    loss = functools.partial(diffused, remat=remat)
    enter(name, "Published", loss, {**DIT, "layers": layers}, DIFFUSED, about)


CROSS = {"query": (WIDTH, HEADS, HEAD), "kv": (WIDTH, 2, HEADS, HEAD), "back": (HEADS, HEAD, WIDTH)}
READ = {"x": (ROWS, 40, WIDTH), "y": ids(ROWS, TIME + 1)}


def crossed(x, w, seen):
    """Attention to `seen`."""
    q = jnp.einsum("btd,dhk->bthk", norm(x), w["query"])
    k, v = jnp.einsum("bsd,dchk->cbshk", seen, w["kv"])
    weight = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k) / HEAD**0.5)
    return x + jnp.einsum("bhts,bshk,hkd->btd", weight, v, w["back"])


WHISPER = {**EMBEDDED, "in": (WIDTH, WIDTH), "encoder": ATTENTION, "decoder": stacked({**ATTENTION, **CROSS})}


@program("Published", WHISPER, READ)
def whisper_scan(p, batch):
    """sanchit-gandhi/whisper-jax: a decoder scanned over layers reads the encoder's memory"""
    seen = attention(jnp.tanh(batch["x"] @ p["in"]), p["encoder"], "bt")
    layer = lambda x, w: attention(crossed(x, w, seen), w, "bt")
    x = over_layers(layer, p["embed"][batch["y"][:, :-1]], p["decoder"], True)
    return xent(x @ p["embed"].T, batch["y"][:, 1:]).mean()


SLOTS = {"in": (WIDTH, WIDTH), "key": (WIDTH, WIDTH), "value": (WIDTH, WIDTH), "query": (WIDTH, WIDTH), **ROW_MLP}


@program("Published", {**SLOTS, "slots": (7, WIDTH), "head": (WIDTH, WIDTH)}, {"x": (ROWS, 56, WIDTH)})
def slot_attention(p, batch):
    """google-research/slot-attention-video: a loop of slots that read keys and values"""
    x = norm(jnp.tanh(batch["x"] @ p["in"]))
    k, v = x @ p["key"], x @ p["value"]

    def step(slots, _):
        q = norm(slots) @ p["query"]
        weight = jax.nn.softmax(jnp.einsum("bsd,bnd->bsn", q, k) / WIDTH**0.5, 1)
        slots = slots + jnp.einsum("bsn,bnd->bsd", weight / weight.sum(-1, keepdims=True), v)
        return slots + jax.nn.relu(norm(slots) @ p["up"]) @ p["down"], None

    slots = lax.scan(step, jnp.broadcast_to(p["slots"], (len(x), 7, WIDTH)), None, length=3)[0]
    back = jnp.einsum("bsn,bsd->bnd", jax.nn.softmax(jnp.einsum("bsd,bnd->bsn", slots, k), 1), slots)
    return jnp.mean((back @ p["head"] - batch["x"]) ** 2)


LONG = 544


@program("Published", {**EMBEDDED, "layers": unrolled(ATTENTION), "head": (4, LONG // 4, WIDTH)}, TOKENS)
def vocabulary_chunks(p, batch):
    """apple/ml-cross-entropy: the logits of a quarter of the vocabulary at a time"""
    x = over_layers(lambda x, w: attention(x, w, "bt"), p["embed"][batch[:, :-1]], p["layers"], False)
    labels = batch[:, 1:]

    @jax.checkpoint
    def chunk(carry, part):
        total, right = carry
        w, start = part
        logits = x @ w.T
        here = (labels >= start) & (labels < start + len(w))
        found = jnp.take_along_axis(logits, jnp.clip(labels - start, 0, len(w) - 1)[..., None], -1)[..., 0]
        return (jnp.logaddexp(total, jax.nn.logsumexp(logits, -1)), right + jnp.where(here, found, 0)), None

    start = jnp.full(labels.shape, -jnp.inf), jnp.zeros(labels.shape)
    (total, right), _ = lax.scan(chunk, start, (p["head"], jnp.arange(4) * (LONG // 4)))
    return jnp.mean(total - right)


# One entry per row by an index.

ACTED = {"x": (MANY, WIDTH), "next": (MANY, WIDTH), "a": ids(MANY), "r": (MANY,)}


@program("Published", NET, ACTED, args=(NET,), shared=INDEXED)
def dqn(p, batch, target):
    """vwxyzjn/cleanrl: `q[jnp.arange(B), action]`"""
    wanted = stop(batch["r"] + 0.99 * net(target, batch["next"]).max(-1))
    return jnp.mean((net(p, batch["x"])[jnp.arange(len(wanted)), batch["a"]] - wanted) ** 2)


SENTENCES = {"x": ids(ROWS, TIME), "length": ids(ROWS), "y": ids(ROWS)}


@program("Published", {**EMBEDDED, "layers": stacked(ATTENTION), "head": (WIDTH, OUT)}, SENTENCES, shared=INDEXED)
def last_token(p, batch):
    """huggingface/transformers: a class from the last token of each row"""
    x = over_layers(lambda x, w: attention(x, w, "bt"), p["embed"][batch["x"]], p["layers"])
    return xent(x[jnp.arange(len(x)), batch["length"] - 1] @ p["head"], batch["y"]).mean()


@program("Published", {**EMBEDDED, "layers": unrolled(ATTENTION), "head": (WIDTH, OUT)}, SENTENCES, shared=INDEXED)
def clip_text(p, batch):
    """openai/CLIP: the token with the largest number"""
    x = over_layers(lambda x, w: attention(x, w, "bt"), p["embed"][batch["x"]], p["layers"], False)
    return jnp.mean(jnp.tanh(x[jnp.arange(len(x)), batch["x"].argmax(-1)] @ p["head"])[:, 0] ** 2)


# Rows chosen or written by an index, and slices of rows.

MOD = {**ATTENTION, "router": (WIDTH, 1)}


@program("Published", {"layers": unrolled(MOD), "head": (WIDTH, OUT)}, SERIES, shared="`lax.top_k` gathers its operand")
def mixture_of_depths(p, batch):
    """astramind-ai/Mixture-of-depths: `x.at[jnp.arange(B)[:, None], i].add(y)`"""
    x = batch["x"]
    for w in p["layers"]:
        score, i = lax.top_k((x @ w["router"])[..., 0], 10)
        rows = jnp.arange(len(x))[:, None]
        some = x[rows, i]
        x = x.at[rows, i].add(jax.nn.sigmoid(score)[..., None] * (attention(some, w, "bt") - some))
    return xent(x.mean(1) @ p["head"], batch["y"]).mean()


SAE = {"enc": (WIDTH, 560), "dec": (560, WIDTH)}


@program("Published", SAE, {"x": (MANY, WIDTH)}, shared="`lax.top_k` gathers its operand")
def sparse_autoencoder(p, batch):
    """EleutherAI/sparsify: the largest 12 features of each row, scattered"""
    value, i = lax.top_k(batch["x"] @ p["enc"], 12)
    sparse = jnp.zeros((len(i), 560)).at[jnp.arange(len(i))[:, None], i].set(jax.nn.relu(value))
    return jnp.mean((sparse @ p["dec"] - batch["x"]) ** 2)


def answered(p, tokens):
    """The log probability of each row's tokens."""
    x = over_layers(lambda x, w: attention(x, w, "bt"), p["embed"][tokens[:, :-1]], p["layers"], False)
    return -xent(x @ p["embed"].T, tokens[:, 1:]).sum(-1)


POLICY = {**EMBEDDED, "layers": unrolled(ATTENTION)}


@program("Published", POLICY, TOKENS, args=(POLICY,), shared="the halves of the batch are compared")
def dpo_halves(p, batch, reference):
    """eric-mitchell/direct-preference-optimization: chosen answers, then rejected ones, in one batch"""
    ratio = answered(p, batch) - stop(answered(reference, batch))
    return -log_sigmoid(0.1 * (ratio[: len(ratio) // 2] - ratio[len(ratio) // 2 :])).mean()


@program("Published", {**NET, "score": (OUT, 1)}, {"x": (MANY, WIDTH)})
def reward_pairs(p, batch):
    """openai/summarize-from-feedback: rewards of pairs that alternate in the batch"""
    r = (jnp.tanh(net(p, batch["x"])) @ p["score"])[:, 0]
    return -log_sigmoid(r[::2] - r[1::2]).mean()


# Derivatives inside of the loss.


def velocity(p, z, t, r):
    h = z + waves(t) @ p["time"] + waves(t - r) @ p["time"]
    return net(p, h)


TIMES = {"x": (MANY, WIDTH), "e": (MANY, WIDTH), "t": (MANY,), "r": (MANY,)}


@program("Published", FLOW, TIMES)
def mean_flow(p, batch):
    """Gsunshine/meanflow: `jax.jvp` of the network, and a loss on `stop_gradient` of the tangent"""
    t, r = batch["t"], batch["r"]
    z = batch["x"] + t[:, None] * (batch["e"] - batch["x"])
    v = batch["e"] - batch["x"]
    u, du = jax.jvp(lambda z, t, r: velocity(p, z, t, r), (z, t, r), (v, jnp.ones_like(t), jnp.zeros_like(r)))
    return jnp.mean((u - stop(v - (t - r)[:, None] * du)) ** 2)


@program("Published", FLOW, TIMES)
def consistency_jvp(p, batch):
    """openai/consistency_models: the same with the layers under `jax.jit`"""
    apply = jax.jit(lambda z, t: velocity(p, z, t, t))
    z = batch["x"] + batch["t"][:, None] * batch["e"]
    u, du = jax.jvp(apply, (z, batch["t"]), (batch["e"], jnp.ones_like(batch["t"])))
    return jnp.mean((u - stop(u - 0.1 * (du + u - z))) ** 2)


ENERGY = {"layers": unrolled(ROW_MLP), "head": (WIDTH, 1)}


def energy(p, x):
    for w in p["layers"]:
        x = x + jnp.tanh(x @ w["up"]) @ w["down"]
    return (x @ p["head"])[:, 0]


@program("Published", ENERGY, {"x": (MANY, WIDTH)}, args=KEY, exceptions=calls(5.6, "four times"))
def energy_model(p, batch, key):
    """wgrathwohl/JEM: two steps of Langevin dynamics from noise that the loss draws"""
    fake = jax.random.uniform(key, batch["x"].shape)
    for k in jax.random.split(key, 2):
        slope = jax.grad(lambda x: energy(stop(p), x).sum())(fake)
        fake = fake - slope + 0.01 * jax.random.normal(k, fake.shape)
    return energy(p, batch["x"]).mean() - energy(p, stop(fake)).mean()


@program("Published", ENERGY, {"x": (MANY, WIDTH)}, args=KEY)
def noise_contrast(p, batch, key):
    """Stonesjtu/Pytorch-NCE: noise contrast, the energy of noise that the loss draws"""
    noise = jax.random.normal(key, batch["x"].shape)
    return -(log_sigmoid(energy(p, batch["x"])) + log_sigmoid(-energy(p, noise))).mean()


SECOND = "the loss differentiates a derivative, whose backward pass reads each parameter once more"


@program("Published", ENERGY, {"x": (MANY, WIDTH)}, exceptions=passes(3.4, SECOND))
def score_matching(p, batch):
    """ermongroup/sliced_score_matching: a product of the Hessian with a direction"""
    v = jnp.cos(batch["x"])
    slope = jax.grad(lambda x: energy(p, x).sum())
    s, dv = jax.jvp(slope, (batch["x"],), (v,))
    return jnp.mean(jnp.sum(v * dv, -1) + 0.5 * jnp.sum(s**2, -1))


# A parameter that is read in several places.


@program("Published", POLICY, ids(ROWS, 41))
def token_chunks(p, batch):
    """google/maxtext: the tied logits of a quarter of the tokens at a time"""
    x = over_layers(lambda x, w: attention(x, w, "bt"), p["embed"][batch[:, :-1]], p["layers"], False)
    chunk = jax.checkpoint(lambda x, y: xent(x @ p["embed"].T, y).sum())
    parts = zip(jnp.split(x, 4, 1), jnp.split(batch[:, 1:], 4, 1), strict=True)
    return sum(chunk(*part) for part in parts) / batch.size


@program("Published", POLICY, ids(ROWS, 41), exceptions=passes(2.1, TIED))
def token_chunks_scan(p, batch):
    """google/maxtext: the same in a scan"""
    x = over_layers(lambda x, w: attention(x, w, "bt"), p["embed"][batch[:, :-1]], p["layers"], False)
    chunk = jax.checkpoint(lambda total, part: (total + xent(part[0] @ p["embed"].T, part[1]).sum(), None))
    parts = [jnp.moveaxis(a.reshape(len(a), 4, 10, *a.shape[2:]), 1, 0) for a in (x, batch[:, 1:])]
    return lax.scan(chunk, 0.0, tuple(parts))[0] / batch.size


@program(
    "Published", {**POLICY, "seg": (6, WIDTH)}, {"x": ids(ROWS, TIME), "y": ids(ROWS, 32)}, exceptions=passes(2.1, TIED)
)
def t5_shared(p, batch):
    """google-research/t5x: one embedding for the encoder, the decoder and the logits"""
    layer = lambda x, w: attention(x, w, "bt")
    seen = over_layers(layer, p["embed"][batch["x"]], p["layers"][:1], False).mean(1, keepdims=True)
    x = over_layers(layer, p["embed"][batch["y"][:, :-1]] + seen, p["layers"][1:], False)
    return xent(x @ p["embed"].T, batch["y"][:, 1:]).mean()


GAN = {"g": {"layers": unrolled(ROW_MLP), "head": (WIDTH, WIDTH)}, "d": NET}


@program("Published", GAN, {"x": (MANY, WIDTH), "z": (MANY, WIDTH)}, exceptions=calls(4.1, "several times"))
def r1_gan(p, batch):
    """NVlabs/stylegan2: R1, the penalty on the critic's gradient at real rows"""
    critic = lambda d, x: net(d, x).sum(-1)
    fake = net(p["g"], batch["z"])
    of_g = jax.nn.softplus(-critic(stop(p["d"]), fake)).mean()
    slopes = jax.grad(lambda x: critic(p["d"], x).sum())(batch["x"])
    of_d = jax.nn.softplus(critic(p["d"], stop(fake))).mean() + jax.nn.softplus(-critic(p["d"], batch["x"])).mean()
    return of_g + of_d + 5 * jnp.mean(jnp.sum(slopes**2, -1))
