"""A small model, and transformations that keep its parameters on disk or in memory."""

import jax
import jax.numpy as jnp
import optax
from flat_options import tuned
from jax.sharding import AxisType

from zerojax import Offload, zero_shard

LAYERS = 3


def on_disk(path, tx=None, devices=8, **options):
    chosen = {name: options.pop(name) for name in ("chunk_bytes", "host_bytes") if name in options}
    offload = Offload(params="disk", optimizer="disk", path=path, **{"chunk_bytes": 512, **chosen})
    return sharded(tx, devices, offload=offload, **options)


def sharded(tx=None, devices=8, **options):
    tx = optax.adamw(1e-2) if tx is None else tx
    devices = jax.devices()[:devices]
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    return zero_shard(tx, stage=3, mesh=mesh, **tuned(persist_below=64, **options))


def model_params():
    """Stacked layers, a small leaf that persists, and a leaf that neither 3 nor 8 devices share evenly."""
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "embed": jax.random.normal(keys[0], (26, 16)) / 3,
        "layers": {"w": jax.random.normal(keys[1], (LAYERS, 16, 24)) / 5, "bias": jnp.zeros((LAYERS, 16))},
        "uneven": jax.random.normal(keys[2], (13, 7)) / 3,
    }


def batch_of(seed=1):
    return {"tokens": jax.random.randint(jax.random.key(seed), (48,), 0, 26)}


def layer(weights, x):
    return x + jnp.tanh(x @ weights["w"]) @ weights["w"].T + weights["bias"]


def loop(layers, x, body=layer):
    return jax.lax.scan(lambda x, weights: (body(weights, x), None), x, layers)[0]


def one_by_one(layers, x, body=layer):
    for i in range(LAYERS):
        x = body(jax.tree.map(lambda stack, i=i: stack[i], layers), x)
    return x


def loss_of(run, **options):
    def loss(params, batch):
        x = run(params["layers"], params["embed"][batch["tokens"]], **options)
        logits = x @ params["embed"].T
        found = jnp.mean(jax.nn.logsumexp(logits, -1)) + jnp.mean((x[:, :13] @ params["uneven"]) ** 2)
        return found.astype(jnp.promote_types(found.dtype, jnp.float32))

    return loss


LOSSES = {
    "loop": loss_of(loop),
    "remat_loop": loss_of(loop, body=jax.checkpoint(layer)),
    "one_by_one": loss_of(one_by_one),
    "remat_one_by_one": loss_of(one_by_one, body=jax.checkpoint(layer)),
}
