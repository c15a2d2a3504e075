"""Programs in which rows of the batch meet, or which change if each device sees its own rows alone: the table of them.

Those from published models are in `published_losses.py`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

ROWS = 48  # divides by 1, 3 and 8 devices, and by 2 microbatches on each
WIDTH, HIDDEN, CLASSES = 16, 24, 8
UNROLLED = {"embed": (WIDTH, HIDDEN), "layers": [(HIDDEN, HIDDEN)]}
SCANNED = {"embed": (WIDTH, HIDDEN), "stack": (3, HIDDEN, HIDDEN)}
HEAD = (HIDDEN, WIDTH)
X = {"x": (WIDTH,)}
PAIRS = {"x": (WIDTH,), "y": (WIDTH,)}
LABELED = {"x": (WIDTH,), "label": CLASSES}


@dataclasses.dataclass(frozen=True)
class Program:
    """A loss, and what `train_step` is to be told of it.

    Attributes:
        loss: `loss(params, batch, *args)`, or with `mutable` `loss(params, mutable, batch, *args)`.
        shapes: The parameters' shapes, or a function that makes the parameters; "encoder" is one of the two above.
        rows: One row of the batch: a shape is normal numbers, an integer a label below it.
        args: Further arguments.
        mutable: The mutable state it begins with, or a function that makes it.
        has_aux: Whether it returns aux.
        on_mesh: Whether `loss` is to be called with a mesh first, and returns the loss.
        rows_meet: Whether the loss is more than the mean over its rows, so that it has no microbatches.
    """

    loss: Callable
    shapes: Any
    rows: dict[str, Any]
    args: tuple = ()
    mutable: Any = None
    has_aux: bool = False
    on_mesh: bool = False
    rows_meet: bool = True

    def params(self, *, scanned: bool) -> Any:
        if callable(self.shapes):
            return self.shapes()
        encoder = SCANNED if scanned else UNROLLED
        return weights({k: encoder if v == "encoder" else v for k, v in self.shapes.items()})

    def start(self) -> Any:
        return self.mutable() if callable(self.mutable) else self.mutable

    def batch(self, number: int) -> dict[str, Any]:
        rng = np.random.default_rng(number)
        return {name: column(rng, row) for name, row in self.rows.items()}

    def call(self, mesh, params, mutable, batch, args) -> tuple:
        """`(loss, mutable, aux)`, whatever the form of the loss."""
        loss = self.loss(mesh) if self.on_mesh else self.loss
        if self.mutable is None:
            returned = loss(params, batch, *args)
            value, aux = returned if self.has_aux else (returned, None)
            return value, None, aux
        return (*loss(params, mutable, batch, *args), *(() if self.has_aux else (None,)))


def column(rng, row):
    if row == "key":
        return jax.random.split(jax.random.key(rng.integers(99)), ROWS)
    return rng.integers(row, size=ROWS) if isinstance(row, int) else rng.normal(size=(ROWS, *row)).astype(np.float32)


def weights(shapes):
    """That keep the size of what they are applied to; a vector is near 1."""
    rng = np.random.default_rng(5)

    def make(shape):
        shape = getattr(shape, "shape", shape)
        noise = rng.normal(size=shape).astype(np.float32)
        return noise / math.sqrt(shape[-2]) if len(shape) > 1 else 1 + noise / 8

    return jax.tree.map(make, shapes, is_leaf=lambda x: isinstance(x, tuple))


TABLE: dict[str, Program] = {}


def program(shapes, rows, **options):
    """Enter the function below in the table."""

    def enter(loss):
        TABLE[loss.__name__] = Program(loss, shapes, rows, **options)
        return loss

    return enter


def layer(x, w):
    return x + jnp.tanh(x @ w)


def encode(p, x):
    x = x @ p["embed"]
    for w in p.get("layers", ()):
        x = layer(x, w)
    if "stack" in p:
        x, _ = lax.scan(jax.checkpoint(lambda x, w: (layer(x, w), None)), x, p["stack"])
    return x


def embed(p, x):
    """On the unit sphere."""
    z = encode(p["encoder"], x) @ p["head"]
    return z / jnp.linalg.norm(z, axis=-1, keepdims=True)


def xent(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def dropout(key, x):
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x / 0.5, 0)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(HIDDEN, momentum=0.9, rngs=rngs)
        self.drop = nnx.Dropout(0.5)
        self.out = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

    def __call__(self, x, rngs):
        return self.out(self.drop(jax.nn.silu(self.norm(self.hidden(x))), rngs=rngs))


@functools.cache
def model_parts():
    graph, params, stats = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(4))), nnx.Param, nnx.BatchStat)
    return graph, weights(params), weights(stats)


@program(
    lambda: model_parts()[1],
    LABELED,
    args=(jax.random.key(12),),
    mutable=lambda: weights(model_parts()[2]),
    has_aux=True,
)
def nnx_batch_norm_and_dropout(p, stats, batch, key):
    model = nnx.merge(model_parts()[0], p, stats, copy=True)
    logits = model(batch["x"], nnx.Rngs(key))
    return xent(logits, batch["label"]).mean(), nnx.state(model, nnx.BatchStat), logits


@program(
    {"encoder": "encoder", "scale": (HIDDEN,), "stack": (3, HIDDEN, HIDDEN), "head": (HIDDEN, CLASSES)},
    LABELED,
    mutable=lambda: {"mean": jnp.zeros((3, HIDDEN)), "var": jnp.ones((3, HIDDEN))},
)
def batch_norm_in_a_scan(p, stats, batch):
    """Running averages of stacked layers are outputs of the scan."""

    def normed(x, xs):
        w, old = xs
        y = x @ w
        mean, var = y.mean(0), y.var(0)
        new = {"mean": 0.9 * old["mean"] + 0.1 * mean, "var": 0.9 * old["var"] + 0.1 * var}
        return x + jnp.tanh((y - mean) * lax.rsqrt(var + 1e-3) * p["scale"]), new

    x, stats = lax.scan(normed, encode(p["encoder"], batch["x"]), (p["stack"], stats))
    return xent(x @ p["head"], batch["label"]).mean(), stats


@program({"encoder": "encoder", "head": (HIDDEN, CLASSES)}, LABELED, has_aux=True)
def logits_and_counts_as_aux(p, batch):
    logits = encode(p["encoder"], batch["x"]) @ p["head"]
    found = logits.argmax(-1)
    confusion = jnp.zeros((CLASSES, CLASSES), jnp.int32).at[batch["label"], found].add(1)
    right = found == batch["label"]
    aux = {"logits": logits, "found": found, "right": right, "count": right.sum(), "confusion": confusion}
    return xent(logits, batch["label"]).mean(), aux


CLOSED_OVER = jax.random.key(13)


@program({"encoder": "encoder", "head": HEAD}, X, has_aux=True)
def closed_over_key(p, batch):
    x = dropout(CLOSED_OVER, encode(p["encoder"], batch["x"]))
    return jnp.mean((x @ p["head"] - batch["x"]) ** 2), x


@program({"stack": (3, WIDTH, WIDTH)}, X, args=(jax.random.key(14),), has_aux=True)
def key_argument(p, batch, key):
    """Dropout in scanned layers, under remat."""

    @jax.checkpoint
    def dropped(x, xs):
        w, key = xs
        kept = dropout(key, jnp.tanh(x @ w))
        return x + kept, kept

    x, kept = lax.scan(dropped, batch["x"], (p["stack"], jax.random.split(key, 3)))
    return jnp.mean((x - 1) ** 2), kept


@program({"encoder": "encoder", "head": HEAD}, X | {"key": "key"}, rows_meet=False)
def keys_in_the_batch(p, batch):
    x = jax.vmap(dropout)(batch["key"], encode(p["encoder"], batch["x"]))
    return jnp.mean((x @ p["head"] - batch["x"]) ** 2)


@program({"encoder": "encoder", "head": HEAD}, X, rows_meet=False)
def rows_alone(p, batch):
    """With a penalty that no row takes part in."""
    penalty = sum(jnp.sum(w**2) for w in jax.tree.leaves(p))
    return jnp.mean((encode(p["encoder"], batch["x"]) @ p["head"] - batch["x"]) ** 2) + 1e-2 * penalty


EXPERTS = {"router": (2, WIDTH, 4), "up": (2, 4, WIDTH, HIDDEN), "down": (2, 4, HIDDEN, WIDTH)}


def balance(probabilities, chosen):
    """Switch Transformer's load-balancing loss."""
    return probabilities.shape[1] * jnp.sum(probabilities.mean(0) * chosen.mean(0))


@program(EXPERTS, X, has_aux=True)
def experts_with_capacity(p, batch):
    """Each row goes to two experts; each expert takes its first 16 rows of the batch, in a scan over the layers."""

    def experts(x, p):
        probabilities = jax.nn.softmax(x @ p["router"])
        gates, chosen = lax.top_k(probabilities, 2)
        chosen = jax.nn.one_hot(chosen.T.reshape(-1), 4)  # first choices before second ones
        place = (chosen.cumsum(0) * chosen).sum(-1).astype(jnp.int32) - 1
        send = (chosen[:, :, None] * jax.nn.one_hot(place, 16)[:, None]).reshape(2, -1, 4, 16)
        y = jnp.einsum("knec,nd->ecd", send, x)
        y = jnp.tanh(y @ p["up"]) @ p["down"]
        y = jnp.einsum("knec,nk,ecd->nd", send, gates, y)
        return x + y, (balance(probabilities, chosen[: len(x)]), send.sum((0, 1, 3)))

    x, (balanced, load) = lax.scan(experts, batch["x"], p)
    return jnp.mean((x - batch["x"][::-1]) ** 2) + 0.01 * balanced.sum(), load


@program({"encoder": "encoder", "head": HEAD}, X, on_mesh=True)
def constrained(mesh):
    """The model's own sharding constraints: of rows, and of the hidden dim."""

    def loss(p, batch):
        at = lambda x, *spec: lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))
        x = at(encode(p["encoder"], at(batch["x"], "data")), "data")
        x = at(at(jnp.tanh(x), None, "data") @ at(p["head"], "data"), "data")
        return jnp.mean((x - x.mean(0) - batch["x"]) ** 2)

    return loss


@program({"encoder": "encoder", "w": (HIDDEN, HIDDEN), "head": HEAD}, X, on_mesh=True)
def manual_over_data(mesh):
    """A `shard_map` over the rows' axis: one weight sharded, one replicated."""
    rows, replicated = PartitionSpec("data"), PartitionSpec()

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(rows, rows, replicated), out_specs=rows)
    def centered(x, shard, head):
        x = jnp.tanh(x @ lax.all_gather(shard, "data", tiled=True))
        return (x - lax.pmean(x.mean(0), "data")) @ head

    def loss(p, batch):
        return jnp.mean((centered(encode(p["encoder"], batch["x"]), p["w"], p["head"]) - batch["x"]) ** 2)

    return loss
