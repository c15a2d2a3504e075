"""Pictures: what they draw is what the numbers say."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import awkward_params
from test_cli import run

from zerojax import Offload, estimate, plot, zero_shard


def png(figure):
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def test_memory_is_stacked_by_part():
    found = estimate(7.5e9, devices=(64, 8), offload=Offload(optimizer="host"))
    figure = plot.memory(found)
    (axes,) = figure.axes
    bars = zip(*axes.containers, strict=True)
    ends = [max(bar.get_x() + bar.get_width() for bar in stage) for stage in bars]
    for i, row in enumerate(found.rows[:4]):
        assert ends[i] == pytest.approx((row.total + row.host) / 1e9)
    assert [text.get_text() for text in axes.texts] == ["120 GB", "30 GB", "15.2 GB", "469 MB"]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["parameters", "gradients", "master weights", "optimizer state", "in host memory"]
    assert png(figure).startswith(b"\x89PNG")


def test_holdings_are_those_of_the_arrays(mesh):
    params = {"cut": jnp.zeros((16, 24)), "whole": jnp.zeros(())}
    stored = zero_shard(optax.sgd(1.0), stage=3, mesh=mesh, persist_below=50).shard(params)
    held = {name: plot.Held.of((jax.tree_util.DictKey(name),), x) for name, x in stored.items()}
    assert held["cut"].name == "cut"
    assert held["cut"].parts == [(i, i / 8, (i + 1) / 8) for i in range(8)]
    assert not held["cut"].whole
    assert held["whole"].whole


def test_holdings_of_a_state_that_waits(mesh):
    offload = Offload(optimizer="host")
    state = zero_shard(optax.adam(1e-3), stage=3, mesh=mesh, persist_below=50, offload=offload).create(awkward_params())
    figure = plot.holdings(state)
    (axes,) = figure.axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert "params['tied']" in names
    assert "opt_state[0].mu['tied']" in names
    hatched = [bar for bar in axes.patches if bar.get_hatch()]
    assert len(hatched) == 8 * 2 * 4  # eight devices, two moments, four large leaves
    assert png(figure).startswith(b"\x89PNG")


def test_the_command_draws(tmp_path):
    outcome = run("estimate", "7.5e9", "--png", tmp_path / "memory.png")
    assert outcome.exit_code == 0
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    outcome = run("estimate", "7.5e9", "--png", tmp_path / "no" / "memory.png")
    assert outcome.exit_code == 2
    assert "No such file" in outcome.stderr


def test_a_leaf_without_elements_is_not_drawn():
    assert plot.Held.of((), np.zeros(3)) is None
    assert plot.Held.of((), jnp.zeros((0, 3))) is None
