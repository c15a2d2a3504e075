"""A step that takes longer than it may ends its process, which says what it waits for."""

import dataclasses
import os
import re
import signal
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import several
from test_same_run import begin, loss

from zerojax.comm.processes import AGAIN, EVENTS
from zerojax.train import attachments
from zerojax.train.attachments import limit_of

ROWS = np.ones((8, 4), np.float32)


def calling(function):
    """A loss that calls `function` with the number of the step on the host."""

    def calls(params, batch):
        jax.debug.callback(function, batch[0, 0])
        return loss(params, batch)

    return calls


def take_steps(loss, **options):
    step, state = begin(loss=loss, **options)
    for number in range(5):
        state, _ = step(state, number * ROWS)
    jax.block_until_ready(state)


def hang():
    take_steps(calling(lambda x: time.sleep(60 * (x > 1))), timeout=4)  # a step takes a second on a busy machine


def compile_for_a_flag():
    def flagged(params, batch, flag):
        time.sleep(3)  # while it is traced
        return loss(params, batch) * (2 if flag else 1)

    step, state = begin(loss=flagged, timeout=2)
    for flag in (False, False, True, True):
        state, _ = step(state, ROWS, flag)
        jax.block_until_ready(state)


def ended(work):
    """The exit status and the errors of a process that does the work."""
    (child,) = several.start(work, processes=1)
    _, errors = child.communicate(timeout=60)
    return child.returncode, errors


def test_a_step_that_hangs_ends_the_process():
    status, errors = ended(hang)
    assert status == AGAIN, errors
    assert "zerojax: step 2 did not end within timeout=4 s on process 0 of 1." in errors
    assert re.search(r'test_watchdog.py", line \d+ in <lambda>', errors)  # the stacks of all threads


@pytest.mark.slow
def test_a_step_that_is_traced_again_is_left_alone():
    status, errors = ended(compile_for_a_flag)
    assert status == 0, errors


def train_with_a_limit(killed=""):
    """Process 1 hangs in its data, or is killed."""
    step, state = begin(timeout=4)
    for number in range(10):
        if number == 3 and jax.process_index() == 1:
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)
            print("hangs", flush=True)
            time.sleep(600)
        state, metrics = step(state, ROWS)
        jax.block_until_ready(metrics["loss"])
        print(f"done {number}", flush=True)


@pytest.mark.slow
def test_one_whose_peer_is_killed_leaves_to_be_started_again():
    children = several.start(train_with_a_limit, "killed")
    _, errors = children[0].communicate(timeout=80)  # JAX's shutdown takes 100 s to give up
    assert children[1].wait(10) == -signal.SIGKILL
    assert children[0].returncode == AGAIN, errors
    assert "process 1 of 2 died or hangs: process 0 ends, to be started again" in errors


def test_a_limit_is_set_where_processes_would_wait_for_each_other(monkeypatch):
    mesh = jax.make_mesh((8,), ("data",))
    assert limit_of(None, mesh) is None
    assert limit_of(5, mesh) == 5
    monkeypatch.setattr(attachments, "is_of_all", lambda mesh: True)
    assert limit_of(None, mesh) == attachments.DEFAULT_S >= 600
    assert limit_of(float("inf"), mesh) is None


def test_only_a_call_of_a_program_that_is_compiled_is_limited_from_its_start(monkeypatch):
    events, placed = [], lambda: events.append("place")
    monkeypatch.setattr(EVENTS, "limit", lambda event, limit, ends: events.append((limit, ends)))
    monkeypatch.setattr(attachments, "require_same_programs", lambda config, what, lower: lower[0]())
    traced = types.SimpleNamespace(trace=lambda state, rows, args: jax.jit(jnp.sin).trace(1.0))
    for on_disk, first in ((False, ["place"]), (True, [])):
        step, state = begin(timeout=5)
        config = types.SimpleNamespace(params_on_disk=on_disk, mesh=step.config.mesh)
        guard = attachments.Guard(dataclasses.replace(step.program, config=config), traced)
        for expected in ([*first, "run", (5, True)], [(5, True), "run"]):
            with guard.around(0, state, ROWS, placed, ()):
                events.append("run")
            assert events == expected
            events.clear()
    assert isinstance(begin(timeout=5)[0]._guard, attachments.Guard)
    assert begin()[0]._guard is None


@pytest.mark.slow
def test_it_names_the_process_it_waits_for_and_the_others_end_too():
    children = several.start(train_with_a_limit)
    begun = time.monotonic()
    out, errors = children[0].communicate(timeout=120)
    assert children[0].returncode == AGAIN, errors
    assert "step 3 did not end within timeout=4 s on process 0 of 2" in errors
    assert "process 1 was last seen in step 2 with loss: process 0 waits for it in a collective" in errors
    assert out.splitlines()[-1] == "done 2"
    _, errors = children[1].communicate(timeout=120)  # ended by jax, whose coordination service is gone
    assert children[1].returncode not in (0, None), errors
    said = "zerojax: process 0 of 2 ended, and JAX's coordination service with it, after: step 3 did not end within"
    assert said in errors
    assert time.monotonic() - begun < 120
