"""A caller's mistake is named early: what was found, what is required, what to do."""

import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import mesh_of
from flat_options import tuned
from jax.sharding import AxisType

from zerojax import Offload, report, zero_shard
from zerojax.checkpoint import Checkpointer

PARAMS = {"w": jnp.ones((16, 8))}
ROWS = jnp.ones((8, 16))


def mean_square(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def zero(stage=3, inner=None, **options):
    return zero_shard(inner or optax.adamw(1e-3), stage=stage, **tuned(**{"persist_below": 10, **options}))


@pytest.fixture(scope="module")
def tx():
    return zero()


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_that_are_not_the_states(stage):
    tx = zero(stage)
    state = tx.init(PARAMS)
    with pytest.raises(ValueError, match=r"opt_state\[0\]\.mu\['w'\] is float32\[16, 8\], and float32\[32, 8\]"):
        tx.update({"w": jnp.ones((32, 8))}, state, {"w": jnp.ones((32, 8))})
    narrow, other = {"w": PARAMS["w"].astype(jnp.bfloat16)}, {"v": PARAMS["w"]}
    with pytest.raises(ValueError, match=r"mu\['w'\] is bfloat16.*float32"):
        tx.update(PARAMS, tx.init(narrow), PARAMS)
    with pytest.raises(ValueError, match=r"lacks \[0\]\.mu\['v'\]"):
        tx.update(other, state, other)
    with pytest.raises(ValueError, match=r"mu\['w'\] is float32, and init made it bfloat16"):
        tx.train_step(mean_square)(tx.create(narrow).replace(opt_state=state), ROWS)
    offloading = zero(stage, offload=Offload(optimizer="host"))
    with pytest.raises(TypeError, match=r"wider than their parameters make opt_state\[0\].mu\['w'\] float32, and"):
        offloading.update(PARAMS, offloading.init(narrow), narrow)
    with pytest.raises(ValueError, match=r"is on the device, and this transformation has it offloaded in 1 chunks"):
        offloading.update(PARAMS, state, PARAMS)
    with pytest.raises(ValueError, match=r"is offloaded in 1 chunks, and this transformation has it on the device"):
        tx.update(PARAMS, offloading.init(PARAMS), PARAMS)


def test_update_without_the_parameters_it_needs(tx):
    with pytest.raises(ValueError, match="params"):
        tx.update(PARAMS, tx.init(PARAMS))
    plain = zero_shard(optax.adam(1e-3), stage=2)
    updates, _ = plain.update(PARAMS, plain.init(PARAMS))
    assert updates["w"].shape == (16, 8)


def test_what_is_printed_fits_a_screen(tx):
    state = tx.create({f"layer{i}": PARAMS["w"] for i in range(8)})
    assert max(len(str(repr(x))) for x in (state, tx, jax.tree.structure(state))) < 1000
    assert repr(tx.train_step(mean_square)) == "<training step of mean_square: stage=3, mesh={'data': 8}>"
    assert repr(state).splitlines() == [
        "ZeroState(stage 3 over axis 'data', 8 devices)",
        "  params: 8 leaves, 4.1 kB",
        "  opt_state: 17 leaves, 8.2 kB",
    ]


def test_a_report_needs_arrays(tx):
    with pytest.raises(TypeError, match="step is a ShapeDtypeStruct; report measures live"):
        report(tx.create(jax.eval_shape(lambda: PARAMS)))
    with pytest.raises(TypeError, match="None has none"):
        report(None)


def changed_states(tx):
    """States that are not `tx`'s own, and what their refusal must say."""
    state = tx.create(PARAMS)
    other = zero(1)
    yield state.replace(params={"v": PARAMS["w"]}), r"tree lacks \['w'\]"
    yield state.replace(params={"w": jnp.ones((32, 8))}), r"params\['w'\] is float32\[32, 8\].*float32\[16, 8\]"
    narrow = {"w": PARAMS["w"].astype(jnp.bfloat16)}
    yield state.replace(params=narrow), r"params\['w'\] is bfloat16.*Cast .* type of the state: x\.astype\(float32\)"
    yield other.create(PARAMS), "made for stage 1 on 8 devices.*the step is for stage 3 on 8"
    mesh = mesh_of(4, 2, names=("data", "model"))
    other = zero(mesh=mesh)
    yield other.create(PARAMS), "made for stage 3 .*'model': 2.*step is for stage 3 .*{'data': 8}"
    frozen = zero(trainable=lambda path, _: path != "v")
    yield frozen.create(PARAMS | {"v": PARAMS["w"]}), r"precision= or trainable= than the step: params\['v'\] frozen"
    moved = state.replace(params=jax.device_put(state.params, jax.devices()[1]))
    yield moved, "was put on 1 of the 8 devices"
    other = zero(inner=optax.sgd(1e-3))
    yield other.create(PARAMS), r"another transformation than the step's, whose .* \[0\]\.count beyond"


def test_a_state_of_other_parameters_stage_or_mesh(tx):
    for state, message in changed_states(tx):
        with pytest.raises(ValueError, match=message):
            tx.train_step(mean_square)(state, ROWS)


def test_a_parameter_that_is_no_array(tx):
    with pytest.raises(TypeError, match=r"params\['s'\] is a float, not an array.*jnp\.asarray"):
        tx.create({"s": 1.0})
    with pytest.raises(TypeError, match=r"params\['act'\] is a function, not an array.*eqx\.partition"):
        tx.value_and_grad(mean_square)({**PARAMS, "act": lambda x: x}, ROWS)


def test_a_state_that_grows(mesh):
    tx = zero_shard(optax.monitor({"norm": optax.tree.norm}), stage=1, mesh=mesh)
    with pytest.raises(ValueError, match=r"changes the tree of its state: .*has \.measurements\['norm'\] beyond.*init"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize("offload", [None, Offload(optimizer="host")])
def test_updates_in_another_tree(offload):
    """Equally many leaves in another order would otherwise update each other's parameters."""
    trace, params = optax.trace(0.9), {"a": jnp.ones((16, 8)), "b": jnp.ones((16, 8))}

    def update(grads, state, params=None):
        updates, state = trace.update(grads, state)
        return [updates["b"], updates["a"]], state

    tx = zero_shard(optax.GradientTransformation(trace.init, update), stage=1, offload=offload)
    step = tx.train_step(lambda params, x: jnp.mean(x @ params["a"] + x @ params["b"]))
    with pytest.raises(ValueError, match=r"changes the tree of its updates: what update returns lacks \['a'\]"):
        step(tx.create(params), jnp.ones((16, 16)))


def test_a_state_whose_leaves_have_other_names():
    """Equally many leaves would otherwise be stored under the names of others."""
    trace = optax.trace(0.9)
    renamed = lambda grads, state, params=None: (grads, {"b": state["c"], "z": state["a"]})
    tx = optax.GradientTransformation(lambda params: {"a": trace.init(params), "c": jnp.zeros(())}, renamed)
    tx = zero_shard(tx, stage=1)
    with pytest.raises(ValueError, match=r"changes the tree of its state: what update returns lacks \['a'\]\.trace"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)


def test_an_update_inside_of_a_program_of_one_device(mesh):
    tx = zero_shard(optax.sgd(1.0), stage=1, mesh=mesh)
    update = lambda grads: tx.update(grads, tx.init(PARAMS), PARAMS)[0]
    others = mesh_of(2, names=("i",))
    inside = jax.shard_map(update, mesh=others, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    with pytest.raises(ValueError, match=r"inside of jax\.pmap or jax\.shard_map over 'i'.*mesh has 'data'.*outside"):
        inside(PARAMS)


def test_no_state_for_a_transformation_without_one(mesh):
    clip, adam = (zero_shard(tx, stage=1, mesh=mesh) for tx in (optax.clip(0.5), optax.adam(1.0)))
    assert (clip.update(PARAMS, None)[0]["w"] == 0.5).all()
    with pytest.raises(ValueError, match="does not belong to these parameters: it lacks"):
        adam.update(PARAMS, None)


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda tx, state, folder: Checkpointer(folder).save(state), r"state\.step was used up"),
        (lambda tx, state, folder: Checkpointer(folder).save(state, step=3), r"state\.step was used up"),
        (lambda tx, state, folder: report(state), r"state\.step was used up"),
        (lambda tx, state, folder: report(state.params), r"state\['w'\] was used up"),
        (lambda tx, state, folder: tx.unshard(state.params), r"tree\['w'\] was used up"),
        (lambda tx, state, folder: tx.unshard(state.opt_state), r"tree\[0\]\.\w+(\['w'\])? was used up"),
        (lambda tx, state, folder: tx.eval_step(mean_square)(state.params, ROWS), r"params\['w'\] was used"),
        (lambda tx, state, folder: tx.value_and_grad(mean_square)(state.params, ROWS), r"params\['w'\] was used"),
    ],
)
def test_arrays_that_a_step_has_used_up(call, named, mesh, tmp_path):
    tx = zero(mesh=mesh, persist_below=1)
    state = tx.create(PARAMS)
    tx.train_step(mean_square)(state, ROWS)
    with pytest.raises(ValueError, match=named + ".*Use the result of that call"):
        call(tx, state, tmp_path)


@pytest.mark.parametrize("name", ["unshard", "eval_step", "value_and_grad"])
@pytest.mark.parametrize("count", [4, 1])
def test_parameters_of_another_mesh(name, count, mesh):
    tx = zero(mesh=mesh, persist_below=1)
    other = jax.make_mesh((count,), ("fsdp",), devices=jax.devices()[-count:], axis_types=(AxisType.Auto,))
    params = zero(mesh=other, axis="fsdp", persist_below=1).shard(PARAMS)
    call = tx.unshard if name == "unshard" else lambda params: getattr(tx, name)(mean_square)(params, ROWS)
    words = rf"\['w'\] is on a mesh of {count} devices .*fsdp.*has 8.*'data'.*tx\.unshard"
    with pytest.raises(ValueError, match=words):
        call(params)


def test_an_error_of_the_function_itself_stays_what_it_is(mesh):
    tx = zero(mesh=mesh, persist_below=1)

    def fails(params, batch):
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine\n"):
        tx.eval_step(fails)(tx.shard(PARAMS), ROWS)
