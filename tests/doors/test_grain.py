"""The position of grain's `ElasticIterator` fits any number of processes. Those of its other loaders do not."""

import jax
import optax
import pytest
from conftest import mesh_of

from zerojax import zero_shard
from zerojax.data import shard_batches

grain = pytest.importorskip("grain", reason="needs the extra ports")
AT_ONCE = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
ROWS, TX = 23, zero_shard(optax.sgd(0.1), stage=3, mesh=mesh_of(8))


def elastic(index, count):
    part = grain.sharding.ShardOptions(shard_index=index, shard_count=count)
    rows = grain.MapDataset.range(ROWS).seed(3).shuffle().repeat()
    return iter(grain.experimental.ElasticIterator(rows, 16, part, read_options=AT_ONCE))


def test_the_position_of_an_elastic_iterator_fits_any_number_of_processes(monkeypatch):
    """Two processes save after one batch, and one process reads the next."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    loaders = [elastic(i, 2) for i in range(2)]
    [next(loader) for loader in loaders]
    found = [shard_batches(loader, TX, rows="process").get_state() for loader in loaders]
    assert found[0] == found[1] == {"global_next_index": 16}
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    batches = shard_batches(alone := elastic(0, 1), TX, rows="process")
    batches.set_state(found[0])
    expected = elastic(0, 1)
    next(expected)
    assert next(alone).tolist() == next(expected).tolist()


def test_positions_that_belong_to_their_processes_are_refused(monkeypatch):
    sampler = grain.samplers.SequentialSampler(ROWS)
    alike = {"operations": [grain.transforms.Batch(4)], "read_options": AT_ONCE}  # all processes read the same rows
    for make in (
        lambda: iter(grain.MapDataset.range(ROWS)[0::2].to_iter_dataset(AT_ONCE).batch(4)),
        lambda: iter(grain.DataLoader(data_source=range(ROWS), sampler=sampler, **alike)),
    ):
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        batches = shard_batches(make(), TX, rows="process", prefetch=0)
        found = batches.get_state()
        assert (found["process"], found["of"]) == (0, 2)
        again = shard_batches(make(), TX, rows="process")
        again.set_state(found)
        for count in (1, 4):
            monkeypatch.setattr(jax, "process_count", lambda count=count: count)
            with pytest.raises(ValueError, match=r"belongs to process 0 of 2.*ElasticIterator"):
                shard_batches(make(), TX, rows="process").set_state(found)
