"""The model of a GPU's queues gives the time that an H100 took, and says what other orders of a step are worth."""

import pytest
from queue_model import H100, IN, MEASURED, OUT, PASSES, RUN, STATE, WAIT, adamw, record, replay, simulated_seconds


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


def overlapping(steps, arrays):
    """The same calls, but `arrays` arrays are fetched before the passes, and a step does not wait for its last writes.

    The next step waits for them after its passes were enqueued.
    """
    order, behind, position = [], [], 0
    for step in steps:
        numbered = list(enumerate(step, position))
        position += len(step)
        passes, rest = numbered[:1], numbered[1:]
        ahead = [one for one in rest if one[1].queue == IN][:arrays]
        last = max(i for i, (_, call) in enumerate(rest) if call.queue != WAIT)
        order += [*ahead, *passes, *behind, *(one for one in rest[: last + 1] if one not in ahead)]
        behind = rest[last + 1 :]
    place = {old: new for new, (old, _) in enumerate(order)}
    calls = [call._replace(needs=tuple(place[i] for i in call.needs)) for _, call in order]
    return calls, [i for i, call in enumerate(calls) if call.seconds is not None], len(behind)


@pytest.mark.slow
def test_a_byte_is_worth_most_if_it_stays_on_the_device():
    """Fetching ahead of the passes and writing behind them gain less than keeping as many bytes on the device.

    Both need memory while the passes run. So a step has neither, and `device_bytes` is what memory is worth.
    """
    streamed = adamw()
    steps = record(streamed, PASSES, steps=4)
    array = steps[0][1].size
    today = simulated_seconds(streamed, PASSES, H100)
    for arrays, most in ((6, 0.02), (60, 0.06)):  # 6 arrays are in flight anyway: two chunks
        calls, passes, behind = overlapping(steps, arrays)
        ends = replay(calls, H100)
        early = ends[passes[-1]] - ends[passes[-2]]
        kept = simulated_seconds(adamw((arrays + behind) * array / STATE), PASSES, H100)
        assert kept < early < today < early / (1 - most)
