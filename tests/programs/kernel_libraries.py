"""Losses with the kernels of libraries, as they run on a CPU; those that are not installed are left out."""

import importlib.util

import jax
import jax.numpy as jnp
import kernels
from kernel_experts import EXPERT, TOP_K, dropless, routed
from kernel_registry import HIDDEN, MLP, QKV, WIDTH, head, heads, layer, merged, norm

LIBRARIES = ("tokamax", "qwix", "ejkernel")


def imported(name):
    """A library; None if it is not installed, or not for this Python or jax."""
    try:
        return importlib.import_module(name) if importlib.util.find_spec(name) else None
    except (ImportError, SyntaxError):
        return None


tokamax, qwix, ejkernel = map(imported, LIBRARIES)

if tokamax is not None:
    from_tokamax = {"implementation": "xla"}

    @layer("Libraries", QKV)
    def tokamax_attention(where, x, w):
        """tokamax's attention"""
        return merged(x, tokamax.dot_product_attention(*heads(x, w), **from_tokamax), w)

    @layer("Libraries", {**MLP, "scale": (WIDTH,), "offset": (WIDTH,)})
    def tokamax_layer_norm(where, x, w):
        """tokamax's layer norm"""
        x = tokamax.layer_norm(x, w["scale"], w["offset"], **from_tokamax)
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"]

    @layer("Libraries", {"up": (WIDTH, 2 * HIDDEN), "down": MLP["down"]})
    def tokamax_glu(where, x, w):
        """tokamax's gated linear unit"""
        weights = w["up"].reshape(WIDTH, 2, HIDDEN)
        return x + tokamax.gated_linear_unit(norm(x), weights, activation=jax.nn.silu, **from_tokamax) @ w["down"]

    @layer("Libraries", EXPERT, shared=TOP_K)
    def tokamax_ragged_dot(where, x, w):
        """Experts by tokamax's ragged dot in a `shard_map`"""
        by = lambda *args: tokamax.ragged_dot(*args, **from_tokamax)
        run = where.per_device(dropless(by), (0, 0, 0, None, None))
        return x + run(norm(x), *routed(x, w), w["up"], w["down"])

    @head("Libraries")
    def tokamax_linear_xent(where, x, w, labels):
        """tokamax's product and cross entropy in a `shard_map`"""

        def local(x, labels, w):
            how = {"reduction": "none", **from_tokamax}
            flat = tokamax.linear_softmax_cross_entropy_loss(x.reshape(-1, WIDTH), labels.reshape(-1), w, **how)
            return flat.reshape(labels.shape)

        return where.per_device(local, (0, 0, None))(x, labels, w)


if qwix is not None:
    from flax import linen as nn

    _RULES = [qwix.QtRule(module_path=".*", weight_qtype=jnp.int8, act_qtype=jnp.int8)]
    _dense = qwix.quantize_model(nn.Dense(HIDDEN, use_bias=False), qwix.QtProvider(_RULES))

    @layer("Libraries", {**QKV, **MLP})
    def qwix_beside_kernel(where, x, w):
        """A product that qwix quantises, beside attention in a `shard_map`"""
        x = merged(x, where.per_device(kernels.flash, (0, 0, 0))(*heads(x, w)), w)
        return x + jax.nn.gelu(_dense.apply({"params": {"kernel": w["up"]}}, norm(x))) @ w["down"]


if ejkernel is not None:

    @layer("Libraries", QKV)
    def ejkernel_attention(where, x, w):
        """ejkernel's flash attention in a `shard_map`"""
        from ejkernel.modules import flash_attention

        local = lambda q, k, v: flash_attention(q, k, v, platform="xla")
        return merged(x, where.per_device(local, (0, 0, 0))(*heads(x, w)), w)
