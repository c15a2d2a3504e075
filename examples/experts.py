"""Train a mixture of experts without a capacity: no token is dropped.

    python examples/experts.py gathered              each device gathers all experts, layer by layer (ZeRO alone)
    python examples/experts.py parallel              experts stay on the axis "expert", and tokens are sent to them
    python examples/experts.py parallel --stage 1    another ZeRO stage

Each device sorts its tokens by expert, and `jax.lax.ragged_dot` multiplies each range of tokens by the weights of its
expert. This runs in a `jax.shard_map`, because a global sort would move tokens between all devices. docs/experts.md
says what moves, and which way to choose. The model is a byte-level decoder on Python's standard library. It trains on 8
GPUs or 8 simulated devices, and prints the first and the last loss, and how the experts are stored.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from gpt import causal_attention, rotate
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from text import load, random_windows

from zerojax import Tuning, zero_shard

AXES = ("data", "expert")
EXPERTS = {"gathered": P(), "parallel": P("expert")}  # how the experts of one layer are divided
WIDTH, LAYERS, COUNT, HEADS, CHOSEN = 64, 4, 8, 4, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=EXPERTS, help="where tokens meet their experts")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="(default: %(default)s)")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = jax.make_mesh((2, 4), AXES, axis_types=(AxisType.Auto,) * 2)
    axis = "expert" if args.way == "parallel" else None
    tx = zero_shard(
        optax.adamw(3e-3), stage=args.stage, mesh=mesh, axis=AXES, expert_axis=axis, tuning=Tuning(persist_below=256)
    )
    state, step = tx.create(placed(args.way, mesh, WIDTH, LAYERS, COUNT)), tx.train_step(loss_of(args.way, mesh))
    text, losses = load().train, []
    for i in range(args.steps):
        state, metrics = step(state, random_windows(text, rows=16, length=32, seed=0, step=i))
        losses.append(float(metrics["loss"]))
    print(f"{args.way}, ZeRO stage {args.stage}, {dict(mesh.shape)}: {mesh.size} × {mesh.devices.flat[0]}")
    print(f"loss {losses[0]:.3f} at step 1, {losses[-1]:.3f} at step {args.steps}")
    for name, tree in (("parameter", state.params), ("moment", state.opt_state[0].mu)):
        leaf = tree["layers"]["up"]
        print(f"{name} up {leaf.shape}: {leaf.sharding.spec}, {leaf.addressable_shards[0].data.shape} per device")


def init(key: jax.Array, width: int, layers: int, experts: int) -> dict[str, Any]:
    """Return random parameters, with the layers stacked on dim 0."""
    shapes = dict.fromkeys(("query", "key", "value", "out"), (width, width)) | {"router": (width, experts)}
    shapes |= {"up": (experts, width, 2 * width), "down": (experts, 2 * width, width)}
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    stack = lambda name, shape: jax.random.normal(keys[name], (layers, *shape)) * shape[-2] ** -0.5
    embed = 0.2 * jax.random.normal(jax.random.fold_in(key, 1), (256, width))
    return {"embed": embed, "layers": {name: stack(name, shape) for name, shape in shapes.items()}}


def placed(way: str, mesh: Mesh, *sizes: int) -> dict[str, Any]:
    """Initialise the parameters in place. The sharding of the experts says that they stay on their axis."""
    spec_of = lambda path: P(None, *EXPERTS[way]) if path[-1].key in ("up", "down") else P()
    shapes = jax.eval_shape(lambda: init(jax.random.key(0), *sizes))
    shardings = jax.tree_util.tree_map_with_path(lambda path, _: NamedSharding(mesh, spec_of(path)), shapes)
    return jax.jit(lambda: init(jax.random.key(0), *sizes), out_shardings=shardings)()


def loss_of(way: str, mesh: Mesh | None) -> Callable:
    """Return a loss: the negative log-likelihood of the next byte. Without a mesh, it is for one device."""
    mixture = lambda *args: mixed(*args, run=computed_there if way == "parallel" else computed)
    if mesh is not None:
        in_specs = (P(AXES), P(AXES), EXPERTS[way], EXPERTS[way])
        mixture = jax.shard_map(mixture, mesh=mesh, in_specs=in_specs, out_specs=P(AXES), check_vma=False)

    def layer(x, w):
        h = normalised(x)
        q, k, v = ((h @ w[name]).reshape(*h.shape[:2], HEADS, -1) for name in ("query", "key", "value"))
        x = x + causal_attention(rotate(q), rotate(k), v).reshape(x.shape) @ w["out"]
        h = normalised(x)
        shares = jax.nn.softmax(h @ w["router"])
        first = jax.nn.one_hot(jnp.argmax(shares, -1), shares.shape[-1])
        balance = shares.shape[-1] * jnp.sum(first.mean((0, 1)) * shares.mean((0, 1)))
        return x + mixture(h, shares, w["up"], w["down"]), balance

    def loss(params, windows):
        x, balances = lax.scan(jax.checkpoint(layer), params["embed"][windows[:, :-1]], params["layers"])
        logits = normalised(x) @ params["embed"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean() + 0.01 * balances.sum()

    return loss


def normalised(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def mixed(h: jax.Array, shares: jax.Array, up: jax.Array, down: jax.Array, *, run: Callable) -> jax.Array:
    """Sort this device's tokens by expert, apply the experts, and add up the results of each token by its shares."""
    tokens = h.reshape(-1, h.shape[-1])
    weights, chosen = lax.top_k(shares.reshape(len(tokens), -1), CHOSEN)
    order = jnp.argsort(chosen.ravel())
    sizes = jnp.bincount(chosen.ravel(), length=shares.shape[-1])
    found = run(tokens[order // CHOSEN], sizes, up, down)
    found = jnp.zeros_like(found).at[order].set(found).reshape(len(tokens), CHOSEN, -1)
    return jnp.einsum("tk,tkd->td", weights / weights.sum(-1, keepdims=True), found).reshape(h.shape)


def computed(rows: jax.Array, sizes: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Apply the experts to rows that are sorted by expert. `sizes` has the number of rows of each expert."""
    return lax.ragged_dot(jax.nn.gelu(lax.ragged_dot(rows, up, sizes)), down, sizes)


def computed_there(rows: jax.Array, sizes: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Send sorted rows to the devices of their experts, apply the experts there, and send the results back.

    All rows of a device may choose experts of one device, so a device needs a buffer for all rows of each
    other device.
    """
    count, sizes = len(rows), sizes.reshape(-1, len(up))  # by device and expert
    starts = jnp.cumsum(sizes.sum(1)) - sizes.sum(1)
    buffers = rows.at[starts[:, None] + jnp.arange(count)].get(mode="fill", fill_value=0)
    here = lax.all_to_all(buffers, "expert", 0, 0).reshape(-1, rows.shape[1])
    got = lax.all_to_all(sizes, "expert", 0, 0)  # by sender and own expert
    # Sort by own expert. Empty entries come last, as if there were one more expert.
    expert = (jnp.arange(count)[:, None] >= jnp.cumsum(got, 1)[:, None]).sum(-1)
    order = jnp.argsort(expert.ravel())
    found = computed(here[order], got.sum(0), up, down)
    found = jnp.zeros_like(found).at[order].set(found).reshape(buffers.shape)
    back = lax.all_to_all(found, "expert", 0, 0)
    device = jnp.repeat(jnp.arange(len(sizes)), sizes.sum(1), total_repeat_length=count)
    return back[device, jnp.arange(count) - starts[device]]


if __name__ == "__main__":
    main()
