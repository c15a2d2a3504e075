"""Updates that multiply matrices, computed by owners: exact, no matrix whole on every device, and who computes what."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from conftest import mesh_of, quick_or_slow
from flat_options import tuned
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from matrix_optimizers import muon, shampoo, soap
from parity import assert_parity, train_plain

import zerojax
from zerojax import Offload, Precision, collectives, zero_shard
from zerojax.optim import owned as owned_module
from zerojax.optim.owned import Costs

ALIKE = 7


def params():
    """Seven matrices alike, one transposed, a stack of five, one whose dims divide by nothing, and a vector."""
    keys = iter(jax.random.split(jax.random.key(0), ALIKE + 4))
    normal = lambda *shape: jax.random.normal(next(keys), shape) / 4
    alike = [normal(16, 24) for _ in range(ALIKE)]
    return {"alike": alike, "back": normal(24, 16), "stack": normal(5, 16, 24), "odd": normal(13, 17), "v": normal(24)}


def loss(params, rows):
    """A mean over rows, which uses every matrix."""
    several = jnp.tanh(rows @ jnp.concatenate(params["alike"], 1)).reshape(-1, ALIKE, 24).sum(1) + params["v"]
    several += jnp.tanh(jnp.einsum("ri,lij->rj", rows, params["stack"]))
    return jnp.mean(jnp.tanh(jnp.tanh(several @ params["back"])[:, :13] @ params["odd"]) ** 2)


def batches():
    return [jax.random.normal(jax.random.key(i), (24, 16)) for i in range(3)]


def labels(params):
    return jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "other", params)


MATRIX_OPTIMIZERS = {
    "muon": muon,
    "adaptive": lambda: muon(
        preconditioning="aol", adaptive=True, weight_decay=0.1
    ),  # a cond in a scan; a sum of a leaf
    "shampoo": lambda: shampoo(1e-2),
    "soap": lambda: soap(1e-2),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), muon(), optax.clip_by_global_norm(0.05)),
    "masked": lambda: optax.masked(muon(), lambda params: jax.tree.map(lambda x: x.shape != (13, 17), params)),
    "by-label": lambda: optax.multi_transform({"matrix": optax.contrib.muon(1e-2), "other": optax.lamb(1e-2)}, labels),
    "injected": lambda: optax.inject_hyperparams(optax.contrib.muon)(optax.linear_schedule(1e-2, 1e-3, 3)),
    "multi-steps": lambda: optax.MultiSteps(muon(), 2).gradient_transformation(),
}
# Whose leaves are updated in one branch together.
NONE_OWNED = ("multi-steps",)


@functools.cache
def reference(name):
    return train_plain(MATRIX_OPTIMIZERS[name](), loss, params(), batches())


def owned(name, stage, mesh, **options):
    options = {"persist_below": 50, "matrix_updates": "owner", **options}
    return zero_shard(MATRIX_OPTIMIZERS[name](), stage=stage, mesh=mesh, **tuned(**options))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage", "count"),
    quick_or_slow(
        [
            *((name, 1 + i % 3, (8, 3)[i % 2]) for i, name in enumerate(MATRIX_OPTIMIZERS)),
            ("muon", 2, 3),
            ("muon", 3, 1),
        ],
        [("muon", 3, 8)],
    ),
)
def test_updates_by_owners_equal_plain_optax(name, stage, count):
    tx = owned(name, stage, mesh_of(count))
    assert_parity(tx, loss, params(), batches(), reference=reference(name))
    assert bool(found_by(tx, jax.eval_shape(params)).owned) == (count > 1 and name not in NONE_OWNED)


def test_one_exchange_each_way_brings_matrices_to_owners_and_results_back():
    tx = owned("muon", 3, mesh_of(8))
    shapes = tx.create(jax.eval_shape(params))
    found = collectives(jax.jit(tx.update).lower(shapes.params, shapes.opt_state, shapes.params).compile())
    kinds = 4  # the seven alike, their transpose, the stack, the odd one
    assert len(found.of("all-to-all")) == 2 * kinds
    whole = [c for c in found.of("all-gather") + found.of("all-reduce") if c.elements >= 13 * 13]
    assert not whole


def found_by(tx, params):
    return tx.create(params).plan.analysis(tx.config).owned


def owned_of(shapes, tx=None, **options):
    """What owners compute of the update of parameters of some shapes on eight devices."""
    tx = zero_shard(tx or muon(), stage=3, mesh=mesh_of(8), **tuned(**options))
    return found_by(tx, {str(i): jax.ShapeDtypeStruct(shape, jnp.float32) for i, shape in enumerate(shapes)})


def test_the_cheaper_way_is_counted():
    """Eight matrices, one each; ten: what two slots would cost; one alone: all divide it; a huge one: all must."""
    (eight,) = owned_of([(2048, 8192)] * 8).owned
    assert (eight.matrices, eight.within) == (8, 1)
    assert eight.seconds < 0.7 * eight.seconds_sharded
    alone = owned_of([(8192, 2048)])
    assert not alone.owned
    assert "cheaper" in alone.left[0]
    two = owned_of([(2048, 8192)] * 2).owned[0]
    assert two.within == 4
    ten = owned_of([(2048, 8192)] * 10)
    assert ten.owned[0].matrices == 8
    assert "evenly" in ten.left[8]
    huge = owned_of([(2**15, 2**14)] * 8, matrix_updates="owner")
    assert all(each.within > 1 for each in huge.owned)
    stacked = owned_of([(24, 1024, 4096)]).owned[0]
    assert (stacked.matrices, stacked.within) == (24, 1)


def test_owners_of_tiny_matrices_wait_for_two_collectives():
    """One brings the matrices to their owners, and one brings the results back. Their bytes take almost no time."""
    (each,) = owned_of([(16, 16)] * 8, matrix_updates="owner", persist_below=50).owned
    assert each.within == 1
    assert each.seconds == pytest.approx(2 * owned_module.LATENCY, rel=0.1)


def test_flops_are_counted_along_the_dim_that_is_sharded():
    def newton_schulz(x):
        gram = x @ x.T
        return x + gram @ gram @ x

    jaxpr = jax.make_jaxpr(newton_schulz)(jnp.zeros((8, 32))).jaxpr
    work = Costs()
    assert work.follow(jaxpr, [1]) == [1]
    assert work.divided == 2 * (2 * 8 * 8 * 32)  # the Gram matrix and the last product
    assert work.repeated == 2 * 8**3
    assert (work.summed, work.sums) == (4 * 8 * 8, 1)


def cheap_branch_sums(x):
    """The cheaper branch of a cond sums over the stack."""
    costly = lambda y: y @ y.transpose(0, 2, 1) @ y
    y = x @ x.transpose(0, 2, 1) @ x
    return jax.lax.cond(jnp.zeros(()) > 1, costly, lambda y: y / jnp.sum(jnp.abs(y), 0, keepdims=True), y)


@pytest.mark.parametrize(
    ("stacked", "matrices"),
    [
        (lambda x: x @ x.transpose(0, 2, 1) @ x, 6),
        (lambda x: jax.vmap(lambda m: m @ m.T @ m / (jnp.linalg.norm(m) + 1))(x), 6),
        (lambda x: x / jnp.linalg.norm(x) @ x.transpose(0, 2, 1) @ x, 1),
        (lambda x: (x - x.mean(0)) @ x.transpose(0, 2, 1) @ x, 1),
        (lambda x: x[::-1] @ x.transpose(0, 2, 1) @ x, 1),
        (lambda x: jnp.cumsum(x, 0) @ x.transpose(0, 2, 1) @ x, 1),
        (lambda x: x.reshape(12, 8, 24).reshape(6, 16, 24) @ x.transpose(0, 2, 1) @ x, 1),
        (lambda x: jax.lax.scan(lambda c, m: (c + m, c @ m.T @ m), x[0], x)[1], 1),
        (lambda x: x @ x.transpose(0, 2, 1) * jnp.arange(len(x))[:, None, None] @ x, 1),
        (cheap_branch_sums, 1),
    ],
    ids="batch vmap norm_of_all mean reversed cumulated reshaped scanned a_factor_for_each cheap_branch".split(),
)
def test_a_stack_is_owned_layer_by_layer_only_if_its_layers_do_not_meet(stacked, matrices):
    scale = optax.stateless(lambda grads, _: jax.tree.map(lambda x: -1e-2 * stacked(x), grads))
    found = owned_of([(6, 16, 24)], scale, persist_below=50, matrix_updates="owner")
    assert [each.matrices for each in found.owned] == [matrices]


@pytest.mark.slow
def test_the_state_is_where_it_was():
    """What owners compute with is brought and returned: checkpoints, offload and other ways find the same state."""
    ways = [owned("shampoo", 1, mesh_of(8), matrix_updates=how) for how in ("owner", "sharded")]
    assert ways[0].shardings(params()) == ways[1].shardings(params())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes", "kind", "options"),
    [
        ("shampoo", ("host", "gpu"), AxisType.Auto, {"shard_axis": "gpu"}),
        ("muon", ("host", "gpu"), AxisType.Auto, {"params_axis": "gpu"}),
        ("muon", ("data",), AxisType.Auto, {"view": "device"}),
        ("adaptive", ("data",), AxisType.Explicit, {}),
    ],
    ids=["hsdp", "inside", "device view", "a mesh in the context"],
)
def test_owners_on_other_meshes_and_in_device_view(name, axes, kind, options):
    mesh = mesh_of(2, 4, kind=kind) if len(axes) > 1 else mesh_of(8, kind=kind)
    with jax.set_mesh(mesh) if kind == AxisType.Explicit else contextlib.nullcontext():
        tx = owned(name, 3, mesh, axis=axes, **options)
        assert found_by(tx, jax.eval_shape(params)).owned
        assert_parity(tx, loss, params(), batches(), reference=reference(name))


@pytest.mark.slow
def test_what_another_axis_shards_stays_as_it_is_and_the_plan_says_so():
    mesh = mesh_of(4, 2, names=("data", "model"))
    tx = owned("muon", 3, mesh)
    given = params()
    given["alike"] = [jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "model"))) for x in given["alike"]]
    plan = tx.create(given).plan
    assert sorted(each.matrices for each in plan.analysis(tx.config).owned.owned) == [1, 1, 5]
    assert "other mesh axes" in str(plan)


@pytest.mark.slow
def test_master_weights_and_microbatches():
    """In bfloat16 an update may differ by its rounding where the two ways sum in another order."""
    ends, rounding = [], 2e-2
    for how in ("owner", "sharded"):
        tx = owned("muon", 1, mesh_of(8), matrix_updates=how, precision=Precision.bf16())
        state, step = tx.create(params()), tx.train_step(loss, accumulate=3)
        for batch in batches():
            state, _ = step(state, batch)
        ends.append(tx.unshard(state.params))
    for a, b in zip(*map(jax.tree.leaves, ends), strict=True):
        assert jnp.allclose(a, b, rtol=rounding, atol=rounding * jnp.abs(b).max())


def test_the_report_names_them():
    state = owned("muon", 3, mesh_of(8)).create(params())
    text = str(zerojax.report(state))
    assert "7 matrices by 8 owners, one device each" in text
    assert text.count("instead of") == 4
    assert dataclasses.replace(state.plan, matrices="") != state.plan


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "where", "count"),
    quick_or_slow(
        [
            *((name, ("host", "disk")[i % 2], (8, 3)[i // 2 % 2]) for i, name in enumerate(MATRIX_OPTIMIZERS)),
            ("muon", "disk", 8),
            ("shampoo", "disk", 8),
        ],
        [("muon", "host", 8)],
    ),
)
def test_offloaded_state_is_updated_by_owners_and_equals_plain_optax(name, where, count, tmp_path):
    path = tmp_path if where == "disk" else None
    tx = owned(name, 3, mesh_of(count), offload=Offload(optimizer=where, path=path, update="device"))
    plan = tx.create(jax.eval_shape(params)).plan
    assert plan.offloaded
    assert bool(plan.analysis(tx.config).owned.owned) == (name not in NONE_OWNED)
    assert_parity(tx, loss, params(), batches(), reference=reference(name))


def test_owners_of_offloaded_state_take_as_many_matrices_as_a_chunk_has_room_for():
    matrices = [(16, 24)] * 11
    one = 16 * 24 * 4 // 8
    several = owned_of(matrices, matrix_updates="owner", offload=Offload(optimizer="host"), persist_below=50)
    assert [each.matrices for each in several.owned] == [8, 3]
    few = Offload(optimizer="host", chunk_bytes=4 * one)
    pairs = owned_of(matrices, matrix_updates="owner", offload=few, persist_below=50)
    assert [each.matrices for each in pairs.owned] == [4, 4, 3]


@pytest.mark.slow
def test_chunk_programs_of_offloaded_state_exchange_matrices_as_the_whole_update_does():
    tx = owned("muon", 3, mesh_of(8), offload=Offload(optimizer="host", update="device"))
    programs = tx.train_step(loss).lower_update(tx.create(jax.eval_shape(params)))
    found = [collectives(program.compile()) for program in programs]
    assert sorted(len(each.of("all-to-all")) for each in found) == [2, 2, 2, 2]  # the vector stays on the device
    assert not [c for each in found for c in each.of("all-gather") + each.of("all-reduce") if c.elements >= 13 * 13]
