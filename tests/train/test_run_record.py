"""What processes compare: options, flags and versions as text, checksums of arrays, and the calls that are new."""

import contextlib
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from conftest import mesh_of
from hypothesis import given
from hypothesis import strategies as st

from zerojax import Offload, Tuning, zero_shard
from zerojax.comm.processes import EVENTS, Call, Processes
from zerojax.train import same_run
from zerojax.train.arguments import packed
from zerojax.train.same_run import (
    SameCalls,
    checksum_of_array,
    checksums,
    comparable,
    environment,
    first_difference,
    require_same,
    require_same_run,
    run_record,
    signature_of,
)

PARAMS = {"w": jnp.ones((16, 8)), "b": jnp.ones(3)}
RECORDS = st.lists(st.dictionaries(st.sampled_from("abc"), st.sampled_from("xy"), max_size=3), min_size=1, max_size=4)


@pytest.fixture
def two(monkeypatch):
    """Make this process the first of two. The other one says what `answer` makes of the text of this one."""

    def make(answer):
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(same_run, "is_of_all", lambda mesh: True)
        monkeypatch.setattr(EVENTS, "begin", lambda topic: None)
        monkeypatch.setattr(Processes, "exchange", lambda self, topic, text: [text, answer(text)])

    return make


def test_flags_are_compared_in_any_order_and_those_of_one_host_are_not(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_b=2 --xla_a=1 --xla_dump_to=x --xla_force_host_platform_device_count=8")
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    found = environment()
    assert found["XLA_FLAGS"] == "--xla_a=1 --xla_b=2"
    assert found["LIBTPU_INIT_ARGS"] == "empty"
    assert (found["jax_enable_x64"], found["jax_default_matmul_precision"]) == ("False", "None")
    assert (found["numpy"], found["optax"]) == (np.__version__, optax.__version__)
    assert {"jaxlib", "zerojax"} <= set(found)
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    assert environment()["XLA_FLAGS"] == "empty"


def test_a_record_of_a_run_names_options_and_leaves():
    options = {"stage": 3, "mesh": mesh_of(8), "tuning": Tuning(persist_below=10)}
    tx = zero_shard(optax.adam(1e-2), trainable=lambda path, leaf: True, **options)
    record = run_record(tx.config, tx.create(jax.eval_shape(lambda: PARAMS)).plan)
    assert record["stage"] == "3"
    assert record["user_mesh"] == "{'data': 8}"
    assert (record["trainable"], record["overwrite"], record["offload"]) == ("True", "False", "None")
    assert record["params['w']"] == "float32[16, 8], sharded"
    assert record["params['b']"] == "float32[3], replicated"
    assert record["opt_state[0].mu['b']"] == "float32[3], flat"
    assert record["jax"] == jax.__version__
    offload = Offload(optimizer="host", where=lambda path, leaf: True)
    offloading = zero_shard(optax.adam(1e-2), offload=offload, **options)
    record = run_record(offloading.config, offloading.create(jax.eval_shape(lambda: PARAMS)).plan)
    assert record["offload"].startswith("{'optimizer': 'host', 'params': None, 'update': 'device', 'fraction': 1.0")
    assert record["trainable"] == "False"


def test_options_in_words_are_the_same_on_every_process():
    assert comparable((1, [print, "a"])) == [1, ["a function", "a"]]
    assert comparable(Offload(optimizer="host", where=print))["where"] == "a function"


def test_a_call_is_new_once_for_each_signature():
    calls = SameCalls(zero_shard(optax.sgd(1.0), stage=1, mesh=mesh_of(8)).config, "step")
    assert not calls.is_needed
    x = np.ones((8, 2), np.float32)
    news = [
        (0, x, ()),
        (0, x[:4], ()),
        (0, x.astype(np.int32), ()),
        (0, {"x": x}, ()),
        (0, x, (1,)),
        (0, x, (1.0,)),
        (0, x, (jnp.float32(1),)),
        (1, x, ()),
    ]
    assert [calls.is_new(*call) for call in news] == [True] * len(news)
    assert [calls.is_new(*call) for call in news] == [False] * len(news)
    assert calls.is_new(0, x, (jnp.asarray(1.0),)), "a weak type is another type"
    assert calls.call(jax.jit(lambda a, b: a + b), 1, b=2, is_new=True) == 3
    assert signature_of({"x": x}) == signature_of({"x": x + 1}) != signature_of({"x": x[:4]})
    assert signature_of({"x": x}) != signature_of({"y": x})
    assert signature_of([x]) != signature_of([x.astype(np.int32)])


DTYPES = "bool int4 int8 uint16 int32 float8_e5m2 bfloat16 float16 float32 complex64".split()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checksum_depends_on_each_element_and_its_place(dtype):
    x = np.arange(24).reshape(4, 6).astype(getattr(ml_dtypes, dtype, dtype))
    other = x.copy()
    other[3, 5] = 0
    found = {int(checksum_of_array(jnp.asarray(y))) for y in (x, other, x[::-1].copy())}
    assert len(found) == 3
    assert int(checksum_of_array(jnp.asarray(x))) == int(checksum_of_array(jnp.asarray(x.copy())))


def test_each_bit_counts():
    bits = 1 << np.arange(32, dtype=np.uint32)
    assert len({int(checksum_of_array(jnp.asarray(bit)[None])) for bit in (*bits, np.uint32(0))}) == 33


def test_keys_and_numbers_have_checksums_and_words_have_none():
    found = checksums({"args": {"key": jax.random.key(0), "rate": 0.5, "name": "word"}})
    assert sorted(found) == ["the checksum of args['key']", "the checksum of args['rate']"]


def test_a_new_call_is_compared(two, monkeypatch):
    calls, said = SameCalls(zero_shard(optax.sgd(1.0), stage=1, mesh=mesh_of(8)).config, "step", {"a": 1}), []
    two(lambda text: said.append(text) or text)
    args = packed((True, jnp.ones(3)))
    assert calls.is_new(None, {"x": np.ones((8, 2), np.float32)}, args, jnp.int32(5))
    assert not calls.is_new(None, {"x": np.ones((8, 2), np.float32)}, args, jnp.int32(6))
    call, values = map(json.loads, said)
    assert call == {
        "options": "{'a': 1}",
        "step": "5",
        "['batch']['x']": "float32[8, 2]",
        "['args'][1]": "float32[3]",
        "constant arguments": "[True]",
    }
    assert [*values] == ["the checksum of args[1]"]
    program, called = jax.jit(lambda x: x + 1), []
    monkeypatch.setattr(EVENTS, "calling", lambda *args: called.append(args) or contextlib.nullcontext(Call(0, "step")))
    assert calls.call(program, 1, is_new=False) == jax.jit(lambda: calls.call(program, 1, is_new=False))() == 2
    assert len(called) == 1, "a call in another program is not announced"
    two(lambda text: "another program")
    with pytest.raises(ValueError, match=r"the programs of process 1 differ from that of process 0"):
        calls.call(program, 1, is_new=True)


def test_a_run_that_another_process_begins_otherwise_is_refused(two):
    tx = zero_shard(optax.sgd(1.0), stage=1, mesh=mesh_of(8))
    plan = tx.create(PARAMS).plan
    two(lambda text: text)
    require_same_run(tx.config, plan)
    two(lambda text: text.replace("[16, 8]", "[16, 9]"))
    with pytest.raises(ValueError, match=r"params\['w'\] is float32\[16, 9\], .*, not float32\[16, 8\]"):
        require_same_run(tx.config, plan)


def test_what_differs_is_named_three_at_most(two):
    mine = dict.fromkeys("abcde", "1")
    require_same("begin", mine)  # alone
    two(lambda text: json.dumps({**mine, "a": "2"}))
    with pytest.raises(ValueError, match=r"do not begin alike\. On process 1, unlike 0: a is 2, not 1\. Give"):
        require_same("begin", mine)
    two(lambda text: json.dumps({"a": "1"}))
    with pytest.raises(ValueError, match=r"b is missing, not 1; c is missing.*; d is missing, not 1; and 1 more\."):
        require_same("begin", mine)
    require_same("begin", mine, partial=True)
    two(lambda text: json.dumps(mine))
    require_same("begin", mine)


@given(RECORDS, st.booleans())
def test_a_difference_is_one_and_none_is_missed(records, partial):
    found = first_difference(records, partial=partial)
    names = {name for record in records for name in record}
    said = lambda name: {record.get(name) for record in records} - ({None} if partial else set())
    assert (found is None) == all(len(said(name)) <= 1 for name in names)
    if found:
        index, reference, differ = found
        assert reference < index
        assert differ
        for name in differ:
            assert records[reference].get(name) != records[index].get(name)
            assert not partial or (name in records[reference] and name in records[index])
