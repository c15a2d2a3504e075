"""Models of other libraries, and parameters of odd forms, train on disk as in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from disk_models import on_disk, sharded

STEPS, ROWS = 3, 8
RTOL = 1e-10  # float64 rounds at 1e-16; normalisations and steps amplify it
ATOL = 1e-11  # Adam divides by at least 1e-8 what rounding makes of zero: the gradient of a bias before a norm


def drawn(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def linen_vision_transformer():
    """A convolution makes patches; a class token; norms, attention and dropout."""
    from flax import linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
            y = nn.Dropout(0.1, deterministic=False)(nn.gelu(nn.Dense(48)(nn.LayerNorm()(x))))
            return x + nn.Dense(16)(y)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, images):
            x = nn.Conv(16, (4, 4), (4, 4))(images).reshape(len(images), -1, 16)
            token = self.param("token", nn.initializers.normal(), (1, 1, 16))
            x = jnp.concatenate([jnp.tile(token, (len(x), 1, 1)), x], 1)
            x = x + self.param("position", nn.initializers.normal(), (1, x.shape[1], 16))
            for _ in range(2):
                x = nn.remat(Block)()(x)
            return nn.Dense(10)(nn.LayerNorm()(x[:, 0]))

    net, key = Net(), jax.random.key(0)
    params = net.init({"params": key, "dropout": key}, jnp.zeros((1, 8, 8, 3)))["params"]

    def loss(params, batch, key):
        logits = net.apply({"params": params}, batch["x"], rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    batch = {"x": drawn(1, ROWS, 8, 8, 3), "y": jnp.arange(ROWS) % 10}
    return params, loss, batch, (jax.random.key(7),)


def nnx_transformer():
    """Blocks are a stack that `nnx.scan` runs over, with `nnx.remat`."""
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.up = nnx.LayerNorm(16, rngs=rngs), nnx.Linear(16, 32, rngs=rngs)
            self.down = nnx.Linear(32, 16, rngs=rngs)

        def __call__(self, x):
            return x + self.down(nnx.gelu(self.up(self.norm(x))))

    class Net(nnx.Module):
        def __init__(self, rngs):
            make = nnx.vmap(Block, in_axes=(0,), out_axes=0)
            self.embed = nnx.Embed(32, 16, dtype=jnp.float64, rngs=rngs)
            self.blocks = nnx.split_rngs(splits=3)(make)(rngs)

        def __call__(self, tokens):
            run = nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(nnx.remat(lambda x, block: block(x)))
            return self.embed.attend(run(self.embed(tokens), self.blocks))

    graph, params = nnx.split(Net(nnx.Rngs(0)), nnx.Param)

    def loss(params, batch):
        logits = nnx.merge(graph, params)(batch)
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(batch, -1, 1)).mean()

    return params, loss, jax.random.randint(jax.random.key(1), (ROWS, 6), 0, 32), ()


def equinox_recurrent():
    """A GRU over time; its cell's functions are static leaves."""
    import equinox as eqx

    keys = jax.random.split(jax.random.key(0))
    model = {"cell": eqx.nn.GRUCell(12, 16, key=keys[0]), "head": eqx.nn.Linear(16, 4, key=keys[1])}
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, batch):
        model = eqx.combine(params, static)

        def one(series):
            step = lambda state, x: (model["cell"](x, state), None)
            return model["head"](jax.lax.scan(step, jnp.zeros(16, series.dtype), series)[0])

        return jnp.mean((jax.vmap(one)(batch["x"]) - batch["y"]) ** 2)

    return params, loss, {"x": drawn(1, ROWS, 5, 12), "y": drawn(2, ROWS, 4)}, ()


def haiku_convolutions():
    """Parameters in a dict of dicts whose names have slashes; batch statistics are of the batch alone."""
    import haiku as hk

    def forward(x):
        x = hk.Conv2D(8, 3, stride=2)(x)
        x = jax.nn.relu((x - x.mean((0, 1, 2))) * jax.lax.rsqrt(x.var((0, 1, 2)) + 1e-3))
        return hk.nets.MLP([32, 3])(hk.Conv2DTranspose(4, 3, stride=2)(x).mean((1, 2)))

    net = hk.without_apply_rng(hk.transform(forward))
    params = net.init(jax.random.key(0), jnp.zeros((1, 8, 8, 3)))
    batch = {"x": drawn(1, ROWS, 8, 8, 3), "y": drawn(2, ROWS, 3)}
    return params, lambda p, batch: jnp.mean((net.apply(p, batch["x"]) - batch["y"]) ** 2), batch, ()


def conv(x, w, stride=1):
    return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def diffusion_unet():
    """Noise is predicted by a network with skip connections, an embedding of time and attention in the middle."""
    params = {
        "time": (drawn(1, 8, 32) / 3, drawn(2, 32, 16) / 5),
        "in": drawn(3, 3, 3, 3, 8) / 5,
        "down": [drawn(4, 3, 3, 8, 16) / 9, drawn(5, 3, 3, 16, 16) / 12],
        "attention": {"qkv": drawn(6, 16, 3, 16) / 4, "out": drawn(7, 16, 16) / 4},
        "up": [drawn(8, 3, 3, 32, 16) / 12, drawn(9, 3, 3, 24, 8) / 12],
        "out": drawn(10, 3, 3, 8, 3) / 9,
    }

    def predicted(p, x, time):
        embedded = jnp.concatenate([f(time[:, None] * 2.0 ** jnp.arange(4)) for f in (jnp.sin, jnp.cos)], 1)
        embedded = jax.nn.silu(embedded @ p["time"][0]) @ p["time"][1]
        h = jax.nn.silu(conv(x, p["in"]))
        first = jax.checkpoint(lambda h, w: jax.nn.silu(conv(h, w, 2)))(h, p["down"][0])
        y = jax.nn.silu(conv(first + embedded[:, None, None], p["down"][1]))
        q, k, v = jnp.moveaxis(jnp.einsum("bhwc,cne->bnhwe", y, p["attention"]["qkv"]).reshape(len(x), 3, -1, 16), 1, 0)
        mixed = jax.nn.softmax(q @ jnp.swapaxes(k, 1, 2) / 4) @ v
        y = y + (mixed @ p["attention"]["out"]).reshape(y.shape)
        y = jax.nn.silu(conv(jnp.concatenate([y, first], -1), p["up"][0]))
        y = jnp.repeat(jnp.repeat(y, 2, 1), 2, 2)
        return conv(jax.nn.silu(conv(jnp.concatenate([y, h], -1), p["up"][1])), p["out"])

    def loss(params, batch, key):
        keys = jax.random.split(key)
        time = jax.random.uniform(keys[0], (len(batch),), batch.dtype)
        noise = jax.random.normal(keys[1], batch.shape, batch.dtype)
        level = time[:, None, None, None]
        return jnp.mean((predicted(params, batch * jnp.sqrt(1 - level) + noise * jnp.sqrt(level), time) - noise) ** 2)

    return params, loss, drawn(11, ROWS, 8, 8, 3), (jax.random.key(3),)


def odd_leaves():
    """A tied embedding, tuples, scalars, arrays of size zero, integers, complex numbers, and unused parameters."""
    params = (
        drawn(1, 32, 16),
        [drawn(2, 16, 16) / 4, {"scale": jnp.ones(()), "empty": jnp.zeros((0, 16))}],
        {"table": jnp.arange(96).reshape(32, 3) % 32, "unused": drawn(3, 16, 8), "count": jnp.array(3)},
        (drawn(4, 16, 9) + 1j * drawn(5, 16, 9), drawn(6, 1, 64, 1), None),
    )

    def loss(params, batch):
        embed, (w, small), integers, (waves, column, _) = params
        x = embed[integers["table"][batch]].sum(1) * small["scale"]
        x = jnp.tanh(x @ w) + jnp.concatenate([small["empty"], x[:1]]).sum(0)
        x = x * (1 + column[0, :16, 0]) + jnp.real(jnp.abs(x @ waves) ** 2).mean(-1, keepdims=True)
        return jnp.mean(jax.nn.logsumexp(x @ embed.T / integers["count"], -1))

    return params, loss, jax.random.randint(jax.random.key(1), (ROWS,), 0, 32), ()


def taught():
    """A teacher is a part of the parameters whose gradient is stopped. The student's codes pass straight through."""
    layers = lambda seed: [drawn(seed + i, 16, 16) / 4 for i in range(2)]
    params = {"student": layers(1), "teacher": layers(3), "codes": drawn(5, 32, 16)}

    def encoded(layers, x):
        for w in layers:
            x = x + jnp.tanh(x @ w)
        return x

    def loss(params, batch):
        x, target = encoded(params["student"], batch), jax.lax.stop_gradient(encoded(params["teacher"], batch))
        near = params["codes"][jnp.argmin(jnp.sum((x[:, None] - params["codes"]) ** 2, -1), -1)]
        codes = jnp.mean((jax.lax.stop_gradient(x) - near) ** 2)
        return jnp.mean((x + jax.lax.stop_gradient(near - x) - target) ** 2) + codes

    return params, loss, drawn(6, ROWS, 16), ()


MODELS = (
    linen_vision_transformer,
    nnx_transformer,
    equinox_recurrent,
    haiku_convolutions,
    diffusion_unet,
    odd_leaves,
    taught,
)


def wide(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x, tree)


def trained(tx, params, loss, batch, args):
    step, state, losses = tx.train_step(loss), tx.create(params), []
    for _ in range(STEPS):
        state, metrics = step(state, batch, *args)
        losses.append(metrics["loss"])
    return jax.device_get((losses, tx.unshard(state.params), tx.unshard(state.opt_state, state.params)))


@pytest.mark.slow
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_a_model_of_others_trains_as_in_memory(tmp_path, make):
    with jax.enable_x64(True):
        params, loss, batch, args = wide(make()[0]), *make()[1:]
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
        found = trained(on_disk(tmp_path, tx, devices=2), params, loss, wide(batch), args)
        wanted = trained(sharded(tx, devices=2), params, loss, wide(batch), args)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        atol = max(ATOL, RTOL * np.abs(y).max(initial=0))
        np.testing.assert_allclose(x, y, rtol=RTOL, atol=atol, err_msg=jax.tree_util.keystr(path))
