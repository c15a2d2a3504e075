"""The GPT on which every figure is measured: linen, tied embedding, rematerialised blocks, scanned or unrolled.

Sizes: `tiny` for tests, `cpu` (52 MiB of float32 parameters) for simulated devices, and `gpu` (1.3 billion parameters,
bfloat16 compute) for GPUs, present or absent, with smaller sizes of the same kind. `13B` is GPT-3 13B (Brown et al.
2020, arXiv 2005.14165), with a width of 5120 instead of 5140: its embedding is 2% of the parameters.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.custom_partitioning import custom_partitioning

LAYER_INPUT = "layer_input"


def offloading(*names):
    """A policy of `jax.checkpoint` that keeps the named activations in host memory between the passes."""
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=names,
        offload_src="device",
        offload_dst="pinned_host",
    )


OVERWRITTEN = "_overwrite_with_gradient"  # Flax's collection of the scales and histories of FP8 layers


@dataclasses.dataclass(frozen=True)
class Size:
    """What a yardstick model is made of; `rows` is each device's share of the batch.

    `dot_general` is a class of Flax's for the products of the layers, such as `fp8_ops.Fp8DirectDotGeneralOp`.
    `attention` is a function of queries, keys and values, of which `attention_of` makes several. None: `fastest`.
    """

    width: int
    layers: int
    tokens: int
    rows: int
    vocabulary: int
    dtype: Any
    head: int = 64
    dot_general: Any = None
    attention: Any = None


SIZES = {
    "tiny": Size(width=64, layers=4, tokens=16, rows=1, vocabulary=128, dtype=jnp.float32, head=16),
    "cpu": Size(width=256, layers=16, tokens=64, rows=8, vocabulary=4096, dtype=jnp.float32),
    "125M": Size(width=768, layers=12, tokens=1024, rows=32, vocabulary=32768, dtype=jnp.bfloat16),
    "350M": Size(width=1024, layers=24, tokens=1024, rows=16, vocabulary=32768, dtype=jnp.bfloat16),
    "gpu": Size(width=2048, layers=24, tokens=1024, rows=8, vocabulary=32768, dtype=jnp.bfloat16),
    "13B": Size(width=5120, layers=40, tokens=2048, rows=4, vocabulary=50257, dtype=jnp.bfloat16, head=128),
}


ATTENTION = ("auto", "xla", "cudnn", "pallas", "shard_map", "custom_partitioning")


@functools.cache
def attention_of(kind: str, mesh: jax.sharding.Mesh | None = None):
    """Causal attention `f(q, k, v)` of one of `ATTENTION`.

    `auto` is cuDNN's on GPUs that are there, in bfloat16 or float16, and XLA's everywhere else. `cudnn` is cuDNN's, as
    JAX wraps it. The others are JAX's kernel in Pallas for Triton: `pallas` alone, of which the compiler knows nothing,
    `shard_map` inside of a `jax.shard_map` over the rows, and `custom_partitioning` with a rule that says that its
    operands share their rows. On CPUs, and without a mesh, the kernel is interpreted.
    """
    if kind == "auto":
        return fastest
    if kind in ("xla", "cudnn"):
        return functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=kind)
    interpret = mesh is None or mesh.devices.flat[0].platform == "cpu"

    def kernel(q, k, v):
        from jax.experimental.pallas.ops.gpu.attention import mha

        scale = q.shape[-1] ** -0.5
        return mha(q, k, v, segment_ids=None, sm_scale=scale, causal=True, interpret=interpret)

    if kind == "pallas":
        return kernel
    if mesh is None:
        raise ValueError(f"Attention in a {kind} divides rows over a mesh. Give the mesh.")
    rows = jax.P("data")
    if kind == "shard_map":
        return jax.shard_map(kernel, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    assert kind == "custom_partitioning", f"The yardstick knows {ATTENTION}, not {kind!r}."
    return partitioned(kernel)


def fastest(q, k, v):
    fused = jax.default_backend() == "gpu" and q.dtype in (jnp.bfloat16, jnp.float16) and q.shape[-1] % 8 == 0
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn" if fused else "xla")


def partitioned(kernel):
    """The attention, under `custom_partitioning` forward and backward. Rows and heads may be divided."""

    def divided(f, operands, results):
        divided = custom_partitioning(f)

        def partition(mesh, arguments, outputs):
            shardings = lambda tree: jax.tree.map(lambda x: x.sharding, tree)
            return mesh, f, shardings(outputs), shardings(arguments)

        one = "b t h d"
        rule = f"{', '.join([one] * operands)} -> {', '.join([one] * results)}"
        divided.def_partition(partition=partition, sharding_rule=rule, need_replication_factors=("t", "d"))
        return divided

    backward = divided(lambda q, k, v, g: jax.vjp(kernel, q, k, v)[1](g), 4, 3)
    attention = jax.custom_vjp(divided(kernel, 3, 1))
    attention.defvjp(lambda q, k, v: (attention(q, k, v), (q, k, v)), lambda kept, g: backward(*kept, g))
    return attention


class Block(nn.Module):
    """One transformer layer, in the form `nn.scan` wants."""

    size: Size
    named: bool = False  # whether its input has a name, for a policy of `jax.checkpoint`

    @nn.compact
    def __call__(self, x, _=None):
        size = self.size
        x = checkpoint_name(x, LAYER_INPUT) if self.named else x
        h = nn.LayerNorm(dtype=size.dtype)(x)
        split = (size.width // size.head, size.head)
        options = {"dtype": size.dtype, "dot_general_cls": size.dot_general}
        q, k, v = (nn.DenseGeneral(split, **options, name=name)(h) for name in "qkv")
        attended = (size.attention or fastest)(q, k, v)
        x = x + nn.DenseGeneral(size.width, axis=(-2, -1), **options, name="o")(attended)
        h = nn.Dense(4 * size.width, **options)(nn.LayerNorm(dtype=size.dtype)(x))
        return x + nn.Dense(size.width, **options)(nn.gelu(h)), None


class GPT(nn.Module):
    """A decoder-only language model over `size.vocabulary` tokens."""

    size: Size
    scan: bool
    remat: bool = True
    policy: Any = None

    @nn.compact
    def __call__(self, tokens):
        size, named = self.size, self.policy is not None
        embed = nn.Embed(size.vocabulary, size.width, dtype=size.dtype)
        x = embed(tokens)
        block = nn.remat(Block, prevent_cse=not self.scan, policy=self.policy) if self.remat else Block
        if self.scan:
            stack = nn.scan(
                block, variable_axes={"params": 0, OVERWRITTEN: 0}, split_rngs={"params": True}, length=size.layers
            )
            x, _ = stack(size, named, name="blocks")(x, None)
        else:
            for i in range(size.layers):
                x, _ = block(size, named, name=f"block_{i}")(x)
        return embed.attend(nn.LayerNorm(dtype=size.dtype)(x))


def gathered_by_hand(size: Size, scan: bool, mesh: jax.sharding.Mesh):
    """`loss(params, tokens)`: the same model for `jax.jit`, each layer gathered in its own rematerialised body."""
    rows, full = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("data",), ()))

    def gathered(params):
        return jax.tree.map(lambda w: jax.lax.with_sharding_constraint(w.astype(size.dtype), full), params)

    @functools.partial(jax.checkpoint, prevent_cse=not scan)
    def layer(x, params):
        return Block(size).apply({"params": gathered(params)}, x)[0]

    def loss(params, tokens):
        embedding = gathered(params["Embed_0"]["embedding"])
        x = jax.lax.with_sharding_constraint(embedding[tokens], rows)
        if scan:
            x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, params["blocks"])
        else:
            for i in range(size.layers):
                x = layer(x, params[f"block_{i}"])
        x = nn.LayerNorm(dtype=size.dtype).apply({"params": params["LayerNorm_0"]}, x)
        return next_token_loss(x @ embedding.T, tokens)

    return loss


# Megatron's layout: the dim of a kernel that is divided over "model", from its end. A projection that follows
# attention or the activation is divided along what it contracts.
MODEL_DIM = {"q": 2, "k": 2, "v": 2, "o": 3, "Dense_0": 1, "Dense_1": 2, "embedding": 2}


def over_model(shapes: Any) -> Any:
    """Shapes of the parameters; kernels, and the biases of what is divided, in Flax's boxes that say so."""

    def one(path, x):
        names = [key.key for key in path]
        dim = next((MODEL_DIM[name] for name in names if name in MODEL_DIM), None)
        if dim is None or (names[-1] == "bias" and names[-2] in ("o", "Dense_1")):
            return x
        return nn.Partitioned(x, tuple("model" if i == len(x.shape) - dim else None for i in range(len(x.shape))))

    return jax.tree_util.tree_map_with_path(one, shapes)


def tensor_parallel(loss, mesh: jax.sharding.Mesh):
    """The loss, its activations divided over "model": positions between the blocks, heads and features within."""

    # By the name of a module what comes out of it: all positions before a projection, heads and features behind it.
    heads, positions = ("data", None, "model"), ("data", "model")
    divided = {"LayerNorm_0": ("data",), "LayerNorm_1": ("data",), "Dense_0": heads, "Embed_0": positions}
    divided |= dict.fromkeys("qkv", heads) | dict.fromkeys(("o", "Dense_1"), positions)

    def constrain(x, axes):
        return x if axes is None else jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P(*axes)))

    def constrained(call, args, kwargs, context):
        name = context.module.name if context.method_name == "__call__" else None
        if name in ("o", "Dense_1"):
            args = (constrain(args[0], heads), *args[1:])
        return constrain(call(*args, **kwargs), divided.get(name))

    def wrapped(params, tokens):
        with nn.intercept_methods(constrained):
            return loss(nn.unbox(params), tokens)

    return wrapped


def next_token_loss(logits, tokens):
    """Mean cross-entropy of each token but the first."""
    logits = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], -1))


def build(
    name: str,
    *,
    scan: bool,
    remat: bool = True,
    policy: Any = None,
    attention: str = "auto",
    mesh: jax.sharding.Mesh | None = None,
    **changes: Any,
):
    """`(init, loss, tokens)`: `init(key) -> params`, `loss(params, tokens)`, shape of one device's tokens.

    With FP8 layers, `params` are all variables: the collections "params" and `OVERWRITTEN`.

    A policy of `jax.checkpoint` knows each layer's input as `LAYER_INPUT`. For `attention` and `mesh`, see
    `attention_of`.
    """
    plain = dataclasses.replace(SIZES[name], **changes)
    size = dataclasses.replace(plain, attention=attention_of(attention, mesh))
    model = GPT(size, scan, remat, policy)

    def init(key):
        # One row, which no mesh divides: parameters do not depend on the attention.
        variables = GPT(plain, scan, remat, policy).init(key, jnp.zeros((1, size.tokens), jnp.int32))
        return variables["params"] if size.dot_general is None else variables

    def loss(params, tokens):
        variables = {"params": params} if size.dot_general is None else params
        return next_token_loss(model.apply(variables, tokens), tokens)

    return init, loss, (size.rows, size.tokens)
