"""The report counts bytes on live arrays and says why a leaf is not sharded."""

import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import mesh_of
from models import OPTIMIZERS, awkward_params

from zerojax import Offload, Padded, Precision, estimate, report, zero_shard
from zerojax.inspect.report_tree import lines


def test_every_leaf_is_sharded_or_has_a_reason(mesh):
    for stage in (0, 1, 3):
        state = zero_shard(optax.adamw(1e-3), stage=stage, mesh=mesh, persist_below=50).create(awkward_params())
        for row in report(state).rows:
            assert row.note or row.bytes * 8 == row.total, row


def test_padding_and_persistence_are_reported(mesh):
    state = zero_shard(optax.adamw(1e-3), stage=3, mesh=mesh, persist_below=50).create(awkward_params())
    uneven = line_of("uneven", report(state))
    assert uneven.split()[1] == "52"  # 13 x 8 elements over 8 devices
    assert "float32[13, 7]" in uneven
    assert uneven.endswith("(dim 1 padded by 13 elements)")
    assert "padded: take statistics of zerojax.logical(params), and chain" in str(report(state)).split("\n\n")[0]
    assert "statistics" not in str(report(state.opt_state))
    assert "persist_below=50" in line_of("bias", report(state))
    assert isinstance(state.params["uneven"], Padded)


def line_of(name, found):
    """The first line of a report with a given label."""
    return next(line for line in str(found).splitlines() if line.split()[:1] == [name])


def test_bytes_of_any_pytree():
    found = report({"a": jnp.ones((4, 4)), "keys": jax.random.key(0)})
    assert found.bytes == {"a": 64, "keys": 8}
    assert found.total == found.tree.device == 72
    assert report(jnp.ones(3)).tree["array"].device == 12


def test_layers_on_different_devices_are_not_added_up():
    put = lambda i: jax.device_put(jnp.ones(100), jax.devices()[i])
    found = report({"params": {f"layer_{i}": put(i % 2) for i in range(4)}})
    assert found.total == found.tree.device == found.tree["params"].device == found.bytes["params"] == 800
    assert [line.count for line in lines(found.tree) if line.depth == 1] == [1] * 4  # on other devices: not equal
    assert "layer_3" in str(found)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("name", "stage", "count", "options"),
    [
        ("adamw", 3, 8, {}),
        ("adafactor", 1, 2, {"precision": Precision.bf16(), "offload": Offload(optimizer="host")}),
    ],
)
def test_the_tree_adds_up_to_what_is_estimated(name, stage, count, options):
    """For other stages, devices and types, tests/planning/test_estimate.py compares the totals."""
    options = {"persist_below": 50, **options}
    tx = zero_shard(OPTIMIZERS[name](), stage=stage, mesh=mesh_of(count), **options)
    found = report(tx.create(awkward_params()))
    tree, parts = found.tree, dict(found.tree.children)
    predicted = estimate(awkward_params(), tx=OPTIMIZERS[name](), devices=count, stages=(stage,), **options)[stage]
    assert tree["params"].device == predicted.params
    assert (parts["master"].device if "master" in parts else 0) == predicted.master
    assert tree["opt_state"].device == predicted.opt_state
    assert (tree.host, tree.disk) == (predicted.host, predicted.disk)
    assert tree.device == found.total
    assert_sums(tree)


def assert_sums(node):
    for place in ("device", "host", "disk"):
        if node.children:
            assert getattr(node, place) == sum(getattr(child, place) for _, child in node.children)
    for _, child in node.children:
        assert_sums(child)


def test_what_is_offloaded_to_disk_is_counted_there(tmp_path):
    options = {"persist_below": 50, "offload": Offload(optimizer="disk", path=tmp_path, update="device")}
    state = zero_shard(optax.adamw(1e-3), stage=2, mesh=mesh_of(2), **options).create(awkward_params())
    predicted = estimate(awkward_params(), tx=optax.adamw(1e-3), devices=2, stages=(2,), **options)
    assert report(state).tree.disk == predicted[2].disk > 0
    assert "on disk" in str(report(state))


def layers(count, odd=None):
    """Layers of one shape, but for one that is wider."""
    return {
        "embed": jnp.ones((4, 2)),
        **{f"layer_{i}": {"w": jnp.ones((3, 3 + (i == odd))), "b": jnp.ones(3)} for i in range(count)},
    }


@pytest.mark.parametrize(
    ("tree", "labels"),
    [
        (layers(12), ["embed", "layer_0 … layer_11, 12 alike"]),
        (layers(12, odd=7), ["embed", "layer_0 … layer_6, 7 alike", "layer_7", "layer_8 … layer_11, 4 alike"]),
        ([jnp.ones(3)] * 3, ["0 … 2, 3 alike"]),
        ({"w_1": jnp.ones(3), "w_3": jnp.ones(3)}, ["w_1", "w_3"]),  # w_2 is not there
        ({"up": jnp.ones(3), "down": jnp.ones(3)}, ["down", "up"]),
        ({"w1_1": jnp.ones(3), "w2_2": jnp.ones(3)}, ["w1_1", "w2_2"]),
    ],
    ids=["alike", "one-odd", "list", "gap", "names", "two-numbers"],
)
def test_alike_neighbours_share_a_line(tree, labels):
    found = report({"params": tree})
    assert [line.label for line in lines(found.tree) if line.depth == 1] == labels
    alike = sum(line.count * line.node.device for line in lines(found.tree) if line.depth == 1)
    assert alike == found.total


def test_alike_layers_are_alike_in_every_part(mesh):
    text = str(report(zero_shard(optax.adamw(1e-3), stage=1, mesh=mesh).create(layers(9))))
    assert text.count("layer_0 … layer_8, 9 alike") == 3  # parameters and two moments
    assert len(text.splitlines()) < 40
