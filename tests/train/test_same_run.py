"""Processes that differ are all told in which way, before one of them trains on."""

import json
import re

import pytest
import several

LAST = r"On process LAST, unlike 0: "
PROGRAM = r"ValueError: The processes do not {} alike: the programs of process LAST differ from that of process 0\. "
VALUES = r"ValueError: The processes do not {} alike\. On process LAST, unlike 0: the checksum of {} is "
STEP = r"ValueError: The processes do not step with {} alike\. " + LAST
BEGIN = r"ValueError: The processes do not begin alike\. " + LAST
# What both processes are told, by case.
SAID = {
    "nothing": "$",
    "learning_rate": PROGRAM.format("step with loss"),
    "learning_rate_in_the_state": VALUES.format("create a state", r"opt_state.hyperparams\['learning_rate'\]"),
    "factor_in_the_loss": PROGRAM.format("step with <lambda>"),
    "function_in_the_loss": PROGRAM.format("step with <lambda>"),
    "static_flag": STEP.format("<lambda>") + r"constant arguments is \[True\], not \[False\]",
    "key_of_dropout": STEP.format("<lambda>") + r"the checksum of args\[0\] is ",
    "initial_key": VALUES.format("initialise parameters", r"args\[0\]"),
    "initial_values": VALUES.format("begin with values", r"params\['w'\]") + r"\w{8}, not \w{8}\. ",
    "shards_that_two_processes_hold": VALUES.format("begin with values", r"params\['w'\]"),
    "batch_statistics": VALUES.format("begin with values", r"mutable\['mean'\]"),
    "step_of_save": r"ValueError: The processes do not save alike\. " + LAST + "step is 6, not 5",
    "interval_of_saves": r"ValueError: The processes do not open .*alike\. " + LAST + "every is 11, not 10",
    "step_of_restore": r"ValueError: The processes do not restore alike\. " + LAST + "step is 2, not 1",
    "flag_of_xla": BEGIN + r"XLA_FLAGS is .*--xla_allow_excess_precision=false.*, not ",
    "option_of_jax": BEGIN + r"jax_default_matmul_precision is 'highest', not None",
    "version_of_optax": BEGIN + r"optax is \S+\.post1, not ",
    "evaluation": PROGRAM.format("evaluate <lambda>"),
    "gradient": PROGRAM.format("differentiate <lambda>"),
    "update": PROGRAM.format("update"),
    "loss_that_is_trained_first": r"ValueError: .* Process LAST is about to step with other, and process 0 is about "
    "to step with loss",
    "call_that_is_made": r"ValueError: .* Process LAST is about to open .*, and process 0 is about to begin",
}
FOUR = "nothing learning_rate initial_values step_of_save shards_that_two_processes_hold call_that_is_made".split()


def run(folder, processes, *cases, within=300):
    """Return the exit status, the standard output and the errors of each process."""
    children = several.start("differing_child.py", processes, folder, *cases, processes=processes)
    try:
        said = [one.communicate(timeout=within) for one in children]
    finally:
        for one in children:
            one.kill()
    return [(one.returncode, out, errors) for one, (out, errors) in zip(children, said, strict=True)]


def told(folder, processes, cases):
    """Return what each process said, by case."""
    found = []
    for status, out, errors in run(folder, processes, *cases):
        assert status == 0, errors
        found.append({line["case"]: line for line in map(json.loads, re.findall(r'^{"case.*', out, re.M))})
    return found


def require_named(process, case, processes):
    expected = SAID[case].replace("LAST", str(processes - 1))
    assert re.match(expected, process[case]["said"], re.S), f"{case}: {process[case]['said']}"


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "cases"), [(2, [*SAID]), (4, FOUR)])
def test_all_are_told_what_differs(processes, cases, tmp_path):
    for process in told(tmp_path, processes, cases):
        for case in cases:
            require_named(process, case, processes)


# What one of the processes says that end, by case.
ENDS = {
    "one_step_more": "the end of the program on process 0, and step 3 with loss on process 1",
    "a_save_on_one_process": "save on process 0, and step 1 with loss on process 1",
    "an_error_in_the_data": "KeyError: 'no such file'",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ENDS)
def test_processes_that_cannot_go_on_say_why_and_end(case, tmp_path):
    found = run(tmp_path, 2, f"ending:{case}", within=90)  # JAX's own limits are 100 and 300 s
    one, other = (
        re.fullmatch(r"(.*) on process 0, and (.*) on process 1", ENDS[case]).groups()
        if " on " in ENDS[case]
        else ("", "")
    )
    either = {ENDS[case], f"{other} on process 1, and {one} on process 0"}
    for status, _, errors in found:
        assert status not in (0, None), errors
        assert any(text in errors for text in either), errors
