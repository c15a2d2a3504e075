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
from zerojax.data import RowBatches, shard_batches

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
        ({"x": object()}, {}, TypeError, r"batch\['x'\] is a object, of which JAX has no arrays"),
        ([np.ones(8), np.array([None] * 8)], {}, TypeError, r"batch\[1\] has the type object"),
        ({"ids": ["a"] * 8}, {}, TypeError, r"batch\['ids'\]\[0\] is a str"),
        ({"ids": np.array(["a"] * 8)}, {}, TypeError, r"batch\['ids'\] has the type <U1"),
        (None, {}, ValueError, "A batch has no arrays in it: the loader gave None"),
        ({"x": [], "y": ()}, {"remainder": "pad"}, ValueError, "A batch has no arrays in it"),
        (np.ones(8), {"rows": "local"}, ValueError, "rows is one of 'global', 'process'"),
    ],
)
def test_what_is_no_batch_is_refused(batch, options, error, message):
    with pytest.raises(error, match=message):
        next(shard_batches([batch], TX, **options))


def test_a_batch_that_outgrows_the_first_is_refused():
    with pytest.raises(ValueError, match="A batch has 20 rows, and the first one, padded, has 16"):
        list(shard_batches(Loader([10, 20]), TX, remainder="pad"))


class Failing(Loader):
    """Raises once, before its fourth batch."""

    failed = False

    def __next__(self):
        if self.read == 3 and not self.failed:
            self.failed = True
            raise OSError("the file ends")
        return super().__next__()


def of_generator(failing):
    yield from itertools.islice(failing, 3)
    raise OSError("the file ends")


@pytest.mark.parametrize("prefetch", [0, 1, 5])
@pytest.mark.parametrize("kind", ["iterator", "generator", "bad batch"])
def test_what_came_before_an_error_is_delivered_first(kind, prefetch):
    fine = Loader([8] * 5)
    loader = {"iterator": Failing(fine.lengths), "generator": of_generator(fine), "bad batch": Loader([8, 8, 8, 12, 8])}
    batches = shard_batches(loader[kind], TX, prefetch=prefetch)
    assert [int(next(batches)["x"][0, 0]) for _ in range(3)] == [1, 2, 3]
    position = None if kind == "generator" else batches.get_state()
    error, message = (ValueError, "8 or 16 rows") if kind == "bad batch" else (OSError, "the file ends")
    with pytest.raises(error, match=message):
        next(batches)
    if position:
        assert batches.get_state() == position == {"read": 3}  # of the batch returned last
    # what the loader has after its error, it has here, too
    assert [int(batch["x"][0, 0]) for batch in batches] == {"iterator": [4, 5], "generator": [], "bad batch": [5]}[kind]


def test_an_interrupt_is_not_kept_for_later():
    class Interrupted(Loader):
        def __next__(self):
            if self.read == 2:
                self.read += 1
                raise KeyboardInterrupt
            return super().__next__()

    batches = shard_batches(Interrupted([8] * 4), TX, prefetch=2)
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert [int(batch["x"][0, 0]) for batch in batches] == [1, 2, 4]


class Ends:
    """Its conversion raises what would end a loop."""

    def __array__(self, dtype=None, copy=None):
        raise StopIteration("no more")


def test_a_leaf_does_not_end_the_epoch():
    batches = shard_batches([{"x": np.ones(8)}, {"x": Ends()}], TX)
    next(batches)
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        next(batches)


def history(seed):
    """The rows of the steps that count, as a run reads them on changing numbers of processes, with saves and kills."""
    rng = np.random.default_rng(seed)
    rows, shuffled = int(rng.integers(3, 60)), None if rng.random() < 0.3 else seed
    position, counted = None, []
    while len(counted) < 3 * rows:
        parts, batch = int(rng.integers(1, 5)), 12 * int(rng.integers(1, 3))
        readers = [RowBatches(list(range(rows)), batch, seed=shuffled, part=(i, parts)) for i in range(parts)]
        for reader in readers:
            if position is not None:
                reader.set_state(position)
        for _ in range(int(rng.integers(0, 4))):
            counted += np.concatenate([next(reader) for reader in readers]).tolist()
        position, *others = [reader.get_state() for reader in readers]  # a save
        assert all(state == position for state in others)
        for _ in range(int(rng.integers(0, 3))):
            [next(reader) for reader in readers]  # steps that a kill loses
    return rows, shuffled, counted


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_each_row_is_read_once_per_epoch_in_any_history(first):
    """200 histories of one to four processes, with saves, kills and other batches."""
    for seed in range(first, first + 50):
        rows, shuffled, counted = history(seed)
        for epoch in range(len(counted) // rows):
            assert sorted(counted[epoch * rows : (epoch + 1) * rows]) == list(range(rows))
        alone = RowBatches(list(range(rows)), len(counted), seed=shuffled)
        assert next(alone).tolist() == counted  # the order does not depend on the history, either
        assert alone.epoch == len(counted) // rows


def test_rows_are_trees_and_orders_differ_by_epoch():
    source = [{"x": np.full(2, i), "y": i} for i in range(8)]
    batches = RowBatches(source, 8, seed=3)
    first, second = next(batches), next(batches)
    assert first["x"].shape == (8, 2)
    assert sorted(first["y"]) == sorted(second["y"]) == list(range(8))
    assert first["y"].tolist() != second["y"].tolist()


def test_positions_of_other_data_are_refused(monkeypatch):
    position = RowBatches(range(8), 4, seed=0).get_state()
    for other in (RowBatches(range(9), 4, seed=0), RowBatches(range(8), 4, seed=1)):
        with pytest.raises(ValueError, match="some rows would be repeated and others left out"):
            other.set_state(position)
    with pytest.raises(ValueError, match="not one of RowBatches"):
        RowBatches(range(8), 4).set_state(b"of grain")
    with pytest.raises(ValueError, match="each of 3 processes an equal part of a batch, and a batch has 4"):
        RowBatches(range(8), 4, part=(0, 3))
    with pytest.raises(ValueError, match="no rows to read"):
        RowBatches([], 4)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    of_part = shard_batches(Loader([8]), TX, rows="process").get_state()
    assert of_part == {"process": 0, "of": 2, "state": {"read": 0}}
    assert shard_batches(RowBatches(range(8), 4), TX, rows="process").get_state() == {"row": 0, "rows": 8, "seed": None}
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(ValueError, match="belongs to process 0 of 2, and this is process 0 of 4"):
        shard_batches(Loader([8]), TX, rows="process").set_state(of_part)


def test_a_run_restores_its_rows(tmp_path):
    rows = [np.full(3, i, np.float32) for i in range(20)]
    loss, params = (lambda p, x: jnp.mean((x @ p["w"]) ** 2)), {"w": jnp.ones((3, 4))}
    step, state, batches = TX.train_step(loss), TX.create(params), shard_batches(RowBatches(rows, 8, seed=1), TX)
    with Checkpointer(tmp_path) as checkpoints:
        state, _ = step(state, next(batches))
        checkpoints.save(state, data=batches)
        wanted = [np.asarray(next(batches)) for _ in range(4)]
        again = shard_batches(RowBatches(rows, 8, seed=1), TX)
        checkpoints.restore(TX.create(params), data=again)
    np.testing.assert_array_equal([np.asarray(next(again)) for _ in range(4)], wanted)
