"""Losses whose attention, norm or experts are kernels, or stand in a `shard_map`: what the engine cannot look into.

Each takes `(params, batch)` of `make_params` and `make_batch`, and needs a mesh with the axis "data".
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import rows

ROWS, TIME, WIDTH, HIDDEN, EXPERTS, LAYERS = 16, 6, 40, 72, 3, 2


def make_params(seed=0):
    keys = iter(jax.random.split(jax.random.key(seed), 16))
    normal = lambda *shape: (
        jax.random.normal(next(keys), shape) / shape[-2] ** 0.5 if len(shape) > 1 else jnp.ones(shape)
    )
    layer = lambda: {"qkv": normal(WIDTH, 3 * WIDTH), "up": normal(WIDTH, HIDDEN), "down": normal(HIDDEN, WIDTH)}
    return {"layers": [layer() for _ in range(LAYERS)], "experts": normal(EXPERTS, WIDTH, HIDDEN)}


def make_batch(seed=1):
    return jax.random.normal(jax.random.key(seed), (ROWS, TIME, WIDTH))


def attention(q, k, v):
    """Attention of one head, on any rows."""
    return jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2) / q.shape[-1] ** 0.5) @ v


def with_derivative(forward, backward=None, **options):
    """A function with a derivative of its own, as kernels have. Its residuals are its arguments."""
    fn = jax.custom_vjp(forward)
    pull = backward or (lambda args, g: jax.vjp(attention, *args)[1](g))
    fn.defvjp(lambda *args: (forward(*args), args), pull, **options)
    return fn


def kernel(fn, block=None):
    """A Pallas kernel of arrays whose dim 0 holds rows. `block` rows are in one program; None: all of them."""

    def run(*args):
        shape = jax.eval_shape(fn, *args)
        n = args[0].shape[0] if block is None else block
        spec = lambda x: pl.BlockSpec((n, *x.shape[1:]), lambda i: (i, *[0] * (len(x.shape) - 1)))
        shapes, tree = jax.tree.flatten(shape)

        def body(*refs):
            results = jax.tree.leaves(fn(*(ref[...] for ref in refs[: len(args)])))
            for ref, x in zip(refs[len(args) :], results, strict=True):
                ref[...] = x

        results = pl.pallas_call(
            body,
            out_shape=shapes,
            grid=(args[0].shape[0] // n,),
            in_specs=[*map(spec, args)],
            out_specs=[*map(spec, shapes)],
            interpret=True,
        )(*args)
        return jax.tree.unflatten(tree, results)

    return run


pull_attention = lambda q, k, v, g: jax.vjp(attention, q, k, v)[1](g)
pallas_attention = with_derivative(kernel(attention, 1), lambda args, g: kernel(pull_attention, 1)(*args, g))


def in_shard_map(fn, mesh, count, **options):
    """`fn` of `count` arrays of rows in a `shard_map` over the data axis."""
    return jax.shard_map(fn, mesh=mesh, in_specs=(P("data"),) * count, out_specs=P("data"), **options)


def partitioned():
    """Attention under `custom_partitioning`, with a sharding rule."""

    def made(fn, count, results):
        wrapped = custom_partitioning(fn)
        rule = ", ".join(["b t d"] * count) + " -> " + ", ".join(["b t d"] * results)

        def partition(mesh, args, result):
            spec = args[0].sharding.spec
            given = NamedSharding(args[0].sharding.mesh, P(spec[0] if spec else None))
            return mesh, fn, given if results == 1 else (given,) * results, (given,) * count

        wrapped.def_partition(partition=partition, sharding_rule=rule)
        return wrapped

    forward, backward = made(attention, 3, 1), made(pull_attention, 4, 3)
    return with_derivative(forward, lambda args, g: backward(*args, g))


def by_callback(q, k, v):
    """Attention that NumPy computes on the host."""

    def on_host(q, k, v):
        scores = np.asarray(q) @ np.swapaxes(k, -1, -2) / q.shape[-1] ** 0.5
        exps = np.exp(scores - scores.max(-1, keepdims=True))
        return (exps / exps.sum(-1, keepdims=True) @ np.asarray(v)).astype(np.float32)

    return jax.pure_callback(on_host, jax.ShapeDtypeStruct(q.shape, q.dtype), q, k, v, vmap_method="broadcast_all")


def batched(q, k, v):
    """Attention with a rule for `jax.vmap`."""
    fn = jax.custom_batching.custom_vmap(attention)
    fn.def_vmap(lambda size, given, *args: (attention(*args), True))
    return fn(q, k, v)


def dense(attend, around=lambda layer: layer):
    """A loss with an attention that `attend(mesh)` gives. `around` is a transformation of a layer, such as remat."""

    def on_mesh(mesh):
        fn = attend(mesh)

        @around
        def layer(p, x):
            x = x + fn(*jnp.split(x @ p["qkv"], 3, -1))
            return x + jnp.tanh(x @ p["up"]) @ p["down"]

        def loss(params, x):
            for p in params["layers"]:
                x = layer(p, x)
            return jnp.mean(x**2) + 0 * jnp.sum(params["experts"])

        return loss

    return on_mesh


def scanned(attend):
    """The same with a loop over stacked layers."""

    def on_mesh(mesh):
        fn = attend(mesh)

        def layer(x, p):
            x = x + fn(*jnp.split(x @ p["qkv"], 3, -1))
            return x + jnp.tanh(x @ p["up"]) @ p["down"], None

        def loss(params, x):
            stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *params["layers"])
            x, _ = jax.lax.scan(layer, x, stacked)
            return jnp.mean(x**2) + 0 * jnp.sum(params["experts"])

        return loss

    return on_mesh


def fused_linear(make):
    """A loss with a product in a kernel or `shard_map`: `make(mesh)` is a function of a weight and rows."""

    def on_mesh(mesh):
        fn = make(mesh)

        def loss(params, x):
            for p in params["layers"]:
                x = x + jnp.tanh(fn(p["up"], x)) @ p["down"]
            return (
                jnp.mean(x**2) + 0 * sum(jnp.sum(p["qkv"]) for p in params["layers"]) + 0 * jnp.sum(params["experts"])
            )

        return loss

    return on_mesh


def linear_in_shard_map(**options):
    return lambda mesh: jax.shard_map(
        lambda w, x: x @ w, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), **options
    )


def linear_kernel(mesh):
    """A fused product whose backward kernel gives the weight's gradient, in a `shard_map`."""
    forward = lambda w, x: x @ w
    weight_grad = lambda x, g: jnp.einsum("btd,btf->df", x, g)

    def one(x, g, out):
        out[...] = weight_grad(x[...], g[...])

    fn = jax.custom_vjp(forward)
    grads = lambda x, g: pl.pallas_call(
        one, out_shape=jax.ShapeDtypeStruct((x.shape[-1], g.shape[-1]), x.dtype), interpret=True
    )(x, g)
    fn.defvjp(lambda w, x: (forward(w, x), (w, x)), lambda kept, g: (grads(kept[1], g), g @ kept[0].T))
    return jax.shard_map(fn, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False)


def experts(mixed):
    """Dropless experts. `mixed`: tokens are sorted over all devices; otherwise each device sorts its own."""

    def moe(w, x):
        tokens = x.reshape(-1, x.shape[-1])
        which = jnp.argmax(tokens[:, :EXPERTS], -1)
        order = jnp.argsort(which)
        sizes = jnp.bincount(which, length=EXPERTS).astype(jnp.int32)
        out = jax.lax.ragged_dot(tokens[order], w, sizes)
        return jnp.zeros_like(out).at[order].set(out).reshape(*x.shape[:-1], -1)

    def on_mesh(mesh):
        if not mixed:
            specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
            run = jax.shard_map(moe, mesh=mesh, **specs)
        else:
            run = moe

        def loss(params, x):
            for p in params["layers"]:
                x = x + jnp.tanh(run(params["experts"], x)) @ p["down"]
                x = jnp.tanh(x @ p["up"]) @ p["down"]
            return jnp.mean(x**2) + 0 * sum(jnp.sum(p["qkv"]) for p in params["layers"])

        return loss

    return on_mesh


def shuffled(how):
    """A loss that applies `how` to the rows between two layers."""

    def on_mesh(mesh):
        def loss(params, x):
            for p in params["layers"]:
                x = how(mesh, x @ p["qkv"][:, :WIDTH])
                x = x + jnp.tanh(x @ p["up"]) @ p["down"]
            return jnp.mean(x**2) + 0 * jnp.sum(params["experts"])

        return loss

    return on_mesh


def lost(x):
    """A kernel that returns the rows last: no shape says where they are."""
    fn = lambda x: jnp.moveaxis(x, 0, -1).reshape(TIME, -1)
    run = jax.custom_vjp(
        lambda x: jax.pure_callback(
            lambda x: np.moveaxis(np.asarray(x), 0, -1).reshape(TIME, -1), jax.eval_shape(fn, x), x
        )
    )
    run.defvjp(lambda x: (run(x), None), lambda _, g: (jnp.moveaxis(g.reshape(TIME, WIDTH, -1), -1, 0),))
    return run(x).reshape(TIME, WIDTH, -1)


def back(mesh, x):
    """Rows that a constraint brings back."""
    x = jnp.moveaxis(lost(x), -1, 0)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data")))


in_map = lambda fn, **options: lambda mesh: in_shard_map(fn, mesh, 3, **options)
bare = lambda fn: lambda mesh: fn
remat = functools.partial(dense, around=jax.checkpoint)
LOSSES = {
    "attention in a shard_map": dense(in_map(attention)),
    "under remat": remat(in_map(attention)),
    "plain in a scan": scanned(bare(attention)),
    "in a scan": scanned(in_map(attention)),
    "without types": dense(in_map(attention, check_vma=False)),
    "kernel in a shard_map": dense(in_map(pallas_attention, check_vma=False)),
    "kernel under remat": remat(in_map(pallas_attention, check_vma=False)),
    "kernel in a scan": scanned(in_map(pallas_attention, check_vma=False)),
    "bare kernel": dense(bare(pallas_attention)),
    "bare kernel in a scan": scanned(bare(pallas_attention)),
    "bare kernel under remat": remat(bare(pallas_attention)),
    "custom_partitioning with a rule": dense(bare(partitioned())),
    "custom_vjp without residuals": dense(bare(with_derivative(attention, optimize_remat=True))),
    "custom_vmap": dense(bare(with_derivative(batched))),
    "callback": dense(bare(with_derivative(by_callback))),
    "callback under remat": remat(bare(with_derivative(by_callback))),
    "product in a shard_map": fused_linear(linear_in_shard_map()),
    "product without types": fused_linear(linear_in_shard_map(check_vma=False)),
    "product with a kernel": fused_linear(linear_kernel),
    "experts per device": experts(mixed=False),
    "experts of all devices": experts(mixed=True),
    "sorted rows": shuffled(lambda mesh, x: jnp.sort(x, 0)),
    "every other row": shuffled(lambda mesh, x: jnp.concatenate([x[::2], x[1::2]])),
    "constraint": shuffled(back),
    "declared": shuffled(lambda mesh, x: rows(jnp.moveaxis(lost(x), -1, 0))),
    "lost": shuffled(lambda mesh, x: jnp.moveaxis(lost(x), -1, 0)),
}
