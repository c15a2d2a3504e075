"""Every quantity of one leaf, counted by hand; and how trees, states, chunks and masks of a few leaves are laid out."""

import dataclasses
import pickle
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import shape
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from zerojax import Precision, Wire
from zerojax.config import DataMesh, LayoutPolicy
from zerojax.layout.annotations import overwritten_leaves
from zerojax.layout.leaf import OVERWRITE, Leaf, is_kept_whole, keep_whole, pad, reason_for, without_padding
from zerojax.layout.padded import Padded, stored_mask
from zerojax.layout.tree import REASON, lay_out, lay_out_state, like_parameter, params_of_state
from zerojax.offload.chunked import Chunking, chunking_of

F32 = np.dtype("float32")
SHARDED = Leaf("['w']", (13, 7), F32, ("gpu",), 4, kind="sharded", dim=0, further=2)
FLAT = Leaf("['b']", (3,), F32, ("gpu",), 4, kind="flat", reason="small")
WHOLE = Leaf("['s']", (5, 2), F32, ("gpu",), 4, reason="because")


def policy(stage=3, persist_below=4, params_axes=(), **options):
    data = DataMesh.for_stage({"host": 2, "gpu": 4, "model": 2}, ("host", "gpu"), stage, (), params_axes)
    return LayoutPolicy(stage, data, persist_below, **options)


def test_what_a_device_holds_of_a_leaf_that_is_sharded_in_two_steps():
    """Over 4 devices, and each shard further over 2: 13 rows are padded to 16."""
    assert (SHARDED.size, SHARDED.bytes) == (91, 364)
    assert (SHARDED.storage_shape, SHARDED.local_shape, SHARDED.part_shape) == ((16, 7), (4, 7), (2, 7))
    assert (SHARDED.padding, SHARDED.local_bytes) == (21, 4 * 28)
    part = SHARDED.divided(("host", "gpu"))
    assert (part.shape, part.axes, part.shards, part.further) == ((4, 7), ("host",), 2, 1)
    assert part.local_shape == SHARDED.part_shape


def test_a_leaf_is_described_by_its_kind_and_padding():
    assert str(SHARDED) == "float32[13, 7] dim 0 over 4, 21 elements of padding"
    assert str(dataclasses.replace(SHARDED, shape=(16, 7))) == "float32[16, 7] dim 0 over 4"
    assert str(FLAT) == "float32[3] flat over 4, 1 elements of padding"
    assert str(WHOLE) == "float32[5, 2] replicated: because"
    assert str(dataclasses.replace(WHOLE, reason="")) == "float32[5, 2] replicated"


def test_labels_take_no_part_in_equality():
    labels = {"path": "['v']", "reason": "none", "unquantised": "small"}
    assert dataclasses.replace(SHARDED, **labels) == SHARDED
    for change in ({"dim": 1}, {"further": 1}, {"host": True}, {"is_quantised": True}, {"others": ("model",)}):
        assert dataclasses.replace(SHARDED, **change) != SHARDED


def test_leaves_are_kept_whole_up_to_the_last_byte_of_the_budget_and_the_cheapest_first():
    """The budget of 3% may be spent in full, and the larger leaf is left out."""
    sharded = lambda *dims: Leaf("", dims, F32, ("gpu",), 4, kind="sharded", dim=0)
    odd, larger = sharded(1), sharded(3)
    for rest, whole in ((99, True), (98, False)):  # 3 extra elements of at most 0.03 * 100
        leaves = keep_whole([odd, sharded(rest)], [0], [range(2)], {})
        assert is_kept_whole(leaves[0]) == whole
        assert not is_kept_whole(leaves[1])
    leaves = keep_whole([larger, odd, sharded(128)], [0, 1, 2], [range(3)], {})
    assert list(map(is_kept_whole, leaves)) == [False, True, False]
    again = keep_whole([*leaves, sharded(1)], [3], [range(4)], {})
    assert not is_kept_whole(again[3]), "a leaf that is whole already takes its part of the budget"
    assert (
        leaves[1].reason
        == reason_for(4)
        == "4 divides none of its dims; such leaves add at most 3% to a device's share"
    )
    assert not is_kept_whole(WHOLE)


@pytest.mark.parametrize(
    ("leaf", "chunk_bytes", "dim", "extents"),
    [
        (SHARDED, 10**6, 0, (4,)),  # one chunk
        (SHARDED, 56, 0, (2, 2)),
        (SHARDED, 40, 0, (1, 1, 1, 1)),  # 3 chunks are wanted, and 4 rows give no equal thirds
        (SHARDED, 1, 1, (1,) * 7),  # no dim is long enough: the longest, one index at a time
        (dataclasses.replace(SHARDED, shape=(7, 13), dim=1, others=("model",)), 60, 1, (2, 2)),
        (dataclasses.replace(SHARDED, others=("model", "model")), 1, 0, (4,)),
        (Leaf("", (), F32, ("gpu",), 4), 1, 0, ()),
        (Leaf("", (2, 9), F32, ("gpu",), 4), 18, 1, (2, 2, 2, 2, 1)),
    ],
)
def test_chunks_of_a_leaf(leaf, chunk_bytes, dim, extents):
    assert chunking_of(leaf, chunk_bytes) == Chunking(dim, extents)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=3), st.integers(1, 5000))
def test_chunks_cover_each_shard_and_fit_where_an_index_fits(dims, chunk_bytes):
    leaf = Leaf("", tuple(dims), F32, ("gpu",), 4, kind="sharded", dim=0)
    chunking = chunking_of(leaf, chunk_bytes)
    extents, local = chunking.extents, leaf.local_shape
    assert sum(extents) == local[chunking.dim]
    assert [start for start, _ in chunking.chunks] == [sum(extents[:k]) for k in range(len(extents))]
    assert len(set(extents[:-1])) <= 1
    assert extents[-1] <= extents[0]
    row = leaf.local_bytes // local[chunking.dim]
    assert extents[0] == 1 or extents[0] * row <= chunk_bytes
    assert [s[chunking.dim] for s in chunking.chunk_shapes(leaf)] == [
        n * (4 if chunking.dim == 0 else 1) for n in extents
    ]


def test_a_padded_array_is_its_logical_array():
    x = np.arange(15.0, dtype=np.float32).reshape(3, 5)
    padded = Padded(pad(jnp.asarray(x), 1, 8), (3, 5), 1)
    assert (padded.extent, padded.ndim, padded.size, len(padded), padded.dtype) == (8, 2, 15, 3, F32)
    assert padded.storage.shape == (3, 8)
    assert not np.asarray(padded.storage)[:, 5:].any()
    for same in (padded.logical(), np.asarray(padded), padded[:], list(padded), without_padding([x, padded])[1]):
        np.testing.assert_array_equal(np.asarray(same), x)
    np.testing.assert_array_equal(padded @ jnp.ones(5), x.sum(1))
    np.testing.assert_array_equal(2 - padded, 2 - x)
    np.testing.assert_array_equal(-padded, -x)
    np.testing.assert_array_equal(padded >= 3, x >= 3)
    stacked = dataclasses.replace(padded, storage=jnp.stack([padded.storage] * 2))
    assert stacked.logical().shape == (2, 3, 5)
    for dtype in (bool, jnp.uint32):  # flags and raw keys, of which a function may give other shapes
        assert dataclasses.replace(padded, storage=jnp.ones(3, dtype)).storage.shape == (3,)
    mask = {"p": dataclasses.replace(padded, storage=True), "x": False}
    assert stored_mask(mask, "trainable").meant == {"p"}
    with pytest.raises(ValueError, match=r"padded to \[3, 8\] in storage.*array of shape \[3\]"):
        dataclasses.replace(padded, storage=jnp.ones(3))
    with pytest.raises(AttributeError, match=r"no 'T'.*shape \[3, 5\], padded to \[3, 8\]"):
        padded.T  # noqa: B018


def test_what_is_not_sharded_says_why():
    tree = {"b": shape(3), "w": shape(16, 8)}
    assert [leaf.reason for leaf in lay_out(tree, policy(2)).params] == ["stage 2 keeps parameters replicated"] * 2
    assert lay_out(tree, policy(0)).params[1].reason == "stage 0 shards nothing"
    assert lay_out(tree, policy(3)).params[0].reason == "small: 3 elements, under persist_below=4"
    assert lay_out({"w": shape(4)}, policy(3)).grads[0].kind == "sharded"


def test_leaves_that_are_not_trained_say_why():
    tree = {"a": shape(64), "f": shape(64), "i": shape(64, dtype=jnp.int32), OVERWRITE: shape(64)}
    layout = lay_out(tree, policy(), trainable=lambda path, leaf: path != "f")
    why = dict(zip(layout.paths, map(layout.why_not_trained, range(4)), strict=True))
    assert why == {"a": "", "f": "frozen", "i": "not trained: int32 has no gradient", OVERWRITE: REASON}
    alone = layout.trained_only()
    assert (alone.paths, alone.trained, [leaf.path for leaf in alone.params]) == (("a",), (0,), ["['a']"])
    assert jax.tree.unflatten(alone.treedef, [1])["f"] == optax.MaskedNode()
    assert alone.trained_only() is alone
    assert overwritten_leaves((), ["a", "b"], [shape(1)] * 2, overwrite=lambda path, x: path == "b") == {1}
    assert overwritten_leaves((), ["a", "b"], [shape(1)] * 2, known=[0]) == {0}
    variable = nnx.variable_type_from_name(OVERWRITE, allow_register=True)(jnp.ones(3))
    tree = [Padded(jnp.ones(4), (3,), 0), nnx.Param(jnp.ones(3)), variable]
    assert overwritten_leaves(tree, ["a", "b", "c"], [shape(3)] * 3) == {2}


def test_layouts_are_equal_if_their_fields_are():
    one, again, other = (lay_out({"w": shape(size, 8)}, policy()) for size in (16, 16, 24))
    assert (one, hash(one)) == (again, hash(again)) == (pickle.loads(pickle.dumps(one)), hash(one))
    assert one not in (other, one.policy)


def test_what_collectives_do_not_quantise_says_why():
    tree = {
        "i": shape(64, 16, dtype=jnp.int32),
        "s": shape(3),
        "v": shape(4096),
        "w": shape(64, 16),
        "x": shape(64, 15),
    }
    assert [leaf.sent for leaf in lay_out(tree, policy(), wire=Wire(gather="int8", block=16)).params] == [
        "sent as it is: int32 is no floating type",
        "sent as it is: small: 3 elements, under persist_below=4",
        "sent as it is: a vector",
        "quantised",  # 8 blocks per shard are just enough
        "sent as it is: small: 120 elements per shard, under 8 blocks of 16",
    ]
    assert {leaf.sent for leaf in lay_out(tree, policy()).params} == {""}


def test_precision_narrows_floats_that_it_does_not_keep():
    tree = {"i": shape(64, dtype=jnp.int32), "k": shape(64), "w": shape(64)}
    for keep, narrow in ((None, {"k", "w"}), (lambda path, leaf: (path, leaf.dtype) == ("k", F32), {"w"})):
        layout = lay_out(tree, policy(), precision=Precision.bf16(keep=keep))
        assert {
            path for path, dtype in zip(layout.paths, layout.compute, strict=True) if dtype == jnp.bfloat16
        } == narrow
        assert [leaf.dtype for leaf in layout.grads] == [jnp.int32, F32, F32]
        assert [leaf.dtype for leaf in layout.params] == list(layout.compute)


def test_leaves_without_a_shape_or_of_unsafe_types_are_refused():
    for part in ({"dtype": F32}, {"shape": (4,)}):
        with pytest.raises(TypeError, match=r"params\['f'\] is a SimpleNamespace, not an array"):
            lay_out({"f": types.SimpleNamespace(**part)}, policy())
    with pytest.raises(TypeError, match=r"params\['q'\] is int2\..*int4, uint4 or wider"):
        lay_out({"q": shape(4, dtype=jnp.int2)}, policy())
    reasons = [
        leaf.reason
        for leaf in lay_out({"e": shape(0, 4), "k": shape(64, dtype=jax.random.key(0).dtype)}, policy()).grads
    ]
    assert reasons[0] == "no elements"
    assert reasons[1].endswith("has no arithmetic")
    other = lay_out({"w": shape(64)}, policy(), others=[("model",)]).grads[0]
    assert (other.kind, other.reason) == ("replicated", "it has no dim, or other mesh axes divide every dim")


def test_state_leaves_follow_their_parameter():
    x = shape(3, 13, 7)
    history = like_parameter("h", x, SHARDED, True)
    assert (history.dim, history.others, history.shape, history.local_shape) == (1, (None,), (3, 13, 7), (3, 4, 7))
    assert like_parameter("h", shape(13, 7), SHARDED, True) == SHARDED
    assert like_parameter("h", shape(7, 13), SHARDED, True) is None
    assert like_parameter("h", shape(7), SHARDED, True) is None
    assert like_parameter("h", shape(3), FLAT, True).kind == "flat"
    assert like_parameter("h", shape(3), FLAT, False).reason.startswith("small; its update depends on other elements")
    assert like_parameter("h", shape(2, 3), FLAT, True).kind == "replicated"
    small = lay_out([shape(3), shape(3)], policy())
    state = lay_out_state([shape(3), shape(3)], small, param_of=(0, 1), flat=frozenset({0}))
    assert [leaf.kind for leaf in state] == ["flat", "replicated"]
    scalar = lay_out(shape(), policy())
    assert params_of_state({"count": shape(), "mu": shape()}, scalar) == (None, None)
    vector = lay_out(shape(64), policy())
    assert params_of_state({"mu": shape(64)}, vector) == (0,)
