"""The LoRA example: adapters start as nothing, only they move, and only they have optimizer state."""

import functools
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from gpt import GPT, next_byte_loss
from lora import graft, prose, with_adapters

from zerojax import report, zero_shard

SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "lora.py"
NUMBER = r"([\d.,]+)"
RANK = 2


def finetune(env):
    """The numbers that the script prints at its end, in order."""
    command = [sys.executable, str(SCRIPT)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900, env=env).stdout
    pattern = (
        rf"Held out, prose: {NUMBER} bits per byte before, {NUMBER} after\s+"
        rf"Trained: {NUMBER} of {NUMBER} parameters.*\s+"
        rf"Optimizer state on each of {NUMBER} devices: {NUMBER} kB, where training all takes {NUMBER} kB"
    )
    return [float(x.replace(",", "")) for x in re.search(pattern, printed).groups()]


def adapters_of(params):
    """Adapters and base, each as a flat dict of NumPy arrays."""
    flat = {"/".join(path): np.asarray(x) for path, x in flatten_dict(params).items()}
    return {k: x for k, x in flat.items() if "lora" in k}, {k: x for k, x in flat.items() if "lora" not in k}


@pytest.mark.slow
def test_only_adapters_move_and_they_start_as_nothing(mesh):
    model = GPT(width=32, layers=2, heads=2)
    init = functools.partial(model.init, jax.random.key(0), jnp.zeros((1, 16), jnp.int32))
    rng = np.random.default_rng(0)
    base = jax.tree.map(lambda x: rng.normal(0, 0.1, x.shape).astype(x.dtype), jax.eval_shape(init))
    windows = rng.integers(256, size=(8, 17)).astype(np.int32)

    tx = zero_shard(
        optax.adam(1e-2), stage=3, mesh=mesh, persist_below=100, trainable=lambda path, leaf: "lora" in path
    )
    state = tx.create(graft(base, tx.init_params(with_adapters(init, RANK))))
    adapters, _ = adapters_of(tx.unshard(state.params))
    assert {path.split("/")[-2] for path in adapters} == {"query", "key", "value", "out", "up", "down"}
    assert report(state).bytes["opt_state"] < report(state).bytes["params"]

    plain = next_byte_loss(model)
    step = tx.train_step(with_adapters(plain, RANK))
    state, metrics = step(state, windows)
    expected = float(jax.jit(plain)(base, windows))
    assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-5)  # float32 sums in two orders
    state, _ = step(state, windows)  # the first step moves B alone: as it is zero, A has no gradient
    moved, frozen = adapters_of(tx.unshard(state.params))
    for path, x in adapters.items():
        assert not np.array_equal(x, moved[path]), path
    for path, x in adapters_of(base)[1].items():
        np.testing.assert_array_equal(x, frozen[path], err_msg=path)


def test_no_paragraph_of_the_prose_is_both_learnt_and_held_out():
    learnt, held_out = ({" ".join(p.split()) for p in bytes(text).decode().split("\n\n")} for text in prose())
    assert held_out
    assert not {p for p in learnt & held_out if len(p) > 20}  # where the text is cut, ends of paragraphs may be alike


@pytest.mark.slow
def test_the_default_run_learns_prose_through_its_adapters():
    as_a_user = {k: x for k, x in os.environ.items() if k not in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")}
    before, after, trained, count, devices, found, everything = finetune(as_a_user)
    assert after < before - 0.2
    assert trained < 0.05 * count
    # Adam's two float32 moments, and nothing for the base; printed to 0.1 kB, padding and counts included
    assert found == pytest.approx(8 * trained / devices / 1e3, abs=0.3)
    assert everything == pytest.approx(8 * (count - trained) / devices / 1e3, abs=0.3)
