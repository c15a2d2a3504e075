"""Where parameters are placed: which are padded in storage, and which programs initialise them."""

import itertools

import numpy as np
import pytest

from zerojax.layout.leaf import Leaf
from zerojax.placement.place import groups
from zerojax.placement.storage import storage_forms


def leaf(size, shards=8):
    return Leaf("['w']", (size,), np.dtype(np.float32), ("data",), shards, kind="sharded", dim=0)


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ([80] * 1000, 8),  # equal layers: an eighth of all shards per program
        (
            [8000, *[80] * 1000],
            3,
        ),  # half of the largest leaf, which counts in full, is more than an eighth of all shards
        ([8000] * 2, 1),
        ([], 0),
    ],
)
def test_each_program_makes_a_share_of_the_parameters(sizes, count):
    leaves = tuple(map(leaf, sizes))
    found = list(groups(leaves))
    assert list(itertools.chain(*found)) == list(range(len(sizes)))
    assert len(found) == count
    most = max([leaf.bytes // 2 for leaf in leaves] + [sum(leaf.local_bytes for leaf in leaves) // 8])
    assert all(sum(leaves[i].local_bytes for i in group) <= most for group in found if len(group) > 1)


def test_a_leaf_with_padding_is_padded_in_storage():
    assert storage_forms([leaf(79), leaf(80), leaf(81)]) == ((0, 80), None, (0, 88))
