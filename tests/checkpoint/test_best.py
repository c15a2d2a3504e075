"""The best checkpoint by its metrics: kept beside the newest, found again after a restart."""

import math

import jax.numpy as jnp
import optax
import pytest
from conftest import mesh_of

from zerojax import zero_shard
from zerojax.checkpoint import Checkpointer, CheckpointError

LOWEST = {"best_fn": lambda metrics: metrics["loss"], "best_mode": "min"}


@pytest.fixture(scope="module")
def state():
    return zero_shard(optax.sgd(0.1), stage=1, mesh=mesh_of(2)).create({"w": jnp.ones(4)})


@pytest.mark.parametrize(
    ("mode", "losses", "best", "kept"),
    [
        ("min", [5.0, 2.0, 2.0, 7.0, math.nan, None], 1, [1, 4, 5]),
        ("max", [5.0, 2.0, 7.0, math.inf, math.nan, 1.0], 3, [3, 4, 5]),
        ("min", [math.nan, None, math.nan], None, [1, 2]),
    ],
)
def test_the_best_and_the_newest_stay(state, tmp_path, mode, losses, best, kept):
    chosen = LOWEST | {"best_mode": mode}
    with Checkpointer(tmp_path, keep=2, **chosen) as checkpoints:
        for i, loss in enumerate(losses):
            checkpoints.save(state, step=i, metrics=None if loss is None else {"loss": jnp.float32(loss), "n": i})
        assert (checkpoints.best(), checkpoints.steps()) == (best, kept)
    reopened = Checkpointer(tmp_path, read_only=True, **chosen)
    assert (reopened.best(), reopened.verify()) == (best, kept)
    assert reopened.restore(state).step == kept[-1]


def test_after_going_back_the_best_is_of_the_steps_that_are_left(state, tmp_path):
    with Checkpointer(tmp_path, **LOWEST) as checkpoints:
        for i, loss in enumerate((3.0, 2.0, 1.0)):
            checkpoints.save(state, step=i, metrics={"loss": loss})
        assert checkpoints.best() == 2
        checkpoints.restore(state, step=0)
        checkpoints.save(state, step=1, metrics={"loss": 4.0})
        assert checkpoints.best() == 0


def test_metrics_that_cannot_be_compared_are_named(state, tmp_path):
    with Checkpointer(tmp_path, keep=1, **LOWEST) as checkpoints:
        for metrics, named in (
            (1.0, "metrics= is 1.0"),
            ({"loss": jnp.ones(3)}, r"metrics\['loss'\] is Array"),
            ({"loss": "low"}, r"metrics\['loss'\] is 'low'"),
        ):
            with pytest.raises(TypeError, match=named):
                checkpoints.save(state, metrics=metrics)
        with pytest.raises(KeyError, match="loss"):
            checkpoints.save(state, metrics={"accuracy": 1.0})
        assert checkpoints.steps() == []
        checkpoints.save(state, metrics={"loss": 1.0})
    other = Checkpointer(tmp_path, read_only=True, best_fn=lambda metrics: metrics["accuracy"])
    with pytest.raises(CheckpointError, match="KeyError: 'accuracy'"):
        other.best()
    with pytest.raises(ValueError, match="best_fn, and there is none"):
        Checkpointer(tmp_path, read_only=True).best()
