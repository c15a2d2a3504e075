"""The parts of a first state that no transformation makes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import mesh_of
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.layout.leaf import Leaf
from zerojax.train.begin import zeros


@pytest.mark.parametrize("shapes", [True, False])
def test_zeros_are_stored_as_their_leaf_says(shapes):
    leaf = Leaf("w", (13, 7), np.dtype("float16"), ("data",), 8, kind="sharded", dim=0)
    sharding = NamedSharding(mesh_of(8), PartitionSpec("data"))
    found = zeros(leaf, sharding, shapes=shapes)
    assert isinstance(found, jax.ShapeDtypeStruct if shapes else jax.Array)
    assert (found.shape, found.dtype, found.sharding) == ((16, 7), jnp.float16, sharding)
    assert shapes or not found.any()
