"""Programs whose loss is unusual: towers, crops, experts, graphs, tables, adversaries, preferences, inner gradients."""

import jax
import jax.numpy as jnp
from jax import lax
from layout_programs import ATTENTION, MLP, PAIRS, ROW_MLP, SERIES, TOKENS, attention, over_layers, stacked, unrolled
from registry import HEAD, HEADS, HIDDEN, MANY, OUT, ROWS, TIME, VOCABULARY, WIDTH, enter, ids, norm, program, xent

EXPERTS, NODES, EDGES, LATENT = 16, 32, 60, 56
ENCODER = {"layers": unrolled(MLP), "head": (OUT, WIDTH)}
ROW_ENCODER = {"layers": unrolled(ROW_MLP), "head": (WIDTH, OUT)}
KEY = (jax.eval_shape(jax.random.key, 0),)
log_sigmoid, stop = jax.nn.log_sigmoid, lax.stop_gradient


def tower(p, x):
    """An embedding of one example, `W @ x`, of length 1."""
    for w in p["layers"]:
        x = x + w["down"] @ jax.nn.gelu(w["up"] @ x)
    x = p["head"] @ x
    return x / jnp.linalg.norm(x)


def row_tower(p, x, squash=jax.nn.gelu):
    """The same of rows, `x @ W`, not normalised."""
    for w in p["layers"]:
        x = x + squash(x @ w["up"]) @ w["down"]
    return x @ p["head"]


@program("Losses", {"a": ENCODER, "b": ENCODER}, PAIRS, shared="every pair of rows is compared")
def two_tower(p, batch):
    """Two towers of `W @ x` under `vmap`, contrasted over the batch"""
    a, b = jax.vmap(tower, (None, 0))(p["a"], batch["x"]), jax.vmap(tower, (None, 0))(p["b"], batch["y"])
    return xent(a @ b.T / 0.1, jnp.arange(len(a))).mean()


@program("Losses", {"a": ENCODER, "b": ENCODER}, PAIRS)
def two_tower_scored(p, batch):
    """Two towers of `W @ x` under `vmap`, each pair scored alone"""
    score = lambda x, y: jnp.vdot(tower(p["a"], x), tower(p["b"], y))
    return jnp.mean((1 - jax.vmap(score)(batch["x"], batch["y"])) ** 2)


@program("Losses", ROW_ENCODER, {"x": (MANY, 3, WIDTH)}, shared="every pair of rows is compared")
def contrastive(p, batch):
    """SimCLR: two crops of each row, concatenated before the rows"""
    z = row_tower(p, jnp.concatenate([batch["x"][:, 0], batch["x"][:, 1]]))
    z = z / jnp.linalg.norm(z, axis=-1, keepdims=True)
    near, far = jnp.split(z, 2)
    return xent(near @ far.T / 0.1, jnp.arange(len(near))).mean()


CROPS = {"large": (ROWS, 2, TIME, WIDTH), "small": (ROWS, 3, 16, WIDTH)}
TEACHER = ({"layers": unrolled(ATTENTION), "head": (WIDTH, OUT)},)


@program("Losses", {"layers": unrolled(ATTENTION), "head": (WIDTH, OUT)}, CROPS, args=TEACHER)
def multi_crop(p, batch, teacher):
    """DINO: crops of two lengths, moved before the rows; a teacher sees the long ones"""

    def seen(p, x):
        x = jnp.moveaxis(x, 1, 0)
        return over_layers(lambda x, w: attention(x, w, "vbt"), x, p["layers"], False).mean(2) @ p["head"]

    taught = jax.nn.softmax(stop(seen(teacher, batch["large"])))
    student = jax.nn.log_softmax(jnp.concatenate([seen(p, batch["large"]), seen(p, batch["small"])]))
    return -jnp.einsum("ubk,vbk->", taught, student) / len(batch["large"])


TOP_K = {"shared": "the compiler gathers the gates for `lax.top_k`"}
EXPERT = {"gate": (WIDTH, EXPERTS), "up": (EXPERTS, WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH)}


def of_tokens(x, w):
    """Each token by the two experts that its gate prefers; every expert computes its tokens' slots."""
    gates, chosen = lax.top_k(jax.nn.softmax(norm(x) @ w["gate"]), 2)
    hot = jax.nn.one_hot(chosen, EXPERTS)  # (B, T, 2, E)
    place = (jnp.cumsum(hot.sum(2), 1) - 1)[:, :, None] * hot
    slots = jax.nn.one_hot(jnp.sum(place, -1), TIME // 2) * hot.sum(-1)[..., None]
    sent = jnp.einsum("btce,btcs->btes", hot, slots)
    taken = jax.nn.gelu(jnp.einsum("besd,edf->besf", jnp.einsum("btes,btd->besd", sent, x), w["up"]))
    back = jnp.einsum("btce,btcs,btc->btes", hot, slots, gates)
    return x + jnp.einsum("btes,besd->btd", back, jnp.einsum("besf,efd->besd", taken, w["down"]))


def of_sequences(x, w):
    """Each sequence by a mixture of all experts, which see the sequences one expert after the other."""
    gates = jax.nn.softmax(x.mean(1) @ w["gate"])
    up = jax.nn.gelu(jnp.einsum("btd,edf->ebtf", norm(x), w["up"]))
    return x + jnp.einsum("be,ebtd->btd", gates, jnp.einsum("ebtf,efd->ebtd", up, w["down"]))


def experts(layer, remat):
    def loss(p, batch):
        return xent(over_layers(layer, batch["x"], p["layers"], remat).mean(1) @ p["head"], batch["y"]).mean()

    return loss


MOE = {"layers": unrolled(EXPERT)[:2], "head": (WIDTH, OUT)}
MOE_STACK = {"layers": stacked(EXPERT), "head": (WIDTH, OUT)}
enter("moe_tokens", "Losses", experts(of_tokens, False), MOE, SERIES, "mixture of experts per token, unrolled", **TOP_K)
enter("moe_tokens_scan", "Losses", experts(of_tokens, True), MOE_STACK, SERIES, "the same, scanned, remat", **TOP_K)
enter("moe_seqs", "Losses", experts(of_sequences, False), MOE, SERIES, "mixture of experts per sequence, unrolled")
ABOUT = "mixture of experts per sequence, 4 microbatches"
enter("moe_seqs_acc", "Losses", experts(of_sequences, False), MOE, SERIES, ABOUT, accumulate=4)


GRAPHS = {"nodes": (ROWS, NODES, WIDTH), "edges": ids(ROWS, EDGES, 2), "there": (ROWS, NODES), "y": ids(ROWS)}


@program("Losses", {"layers": unrolled({"self": (WIDTH, WIDTH), **MLP}), "head": (OUT, WIDTH)}, GRAPHS)
def graphs(p, batch):
    """GNN of padded graphs under `vmap`: messages along edges, `W @ x` for each node"""

    def one(nodes, edges, there):
        for w in p["layers"]:
            sent = jax.vmap(lambda x, w=w: jax.nn.relu(w["up"] @ x))(nodes)
            heard = jax.ops.segment_sum(sent[edges[:, 0]], edges[:, 1], NODES)
            mixed = jax.vmap(lambda x, y, w=w: jax.nn.relu(w["self"] @ x + w["down"] @ y))(nodes, heard)
            nodes = nodes + mixed * there[:, None]
        return p["head"] @ (nodes.sum(0) / there.sum())

    return xent(jax.vmap(one)(batch["nodes"], batch["edges"], batch["there"]), batch["y"]).mean()


JOINED = {"layers": unrolled({"self": (WIDTH, WIDTH), **ROW_MLP}), "head": (WIDTH, OUT)}


SCATTER = "a scatter into the nodes of all graphs, which the compiler cannot divide"


@program("Losses", JOINED, GRAPHS, shared=SCATTER, lost=True)
def graphs_joined(p, batch):
    """GNN of padded graphs joined to one, as jraph does: nodes of all graphs on dim 0"""
    count = len(batch["nodes"])
    nodes, there = batch["nodes"].reshape(-1, WIDTH), batch["there"].reshape(-1, 1)
    edges = (batch["edges"] + NODES * jnp.arange(count)[:, None, None]).reshape(-1, 2)
    for w in p["layers"]:
        heard = jax.ops.segment_sum(jax.nn.relu(nodes @ w["up"])[edges[:, 0]], edges[:, 1], count * NODES)
        nodes = nodes + jax.nn.relu(nodes @ w["self"] + heard @ w["down"]) * there
    pooled = jax.ops.segment_sum(nodes, jnp.repeat(jnp.arange(count), NODES), count)
    return xent(pooled @ p["head"], batch["y"]).mean()


FIELDS = {f"table{i}": (1000 + 40 * i, 32) for i in range(6)}
TOP = {"up": (224, 36), "mid": (144, 224), "out": (1, 144)}
CLICKS = {"ids": ids(MANY, 6), "bag": ids(MANY, 7), "y": (MANY,)}


@program("Losses", {**FIELDS, **TOP}, CLICKS)
def recommender(p, batch):
    """DLRM: six embedding tables and a bag, products of each pair, then `W @ x`"""
    rows = [p[f"table{i}"][batch["ids"][:, i]] for i in range(6)] + [p["table0"][batch["bag"]].mean(1)]
    x = jnp.stack(rows, 1)

    def score(x):
        pairs = (x @ x.T)[jnp.triu_indices(7, 1)]
        top = jnp.concatenate([pairs, x.mean(0)])[:36]
        return (p["out"] @ jax.nn.relu(p["mid"] @ jax.nn.relu(p["up"] @ top)))[0]

    return -jnp.mean(log_sigmoid(jax.vmap(score)(x) * batch["y"]))


@program("Losses", {"up": (4 * 112, WIDTH + 112), "head": (OUT, 112)}, SERIES)
def lstm_rows_last(p, batch):
    """An LSTM of (T, D, B), `W @ h`"""

    def step(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(p["up"] @ jnp.concatenate([x, h]), 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), None

    zeros = jnp.zeros((112, len(batch["x"])))
    (h, _), _ = lax.scan(step, (zeros, zeros), batch["x"].transpose(1, 2, 0))
    return xent((p["head"] @ h).T, batch["y"]).mean()


CROSS = {"query": (WIDTH, HEADS, HEAD), "kv": (WIDTH, 2, HEADS, HEAD), "back": (HEADS, HEAD, WIDTH)}
TRANSLATED = {"x": ids(ROWS, 32), "y": ids(ROWS, TIME + 1)}
EMBEDDED = {"embed": (VOCABULARY, WIDTH)}


def translated(remat):
    def loss(p, batch):
        """Encoder-decoder of (T, B, D)."""
        seen = over_layers(lambda x, w: attention(x, w, "tb"), p["embed"][batch["x"].T], p["encoder"], remat)

        def layer(x, w):
            q = jnp.einsum("tbd,dhk->tbhk", norm(x), w["query"])
            k, v = jnp.einsum("sbd,dchk->csbhk", seen, w["kv"])
            weight = jax.nn.softmax(jnp.einsum("tbhk,sbhk->bhts", q, k) / HEAD**0.5)
            return attention(x + jnp.einsum("bhts,sbhk,hkd->tbd", weight, v, w["back"]), w, "tb")

        x = over_layers(layer, p["embed"][batch["y"][:, :-1].T], p["decoder"], remat)
        return xent(x @ p["embed"].T, batch["y"][:, 1:].T).mean()

    return loss


BOTH = {"encoder": unrolled(ATTENTION)[:2], "decoder": unrolled({**ATTENTION, **CROSS})[:2]}
STACKS = {"encoder": stacked(ATTENTION), "decoder": stacked({**ATTENTION, **CROSS})}
enter("translation", "Losses", translated(False), EMBEDDED | BOTH, TRANSLATED, "encoder-decoder of (T, B, D), unrolled")
ABOUT = "encoder-decoder of (T, B, D), scanned and under remat"
enter("translation_scan", "Losses", translated(True), EMBEDDED | STACKS, TRANSLATED, ABOUT)


def conv(x, w, stride=1):
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW"))


UNET = {"in": (40, 5, 3, 3), "down": (56, 40, 3, 3), "mid": (56, 56, 3, 3), "up": (40, 96, 3, 3), "out": (5, 40, 3, 3)}


@program("Losses", {**UNET, "time": (56, 32)}, {"x": (ROWS, 5, 16, 16)}, args=KEY)
def diffusion(p, batch, key):
    """A U-Net of (B, C, H, W) that predicts noise"""
    x = batch["x"]
    at, noise = jax.random.split(key)
    at, noise = jax.random.uniform(at, (len(x),)), jax.random.normal(noise, x.shape)
    noisy = jnp.sqrt(1 - at)[:, None, None, None] * x + jnp.sqrt(at)[:, None, None, None] * noise
    waves = jnp.sin(at[:, None] * 2.0 ** jnp.arange(32))
    high = jax.nn.silu(conv(noisy, p["in"]))
    low = conv(high, p["down"], 2) + jax.vmap(lambda t: p["time"] @ t)(waves)[:, :, None, None]
    low = low + conv(jax.nn.silu(low), p["mid"])
    back = jnp.concatenate([jnp.repeat(jnp.repeat(low, 2, 2), 2, 3), high], 1)
    return jnp.mean((conv(jax.nn.silu(conv(back, p["up"])), p["out"]) - noise) ** 2)


GAN = {"g": {"layers": unrolled(ROW_MLP), "head": (WIDTH, WIDTH)}, "d": ROW_ENCODER}
NOISY = {"x": (MANY, WIDTH), "z": (MANY, WIDTH)}


@program("Losses", GAN, NOISY)
def gan(p, batch):
    """Both losses of a step, each of which calls the generator"""
    critic = lambda d, x: row_tower(d, x).sum(-1)
    of_g = -log_sigmoid(critic(stop(p["d"]), row_tower(p["g"], batch["z"]))).mean()
    fake = stop(row_tower(p["g"], batch["z"]))
    return of_g - log_sigmoid(critic(p["d"], batch["x"])).mean() - log_sigmoid(-critic(p["d"], fake)).mean()


@program("Losses", GAN, NOISY)
def wgan_gp(p, batch):
    """Both losses of a step, with a penalty on the critic's gradient"""
    critic = lambda d, x: row_tower(d, x, jnp.tanh).sum(-1)
    of_g = -critic(stop(p["d"]), row_tower(p["g"], batch["z"])).mean()
    fake = stop(row_tower(p["g"], batch["z"]))
    between = (batch["x"] + fake) / 2
    slopes = jax.grad(lambda x: critic(p["d"], x).sum())(between)
    penalty = jnp.mean((jnp.linalg.norm(slopes, axis=-1) - 1) ** 2)
    return of_g + critic(p["d"], fake).mean() - critic(p["d"], batch["x"]).mean() + 10 * penalty


@program(
    "Losses",
    ROW_ENCODER,
    {"x": (MANY, WIDTH), "y": ids(MANY)},
    shared="the inner gradient is of the whole batch",
)
def sam(p, batch):
    """Weighted SAM: the loss at the parameters, and at those moved along its own gradient"""
    loss = lambda p: xent(row_tower(p, batch["x"]), batch["y"]).mean()
    grads = stop(jax.grad(loss)(p))
    scale = 0.05 / jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    return (loss(p) + loss(jax.tree.map(lambda w, g: w + scale * g, p, grads))) / 2


POLICY = {"embed": (VOCABULARY, WIDTH), "layers": unrolled(ATTENTION)[:2]}


@program("Losses", POLICY, {"chosen": TOKENS, "rejected": TOKENS}, args=(POLICY,))
def dpo(p, batch, reference):
    """Preferences against a reference model; answers stacked before the rows"""
    both = jnp.stack([batch["chosen"], batch["rejected"]])

    def log_p(p):
        x = over_layers(lambda x, w: attention(x, w, "vbt"), p["embed"][both[..., :-1]], p["layers"], False)
        return -xent(x @ p["embed"].T, both[..., 1:]).sum(-1)

    chosen, rejected = log_p(p) - stop(log_p(reference))
    return -log_sigmoid(0.1 * (chosen - rejected)).mean()


VAE = {"up": (HIDDEN, WIDTH), "mean": (LATENT, HIDDEN), "scale": (LATENT, HIDDEN), "down": (HIDDEN, LATENT)}


@program("Losses", {**VAE, "out": (WIDTH, HIDDEN)}, {"x": (MANY, WIDTH)}, args=KEY)
def vae(p, batch, key):
    """`W @ x` under `vmap`, with noise for each row"""

    def one(x, noise):
        h = jnp.tanh(p["up"] @ x)
        mean, scale = p["mean"] @ h, p["scale"] @ h
        z = mean + jnp.exp(scale) * noise
        divergence = jnp.sum(mean**2 + jnp.exp(2 * scale) - 2 * scale) / 2
        return jnp.sum((p["out"] @ jnp.tanh(p["down"] @ z) - x) ** 2) + divergence

    noise = jax.random.normal(key, (len(batch["x"]), LATENT))
    return jax.vmap(one)(batch["x"], noise).mean()
