"""Batches of any loader, placed ahead of their steps."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of

from zerojax import zero_shard
from zerojax.checkpoint import Checkpointer
from zerojax.comm.mesh import batch_sharding
from zerojax.data import shard_batches

TX = zero_shard(optax.sgd(0.1), stage=3, mesh=mesh_of(8))


class Loader:
    """As grain's iterators: it knows where it is."""

    def __init__(self, lengths):
        self.lengths, self.read = list(lengths), 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.read == len(self.lengths):
            raise StopIteration
        self.read += 1
        return {"x": np.full((self.lengths[self.read - 1], 3), self.read), "y": np.arange(self.lengths[self.read - 1])}

    def get_state(self):
        return {"read": self.read}

    def set_state(self, state):
        self.read = state["read"]


class Tensor:
    """As of torch: converted by `__array__`, or where NumPy has not the type by DLPack alone."""

    def __init__(self, array, by):
        self.array, self.by = array, by

    def __array__(self, dtype=None, copy=None):
        if self.by == "dlpack":
            raise TypeError("Got unsupported ScalarType")
        return self.array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("rows", ["global", "process"])
def test_each_batch_is_placed_ahead(rows):
    loader = Loader([16] * 5)
    batches = shard_batches(loader, TX, prefetch=2, rows=rows)
    for number, batch in enumerate(batches, 1):
        assert loader.read == min(number + 2, 5)
        assert {x.sharding for x in jax.tree.leaves(batch)} == {batch_sharding(TX.config.mesh, TX.config.data)}
        np.testing.assert_array_equal(batch["x"], np.full((16, 3), number))
    assert number == 5


@pytest.mark.parametrize("by", ["array", "dlpack"])
def test_tensors_of_other_libraries_are_taken(by):
    (batch,) = shard_batches([(Tensor(np.arange(8.0, dtype=np.float32), by), [])], TX)
    np.testing.assert_array_equal(batch[0], np.arange(8.0))


def test_a_remainder_is_dropped_or_has_weight_0():
    dropped = list(shard_batches(Loader([16, 16, 5]), TX))
    assert [len(batch["y"]) for batch in dropped] == [16, 16]
    padded = list(shard_batches(Loader([10, 10, 3]), TX, remainder="pad", accumulate=2))
    assert [(len(batch["y"]), float(weight.sum())) for batch, weight in padded] == [(16, 10), (16, 10), (16, 3)]

    def loss(params, rows):
        batch, weight = rows
        return jnp.sum(weight * params["w"] * batch["y"]), weight.sum()

    step = TX.train_step(loss, weighted=True, accumulate=2)
    _, metrics = step(TX.create({"w": jnp.ones(())}), padded[-1])
    np.testing.assert_allclose(metrics["loss"], np.arange(3).mean())


def test_a_checkpoint_has_the_position_of_the_batch_returned_last(tmp_path):
    with Checkpointer(tmp_path) as checkpoints:
        batches = shard_batches(Loader([8] * 9), TX)
        list(itertools.islice(batches, 3))
        state = TX.create({"w": jnp.ones(())})
        checkpoints.save(state, data=batches)
        again = shard_batches(Loader([8] * 9), TX)
        next(again)
        checkpoints.restore(state, data=again)
    assert next(again)["x"][0, 0] == 4 == next(batches)["x"][0, 0]
    with pytest.raises(TypeError, match=r"list_iterator has no get_state.*grain"):
        shard_batches([], TX).get_state()


@pytest.mark.parametrize(
    ("batch", "options", "error", "message"),
    [
        (np.ones(12), {}, ValueError, "Give a batch of 8 or 16 rows"),
        ({"x": np.ones(8), "y": 3}, {}, ValueError, r"batch\['y'\].*is a scalar"),
        ({"x": np.ones(8), "y": np.ones(16)}, {}, ValueError, r"batch\['y'\] has 16 rows"),
        (object(), {}, TypeError, "has a object in it, which is no array"),
        (np.ones(8), {"rows": "local"}, ValueError, "rows is one of 'global', 'process'"),
    ],
)
def test_what_is_no_batch_is_refused(batch, options, error, message):
    with pytest.raises(error, match=message):
        next(shard_batches([batch], TX, **options))


def test_a_batch_that_outgrows_the_first_is_refused():
    with pytest.raises(ValueError, match="A batch has 20 rows, and the first one, padded, has 16"):
        list(shard_batches(Loader([10, 20]), TX, remainder="pad"))
