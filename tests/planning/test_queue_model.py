"""The model of a GPU's queues gives the time that an H100 took."""

import pytest
from queue_model import H100, IN, MEASURED, OUT, PASSES, RUN, STATE, WAIT, adamw, record, simulated_seconds


def test_the_order_of_a_step():
    """Two chunks are fetched ahead of the chunk that is updated, and a step returns when everything is written."""
    (calls,) = record(adamw(leaves=1, rows=8192 * 4), passes=1.0)
    assert sum(x.size for x in calls if x.queue == IN) == 12 * 8192 * 4 * 2048
    short = {RUN: "u", IN: "f", OUT: "w", WAIT: "-"}
    chunks = "".join(short[x.queue] for x in calls)
    # per chunk, three arrays are fetched and written: the master weight and two moments
    middle = ["uwwwfff"] * 2 + ["uwww---fff"] * 4 + ["uwww---"] * 2
    assert chunks == "u" + "ffffff" + "".join(middle) + "------"


@pytest.mark.quick(1)
@pytest.mark.parametrize("share", [0.0, 0.25, 1.1])
def test_times_on_an_h100(share):
    found = simulated_seconds(adamw(share), PASSES, H100)
    link = STATE / H100.both
    if not share:
        assert abs(found / MEASURED - 1) < 0.05
    elif share > 1:
        assert found < 1.1 * max(PASSES, link)
        assert found < 1.1 * PASSES  # nothing crosses the link
    else:
        none, full = (simulated_seconds(adamw(x), PASSES, H100) for x in (0.0, 1.1))
        assert abs(found - (none + share * (full - none))) < 0.03 * none
