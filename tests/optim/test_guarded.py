"""An analysis of an update passes by what a transformation refuses, and raises its own errors.

The description of a transformation has its constants; tests of checkpoints compare descriptions.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flat_options import tuned
from matrix_optimizers import muon

from zerojax import Offload, jaxprs, zero_shard
from zerojax.config import DataMesh, LayoutPolicy
from zerojax.layout.tree import lay_out
from zerojax.optim import elementwise, traced
from zerojax.optim.description import describe_constant, description_of

MUON = {"matrix_updates": "owner"}


def broken(*_args, **_keywords):
    raise KeyError("a bug of ours")


def second_call_broken(fn):
    calls = iter([fn, broken])
    return lambda *args, **keywords: next(calls)(*args, **keywords)


# analysis: what is broken, how, the transformation and its options
BUGS = {
    "elementwise leaves": (elementwise, "interpret", lambda _: broken, optax.adam, {}),
    "chunks": (elementwise, "walk", lambda _: broken, optax.adam, {"offload": Offload(optimizer="host")}),
    "owners": (jaxprs, "inline_calls", lambda _: broken, muon, MUON),
    "one matrix of a stack": (traced, "trace_inlined", second_call_broken, muon, MUON),
}


def params():
    return {"w": jnp.ones((16, 24)), "stack": jnp.ones((4, 16, 24)), "b": jnp.ones(8)}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_in_an_analysis_is_raised(monkeypatch, mesh, name):
    module, attribute, how, optimizer, options = BUGS[name]
    tx = zero_shard(optimizer(1e-3), stage=3, mesh=mesh, **tuned(persist_below=50, **options))
    monkeypatch.setattr(module, attribute, how(getattr(module, attribute)))
    with pytest.raises(KeyError, match="a bug of ours"):
        tx.create(params())


def test_a_bug_in_the_update_by_owners_is_raised(monkeypatch, mesh):
    tx = zero_shard(muon(1e-3), stage=3, mesh=mesh, **tuned(persist_below=50, **MUON))
    state = tx.create(params())
    monkeypatch.setattr(jaxprs, "inline_calls", broken)
    with pytest.raises(KeyError, match="a bug of ours"):
        tx.update(state.params, state.opt_state, state.params)


def needs_more(optimizer):
    """The optimizer, whose update raises an error of a type that no analysis expects."""

    def update(updates, state, params=None, *, temperature=None, **extra):
        if temperature is None:
            raise ZeroDivisionError("give a temperature")
        return optimizer.update(jax.tree.map(lambda x: x * temperature, updates), state, params)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


@pytest.mark.parametrize("options", [{}, MUON], ids=["", "owner"])
def test_what_a_transformation_refuses_is_no_error_until_it_runs(mesh, options):
    tx = zero_shard(needs_more(optax.adam(1e-3)), stage=3, mesh=mesh, **tuned(persist_below=50, **options))
    state = tx.create(params())
    assert "give a temperature" not in str(state.plan)
    assert description_of(state.plan.tx, state.plan.trained).operations == ()
    with pytest.raises(ZeroDivisionError, match="give a temperature"):
        tx.update(state.params, state.opt_state, state.params)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1, "0.1"),
        (np.float32(0.1), "0.1"),
        (jnp.full((1, 1), 2.0), "2"),
        (3, "3"),
        (True, "True"),
        (1j, "0+1j"),
    ],
)
def test_a_constant_is_a_number_or_a_digest(value, text):
    assert describe_constant(value) == text
    ones = describe_constant(np.ones(2, np.float32))
    assert ones.startswith("float32[2] ")
    assert ones == describe_constant(jnp.ones(2)) != describe_constant(np.array([1, 2], np.float32))


def test_a_key_is_described_by_its_data():
    assert (
        describe_constant(jax.random.key(1))
        == describe_constant(jax.random.key_data(jax.random.key(1)))
        != describe_constant(jax.random.key(2))
    )


def described(tx):
    shapes = {"w": jax.ShapeDtypeStruct((4, 3), jnp.float32), "b": jax.ShapeDtypeStruct((3,), jnp.float32)}
    return description_of(tx, lay_out(shapes, LayoutPolicy(0, DataMesh.for_stage({"data": 1}, ("data",), 0), 0)))


def test_constants_are_among_the_operations():
    assert "mul 0.8" in described(optax.adam(1e-3, b1=0.8)).operations
    offset = np.array([1.0, 2.0, 3.0], np.float32)
    closed = optax.stateless(lambda grads, params: jax.tree.map(lambda g: g + offset, grads))
    assert any(name.startswith("constant float32[3] ") for name in described(closed).operations)


def test_a_state_is_described_by_its_nested_types():
    assert described(optax.adam(1e-3)).structure == "(ScaleByAdamState(*, params, params), EmptyState())"
    init = lambda params: {"b": None, "a": [params, jnp.zeros(3)]}
    nested = optax.GradientTransformation(init, lambda grads, state, params=None: (grads, state))
    assert described(nested).structure == "dict('a': list(params, *), 'b': NoneType())"
