"""Blocks change where an update is computed, never what comes out, and its buffers stay where they are."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import fraction
from jax.sharding import SingleDeviceSharding

from zerojax.offload import blocked
from zerojax.offload.blocked import LOOPS_BECOME_KERNELS, in_blocks
from zerojax.offload.host import compute_on_host

OPTIMIZERS = {
    "adamw": optax.adamw(1e-2, weight_decay=0.1),
    "lion": optax.lion(1e-2),
    "sgd": optax.sgd(1e-2, momentum=0.9),
    "decayed": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(1e-2, momentum=0.9)),  # no order is in place
    "nesterov": optax.chain(optax.clip(0.5), optax.sgd(1e-2, momentum=0.9, nesterov=True)),
}
# Of values below 4: another program contracts other products with their sums.
ROUNDING = 2 * 2.4e-7
SIZES = [(1,), (127,), (128,), (129,), (1000,), (4096,), (3, 5, 67), ()]


@pytest.fixture(params=[True, False], ids=["loop", "plain"])
def either_form(request, monkeypatch):
    """Both forms on every version of XLA: what is computed does not depend on which one is faster."""
    monkeypatch.setattr(blocked, "LOOPS_BECOME_KERNELS", request.param)


def operands(shape, tx):
    """`(wide, tree, step)`: gradient, parameter and the state's arrays; `step(wide, scalars)` is the update."""
    draw = np.random.default_rng(0)
    some = lambda: jnp.asarray(draw.standard_normal(shape), jnp.float32)
    param = some()
    leaves, tree = jax.tree.flatten(tx.init(param))
    lanes = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]

    def step(wide, scalars):
        grad, param, *state = wide
        scale, count = scalars
        filled = [state[lanes.index(i)] if i in lanes else count for i in range(len(leaves))]
        update, after = tx.update(grad * scale, jax.tree.unflatten(tree, filled), param)
        after = jax.tree.leaves(after)
        return [optax.apply_updates(param, update), *[after[i] for i in lanes]]

    return [some(), param, *[jnp.abs(some()) for _ in lanes]], step


def scalars():
    return [jnp.float32(0.3), jnp.int32(7)]


@pytest.mark.quick(4)
@pytest.mark.usefixtures("either_form")
@pytest.mark.parametrize(("name", "shape"), fraction(2, OPTIMIZERS, SIZES), ids=str)
def test_the_numbers_are_those_of_full_arrays(name, shape):
    wide, step = operands(shape, OPTIMIZERS[name])
    places = tuple(range(1, len(wide)))
    chunking = jax.jit(lambda wide, scalars: in_blocks(step, wide, scalars, overwrites=places))(wide, scalars())
    for ours, theirs in zip(chunking, jax.jit(step)(wide, scalars()), strict=True):
        assert ours.shape == shape
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("size", [1 << 20, (1 << 20) - 3])
def test_the_update_is_in_place_without_room_for_arrays(size, name):
    wide, step = operands((size,), OPTIMIZERS[name])
    places = tuple(range(1, len(wide)))
    update = lambda grad, state, scalars: in_blocks(step, [grad, *state], scalars, overwrites=places)
    compiled = jax.jit(update, donate_argnums=1).lower(wide[0], wide[1:], scalars()).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == len(places) * 4 * size
    if name == "decayed" or (name == "lion" and not LOOPS_BECOME_KERNELS):
        return  # the kernels of plain XLA
    assert memory.temp_size_in_bytes < 32 << 10  # the first cache
    text = compiled.as_text()
    assert not re.search(rf"f32\[{size}\]\S* copy\(", text)
    assert ('xla_cpu_small_call="true"' in text) == LOOPS_BECOME_KERNELS


@pytest.mark.parametrize("wrap", [lambda fn: fn, compute_on_host], ids=["plain", "compute_on"])
@pytest.mark.parametrize("kind", ["device", "pinned_host", "unpinned_host"])
@pytest.mark.parametrize("size", [1 << 14, (1 << 14) - 3])
def test_host_memory_is_updated_where_it_is(size, kind, wrap):
    wide, step = operands((size,), OPTIMIZERS["adamw"])
    there = SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
    rounded = lambda wide, scalars: (lambda p, *state: [p.astype(jnp.bfloat16), p, *state])(*step(wide, scalars))
    update = lambda grad, state, s: in_blocks(rounded, [grad, *state], s, overwrites=(None, 1, 2, 3))
    expected = jax.jit(step)(wide, scalars())
    grad, *state = jax.device_put(wide, there)
    places = [x.unsafe_buffer_pointer() for x in state]
    jitted = jax.jit(wrap(update), donate_argnums=1, out_shardings=there)
    compiled = jitted.lower(grad, state, scalars()).compile()
    assert not re.search(rf"f32\[{size}\]\S* copy\(", compiled.as_text())
    assert ('xla_cpu_small_call="true"' in compiled.as_text()) == LOOPS_BECOME_KERNELS
    after = compiled(grad, state, scalars())
    assert [x.sharding.memory_kind for x in after] == [kind] * 4
    assert [x.unsafe_buffer_pointer() for x in after[1:]] == places
    for ours, theirs in zip(after[1:], expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=ROUNDING)
