"""Losses with kernels and other opaque calls: exact beside plain jit, and as lean as plain jit and device view."""

import pytest
from conftest import ALL_CASES, quick_or_slow
from kernel_measured import Case, cases, differs, exceeded, forget
from kernel_registry import DEVICES, HEADS, HIDDEN, LAYERS, ROWS, TIME, VOCABULARY, WIDTH

QUICK = [("linear", "scan", "accumulate", 3)]
# The cases for which the registry has exceptions, and some others. ZEROJAX_GRIDS=all measures all cases.
SOME = [
    *QUICK,
    ("mean_inside", "remat", "bf16", 1),
    ("experts_exchanged", "scan", "accumulate", 1),
    ("layer_norm", "remat", "", 1),
    ("experts", "remat", "accumulate", 3),
]
EVERY = [(*case, stage) for case, stage in cases(4)] if ALL_CASES else SOME


@pytest.mark.parametrize(("name", "form", "option", "stage"), quick_or_slow(EVERY, QUICK))
def test_a_kernel_is_exact_and_costs_no_more(name, form, option, stage):
    case = Case(name, form, option)
    assert not differs(case, stage)
    assert not exceeded(case, stage)
    forget()


def test_no_dim_is_a_number_of_rows():
    counts = {ROWS // n for n in (1, 2, DEVICES, 2 * DEVICES)} | {DEVICES}
    assert not counts & {HEADS, HIDDEN, TIME, VOCABULARY, WIDTH, *LAYERS.values()}
