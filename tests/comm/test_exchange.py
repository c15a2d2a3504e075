"""Calls, messages and ends of several processes, with a clock and a service of the test: no process is started."""

import json
import re
import sys
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.comm import processes
from zerojax.comm.processes import AGAIN, NOTICE, STATE, Call, Events, Processes


class World:
    """The coordination service, the clock and the exit of this process, which is the first of `count`.

    `theirs` is what each other process answers to any message. `then` is called when time has passed.
    """

    def __init__(self):
        self.count, self.theirs, self.said, self.started = 2, (), {}, []
        self.now, self.then = time.monotonic(), lambda: None

    def key_value_set(self, key, text, *_):
        self.said[key] = text

    def key_value_dir_get(self, folder):
        answers = enumerate(() if folder[:-1] in (STATE, NOTICE) else self.theirs, 1)
        found = [(key, text) for key, text in self.said.items() if key.startswith(folder)]
        return found + [(f"{folder}{i}", json.dumps(text)) for i, text in answers]

    def blocking_key_value_get(self, key, milliseconds):
        assert milliseconds >= 1
        self.sleep(milliseconds / 1000)
        raise jax.errors.JaxRuntimeError("nobody set the key")

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.then()

    def calls(self, index, *names, beat=1):
        self.said[f"{STATE}/{index}"] = json.dumps({"beat": beat, "calls": [*enumerate(names)]})

    def notice(self, index, status, text="the end", leaves=False):
        self.said[f"{NOTICE}/{index}"] = json.dumps({"status": status, "text": text, "leaves": leaves})

    def ending(self, work, *args):
        """How `work` ends the process: the status, and the notice to the others. None if it does not."""
        self.said.pop(f"{NOTICE}/0", None)
        try:
            work(*args)
        except SystemExit as error:
            return error.code, json.loads(self.said[f"{NOTICE}/0"])["text"]


@pytest.fixture
def world(monkeypatch):
    found = World()
    monkeypatch.setattr(jax, "process_count", lambda: found.count)
    for name, fake in {"coordination_client": lambda: found, "time": found, "rank": lambda: (0, found.count)}.items():
        monkeypatch.setattr(processes, name, fake)
    monkeypatch.setattr(processes, "_exit", sys.exit)
    monkeypatch.setattr(processes.faulthandler, "dump_traceback", lambda file: None)
    monkeypatch.setattr(processes, "EVENTS", Events())
    thread = SimpleNamespace(start=lambda: found.started.append("thread"), join=lambda seconds: None)
    fakes = {"Thread": lambda **_: thread, "Event": threading.Event, "get_ident": threading.get_ident}
    monkeypatch.setattr(processes, "threading", SimpleNamespace(**fakes))
    monkeypatch.setattr(processes, "atexit", SimpleNamespace(register=lambda call: None))
    return found


def begun(*names):
    """This process's record, after calls with these names."""
    return (events := Events()), [events.begin(name, watched=True) for name in names]


RUNNING = SimpleNamespace(is_deleted=lambda: False, is_ready=lambda: False)


def test_calls_are_counted_if_all_processes_make_them(world, monkeypatch):
    events, (first,) = begun("create")
    of = lambda *indices: SimpleNamespace(devices=np.array([SimpleNamespace(process_index=i) for i in indices]))
    monkeypatch.setattr(processes, "is_of_all", processes.is_of_all.__wrapped__)  # not cached
    with pytest.raises(KeyError), events.calling("on some processes", of(1, 1)) as alone:
        raise KeyError
    with events.calling("step 0", of(0, 1, 1)) as step:
        assert not step.has_ended
        step.result = jnp.zeros(())
    numbers = [(call.number, call.failed, call.has_ended) for call in (first, alone, step)]
    assert numbers == [(0, False, False), (-1, True, True), (1, False, True)]
    step.result.delete()
    assert step.has_ended
    assert Call(0, "has a timeout", watched=False).has_ended
    assert not Call(0, "computes", result=RUNNING).has_ended
    events.publish()
    events._thread += 1
    assert events.begin("of another thread").number == -1
    events.publish()
    assert json.loads(world.said[f"{STATE}/0"]) == {"beat": 2, "calls": [[0, "create"], [1, "step 0"]]}
    world.count = 1
    assert not processes.is_of_all(of(0, 0))


@pytest.mark.parametrize("ends", [True, False])
def test_a_call_is_late_after_its_limit_without_time_in_which_the_machine_slept(world, ends, capsys):
    world.count, begin = 2 if ends else 3, world.now
    events, (first, call) = begun("step 0 with loss", "step 1 with loss")
    for each, seconds in ((first, None), (first, 50), (call, 3)):
        events.limit(each, seconds, ends=ends)
    behind = world.count - 1
    world.calls(1, "step 0 with loss", "step 1 with loss")
    world.calls(behind, "step 0 with loss")
    naps = iter([2, 100, *[0.5] * 20])  # 100 s count as one

    def wait(_):
        nap = next(naps, None)
        world.sleep(nap or 0)
        first.failed |= nap == 100  # it ends, and the time of the second begins
        return nap is None

    events._at_end = SimpleNamespace(wait=wait)
    late = f"step 1 did not end within {'timeout=' if ends else ''}3 s on process 0 of {world.count}."
    found = f"process {behind} was last seen in step 0 with loss: process 0 waits for it in a collective."
    assert world.ending(events._watch) == ((AGAIN, f"{late} {found}") if ends else None)
    said = capsys.readouterr().err
    assert late in said
    assert re.findall(r"process \d was last seen", said) == [f"process {behind} was last seen"] * (1 if ends else 2)
    assert ("within 6 s" in said) != ends
    assert said.count("did not end") == (1 if ends else 2)
    assert world.now - begin == (102 + 2.5 + 3 if ends else 112)  # the service ends with process 0, which waits 3 s
    assert json.loads(world.said[f"{STATE}/0"])["beat"] == (2 if ends else 7)  # not more often than once a second
    assert world.started == ["thread"]


def test_a_process_whose_call_hangs_ends_if_another_failed_or_differs(world, capsys):
    events, (call,) = begun("step 0")
    heed = lambda: world.ending(events._heed, processes.failures())
    world.calls(1, "save 0")
    world.now += 4.9
    world.notice(1, 0)
    assert heed() is None
    world.now += 0.2
    differ = "Call 0 of the run is save 0 on process 1, and step 0 on process 0"
    assert heed() == (1, processes.NOT_SAME.format(differ))
    world.calls(1, "step 0")
    assert heed() is None
    world.notice(1, 7, "KeyError: 'x'")
    assert heed() == (7, "process 0 cannot end step 0: process 1 ended after: KeyError: 'x'")
    world.notice(1, 7, "process 2 died")
    assert heed() == (7, "process 0 cannot end step 0: process 2 died")
    call.failed = True
    assert heed() is None
    assert capsys.readouterr().err.count("process 1 of 2 ended after: KeyError: 'x'") == 1


def test_a_process_ends_together_with_the_others(world, monkeypatch, capsys):
    events, _ = begun("step 0")
    end = lambda: world.ending(events._at_exit)
    world.then = lambda: world.notice(1, 0)
    assert end() is None
    assert json.loads(world.said[f"{STATE}/0"])["calls"][-1] == [1, processes.THE_END]
    assert json.loads(world.said[f"{NOTICE}/0"]) == {"status": 0, "text": processes.THE_END, "leaves": False}
    world.notice(1, 3, "KeyError: 'x'")
    assert end() == (3, "process 0 came to its end, but process 1: KeyError: 'x'")
    world.said.clear()
    world.then, before = lambda: None, world.now
    assert end() is None  # the other says nothing, and JAX's own shutdown waits for it
    assert world.now - before == pytest.approx(60, abs=0.2)

    monkeypatch.setattr(sys, "last_value", ValueError("of\nmine"), raising=False)
    world.then = lambda: world.notice(1, 1)
    assert end() is None
    assert json.loads(world.said[f"{NOTICE}/0"]) == {"status": 1, "text": "ValueError: of mine", "leaves": False}
    world.notice(1, 1, leaves=True)  # it ended at once, so JAX's shutdown would wait for it
    assert end() == (1, "ValueError: of mine")
    world.said.clear()
    world.calls(1, "step 0")
    world.then = lambda: world.calls(1, "step 0", beat=2)
    assert end() == (1, "ValueError: of mine")
    world.then, before = lambda: None, world.now
    assert end() == (AGAIN, "ValueError: of mine")
    assert world.now - before == pytest.approx(10 + 3, abs=0.3)
    assert "process 1 of 2 died or hangs: process 0 ends, to be started again." in capsys.readouterr().err
    world.calls(1, "save 0")
    assert end()[0] == 1
    monkeypatch.setattr(world, "key_value_set", None)
    with pytest.raises(SystemExit, match=str(AGAIN)):
        events._at_exit()
    assert "JAX's coordination service, of process 0, does not answer: TypeError" in capsys.readouterr().err


@pytest.mark.parametrize(("count", "seconds"), [(2, 1), (128, 2)])
def test_many_processes_publish_less_often(world, count, seconds):
    world.count = count
    assert processes.period() == seconds


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ([{}], None),
        ([{0: "create", 1: "step 0"}, {1: "step 0", 2: "step 1"}], None),  # a process may be ahead of the others
        ([{0: "create", 1: "save 0"}], "Call 1 of the run is save 0 on process 1, and step 0 on process 0"),
        ([{1: "save 0"}, {0: "restore"}], "Call 0 of the run is restore on process 2, and create on process 0"),
    ],
)
def test_the_first_call_that_differs_is_named(theirs, expected, world):
    mine, _ = begun("create", "step 0")
    for i, calls in enumerate(theirs, 1):
        world.said[f"{STATE}/{i}"] = json.dumps({"calls": [*calls.items()]})
    found = mine.difference()
    assert found == "" if expected is None else expected in found


def test_a_process_alone_waits_for_nobody():
    assert Processes("alone").exchange("begin", "hello") == ["hello"]
    assert Processes("alone").is_first


def test_messages_come_in_the_order_of_the_processes(world):
    world.theirs = [("begin", "theirs")]
    both = Processes("order", 5)
    assert (both.index, both.count, both.timeout, both.is_first) == (0, 2, 5, True)
    assert both.exchange("begin", "mine") == ["mine", "theirs"]
    assert both.exchange("begin", "again") == ["again", "theirs"]
    assert [json.loads(text)[1] for text in world.said.values()] == ["mine", "again"]
    assert len(world.said) == 2, "a key is used once"
    assert Processes("order").timeout == processes.TIMEOUT_S
    assert Processes("order")._key != Processes("order")._key


def test_one_that_says_nothing_is_named(world):
    ask = lambda name, seconds: Processes(name, seconds).exchange("begin", "mine")
    with pytest.raises(TimeoutError, match=r"Process 1 of 2 did not answer within 3 s: .* did not begin as"):
        ask("silent", 3)
    world.calls(1, "save 0")
    processes.EVENTS.begin("step 0")
    with pytest.raises(ValueError, match="Call 0 of the run is save 0 on process 1, and step 0 on process 0"):
        ask("differ", 60)
    world.notice(1, 1, "ValueError: its own")
    with pytest.raises(TimeoutError, match=r"Process 1 of 2 ended before it did begin: ValueError: its own"):
        ask("ended", 60)
    world.sleep = lambda seconds: None
    with pytest.raises(jax.errors.JaxRuntimeError, match="nobody set the key"):  # at once: the service failed
        ask("failed", 60)
