"""Programs of published kinds are as lean as plain jit: on compiled programs, in global view."""

import jax
import pytest
from conftest import ALL_CASES
from measured import exceeded, unneeded
from programs import PUBLISHED

# Every third program at one stage, most often at 3, which alone gathers. With
# ZEROJAX_GRIDS=all: all at stages 1 to 3.
STAGES = (3, 2, 3, 1)
EXCEPTED = [name for name, program in PUBLISHED.items() if program.exceptions]
IN_TURN = [(name, 3 if name in EXCEPTED else STAGES[i % 4]) for i, name in enumerate(PUBLISHED)]
EVERY = [(name, stage) for name in PUBLISHED for stage in (1, 2, 3)] if ALL_CASES else IN_TURN[::3]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stage"), EVERY)
def test_a_published_program_costs_what_plain_jit_costs(name, stage):
    assert not exceeded(name, stage)
    assert not unneeded(name, stage)
    jax.clear_caches()
