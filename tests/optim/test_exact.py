"""Every stage gives the numbers of plain optax on one device."""

import functools

import pytest
from conftest import mesh_of, quick_or_slow
from models import OPTIMIZERS, awkward_batches, awkward_loss, awkward_params
from parity import assert_parity, train_plain

from zerojax import zero_shard

STEPS = 4


@functools.cache
def reference(name):
    return train_plain(OPTIMIZERS[name](), awkward_loss, awkward_params(), awkward_batches(STEPS))


def check(name, stage, count, **options):
    tx = zero_shard(OPTIMIZERS[name](), stage=stage, mesh=mesh_of(count), persist_below=50, **options)
    assert_parity(tx, awkward_loss, awkward_params(), awkward_batches(STEPS), reference=reference(name))


# Those whose update is of rows or columns where these are sharded, the others at one stage or the other.
WHOLE = ("adafactor", "muon")


@pytest.mark.parametrize(
    ("name", "stage"),
    quick_or_slow(
        [(name, 3 if name in WHOLE else (1, 3)[i % 2]) for i, name in enumerate(OPTIMIZERS)],
        [("adamw", 1)],
    ),
)
def test_every_optimizer_equals_plain_optax_on_eight_devices(name, stage):
    check(name, stage, 8)


@pytest.mark.parametrize(
    ("name", "stage"), quick_or_slow([("adamw", 0), ("muon", 2), ("clip-adamw", 3)], [("clip-adamw", 3)])
)
def test_an_odd_number_of_devices_changes_nothing(name, stage):
    check(name, stage, 3)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("name", "stage", "count"),
    [
        ("adamw", 1, 8),
        ("clip-adamw", 3, 8),
        pytest.param("muon", 2, 3, marks=pytest.mark.slow),
        *(pytest.param("adafactor", stage, count, marks=pytest.mark.slow) for stage in range(4) for count in (1, 3)),
    ],
)
def test_so_does_device_view_where_rows_do_not_meet(name, stage, count):
    check(name, stage, count, view="device")


# Every optimizer at two stages and with two counts, and each stage with each count.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage", "count"),
    [
        (name, stage, (1, 2, 3, 8)[(i + stage) % 4])
        for i, name in enumerate(OPTIMIZERS)
        for stage in ((0, 3), (1, 2))[i // 2 % 2]
    ],
)
def test_every_stage_and_count_equals_plain_optax(name, stage, count):
    check(name, stage, count)
