"""JAX's training cookbook: Explicit axes, parameters read as attributes, Adam by hand on a state of refs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from zerojax import Tuning, zero_shard


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Config:
    rate: float = 3e-3
    decay_1: float = 0.9
    decay_2: float = 0.99
    eps: float = 1e-3
    layers: int = 2
    heads: int = 2
    width: int = 32
    words: int = 64
    length: int = 8
    rows: int = 16
    by_row: P = dataclasses.field(default_factory=lambda: P("data", None, None))
    by_head: P = dataclasses.field(default_factory=lambda: P("data", None, None, None, None))


@jax.tree_util.register_pytree_with_keys_class
class Items(dict):
    """Items are attributes; an absent one is a KeyError, whatever asks for it."""

    __getattr__ = dict.__getitem__

    def tree_flatten_with_keys(self):
        names = sorted(self)
        return [(jax.tree_util.DictKey(name), self[name]) for name in names], tuple(names)

    @classmethod
    def tree_unflatten(cls, names, values):
        return cls(zip(names, values, strict=True))


def init_params(config):
    draw = np.random.default_rng(0)
    weight = lambda *shape: jnp.asarray(draw.normal(size=shape) * config.width**-0.5, jnp.float32)
    width, head = config.width, config.width // config.heads
    blocks = {
        i: Items(
            qkv=weight(width, 3, config.heads, head),
            out=weight(config.heads, head, width),
            up=weight(width, 4 * width),
            down=weight(4 * width, width),
        )
        for i in range(config.layers)
    }
    positions = jnp.zeros((config.length, width))
    return Items(
        words=weight(config.words, width), positions=positions, blocks=Items(blocks), head=weight(width, config.words)
    )


def normalized(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def apply(config, params, tokens):
    x = params.words.at[tokens].get(out_sharding=config.by_row) + params.positions
    for i in range(config.layers):
        block = params.blocks[i]
        qkv = jnp.einsum("bsd,dnhk->bsnhk", x, block.qkv, out_sharding=config.by_head)
        mixed = jax.nn.dot_product_attention(*(qkv[:, :, n] for n in range(3)), is_causal=True)
        x = normalized(x + jnp.einsum("bshk,hkd->bsd", mixed, block.out, out_sharding=config.by_row))
        hidden = jax.nn.gelu(jnp.einsum("bsd,df->bsf", x, block.up, out_sharding=config.by_row))
        x = normalized(x + jnp.einsum("bsf,fd->bsd", hidden, block.down, out_sharding=config.by_row))
    return jnp.einsum("bsd,dw->bsw", x, params.head, out_sharding=config.by_row)


def cross_entropy(config, params, batch):
    logits = apply(config, params, batch["seen"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"]).mean()


def moments_of(param):
    return Items(mu=jnp.zeros_like(param), nu=jnp.zeros_like(param), count=jnp.array(0))


def all_moments(params):
    return jax.tree.map(moments_of, params)


def adam(config, param, grad, moments):
    moments.mu[...] = config.decay_1 * moments.mu[...] + (1 - config.decay_1) * grad
    moments.nu[...] = config.decay_2 * moments.nu[...] + (1 - config.decay_2) * grad**2
    moments.count[...] += 1
    mu = moments.mu[...] / (1 - config.decay_1 ** moments.count[...])
    nu = moments.nu[...] / (1 - config.decay_2 ** moments.count[...])
    param[...] -= config.rate * mu / (jnp.sqrt(nu) + config.eps)


def batches(config):
    draw = np.random.default_rng(1)
    for _ in range(3):
        tokens = draw.integers(0, config.words, (config.rows, config.length + 1))
        yield {"seen": tokens[:, :-1], "next": tokens[:, 1:]}


def explicit(count):
    return jax.make_mesh((count,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:count])


def plain():
    config, mesh = Config(), explicit(1)

    @jax.jit
    def step(config, state, batch):
        params = jax.tree.map(jax.ref.get, state.params)
        loss, grads = jax.value_and_grad(lambda params: cross_entropy(config, params, batch))(params)
        jax.tree.map(functools.partial(adam, config), state.params, grads, state.moments)
        return loss

    history = []
    with jax.set_mesh(mesh):
        params = jax.jit(init_params)(config)
        state = jax.tree.map(jax.new_ref, Items(params=params, moments=jax.jit(all_moments)(params)))
        for batch in batches(config):
            history.append(step(config, state, jax.device_put(batch, P("data"))))
    return history


def zero(stage, mesh=None):
    config, mesh = Config(), explicit(mesh.size if mesh else jax.device_count())
    tx = zero_shard(optax.identity(), stage=stage, mesh=mesh, tuning=Tuning(persist_below=100))

    @jax.jit
    def step(config, state, batch):
        params = jax.tree.map(jax.ref.get, state.params)
        loss_fn = lambda params, batch: cross_entropy(config, params, batch)
        loss, grads = tx.value_and_grad(loss_fn)(params, batch)
        jax.tree.map(functools.partial(adam, config), state.params, grads, state.moments)
        return loss

    history = []
    with jax.set_mesh(mesh):
        params = tx.init_params(init_params, config)
        state = jax.tree.map(jax.new_ref, Items(params=params, moments=jax.jit(all_moments)(params)))
        for batch in batches(config):
            history.append(step(config, state, jax.device_put(batch, P("data"))))
    return history
