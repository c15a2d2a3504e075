"""Offloaded leaves are divided into chunks, which are written, read ahead, joined and kept without the whole leaf."""

import concurrent.futures
import contextlib
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of

from zerojax import Offload, Tuning, offload, zero_shard
from zerojax.layout.leaf import Leaf, is_chunked
from zerojax.offload import chunked
from zerojax.offload.chunked import Chunking, chunking_of, filled, joined, kept, read_ahead, replaced, row_chunkings_of

F32 = np.dtype("float32")


class AtOnce(concurrent.futures.Executor):
    """Runs each call when it is submitted."""

    def __init__(self, threads):
        assert threads > 1

    def submit(self, fn, *args):
        future = concurrent.futures.Future()
        future.set_result(fn(*args))
        return future


def test_as_many_parts_are_read_ahead_as_fit(monkeypatch):
    monkeypatch.setattr(chunked, "ThreadPoolExecutor", AtOnce)
    sizes, begun = [3, 2, 4, 1, 1, 12, 5, 4, 1, 2], []
    found = read_ahead(lambda i: begun.append(i) or -i, [(i,) for i in range(len(sizes))], sizes, 9)
    for i, part in enumerate(found):
        assert part == -i
        held, next_one = sum(sizes[i : len(begun)]), sizes[len(begun) :][:1]
        assert held <= 9 or begun[-1] == i
        assert i == len(begun) - 1 or not next_one or held + next_one[0] > 9
    assert begun == list(range(len(sizes)))


def test_an_error_of_a_part_is_raised_when_it_is_due():
    def read(i):
        if i == 2:
            raise OSError("unreadable")
        return i

    found = read_ahead(read, [(i,) for i in range(4)], [1] * 4, limit=4)
    assert [next(found), next(found)] == [0, 1]
    with pytest.raises(OSError, match="unreadable"):
        next(found)


def test_a_leaf_that_other_axes_divide_along_all_dims_is_one_chunk():
    leaf = Leaf("", (6, 8), F32, ("data",), 2, others=("model", "model"))
    assert chunking_of(leaf, 1) == Chunking(0, (leaf.local_shape[0],))


def test_each_layer_of_a_stack_is_one_chunk():
    leaf = lambda *dims, dim=1, **more: Leaf("", dims, F32, ("data",), 2, **{"kind": "sharded", "dim": dim, **more})
    stacks = [leaf(6, 8, 4), leaf(6, 16), leaf(1, 2, 3), leaf(256, 2, 2)]
    arrays = [leaf(5, 16), leaf(6, 8, 4, dim=0), leaf(6, 16, dim=0), leaf(257, 2, 2), leaf(6, dim=0)]
    arrays += [leaf(6, 8, 4, others=("model",)), leaf(6, 16, others=("model",))]
    found = row_chunkings_of([*stacks, leaf(6, 8, kind="replicated", dim=None), *arrays], 40)
    wanted = [Chunking(0, (1,) * leaf.shape[0]) for leaf in stacks] + [chunking_of(leaf, 40) for leaf in arrays]
    assert found == dict(zip((0, 1, 2, 3, *range(5, 12)), wanted, strict=True))
    assert all(found[i].is_by_row(leaf) for i, leaf in enumerate(stacks))
    assert not any(Chunking(0, (2,) * 3).is_by_row(leaf) for leaf in stacks)
    assert not Chunking(0, (1,) * 6).is_by_row(leaf(6, dim=0))


def begun(place, path, **params):
    """A state of one trace per parameter, which is offloaded, and its leaves."""
    kept = Offload(place, path=path if place == "disk" else None, chunk_bytes=60)
    tx = zero_shard(optax.trace(0.9), stage=3, mesh=mesh_of(4), tuning=Tuning(persist_below=1), offload=kept)
    state = tx.create(params)
    return state, jax.tree.leaves(state.opt_state, is_leaf=is_chunked)


@pytest.fixture(params=["host", "disk"])
def stored(request, tmp_path):
    """A leaf that is padded, and has chunks of two lengths."""
    state, (node,) = begun(request.param, tmp_path, w=jnp.ones((27, 5)))
    assert node.chunking == Chunking(0, (2, 2, 2, 1))
    yield node
    offload.close(state)


def test_a_leaf_goes_into_chunks_and_back(stored, monkeypatch):
    node, asked = stored, []
    x = np.arange(np.prod(node.shape), dtype=np.float32).reshape(node.shape)
    ahead = lambda *args: asked.append(args[1:]) or read_ahead(*args)
    monkeypatch.setattr(chunked, "read_ahead", ahead)
    node = filled(node, lambda box: x[box])
    np.testing.assert_array_equal(joined(node), x)
    for boxes, sizes, limit in asked:
        assert sizes == [x[box].nbytes for (box,) in boxes]
        assert limit == 2 * max(sizes)
    node = replaced(node, joined(node) + 1)
    np.testing.assert_array_equal(joined(node), x + 1)
    again = kept(node)
    np.testing.assert_array_equal(joined(again), x + 1)
    assert again.chunks[0] is not node.chunks[0]


def test_an_offloaded_leaf_cannot_be_pickled(stored):
    with pytest.raises(TypeError, match=r"opt_state.*trace\['w'\] is offloaded, .* tx\.unshard\(opt_state\)"):
        pickle.dumps(stored)


@pytest.mark.parametrize("fails", [False, True])
def test_a_partial_restore_after_one_that_failed_keeps_only_unchanged_leaves(tmp_path, fails):
    """The first restore failed while it wrote its first leaf, or after that."""
    state, (first, *others) = begun("disk", tmp_path, w=jnp.ones((27, 5)), v=jnp.ones((8, 3)), u=jnp.ones((4, 9)))
    wanted = [jax.device_get(joined(x)) for x in others]
    ones = lambda box: np.ones([one.stop - one.start for one in box], first.dtype)
    with pytest.raises(TypeError, match="not callable") if fails else contextlib.nullcontext():
        filled(first, None if fails else ones)
    with pytest.raises(ValueError, match="half written"):
        kept(first)
    restored = [filled(first, ones), *map(kept, others)]
    assert jax.device_get(joined(restored[0])).all()
    jax.tree.map(np.testing.assert_array_equal, [jax.device_get(joined(x)) for x in restored[1:]], wanted)
    with pytest.raises(ValueError, match=f"have version {2 if fails else 3}, and this state has version 1"):
        kept(others[0])
    offload.close(state)
