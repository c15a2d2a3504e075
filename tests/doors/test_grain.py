"""Positions of grain's loaders fit any number of processes where a count of rows describes them."""

import collections
import json

import jax
import numpy as np
import optax
import pytest
from conftest import mesh_of

from zerojax import zero_shard
from zerojax.data import RowBatches, common_position, own_position, shard_batches

grain = pytest.importorskip("grain", reason="needs the extra ports")
AT_ONCE = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
ROWS, TX = 23, zero_shard(optax.sgd(0.1), stage=3, mesh=mesh_of(8))


def data_loader(index, count, batch, sampler=None):
    every = grain.samplers.IndexSampler(ROWS, grain.sharding.NoSharding(), shuffle=True, seed=3)
    part = grain.sharding.ShardOptions(shard_index=index, shard_count=count)
    batches = [grain.transforms.Batch(batch // count, drop_remainder=True)]
    source = grain.sources.RangeDataSource(0, ROWS, 1)
    options = {"operations": batches, "worker_count": 0, "shard_options": part, "read_options": AT_ONCE}
    return iter(grain.DataLoader(data_source=source, sampler=sampler or every, **options))


def elastic(index, count, batch):
    part = grain.sharding.ShardOptions(shard_index=index, shard_count=count)
    rows = grain.MapDataset.range(ROWS).seed(3).shuffle().repeat()
    return iter(grain.experimental.ElasticIterator(rows, batch, part, read_options=AT_ONCE))


def own_loop(index, count, batch):
    rows = grain.MapDataset.range(ROWS).seed(3).shuffle()
    return RowBatches(rows, batch, part=(index, count))


@pytest.mark.parametrize("made", [data_loader, elastic, own_loop])
def test_each_row_is_read_once_per_epoch_in_any_history(made):
    """Saves, kills, one to four processes, and other batches."""
    for seed in range(8):
        rng = np.random.default_rng(seed)
        position, counted = None, collections.Counter()
        while counted.total() < 3 * ROWS:
            count, batch = int(rng.integers(1, 5)), 12 * int(rng.integers(1, 3))
            readers = [made(i, count, batch) for i in range(count)]
            for i, reader in enumerate(readers):
                if position is not None:
                    reader.set_state(own_position(position, i, count))
            for _ in range(int(rng.integers(0, 4))):
                counted.update(np.concatenate([next(reader) for reader in readers]).tolist())
            found = [common_position(one, one.get_state(), i, count) for i, one in enumerate(readers)]
            position = json.loads(json.dumps(found[0]))  # a save
            assert position
            assert all(one == position for one in found)
            for _ in range(int(rng.integers(0, 3))):
                [next(reader) for reader in readers]  # steps that a kill loses
        whole, rest = divmod(counted.total(), ROWS)
        assert collections.Counter(counted.values()) == {whole: ROWS - rest} | ({whole + 1: rest} if rest else {})


def test_positions_that_belong_to_their_processes_are_refused(monkeypatch):
    part = grain.samplers.IndexSampler(ROWS, grain.sharding.ShardOptions(0, 2), shuffle=True, seed=3)
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
    # Each process has a sampler of its own rows, and says so.
    first = data_loader(0, 2, 8, sampler=part)
    with pytest.raises(ValueError, match="Sampler in checkpoint does not match"):
        data_loader(0, 1, 8).set_state(own_position(common_position(first, first.get_state(), 0, 2), 0, 1))
    position = common_position(one := data_loader(0, 3, 12), next(one) is None or one.get_state(), 0, 3)
    assert position["row"] == 12
    every = shard_batches(data_loader(0, 1, 8), TX, rows="global")  # a process that reads the rows of all processes
    every.set_state(position)
    assert json.loads(every.get_state())["last_seen_indices"] == {"0": 11}
    with pytest.raises(ValueError, match="cannot go on after 12 rows on 5 processes with 1 workers"):
        own_position(position, 0, 5)
    with pytest.raises(ValueError, match="Row 1 of the data set is None"):
        next(RowBatches(grain.MapDataset.range(8).filter(lambda x: x != 1), 4, part=(0, 1)))


def test_workers_have_a_common_position_when_each_had_its_turn():
    """These are positions of two processes with two workers each, as grain 0.2.18 returns them."""
    position = lambda seen, last: json.dumps(
        {"version": 2, "last_seen_indices": seen, "last_worker_index": last, "worker_count": 2, "sampler": "every"}
    ).encode()
    ends = position({"0": 12, "1": 14}, -1), position({"0": 13, "1": 15}, -1)
    found = [common_position(None, one, i, 2) for i, one in enumerate(ends)]
    assert [one["row"] for one in found] == [16, 16]
    assert [json.loads(own_position(found[0], i, 2)) for i in range(2)] == [json.loads(one) for one in ends]
    assert json.loads(own_position(found[0], 1, 4))["last_seen_indices"] == {"0": 9, "1": 13}
    for last in (-1, 0):
        assert common_position(None, position({"0": 12, "1": 10}, last), 0, 2) is None  # worker 1 has read less
    assert common_position(None, position({"0": 12, "1": 14}, 0), 0, 2) is None  # worker 1 is the next one
    with pytest.raises(ValueError, match="cannot go on after 16 rows on 3 processes with 2 workers: each of these 6"):
        own_position(found[0], 0, 3)
