"""The table of blocks says what the backward passes of a loss read, and where it comes from."""

import functools

import jax
import jax.numpy as jnp
import pytest

import zerojax
from zerojax.budget.blocks import Blocks, memory_of_blocks, table_lines

WIDTH, ROWS, LAYERS = 16, 8, 3
X = jnp.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
PARAMS = {"up": jnp.ones((WIDTH, 4 * WIDTH)), "down": jnp.ones((4 * WIDTH, WIDTH))}


def layer(w, x):
    return x + jnp.sin(jnp.tanh(x @ w["up"])) @ w["down"]


def unrolled(fn):
    return lambda params, x: jnp.sum(functools.reduce(lambda x, _: fn(params, x), range(LAYERS), x) ** 2)


def scanned(fn):
    return lambda params, x: jnp.sum(jax.lax.scan(lambda x, _: (fn(params, x), None), x, length=LAYERS)[0] ** 2)


def described(loss, share=1.0, devices=1):
    """The blocks of a loss, and the `Blocks` that found them."""
    blocks = Blocks()
    jax.eval_shape(blocks.observed(loss), PARAMS, X)
    return memory_of_blocks(blocks, share, devices)


WRAPPED = {
    "checkpoint": jax.checkpoint(layer),
    "dots": jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable),
    "everything": jax.checkpoint(layer, policy=jax.checkpoint_policies.everything_saveable),
    "host": jax.checkpoint(
        layer, policy=jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    ),
    "budget": zerojax.remat_within(layer, budget=ROWS * 4 * WIDTH * 4),
}
ONE = ROWS * 4 * WIDTH * 4  # bytes of a hidden value; sin and tanh read one each, and the last product another
PRODUCT = 2 * ROWS * WIDTH * 4 * WIDTH


@pytest.mark.parametrize("style", [unrolled, scanned])
@pytest.mark.parametrize("wrapping", WRAPPED)
def test_a_users_checkpoint_is_described(wrapping, style):
    """Equal calls share one row. A scan around a `jax.checkpoint` is a block with what the checkpoint saves."""
    (found,) = described(style(WRAPPED[wrapping]))
    assert found.calls == LAYERS
    elementwise = 2 * ROWS * 4 * WIDTH
    of = {"checkpoint": (0, 0, PRODUCT), "dots": (ONE, 0, 0), "everything": (None, 0, 0), "host": (0, ONE, 0)}
    saved, offloaded, repeated = of.get(wrapping, (ONE, 0, 0))
    assert found.offloaded == offloaded
    # Derivatives of elementwise functions may be computed in the forward or in the backward pass.
    assert repeated <= found.flops <= repeated + 2 * elementwise
    if saved is None:
        assert found.recomputed == 0
    else:
        assert found.saved == saved
        assert found.recomputed > 0
    if wrapping == "budget":
        assert found.saved == WRAPPED[wrapping].choice(PARAMS, X).saved_bytes


def test_blocks_of_a_share_are_those_of_their_choice():
    """With a share, `described` is what `memory=` chose. Bytes are divided by the devices."""
    for loss in (unrolled(zerojax.block(layer)), scanned(layer)):
        (everything,), (half,) = described(loss), described(loss, 0.5)
        assert (everything.recomputed, everything.flops) == (0, 0)
        assert 0 < half.saved <= everything.saved // 2
        assert half.saved + half.recomputed == everything.saved
        assert half.flops > 0
        assert described(loss, 0.5, devices=4)[0].saved == half.saved // 4


def test_different_blocks_have_different_rows():
    """A loss without blocks has no table; data that is not differentiated is no block."""

    def loss(params, x):
        x = jax.lax.scan(lambda x, _: (2 * x, None), x, length=2)[0]
        return scanned(layer)(params, x) + unrolled(WRAPPED["checkpoint"])(params, x)

    rows = list(table_lines(described(loss)))
    assert [row[0].split(" x ")[0] for row in rows] == ["", "3", "3"]
    assert rows[1][3:] == ("0 B", "0 FLOP", "0%")
    assert {len(row) for row in rows} == {6}
    assert rows[2][1] == "0 B"
    assert list(table_lines(described(lambda params, x: jnp.sum(layer(params, x))))) == []
