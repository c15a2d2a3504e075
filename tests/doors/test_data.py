"""Batches of any loader, placed ahead of their steps."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of

from zerojax import Offload, Tuning, zero_shard
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


def test_a_remainder_may_have_weight_0():
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
        ({"x": object()}, {}, TypeError, r"batch\['x'\] is a object, of which JAX has no arrays"),
        ([np.ones(8), np.array([None] * 8)], {}, TypeError, r"batch\[1\] has the type object"),
        ({"ids": ["a"] * 8}, {}, TypeError, r"batch\['ids'\]\[0\] is a str"),
        ({"ids": np.array(["a"] * 8)}, {}, TypeError, r"batch\['ids'\] has the type <U1"),
        (None, {}, ValueError, "A batch has no arrays in it: the loader gave None"),
        ({"x": [], "y": ()}, {"remainder": "pad"}, ValueError, "A batch has no arrays in it"),
        (np.ones(8), {"rows": "local"}, ValueError, "rows is one of None, 'global', 'process'"),
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


def test_the_position_of_other_processes_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    of_part = shard_batches(Loader([8]), TX, rows="process").get_state()
    assert of_part == {"process": 0, "of": 2, "state": {"read": 0}}
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(ValueError, match="belongs to process 0 of 2, and this is process 0 of 4"):
        shard_batches(Loader([8]), TX, rows="process").set_state(of_part)


def aligned(shape, dtype):
    """Zeros at an address that JAX shares with its arrays on a CPU."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + 64, np.uint8)
    first = -memory.ctypes.data % 64
    return memory[first : first + size].view(dtype).reshape(shape)


@pytest.mark.parametrize("kind", ["numpy", "view", "array", "dlpack", "pad"])
def test_a_loader_may_reuse_its_memory(kind):
    buffer = aligned((16, 32), np.float32)
    wrapped = {"array": lambda: Tensor(buffer, "array"), "dlpack": lambda: Tensor(buffer, "dlpack")}
    wrapped["view"] = lambda: np.broadcast_to(buffer, buffer.shape)  # read-only, of memory that is written

    def loader():
        for number in range(6):
            buffer[:] = number
            yield {"x": wrapped.get(kind, lambda: buffer)()}

    batches = shard_batches(loader(), TX, remainder="pad" if kind == "pad" else "drop")
    assert [int(np.max((batch[0] if kind == "pad" else batch)["x"])) for batch in batches] == [0, 1, 2, 3, 4, 5]


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", [3, 2, 1, 0])
@pytest.mark.parametrize("offload", [None, Offload(optimizer="host", params="host")])
def test_arrays_of_the_caller_may_change_after_a_call(stage, offload):
    """Parameters, states and batches are copied, as the device computes with them after the call has returned."""
    if offload and stage != 3:
        pytest.skip("parameters in host memory need stage 3")
    tx = zero_shard(
        optax.sgd(0.0, momentum=0.9), stage=stage, mesh=mesh_of(8), tuning=Tuning(persist_below=0), offload=offload
    )
    given = [aligned((16, 32), np.float32) for _ in range(3)]
    params, mutable, rows = {"w": given[0]}, {"m": given[1]}, given[2]
    loss = lambda p, mutable, x: (jnp.mean((x @ p["w"].T) ** 2), {"m": mutable["m"] + 0})
    state, stored = tx.create(params, mutable=mutable), tx.shard(params)
    moved = None if offload else tx.create(jax.tree.map(jnp.asarray, params), mutable=mutable)
    step, evaluate = tx.train_step(loss, mutable=True), tx.eval_step(lambda p, x: jnp.sum(p["w"] + x))
    state, metrics = step(state, rows)
    gradient = tx.value_and_grad(lambda p, x: jnp.sum(p["w"] * x.mean(0)))(state.params, rows)
    value = evaluate(state.params, rows)
    odd = evaluate(state.params, rows[:1])
    for x in given:
        x[:] = 7
    for found in (tx.unshard(state.params), tx.unshard(stored), state.mutable, metrics["loss"], gradient, value, odd):
        assert not any(np.any(x) for x in jax.tree.leaves(jax.device_get(found)))
    if moved is not None:
        assert not np.any(moved.mutable["m"])


def test_only_batches_that_nothing_divides_are_dropped():
    with pytest.warns(UserWarning, match=r"dropped a batch of 5 rows.*16 devices times microbatches.*: 41 rows so far"):
        found = [len(x["y"]) for x in shard_batches(Loader([32, 24, 16, 12, 32, 5, 16, 48, 0]), TX, accumulate=2)]
    assert found == [32, 16, 32, 16, 48]
    assert [len(x["y"]) for x in shard_batches(Loader([32, 24, 16, 32, 8, 40]), TX)] == [32, 24, 16, 32, 8, 40]
