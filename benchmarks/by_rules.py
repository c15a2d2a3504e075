"""A rival: FSDP by rules for logical axes, as MaxText shards its models, for `jax.jit` of the yardstick GPT.

Each dim of a parameter has a name, and so has each dim of the activations that modules return. The rules shard the
parameters' dims "embed" and the activations' rows over the data axis, as MaxText's default rules do with FSDP alone.
The compiler gathers and reduces. `OPTIONS` are the compiler's options that MaxText sets on GPUs.
"""

import flax.linen as nn
import jax

RULES = {"embed": "data", "activation_batch": "data"}
KERNELS = {
    "Embed_0": ("vocab", "embed"),
    **dict.fromkeys("qkv", ("embed", "heads", "kv")),
    "o": ("heads", "kv", "embed"),
    "Dense_0": ("embed", "mlp"),
    "Dense_1": ("mlp", "embed"),
}
STREAM = ("activation_batch", "activation_length", "activation_embed")
HEADS = ("activation_batch", "activation_length", "activation_heads", "activation_kv")
RESULTS = {
    **dict.fromkeys(("Embed_0", "LayerNorm_0", "LayerNorm_1", "o", "Dense_1"), STREAM),
    **dict.fromkeys("qkv", HEADS),
    "Dense_0": ("activation_batch", "activation_length", "activation_mlp"),
    "Embed_0.attend": ("activation_batch", "activation_length", "activation_vocab"),
}
OPTIONS = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_while_loop_double_buffering": True,
    "optimization_level": "O1",  # pipelines collectives, as three options did that XLA no longer has
    "xla_gpu_all_gather_combine_threshold_bytes": 2**27,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**27,
    "xla_gpu_all_reduce_combine_threshold_bytes": 2**30,
    "xla_gpu_enable_all_gather_combine_by_dim": False,
    "xla_gpu_enable_reduce_scatter_combine_by_dim": False,
}


def sharded(mesh, axes, rank):
    """Shard the last dims of an array by their names. Other dims are those of a scan over layers."""
    return jax.NamedSharding(mesh, jax.P(*[None] * (rank - len(axes)), *map(RULES.get, axes)))


def shardings(shapes, mesh):
    """Return the shardings of the parameters. A bias has the names of its kernel's last dims."""

    def one(path, x):
        names = [key.key for key in path]
        axes = next((KERNELS[name] for name in names if name in KERNELS), ())
        return sharded(mesh, axes[len(axes) - x.ndim + ("blocks" in names) :], x.ndim)

    return jax.tree_util.tree_map_with_path(one, shapes)


def constrained(loss, mesh):
    """Return `loss(params, tokens)` with the results of all modules constrained."""

    def call(method, args, kwargs, context):
        called = "" if context.method_name == "__call__" else f".{context.method_name}"
        x, axes = method(*args, **kwargs), RESULTS.get(f"{context.module.name}{called}")
        return x if axes is None else jax.lax.with_sharding_constraint(x, sharded(mesh, axes, x.ndim))

    def wrapped(params, tokens):
        with nn.intercept_methods(call):
            return loss(params, tokens)

    return wrapped
