"""Offloaded optimizer state: the same numbers as without, little of it on the device, and clear errors."""

import contextlib
import functools
import re
import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from conftest import fraction, mesh_of, quick_or_slow, shape
from models import OPTIMIZERS, awkward_batches, awkward_loss, awkward_params, floats_only
from parity import assert_parity, train_plain

from zerojax import Offload, Precision, Tuning, report, zero_shard
from zerojax.layout.leaf import Leaf, is_chunked
from zerojax.layout.padded import Padded
from zerojax.offload import host
from zerojax.offload.chunked import joined
from zerojax.offload.disk import BLOCK
from zerojax.placement.storage import leaf_sharding
from zerojax.streaming import chunk_programs
from zerojax.streaming import stream as streaming
from zerojax.streaming.chunk_programs import ProgramKey
from zerojax.streaming.first_state import checked_leaf
from zerojax.streaming.stores import IN_FLIGHT, state_buffer_bytes

# Bytes of a chunk: the larger leaves of the awkward model take several, the last one shorter.
CHUNK = 64
CLIPPED = {
    **OPTIMIZERS,
    "clip+adamw": lambda: optax.chain(
        floats_only(optax.clip_by_global_norm(0.1)), optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10))
    ),
}
WANTED = ("adamw", "adafactor", "lion", "clip+adamw", "muon")
QUICK = [("adamw", 3, "device", "disk", 8), ("adafactor", 3, "host", "disk", 8)]


def offload(tmp_path=None, **changes):
    where = {"optimizer": "host"} if tmp_path is None else {"optimizer": "disk", "path": tmp_path / "state"}
    return Offload(**{**where, "chunk_bytes": CHUNK, "update": "device", **changes})


def zero(tx, stage=3, count=8, *, offload=None, **options):
    return zero_shard(tx, stage=stage, mesh=mesh_of(count), tuning=Tuning(persist_below=20), offload=offload, **options)


@functools.cache
def plain(name):
    return train_plain(CLIPPED[name](), awkward_loss, awkward_params(), awkward_batches(3))


def chunks(state):
    return [x for x in jax.tree.leaves(state.opt_state, is_leaf=is_chunked) if is_chunked(x)]


def logical(state):
    """The optimizer's state on the host, offloaded or not."""
    leaves = jax.tree.leaves(state.opt_state, is_leaf=is_chunked)
    return [np.asarray(joined(x) if is_chunked(x) else x) for x in leaves]


def trained(tx, batches, **options):
    state, step = tx.create(awkward_params()), tx.train_step(awkward_loss, **options)
    for batch in batches:
        state, metrics = step(state, batch)
    return state, metrics


# The same numbers


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("name", "stage", "update", "where", "count"),
    quick_or_slow(fraction(2, WANTED, (1, 2, 3), ("device", "host"), ("host", "disk"), (8, 3, 1)), QUICK),
)
def test_every_mode_equals_plain_optax(name, stage, update, where, count, tmp_path):
    offloaded = offload(tmp_path if where == "disk" else None, update=update)
    tx = zero(CLIPPED[name](), stage, count, offload=offloaded)
    assert_parity(tx, awkward_loss, awkward_params(), awkward_batches(3), reference=plain(name))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("update", ["device", "host"])
def test_microbatches_and_master_weights_equal_those_without(stage, update):
    """The state of stage 2, whose master weights are in the optimizer's state too, is the reference."""
    batches, options = awkward_batches(3, 48), {"precision": Precision.bf16()}
    inner = floats_only(optax.adamw(1e-2))
    without, _ = trained(zero(inner, 2, **options), batches, accumulate=2)
    offloaded, _ = trained(zero(inner, stage, offload=offload(update=update), **options), batches, accumulate=2)
    assert jax.tree.structure(without.opt_state) != jax.tree.structure(offloaded.opt_state)
    for a, b, leaf in zip(logical(without), logical(offloaded), offloaded.plan.state, strict=True):
        # three steps of 1e-2 in weights that the loss sees in bfloat16: roundings there move Adam by parts of a step
        np.testing.assert_allclose(a.ravel()[: leaf.size], b.ravel()[: leaf.size], atol=2e-3, err_msg=leaf.path)


@pytest.mark.slow
@pytest.mark.parametrize(("where", "update"), [("host", "host"), ("disk", "device")])
def test_a_skipped_step_leaves_every_bit(where, update, tmp_path):
    offloaded = offload(tmp_path if where == "disk" else None, update=update)
    precision = Precision.fp16(loss_scale=2.0**10)
    tx = zero(floats_only(optax.adamw(1e-2)), offload=offloaded, precision=precision)
    step, state = tx.train_step(awkward_loss), tx.create(awkward_params())
    good, other = awkward_batches(2)
    state, _ = step(state, good)
    contents = lambda state: jax.tree.leaves((logical(state), jax.device_get(tx.unshard(state.params))))
    before = contents(state)
    state, metrics = step(state, jax.tree.map(lambda x: x * jnp.inf, other))
    assert bool(metrics["skipped"])
    chex.assert_trees_all_equal(contents(state), before)
    state, metrics = step(state, other)
    assert not bool(metrics["skipped"])
    assert int(state.step) == 2


@pytest.mark.slow
def test_the_state_of_the_hand_written_loop_is_the_same():
    """`init` and `update`, optax's own pair, within another program."""
    batches = awkward_batches(2)
    tx, streamed = zero(optax.adamw(1e-2), 3, offload=offload()), zero(optax.adamw(1e-2), 3, offload=offload())
    params = tx.shard(awkward_params())
    state, gradient = tx.init(params), tx.value_and_grad(awkward_loss)

    @jax.jit
    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for batch in batches:
        params, state = update(params, state, gradient(params, batch)[1])
    reference, _ = trained(streamed, batches)
    assert jax.tree.structure(state) == jax.tree.structure(reference.opt_state)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state)} == {"device", "pinned_host"}
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(reference.opt_state), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-6)  # other programs round otherwise


RANKS = {
    "scalar": jnp.float32(2),
    "vector": jnp.arange(1.0, 10.0),
    "matrix": jnp.linspace(-1, 1, 128).reshape(16, 8),
    "cube": jnp.full((8, 3, 4), 0.3),
    "empty": jnp.zeros((0, 4)),
}
ROWS = jnp.linspace(-1, 1, 32).reshape(8, 4)
# With their usual arguments, but for the learning rate. What optax cannot do on these leaves is not here.
NAMES = """adabelief adadelta adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion nadam nadamw
    noisy_sgd optimistic_gradient_descent radam rmsprop rprop sign_sgd sgd yogi""".split()
CONTRIB = "acprop ademamix dog dowg prodigy schedule_free_adamw schedule_free_sgd".split()
OTHERS = {name: lambda name=name: getattr(optax, name)(1e-2) for name in NAMES}
OTHERS |= {name: lambda name=name: getattr(optax.contrib, name)(1e-2) for name in CONTRIB}
OTHERS |= {
    "adaptive_grad_clip": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.adam(1e-2)),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "clip_by_block_rms": lambda: optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(1e-2, momentum=0.9)),
    "trust_ratio": lambda: optax.chain(optax.scale_by_adam(), optax.scale_by_trust_ratio(), optax.scale(-1e-2)),
    "param_block": lambda: optax.chain(optax.adam(1e-2), optax.scale_by_param_block_rms()),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "rss": lambda: optax.chain(optax.scale_by_rss(), optax.scale_by_stddev(), optax.scale(-1e-2)),
}


def rank_loss(params, rows):
    products = rows @ params["cube"].sum(1).T @ params["matrix"][:8] + params["vector"][:8]
    return jnp.mean(products**2) * params["scalar"] + jnp.sum(params["empty"])


PLACES = dict.fromkeys(OTHERS, "host"), dict.fromkeys(["adafactor", "multi_steps", "prodigy"], "disk")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "where"), [pair for place in PLACES for pair in place.items()])
def test_state_of_leaves_of_every_rank(name, where, mesh, tmp_path):
    offloaded = Offload(optimizer=where, path=tmp_path if where == "disk" else None)
    tx = zero_shard(OTHERS[name](), stage=3, mesh=mesh, tuning=Tuning(persist_below=0), offload=offloaded)
    assert_parity(tx, rank_loss, RANKS, [ROWS] * 2, atol=1e-5)


# What is where


@pytest.mark.parametrize("where", ["host", pytest.param("disk", marks=pytest.mark.slow)])
def test_no_optimizer_array_larger_than_a_chunk_is_on_the_device(where, tmp_path):
    before = {id(x) for x in jax.live_arrays()}
    tx = zero(optax.adamw(1e-2), 3, offload=offload(tmp_path if where == "disk" else None))
    params = tx.shard(awkward_params())

    def largest(state):
        """Bytes a device of the largest array there that is not a parameter."""
        mine = {id(x) for x in jax.tree.leaves((params, state.params))}
        found = [x for x in jax.live_arrays() if id(x) not in before | mine and x.sharding.memory_kind == "device"]
        return max(x.addressable_shards[0].data.nbytes for x in found)

    state = tx.create(params)
    assert len(chunks(state)) == 8  # four large leaves, two moments
    assert largest(state) <= CHUNK
    step, batch = tx.train_step(awkward_loss), awkward_batches(1)[0]
    before |= {id(x) for x in jax.tree.leaves(batch)}
    state, _ = step(state, batch)
    jax.block_until_ready(state)
    before |= {id(x) for x in jax.live_arrays() if x.ndim and x.shape[0] == 24}  # the batch, placed
    assert largest(state) <= CHUNK
    # on disk a node has the version of its files, a scalar, and nothing else
    assert {x.sharding.memory_kind for node in chunks(state) for x in node.chunks if x.ndim} <= {"pinned_host"}
    assert {x.ndim == 0 for node in chunks(state) for x in node.chunks} == {where == "disk"}


@pytest.mark.slow
def test_memory_of_the_update_does_not_grow_with_depth():
    """The same few programs update 4, 24 and 96 layers, and none has more than a few chunks of temporary memory."""
    found = {}
    for depth in (4, 24, 96):
        tx = zero(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), 3, offload=offload(chunk_bytes=512))
        state = tx.create([{"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}] * depth)
        step = tx.train_step(lambda params, batch: batch.mean())
        programs = [lowered.compile().memory_analysis() for lowered in step.lower_update(state)]
        found[depth] = sizes = [(m.argument_size_in_bytes, m.temp_size_in_bytes) for m in programs]
        chunks, leaf = 4 * 512, 64 * 64 * 4 // 8
        # gradient and parameter of one layer's shard, and chunks of two moments
        assert all(arguments <= 2 * leaf + chunks and temp <= 4 * chunks for arguments, temp in sizes)
    assert found[4] == found[24] == found[96]


def test_memory_of_the_update_of_stacked_layers_is_a_few_chunks():
    """One array of all layers, too, is updated chunk by chunk."""
    temps = {}
    for depth in (4, 96):
        tx = zero(optax.adamw(1e-3), 3, offload=offload(chunk_bytes=2048))
        state = tx.create({"w": jax.ShapeDtypeStruct((depth, 64, 64), jnp.float32)})
        (program,) = tx.train_step(lambda params, batch: batch.mean()).lower_update(state)
        memory = program.compile().memory_analysis()
        temps[depth] = memory.temp_size_in_bytes
        assert memory.alias_size_in_bytes >= depth * 64 * 64 * 4 // 8  # the parameter is written in place
    assert temps[96] <= temps[4] + 2048


def test_few_chunks_are_in_flight(monkeypatch):
    from zerojax.streaming import stores

    open_ones, most = [], []

    class Counted(stores.HostStateStore):
        def fetch(self, group, chunk, kind):
            open_ones.append((id(group), chunk))
            most.append(len(open_ones))
            return super().fetch(group, chunk, kind)

        def _complete(self, *, most):
            del open_ones[: max(0, len(self._writing) - most)]
            super()._complete(most=most)

    tx = zero(optax.adamw(1e-2), 3, offload=offload())
    state, step = tx.create(awkward_params()), tx.train_step(awkward_loss)
    monkeypatch.setattr(
        "zerojax.train.streamed_step.store_for", lambda config, plan, nodes: Counted(config, plan, nodes)
    )
    step(state, awkward_batches(1)[0])
    assert not open_ones
    assert len(most) >= 9
    assert 2 <= max(most) <= 6  # one updated, two fetched, three written


def test_chunks_of_one_device_are_updated_on_several_cores(monkeypatch):
    """Every update of a chunk waits until another one has begun: one after the other they would never end."""
    monkeypatch.setattr(streaming, "cores", lambda: 2)
    params = {"a": jnp.arange(32.0), "b": jnp.arange(32.0)}  # two chunks each
    loss = lambda params, batch: sum(jnp.sum(x**2) for x in params.values()) * jnp.mean(batch)
    tx = zero(optax.adam(0.1), count=1, offload=offload(update="host"))
    step, batches = tx.train_step(loss), [jnp.ones(8)] * 2
    meeting, compiled, met = threading.Barrier(2, timeout=60), streaming.StreamedUpdate.compiled, []

    def meets(self, key, *args):
        run = compiled(self, key, *args)

        def together(*args):
            met.append(meeting.wait())
            return run(*args)

        return together

    monkeypatch.setattr(streaming.StreamedUpdate, "compiled", meets)
    state = tx.create(params)
    for batch in batches:
        state, _ = step(state, batch)
    assert sorted(met) == [0, 0, 0, 0, 1, 1, 1, 1]
    plain, _ = train_plain(optax.adam(0.1), loss, params, batches)
    chex.assert_trees_all_close(state.params, plain, rtol=2e-6)  # other programs round otherwise


@pytest.mark.quick(2)
@pytest.mark.parametrize(("found", "threads"), [(1, 1), (8, 1), (16, 2), (17, 2), (128, 16), (800, 20)])
def test_the_cores_are_shared_by_the_devices(found, threads, mesh, monkeypatch):
    """As many chunks at a time as there are cores per device, and as their bytes allow; at least one."""
    monkeypatch.setattr(streaming, "cores", lambda: found)
    monkeypatch.setattr(streaming, "HOST_BYTES", 8 * 20 * offload(update="host").chunk_bytes)
    tx = zero(optax.adam(0.1), offload=offload(update="host"))
    plan = tx.create(jax.eval_shape(awkward_params)).plan
    assert streaming.StreamedUpdate(tx.config, plan).host_threads == threads


def test_what_is_shared_is_computed_once():
    """The norm of all gradients, the count and the schedule are in the resident program, not in the groups."""
    tx = zero(CLIPPED["clip+adamw"](), 3, offload=offload())
    plan = tx.create(jax.eval_shape(awkward_params)).plan
    partition = plan.analysis(tx.config).partition
    sums = lambda part: sum(eqn.primitive.name == "reduce_sum" for eqn in part.jaxpr.eqns)
    assert sums(partition.first.equations) > 0
    assert all(sums(group.equations) == 0 for group in partition.groups)
    assert len(partition.groups) == 4


@pytest.mark.slow
def test_a_gradient_is_freed_after_its_last_group(monkeypatch):
    update, left = streaming.UpdateQueue.update, []

    def recorded(queue):
        done = update(queue)
        left.append(dict(queue._inputs.grads))
        return done

    monkeypatch.setattr(streaming.UpdateQueue, "update", recorded)
    trained(zero(optax.adam(1e-2), 3, offload=offload()), awkward_batches(1))
    assert left == [{}]


@pytest.mark.slow
def test_parameters_that_need_each_others_state_are_one_group():
    def init(params):
        return jax.tree.map(jnp.zeros_like, params)

    def update(grads, state, params=None):
        del params
        state = jax.tree.map(lambda m, g: 0.9 * m + g, state, grads)
        norm = optax.tree.norm(state)  # of momenta, which are offloaded
        return jax.tree.map(lambda m: -0.01 * m / (1 + norm), state), state

    coupled = optax.GradientTransformation(init, update)
    params = {k: v for k, v in awkward_params().items() if k not in ("count", "empty")}
    loss = lambda p, b: awkward_loss({**p, "count": jnp.arange(4), "empty": jnp.zeros((0, 4))}, b)
    tx = zero(coupled, 3, offload=offload())
    plan = tx.create(jax.eval_shape(lambda: params)).plan
    (group,) = plan.analysis(tx.config).partition.groups
    assert group.chunking is None
    assert len(group.params) == 6
    assert_parity(tx, loss, params, awkward_batches(3), atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("fraction", [0.0, 0.4, 1.0])
def test_a_fraction_stays_on_the_device(fraction):
    tx = zero(optax.adamw(1e-2), 2, offload=offload(fraction=fraction))
    state = tx.create(awkward_params())
    offloaded = sum(node.leaf.local_bytes for node in chunks(state))
    large = [leaf.local_bytes for leaf in state.plan.state if leaf.kind == "sharded"]
    assert offloaded >= fraction * sum(large)
    assert offloaded <= fraction * sum(large) + 2 * max(large) * (0 < fraction < 1)
    if 0 < fraction < 1:
        assert 0 < len(chunks(state)) < 8
        assert_parity(tx, awkward_loss, awkward_params(), awkward_batches(3), reference=plain("adamw"))


def test_patterns_and_predicates_choose_leaves():
    for where in (("layer/*",), lambda path, leaf: path == "layer/w"):
        state = zero(optax.adamw(1e-2), 2, offload=offload(where=where)).create(jax.eval_shape(awkward_params))
        assert {node.leaf.path for node in chunks(state)} == {"[0].mu['layer']['w']", "[0].nu['layer']['w']"}


def test_plan_and_report_say_where_state_is(tmp_path):
    for where, offloaded in {"host": offload(), "disk": offload(tmp_path)}.items():
        state = zero(optax.adamw(1e-2), 2, offload=offloaded).create(awkward_params())
        found, (on_device, *others) = report(state), state.plan.groups.splitlines()
        there = {"host": found.host, "disk": found.disk}
        assert there.pop(where) == {"opt_state": sum(node.leaf.local_bytes for node in chunks(state))}
        assert not any(there.values())
        assert [next(iter(row.stored)) for row in found.rows if row.path == "[0].mu['layer']['w']"] == [where]
        assert re.search("one group with .* leaves of the state on the device$", on_device)
        text = {"host": "in host memory", "disk": "on disk"}[where]
        assert all(f"2 leaves of the state {text}" in line for line in others)
        assert state.plan.groups in str(state.plan)
        assert state.plan.groups in str(found)
    assert zero(optax.adam(1e-2), 3).create(awkward_params()).plan.groups == ""


def test_a_plain_state_is_adopted_into_chunks():
    params, tx = {"w": jnp.arange(128.0).reshape(16, 8)}, optax.adam(1e-2)
    expected = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)[1]
    state = zero(optax.adam(1e-2), offload=offload()).create(params, opt_state=expected)
    chex.assert_trees_all_equal(logical(state), [np.asarray(x) for x in jax.tree.leaves(expected)])


@pytest.mark.parametrize("as_array", [jnp.asarray, np.asarray])
def test_master_weights_of_an_adopted_state_are_the_parameters(as_array):
    params = {"w": as_array(np.linspace(0, 1, 119, dtype=np.float32).reshape(17, 7)), "n": as_array(np.arange(3))}
    tx = zero(optax.trace(0.1), offload=offload(), precision=Precision.bf16())
    state = tx.create(params, opt_state=optax.trace(0.1).init(params))
    np.testing.assert_array_equal(tx.unshard(tx.weights(state.params, state.opt_state))["w"], params["w"])


@pytest.mark.parametrize(
    ("given", "planned", "may_be_wider", "found"),
    [
        ("float32", "float32", False, "float32"),
        ("bfloat16", "float32", False, "float32"),
        ("float32", "bfloat16", True, "float32"),
        ("float32", "bfloat16", False, None),
        ("float16", "bfloat16", True, None),
        ("int32", "float32", True, None),
        ("float32", "int32", True, None),
        ("int8", "int32", True, None),
        ("int32", "int32", False, "int32"),
    ],
)
def test_an_adopted_leaf_keeps_its_values(given, planned, may_be_wider, found):
    leaf = Leaf("['w']", (3, 5), jnp.dtype(planned), ("data",), 4, kind="sharded", dim=0)
    error = r"opt_state\['w'\] is .*, which cannot represent every "
    for x in (np.ones((3, 5), given), jnp.ones((3, 5), given)):
        with pytest.raises(TypeError, match=error) if found is None else contextlib.nullcontext():
            kept = checked_leaf(x, leaf, may_be_wider=may_be_wider)
            assert (type(kept), kept.dtype) == (type(x), found)
    for x in (shape(3, 5), Padded(jnp.ones((4, 5)), (3, 5), 0)):
        with pytest.raises(ValueError, match="takes the logical arrays of a plain optax state"):
            checked_leaf(x, leaf, may_be_wider=may_be_wider)
    for dims, also in (((4, 5), "; it is in storage already"), ((5, 3), "")):
        with pytest.raises(ValueError, match=rf"\(logical shape\){also}\. Pass"):
            checked_leaf(np.ones(dims, given), leaf, may_be_wider=may_be_wider)


@pytest.mark.parametrize(
    ("stage", "tuning", "moves"),
    [(1, {}, True), (2, {}, True), (3, {}, False), (3, {"params_axis": "gpu"}, True)],
)
def test_updated_parameters_get_their_stored_layout(stage, tuning, moves):
    tuning = Tuning(persist_below=20, **tuning)
    tx = zero_shard(
        optax.trace(0.9), stage=stage, mesh=mesh_of(2, 4), axis=("host", "gpu"), tuning=tuning, offload=offload()
    )
    plan = tx.create({"v": shape(8, 24), "w": shape(16, 8)}).plan
    of_update = [
        jax.device_put(np.full(g.storage_shape, k), leaf_sharding(tx.config, g)) for k, g in enumerate(plan.grads)
    ]
    update = streaming.StreamedUpdate(tx.config, plan)
    for group in update.partition.groups:
        given = [of_update[i] for i in group.params]
        found = update.unsharded(group, list(given))
        assert [a is b for a, b in zip(found, given, strict=True)] == [not moves] * len(given)
        for i, x in zip(group.params, found, strict=True):
            assert x.sharding.is_equivalent_to(leaf_sharding(tx.config, plan.trained.params[i]), 2)
            np.testing.assert_array_equal(x, i)


def test_a_plain_state_may_have_leaves_that_are_not_trained():
    params = {"w": jnp.ones((16, 8)), "frozen": jnp.ones((8, 8))}
    tx, plain = zero(optax.trace(0.9), offload=offload(), trainable=lambda path, _: path == "w"), optax.trace(0.9)
    adopted = tx.create(params, opt_state=plain.init(params))
    assert [node.leaf.path for node in chunks(adopted)] == [".trace['w']"]
    with pytest.raises(ValueError, match="does not belong to these parameters"):
        tx.create(params, opt_state=plain.init({"w": params["w"], "other": params["w"]}))


@pytest.mark.parametrize(
    ("tx", "precision", "donated", "overwrites"),
    [
        (optax.trace(0.9), None, (0, 2), [0, 2]),
        (optax.adam(1e-2), Precision.bf16(), 2, [None, 2, 3, 4]),
    ],
)
def test_an_update_on_the_host_overwrites_arrays_of_its_types(monkeypatch, tx, precision, donated, overwrites):
    tx = zero(tx, offload=offload(update="host"), precision=precision)
    plan = tx.create({"w": shape(16, 8)}).plan
    (group,) = plan.analysis(tx.config).partition.groups
    key = ProgramKey.of(plan, group, 2)
    params, state, _, grads = key.shapes(tx.config)
    jitted = lambda run, donate_argnums, out_shardings: donate_argnums
    assert chunk_programs.update_on_host(tx.config, key, jitted) == donated
    monkeypatch.setattr(chunk_programs, "in_blocks", lambda *_, overwrites: overwrites)
    wide = [jax.ShapeDtypeStruct(x.shape, leaf.dtype) for x, leaf in zip(params, key.params, strict=True)]
    assert chunk_programs.update_in_blocks(key, wide, grads, state, [], []) == overwrites


def test_buffers_are_as_large_as_the_chunks_in_flight(tmp_path):
    tx = zero(optax.adam(0.1), offload=offload(tmp_path))
    plan = tx.create({"w": shape(16, 8)}).plan
    assert state_buffer_bytes(tx.config, plan) == 2 * IN_FLIGHT * 2 * BLOCK  # to read and to write two moments
    assert state_buffer_bytes(tx.config, zero(optax.sgd(0.1)).create({"w": shape(16, 8)}).plan) == 0


def test_a_disk_state_cannot_be_made_or_updated_in_a_program(tmp_path):
    tx = zero(optax.adamw(1e-2), 3, offload=offload(tmp_path))
    with pytest.raises(TypeError, match=r"outside of jax\.jit"):
        jax.jit(tx.init)(awkward_params())
    state = tx.create(awkward_params())
    with pytest.raises(TypeError, match=r"outside of jax\.jit"):
        tx.update(jax.tree.map(jnp.zeros_like, state.params), state.opt_state, state.params)


def test_a_state_offloaded_otherwise_is_refused():
    state = zero(optax.adamw(1e-2), 3).create(awkward_params())
    tx = zero(optax.adamw(1e-2), 3, offload=offload())
    with pytest.raises(ValueError, match=r"on the device, and this transformation has it offloaded in \d+ chunks"):
        tx.update(jax.tree.map(jnp.zeros_like, state.params), state.opt_state, state.params)


def test_too_little_host_memory_is_said_before_it_is_filled(monkeypatch):
    monkeypatch.setattr(host, "available_bytes", lambda: 1000)
    with pytest.raises(MemoryError, match=r"needs [\d.]+ k?B of host memory .* 1 kB is free"):
        zero(optax.adamw(1e-2), 3, offload=offload()).create(awkward_params())
