"""A checkpoint of one optimizer is not restored into another without a word, where their leaves have the same names."""

import json
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import mesh_of

from zerojax import Precision, zero_shard
from zerojax.checkpoint import Checkpointer
from zerojax.checkpoint.manifest import MANIFEST, MANIFEST_DIGEST, digest_line

PARAMS = {"w": jnp.ones((16, 4)), "b": jnp.ones(5)}


def state_of(inner, stage=3, count=4, **options):
    return zero_shard(inner, stage=stage, mesh=mesh_of(count), persist_below=8, **options).create(PARAMS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    made = {}

    def save(name, inner):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            with Checkpointer(made[name]) as checkpoints:
                checkpoints.save(state_of(inner))
        return made[name]

    return save


def restored(folder, like, **options):
    with Checkpointer(folder) as checkpoints:
        return checkpoints.restore(like, **options)


def chained(*parts):
    return optax.chain(optax.scale_by_adam(), *parts)


DECAY, RATE = optax.add_decayed_weights(1e-2), optax.scale_by_learning_rate(1e-2)


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        (
            optax.adamw(1e-2),
            optax.lamb(1e-2),
            r"EmptyState\(\)\) is there, .*EmptyState\(\), EmptyState\(\)\) is wanted",
        ),
        (optax.adam(1e-2), optax.adabelief(1e-2), r"\(ScaleByAdamState\(.* is there, \(ScaleByBeliefState\("),
        (optax.adam(1e-2), chained(RATE, optax.identity()), "wanted"),
    ],
)
def test_the_state_of_another_kind_of_transformation_is_refused(before, after, named, tmp_path):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state_of(before))
    with pytest.raises(ValueError, match=f"of another transformation .*{named}"):
        restored(tmp_path, state_of(after))


def test_it_is_restored_where_the_caller_says_so(saved):
    like = state_of(optax.lamb(1e-2))
    found = restored(saved("adamw", optax.adamw(1e-2)), like, partial=True)
    assert not found.missing
    assert not found.unused


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("adam", optax.nadam(1e-2), "the same operations, in another arrangement"),
        ("adam", optax.adam(3e-3), r"before mul -0.01; now mul -0.003\."),
        ("adam", optax.adam(1e-2, b2=0.95), r"now .*0.95"),
        ("decayed", chained(RATE, DECAY), "the same operations, in another arrangement"),
    ],
)
def test_another_program_is_named(before, after, named, saved):
    folder = saved(before, {"adam": optax.adam(1e-2), "decayed": chained(DECAY, RATE)}[before])
    with pytest.warns(UserWarning, match=rf"something else than that of the wanted state: .*{named}") as found:
        assert restored(folder, state_of(after)).step == 0
    assert found[0].filename == __file__


@pytest.mark.parametrize(
    "after",
    [
        lambda: state_of(optax.adam(1e-2), stage=1, count=3),
        lambda: state_of(optax.adam(1e-2), stage=0, count=8),
        lambda: state_of(optax.adam(1e-2), stage=2, precision=Precision.bf16()),
    ],
)
def test_the_same_one_is_restored_without_a_word_at_any_stage(after, saved):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restored(saved("adam", optax.adam(1e-2)), after())


def test_rates_in_the_state_and_arguments_that_are_not_given(tmp_path):
    """A rate in the state is no part of the program; what takes more arguments is told by its state alone."""
    needs = optax.GradientTransformationExtraArgs(
        optax.adam(1e-2).init, lambda g, s, p=None, *, wanted, **_: optax.adam(1e-2).update(g, s, p)
    )
    pairs = [(optax.inject_hyperparams(optax.adam)(rate) for rate in (1e-2, 1e-3)), (needs, needs)]
    for i, (before, after) in enumerate(pairs):
        with Checkpointer(tmp_path / str(i)) as checkpoints:
            checkpoints.save(state_of(before))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            restored(tmp_path / str(i), state_of(after))


def test_constants_are_compared_as_they_were_written_not_as_a_type_rounds_them(tmp_path):
    tx = zero_shard(optax.adam(1e-2, b1=0.8), stage=1, mesh=mesh_of(2))
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(tx.create(jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restored(tmp_path, tx.create(PARAMS))


def rewritten(folder, change):
    path = next(folder.glob(f"*/{MANIFEST}"))
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))
    (path.parent / MANIFEST_DIGEST).write_text(digest_line(path.read_bytes()))


def test_other_versions_and_older_checkpoints(tmp_path):
    """Other versions may write an update otherwise; a checkpoint of before says nothing."""
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state_of(optax.adamw(1e-2)))
    rewritten(tmp_path, lambda body: body["made_by"].update(optax="0.1.0"))
    with pytest.warns(UserWarning, match=r"of another transformation.*saved with optax 0\.1\.0\."):
        restored(tmp_path, state_of(optax.lamb(1e-2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restored(tmp_path, state_of(optax.adamw(3e-3)))
        rewritten(tmp_path, lambda body: body.pop("transformation"))
        restored(tmp_path, state_of(optax.lamb(1e-2)))
