"""Global view is as lean as plain jit, whatever the program, and as lean as device view: on compiled programs."""

import math

import jax
import pytest
from conftest import ALL_CASES, fraction, quick_or_slow
from kernel_libraries import LIBRARIES
from measured import exceeded, unneeded
from programs import LAYOUTS, PUBLISHED, TABLE
from registry import DEVICES, MANY, ROWS
from table import TABLES

# Each layout at stage 1 or 3, in turn, which compile what 0 and 2 do. Every third published program at one stage, most
# often at 3, which alone gathers. With ZEROJAX_GRIDS=all: all, as on the page.
EVERY = [(name, stage) for name in LAYOUTS for stage in range(4)] if ALL_CASES else fraction(2, LAYOUTS, (1, 3))
EXCEPTED = [name for name, program in PUBLISHED.items() if program.exceptions]
IN_TURN = [(name, 3 if name in EXCEPTED else (3, 2, 3, 1)[i % 4]) for i, name in enumerate(PUBLISHED)]
PUBLISHED_CASES = [(name, stage) for name in PUBLISHED for stage in (1, 2, 3)] if ALL_CASES else IN_TURN[::3]


def assert_lean(name, stage):
    assert not exceeded(name, stage)
    assert not unneeded(name, stage)
    jax.clear_caches()


@pytest.mark.parametrize(("name", "stage"), quick_or_slow(EVERY, [("eqx_blocks", 2)]))
def test_a_layout_is_lean(name, stage):
    assert_lean(name, stage)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stage"), PUBLISHED_CASES)
def test_a_published_program_is_lean(name, stage):
    assert_lean(name, stage)


@pytest.mark.parametrize("name", TABLE)
def test_no_dim_of_a_parameter_is_a_number_of_rows(name):
    program = TABLE[name]
    params, batch, _ = program.shapes()
    (rows,) = {x.shape[0] for x in jax.tree.leaves(batch)}
    assert rows in (ROWS, MANY)
    assert rows % (DEVICES * program.accumulate) == 0
    counts = {rows // math.prod(d) for d in [(), (4,), (DEVICES,), (DEVICES, 4)]} | {DEVICES}
    assert not counts & {n for x in jax.tree.leaves(params) for n in x.shape}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_program_is_on_its_page(table):
    assert set(table.programs) == {x for x in table.rows() if x in table.programs or not x.startswith(LIBRARIES)}
