"""How many bytes a loss gathers at a time, and which parameters it gathers whole instead of layer by layer."""

import re

import jax.numpy as jnp
import pytest
from conftest import shape
from engine_helpers import lay_out
from jax import lax

from zerojax.gather.working_set import working_set

LAYERS, SIZE = 3, 4
STACK, W = shape(LAYERS, SIZE, SIZE), shape(SIZE, SIZE)


def layer(x, w):
    return jnp.tanh(x @ w)


def scanned(x, stack):
    return lax.scan(lambda x, w: (layer(x, w), None), x, stack)[0]


def again(fn, x):
    return lax.scan(lambda x, _: (fn(x), None), x, None, LAYERS)[0]


def loop_of(row, x, count=LAYERS):
    return lax.fori_loop(0, count, lambda i, x: layer(x, row(i)), x)


def constant(w, x):
    w = jnp.tanh(w)
    return again(lambda x: layer(x, w), x)


def twice(w, x):
    return layer(layer(x, w), w)


def windows(a, x):
    window = lambda i: lax.dynamic_slice(a, (i, 0, 0), (2, SIZE, SIZE)).sum(0)
    return loop_of(window, x, 2)


HERE = r"\[0\] test_working_set\.py:\d+"
# The layers of the largest use, of what is held with a prefetch, and of what is gathered whole; and its name.
CASES = {
    "layer by layer": ([STACK], lambda a, x: scanned(x, a), 1, 2, ()),
    "no parameter": ([W], lambda w, x: x, 0, 0, ()),
    "constant of a loop": ([W], constant, 1, 1, ()),
    "activations of its shape": ([W], lambda w, x: twice(w, x[:SIZE]), 1, 1, ()),
    "scan in a loop": ([STACK], lambda a, x: again(lambda x: scanned(x, a), x), 1, 6, (3, 3, HERE)),
    "index of a loop": ([STACK], lambda a, x: loop_of(lambda i: a[2 - i], x), 1, 6, (3, 3, HERE)),
    "index": ([STACK], lambda a, x: layer(x, a[x[0, 0].astype(int)]), 3, 3, ()),
    "two layers at a time": ([STACK], windows, 3, 6, ()),
    "elements": ([shape(16)], lambda a, x: lax.fori_loop(0, 16, lambda i, x: x * a[i], x), 1, 2, ()),
    "change": ([W], lambda w, x: twice(w * x.std(), x), 1, 1, (1, 1, HERE)),
    "mask by rows": ([W], lambda w, x: twice(jnp.where(x[:SIZE] > 0, w, 0), x), 1, 1, (1, 1, r"\[0\]")),
    "sum": ([STACK], lambda a, x: scanned(x, lax.cumsum(a, 0)), 1, 3, (3, 3, HERE)),
    "two stacks": ([STACK] * 2, lambda a, b, x: scanned(x, lax.cumsum(a @ b, 0)), 2, 6, (6, 3, HERE + " and 1 more")),
}


@pytest.mark.parametrize(("params", "loss", "largest", "held", "whole"), CASES.values(), ids=CASES)
def test_what_is_gathered_at_a_time_and_what_whole(params, loss, largest, held, whole):
    layout = lay_out(params, [len(w.shape) - 1 for w in params]).layout
    found = working_set(lambda params, x: loss(*params, x).mean(), layout, shape(8, SIZE))
    layer = 4 * SIZE**2
    assert (found.layer, found.bytes) == (largest * layer, held * layer)
    assert found.stacks == ({0} if loss is CASES["layer by layer"][1] else set())
    assert [(each.bytes, each.layers) for each in found.whole] == ([(whole[0] * layer, whole[1])] if whole else [])
    assert all(re.fullmatch(whole[2], each.path) for each in found.whole)
