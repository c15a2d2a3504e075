"""With the loss in global view, any program gives on N devices what it gives on one."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of, quick_or_slow
from global_losses import weights
from jax.experimental import checkify, io_callback
from published_losses import TABLE

from zerojax import Tuning, zero_shard

STEPS = 2
COUNTS = (8, 3, 1)
PAIRS = [(1, 8), (3, 3), (3, 8)]  # of stage and count
OPTIMIZERS = {
    # with its usual epsilon, Adam makes a full update of a gradient that is zero but for rounding
    "adamw": lambda: optax.adamw(1e-2, eps=1e-3),
    "clip-adafactor": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adafactor(1e-2, 4)),
}
# Programs are compiled some at a time, since compiling is what takes the time.
DESIGN = tuple(name for name, program in TABLE.items() if program.loss.__module__ == "global_losses")
PUBLISHED = tuple(name for name in TABLE if name not in DESIGN)
GROUPS = [*(DESIGN[i::4] for i in range(4)), *(PUBLISHED[i::5] for i in range(5))]
ALONE = tuple(name for name, program in TABLE.items() if not program.rows_meet)


def grid():
    """The first groups at every stage, those from publications at one; counts, optimizers and scans in turn."""
    for i in range(len(GROUPS)):
        for stage in range(4):
            for j, count in enumerate(COUNTS):
                if (i < 4 or stage == (i % 3 if i % 2 else 3)) and j == (i + stage) % 3:
                    optimizer = ("adamw", "clip-adafactor")[(i + stage + j) % 2]
                    yield i, stage, count, optimizer, bool((i + (j > 0) + stage // 2) % 2)


def merged(names, mesh):
    """Several programs as one: the sum of their losses; parameters, mutable state, aux and all else are dicts."""

    def loss(params, mutable, batch, args):
        calls = {n: TABLE[n].call(mesh, params[n], mutable[n], batch[n], args[n]) for n in names}
        aux = {n: (value, aux) for n, (value, _, aux) in calls.items()}
        return sum(value for value, _, _ in calls.values()), {n: new for n, (_, new, _) in calls.items()}, aux

    return loss


def data_of(names, scanned):
    """`(params, mutable, batches, args)` of several programs as one."""
    of = lambda get: {n: get(TABLE[n]) for n in names}
    batches = [of(lambda program, i=i: program.batch(i)) for i in range(STEPS)]
    return of(lambda p: p.params(scanned=scanned)), of(lambda p: p.start()), batches, of(lambda p: p.args)


@functools.cache
def on_one_device(names, scanned, optimizer):
    """`(loss, gradients, aux, params, mutable)` after each step, by JAX and optax alone."""
    params, mutable, batches, args = data_of(names, scanned)
    tx, loss = OPTIMIZERS[optimizer](), merged(names, mesh_of(1))

    def with_aux(params, mutable, batch):
        value, mutable, aux = loss(params, mutable, batch, args)
        return value, (mutable, aux)

    @jax.jit
    def step(params, mutable, state, batch):
        (value, (mutable, aux)), grads = jax.value_and_grad(with_aux, has_aux=True)(params, mutable, batch)
        updates, state = tx.update(grads, state, params)
        return value, grads, aux, optax.apply_updates(params, updates), mutable, state

    state, found = tx.init(params), []
    for batch in batches:
        *result, state = step(params, mutable, state, batch)
        params, mutable = result[3:]
        found.append(jax.device_get(result))
    return found


def zero(stage, count, optimizer="adamw"):
    return zero_shard(
        OPTIMIZERS[optimizer](), stage=stage, mesh=mesh_of(count), view="global", tuning=Tuning(persist_below=50)
    )


def assert_same(found, expected, rounding=3e-6):
    """Floats are equal but for the rounding of sums in another order, all else exactly; shapes and types too."""
    found, expected = jax.device_get((found, expected))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, x), y in zip(jax.tree_util.tree_flatten_with_path(found)[0], jax.tree.leaves(expected), strict=True):
        name = jax.tree_util.keystr(path)
        assert (np.shape(x), x.dtype) == (np.shape(y), y.dtype), name
        # relative to the leaf's largest magnitude; jit with NamedSharding alone is off by up to 1e-6
        allowed = rounding * np.max(np.abs(y), initial=0) if np.issubdtype(y.dtype, np.floating) else 0
        np.testing.assert_allclose(x, y, rtol=0, atol=allowed, err_msg=name)


@pytest.mark.parametrize(("group", "stage", "count", "optimizer", "scanned"), quick_or_slow(list(grid()), []))
def test_a_step_is_that_of_one_device(group, stage, count, optimizer, scanned):
    names = GROUPS[group]
    params, mutable, batches, args = data_of(names, scanned)
    tx = zero(stage, count, optimizer)
    state = tx.create(params, mutable=mutable)
    step = tx.train_step(merged(names, mesh_of(count)), mutable=True, has_aux=True)
    for batch, (value, grads, aux, after, new) in zip(batches, on_one_device(names, scanned, optimizer), strict=True):
        state, metrics = step(state, batch, args)
        assert_same(metrics["aux"], aux)
        assert_same((metrics["loss"], metrics["grad_norm"]), (value, optax.tree.norm(grads)))
        assert_same(state.mutable, new)
        assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(state.mutable))
        assert_same(tx.unshard(state.params), after)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "count", "scanned"), quick_or_slow([(s, n, (s + n) % 2 == 0) for s, n in PAIRS], [(3, 3, True)])
)
def test_microbatches_of_rows_that_do_not_meet(stage, count, scanned):
    params, _, batches, args = data_of(ALONE, scanned)
    tx, loss = zero(stage, count), merged(ALONE, mesh_of(count))
    nothing = dict.fromkeys(ALONE)
    state, step = tx.create(params), tx.train_step(lambda p, b: loss(p, nothing, b, args)[0], accumulate=2)
    for batch, (value, grads, _, after, _) in zip(batches, on_one_device(ALONE, scanned, "adamw"), strict=True):
        state, metrics = step(state, batch)
        assert_same((metrics["loss"], metrics["grad_norm"]), (value, optax.tree.norm(grads)))
        assert_same(tx.unshard(state.params), after)


def watched(seen):
    """A loss that reports what it computes: of a parameter alone, of rows, under remat, in a scan and a cond."""

    def report(name):
        return lambda *values: seen.append((name, *(x.shape for x in values)))

    @jax.checkpoint
    def layer(x, w):
        jax.debug.callback(report("layer"), x, w)
        return jnp.tanh(x @ w), None

    def branch(x, w):
        jax.debug.callback(report("branch"), x.mean(), w)
        checkify.check(w[0, 0] > jnp.inf, "too small")
        return x @ w

    def loss(params, batch):
        jax.debug.callback(report("parameter"), params["embed"])
        jax.debug.callback(report("derived"), params["w"] @ params["w"].T)
        io_callback(report("io"), None, jax.lax.stop_gradient(params["w"]))
        jax.debug.inspect_array_sharding(params["embed"], callback=lambda _: seen.append(("compiled",)))
        x = batch["x"] @ params["embed"]
        jax.debug.callback(report("both"), x, params["embed"])
        x, _ = jax.lax.scan(layer, x, params["stack"])
        chosen = lambda x, w: jax.lax.cond(x.sum() > -jnp.inf, branch, lambda x, w: x, x, w)
        error, x = checkify.checkify(chosen)(layer(x, params["w"])[0], params["w"])
        return jnp.mean(x**2), error

    return loss


WATCHED = {"embed": (16, 24), "stack": (3, 24, 24), "w": (24, 24)}


@functools.cache
def watched_on_one_device():
    seen = []
    gradient = jax.jit(jax.value_and_grad(watched(seen), has_aux=True))
    ((_, error), _) = jax.block_until_ready(gradient(weights(WATCHED), TABLE["rows_alone"].batch(0)))
    jax.effects_barrier()
    return seen, error.get()


@pytest.mark.parametrize(("stage", "count"), quick_or_slow(PAIRS, [(3, 8)]))
def test_effects_happen_as_often_as_on_one_device(stage, count):
    seen, tx = [], zero(stage, count)
    gradient = tx.value_and_grad(watched(seen), has_aux=True)
    (_, error), _ = jax.block_until_ready(gradient(tx.shard(weights(WATCHED)), TABLE["rows_alone"].batch(0)))
    jax.effects_barrier()
    expected, message = watched_on_one_device()
    assert sorted(seen) == sorted(expected)
    assert "too small" in message
    assert error.get() == message


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_effects_happen_on_each_device_in_device_view(stage):
    seen = []
    tx = zero_shard(optax.sgd(0.1), stage=stage, mesh=mesh_of(3), view="device", tuning=Tuning(persist_below=50))
    gradient = tx.value_and_grad(lambda params, batch: watched(seen)(params, batch)[0])
    jax.block_until_ready(gradient(tx.shard(weights(WATCHED)), TABLE["rows_alone"].batch(0)))
    jax.effects_barrier()
    names = lambda reports: collections.Counter(name for name, *_ in reports)
    expected = names(watched_on_one_device()[0])
    assert names(seen) == {name: n if name == "compiled" else 3 * n for name, n in expected.items()}


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_model_names_axes_of_the_mesh_in_context(stage, mesh):
    """With a bare `PartitionSpec`, as it would under `jax.jit`."""
    program = TABLE["rows_alone"]
    params, batch, tx = program.params(scanned=False), program.batch(0), zero(stage, 8)

    def loss(params, batch):
        rows = jax.lax.with_sharding_constraint(batch["x"], jax.sharding.PartitionSpec("data"))
        return program.loss(params, {"x": rows})

    with jax.set_mesh(mesh):
        value, grads = tx.value_and_grad(loss)(tx.shard(params), batch)
    assert_same((value, tx.unshard(grads)), jax.jit(jax.value_and_grad(program.loss))(params, batch))
