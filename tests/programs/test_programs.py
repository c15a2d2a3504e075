"""Global view is as lean as plain jit and as device view, whatever the layout of the model: on compiled programs."""

import math

import jax
import pytest
from conftest import ALL_CASES, fraction, quick_or_slow
from measured import exceeded, unneeded
from page import rows_of
from programs import LAYOUTS, TABLE
from registry import DEVICES, MANY, ROWS
from table import PAGE

# Each program at stage 1 or 3, in turn, which compile what 0 and 2 do. With ZEROJAX_GRIDS=all: all,
# as on the page.
EVERY = [(name, stage) for name in LAYOUTS for stage in range(4)] if ALL_CASES else fraction(2, LAYOUTS, (1, 3))
QUICK = [("eqx_blocks", 2)]


@pytest.mark.parametrize(("name", "stage"), quick_or_slow(EVERY, QUICK))
def test_global_view_is_lean(name, stage):
    assert not exceeded(name, stage)
    assert not unneeded(name, stage)


@pytest.mark.parametrize("name", TABLE)
def test_no_dim_of_a_parameter_is_a_number_of_rows(name):
    program = TABLE[name]
    params, batch, _ = program.shapes()
    (rows,) = {x.shape[0] for x in jax.tree.leaves(batch)}
    assert rows in (ROWS, MANY)
    assert rows % (DEVICES * program.accumulate) == 0
    counts = {rows // math.prod(d) for d in [(), (4,), (DEVICES,), (DEVICES, 4)]} | {DEVICES}
    assert not counts & {n for x in jax.tree.leaves(params) for n in x.shape}


def test_every_program_is_on_the_page():
    assert sorted(rows_of(PAGE.read_text())) == sorted(TABLE)
