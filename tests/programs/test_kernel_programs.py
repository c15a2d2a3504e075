"""Losses with kernels and other opaque calls: exact beside plain jit, and as lean as plain jit and device view."""

import json

import pytest
from conftest import ALL_CASES
from kernel_measured import Case, cases, differs, exceeded, forget
from kernel_registry import DEVICES, HEADS, HIDDEN, KERNELS, LAYERS, ROWS, TIME, VOCABULARY, WIDTH
from kernel_table import FIGURES, PAGE
from page import rows_of

# Some cases of the page's table, whichever libraries are installed. ZEROJAX_GRIDS=all measures all cases.
TABLE = [(Case(row["name"], row["form"], row["option"]), row["stage"]) for row in json.loads(FIGURES.read_text())]
EVERY = cases(4) if ALL_CASES else [one for one in TABLE[8::40] if one[0].name in KERNELS]
QUICK = [(Case("linear", "scan", "accumulate"), 3)]
# The cases for which the registry has exceptions.
EXCEPTED = [(Case("mean_inside", "remat", "bf16"), 1), (Case("experts_exchanged", "scan", "accumulate"), 1)]
CASES = [
    pytest.param(
        *one, marks=() if one in QUICK else pytest.mark.slow, id="-".join(filter(None, (*one[0], str(one[1]))))
    )
    for one in dict.fromkeys([*QUICK, *EXCEPTED, *EVERY])
]


@pytest.fixture(autouse=True)
def _forget():
    yield
    forget()


@pytest.mark.parametrize(("case", "stage"), CASES)
def test_a_kernel_is_exact_and_costs_no_more(case, stage):
    assert not differs(case, stage)
    assert not exceeded(case, stage)


def test_no_dim_is_a_number_of_rows():
    counts = {ROWS // n for n in (1, 2, DEVICES, 2 * DEVICES)} | {DEVICES}
    assert not counts & {HEADS, HIDDEN, TIME, VOCABULARY, WIDTH, *LAYERS.values()}


def test_every_kernel_is_on_the_page():
    assert set(KERNELS) <= set(rows_of(PAGE.read_text()))
