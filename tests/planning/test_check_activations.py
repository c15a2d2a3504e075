"""The contract checker sees what the compiler moves beside parameters, and checks whole steps."""

import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import quick_or_slow, shape
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from zerojax import Tuning, check, collectives, zero_shard
from zerojax.inspect.compiled_collectives import operations
from zerojax.planning.check import check_program
from zerojax.train.arguments import place_batch

WIDTH, ROWS, TIME = 64, 64, 16
LAYERS, STACK = [shape(WIDTH, WIDTH)] * 4, shape(4, WIDTH, WIDTH)
BATCH, SEQUENCES = shape(ROWS, WIDTH), shape(ROWS, TIME, WIDTH)


def zero(mesh, stage, **options):
    return zero_shard(optax.adam(1e-3), stage=stage, mesh=mesh, tuning=Tuning(persist_below=1024), **options)


def row_major(p, x):
    for w in p:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


def vmapped(p, x, wrap=lambda layer: layer):
    def one(x):
        for w in p:
            x = wrap(lambda w, x: jnp.tanh(w @ x))(w, x)
        return x

    return (jax.vmap(one)(x) ** 2).mean()


def rows_last(p, x):
    x = x.T
    for w in p:
        x = jnp.tanh(w @ x)
    return (x**2).mean()


def scanned(p, x):
    return (lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p)[0] ** 2).mean()


MODELS = {
    "row-major": (LAYERS, row_major, BATCH),
    "vmapped": (LAYERS, vmapped, BATCH),
    "vmapped under remat": (LAYERS, lambda p, x: vmapped(p, x, jax.checkpoint), BATCH),
    "rows on the last dim": (LAYERS, rows_last, BATCH),
    "time-major": (STACK, lambda p, x: scanned(p, jnp.moveaxis(x, 1, 0)), SEQUENCES),
    "crops before rows": (STACK, lambda p, x: scanned(p, jnp.stack([x, x[:, ::-1]])), SEQUENCES),
}
QUICK = [("row-major", 2), ("vmapped under remat", 3)]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "stage"), quick_or_slow([(name, s) for name in MODELS for s in (2, 3)], QUICK))
def test_a_program_has_findings_if_and_only_if_it_moves_more_than_device_view(name, stage, mesh):
    """There each device has its own rows, and nothing but parameters can move; which is the remedy."""
    params, loss, batch = MODELS[name]

    def sent(tx):
        compiled = jax.jit(tx.value_and_grad(loss)).lower(tx.shard(params), batch).compile()
        return collectives(compiled).moved(unknown_once=True).sent

    tx, device = zero(mesh, stage), zero(mesh, stage, view="device")
    found = check(tx.train_step(loss), tx.create(params), batch)
    assert found.ok == (sent(tx) < 1.05 * sent(device)), found
    assert found.ok or ("test_check_activations.py:" in str(found) and 'view="device"' in str(found))
    assert name == "row-major" or check(device.train_step(loss), device.create(params), batch).ok


def one_layer(p, x, change=lambda x: x):
    return (change(jnp.tanh(x @ p[0])) ** 2).mean()


def laid_out(mesh, *spec):
    return lambda x: lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


MOVED = {
    "all-gather of f32[64,64] along dim 0": lambda mesh: laid_out(mesh),
    "all-to-all": lambda mesh: laid_out(mesh, None, "data"),
    "collective-permute": lambda mesh: lambda x: x * jnp.roll(x, ROWS // 16, 0),
}


@pytest.mark.parametrize("kind", MOVED)
def test_what_the_compiler_moves_is_named_by_kind_and_line_unless_plain_jit_moves_it(kind, mesh):
    tx, moving = zero(mesh, 2), lambda p, x: one_layer(p, x, MOVED[kind](mesh))
    state = tx.create(LAYERS[:1])
    compiled = tx.train_step(moving).lower(state, BATCH).compile()

    def held_against(loss):
        return check_program(compiled, tx.train_step(loss), state, place_batch(tx.config, BATCH), ())

    still, beyond = held_against(one_layer), held_against(moving)
    assert still.activations_formula == 0 < still.activations
    assert kind in str(still)
    assert "test_check_activations.py:" in str(still)
    assert still.activations == beyond.activations < 1.5 * beyond.activations_formula


def test_a_sum_over_rows_that_were_lost_is_named(mesh):
    """Some of the rows, in an order that the batch chooses: the devices divide no dim that is summed."""
    reordered = lambda p, batch: one_layer(p, jnp.take(batch[0], jnp.argsort(batch[1])[3:], axis=0))
    batch = BATCH, jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    tx = zero(mesh, 2)
    found = str(check(tx.train_step(reordered), tx.create(LAYERS[:1]), batch))
    assert "all-reduced by the compiler" in found


def test_products_of_all_rows_on_every_device_are_named_although_plain_jit_repeats_them(mesh):
    """The rows are the inner factor of a merged dim, which the compiler cannot divide."""
    merged = lambda p, pairs: row_major(p, jnp.swapaxes(pairs, 0, 1).reshape(-1, WIDTH))
    tx, pairs = zero(mesh, 3), shape(2 * mesh.size, 2, WIDTH)
    state = tx.create(LAYERS[:2])
    found = check(tx.train_step(merged), state, pairs)
    of_all_rows = 2 * (2 * 2 * mesh.size) * WIDTH**2
    assert found.flops_formula == 5 * of_all_rows  # plain jit: two products forward and three backward, on all rows
    assert "each device computes" in found.verdict
    assert "its share is" in found.verdict
    divided = lambda p, pairs: row_major(p, pairs.reshape(-1, WIDTH))
    assert check(tx.train_step(divided), state, pairs).ok


def test_independent_tables_are_gathered_one_after_the_other_or_named(mesh):
    names, rows = [f"t{i}" for i in range(6)], jax.ShapeDtypeStruct((8, 6), jnp.int32)
    apart = lambda p, ids: sum((p[name][ids[:, i]] ** 2).mean() for i, name in enumerate(names))

    def stacked(p, ids):
        return lax.scan(lambda total, one: (total + (one[0][one[1]] ** 2).mean(), None), 0.0, (p, ids.T))[0]

    tx = zero(mesh, 3)
    found = check(tx.train_step(apart), tx.create(dict.fromkeys(names, shape(4096, 8))), rows)
    merges = jax.__version_info__ < (0, 11)  # these gathers
    assert found.ok != merges == (found.peak >= 0.7 * 2**20), found
    assert found.ok or "beyond plain jit's activations, the shards and three layers. Gathered: ['t0']" in str(found)
    assert check(tx.train_step(stacked), tx.create(shape(6, 4096, 8)), rows).ok


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "accumulate"), quick_or_slow([(s, a) for s in range(4) for a in (1, 2)], [(3, 1)]))
def test_a_whole_step_keeps_its_contract(stage, accumulate, mesh):
    def loss(p, mutable, x):
        return row_major(p["layers"], x + p["b"]), mutable + 1, x.max()

    params = {"layers": LAYERS, "b": shape(WIDTH)}
    tx = zero(mesh, stage)
    step = tx.train_step(loss, accumulate=accumulate, mutable=True, has_aux=True)
    found = check(step, tx.create(params, mutable=shape()), BATCH)
    assert found.ok, found
    size = 4 * WIDTH**2 + WIDTH
    assert found.reduced == pytest.approx(found.reduced_formula, rel=0.01)
    assert found.reduced_formula == size * (accumulate if stage > 1 else 1)
    assert found.update == 0
    if stage < 3:
        assert found.gathered == found.gathered_formula == (size if stage else 0)


def test_an_update_that_joins_elements_of_several_devices_is_named(mesh):
    def sort(updates, state, params=None):
        return jax.tree.map(lambda x: jnp.sort(x, axis=0) + jnp.sort(x, axis=1), updates), state

    sorting = optax.GradientTransformation(lambda params: optax.EmptyState(), sort)
    tx = zero_shard(sorting, stage=2, mesh=mesh, tuning=Tuning(persist_below=1024))
    found = check(tx.train_step(row_major), tx.create(LAYERS), BATCH)
    assert found.activations == 0
    assert "moved for the optimizer's update" in str(found)


def test_what_check_takes_is_said(mesh):
    tx = zero(mesh, 2)
    with pytest.raises(TypeError, match=r"needs its ZeroState, not list.*tx\.create"):
        check(tx.train_step(row_major), LAYERS, BATCH)
    with pytest.raises(TypeError, match=r"\(step, state, batch\).*not ZeroTransformation"):
        check(tx, row_major, LAYERS)


def test_names_that_the_compiler_joined_are_told_apart():
    label = "zerojax_reduce_scatter[['a:b'][0] model.py:7]"
    prefix = "jit(step)/transpose(jvp())"
    assert operations(f"{prefix}/{label}/psum") == [f"{prefix}/{label}/psum"]
    joined = operations(f"{prefix}/(jvp(vmap())/mul:{label}/psum:while/body/transpose(jvp())/add)")
    assert joined == [
        f"{prefix}/jvp(vmap())/mul",
        f"{prefix}/{label}/psum",
        f"{prefix}/while/body/transpose(jvp())/add",
    ]
    assert operations("") == [""]
