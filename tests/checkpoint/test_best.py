"""The best checkpoint by its metrics: kept beside the newest, found again after a restart."""

import contextlib
import errno
import json
import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of

from zerojax import zero_shard
from zerojax.checkpoint import Checkpointer, CheckpointError, best, manifest
from zerojax.checkpoint.directory import MANIFEST, step_name

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
            metrics = None if loss is None else {"loss": jnp.float32(loss), "n": i}
            with contextlib.nullcontext() if metrics else pytest.warns(UserWarning, match="without metrics= is never"):
                checkpoints.save(state, step=i, metrics=metrics)
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
            ({"loss": 1j}, r"metrics\['loss'\] is 1j"),
        ):
            with pytest.raises(TypeError, match=named):
                checkpoints.save(state, metrics=metrics)
        with pytest.raises(KeyError, match="loss"):
            checkpoints.save(state, metrics={"accuracy": 1.0})
        assert checkpoints.steps() == []
        checkpoints.save(state, metrics={"loss": 1.0})
    other = Checkpointer(tmp_path, read_only=True, best_fn=lambda metrics: metrics["accuracy"])
    with pytest.raises(CheckpointError, match="reads the metric 'accuracy', and no step"):
        other.best()
    with pytest.raises(ValueError, match="best_fn, and there is none"):
        Checkpointer(tmp_path, read_only=True).best()


def test_the_metrics_of_the_call_are_saved(state, tmp_path):
    """The loop may change the dict and the arrays in it, and donate them."""
    with Checkpointer(tmp_path, **LOWEST) as checkpoints:
        metrics, host, device = {}, np.zeros(()), jnp.float32(2.0)
        for i, loss in enumerate((3.0, host, device)):
            metrics["loss"] = loss
            checkpoints.save(state, step=i, metrics=metrics)
            metrics.clear()
            host += 5.0
        device.delete()
        assert checkpoints.best() == 2
    host = json.loads((tmp_path / step_name(1) / MANIFEST).read_text())["metrics"]
    assert host == {"loss": 5.0}


def test_steps_without_a_score_do_not_stop_the_choice(state, tmp_path, monkeypatch):
    """Metrics have other names, or a function is not defined everywhere; manifests are read only to remove a step."""
    with Checkpointer(tmp_path, keep=1) as checkpoints:
        checkpoints.save(state, step=0, metrics={"other": 1.0})
    inverse = lambda metrics: 1 / (metrics["a"] - metrics["b"])
    with Checkpointer(tmp_path, keep=1, best_fn=inverse) as checkpoints:
        for i, a in enumerate((4.0, 2.0, 3.0, 5.0), 1):
            checkpoints.save(state, step=i, metrics={"a": a, "b": 1.0})
        assert (checkpoints.best(), checkpoints.steps()) == (2, [2, 4])
        checkpoints.save(state, step=5, metrics={"a": 1.0, "b": 1.0})
        with pytest.raises(CheckpointError, match=r"best_fn fails for the metrics of step 5: ZeroDivisionError"):
            checkpoints.best()
    monkeypatch.setattr(best, "read_manifest", None)
    with Checkpointer(tmp_path, keep=None, **LOWEST) as checkpoints:
        checkpoints.save(state, step=6, metrics={"loss": 1.0})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 4, 5, 6]


def test_a_step_whose_manifest_cannot_be_read_is_kept(state, tmp_path, monkeypatch, caplog):
    with Checkpointer(tmp_path, keep=1, **LOWEST) as checkpoints:
        for i in range(2):
            checkpoints.save(state, step=i, metrics={"loss": 2.0 * i})
        checkpoints.wait()
        with monkeypatch.context() as patch:
            patch.setattr(manifest, "plain_file", failing_for(step_name(0), manifest.plain_file))
            checkpoints.save(state, step=2, metrics={"loss": 1.0})
            checkpoints.wait()
        assert "The metrics of step 0" in caplog.text
        assert (checkpoints.best(), checkpoints.steps()) == (0, [0, 2])


def failing_for(name, read):
    def plain_file(directory, file):
        if directory.name == name:
            raise OSError(errno.EIO, "Input/output error")
        return read(directory, file)

    return plain_file
