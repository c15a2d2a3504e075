"""Offloaded leaves are divided into chunks, which are written, read ahead, joined and kept without the whole leaf."""

import concurrent.futures
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
from zerojax.offload.chunked import Chunking, chunking_of, filled, joined, kept, read_ahead, replaced


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
    leaf = Leaf("", (6, 8), np.dtype("float32"), ("data",), 2, others=("model", "model"))
    assert chunking_of(leaf, 1) == Chunking(0, (leaf.local_shape[0],))


@pytest.fixture(params=["host", "disk"])
def stored(request, tmp_path):
    """The chunks of a state with one leaf, which is padded."""
    path = tmp_path if request.param == "disk" else None
    kept = Offload(request.param, path=path, chunk_bytes=60)
    tx = zero_shard(optax.trace(0.9), stage=3, mesh=mesh_of(4), tuning=Tuning(persist_below=1), offload=kept)
    state = tx.create({"w": jnp.ones((27, 5))})
    (node,) = jax.tree.leaves(state.opt_state, is_leaf=is_chunked)
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
