"""Count how often stage 3 gathers and reduces parameters if the loss has a term of parameters alone.

    python benchmarks/shards.py                                  every term, unrolled and scanned, global view
    python benchmarks/shards.py --view device --terms L2 norm    some terms, in device view
    python benchmarks/shards.py --more                           fifteen further programs
    python benchmarks/shards.py --stage 2 --step                 a whole step of stage 2

The model has four blocks, each under `jax.checkpoint`, and is compiled for eight simulated CPU devices.

- `gathered` are the bytes that all-gathers move, divided by the bytes of the sharded parameters. Without a term they
  are 1.75 if the blocks are unrolled, and 2.00 if they are scanned. (jax 0.10 gives smaller numbers on CPU, because it
  merges the gathers of the two passes.)
- `reduced` is the same for reductions of arrays as large as a layer: 1.00 without a term.
- `calls` counts the executions of all collectives.
- `flops` are a device's FLOPs in matrix products, relative to the program without the term.
- `extra` are all FLOPs of a device beyond those of the program without the term, per element of the parameters. XLA
  counts the body of a loop once.
"""

import argparse
import functools
import itertools
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import optax
from jax import lax

from zerojax import Tuning, collectives, zero_shard
from zerojax.inspect.hlo import read
from zerojax.inspect.roofline import kernels, product_flops

DEPTH, WIDTH, HIDDEN, ROWS, DEVICES = 4, 64, 128, 64, 8


def parameters(style, width=WIDTH):
    """Return the parameters of four blocks, in a list (`unrolled`) or in stacks (`scanned`)."""
    keys = jax.random.split(jax.random.key(0), DEPTH)
    one = lambda key: {
        "up": jax.random.normal(key, (width, HIDDEN)) * 0.1,
        "down": jax.random.normal(jax.random.fold_in(key, 1), (HIDDEN, width)) * 0.1,
    }
    layers = [one(key) for key in keys]
    return layers if style == "unrolled" else jax.tree.map(lambda *x: jnp.stack(x), *layers)


def block(x, w):
    """Compute one residual block."""
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def model(layers, x):
    """Run the four blocks, each under `jax.checkpoint`."""
    if isinstance(layers, list):
        for w in layers:
            x = jax.checkpoint(block)(x, w)
        return x
    return lax.scan(lambda x, w: (jax.checkpoint(block)(x, w), None), x, layers)[0]


def plus(penalty):
    """Return a loss with a penalty on each leaf."""

    def loss(layers, x):
        value = jnp.mean(model(layers, x) ** 2)
        return value + 1e-3 * sum(penalty(w) for w in jax.tree.leaves(layers))

    return loss


def changed(change):
    """Return a loss whose leaves are changed before the model reads them."""
    return lambda layers, x: jnp.mean(model(jax.tree.map(change, layers), x) ** 2)


def per_layer(fn):
    """Apply a function of a matrix to a leaf, which may be a stack of matrices."""
    return lambda w: fn(w) if w.ndim == 2 else jnp.sum(jax.vmap(fn)(w))


def spectral(w):
    """Return the largest singular value of a matrix by three power iterations."""
    v = jnp.ones((w.shape[1],), w.dtype)
    for _ in range(3):
        u = w @ v
        u = u / jnp.linalg.norm(u)
        v = w.T @ u
        v = v / jnp.linalg.norm(v)
    return u @ (w @ v)


def standardised(w):
    """Return a matrix whose columns have mean 0 and variance 1."""
    mean = jnp.mean(w, axis=-2, keepdims=True)
    return (w - mean) / jnp.sqrt(jnp.var(w, axis=-2, keepdims=True) + 1e-5)


def orthogonality(w):
    """Return the squared distance of `W^T W` from the identity."""
    return jnp.sum((w.T @ w - jnp.eye(w.shape[1], dtype=w.dtype)) ** 2)


def by_spectral_norm(w):
    """Divide a matrix, or each matrix of a stack, by its spectral norm."""
    return w / spectral(w) if w.ndim == 2 else w / jax.vmap(spectral)(w)[:, None, None]


def weight_norm(w):
    """Normalise the columns of a matrix."""
    return w / jnp.linalg.norm(w, axis=-2, keepdims=True)


def gained(layers, x):
    """Return a loss with weight norm and a trained gain."""
    weights, gains = layers
    return jnp.mean(model(jax.tree.map(lambda w, g: g * weight_norm(w), weights, gains), x) ** 2)


def distance(w):
    """Return the squared distance to a reference point, which the loss closes over."""
    return jnp.sum((w - jnp.full(w.shape, 0.1)) ** 2)


PLAIN = plus(lambda w: 0.0)
TERMS = {
    "none": PLAIN,
    "L2": plus(lambda w: jnp.sum(w**2)),
    "L1": plus(lambda w: jnp.sum(jnp.abs(w))),
    "norm": plus(jnp.linalg.norm),
    "reference": plus(distance),
    "orthogonality": plus(per_layer(orthogonality)),
    "spectral": changed(by_spectral_norm),
    "standardised": changed(standardised),
    "weight norm": gained,
}


def clipped_norm(w):
    """Scale the columns of a matrix to norms of at most 1."""
    return w * jnp.minimum(1, 1 / jnp.linalg.norm(w, axis=-2, keepdims=True))


def neighbours(layers, x):
    """Return a loss with inner products of neighbouring layers."""
    pairs = itertools.pairwise(layers) if isinstance(layers, list) else []
    inner = sum(jnp.vdot(a["up"], b["up"]) for a, b in pairs)
    if isinstance(layers, dict):
        inner = jnp.sum(layers["up"][1:] * layers["up"][:-1])
    return PLAIN(layers, x) + 1e-3 * inner


def entropy(w):
    """Return the entropy of the softmax of a leaf."""
    p = jax.nn.softmax(w.ravel())
    return -jnp.sum(p * jnp.log(p))


def fisher(w):
    """Return the penalty of elastic weight consolidation, with a reference point and a weight per element."""
    return jnp.sum(jnp.full(w.shape, 2.0) * (w - jnp.full(w.shape, 0.1)) ** 2)


def hyper(layers, x):
    """Return a loss whose weights are scaled by functions of the weights' own means."""
    gate = jax.tree.map(lambda w: jax.nn.sigmoid(jnp.mean(w, axis=(-2, -1), keepdims=True)), layers)
    return jnp.mean(model(jax.tree.map(jnp.multiply, layers, gate), x) ** 2)


MORE = {
    "spectral penalty": plus(per_layer(spectral)),
    "low rank": plus(per_layer(lambda w: jnp.sum((w - w[:, :2] @ w[:2]) ** 2))),
    "own gates": hyper,
    "EWC": plus(fisher),
    "clipping": changed(lambda w: jnp.clip(w, -0.1, 0.1)),
    "maxnorm": changed(clipped_norm),
    "sparsity mask": changed(lambda w: w * (jnp.abs(w) > 0.05)),
    "top mask": changed(lambda w: w * (jnp.abs(w) > 0.5 * jnp.max(jnp.abs(w)))),
    "scaled by max": changed(lambda w: w / jnp.max(jnp.abs(w), axis=(-2, -1), keepdims=True)),
    "group lasso": plus(lambda w: jnp.sum(jnp.linalg.norm(w, axis=-1))),
    "log determinant": plus(per_layer(lambda w: jnp.linalg.slogdet(w.T @ w + jnp.eye(w.shape[1]))[1])),
    "entropy": plus(entropy),
    "neighbours": neighbours,
    "kurtosis": plus(lambda w: jnp.mean((w - jnp.mean(w)) ** 4) / jnp.var(w) ** 2),
    "total variation": plus(lambda w: jnp.sum(jnp.abs(w[..., 1:, :] - w[..., :-1, :]))),
    "transposed": plus(per_layer(lambda w: jnp.sum((w @ jnp.ones(w.shape[1])) ** 2) + jnp.sum(jnp.sum(w, 0) ** 2))),
}


def compiled(loss, params, *, view="global", stage=3, mesh=None, step=False, **options):
    """Compile the gradient of a loss, or a step."""
    mesh = mesh or jax.make_mesh((DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = zero_shard(optax.sgd(0.1), stage=stage, mesh=mesh, view=view, tuning=Tuning(persist_below=1000), **options)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    if step:
        return tx.train_step(loss).lower(tx.create(params), x).compile()
    return jax.jit(tx.value_and_grad(loss)).lower(tx.shard(params), x).compile()


def cost(program, params):
    """Return `(bytes gathered, bytes reduced, calls of collectives, FLOPs in products, all FLOPs)` of a program."""
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(params)]
    large = min(s for s in sizes if s > 4 * 1000) // (DEPTH if isinstance(params, dict) else 1)
    gathered = reduced = calls = 0
    for c in collectives(program):
        moved = c.bytes * c.times_if_once
        calls += c.times_if_once
        gathered += moved if c.kind == "all-gather" else 0
        reduced += moved if c.kind in ("reduce-scatter", "all-reduce") and c.bytes >= large else 0
    analysis = program.cost_analysis()
    every = (analysis[0] if isinstance(analysis, list) else analysis)["flops"]
    return gathered, reduced, calls, sum(product_flops(kernels(read(program))).values()), every


def row(name, loss, style, **options):
    """Compile one program, and return its figures."""
    params = parameters(style)
    if name == "weight norm":
        params = params, jax.tree.map(lambda w: jnp.ones((*w.shape[:-2], 1, w.shape[-1])), params)
    total = sum(x.size * 4 for x in jax.tree.leaves(parameters(style)))
    gathered, reduced, calls, *flops = cost(compiled(loss, params, **options), parameters(style))
    return gathered / total, reduced / total, calls, *flops


def main():
    """Print a line per term and style."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--terms", nargs="+", default=list(TERMS))
    parser.add_argument("--view", default="global")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--styles", nargs="+", default=["unrolled", "scanned"])
    parser.add_argument("--more", action="store_true")
    parser.add_argument("--step", action="store_true")
    args = parser.parse_args()
    programs = {**TERMS, **MORE}
    options = {"view": args.view, "stage": args.stage, "step": args.step}
    head = ("term", "style", "gathered", "reduced", "calls", "flops", "extra")
    print("{:16s} {:9s} {:>8s} {:>8s} {:>6s} {:>6s} {:>6s}".format(*head), flush=True)
    elements = sum(x.size for x in jax.tree.leaves(parameters("scanned")))
    for style in args.styles:
        base = functools.cache(lambda style=style: row("none", PLAIN, style, **options)[3:])
        for name in MORE if args.more else args.terms:
            gathered, reduced, calls, flops, every = row(name, programs[name], style, **options)
            relative, extra = flops / base()[0], (every - base()[1]) / elements
            line = f"{name:16s} {style:9s} {gathered:8.2f} {reduced:8.2f} {calls:6d} {relative:6.2f} {extra:6.1f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
