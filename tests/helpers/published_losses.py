"""Ways in which rows of a batch meet in published models; each is entered in the table of `global_losses.py`."""

import jax
import jax.numpy as jnp
import optax
from global_losses import CLASSES, HEAD, HIDDEN, LABELED, PAIRS, ROWS, TABLE, WIDTH, X, embed, encode, program, xent
from jax import lax

__all__ = ["TABLE"]

EMBED = {"encoder": "encoder", "head": HEAD}
CLASSIFY = {"encoder": "encoder", "head": (HIDDEN, CLASSES)}
LENGTH = 10


def distances(x, y):
    return jnp.sum((x[:, None] - y[None]) ** 2, -1)


def tokens_of(p, batch):
    """Log-probabilities of tokens, `(rows, length, classes)`, and of those there are: rows are of different lengths."""
    x = encode(p["encoder"], batch["x"].reshape(ROWS, LENGTH, WIDTH))
    there = jnp.arange(LENGTH) < 3 + batch["length"][:, None]
    return jax.nn.log_softmax(x @ p["head"]), there


SEQUENCES = {"x": (LENGTH * WIDTH,), "length": 7, "label": CLASSES}


@program(EMBED | {"temperature": (1,)}, PAIRS)
def clip(p, batch):
    """Radford et al. 2021: symmetric, with a learned temperature."""
    logits = jnp.minimum(jnp.exp(p["temperature"]), 100) * embed(p, batch["x"]) @ embed(p, batch["y"]).T
    own = jnp.arange(ROWS)
    return (xent(logits, own).mean() + xent(logits.T, own).mean()) / 2


@program(EMBED | {"temperature": (1,), "bias": (1,)}, PAIRS)
def siglip(p, batch):
    """Zhai et al. 2023: every pair is one yes or no, and neighbours' rows come by in chunks."""
    z, y = embed(p, batch["x"]), embed(p, batch["y"])
    total = 0.0
    for shift in range(0, ROWS, 12):
        logits = jnp.exp(p["temperature"]) * z @ jnp.roll(y, shift, 0)[:12].T + p["bias"]
        own = (jnp.arange(ROWS)[:, None] + shift) % ROWS == jnp.arange(12)
        total -= jax.nn.log_sigmoid(jnp.where(own, logits, -logits)).sum()
    return total / ROWS


@program(EMBED | {"prototypes": (WIDTH, 12)}, PAIRS)
def swav(p, batch):
    """Caron et al. 2020: rows are assigned to prototypes in equal shares, by Sinkhorn-Knopp."""
    scores = [embed(p, batch[k]) @ p["prototypes"] for k in "xy"]

    def assign(scores):
        def balance(_, q):
            q = q / q.sum(0) / q.shape[1]
            return q / q.sum(1, keepdims=True) / ROWS

        return lax.stop_gradient(lax.fori_loop(0, 3, balance, jnp.exp(scores / 0.3)) * ROWS)

    cross = [jnp.sum(assign(a) * jax.nn.log_softmax(b / 0.5), -1).mean() for a, b in (scores, scores[::-1])]
    return -sum(cross) / 2


@program(EMBED, PAIRS, mutable=lambda: {"center": jnp.zeros(WIDTH), "teacher": jnp.eye(WIDTH)})
def dino(p, state, batch):
    """Caron et al. 2021: a teacher by moving average, centred by the batches' mean."""
    taught = lax.stop_gradient(batch["x"] @ state["teacher"])
    student = jax.nn.log_softmax(encode(p["encoder"], batch["y"]) @ p["head"])
    loss = -jnp.mean(jnp.sum(jax.nn.softmax((taught - state["center"]) / 0.5) * student, -1))
    teacher = 0.9 * state["teacher"] + 0.1 * lax.stop_gradient(p["head"][:WIDTH])
    return loss, {"center": 0.9 * state["center"] + 0.1 * taught.mean(0), "teacher": teacher}


@program(
    EMBED | {"decoder": (WIDTH, WIDTH)},
    X,
    mutable=lambda: {"codes": jax.random.normal(jax.random.key(6), (20, WIDTH)), "count": jnp.ones(20)},
    has_aux=True,
)
def vq_vae(p, state, batch):
    """Van den Oord et al. 2017: a codebook by moving averages over the batch; its perplexity."""
    z = encode(p["encoder"], batch["x"]) @ p["head"]
    nearest = distances(z, state["codes"]).argmin(1)
    hot = jax.nn.one_hot(nearest, 20)
    quantized = z + lax.stop_gradient(state["codes"][nearest] - z)
    count = 0.9 * state["count"] + 0.1 * hot.sum(0)
    codes = 0.9 * state["codes"] + 0.1 * lax.stop_gradient(hot.T @ z) / count[:, None]
    use = hot.mean(0)
    aux = {"perplexity": jnp.exp(-jnp.sum(use * jnp.log(use + 1e-10))), "used": (use > 0).sum()}
    loss = jnp.mean((quantized @ p["decoder"] - batch["x"]) ** 2) + 0.25 * jnp.mean((z - state["codes"][nearest]) ** 2)
    return loss, {"codes": codes, "count": count}, aux


@program(EMBED, PAIRS, mutable=lambda: {"queue": jnp.eye(2 * ROWS, WIDTH), "at": jnp.int32(0)})
def moco(p, state, batch):
    """He et al. 2020: negatives are a queue of earlier batches' keys."""
    z, key = embed(p, batch["x"]), lax.stop_gradient(embed(p, batch["y"]))
    logits = jnp.concatenate([jnp.sum(z * key, -1, keepdims=True), z @ state["queue"].T], 1) / 0.5
    queue = lax.dynamic_update_slice(state["queue"], key, (state["at"], 0))
    return xent(logits, jnp.zeros(ROWS, int)).mean(), {"queue": queue, "at": (state["at"] + ROWS) % (2 * ROWS)}


@program(EMBED, LABELED)
def batch_hard_triplets(p, batch):
    """Hermans et al. 2017: the farthest row of the same label, the nearest of another."""
    z, same = encode(p["encoder"], batch["x"]) @ p["head"], batch["label"][:, None] == batch["label"]
    apart = jnp.sqrt(distances(z, z) + 1e-6)
    return jax.nn.softplus(jnp.where(same, apart, 0).max(1) - jnp.where(same, jnp.inf, apart).min(1)).mean()


@program({"encoder": "encoder", "out": (HIDDEN + 1, WIDTH)}, X)
def minibatch_deviation(p, batch):
    """Karras et al. 2018: a channel with the deviation over groups of four rows, which stand 12 rows apart."""
    x = encode(p["encoder"], batch["x"])
    deviation = jnp.sqrt(x.reshape(4, ROWS // 4, HIDDEN).var(0) + 1e-8).mean(-1, keepdims=True)
    x = jnp.concatenate([x, jnp.tile(deviation, (4, 1))], -1)
    return jnp.mean(jax.nn.softplus(x @ p["out"]))


@program(EMBED, X)
def hardest_rows(p, batch):
    """Shrivastava et al. 2016, and the conditional value at risk: the mean over the worst quarter."""
    each = jnp.mean((encode(p["encoder"], batch["x"]) @ p["head"] - batch["x"]) ** 2, -1)
    return jnp.sort(each)[-ROWS // 4 :].mean()


@program(CLASSIFY, LABELED, args=(jax.random.key(16),))
def mixup(p, batch, key):
    """Zhang et al. 2018: each row is mixed with another of the batch."""
    order, part = jax.random.permutation(key, ROWS), jax.random.beta(jax.random.fold_in(key, 1), 0.8, 0.8)
    x = part * batch["x"] + (1 - part) * batch["x"][order]
    logits = encode(p["encoder"], x) @ p["head"]
    label = batch["label"]
    return jnp.mean(part * xent(logits, label) + (1 - part) * xent(logits, jnp.roll(label, 1)[order]))


@program({"encoder": "encoder", "head": (HIDDEN, CLASSES)}, SEQUENCES | {"other": CLASSES})
def alignments(p, batch):
    """Graves et al. 2006, CTC: a scan over time; divided by the batch's number of labels."""
    log_p, there = tokens_of(p, batch)
    labels = jnp.stack([batch["label"], batch["other"]], 1)
    each = optax.ctc_loss(log_p, 1.0 - there, labels, (labels == 0) * 1.0)
    return jnp.sum(each) / jnp.sum(labels != 0)


@program(CLASSIFY, LABELED | {"group": 4}, mutable=lambda: jnp.full(4, 0.25), has_aux=True)
def worst_group(p, weight, batch):
    """Sagawa et al. 2020, group DRO: groups' weights follow their losses over the batch."""
    each = xent(encode(p["encoder"], batch["x"]) @ p["head"], batch["label"])
    count = jax.ops.segment_sum(jnp.ones(ROWS, int), batch["group"], 4)
    mean = jax.ops.segment_sum(each, batch["group"], 4) / count
    weight = weight * jnp.exp(0.5 * lax.stop_gradient(mean))
    weight = weight / weight.sum()
    return weight @ mean, weight, {"mean": mean, "count": count}


@program(EMBED | {"items": (30, WIDTH)}, {"x": (WIDTH,), "item": 30})
def sampled_softmax(p, batch):
    """Yi et al. 2019: items of the batch are the negatives, corrected by how often they are in it."""
    often = jnp.zeros(30).at[batch["item"]].add(1.0)[batch["item"]] / ROWS
    logits = embed(p, batch["x"]) @ p["items"][batch["item"]].T - jnp.log(often)
    return xent(logits, jnp.arange(ROWS)).mean()


@program(EMBED, PAIRS)
def whitened(p, batch):
    """Ermolov et al. 2021: whitened by a Cholesky factor of the batch's covariance."""

    def white(z):
        z = z - z.mean(0)
        factor = jnp.linalg.cholesky(z.T @ z / ROWS + jnp.eye(WIDTH))
        return jax.scipy.linalg.solve_triangular(factor, z.T, lower=True).T

    z, y = (white(encode(p["encoder"], batch[k]) @ p["head"]) for k in "xy")
    return jnp.mean((z - y) ** 2)


@program(EMBED, PAIRS)
def transported(p, batch):
    """Cuturi 2013: an entropic transport between the batch's two halves, differentiated through its scan."""
    z, y = embed(p, batch["x"]), embed(p, batch["y"])
    cost = distances(z, y)

    def step(f, _):
        g = -jax.nn.logsumexp(f[:, None] - cost / 0.5, 0)
        return -jax.nn.logsumexp(g[None] - cost / 0.5, 1), g

    f, g = lax.scan(step, jnp.zeros(ROWS), None, length=5)
    return jnp.sum(jnp.exp(f[:, None] + g[-1][None] - cost / 0.5) * cost) / ROWS
