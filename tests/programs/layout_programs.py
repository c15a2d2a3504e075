"""Programs by plain JAX, Haiku and Linen whose rows are on another dim than the first, or not on one dim alone."""

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
from jax import lax
from registry import (
    HEAD,
    HEADS,
    HIDDEN,
    LAYERS,
    MANY,
    OUT,
    ROWS,
    TIME,
    VIEWS,
    VOCABULARY,
    WIDTH,
    enter,
    ids,
    norm,
    program,
    xent,
)

MLP = {"up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}  # W @ h
ROW_MLP = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}  # h @ W
ATTENTION = {"qkv": (WIDTH, 3, HEADS, HEAD), "out": (HEADS, HEAD, WIDTH), **ROW_MLP}
HEAD_OUT = {"head": (WIDTH, OUT)}
PAIRS = {"x": (MANY, WIDTH), "y": (MANY, WIDTH)}
SERIES = {"x": (ROWS, TIME, WIDTH), "y": ids(ROWS)}
TOKENS = ids(ROWS, TIME + 1)
stacked = lambda tree: {k: (LAYERS, *shape) for k, shape in tree.items()}
unrolled = lambda tree: [dict(tree)] * LAYERS


def over_layers(layer, x, layers, remat=True):
    """Apply layers one after the other: a list of them, or stacks of them in a scan."""
    layer = jax.checkpoint(layer) if remat else layer
    if isinstance(layers, list):
        for w in layers:
            x = layer(x, w)
        return x
    return lax.scan(lambda x, w: (layer(x, w), None), x, layers)[0]


def enter_layers(name, kind, loss, params, layer_shapes, batch, about, variants=("", "_scan")):
    """Enter variants of a loss: unrolled, scanned with remat, and unrolled with four microbatches."""
    given = loss
    bare = lambda p, batch: given(p, batch, remat=False)
    remat = lambda p, batch: given(p, batch, remat=True)
    as_list, as_stacks = ({**params, "layers": of(layer_shapes)} for of in (unrolled, stacked))
    for variant in variants:
        if variant == "_scan":
            enter(name + variant, kind, remat, as_stacks, batch, f"{about}, scanned and under `jax.checkpoint`")
        elif variant == "_acc":
            enter(name + variant, kind, bare, as_list, batch, f"{about}, unrolled, 4 microbatches", accumulate=4)
        else:
            enter(name, kind, bare, as_list, batch, f"{about}, unrolled")


def rows_last(p, batch, remat):
    layer = lambda h, w: h + w["down"] @ jax.nn.gelu(w["up"] @ h)
    return jnp.mean((over_layers(layer, batch["x"].T, p["layers"], remat) - batch["y"].T) ** 2)


ALL = ("", "_scan", "_acc")
enter_layers("rows_last", "Layouts", rows_last, {}, MLP, PAIRS, "`W @ h` with rows on the last dim", ALL)


@program("Layouts", {"embed": (VOCABULARY, WIDTH), "layers": unrolled(MLP), "head": (VOCABULARY, WIDTH)}, TOKENS)
def rows_last_embedding(p, batch):
    """An embedding, then `W @ h` with time and rows on the last dim together"""
    h = p["embed"][batch[:, :-1]].reshape(-1, WIDTH).T
    for w in p["layers"]:
        h = h + w["down"] @ jax.nn.gelu(w["up"] @ h)
    return xent((p["head"] @ h).T, batch[:, 1:].reshape(-1)).mean()


def attended(x, w, rows, heads_first=False):
    """Attention alone, whose rows are named by a letter of einsum, such as `"tb"` for (time, rows, width)."""
    split = f"{rows}d,dchk->ch{rows}k" if heads_first else f"{rows}d,dchk->c{rows}hk"
    q, k, v = jnp.einsum(split, x, w["qkv"])
    left, right = (f"h{rows}k", f"h{rows.replace('t', 's')}k") if heads_first else (f"{rows}hk", f"{rows}hk")
    right = right.replace("t", "s")
    others = rows.replace("t", "")
    weight = jax.nn.softmax(jnp.einsum(f"{left},{right}->{others}hts", q, k) / HEAD**0.5)
    return jnp.einsum(f"{others}hts,{right},hkd->{rows}d", weight, v, w["out"])


def attention(x, w, rows, heads_first=False):
    """A block of attention and an MLP, with the rows of `attended`."""
    x = x + attended(norm(x), w, rows, heads_first)
    return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"]


def time_major(p, batch, remat):
    x = over_layers(lambda x, w: attention(x, w, "tb"), batch["x"].swapaxes(0, 1), p["layers"], remat)
    return xent(x.mean(0) @ p["head"], batch["y"]).mean()


enter_layers("time_major", "Layouts", time_major, HEAD_OUT, ATTENTION, SERIES, "transformer of (T, B, D)")


def heads_first(p, batch, remat):
    layer = lambda x, w: attention(x, w, "bt", heads_first=True)
    return xent(over_layers(layer, batch["x"], p["layers"], remat).mean(1) @ p["head"], batch["y"]).mean()


ABOUT = "attention of (H, B, T, K)"
enter_layers("heads_first", "Layouts", heads_first, HEAD_OUT, ATTENTION, SERIES, ABOUT, ("_scan",))


def features_first(p, batch, remat):
    """Features, time, rows: channels first, and the rows last."""

    def layer(x, w):
        y = jnp.einsum("st,dtb->dsb", w["time"], norm(x, 0))
        return x + jnp.einsum("df,ftb->dtb", w["down"], jax.nn.gelu(jnp.einsum("fd,dtb->ftb", w["up"], x + y)))

    x = over_layers(layer, batch["x"].transpose(2, 1, 0), p["layers"], remat)
    return xent((p["head"] @ x.mean(1)).T, batch["y"]).mean()


MIXER = {**MLP, "time": (TIME, TIME)}
ABOUT = "mixer of (D, T, B)"
enter_layers("features_first", "Layouts", features_first, {"head": (OUT, WIDTH)}, MIXER, SERIES, ABOUT, ("", "_acc"))


def views(p, batch, remat):
    """Views before rows: (views, rows, time, width)."""
    x = over_layers(lambda x, w: attention(x, w, "vbt"), jnp.moveaxis(batch["x"], 1, 0), p["layers"], remat)
    logits = x.mean(2) @ p["head"]
    return xent(logits, jnp.broadcast_to(batch["y"], logits.shape[:2])).mean()


VIEWED = {"x": (ROWS, VIEWS, TIME, WIDTH), "y": ids(ROWS)}
ABOUT = "views before rows, (V, B, T, D)"
enter_layers("views_first", "Layouts", views, HEAD_OUT, ATTENTION, VIEWED, ABOUT, ("_scan", "_acc"))


@hk.without_apply_rng
@hk.transform
def nchw(x):
    for features, stride in ((40, 1), (56, 2), (72, 2)):
        x = jax.nn.relu(hk.Conv2D(features, 3, stride, data_format="NCHW")(x))
    return hk.Linear(OUT)(x.mean((2, 3)))


@hk.without_apply_rng
@hk.transform
def recurrent(x):
    core = hk.DeepRNN([hk.LSTM(112), hk.GRU(144)])
    y, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))
    return hk.Linear(OUT)(y[-1])


IMAGES = {"x": (ROWS, 5, 16, 16), "y": ids(ROWS)}


def of_haiku(net, x):
    return lambda: jax.eval_shape(net.init, jax.random.key(0), jax.ShapeDtypeStruct(x, jnp.float32))


@program("Haiku", of_haiku(nchw, IMAGES["x"]), IMAGES)
def haiku_nchw(p, batch):
    """Convolutions of (B, C, H, W)"""
    return xent(nchw.apply(p, batch["x"]), batch["y"]).mean()


@program("Haiku", of_haiku(recurrent, (TIME, ROWS, WIDTH)), SERIES)
def haiku_time_major(p, batch):
    """An LSTM and a GRU of (T, B, D), `hk.dynamic_unroll`"""
    return xent(recurrent.apply(p, batch["x"].swapaxes(0, 1)), batch["y"]).mean()


class FeaturesFirst(nn.Module):
    @nn.compact
    def __call__(self, x):  # (D, T, B)
        for _ in range(LAYERS):
            y = nn.DenseGeneral(HIDDEN, axis=0)(x)  # (T, B, F)
            x = x + jnp.moveaxis(nn.DenseGeneral(WIDTH, axis=-1)(nn.gelu(y)), -1, 0)
        return nn.DenseGeneral(OUT, axis=0)(x.mean(1))


class TimeMajor(nn.Module):
    @nn.compact
    def __call__(self, x):  # (T, B, D)
        scanned = nn.scan(
            nn.OptimizedLSTMCell, variable_broadcast="params", split_rngs={"params": False}, in_axes=0, out_axes=0
        )
        for features in (112, 144):
            cell = scanned(features)
            _, x = cell(cell.initialize_carry(jax.random.key(0), x[0].shape), x)
        return nn.Dense(OUT)(x[-1])


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x):  # (B, H, W, C)
        for features, stride in ((40, 1), (56, 2), (72, 2)):
            y = nn.Conv(features, (3, 3), stride)(x)
            y = nn.relu(batch_norm(y))
            y = batch_norm(nn.Conv(features, (3, 3))(y))
            x = nn.relu(y + nn.Conv(features, (1, 1), stride)(x))
        return nn.Dense(OUT)(x.mean((1, 2)))


def batch_norm(x):
    """Without running averages."""
    return norm(x, (0, 1, 2))


def of_linen(module, x):
    return lambda: jax.eval_shape(module.init, jax.random.key(0), jax.ShapeDtypeStruct(x, jnp.float32))


@program("Linen", of_linen(FeaturesFirst(), (WIDTH, TIME, ROWS)), SERIES)
def linen_features_first(p, batch):
    """`nn.DenseGeneral` over dim 0 of (D, T, B)"""
    return xent(FeaturesFirst().apply(p, batch["x"].transpose(2, 1, 0)), batch["y"]).mean()


@program("Linen", of_linen(TimeMajor(), (TIME, ROWS, WIDTH)), SERIES)
def linen_time_major(p, batch):
    """Two LSTM layers by `nn.scan` of (T, B, D)"""
    return xent(TimeMajor().apply(p, batch["x"].swapaxes(0, 1)), batch["y"]).mean()


@program("Linen", of_linen(ResNet(), (ROWS, 16, 16, 5)), IMAGES, shared="batch norm")
def linen_resnet(p, batch):
    """ResNet with batch norm, given (B, C, H, W)"""
    return xent(ResNet().apply(p, batch["x"].transpose(0, 2, 3, 1)), batch["y"]).mean()
