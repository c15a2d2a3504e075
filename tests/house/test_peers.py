"""The comparison with other frameworks: all get the same weights, tokens and optimizer, and nothing is timed else."""

import argparse
import functools
import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import peer_jax
import peer_model
import peers
import pytest
import yardstick
from conftest import fraction

SCRIPT = pathlib.Path(peers.__file__)
STEPS = 3


@functools.cache
def weights():
    """Of the small yardstick, no two elements alike, biases not zero."""
    init, _, _ = yardstick.build("tiny", scan=False)
    shapes = jax.tree_util.tree_leaves_with_path(jax.eval_shape(init, jax.random.key(0)))
    random = np.random.default_rng(0)
    draw = lambda shape: (0.1 * random.standard_normal(shape)).astype(np.float32)
    return {"/".join(key.key for key in path): draw(leaf.shape) for path, leaf in shapes}


def test_weights_return_from_torchs_names_as_they_were():
    named = peer_model.to_torch(weights())
    assert len(named) == len(weights())
    found = peer_model.from_torch(named, weights())
    assert found.keys() == weights().keys()
    for path, leaf in weights().items():
        np.testing.assert_array_equal(found[path], leaf)


def test_a_matrix_in_torchs_layout_makes_the_same_products():
    named, x = peer_model.to_torch(weights()), np.ones((3, 64), np.float32)
    heads = np.einsum("bw,whd->bhd", x, weights()["block_1/q/kernel"])
    np.testing.assert_allclose(x @ named["blocks.1.q.weight"].T, heads.reshape(3, -1), rtol=1e-5)  # another order
    out = np.einsum("bhd,hdw->bw", x.reshape(3, 4, 16), weights()["block_1/o/kernel"])
    np.testing.assert_allclose(x @ named["blocks.1.o.weight"].T, out, rtol=1e-4, atol=1e-6)


@functools.cache
def losses(way, style):
    trainer = peer_jax.Trainer(way, "tiny", weights(), scan=style == "scan")
    return [trainer.step(i) for i in range(STEPS)]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "style"), fraction(1, peers.JAX_WAYS, ("scan", "unrolled")))
def test_all_ways_of_jax_train_alike(way, style):
    first = losses("replicated", "scan")
    assert first[-1] < first[0]
    np.testing.assert_allclose(losses(way, style), first, rtol=peers.TOLERANCE)


class Fake:
    idle, waited, counts_anew = 0.0, 1.0, True

    def __init__(self, *losses):
        self.losses = losses

    def turn(self, steps):
        return 1.0, 1.0, [self.losses[i % len(self.losses)] for i in range(steps)]

    def memory(self, workers):
        return {"resident": 1.0}


ARGS = argparse.Namespace(parity=4, size="tiny", workers=2, ways=None)


@pytest.mark.parametrize("loss", [1 + 2 * peers.TOLERANCE, float("nan"), float("inf")])
def test_what_does_not_train_alike_is_not_timed(loss):
    same = {"zerojax": Fake(1.0), "replicated": Fake(1.0 + peers.TOLERANCE / 2)}
    assert max(peers.train_alike(same, {}, ARGS).values()) <= peers.TOLERANCE
    with pytest.raises(SystemExit, match=r"differ.*'fsdp2'.*Nothing was timed"):
        peers.train_alike(same | {"fsdp2": Fake(1.0, 1.0, loss)}, {}, ARGS)


def test_the_overhead_is_over_the_frameworks_own_replicated_step():
    ways = {name: Fake(1.0) for name in ("zerojax", "replicated", "ddp", "fsdp2")}
    seconds = {"zerojax": [2.2, 6.6], "replicated": [2.0, 6.0], "ddp": [1.0, 3.0], "fsdp2": [1.5, 4.5]}
    rows = peers.rows_of(ways, seconds, seconds, dict.fromkeys(ways, 0.0), ARGS)
    assert rows["zerojax"]["overhead"]["median"] == pytest.approx(1.1)  # of each round: their times differ threefold
    assert rows["fsdp2"]["overhead"]["median"] == pytest.approx(1.5)
    assert rows["fsdp2"]["to replicated"]["median"] == pytest.approx(0.75)
    assert "overhead" not in rows["replicated"]


def test_what_is_not_installed_is_left_out_by_name_and_refused_where_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    left_out = {}
    assert not peers.started(["fsdp2", "deepspeed"], "unrolled", ARGS, tmp_path, left_out)
    assert "deepspeed is not installed (the extra `peers`)" in left_out["deepspeed"]
    assert "torch is not installed" in left_out["fsdp2"]
    asked = argparse.Namespace(**vars(ARGS) | {"ways": ["fsdp2"]})
    with pytest.raises(peers.CannotStart, match="fsdp2: torch is not installed"):
        peers.started(["fsdp2"], "unrolled", asked, tmp_path, {})


def run(tmp_path, *ways):
    options = ["--size", "tiny", "--workers", "2", "--rounds", "1", "--styles", "scan", "--parity", "6"]
    command = [sys.executable, SCRIPT, *options, "--out", tmp_path / "found.json", "--ways", *ways]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((tmp_path / "found.json").read_text())


@pytest.mark.slow
def test_the_script_runs_to_its_end(tmp_path):
    rows = run(tmp_path, "zerojax", "replicated")["ways"]["scan"]
    assert rows["zerojax"]["overhead"]["median"] > 0
    assert rows["zerojax"]["loss apart"] <= peers.TOLERANCE
    assert rows["zerojax"]["MiB a worker"]["compiled"] > 0


@pytest.mark.slow
def test_torchs_ways_train_as_jax_does(tmp_path):
    pytest.importorskip("torch", reason="needs the extra peers")
    found = run(tmp_path, "replicated", "ddp", "fsdp2")
    for way in ("ddp", "fsdp2"):
        np.testing.assert_allclose(found["losses"][way], found["losses"]["replicated"], rtol=peers.TOLERANCE)
        assert found["ways"]["scan"][way]["loss apart"] <= peers.TOLERANCE
