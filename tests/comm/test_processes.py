"""Processes that do not do the same are told so, and do not wait for each other for ever."""

import json
import re

import pytest
import several

pytestmark = pytest.mark.slow
DIFFERS = r"ValueError: The processes do not {} alike\. On process 1, unlike 0: "
BEGIN, STEP = DIFFERS.format("begin"), DIFFERS.format("step with loss")
SAID = {
    "other_stage": rf"{BEGIN}stage is 1, not 3;",
    "other_width": rf"{BEGIN}params\['w'\] is float32\[4, 24\], sharded, not float32\[4, 16\], sharded",
    "other_rows": rf"{STEP}\['batch'\] is float32\[4, 4\], not float32\[8, 4\]\.",
    "other_options": rf"{STEP}options is StepOptions\(accumulate=2.* not StepOptions\(accumulate=1",
    "own_rows_as_if_all": r"ValueError: Process \d gave a batch of \[8, 4\] whose values .*shard_batches",
    "own_batches_as_if_all": r"ValueError: Process \d gave a batch of \[8, 4\] whose values .*shard_batches",
    "no_word_on_whose_rows": r'ValueError: There are 2 processes, .*rows="process" if each process reads its own',
    "another_step": rf"{STEP}step is 0, not 1",
    "positions": "$",  # nothing
    "memory": "$",
    "shared_rows": "ValueError: rows=.process.*along axis 'sequence' share rows and belong to several processes",
    "weights_of_zero": r"ValueError: The weights of a batch",
    "too_little_memory": r"MemoryError: (On process 0: )?The offloaded optimizer state needs \d+ B of host memory",
}


@pytest.fixture(scope="module")
def told():
    """What each process said, by case."""
    found = []
    for out in several.run("processes_child.py"):
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        found.append({line["case"]: line for line in lines})
    return found


def test_both_are_told_what_differs(told):
    for process in told:
        for case, said in SAID.items():
            assert re.match(said, process[case]["said"], re.S), (case, process[case]["said"])


def test_both_train_with_memory_as_without(told):
    assert len({process[f"loss {fitted}"]["said"] for process in told for fitted in (True, False)}) == 1


def test_one_that_waits_is_told_for_whom(told):
    waiting = told[0]["absent"]
    assert waiting["said"].startswith("TimeoutError: Process 1 of 2 did not answer within 2 s")
    assert waiting["seconds"] < 4
