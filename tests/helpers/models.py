"""A tiny model with every awkward kind of leaf, and the table of optimizers it is trained with."""

import jax
import jax.numpy as jnp
import optax
import optax.contrib


def awkward_params():
    """A scalar, an empty leaf, a tied and a frozen weight, integers, 3 elements, dims 3 and 8 do not divide."""
    keys = jax.random.split(jax.random.key(0), 4)
    return {
        "tied": jax.random.normal(keys[0], (24, 13)) / 4,
        "layer": {"w": jax.random.normal(keys[1], (16, 24)) / 4, "bias": jnp.array([0.1, -0.2, 0.3])},
        "uneven": jax.random.normal(keys[2], (13, 7)) / 3,
        "frozen": jax.random.normal(keys[3], (8, 13)) / 3,
        "scale": jnp.float32(0.7),
        "empty": jnp.zeros((0, 4)),
        "count": jnp.arange(4),
    }


def awkward_loss(params, batch):
    """Uses every leaf of `awkward_params`; a mean over the rows."""
    h = jnp.tanh(batch["x"] @ params["layer"]["w"]) @ params["tied"]
    h = jnp.tanh(h) @ params["uneven"]
    h = jnp.pad(h[:, :3] * params["layer"]["bias"], ((0, 0), (0, 4))) + h
    h = jnp.tanh(h @ params["uneven"].T + batch["y"] @ params["frozen"]) @ params["tied"].T
    return (
        params["scale"] * jnp.mean((h - batch["x"][:, :1]) ** 2) + params["empty"].sum() + 0.0 * params["count"].sum()
    )


def awkward_batches(count, rows=24):
    """Global batches; 24 rows are shared evenly by 1, 2, 3 and 8 devices."""
    keys = jax.random.split(jax.random.key(1), (count, 2))
    return [{"x": jax.random.normal(a, (rows, 16)), "y": jax.random.normal(b, (rows, 8))} for a, b in keys]


def freezing(tx):
    """Train all but the frozen, the empty and the integer leaf; labels by path."""
    stays = ("frozen", "count", "empty")
    label = lambda path, _: "no" if path[0].key in stays else "yes"
    labels = lambda params: jax.tree_util.tree_map_with_path(label, params)
    return optax.multi_transform({"yes": tx, "no": optax.set_to_zero()}, labels)


def floats_only(tx):
    """Leave the integer leaf out, as optax's own clipping cannot divide it."""
    return optax.masked(tx, lambda params: jax.tree.map(lambda p: p.dtype != jnp.int32, params))


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "sgd-momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "lion": lambda: optax.lion(1e-3),
    "adafactor": lambda: floats_only(optax.adafactor(1e-2, min_dim_size_to_factor=4)),
    "lamb": lambda: floats_only(optax.lamb(1e-2)),
    "lars": lambda: floats_only(optax.lars(1e-1, momentum=0.9)),
    "muon": lambda: freezing(optax.contrib.muon(1e-2)),
    "clip-adamw": lambda: floats_only(optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))),
    "masked-decay": lambda: optax.adamw(1e-2, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)),
    "multi-transform": lambda: freezing(optax.adam(1e-2)),
    "inject-hyperparams": lambda: optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1e-2, 1e-3, 3)),
    "reduce-on-plateau": lambda: floats_only(
        optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=1, cooldown=0))
    ),
    "polyak-sgd": lambda: floats_only(optax.polyak_sgd(1e-1)),
    "multi-steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
}
