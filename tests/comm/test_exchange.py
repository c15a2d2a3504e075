"""Messages between processes, with a service that answers at once: nobody waits, and no process is started."""

import json
import time

import jax
import pytest

from zerojax.comm import processes
from zerojax.comm.processes import EVENTS, Events, Processes


class Service:
    """A coordination service in which the other process has said everything that it will say."""

    def __init__(self, theirs):
        self.theirs, self.said = theirs, {}

    def key_value_set(self, key, text):
        self.said[key] = text

    def key_value_dir_get(self, folder):
        found = [(key, text) for key, text in self.said.items() if key.startswith(folder)]
        return found + [(f"{folder}1", json.dumps(text)) for text in self.theirs]

    def blocking_key_value_get(self, key, milliseconds):
        assert milliseconds >= 1
        time.sleep(milliseconds / 1000)
        raise jax.errors.JaxRuntimeError("nobody set the key")


@pytest.fixture
def two(monkeypatch):
    """Make this process the first of two, with a service in which the other has said something."""

    def make(*theirs):
        service = Service(theirs)
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(processes, "coordination_client", lambda: service)
        monkeypatch.setattr(processes, "LOOK_EVERY_S", 0.01)
        monkeypatch.setattr(EVENTS, "publish", lambda: None)
        monkeypatch.setattr(processes, "failures", dict)
        monkeypatch.setattr(EVENTS, "difference", lambda: None)
        monkeypatch.setattr(EVENTS, "begin", lambda topic: None)
        return service

    return make


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ([{}], None),
        ([{0: "create", 1: "step 0"}, {1: "step 0", 2: "step 1"}], None),  # a process may be ahead of the others
        ([{0: "create", 1: "save 0"}], "Call 1 of the run is save 0 on process 1, and step 0 on process 0"),
        ([{1: "save 0"}, {0: "restore"}], "Call 0 of the run is restore on process 2, and create on process 0"),
    ],
)
def test_the_first_call_that_differs_is_named(theirs, expected, monkeypatch):
    mine = Events()
    monkeypatch.setattr(mine, "_named_calls", lambda: [(0, "create"), (1, "step 0")])
    states = {i: {"calls": calls.items()} for i, calls in enumerate(theirs, 1)}
    monkeypatch.setattr(processes, "_of_others", lambda folder: states)
    found = mine.difference()
    assert found == "" if expected is None else expected in found


def test_a_process_alone_waits_for_nobody():
    assert Processes("alone").exchange("begin", "hello") == ["hello"]
    assert Processes("alone").is_first


def test_messages_come_in_the_order_of_the_processes(two):
    service = two(["begin", "theirs"])
    both = Processes("order", 5)
    assert (both.index, both.count, both.timeout, both.is_first) == (0, 2, 5, True)
    assert both.exchange("begin", "mine") == ["mine", "theirs"]
    assert both.exchange("begin", "again") == ["again", "theirs"]
    assert [json.loads(text)[1] for text in service.said.values()] == ["mine", "again"]
    assert len(service.said) == 2, "a key is used once"
    assert Processes("order").timeout == processes.TIMEOUT_S
    assert Processes("order")._key != Processes("order")._key


def test_one_that_says_nothing_is_named(two, monkeypatch):
    two()
    with pytest.raises(TimeoutError, match=r"Process 1 of 2 did not answer within 0.01 s: .* did not begin as"):
        Processes("silent", 0.01).exchange("begin", "mine")
    monkeypatch.setattr(processes, "failures", lambda: {0: {"text": "not it"}, 1: {"text": "ValueError: its own"}})
    with pytest.raises(TimeoutError, match=r"Process 1 of 2 ended before it did begin: ValueError: its own"):
        Processes("ended", 60).exchange("begin", "mine")
    monkeypatch.setattr(processes, "failures", lambda: {0: {"text": "not it"}})
    monkeypatch.setattr(EVENTS, "difference", lambda: "they differ")
    with pytest.raises(ValueError, match="they differ"):
        Processes("differ", 60).exchange("begin", "mine")


def test_an_error_of_the_service_is_raised(two, monkeypatch):
    service = two()

    def failed(key, milliseconds):
        raise jax.errors.JaxRuntimeError("the leader is gone")

    monkeypatch.setattr(service, "blocking_key_value_get", failed)
    with pytest.raises(jax.errors.JaxRuntimeError, match="the leader is gone"):
        Processes("failed", 60).exchange("begin", "mine")
