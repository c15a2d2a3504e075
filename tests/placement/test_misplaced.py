"""Arrays that are placed otherwise than planned are named by the report and by the first call of a step."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of, shape
from flat_options import tuned
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import Offload, report, zero_shard
from zerojax.layout.tree import lay_out
from zerojax.placement.problems import misplaced, problem_of, unusable_named, warn_of_misplaced
from zerojax.placement.storage import is_placed

PARAMS = {"w": jnp.ones((16, 4)), "odd": jnp.ones(257), "small": jnp.ones((2, 3))}
ROWS = jnp.ones((8, 4))
PLANNED = "planned: sharded over 'data'; found: replicated"


def loss(params, rows):
    return jnp.mean((rows @ params["w"][:4] + params["odd"].sum() * params["small"].sum()) ** 2)


ADAM, SGD = optax.adam(1e-2), optax.sgd(0.1)


def transformation(mesh, inner=ADAM, **options):
    return zero_shard(inner, **tuned(**{"stage": 3, "mesh": mesh, "persist_below": 16} | options))


def test_shardings_of_a_model_without_annotations_replicate_a_train_state(mesh):
    """As nanodo's: `nn.get_sharding` says of a model without annotations that all of it is replicated."""
    tx = transformation(mesh)
    make = lambda: TrainState.create(apply_fn=None, params=tx.shard(PARAMS), tx=tx)
    wrong = nn.get_sharding(jax.eval_shape(make), mesh)
    state = jax.jit(make, out_shardings=wrong)()
    found = report(state)
    # padded, whole and flat ones; not what is planned replicated
    assert len(found.misplaced) == 8
    assert ".params['small']" not in found.misplaced
    assert str(found.misplaced[".opt_state[0].nu['small']"]) == PLANNED
    assert f"8 of 11 leaves are placed otherwise than planned, such as params['odd'] ({PLANNED})" in str(found)
    (row,) = [row for row in found.rows if row.keys == ("params", "w")]
    assert str(row).endswith(f"P()  ({PLANNED})")
    assert str(report(state.params, tx)).count(PLANNED) == 3
    assert len(report(state.opt_state, tx).misplaced) == 6
    assert len(report({"params": state.params, "opt_state": state.opt_state}, tx).misplaced) == 8
    # as it should be
    state = jax.jit(make)()
    parts = [report(state), report(state.params, tx), report(state.opt_state, tx)]
    assert not any(part.misplaced or "planned" in str(part) for part in parts)
    # by the arrays alone nothing is planned
    assert not report(jax.device_put(state.params, NamedSharding(mesh, P()))).misplaced


@pytest.mark.parametrize("loop", ["value_and_grad", pytest.param("train_step", marks=pytest.mark.slow)])
def test_the_first_call_of_a_step_warns(loop, mesh):
    tx = transformation(mesh, stage=3 if loop == "value_and_grad" else 1)
    state = tx.create(PARAMS)
    replicated = jax.device_put(jax.tree.map(jnp.copy, state), NamedSharding(mesh, P()))
    if loop == "value_and_grad":
        call = tx.value_and_grad(loss)
        step, warned = lambda state: (call(state.params, ROWS), state)[1], r"2 arrays .* params\['odd'\]"
        jax.jit(call)(replicated.params, ROWS)  # under jit their placement is not known
    else:
        step, warned = lambda state: train_step(state, ROWS)[0], r"6 arrays .* opt_state\[0\].mu\['odd'\]"
        train_step = tx.train_step(loss)
    with pytest.warns(UserWarning, match=f"{warned}.*{PLANNED}.*out_shardings") as found:
        replicated = step(replicated)
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(replicated)
        if loop == "value_and_grad":  # as planned, or on one device: a program takes it from there
            for params in (state.params, PARAMS):
                tx.value_and_grad(loss)(params, ROWS)


@pytest.mark.parametrize("place", [lambda x: x, np.asarray, "replicated"], ids=["one device", "NumPy", "replicated"])
def test_the_init_of_a_loop_that_forgot_to_shard_warns(place, mesh):
    """Its losses would be right, and its padded parameters replicated for ever."""
    tx = transformation(mesh)
    place = (lambda x: jax.device_put(x, NamedSharding(mesh, P()))) if place == "replicated" else place
    whole = jax.tree.map(place, PARAMS)
    with pytest.warns(
        UserWarning, match=r"^2 arrays .*params\['odd'\].*'w'.*Before tx.init.*tx.shard\(params\)"
    ) as found:
        tx.init(whole)
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for params in (tx.shard(whole), tx.init_params(lambda: PARAMS), jax.eval_shape(lambda: PARAMS)):
            tx.init(params)
        jax.jit(tx.init)(whole)  # the placement of its arguments is not known
        transformation(mesh, stage=2).init(whole)  # replicated by plan
        transformation(mesh_of(1)).init(whole)


def test_other_placements(mesh):
    """On another dim, on one device, over other axes too, on a sharding without axes, and offloaded."""
    tx = transformation(mesh, SGD)
    w = jnp.ones((16, 8))
    found = lambda x, tx=tx: [str(how) for how in report({"w": x}, tx).misplaced.values()]
    on = lambda *spec: jax.device_put(w, NamedSharding(mesh, P(*spec)))
    assert found(on(None, "data")) == ["planned: sharded over 'data' on dim 0; found: sharded over 'data' on dim 1"]
    assert found(w) == ["planned: sharded over 'data'; found: on one device"]
    assert found(on("data")) == found(on("data", None)) == []
    assert found(on("data"), transformation(mesh, SGD, stage=1)) == ["planned: replicated; found: sharded over 'data'"]
    both = mesh_of(2, 4, names=("data", "model"))
    on_both = lambda *spec: jax.device_put(w, NamedSharding(both, P(*spec)))
    tensor = transformation(both, SGD)
    assert found(on_both("data", "model"), tensor) == found(on_both(("data",)), tensor) == []
    assert found(on_both("model"), tensor) == [PLANNED]
    on_host = transformation(mesh, SGD, offload=Offload(optimizer="host", params="host"))
    assert found(on_host.shard({"w": w})["w"], on_host) == []


def test_of_many_misplaced_arrays_three_are_named(mesh):
    tx = transformation(mesh, SGD)
    params = jax.device_put({f"w{i}": jnp.ones((16, 8)) for i in range(4)}, NamedSharding(mesh, P()))
    leaves = lay_out(params, tx.config.layout_policy).params
    for count, words in ((3, r"w2'\] \([^)]*\)\. They"), (4, r"w2'\] \([^)]*\) and 1 more\. They")):
        some = {name: params[name] for name in list(params)[:count]}
        with pytest.warns(UserWarning, match=rf"{count} arrays.*{words}") as found:
            warn_of_misplaced([("params", some, leaves[:count])], ("data",), stacklevel=1)
        assert found[0].filename == __file__
    assert not misplaced(leaves[0], np.ones((16, 8)), ("data",))


def test_an_array_that_cannot_be_used_is_named(mesh):
    used, ones, devices = jnp.ones(8), jnp.ones(8), jax.devices()
    used.delete()
    on = lambda mesh: jax.device_put(ones, NamedSharding(mesh, P(mesh.axis_names)))
    whose = lambda x, mesh=mesh: problem_of(mesh, "state", {"a": ones, "w": x, "z": used}).split(".")[0]
    assert whose(ones) == whose(on(mesh)) == whose(on(mesh_of(2, 4))) == whose(1.0) == whose(used).replace("'w'", "'z'")
    assert whose(used) == "state['w'] was used up: a step, or a jit that it was donated to, took its memory"
    assert whose(shape(8)) == "state['w'] is a shape and has no values"
    words = "state['w'] is on a mesh of 4 devices {'data': 4}, and the mesh of this transformation has 8"
    assert whose(on(mesh_of(4))).startswith(words)
    assert whose(jax.device_put(ones, devices[1])) == "state['w'] was put on 1 of the 8 devices of the mesh"
    assert problem_of(None, "", on(mesh_of(4))) == problem_of(mesh, "", jax.device_get(ones)) == ""
    assert [is_placed(mesh, x) for x in (on(mesh_of(2, 4)), on(mesh_of(4)), 1.0)] == [True, False, False]


@pytest.mark.parametrize(
    ("donates", "error", "found"),
    [
        (False, RuntimeError("jax"), "state was used up"),
        (True, RuntimeError("jax"), "^jax$"),
        (True, ValueError("jax"), "^jax$"),  # the call itself has deleted the array
        (False, TypeError("jax"), "^jax$"),
    ],
)
def test_only_an_error_of_an_unusable_array_is_replaced(donates, error, found, mesh):
    used = jnp.ones(8)
    used.delete()
    with pytest.raises((type(error), ValueError), match=found), unusable_named(mesh, donates=donates, a=1, state=used):
        raise error
