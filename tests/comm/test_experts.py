"""Experts that stay divided over a data axis (`expert_axis`): not gathered or summed over it, exact at every stage."""

import functools
import re
import subprocess
import sys

import experts as example
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of, quick_or_slow
from flat_options import tuned
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from parity import assert_parity, train_plain

from zerojax import Offload, Tuning, Wire, collectives, estimate, report, zero_shard
from zerojax.checkpoint import Checkpointer
from zerojax.comm.collectives import Collectives

EXPERTS, WIDTH, HIDDEN = 16, 8, 32  # so that a device's experts are larger than all other parameters
BOTH = ("data", "expert")
# The mesh axes of the experts: all data axes, or one of two.
WAYS = {"all": ("data", ("data",)), "one": ("expert", BOTH)}


def mesh_for(way):
    return mesh_of(8) if way == "all" else mesh_of(2, 4, names=BOTH)


def parameters(experts=EXPERTS):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"dense": (WIDTH, WIDTH), "router": (WIDTH, experts)}
    shapes |= {"up": (experts, WIDTH, HIDDEN), "down": (experts, HIDDEN, WIDTH)}
    return {name: jax.random.normal(key, shape) / 3 for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def batches():
    return list(jax.random.normal(jax.random.key(1), (3, 32, WIDTH)))


def placed(way, params):
    axis = WAYS[way][0]
    spec = lambda name: P(axis) if name in ("up", "down") else P()
    return {name: jax.device_put(x, NamedSharding(mesh_for(way), spec(name))) for name, x in params.items()}


def all_experts(up, down, rows, chosen):
    """Every expert on every row, of which the chosen one counts."""
    inner = jax.nn.gelu(jnp.einsum("td,edf->etf", rows, up))
    return jnp.einsum("etf,efd,te->td", inner, down, jax.nn.one_hot(chosen, len(up)))


def sent(axis, up, down, rows, chosen):
    """Rows go to the device of their expert, in padded buffers, and back."""
    one = jax.nn.one_hot(chosen, lax.axis_size(axis) * len(up))
    buffers = jnp.einsum("te,td->etd", one, rows).reshape(-1, *up.shape[:1], *rows.shape)
    got = lax.all_to_all(buffers, axis, 0, 0)
    inner = jax.nn.gelu(jnp.einsum("setd,edf->setf", got, up))
    back = lax.all_to_all(jnp.einsum("setf,efd->setd", inner, down), axis, 0, 0)
    return jnp.einsum("te,etd->td", one, back.reshape(-1, *rows.shape))


def loss_of(way=None):
    apply = all_experts
    if way is not None:
        axis, rows = WAYS[way][0], P(WAYS[way][1])
        run = functools.partial(sent, axis)
        specs = (P(axis), P(axis), rows, rows)
        apply = jax.shard_map(run, mesh=mesh_for(way), in_specs=specs, out_specs=rows)

    def loss(params, x):
        h = jnp.tanh(x @ params["dense"])
        shares = jax.nn.softmax(h @ params["router"])
        found = apply(params["up"], params["down"], h, jnp.argmax(shares, -1))
        return jnp.mean(((h + found * jnp.max(shares, -1, keepdims=True)) @ params["dense"]) ** 2)

    return loss


# A step of Adam is a gradient divided by its own size: epsilon keeps it from growing where float32 rounds its sum to 0.
OPTIMIZER = optax.adam(1e-2, eps=1e-4)


def zero(way, stage, **options):
    axis, axes = WAYS[way]
    options = {"persist_below": 10, "expert_axis": axis} | options
    return zero_shard(OPTIMIZER, stage=stage, mesh=mesh_for(way), axis=axes, **tuned(**options))


@functools.cache
def on_one_device():
    return train_plain(OPTIMIZER, loss_of(), parameters(), batches())


def trained(way, tx, **options):
    state, step, found = tx.create(placed(way, parameters())), tx.train_step(loss_of(way), **options), []
    for x in batches():
        state, metrics = step(state, x)
        found.append(float(metrics["loss"]))
    return found, state, step


def assert_exact(tx, found, stored):
    params, losses = on_one_device()
    # Sums over devices are made in another order.
    np.testing.assert_allclose(found, losses, rtol=3e-6)
    same = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=5e-6)
    jax.tree.map(same, tx.unshard(stored), params)


def spec_of(x):
    return tuple(x.sharding.spec) + (None,) * (x.ndim - len(x.sharding.spec))


GRID = [(stage, way) for stage in range(4) for way in WAYS]


@pytest.mark.parametrize(("stage", "way"), quick_or_slow(GRID, [(3, "one")]))
def test_experts_stay_on_their_axis_and_train_as_on_one_device(stage, way):
    tx = zero(way, stage)
    found, state, step = trained(way, tx)
    assert_exact(tx, found, state.params)
    axis = WAYS[way][0]
    kept = ((stage, state.params), (stage + 2 * (stage > 0), state.opt_state[0].mu))
    for sharded, tree in kept:
        for x in (tree["up"], tree["down"]):
            assert spec_of(x)[0] == axis
            assert ("data" in spec_of(x)[1:]) == (way == "one" and sharded >= 3)  # the rest of the data axes
    devices = mesh_for(way).devices
    others = {tuple(d.id for d in devices[:, 0])} if way == "one" else set()
    moved = collectives(step.lower(state, batches()[0]).compile())
    size = EXPERTS * WIDTH * HIDDEN // tx.config.mesh.shape[axis]
    of_experts = [c for c in moved if c.elements >= size and c.kind != "all-to-all"]
    assert {c.group for c in of_experts} == others
    # Stages 1 and 2 gather once, after the update. On CPU, jax 0.10 merges the two gathers of stage 3.
    passes = 2 if stage == 3 and jax.__version_info__ >= (0, 11) else min(stage, 1)
    gathered = sum(c.elements * c.times for c in of_experts if c.kind == "all-gather")
    assert gathered == (2 * size * passes if way == "one" else 0)
    if stage:  # Nothing is all-reduced but norms and losses.
        reduced = sum(c.elements for c in of_experts if c.kind == "reduce-scatter")
        assert reduced == (2 * size if way == "one" else 0)
        assert max(c.elements for c in moved if c.kind == "all-reduce") < WIDTH


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "way", "accumulate", "update", "params"),
    [(2, "all", 2, None, None), (3, "one", 2, None, None), (2, "one", 1, "host", None), (3, "one", 1, None, "host")],
)
def test_in_microbatches_and_in_host_memory_too(stage, way, accumulate, update, params):
    where = {"optimizer": "host", "params": params, "update": update or "device"}
    offload = Offload(**where) if update or params else None
    tx = zero(way, stage, offload=offload)
    found, state, _ = trained(way, tx, accumulate=accumulate)
    assert_exact(tx, found, state.params)
    assert {x["up"].sharding.spec[0] for x in (state.opt_state[0].mu, state.params)} == {WAYS[way][0]}
    assert (state.params["up"].sharding.memory_kind == "pinned_host") == (params is not None)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "options"), [(2, {"reduce": "int8"}), (3, {"gather": "int8", "reduce": "int8"})])
def test_quantised_over_the_other_axes_alone(stage, options):
    tx = zero("one", stage, wire=Wire(**options, block=8))
    found, state, step = trained("one", tx)
    np.testing.assert_allclose(found, on_one_device()[1], rtol=1e-3)  # int8 has 7 bits and a sign
    moved = collectives(step.lower(state, batches()[0]).compile())
    narrow = [c for c in moved if c.dtype in ("u8", "s8") and c.elements > EXPERTS * WIDTH]
    kinds = {"all-to-all"} | ({"all-gather"} if stage == 3 else set())
    assert {(c.kind, c.group) for c in narrow} == {(kind, (0, 4)) for kind in kinds}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_on_explicit_axes_too(stage, monkeypatch):
    explicit = mesh_of(2, 4, names=BOTH, kind=AxisType.Explicit)
    monkeypatch.setitem(globals(), "mesh_for", lambda way: explicit)
    tx = zero("one", stage)
    found, state, _ = trained("one", tx)
    assert_exact(tx, found, state.params)
    assert spec_of(state.opt_state[0].mu["up"])[0] == "expert"
    assert spec_of(state.params["up"])[0] == "expert"


def test_an_evaluation_gathers_experts_over_the_other_axes_alone(monkeypatch):
    over, gather = {}, Collectives.all_gather

    def recorded(comm, shards, leaves, **options):
        over.update((leaf.path.split()[0], leaf.axes) for leaf in leaves)
        return gather(comm, shards, leaves, **options)

    monkeypatch.setattr(Collectives, "all_gather", recorded)
    tx = zero("one", 3)
    params = tx.create(placed("one", parameters())).params
    found = tx.eval_step(loss_of("one"))(params, batches()[0])
    np.testing.assert_allclose(found, on_one_device()[1][0], rtol=3e-6)  # sums are made in another order
    assert over["['up']"] == over["['down']"] == ("data",)
    assert over["['dense']"] == BOTH


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"view": "device"}, "in full"),
        ({"expert_axis": "model"}, "no rows are divided"),
        ({"params_axis": "expert", "stage": 3}, "cannot be combined"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options, words):
    with pytest.raises(ValueError, match=f"expert_axis.*{words}|{words}.*expert_axis"):
        zero("one", **{"stage": 2} | options)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_axis_that_no_parameter_names_is_refused(stage):
    with pytest.raises(ValueError, match=r"no parameter's sharding.*out_shardings"):
        zero("one", stage).create(parameters())


def test_without_the_option_a_sharding_over_a_data_axis_says_nothing():
    """Arrays of another run are sharded over its data axes, and are not meant to stay so."""
    state = zero("one", 2, expert_axis=None).create(placed("one", parameters()))
    assert state.params["up"].sharding.is_fully_replicated


@pytest.mark.parametrize("way", WAYS)
def test_an_estimate_and_a_report_count_experts_once(way):
    tx, size = zero(way, 3), sum(x.nbytes for x in jax.tree.leaves(parameters()))
    state = tx.create(placed(way, parameters()))
    assert report(state).bytes["params"] == size / 8
    if way == "all":
        mesh = jax.sharding.AbstractMesh((8,), ("data",))
        shapes = jax.eval_shape(parameters)
        over = {name: NamedSharding(mesh, P("data")) for name in ("up", "down")}
        shapes |= {name: jax.ShapeDtypeStruct(shapes[name].shape, jnp.float32, sharding=over[name]) for name in over}
        options = {"devices": 8, "stages": (1, 3), "tuning": Tuning(persist_below=10)}
        apart, whole = (estimate(shapes, tx=OPTIMIZER, **options, **more) for more in ({"expert_axis": "data"}, {}))
        dense = WIDTH * (WIDTH + EXPERTS) * 4
        assert [row.params for row in apart.rows] == [dense + (size - dense) / 8, size / 8]
        assert [row.opt_state for row in apart.rows] == [row.opt_state for row in whole.rows]
        assert [row.sent for row in apart.rows] == [dense * 7 / 8 * 2, dense * 7 / 8 * 3]
        assert whole[1].params == size


SIZES = 16, 3, 8


@pytest.mark.slow
def test_layers_that_are_scanned_and_under_remat():
    """The example drops no token, so it equals one device, although each device sorts its own tokens."""
    mesh = mesh_for("one")
    tx = zero_shard(OPTIMIZER, stage=3, mesh=mesh, axis=BOTH, expert_axis="expert", tuning=Tuning(persist_below=100))
    windows = np.random.default_rng(0).integers(256, size=(2, 16, 9), dtype=np.int32)
    params, loss = example.placed("parallel", mesh, *SIZES), example.loss_of("parallel", mesh)
    gathered = example.loss_of("gathered", None)
    plain = train_plain(OPTIMIZER, gathered, example.init(jax.random.key(0), *SIZES), windows)
    assert_parity(tx, loss, params, windows, reference=plain, atol=1e-5)
    moved = collectives(tx.train_step(loss).lower(tx.create(params), windows[0]).compile())
    of_experts = [c for c in moved if re.search(r"zerojax_\w+\[.*\b(up|down)\b", c.op_name)]
    assert {c.group for c in of_experts} == {(0, 4)}


@pytest.mark.slow
def test_the_script_trains():
    command = [sys.executable, example.__file__, "parallel", "--steps", "8"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900).stdout
    first, last = map(float, re.search(r"loss ([\d.]+) at step 1, ([\d.]+) at step 8", printed).groups())
    assert last < first - 0.5
    assert len(re.findall(r"P\w*\(None, 'expert', None, 'data'\)", printed)) == 2


@pytest.mark.slow
def test_a_checkpoint_of_experts_restores_on_another_mesh(tmp_path):
    tx = zero("one", 1)
    _, state, _ = trained("one", tx)
    with Checkpointer(tmp_path, every=1) as checkpoints:
        checkpoints.save(state)
    other = zero("all", 3)
    restored = Checkpointer(tmp_path).restore(other.create(placed("all", parameters()))).state
    jax.tree.map(np.testing.assert_array_equal, other.unshard(restored.params), tx.unshard(state.params))
    assert spec_of(restored.params["up"])[0] == "data"
    with pytest.raises(ValueError, match=r"expert_axis= gives axis 'data'"):  # the state's experts name another axis
        tx.reshard(state, to=zero("all", 3), donate=False)
    moved = tx.reshard(state, to=zero("one", 3))
    np.testing.assert_array_equal(moved.params["up"], restored.params["up"])
    assert spec_of(moved.opt_state[0].mu["up"])[0] == "expert"


@pytest.mark.slow
def test_a_loop_of_ones_own_knows_the_experts_of_a_state():
    """Stored, a dense parameter may have the sharding of an expert; under `jax.jit`, no array shows its sharding."""
    tx = zero("one", 3)
    params = tx.shard(placed("one", parameters()))
    state = tx.init(params)

    @jax.jit
    def step(params, state, x):
        value, grads = tx.value_and_grad(loss_of("one"))(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    found = []
    for x in batches():
        params, state, value = step(params, state, x)
        found.append(float(value))
    assert_exact(tx, found, params)
    assert all(spec_of(params[name])[0] == "expert" for name in ("up", "down"))
    for plan in tx.config.plans.values():
        assert {leaf.path for leaf in plan.layout.params if any(leaf.others)} == {"['up']", "['down']"}
