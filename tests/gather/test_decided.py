"""What `check`, `plan` and `report` say about the rules that took the equations on parameters."""

import json

import jax.numpy as jnp
import optax
import pytest
from conftest import mesh_of
from jax import lax

import zerojax
from zerojax import zero_shard
from zerojax.gpus.topology import installed

SIZE = 32
W = jnp.ones((SIZE, SIZE)) * 0.1
X = jnp.ones((8, SIZE))


def orthogonality(w):
    return jnp.sum((jnp.swapaxes(w, -1, -2) @ w - jnp.eye(SIZE)) ** 2)


def shared(params, x):
    """The layer's own block computes the penalty."""
    return jnp.sum(jnp.tanh(x @ params["w"])) + jnp.sum(params["w"] ** 2) + orthogonality(params["w"])


def before(params, x):
    """The penalty decides what the layer computes, so it cannot run after it."""
    return jnp.sum(jnp.tanh(x * orthogonality(params["w"]) @ params["w"]))


def together(params, x):
    return jnp.sum(x @ params["w"]) + jnp.sum(x @ params["v"]) + jnp.sum((params["w"] @ params["v"]) ** 2)


def looped(params, x):
    """The products of every layer with every other need the whole stack."""
    x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])
    return jnp.sum(x) + jnp.sum(jnp.einsum("lij,mkj->lmik", params["w"], params["w"]) ** 2)


def traced(loss, params, stage=3, **options):
    step = zero_shard(optax.sgd(0.1), stage=stage, mesh=mesh_of(8), persist_below=0, **options).train_step(loss)
    state = zero_shard(optax.sgd(0.1), stage=stage, mesh=mesh_of(8), persist_below=0, **options).create(params)
    step.lower(state, X)
    return step


@pytest.mark.parametrize(
    ("loss", "params"),
    [(shared, {"w": W}), (before, {"w": W}), (together, {"w": W, "v": W}), (looped, {"w": jnp.stack([W, W])})],
    ids=["shared", "before", "together", "looped"],
)
def test_a_separate_gather_is_named(loss, params):
    found = traced(loss, params).decided
    assert len(found.separate) == (loss is not shared)
    assert all("['w']" in leaf and "test_decided.py" in leaf for leaf in found.separate)


def test_the_lines_count_the_equations_of_each_rule():
    found = traced(shared, {"w": W}).decided
    rules, *others = found.in_words()
    assert rules == "rules              " + ", ".join(f"{name} {len(x)}" for name, x in found.rules.items())
    assert len(found.rules["reduction"]) >= 2  # the square and its sum
    assert others == []


def test_a_line_names_three_parameters():
    layers = {f"w{i}": W for i in range(5)}

    def loss(params, x):
        for w in params.values():
            x = jnp.tanh(x * orthogonality(w) @ w)
        return jnp.sum(x)

    line = traced(loss, layers).decided.in_words()[-1]
    assert line.startswith("separate gathers   5: ['w0']")
    assert line.endswith(", ...")


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_that_replicate_parameters_say_what_runs_on_shards(stage):
    found = traced(shared, {"w": W}, stage).decided
    assert list(found.rules) == ["reduction"]
    assert found.separate == ()


@pytest.mark.slow
def test_check_and_report_print_the_lines():
    tx = zero_shard(optax.sgd(0.1), stage=3, mesh=mesh_of(8), persist_below=0)
    lines = traced(before, {"w": W}).decided.in_words()
    assert len(lines) == 3
    step, state = tx.train_step(before), tx.create({"w": W})
    assert zerojax.report(state, step).engine == ""  # nothing is traced yet
    state, _ = step(state, X)
    report = zerojax.report(state, step)
    assert all(f"\n{line}\n" in str(report) for line in lines)
    assert all(f"\n  {line}\n" in str(zerojax.check(step, state, X)) for line in lines)


@pytest.mark.slow
@pytest.mark.skipif(not installed(), reason="needs the extra aot")
def test_a_plan_prints_the_lines_and_leaves_the_step_as_it_was():
    step = traced(before, {"w": W}, 3)
    state = zero_shard(optax.sgd(0.1), stage=3, mesh=mesh_of(8), persist_below=0).create({"w": W})
    decided = step.decided
    plan = zerojax.plan(step, state, X, topology="h100:8")
    assert plan.decided == decided
    assert decided.shared == (2,)  # both blocks read one parameter
    assert step.decided is decided
    assert all(line in str(plan).splitlines() for line in decided.in_words())
    assert json.loads(json.dumps(plan.to_dict()))["decided"]["separate"]
