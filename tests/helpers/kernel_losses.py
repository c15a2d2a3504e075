"""Losses whose attention, norm or experts are kernels, or stand in a `shard_map`: what the engine cannot look into.

More of them are in `tests/programs/kernel_*.py`.

Each takes `(params, batch)` of `make_params` and `make_batch`, and needs a mesh with the axis "data".
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
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


def experts(mesh):
    """Dropless experts, of the tokens of each device."""

    def moe(w, x):
        tokens = x.reshape(-1, x.shape[-1])
        which = jnp.argmax(tokens[:, :EXPERTS], -1)
        order = jnp.argsort(which)
        sizes = jnp.bincount(which, length=EXPERTS).astype(jnp.int32)
        out = jax.lax.ragged_dot(tokens[order], w, sizes)
        return jnp.zeros_like(out).at[order].set(out).reshape(*x.shape[:-1], -1)

    run = jax.shard_map(moe, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))

    def loss(params, x):
        for p in params["layers"]:
            x = x + jnp.tanh(run(params["experts"], x)) @ p["down"]
            x = jnp.tanh(x @ p["up"]) @ p["down"]
        return jnp.mean(x**2) + 0 * sum(jnp.sum(p["qkv"]) for p in params["layers"])

    return loss


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
LOSSES = {
    "in a scan": scanned(in_map(attention)),
    "without types": dense(in_map(attention, check_vma=False)),
    "kernel in a scan": scanned(in_map(pallas_attention, check_vma=False)),
    "kernel under remat": dense(in_map(pallas_attention, check_vma=False), around=jax.checkpoint),
    "bare kernel": dense(lambda mesh: pallas_attention),
    "product in a shard_map": fused_linear(linear_in_shard_map()),
    "product without types": fused_linear(linear_in_shard_map(check_vma=False)),
    "product with a kernel": fused_linear(linear_kernel),
    "experts per device": experts,
    "sorted rows": shuffled(lambda mesh, x: jnp.sort(x, 0)),
    "every other row": shuffled(lambda mesh, x: jnp.concatenate([x[::2], x[1::2]])),
    "constraint": shuffled(back),
    "declared": shuffled(lambda mesh, x: rows(jnp.moveaxis(lost(x), -1, 0))),
    "lost": shuffled(lambda mesh, x: jnp.moveaxis(lost(x), -1, 0)),
}
