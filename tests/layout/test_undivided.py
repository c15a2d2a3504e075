"""Leaves of which no dim divides stay replicated while they add little, so that published models show no `Padded`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from parity import assert_parity

from zerojax import Padded, Tuning, report, zero_shard
from zerojax.config import DataMesh, LayoutPolicy
from zerojax.layout.leaf import MOST_EXTRA, is_kept_whole, is_padded
from zerojax.layout.tree import lay_out

DEVICES = (2, 4, 8, 16, 32, 64)


def policy(shards, stage=3, persist_below=8192, **sizes):
    return LayoutPolicy(stage, DataMesh.for_stage({"data": shards, **sizes}, ("data",), stage), persist_below)


def shapes(tree):
    return jax.tree.map(
        lambda dims: jax.ShapeDtypeStruct(dims, jnp.float32), tree, is_leaf=lambda x: isinstance(x, tuple)
    )


def transformer(vocabulary, width, layers, *, hidden=None, kv=None, gated=False, positions=0, output=None):
    hidden, kv = hidden or 4 * width, kv or width
    block = {"q": (width, width), "k": (width, kv), "v": (width, kv), "o": (width, width), "norm": (width,)}
    block |= {"up": (width, hidden), "down": (hidden, width), "b": (hidden,)} | (
        {"gate": (width, hidden)} if gated else {}
    )
    ends = {"embed": (vocabulary, width), "positions": (positions, width)}
    ends |= {"bias": {"bias": (vocabulary,)}, "head": {"head": (width, vocabulary)}}.get(output, {})
    return shapes({"layers": [block] * layers, **ends})


def resnet50():
    blocks, width = [{"conv": (7, 7, 3, 64)}, {"fc": (2048, 1000), "bias": (1000,)}], 64
    for stage, count in enumerate((3, 4, 6, 3)):
        inner = 64 << stage
        for _ in range(count):
            blocks += [{"a": (1, 1, width, inner), "b": (3, 3, inner, inner), "c": (1, 1, inner, 4 * inner)}]
            width = 4 * inner
    return shapes(blocks)


PUBLISHED = {
    "GPT-2": transformer(50257, 768, 12, positions=1024),
    "GPT-2 with a bias": transformer(50257, 768, 12, positions=1024, output="bias"),
    "BERT": transformer(30522, 768, 12, positions=512, output="bias"),
    "DistilBERT": transformer(30522, 768, 6, positions=512, output="bias"),
    "RoBERTa": transformer(50265, 768, 12, positions=514, output="bias"),
    "GPT-J": transformer(50400, 4096, 28, output="bias"),
    "Llama 3 8B": transformer(128256, 4096, 32, hidden=14336, kv=1024, gated=True, output="head"),
    "Gemma 2B": transformer(256000, 2048, 18, hidden=16384, kv=256, gated=True),
    "Qwen 2.5 0.5B": transformer(151936, 896, 24, hidden=4864, kv=128, gated=True),
    "Whisper tiny": transformer(51865, 384, 8, positions=1500),
    "ViT-B": transformer(16 * 16 * 3, 768, 12, positions=197),
    "ResNet-50": resnet50(),
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_not_padded(name):
    for shards in DEVICES:
        layout = lay_out(PUBLISHED[name], policy(shards))
        padded = [str(leaf) for leaf in (*layout.params, *layout.grads) if leaf.kind == "sharded" and leaf.padding]
        assert not padded, f"{shards} devices"


LEAVES = st.lists(
    st.tuples(st.lists(st.integers(1, 40), min_size=1, max_size=2), st.booleans()), min_size=1, max_size=12
)


@given(LEAVES, st.integers(2, 16), st.integers(0, 200_000), st.integers(0, 200_000))
def test_what_is_kept_whole_adds_little_to_every_share(found, shards, trained, frozen):
    """Whatever the tree, of all parameters and of the trained ones, and equal leaves are laid out alike."""
    tree = {f"{'t' if on else 'f'}{i}": tuple(dims) for i, (dims, on) in enumerate(found)}
    tree |= {"t": (shards * (1 + trained // shards),), "f": (shards * (1 + frozen // shards),)}
    layout = lay_out(shapes(tree), policy(shards, persist_below=0), trainable=lambda path, _: path.startswith("t"))
    whole = {i for i, leaf in enumerate(layout.grads) if is_kept_whole(leaf)}
    for group in (range(len(layout.grads)), layout.trained):
        extra = sum(layout.grads[i].bytes for i in group if i in whole) * (shards - 1)
        assert extra <= MOST_EXTRA * sum(layout.grads[i].bytes for i in group)
    for leaf, path in zip(layout.grads, layout.paths, strict=True):
        assert leaf.kind == "replicated" if is_kept_whole(leaf) else leaf.kind == "sharded"
        alike = [
            x
            for x, other in zip(layout.grads, layout.paths, strict=True)
            if x.shape == leaf.shape and other[0] == path[0]
        ]
        assert {x.kind for x in alike} == {leaf.kind}


def test_a_leaf_that_other_axes_divide_counts_what_a_device_holds():
    """Over 8 x 4 devices, a leaf that the model's axis divides is a quarter as large on each."""
    params = shapes({"odd": (4, 251), "w": (256, 256)})
    for others, kept in {("model",): True, (): False}.items():  # 251 x 7 and 1004 x 7, of at most 1966 elements
        layout = lay_out(params, policy(8, 3, 100, model=4), others=[others, ()])
        assert is_kept_whole(layout.grads[0]) == kept


def model():
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "w": jax.random.normal(keys[0], (256, 512)) / 16,
        "out": {"kernel": jax.random.normal(keys[1], (512, 257)) / 16, "bias": jax.random.normal(keys[2], (257,))},
        "scale": jnp.ones((3,)),
    }


def loss(params, batch):
    h = jnp.tanh(batch @ params["w"]) @ params["out"]["kernel"] + params["out"]["bias"]
    return jnp.mean(h**2) * params["scale"].sum()


BATCH = jax.random.normal(jax.random.key(1), (16, 256))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "stage"),
    [
        (lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8), 3),
        (lambda: optax.chain(optax.clip(0.5), optax.adamw(1e-2)), 3),
        (lambda: optax.lamb(1e-2), 1),
    ],
    ids=["adafactor", "clip-adamw", "lamb"],
)
def test_a_model_with_an_odd_bias_trains_as_on_one_device(optimizer, stage, mesh):
    tx = zero_shard(optimizer(), stage=stage, mesh=mesh, tuning=Tuning(persist_below=100))
    state = tx.create(model())
    assert not any(map(is_padded, jax.tree.leaves(state.params, is_leaf=is_padded)))
    logical = {x.shape for x in jax.tree.leaves(jax.eval_shape(optimizer().init, model()))} | {(8,), (1,)}
    assert {x.shape for x in jax.tree.leaves(state.opt_state)} <= logical, "an array of the state is padded"
    text = str(report(state))
    if stage == 3:
        assert "8 divides none of its dims; such leaves add at most 3% to a device's share" in text
        assert "params['out']['bias']  float32[257] replicated: 8 divides none" in str(state.plan)
    assert state.params["out"]["bias"].sharding.is_fully_replicated
    assert_parity(tx, loss, model(), [BATCH] * 2, atol=1e-4)  # 1% of a step: each divides noise by its own size


@pytest.mark.slow
def test_a_part_of_stored_parameters_keeps_its_form(mesh):
    """The rule looks at the whole tree, so that of a part, the other decision would be right."""
    params = {"w": jnp.ones((256, 256)), "a": jnp.arange(257.0), "b": jnp.arange(263.0)}
    tx = zero_shard(optax.adam(1e-2), stage=3, mesh=mesh, tuning=Tuning(persist_below=100))
    stored = tx.shard(params)
    assert {name for name, x in stored.items() if isinstance(x, Padded)} == {"b"}  # each alone would be kept whole
    for names in (["w", "b"], ["a"], ["b"], ["a", "b"]):
        part = {name: stored[name] for name in names}
        value, grads = tx.value_and_grad(lambda p, x: sum(jnp.sum(v**2) for v in p.values()) * x.mean())(
            part, BATCH[:, :1] * 0 + 1
        )
        assert jax.tree.structure(grads) == jax.tree.structure(part)
        np.testing.assert_allclose(value, sum(np.sum(np.square(params[name])) for name in names), rtol=1e-5)
        for name in names:
            np.testing.assert_allclose(jax.jit(jnp.asarray)(grads[name]), 2 * params[name])
