"""The contract checker: no findings where the contract is kept; else it names leaf and line."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest
import yardstick

import zerojax.planning.check as check_module
from zerojax import check, zero_shard
from zerojax.gpus import topology

OLD = jax.__version_info__ < (0, 11)


def tiny(scan=True):
    init, loss, (rows, length) = yardstick.build("tiny", scan=scan, width=128, tokens=32, head=32)
    return loss, jax.eval_shape(init, jax.random.key(0)), jax.ShapeDtypeStruct((8 * rows, length), jnp.int32)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_model_that_keeps_its_contract_has_no_findings(stage, mesh):
    found = check(zero_shard(optax.adam(1e-3), stage=stage, mesh=mesh), *tiny())
    assert found.ok, found
    assert found.gathered == pytest.approx(found.gathered_formula, rel=0.02)
    assert "no findings" in str(found)


@pytest.mark.skipif(OLD, reason="on CPU, jax 0.10 merges the gathers of an unrolled model")
def test_a_parameter_used_in_many_places_is_named(mesh):
    params = {"wide": jax.ShapeDtypeStruct((256, 256), jnp.float32)}

    def loss(params, batch):
        for _ in range(6):
            batch = jnp.tanh(batch @ params["wide"])  # six blocks: gathered for each, forward and backward
        return batch.mean()

    batch = jax.ShapeDtypeStruct((8, 256), jnp.float32)
    found = check(zero_shard(optax.adam(1e-3), stage=3, mesh=mesh, prefetch=0), loss, params, batch)
    assert not found.ok
    text = str(found)
    assert "gathered beyond the contract" in text
    assert "['wide']" in text
    assert "test_check.py" in text


def test_an_unknown_topology_lists_those_known(mesh):
    with pytest.raises(ValueError, match=r"Unknown topology 'tpu:4'.*'h200:8'.*h100, h200"):
        check(zero_shard(optax.adam(1e-3), stage=3, mesh=mesh), *tiny(), topology="tpu:4")


@pytest.mark.parametrize("text", ["h200", "h200:0", "h200:8x", "h200:-1", ":8", "h200:8x0"])
def test_a_malformed_topology_is_refused(text):
    with pytest.raises(ValueError, match="Unknown topology"):
        topology.Topology.parse(text)


def test_hosts_come_before_devices():
    assert topology.Topology.parse("h100:4x8") == topology.Topology("h100", 4, 8)


def test_without_the_compiler_plugin_it_says_what_to_install(mesh, monkeypatch):
    monkeypatch.setattr(topology, "installed", lambda: False)
    with pytest.raises(ModuleNotFoundError, match=r"pip install \"zerojax\[aot\]\""):
        check(zero_shard(optax.adam(1e-3), stage=3, mesh=mesh), *tiny(), topology="h200:8")


def test_a_models_line_is_named_in_a_clone_that_is_called_as_the_library_is():
    """Of collectives that the engine did not label."""
    frames = (f"{check_module.__file__}:7", "/home/me/zerojax/examples/model.py:3")
    assert check_module._cause(SimpleNamespace(op_name="", frames=frames, name="all-reduce.1")) == frames[1]
