"""A diffusion transformer: patches, adaLN-Zero blocks in a scan, labels dropped for guidance, EMA, a sampler."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax import zero_shard

SIDE, PATCH, CHANNELS, WIDTH, HEADS, LAYERS, CLASSES, TIMES, ROWS = 8, 2, 3, 32, 2, 3, 10, 100, 16
PIXELS, COUNT = PATCH * PATCH * CHANNELS, (SIDE // PATCH) ** 2
ALPHAS = np.cumprod(1 - np.linspace(1e-4, 0.05, TIMES)).astype(np.float32)
INNER = optax.adamw(1e-2, eps=1e-4, weight_decay=0.0)


def init_params(key):
    keys = iter(jax.random.split(key, 9))
    weight = lambda *shape: jax.random.normal(next(keys), shape) * shape[-2] ** -0.5
    block = {
        "qkv": weight(LAYERS, WIDTH, 3 * WIDTH),
        "out": weight(LAYERS, WIDTH, WIDTH),
        "up": weight(LAYERS, WIDTH, 4 * WIDTH),
        "down": weight(LAYERS, 4 * WIDTH, WIDTH),
        "modulate": jnp.zeros((LAYERS, WIDTH, 6 * WIDTH)),  # a block is the identity at first
    }
    time = {"in": weight(WIDTH, WIDTH), "out": weight(WIDTH, WIDTH)}
    last = {"modulate": jnp.zeros((WIDTH, 2 * WIDTH)), "out": jnp.zeros((WIDTH, PIXELS)), "bias": jnp.zeros(PIXELS)}
    label = weight(CLASSES + 1, WIDTH)  # the last one is none
    return {"patch": weight(PIXELS, WIDTH), "label": label, "time": time, "blocks": block, "last": last}


def patches(images):
    side = SIDE // PATCH
    return images.reshape(-1, side, PATCH, side, PATCH, CHANNELS).swapaxes(2, 3).reshape(-1, COUNT, PIXELS)


def waves(t, width=WIDTH):
    angles = t[..., None] * jnp.exp(-jnp.log(1e4) * jnp.arange(width // 2) / (width // 2))
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1)


def normalized(x, shift, scale):
    x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
    return x * (1 + scale[:, None]) + shift[:, None]


def predict(params, noisy, t, label):
    x = noisy @ params["patch"] + waves(jnp.arange(COUNT))
    c = jax.nn.silu(waves(t) @ params["time"]["in"]) @ params["time"]["out"] + params["label"][label]

    @jax.checkpoint
    def block(x, p):
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = jnp.split(jax.nn.silu(c) @ p["modulate"], 6, -1)
        qkv = (normalized(x, shift_1, scale_1) @ p["qkv"]).reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        mixed = jax.nn.dot_product_attention(*(qkv[:, :, i] for i in range(3))).reshape(x.shape)
        x = x + gate_1[:, None] * (mixed @ p["out"])
        return x + gate_2[:, None] * (jax.nn.gelu(normalized(x, shift_2, scale_2) @ p["up"]) @ p["down"]), None

    x, _ = jax.lax.scan(block, x, params["blocks"])
    shift, scale = jnp.split(jax.nn.silu(c) @ params["last"]["modulate"], 2, -1)
    return normalized(x, shift, scale) @ params["last"]["out"] + params["last"]["bias"]


def loss_fn(params, batch, key):
    keys, clean = jax.random.split(key, 3), patches(batch["image"])
    t = jax.random.randint(keys[0], (ROWS,), 0, TIMES)
    noise = jax.random.normal(keys[1], clean.shape)
    label = jnp.where(jax.random.bernoulli(keys[2], 0.1, (ROWS,)), CLASSES, batch["label"])
    alpha = jnp.asarray(ALPHAS)[t][:, None, None]
    found = predict(params, jnp.sqrt(alpha) * clean + jnp.sqrt(1 - alpha) * noise, t, label)
    return jnp.mean((found - noise) ** 2)


def sample(params, label, key):
    """Few steps of DDIM with guidance."""
    x = jax.random.normal(key, (ROWS, COUNT, PIXELS))

    def step(x, times):
        t, before = times
        both = [predict(params, x, jnp.full(ROWS, t), y) for y in (label, jnp.full(ROWS, CLASSES))]
        noise = both[1] + 1.5 * (both[0] - both[1])
        clean = (x - jnp.sqrt(1 - alphas[t]) * noise) / jnp.sqrt(alphas[t])
        return jnp.sqrt(alphas[before]) * clean + jnp.sqrt(1 - alphas[before]) * noise, None

    alphas = jnp.asarray(ALPHAS)
    return jax.lax.scan(step, x, (jnp.array([90, 60, 30]), jnp.array([60, 30, 0])))[0]


def batches():
    draw = np.random.default_rng(0)
    for _ in range(3):
        image = draw.normal(size=(ROWS, SIDE, SIDE, CHANNELS)).astype(np.float32)
        yield {"image": image, "label": draw.integers(0, CLASSES, ROWS)}


def plain():
    params, tx = jax.jit(init_params)(jax.random.key(0)), INNER
    opt_state, ema = tx.init(params), params

    @jax.jit
    def train_step(params, opt_state, ema, batch, key):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch, key)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, optax.incremental_update(params, ema, 0.1), loss

    losses = []
    for batch, key in zip(batches(), jax.random.split(jax.random.key(1), 3), strict=True):
        params, opt_state, ema, loss = train_step(params, opt_state, ema, batch, key)
        losses.append(loss)
    images = jax.jit(sample)(ema, np.arange(ROWS) % CLASSES, jax.random.key(2))
    return losses, images, ema


def zero(stage, mesh=None):
    tx = zero_shard(INNER, stage=stage, mesh=mesh, persist_below=20)
    params = tx.init_params(init_params, jax.random.key(0))
    opt_state, ema = tx.init(params), params

    @jax.jit
    def train_step(params, opt_state, ema, batch, key):
        loss, grads = tx.value_and_grad(loss_fn)(params, batch, key)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, optax.incremental_update(params, ema, 0.1), loss

    losses = []
    for batch, key in zip(batches(), jax.random.split(jax.random.key(1), 3), strict=True):
        params, opt_state, ema, loss = train_step(params, opt_state, ema, batch, key)
        losses.append(loss)
    images = tx.eval_step(sample)(ema, np.arange(ROWS) % CLASSES, jax.random.key(2))
    return losses, images, tx.unshard(ema)
