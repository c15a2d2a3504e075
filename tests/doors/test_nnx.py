"""Flax NNX keeps its meaning: what a loss is given and closes over is updated as `nnx.value_and_grad` updates it."""

import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of, quick_or_slow
from flax import nnx
from jax.sharding import AxisType

import zerojax.flax_nnx
from zerojax import Offload, Padded, Tuning, zero_shard

STAGES = [0, 3]
BATCH = {"x": jax.random.normal(jax.random.key(0), (16, 8)), "y": jnp.arange(16) % 4}


class Model(nnx.Module):
    """Batch statistics, dropout, an average of its own and an intermediate value."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(8, 32, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.drop = nnx.Dropout(0.5)
        self.outer = nnx.Linear(32, 8, rngs=rngs)
        self.average = nnx.Variable(jnp.zeros(()))
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x, rngs):
        x = self.norm(self.inner(x))
        self.average[...] = 0.9 * self.average[...] + 0.1 * x.max()
        self.calls[...] += 1
        self.hidden = nnx.Intermediate(x.mean())
        return self.outer(self.drop(nnx.relu(x), rngs=rngs))


def loss_fn(model, rngs, batch, metrics, scale):
    logits = model(batch["x"], rngs)
    losses = optax.softmax_cross_entropy_with_integer_labels(scale * logits, batch["y"])
    metrics.update(loss=losses, logits=logits, labels=batch["y"])
    return losses.mean()


def zero(stage, **options):
    return zero_shard(optax.adam(1e-2), stage=stage, mesh=mesh_of(8), tuning=Tuning(persist_below=20), **options)


def metrics():
    return nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())


def trained(tx, grad, kind=nnx.Optimizer, *, shards=True):
    model, rngs, seen = Model(nnx.Rngs(0)), nnx.Rngs(1), metrics()
    if shards:
        zerojax.flax_nnx.shard_module(model, tx)
    optimizer = kind(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, rngs, seen):
        loss, grads = grad(model, rngs, BATCH, seen, 2.0)
        optimizer.update(*([grads] if kind is nnx.ModelAndOptimizer else [model, grads]))
        return loss, nnx.pop(model, nnx.Intermediate)

    losses = [step(model, optimizer, rngs, seen) for _ in range(2)]
    return jax.device_get(
        (losses, seen.compute(), nnx.to_pure_dict(nnx.state((model, seen, rngs), nnx.Not(nnx.RngKey))))
    )


@functools.cache
def plainly_trained():
    return trained(optax.adam(1e-2), nnx.value_and_grad(loss_fn), shards=False)


def assert_close(a, b):
    """Sums over the rows are taken in another order."""
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), a, b)


@pytest.mark.parametrize(
    ("stage", "kind"),
    quick_or_slow(list(itertools.product(STAGES, [nnx.Optimizer, nnx.ModelAndOptimizer])), [(3, nnx.Optimizer)]),
)
def test_what_a_loss_updates_is_updated_as_by_nnx(stage, kind):
    """Dropout of an `nnx.Rngs` that is an argument, statistics, metrics, other variables and those it makes."""
    tx = zero(stage)
    assert_close(trained(tx, zerojax.flax_nnx.value_and_grad(tx, loss_fn), kind), plainly_trained())


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_runs_unchanged_around_a_gradient_of_nnx(stage):
    """Of a module that is whole. GSPMD sees all rows, so that BatchNorm's numbers stay."""
    assert_close(trained(zero(stage), nnx.value_and_grad(loss_fn), shards=False), plainly_trained())


@pytest.mark.slow
def test_in_tree_mode():
    tx = zero(3)
    with nnx.set_graph_mode(False):
        found = trained(tx, zerojax.flax_nnx.value_and_grad(tx, loss_fn))
    assert_close(found, plainly_trained())


def pair_loss(first, second, batch):
    return jnp.mean(second(jnp.tanh(first(batch))) ** 2)


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", STAGES[::-1])
@pytest.mark.parametrize("argnums", [1, (1, nnx.DiffState(0, nnx.PathContains("kernel")))])
def test_argnums_choose_as_in_nnx(stage, argnums):
    tx, first, second = zero(stage), nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, 8, rngs=nnx.Rngs(1))
    expected = nnx.value_and_grad(pair_loss, argnums=argnums)(first, second, BATCH["x"])
    for module in (first, second):
        zerojax.flax_nnx.shard_module(module, tx)
    found = zerojax.flax_nnx.value_and_grad(tx, pair_loss, argnums=argnums)(first, second, BATCH["x"])
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert_close(found, expected)


def test_microbatches_update_one_after_the_other():
    tx, accumulate = zero(3), 2

    def total(model, batch, rngs, seen):
        logits = model.outer(model.drop(nnx.relu(model.inner(batch["x"])), rngs=rngs))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        model.calls[...] += 1
        seen.update(loss=losses, logits=logits, labels=batch["y"])
        return (losses.sum(), jnp.float32(len(losses))), logits[0, 0]

    model, rngs, seen = Model(nnx.Rngs(0)), nnx.Rngs(1), metrics()
    zerojax.flax_nnx.shard_module(model, tx)
    grad = zerojax.flax_nnx.value_and_grad(tx, total, has_aux=True, weighted=True, accumulate=accumulate)
    (loss, _), _ = grad(model, BATCH, rngs, seen)
    np.testing.assert_allclose(seen.compute()["loss"], loss, rtol=1e-5)
    assert seen.loss.count == 16
    assert (model.calls[...], rngs.default.count[...]) == (accumulate, accumulate)


def test_an_assignment_that_would_be_lost_is_refused():
    model, tx = Model(nnx.Rngs(0)), zero(3)
    zerojax.flax_nnx.shard_module(model, tx)

    def assigns(model, batch):
        model.outer.bias[...] = jnp.zeros(8)
        return jnp.mean(model.inner(batch))

    with pytest.raises(TypeError, match=r"assigns to outer\.bias of argument 0, a Param"):
        zerojax.flax_nnx.value_and_grad(tx, assigns)(model, BATCH["x"])
    with pytest.raises(ValueError, match="without a batch"):
        zerojax.flax_nnx.value_and_grad(tx, assigns)(model, nnx.Rngs(0))


def of_arrays(tx, params):
    return tx.value_and_grad(lambda model, x: jnp.mean(model(x)))(params, BATCH["x"])


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (lambda tx, model: zerojax.flax_nnx.value_and_grad(loss_fn, tx), r"value_and_grad\(tx, loss_fn\) .* Swap"),
        (lambda tx, model: zerojax.flax_nnx.shard_module(tx, model), r"shard_module\(module, tx\) .* Swap"),
        (lambda tx, model: zerojax.flax_nnx.init_module(tx, Model, 0), r"a ModuleMeta as tx.* Swap"),
        (lambda tx, model: zerojax.flax_nnx.shard_module(model, tx.config.tx), r"Pass tx = zero_shard\(\.\.\.\) as tx"),
        (lambda tx, model: of_arrays(tx, nnx.Dropout(0.1, rngs=nnx.Rngs(0))), r"module of NNX, use zerojax\.flax_nnx"),
        (lambda tx, model: of_arrays(tx, nnx.state(model, nnx.Param)), r"parameters, but a State .* nnx\.merge"),
    ],
)
def test_a_mistaken_call_says_which_to_make(call, remedy):
    with pytest.raises(TypeError, match=remedy):
        call(zero(3), Model(nnx.Rngs(0)))


def test_in_device_view_integers_of_a_device_are_refused():
    model, tx = Model(nnx.Rngs(0)), zero(3, view="device")
    zerojax.flax_nnx.shard_module(model, tx)
    grad = zerojax.flax_nnx.value_and_grad(tx, lambda model, batch, rngs: model(batch, rngs).mean())
    with pytest.raises(TypeError, match=r"int32 to calls of argument 0, a Variable"):
        grad(model, BATCH["x"], nnx.Rngs(0))


class Annotated(nnx.Module):
    """Kernels over both axes, over the other one, and one that is small, so flat in the optimizer."""

    def __init__(self, rngs, annotated=True):
        normal = nnx.initializers.normal()
        init = lambda *names: nnx.with_partitioning(normal, names) if annotated else normal
        self.up = nnx.Linear(8, 64, kernel_init=init("data", "model"), rngs=rngs)
        self.down = nnx.Linear(64, 16, kernel_init=init("model", None), rngs=rngs)
        self.small = nnx.Linear(16, 2, kernel_init=init("data", None), rngs=rngs)

    def __call__(self, x):
        return self.small(self.down(nnx.relu(self.up(x))))


def annotated_loss(model, batch):
    return jnp.mean(model(batch) ** 2)


def trained_steps(model, tx=None):
    """The optimizer after three steps of a module, sharded where there is a `tx`, and their losses."""
    grad = nnx.value_and_grad(annotated_loss)
    if tx:
        zerojax.flax_nnx.shard_module(model, tx)
        grad = zerojax.flax_nnx.value_and_grad(tx, annotated_loss)
    optimizer = nnx.Optimizer(model, tx or optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = grad(model, batch)
        optimizer.update(model, grads)
        return loss

    return optimizer, [float(step(model, optimizer, BATCH["x"])) for _ in range(3)]


@functools.cache
def plain_annotated_losses():
    return trained_steps(Annotated(nnx.Rngs(0), annotated=False))[1]


@pytest.mark.slow
def test_offloaded_moments_stay_offloaded_in_an_optimizer_of_nnx():
    """After each update, it has their chunks in nested dicts."""
    tx = zero(3, offload=Offload(optimizer="host", chunk_bytes=48))
    optimizer, losses = trained_steps(Annotated(nnx.Rngs(0), annotated=False), tx)
    assert_close(losses, plain_annotated_losses())
    assert {x.sharding.memory_kind for x in jax.tree.leaves(optimizer.opt_state)} == {"device", "pinned_host"}


def specs_of(layer, *nodes):
    """Of its kernel and the kernel's moments."""
    kernels = nnx.state(nodes, lambda path, _: layer in path and "kernel" in path)
    return {(*x.sharding.spec, None)[:2] for x in jax.tree.leaves(kernels)}


class Odd(nnx.Module):
    """None of its dims divides by 8 but one of 8 inputs."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(8, 9, rngs=rngs)
        self.outer = nnx.Param(jnp.ones((9, 3)))

    def __call__(self, x):
        return self.inner(x) @ self.outer


@pytest.mark.slow
def test_to_the_code_of_a_module_padded_parameters_are_logical():
    tx = zero_shard(optax.adam(1e-2), stage=3, mesh=mesh_of(8), tuning=Tuning(persist_below=1))
    plain, model = Odd(nnx.Rngs(0)), Odd(nnx.Rngs(0))
    expected, found = trained_steps(plain)[1], trained_steps(model, tx)[1]
    assert isinstance(model.outer.get_value(), Padded)
    assert_close(found, expected)
    assert_close(annotated_loss(model, BATCH["x"]), annotated_loss(plain, BATCH["x"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "kind"),
    quick_or_slow(list(itertools.product(STAGES, [AxisType.Auto, AxisType.Explicit])), [(3, AxisType.Auto)]),
)
def test_annotations_survive_the_optimizer(stage, kind):
    mesh = mesh_of(4, 2, names=("data", "model"), kind=kind)
    tx = zero_shard(optax.adam(1e-2), stage=stage, mesh=mesh, tuning=Tuning(persist_below=100))
    with jax.set_mesh(mesh):
        model = Annotated(nnx.Rngs(0))
        optimizer, losses = trained_steps(model, tx)
    assert_close(losses, plain_annotated_losses())
    assert specs_of("up", model, optimizer) == {("data" if stage else None, "model")}
    assert specs_of("down", model, optimizer) == {("model", "data") if stage else ("model", None)}


@pytest.mark.slow
def test_a_module_is_born_sharded():
    mesh = mesh_of(4, 2, names=("data", "model"))
    tx = zero_shard(optax.adam(1e-2), stage=3, mesh=mesh, tuning=Tuning(persist_below=100))
    model = zerojax.flax_nnx.init_module(lambda key: Annotated(nnx.Rngs(key)), tx, jax.random.key(0))
    assert specs_of("up", model) == {("data", "model")}
    variables = lambda model: nnx.to_pure_dict(nnx.state(model))
    assert_close(variables(model), variables(Annotated(nnx.Rngs(0), annotated=False)))


def test_the_report_knows_parameters_and_moments_of_modules():
    model, tx = Model(nnx.Rngs(0)), zero(3)
    zerojax.flax_nnx.shard_module(model, tx)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for tree in (model, optimizer), nnx.state((model, optimizer)), optimizer:
        found = zerojax.report(tree, tx)
        assert not found.misplaced
        assert sum("flat: small" in row.note for row in found.rows) == 2  # both moments of a bias


def test_a_module_is_born_with_its_other_variables():
    model = zerojax.flax_nnx.init_module(lambda key: Model(nnx.Rngs(key)), zero(3), jax.random.key(0))
    variables = lambda model: nnx.to_pure_dict(nnx.state(model))
    assert_close(variables(model), variables(Model(nnx.Rngs(0))))


def adapted(rngs):
    layer = lambda rows, columns: nnx.LoRALinear(rows, columns, lora_rank=4, rngs=rngs)
    return nnx.Sequential(layer(16, 64), nnx.tanh, layer(64, 16))


@pytest.mark.slow
def test_a_frozen_base_is_sharded_as_the_warning_says():
    """`wrt=nnx.LoRAParam` alone leaves the base whole on every device."""
    loss, rows = lambda model, x: jnp.mean((model(x) - 1) ** 2), jax.random.normal(jax.random.key(1), (16, 16))
    options = {"stage": 3, "mesh": mesh_of(8), "tuning": Tuning(persist_below=1)}
    whole, init = zero_shard(optax.sgd(0.1), **options), lambda key: adapted(nnx.Rngs(key))
    with warnings.catch_warnings(action="error"):  # so nothing is sharded
        with pytest.raises(
            UserWarning, match=r"leaves .*kB of other parameters whole.*trainable=lambda path, leaf: \"lora"
        ):
            zerojax.flax_nnx.shard_module(adapted(nnx.Rngs(0)), whole, wrt=nnx.LoRAParam)
        with pytest.raises(UserWarning, match="kB of other parameters whole"):
            zerojax.flax_nnx.init_module(init, whole, jax.random.key(0), wrt=nnx.LoRAParam)
    tx = zero_shard(optax.sgd(0.1), trainable=lambda path, leaf: "lora" in path, **options)
    model, plain = adapted(nnx.Rngs(0)), adapted(nnx.Rngs(0))
    zerojax.flax_nnx.shard_module(model, tx)
    optimizer, expected = (
        nnx.Optimizer(model, tx, wrt=nnx.Param),
        nnx.Optimizer(plain, optax.sgd(0.1), wrt=nnx.LoRAParam),
    )
    for _ in range(2):
        value, grads = zerojax.flax_nnx.value_and_grad(tx, loss)(model, rows)
        optimizer.update(model, grads)
        wanted, plain_grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(plain, rows)
        expected.update(plain, plain_grads)
        np.testing.assert_allclose(value, wanted, rtol=1e-5)  # float32, in another order
    for index in (0, 2):  # after the update, too, each device has an eighth
        (kernel,) = jax.tree.leaves(nnx.state(model)["layers"][index]["kernel"])
        assert {x.data.nbytes for x in kernel.addressable_shards} == {16 * 64 * 4 // 8}
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    jax.tree.map(same, tx.unshard(nnx.state(model, nnx.Param)), nnx.state(plain, nnx.Param))
