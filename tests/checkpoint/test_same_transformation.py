"""A checkpoint of one optimizer is not restored into another without a word, where their leaves have the same names."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from checkpoints import rewrite_manifest, saved
from conftest import mesh_of

from zerojax import Precision, Tuning, zero_shard
from zerojax.checkpoint import Checkpointer

PARAMS = {"w": jnp.ones((16, 4)), "b": jnp.ones(5)}


def state_of(inner, stage=3, count=4, params=PARAMS, **options):
    return zero_shard(inner, stage=stage, mesh=mesh_of(count), tuning=Tuning(persist_below=8), **options).create(params)


@pytest.fixture
def restored(tmp_path):
    """A function that saves a state, if one is given, and restores it into another."""

    def restore(before, after, **options):
        if before is not None:
            saved(tmp_path, before)
        return Checkpointer(tmp_path, read_only=True).restore(after, **options)

    return restore


def chained(*parts):
    return optax.chain(optax.scale_by_adam(), *parts)


ADAM, DECAY, RATE = optax.adam(1e-2), optax.add_decayed_weights(1e-2), optax.scale_by_learning_rate(1e-2)


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        (
            optax.adamw(1e-2),
            optax.lamb(1e-2),
            r"EmptyState\(\)\) is there, .*EmptyState\(\), EmptyState\(\)\) is wanted",
        ),
        (ADAM, optax.adabelief(1e-2), r"\(ScaleByAdamState\(.* is there, \(ScaleByBeliefState\("),
        (ADAM, chained(RATE, optax.identity()), "wanted"),
    ],
)
def test_the_state_of_another_kind_of_transformation_is_refused(before, after, named, restored):
    """Unless the caller says so."""
    with pytest.raises(ValueError, match=f"of another transformation .*{named}"):
        restored(state_of(before), state_of(after))
    found = restored(None, state_of(after), partial=True)
    assert not found.missing
    assert not found.unused


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        (ADAM, optax.nadam(1e-2), "the same operations, in another arrangement"),
        (ADAM, optax.adam(3e-3), r"before mul -0.01; now mul -0.003\."),
        (ADAM, optax.adam(1e-2, b2=0.95), r"now .*0.95"),
        (chained(DECAY, RATE), chained(RATE, DECAY), "the same operations, in another arrangement"),
    ],
)
def test_another_program_is_named(before, after, named, tmp_path):
    checkpoints = saved(tmp_path, state_of(before))
    with pytest.warns(UserWarning, match=rf"something else than that of the wanted state: .*{named}") as found:
        assert checkpoints.restore(state_of(after)).step == 0
    assert found[0].filename == __file__


NARROW = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
NEEDS = optax.GradientTransformationExtraArgs(ADAM.init, lambda g, s, p=None, *, wanted, **_: ADAM.update(g, s, p))
ALIKE = {
    "stage 1": (ADAM, ADAM, {"stage": 1, "count": 3}),
    "stage 0": (ADAM, ADAM, {"stage": 0, "count": 8}),
    "bfloat16": (ADAM, ADAM, {"stage": 2, "precision": Precision.bf16()}),
    # A rate in the state is no part of the program.
    "rate": (optax.inject_hyperparams(optax.adam)(1e-2), optax.inject_hyperparams(optax.adam)(1e-3), {}),
    # What takes more arguments is told by its state alone.
    "arguments": (NEEDS, NEEDS, {}),
    # Constants are compared as they were written, not as a type rounds them.
    "rounded": (optax.adam(1e-2, b1=0.8), optax.adam(1e-2, b1=0.8), {"params": NARROW}),
}


@pytest.mark.parametrize("what", ALIKE)
def test_the_same_one_is_restored_without_a_word(what, restored):
    before, after, options = ALIKE[what]
    given, like = state_of(before), state_of(after, **options)
    given, like = (like, given) if "params" in options else (given, like)  # a wider type takes a narrower one
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restored(given, like)


def test_other_versions_and_older_checkpoints(restored, tmp_path):
    """Other versions may write an update otherwise; a checkpoint of before says nothing."""
    restored(state_of(optax.adamw(1e-2)), state_of(optax.adamw(1e-2)))
    (folder,) = tmp_path.glob("step_*")
    rewrite_manifest(folder, lambda body: body["made_by"].update(optax="0.1.0"))
    with pytest.warns(UserWarning, match=r"of another transformation.*saved with optax 0\.1\.0\."):
        restored(None, state_of(optax.lamb(1e-2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restored(None, state_of(optax.adamw(3e-3)))
        rewrite_manifest(folder, lambda body: body.pop("transformation"))
        restored(None, state_of(optax.lamb(1e-2)))
