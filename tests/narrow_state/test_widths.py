"""Checkpoints, `reshard`, `adopt` and `unshard` between encodings of the state, on other meshes and stages."""

import functools
import itertools

import jax
import numpy as np
import pytest
from test_narrow_training import NARROW, bits, parameters, trained, transformation

from zerojax import Offload, Precision
from zerojax.checkpoint import Checkpointer

BF16 = {"precision": Precision.bf16()}
KINDS = {
    "wide": {"devices": 8, **BF16},
    "int8": {"devices": 3, "stage": 1, **BF16, **NARROW["int8"]},
    "rounded": {"devices": 8, **NARROW["rounded"]},
    "compensated": {"devices": 2, **NARROW["compensated"]},
    "host": {"devices": 4, **BF16, **NARROW["float8"], "offload": Offload(optimizer="host", chunk_bytes=4096)},
}
# Codes of 8 bits are within 1/8 of an element, and blocks of both signs within 1/127 or 1/8 of the largest element.
STATE = {"wide": 0.0, "int8": 1 / 8, "rounded": 1 / 8, "compensated": 1 / 8, "host": 1 / 8}
WEIGHTS = {"rounded": 2.0**-8, "compensated": 2.0**-16}
QUICK = [("wide", "rounded"), ("int8", "wide"), ("compensated", "compensated"), ("rounded", "host")]


@functools.cache
def run(kind):
    tx = transformation(**KINDS[kind])
    return tx, trained(tx, steps=2)


def plain(tx, state):
    """The wide state and the weights, as logical arrays."""
    weights = tx.unshard(tx.weights(state.params, state.opt_state))
    return jax.tree.map(lambda x: np.asarray(x, np.float32), (tx.unshard(state.opt_state, state.params), weights))


@pytest.mark.parametrize("way", ["restore", "reshard"])
@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow)
        for pair in itertools.product(KINDS, repeat=2)
    ],
)
def test_a_state_is_moved_into_another_encoding(saved, wanted, way, tmp_path):
    (tx, state), (to, like) = run(saved), run(wanted)
    if way == "restore":
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(state)
            moved = checkpointer.restore(like=like).state
    else:
        moved = tx.reshard(state, to=to, donate=False)
    (before, weights), (after, new_weights) = plain(tx, state), plain(to, moved)
    same = saved == wanted or STATE[wanted] == 0 or {saved, wanted} == {"int8", "rounded"}
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_allclose(y, x, rtol=0, atol=0 if same else STATE[wanted] * np.abs(x).max(initial=0))
    for x, y in zip(jax.tree.leaves(weights), jax.tree.leaves(new_weights), strict=True):
        exact = saved == "rounded" or saved == wanted
        np.testing.assert_allclose(y, x, rtol=0 if exact else WEIGHTS.get(wanted, 0), atol=0)
    if saved == wanted and "offload" not in KINDS[saved]:  # seeds, too: the run goes on as if it was not interrupted
        for x, y in zip(bits(state), bits(moved), strict=True):
            np.testing.assert_array_equal(x, y)


def test_a_plain_state_is_adopted_and_comes_back():
    tx, state = run("int8")
    plain_state = tx.unshard(state.opt_state, state.params)
    adopted = tx.adopt(plain_state, state.params)
    again = tx.unshard(adopted, state.params)
    for x, y in zip(jax.tree.leaves(plain_state), jax.tree.leaves(again), strict=True):
        # What a code represents is encoded by the same code, if the scale is the same.
        np.testing.assert_allclose(y, x, rtol=1e-6)
    continued = tx.create(parameters(), opt_state=plain_state)
    assert int(continued.opt_state.inner[0].count) == 2
