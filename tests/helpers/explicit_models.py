"""Models written for Explicit axes, and the same ones without a word about shardings."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from zerojax import Tuning, zero_shard

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
P = PartitionSpec
DIM, WIDE, HEADS, WORDS, LENGTH, LAYERS, ROWS = 32, 64, 4, 64, 8, 2, 16


def mesh_of(*kinds):
    """Eight devices as ("data",), or as ("data", "model"), with axes of these kinds."""
    shape, names = ((8,), ("data",)) if len(kinds) == 1 else ((4, 2), ("data", "model"))
    return jax.make_mesh(shape, names, axis_types=kinds)


def context(mesh, on):
    """`jax.set_mesh`, or nothing."""
    return jax.set_mesh(mesh) if on else contextlib.nullcontext()


class Model:
    """A model that is written for a mesh: on Auto axes, the same one without a word about shardings.

    Attributes:
        mesh: The mesh.
        named: Whether it gives shardings as `NamedSharding`, which needs no `jax.set_mesh`.
    """

    def __init__(self, mesh, named=False):
        self.mesh, self.named = mesh, named
        self.is_explicit = bool(mesh.explicit_axes)
        self.model = "model" if "model" in mesh.axis_names else None

    def to(self, *spec):
        """The keyword that says how a result is sharded."""
        spec = P(*spec)
        return {"out_sharding": NamedSharding(self.mesh, spec) if self.named else spec} if self.is_explicit else {}

    def as_it_is(self, x):
        return jax.sharding.reshard(x, jax.typeof(x).sharding) if self.is_explicit else x

    def put(self, seed, shape, *spec):
        values = np.random.default_rng(seed).normal(size=shape).astype(np.float32) / 4
        return jax.device_put(values, NamedSharding(self.mesh, P(*spec)))

    def feed_forward(self, seed):
        return {
            "up": self.put(seed, (DIM, WIDE), None, self.model),
            "down": self.put(seed + 1, (WIDE, DIM), self.model, None),
        }

    def wide(self, h, w):
        dims = (None,) * (h.ndim - 2)
        h = jax.nn.gelu(jnp.einsum("...d,df->...f", h, w["up"], **self.to("data", *dims, self.model)))
        return self.as_it_is(jnp.einsum("...f,fd->...d", jax.nn.relu(h), w["down"], **self.to("data", *dims, None)))

    def stacked(self, layers):
        stack = lambda *xs: jax.device_put(np.stack(xs), NamedSharding(self.mesh, P(None, *xs[0].sharding.spec)))
        return jax.tree.map(stack, *layers)

    def through(self, layer, h, layers):
        if isinstance(layers, list):
            return functools.reduce(jax.checkpoint(layer), layers, h)
        return jax.lax.scan(lambda h, w: (jax.checkpoint(layer)(h, w), None), h, layers)[0]


class MLP(Model):
    """Residual layers over rows of numbers."""

    def params(self, scanned):
        layers = [self.feed_forward(10 * i) for i in range(LAYERS)]
        return {"layers": self.stacked(layers) if scanned else layers, "scale": self.put(99, (DIM,))}

    def batch(self):
        return {"x": self.put(7, (ROWS, DIM), "data")}

    def loss(self, params, batch):
        h = self.through(lambda h, w: h + self.wide(h, w), batch["x"], params["layers"])
        return jnp.mean((h * params["scale"]) ** 2)


class GPT(Model):
    """Blocks of attention over the heads, an embedding that is tied to the head, and cross entropy."""

    def params(self, scanned):
        layers = [self.block(10 * i) for i in range(LAYERS)]
        return {"layers": self.stacked(layers) if scanned else layers, "embedding": self.put(99, (WORDS, DIM))}

    def block(self, seed):
        qkv = self.put(seed + 2, (3, DIM, HEADS, DIM // HEADS), None, None, self.model)
        out = self.put(seed + 3, (HEADS, DIM // HEADS, DIM), self.model)
        return {"qkv": qkv, "out": out, **self.feed_forward(seed)}

    def batch(self):
        tokens = np.random.default_rng(5).integers(0, WORDS, (ROWS, LENGTH))
        return {"tokens": jax.device_put(tokens, NamedSharding(self.mesh, P("data")))}

    def layer(self, h, w):
        q, k, v = jnp.einsum("btd,cdhe->cbthe", norm(h), w["qkv"], **self.to(None, "data", None, self.model))
        scores = jnp.einsum("bthe,bshe->bhts", q, k) / 3
        scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e9)
        mixed = jnp.einsum("bhts,bshe->bthe", jax.nn.softmax(scores, -1), v)
        h = h + jnp.einsum("bthe,hed->btd", mixed, w["out"], **self.to("data"))
        return h + self.wide(norm(h), w)

    def logits(self, params, batch):
        h = params["embedding"].at[batch["tokens"]].get(**self.to("data"))
        h = norm(self.through(self.layer, h, params["layers"]))
        return jnp.einsum("btd,vd->btv", h, params["embedding"], **self.to("data"))

    def loss(self, params, batch):
        logits = self.logits(params, batch)
        right = jnp.sum(jax.nn.one_hot(batch["tokens"], WORDS) * logits, -1)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - right)


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def product(x, w, model):
    return jnp.einsum("bd,df->bf", x, w, out_sharding=P("data", model))


def product_forward(x, w, model):
    return product(x, w, model), (x, w)


def product_backward(model, kept, g):
    assert jax.typeof(g).sharding.spec == P("data", model)
    x, w = kept
    return 2 * jnp.einsum("bf,df->bd", g, w, out_sharding=P("data")), jnp.einsum(
        "bd,bf->df", x, g, out_sharding=P(None, model)
    )


product.defvjp(product_forward, product_backward)


def zero(mesh, stage, **options):
    return zero_shard(optax.sgd(0.1), stage=stage, mesh=mesh, tuning=Tuning(persist_below=64), **options)


def assert_equals_plain_jit(mesh, stage, loss, params, batch, *args, **options):
    """Loss and gradients to rounding, and their types: the loss's, and the shape of each gradient's own shard."""
    value, grads = jax.jit(jax.value_and_grad(loss))(params, batch, *args)
    tx = zero(mesh, stage, **options)
    found, found_grads = tx.value_and_grad(loss)(tx.shard(params), batch, *args)
    assert found.sharding.is_equivalent_to(value.sharding, 0)
    assert found.sharding.mesh is mesh
    np.testing.assert_allclose(found, value, rtol=1e-5)
    full = tx.unshard(found_grads)

    def same(x, y, z):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
        assert z.sharding.mesh is mesh
        if stage < 2:
            assert z.sharding.is_equivalent_to(y.sharding, y.ndim)

    jax.tree.map(same, full, grads, found_grads)
