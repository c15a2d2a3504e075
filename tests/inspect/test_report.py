"""The report counts bytes on live arrays and says why a leaf is not sharded."""

import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from models import awkward_params

from zerojax import Offload, Padded, Tuning, report, zero_shard


def test_every_leaf_is_sharded_or_has_a_reason(mesh):
    for stage in (0, 1, 3):
        state = zero_shard(optax.adamw(1e-3), stage=stage, mesh=mesh, tuning=Tuning(persist_below=50)).create(
            awkward_params()
        )
        for row in report(state).rows:
            found = row.stored["device"].values()
            assert row.note or sum(found) == 8 * max(found) == math.prod(row.shape) * row.dtype.itemsize, row


def test_padding_and_persistence_are_reported(mesh):
    state = zero_shard(optax.adamw(1e-3), stage=3, mesh=mesh, tuning=Tuning(persist_below=50)).create(awkward_params())
    uneven = line_of("uneven", report(state))
    assert uneven.split()[1] == "52"  # 13 x 8 elements over 8 devices
    assert "float32[13, 7]" in uneven
    assert uneven.endswith("(dim 1 padded by 13 elements)")
    assert "padded: take statistics of zerojax.logical(params), and chain" in str(report(state)).split("\n\n")[0]
    assert "statistics" not in str(report(state.opt_state))
    assert "persist_below=50" in line_of("layer/bias", report(state))
    assert isinstance(state.params["uneven"], Padded)


def line_of(name, found):
    """The first line of a report with a given label."""
    return next(line for line in str(found).splitlines() if line.split()[:1] == [name])


def test_bytes_of_any_pytree():
    found = report({"a": jnp.ones((4, 4)), "keys": jax.random.key(0)})
    assert found.bytes == {"a": 64, "keys": 8}
    assert found.total == 72
    assert report(jnp.ones(3)).bytes == {"array": 12}


def test_layers_on_different_devices_are_not_added_up():
    put = lambda i: jax.device_put(jnp.ones(100), jax.devices()[i])
    found = report({"params": {f"layer_{i}": put(i % 2) for i in range(4)}})
    assert found.total == found.bytes["params"] == 800
    assert re.findall(r"layer_# +(.*?)  ", str(found)) == ["2 x 400"] * 2  # on other devices: not equal


def layers(count, odd=None):
    """Layers of one shape, but for one that is wider."""
    return {
        "embed": jnp.ones((4, 2)),
        **{f"layer_{i}": {"w": jnp.ones((3, 3 + (i == odd))), "b": jnp.ones(3)} for i in range(count)},
    }


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (layers(12), {"embed": "32", "layer_#/b": "12 x 12", "layer_#/w": "12 x 36"}),
        (layers(3, odd=1), {"embed": "32", "layer_#/b": "3 x 12", "layer_#/w": "2 x 36", "layer_1/w": "48"}),
        ({"up": jnp.ones(3), "down": jnp.ones(3)}, {"down": "12", "up": "12"}),
    ],
    ids=["alike", "one-odd", "names"],
)
def test_leaves_that_differ_in_numbers_share_a_line(tree, expected):
    assert dict(re.findall(r"^  (\S+) +(.*?)  float", str(report({"params": tree})), re.MULTILINE)) == expected


def test_parts_of_one_leaf_and_alike_layers_of_every_part(mesh):
    text = str(report(zero_shard(optax.adamw(1e-3), stage=1, mesh=mesh).create(layers(9))))
    assert text.count("layer_#/w") == 3  # parameters and two moments
    assert re.search(r"^step +4  int32", text, re.MULTILINE)
    assert len(text.splitlines()) < 40


@pytest.mark.parametrize("options", [{}, {"offload": Offload(optimizer="host")}], ids=["device", "host"])
def test_parameters_and_optimizer_state_in_any_tree_have_the_notes_of_a_state(options, mesh):
    tx = zero_shard(optax.adamw(1e-3), stage=3, mesh=mesh, tuning=Tuning(persist_below=50), **options)
    state, average = tx.create(awkward_params()), jnp.zeros(400)
    expected = [row.note for part in ("params", "opt_state") for row in report(state).rows if row.part == part]
    for tree in (state.params, state.opt_state), {"a": (state.params, [state.opt_state]), "b": average}:
        found = report(tree, tx)
        assert not found.misplaced
        assert [row.note for row in found.rows if row.part != "b"] == expected
    for tree in (state.opt_state, average), (state.params, state.params, state.opt_state):
        assert not report(tree, tx).misplaced  # what is not known to be a parameter is not planned as one
    whole = jax.tree.map(lambda x: jax.device_put(x, jax.devices()[0]), state.params)
    assert {path[:3] for path in report((whole, state.opt_state), tx).misplaced} == {"[0]"}
