"""Train with ZeRO over one axis of a mesh, and divide the model over a second axis.

    python examples/parallel.py tensor               kernels over "model", positions between the blocks (Megatron)
    python examples/parallel.py sequence             positions over "sequence", in attention heads (Ulysses)
    python examples/parallel.py expert               experts of a mixture over "expert"
    python examples/parallel.py pipeline             layers over "stage", microbatches pass through them (GPipe)
    python examples/parallel.py tensor --stage 1     another ZeRO stage

zerojax divides the rows, and the parts that its stage shards, over "data". The other axis belongs to the model. Leaves
that Flax's partition metadata shards over it stay sharded, and "data" divides another of their dims. `batch_spec=`
divides positions over "sequence". The model divides its activations by `with_sharding_constraint`, and the pipeline's
layers by a `shard_map`. The loss equals that of one device.

Each way trains a byte-level model on Python's standard library, on 8 GPUs or 8 simulated devices. It prints the first
and the last loss, and how a parameter and its moment in Adam are sharded.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from gpt import causal_attention, rotate
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from text import load, random_windows

from zerojax import Tuning, zero_shard

DEVICES, VOCABULARY, EXPERTS = 8, 256, 4


class Way(NamedTuple):
    """A way to divide a model over a second axis of the mesh.

    Attributes:
        axis: The second axis.
        size: Devices along it.
        between: How activations between two blocks are divided: rows, positions.
        shown: A parameter that is sharded over both axes.
        batch: How the batch is divided. None: rows over "data".
    """

    axis: str
    size: int
    between: tuple
    shown: str
    batch: P | None = None


WAYS = {
    "tensor": Way("model", 2, ("data", "model"), "block_0/up/kernel"),
    "sequence": Way("sequence", 4, ("data", "sequence"), "block_0/up/kernel", P("data", "sequence")),
    # All devices along "expert" share the rows for every layer that is not an expert.
    "expert": Way("expert", 4, (("data", "expert"),), "block_0/mixture/up"),
    "pipeline": Way("stage", 4, ("data",), "blocks/up/kernel"),
}


def main() -> None:
    args = options()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    way, mesh = WAYS[args.way], mesh_for(args.way)
    model = Decoder(args.way, args.width, args.layers, mesh=mesh)
    tx = zero_shard(
        optax.adamw(3e-3), stage=args.stage, mesh=mesh, tuning=Tuning(persist_below=256), batch_spec=way.batch
    )
    init = lambda key: model.init(key, jnp.zeros((DEVICES, args.seq), jnp.int32))["params"]
    state, step, losses = tx.create(tx.init_params(init, jax.random.key(0))), tx.train_step(loss_of(model)), []
    text = load().train
    for i in range(args.steps):
        windows = random_windows(text, rows=args.batch, length=args.seq, seed=0, step=i)
        state, metrics = step(state, (windows[:, :-1], windows[:, 1:]))
        losses.append(float(metrics["loss"]))
    print(f"{args.way} parallel, ZeRO stage {args.stage}, {dict(mesh.shape)}: {mesh.size} × {mesh.devices.flat[0]}")
    print(f"loss {losses[0]:.3f} at step 1, {losses[-1]:.3f} at step {args.steps}")
    for name, tree in (("parameter", state.params), ("moment", state.opt_state[0].mu)):
        leaf = at(tree, way.shown)
        shard = leaf.addressable_shards[0].data
        print(f"{name} {way.shown} {leaf.shape}: {leaf.sharding.spec}, {shard.shape} per device")


def loss_of(model: "Decoder") -> Callable:
    """Return a loss: the negative log-likelihood of the next byte. A mixture adds the imbalance of its experts."""

    def loss(params, batch):
        tokens, targets = batch
        logits, sown = model.apply({"params": params}, tokens, mutable=["losses"])
        nll: Any = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return nll.mean() + 0.01 * sum(jax.tree.leaves(sown))

    return loss


class Decoder(nn.Module):
    """Compute logits for the byte that follows each byte of `tokens`.

    Attributes:
        way: One of `WAYS`.
        width: Channels.
        layers: Blocks.
        heads: Heads of attention.
        mesh: Mesh with the axis "data" and the way's axis. None: a model for one device.
    """

    way: str
    width: int
    layers: int
    heads: int = 4
    mesh: Mesh | None = None

    @nn.compact
    def __call__(self, tokens):
        axis = "model" if self.way == "tensor" else None
        embed = nn.Embed(VOCABULARY, self.width, embedding_init=annotated(nn.initializers.normal(0.2), axis, None))
        block = Block(self.way, self.heads, self.mesh, parent=None)
        between = WAYS[self.way].between
        x = divided(embed(tokens), self.mesh, *between)
        if self.way == "pipeline":
            x = pipelined(block, self.param("blocks", stacked, block, self.layers, x), x, self.mesh)
        else:
            for i in range(self.layers):
                x = divided(block.clone(name=f"block_{i}", parent=self)(x), self.mesh, *between)
        return embed.attend(nn.RMSNorm()(x))


class Block(nn.Module):
    """Attention, then a feed-forward layer or a mixture of experts, each on a normalised copy of the residual stream.

    If positions are divided outside of attention, attention is divided by heads. For that, the compiler makes an
    all-to-all of activations (Ulysses), or an all-gather before products with divided kernels and a reduce-scatter
    after them (Megatron).
    """

    way: str
    heads: int
    mesh: Mesh | None

    @nn.compact
    def __call__(self, x):
        width, axis = x.shape[-1], "model" if self.way == "tensor" else None
        kernel = lambda *axes: annotated(nn.initializers.lecun_normal(), *axes)
        h = nn.RMSNorm()(x)
        dense = lambda name: nn.Dense(width, use_bias=False, kernel_init=kernel(None, axis), name=name)
        q, k, v = (dense(name)(h).reshape(*h.shape[:2], self.heads, -1) for name in ("query", "key", "value"))
        if self.way in ("tensor", "sequence"):
            q, k, v = (divided(a, self.mesh, "data", None, WAYS[self.way].axis, None) for a in (q, k, v))
        attended = causal_attention(rotate(q), rotate(k), v).reshape(x.shape)
        x = x + nn.Dense(width, use_bias=False, kernel_init=kernel(axis, None), name="out")(attended)
        h = nn.RMSNorm()(x)
        if self.way == "expert":
            return x + Mixture(EXPERTS, self.mesh, name="mixture")(h)
        h = nn.gelu(nn.Dense(4 * width, kernel_init=kernel(None, axis), name="up")(h))
        return x + nn.Dense(width, kernel_init=kernel(axis, None), name="down")(h)


class Mixture(nn.Module):
    """A mixture of experts: each position goes to its router's two best experts, if they have room.

    Routing uses one-hot products (Lepikhin et al. 2020, arXiv 2006.16668, section 3.2). An expert has room for a fixed
    number of positions per row, so the dropped positions do not depend on how rows are divided.
    """

    experts: int
    mesh: Mesh | None
    capacity_factor: float = 1.5

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        shares = nn.softmax(nn.Dense(self.experts, use_bias=False, name="router")(x))
        capacity = int(self.capacity_factor * 2 * x.shape[1] / self.experts)
        sent, weights, first = routed(shares, capacity)
        self.sow("losses", "balance", self.experts * jnp.sum(first.mean((0, 1)) * shares.mean((0, 1))))
        init = annotated(nn.initializers.lecun_normal(batch_axis=0), "expert", None, None)
        up = self.param("up", init, (self.experts, width, 4 * width))
        down = self.param("down", init, (self.experts, 4 * width, width))
        # An all-to-all: rows were divided over "expert" too, and now the experts are.
        inside = divided(jnp.einsum("rpec,rpd->ercd", sent, x), self.mesh, "expert", "data")
        inside = nn.gelu(jnp.einsum("ercd,edf->ercf", inside, up))
        inside = divided(jnp.einsum("ercf,efd->ercd", inside, down), self.mesh, "expert", "data")
        return jnp.einsum("rpec,ercd->rpd", weights, inside)


def routed(shares: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Assign positions to slots of experts, given each expert's share of each position.

    First choices get slots before second choices, both in the order of positions. Returns the assignment of shape
    (row, position, expert, slot), as 0 and 1 and weighted, and the first choices alone, (row, position, expert).
    """
    rows, positions, experts = shares.shape
    best, chosen = lax.top_k(shares, 2)
    choices = jax.nn.one_hot(chosen, experts, axis=-1)  # (row, position, choice, expert)
    queue = choices.swapaxes(1, 2).reshape(rows, 2 * positions, experts)
    before = (jnp.cumsum(queue, 1) - queue).reshape(rows, 2, positions, experts).swapaxes(1, 2)
    seats = jax.nn.one_hot(jnp.sum(before * choices, -1).astype(int), capacity)  # zeros where there is no room
    sent = jnp.einsum("rpke,rpkc->rpec", choices, seats)
    weights = jnp.einsum("rpk,rpke,rpkc->rpec", best / best.sum(-1, keepdims=True), choices, seats)
    return sent, weights, choices[:, :, 0]


def stacked(key: jax.Array, block: Block, layers: int, x: jax.Array) -> Any:
    """Initialise the parameters of `layers` blocks, stacked on dim 0, which is divided over "stage"."""
    params = jax.vmap(lambda key: block.init(key, x)["params"])(jax.random.split(key, layers))
    return jax.tree.map(lambda leaf: nn.Partitioned(leaf, ("stage",)), params)


def pipelined(block: Block, params: Any, x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Apply stacked blocks, divided over "stage", to `x`. In each turn, a stage passes a microbatch to the next stage.

    There are as many microbatches as stages. A microbatch has rows of every device along "data", so no row moves along
    that axis. The compiler handles it.

    References:
        Huang et al. 2018, arXiv 1811.06965 (GPipe).
    """
    pure: Any = block.apply
    apply = lambda x, layer: (pure({"params": layer}, x), None)
    if mesh is None:
        return lax.scan(apply, x, params)[0]
    stages = mesh.shape["stage"]

    def run(params, waiting):
        stage = lax.axis_index("stage")

        def turn(held, i):
            held = jnp.where(stage == 0, waiting[jnp.minimum(i, stages - 1)], held)
            held = lax.scan(apply, held, params)[0]
            return lax.ppermute(held, "stage", [(s, s + 1) for s in range(stages - 1)]), held

        _, made = lax.scan(turn, jnp.zeros_like(waiting[0]), jnp.arange(2 * stages - 1))
        # In its first stages - 1 turns, the last stage has no microbatch yet.
        return lax.psum(jnp.where(stage == stages - 1, made[stages - 1 :], 0), "stage")

    over_stages = jax.shard_map(
        run, mesh=within(mesh), in_specs=(P("stage"), P()), out_specs=P(), axis_names={"stage"}, check_vma=False
    )
    waiting = divided(jnp.moveaxis(x.reshape(-1, stages, *x.shape[1:]), 1, 0), mesh, None, "data")
    return jnp.moveaxis(over_stages(params, waiting), 0, 1).reshape(x.shape)


def divided(x: jax.Array, mesh: Mesh | None, *axes: Any) -> jax.Array:
    """Divide the dims of `x` over `axes`. Dims that are not named are not divided.

    In device view `x` has the rows of one device, and "data" divides nothing.
    """
    if mesh is None:
        return x
    here = within(mesh)
    names = [axis if isinstance(axis, tuple) else (axis,) for axis in axes]
    left = [tuple(name for name in some if name not in here.manual_axes) for some in names]
    return lax.with_sharding_constraint(x, NamedSharding(here, P(*left)))


def within(mesh: Mesh) -> Any:
    """Return the mesh that a model sees. In device view, "data" is Manual."""
    here = jax.sharding.get_abstract_mesh()
    return here if here.manual_axes else mesh


def annotated(init: Callable, *axes: str | None) -> Callable:
    """Return an initializer that shards its parameter over `axes`, dim by dim. Without axes, the parameter is plain."""
    return nn.with_partitioning(init, axes) if any(axes) else init


def mesh_for(way: str) -> Mesh:
    """Make the mesh of a way, from 8 GPUs if there are 8, or else from simulated devices."""
    if jax.device_count() < DEVICES:
        raise SystemExit(f"This needs {DEVICES} devices; there are {jax.device_count()}. JAX_PLATFORMS=cpu simulates.")
    sizes, names = (DEVICES // WAYS[way].size, WAYS[way].size), ("data", WAYS[way].axis)
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:DEVICES])


def at(tree: Any, path: str) -> Any:
    """Return the leaf at a path, without its Flax box."""
    for key in path.split("/"):
        tree = tree[key]
    return nn.meta.unbox(tree)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=WAYS, help="how the model is divided over the second axis")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="(default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="windows per step (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=32, help="bytes per window (default: %(default)s)")
    parser.add_argument("--width", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="(default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
