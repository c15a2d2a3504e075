"""Every stage gives the numbers of plain optax on one device."""

import functools

import pytest
from conftest import mesh_of, quick_or_slow
from models import OPTIMIZERS, awkward_batches, awkward_loss, awkward_params
from parity import assert_parity, train_plain

from zerojax import Tuning, zero_shard

STEPS = 4


@functools.cache
def reference(name):
    return train_plain(OPTIMIZERS[name](), awkward_loss, awkward_params(), awkward_batches(STEPS))


def check(name, stage, count, **options):
    tx = zero_shard(OPTIMIZERS[name](), stage=stage, mesh=mesh_of(count), tuning=Tuning(persist_below=50), **options)
    assert_parity(tx, awkward_loss, awkward_params(), awkward_batches(STEPS), reference=reference(name))


# Every optimizer, stage and count; updates of rows or columns run where these are sharded.
WHOLE = ("adafactor", "muon")
QUICK = [("adamw", 1, 8), ("clip-adamw", 3, 3), ("reduce-on-plateau", 3, 3)]
CASES = [(name, 3 if name in WHOLE else i % 4, (8, 3, 2, 1)[i // 2 % 4]) for i, name in enumerate(OPTIMIZERS)]


@pytest.mark.parametrize(("name", "stage", "count"), quick_or_slow([*QUICK, *CASES, ("muon", 2, 3)], QUICK))
def test_every_optimizer_equals_plain_optax(name, stage, count):
    check(name, stage, count)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("name", "stage", "count"),
    [
        ("adamw", 1, 8),
        ("clip-adamw", 3, 8),
        pytest.param("muon", 2, 3, marks=pytest.mark.slow),
        pytest.param("adafactor", 3, 3, marks=pytest.mark.slow),
    ],
)
def test_so_does_device_view_where_rows_do_not_meet(name, stage, count):
    check(name, stage, count, view="device")
