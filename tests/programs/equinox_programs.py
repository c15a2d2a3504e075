"""Programs of Equinox: a model of one example, `W @ x` in every layer, mapped over the rows with `vmap`."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from registry import HEAD, HEADS, HIDDEN, LAYERS, MANY, OUT, ROWS, TIME, VOCABULARY, WIDTH, enter, ids, xent


def entered(name, make, batch, of_model, about, **options):
    """Enter a model of Equinox, whose arrays are the parameters; `of_model(model, batch)` is its loss."""
    shapes = eqx.filter_eval_shape(make, jax.random.key(0))
    is_array = lambda x: isinstance(x, jax.ShapeDtypeStruct)
    params, static = eqx.partition(shapes, is_array)
    loss = lambda params, batch: of_model(eqx.combine(params, static), batch)
    enter(name, "Equinox", loss, lambda: params, batch, about, **options)


class Block(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.up, self.down = eqx.nn.Linear(WIDTH, HIDDEN, key=a), eqx.nn.Linear(HIDDEN, WIDTH, key=b)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(x)))


class Attention(eqx.Module):
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    block: Block

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.norm, self.block = eqx.nn.LayerNorm(WIDTH), Block(b)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=a)

    def __call__(self, x, causal=True):
        y = jax.vmap(self.norm)(x)
        mask = jnp.tri(len(x), dtype=bool) if causal else None
        return jax.vmap(self.block)(x + self.attention(y, y, y, mask=mask))


class GPT(eqx.Module):
    tokens: eqx.nn.Embedding
    positions: jax.Array
    layers: list | Attention
    head: eqx.nn.Linear
    scanned: bool = eqx.field(static=True)

    def __init__(self, key, scanned=False):
        a, b, *keys = jax.random.split(key, 2 + LAYERS)
        self.tokens = eqx.nn.Embedding(VOCABULARY, WIDTH, key=a)
        self.positions = jnp.zeros((TIME, WIDTH))
        self.layers = eqx.filter_vmap(Attention)(jnp.stack(keys)) if scanned else [Attention(k) for k in keys]
        self.head = eqx.nn.Linear(WIDTH, VOCABULARY, use_bias=False, key=b)
        self.scanned = scanned

    def __call__(self, tokens):
        x = jax.vmap(self.tokens)(tokens) + self.positions
        return jax.vmap(self.head)(over_layers(self.layers, x, self.scanned))


def over_layers(layers, x, scanned):
    """Apply layers one after the other; scanned ones under remat."""
    if not scanned:
        for layer in layers:
            x = layer(x)
        return x
    arrays, static = eqx.partition(layers, eqx.is_array)
    return lax.scan(jax.checkpoint(lambda x, a: (eqx.combine(a, static)(x), None)), x, arrays)[0]


class ViT(eqx.Module):
    patches: eqx.nn.Conv2d
    layers: list
    head: eqx.nn.Linear

    def __init__(self, key):
        a, b, *keys = jax.random.split(key, 2 + LAYERS)
        self.patches = eqx.nn.Conv2d(5, WIDTH, 4, stride=4, key=a)
        self.layers, self.head = [Attention(k) for k in keys], eqx.nn.Linear(WIDTH, OUT, key=b)

    def __call__(self, image):
        x = self.patches(image).reshape(WIDTH, -1).T
        for layer in self.layers:
            x = layer(x, causal=False)
        return self.head(x.mean(0))


class Conv(eqx.Module):
    layers: list
    head: eqx.nn.Linear

    def __init__(self, key):
        a, b, c, d = jax.random.split(key, 4)
        self.layers = [
            eqx.nn.Conv2d(5, 40, 3, padding=1, key=a),
            eqx.nn.Conv2d(40, 56, 3, stride=2, padding=1, key=b),
            eqx.nn.Conv2d(56, 72, 3, stride=2, padding=1, key=c),
        ]
        self.head = eqx.nn.Linear(72, OUT, key=d)

    def __call__(self, x):
        for layer in self.layers:
            x = jax.nn.relu(layer(x))
        return self.head(x.mean((1, 2)))


class Recurrent(eqx.Module):
    cells: list
    head: eqx.nn.Linear

    def __init__(self, key, cell):
        a, b, c = jax.random.split(key, 3)
        self.cells = [cell(WIDTH, 112, key=a), cell(112, 144, key=b)]
        self.head = eqx.nn.Linear(144, OUT, key=c)

    def __call__(self, x):
        for cell in self.cells:
            zeros = jnp.zeros(cell.hidden_size)
            start = (zeros, zeros) if isinstance(cell, eqx.nn.LSTMCell) else zeros
            first = lambda carry: carry[0] if isinstance(carry, tuple) else carry

            def step(carry, x, cell=cell, first=first):
                carry = cell(x, carry)
                return carry, first(carry)

            _, x = lax.scan(step, start, x)
        return self.head(x[-1])


def classified(model, batch):
    return xent(jax.vmap(model)(batch["x"]), batch["y"]).mean()


def regressed(model, batch):
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)


def next_token(model, batch):
    return xent(jax.vmap(model)(batch[:, :-1]), batch[:, 1:]).mean()


def blocks(wrap):
    def loss(model, batch):
        def one(x):
            for block in model:
                x = wrap(lambda block, x: block(x))(block, x)
            return x

        return regressed(one, batch)

    return loss


PAIRS = {"x": (MANY, WIDTH), "y": (MANY, WIDTH)}
LABELED = {"x": (MANY, WIDTH), "y": ids(MANY)}
IMAGES = {"x": (ROWS, 5, 16, 16), "y": ids(ROWS)}
SERIES = {"x": (ROWS, TIME, WIDTH), "y": ids(ROWS)}
TOKENS = ids(ROWS, TIME + 1)
make_blocks = lambda key: [Block(k) for k in jax.random.split(key, LAYERS)]
make_stack = lambda key: eqx.filter_vmap(Block)(jax.random.split(key, LAYERS))
scanned_blocks = lambda model, batch: regressed(lambda x: over_layers(model, x, True), batch)
scanned_gpt = lambda key: GPT(key, scanned=True)

entered("eqx_mlp", lambda k: eqx.nn.MLP(WIDTH, OUT, HIDDEN, 3, key=k), LABELED, classified, "`eqx.nn.MLP`")
entered("eqx_blocks", make_blocks, PAIRS, blocks(lambda f: f), "residual MLP blocks, unrolled")
entered("eqx_blocks_remat", make_blocks, PAIRS, blocks(jax.checkpoint), "the same, each under `jax.checkpoint`")
entered("eqx_blocks_scan", make_stack, PAIRS, scanned_blocks, "the same, scanned and under `jax.checkpoint`")
entered("eqx_blocks_acc", make_blocks, PAIRS, blocks(lambda f: f), "the same, unrolled, 4 microbatches", accumulate=4)
entered("eqx_gpt", GPT, TOKENS, next_token, "GPT, unrolled")
entered("eqx_gpt_scan", scanned_gpt, TOKENS, next_token, "GPT, scanned and under `jax.checkpoint`")
entered("eqx_gpt_acc", GPT, TOKENS, next_token, "GPT, unrolled, 4 microbatches", accumulate=4)
entered("eqx_vit", ViT, IMAGES, classified, "ViT with a convolution of patches")
entered("eqx_conv", Conv, IMAGES, classified, "convolutions, features first")
entered("eqx_lstm", lambda k: Recurrent(k, eqx.nn.LSTMCell), SERIES, classified, "two LSTM layers, scanned over time")
entered("eqx_gru", lambda k: Recurrent(k, eqx.nn.GRUCell), SERIES, classified, "two GRU layers, scanned over time")

assert HEADS * HEAD == WIDTH
