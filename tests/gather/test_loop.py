"""The operands of a loop are sorted: parameters that all iterations share, stacks of them, and other values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from zerojax import compat
from zerojax.gather.loop import Loop

W, STACK, X, ROWS = jnp.ones((4, 4)), jnp.ones((3, 4, 4)), jnp.ones((2, 4)), jnp.ones((3, 2, 4))


def loop_of(fn, *others):
    jaxpr, _ = compat.opened(jax.make_jaxpr(fn)(W, STACK, *others))
    return Loop.of(jaxpr, ["w", "stack"])


def without_carry(w, stack, x):
    return lax.map(lambda one: x @ w @ one, stack)


def carried(w, stack, x, rows):
    return lax.scan(lambda c, one: (c @ w @ one[0] + one[1], None), x, (stack, rows), reverse=True)[0]


@pytest.mark.parametrize(("fn", "others", "consts", "carry"), [(without_carry, [X], 1, 0), (carried, [X, ROWS], 0, 1)])
def test_operands_are_sorted(fn, others, consts, carry):
    loop = loop_of(fn, *others)
    assert (loop.shared, loop.stacked, loop.params) == (("w",), ("stack",), ("w", "stack"))
    assert (loop.consts, loop.carry, loop.length) == (consts, carry, 3)
    assert [index for index in loop.others if index is not None] == list(range(len(others)))
    kinds = loop.values(others)
    assert [len(values) for values in kinds] == [consts, carry, len(others) - consts - carry]
    for value, given in zip((value for kind in kinds for value in kind), others, strict=True):
        assert value is given


def test_a_reversed_loop_reads_and_writes_its_rows_from_the_last():
    stack = jnp.arange(3.0)
    for fn, others, layers in ((without_carry, [X], [0, 1, 2]), (carried, [X, ROWS], [2, 1, 0])):
        loop = loop_of(fn, *others)
        assert [loop.layer(i) for i in range(3)] == layers
        assert [float(loop.row(stack, i)) for i in range(3)] == layers
        written = loop.write(stack, jnp.float32(9), 0)
        np.testing.assert_array_equal(written, stack.at[layers[0]].set(9))
