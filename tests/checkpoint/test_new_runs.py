"""A new run begins with the parameters of another run's checkpoint, or of a file; new leaves keep their values."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoints import saved
from conftest import mesh_of
from flat_options import tuned

from zerojax import Precision, logical, zero_shard
from zerojax.checkpoint import export, import_params, restore_params

PARAMS = {"w": jnp.arange(21.0).reshape(7, 3) + 1 / 3, "b": jnp.ones(5), "head": jnp.zeros((3, 4))}
NEW = {"w": jnp.zeros((7, 3)), "b": jnp.zeros(5), "head": jnp.full((3, 9), 2.0), "lora": jnp.full((11, 2), 3.0)}


def transformation(stage, count, precision=None):
    mesh = mesh_of(count)
    return zero_shard(optax.sgd(0.1), stage=stage, mesh=mesh, precision=precision, **tuned(persist_below=10))


@pytest.fixture(scope="module", params=[None, Precision.bf16()], ids=["float32", "bf16"])
def a_run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    state = transformation(1, 8, request.param).create(PARAMS)
    saved(folder, state)
    return folder


@pytest.mark.parametrize(("stage", "count"), [(3, 3), (0, 2), (3, 1)])
def test_parameters_are_read_into_any_layout(a_run, stage, count):
    tx = transformation(stage, count)
    for like in (tx.shard(jax.eval_shape(lambda: PARAMS)), tx.create(jax.eval_shape(lambda: PARAMS))):
        found = restore_params(a_run, like)
        state = tx.create(found)
        assert int(state.step) == 0
        for name, x in logical(state.params).items():
            assert np.array_equal(x, PARAMS[name]), name
            assert x.sharding.device_set == set(tx.config.mesh.devices.flat)
    narrow = tx.shard(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), PARAMS))
    assert logical(restore_params(a_run, narrow))["w"].dtype == jnp.bfloat16


@pytest.mark.parametrize("read", [restore_params, import_params])
def test_new_leaves_keep_their_values_if_asked(a_run, tmp_path, read):
    """A head of another size and a LoRA factor; in a file, a head of another size is a mistake."""
    tx, like, source = transformation(3, 8), NEW, a_run
    if read is import_params:
        source, like = tmp_path / "file", {k: x for k, x in NEW.items() if k != "head"}
        export({k: x for k, x in PARAMS.items() if k != "head"}, source)
    like = tx.shard(like)
    names = [f"params['{name}']" for name in like if name not in "wb"]
    with pytest.raises(ValueError, match=r"lora"):
        read(source, like)
    with pytest.warns(UserWarning, match=r"lacks \d leaves.*params\['lora'\]") as said:
        found = read(source, like, partial=True)
    assert said[0].filename == __file__
    assert all(name in str(said[0].message) for name in names)
    for name, x in logical(found).items():
        assert np.array_equal(x, PARAMS[name] if name in "wb" else NEW[name]), name
    with pytest.raises(ValueError, match=r"params\['(head|lora)'\] was not saved, and like= has only its shape"):
        read(source, tx.shard(jax.eval_shape(lambda: {k: NEW[k] for k in logical(like)})), partial=True)
    with pytest.raises(ValueError, match=r"(no parameter with a name|x is missing)"):
        read(source, tx.shard({"x": jnp.ones(3)}), partial=True)


@pytest.mark.parametrize("read", [restore_params, import_params])
def test_the_weights_of_a_state_keep_new_leaves(a_run, tmp_path, read):
    tx = transformation(1, 3, Precision.bf16())
    new = {"w": NEW["w"], "lora": NEW["lora"] + 1 / 3}
    state, source = tx.create(new), a_run
    if read is import_params:
        export({"w": PARAMS["w"]}, source := tmp_path / "file")
    with pytest.raises(ValueError, match=r"lora.* was not saved.*tx\.weights\(state\.params, state\.opt_state\)"):
        read(source, state, partial=True)
    with pytest.warns(UserWarning, match=r"params\['lora'\]"):
        found = logical(read(source, tx.weights(state.params, state.opt_state), partial=True))
    assert np.array_equal(found["w"], PARAMS["w"])
    assert np.array_equal(found["lora"], new["lora"])


def test_a_mapping_need_not_name_new_leaves(tmp_path):
    export({"a.weight": PARAMS["w"], "a.bias": PARAMS["b"]}, tmp_path / "file")
    mapping = {"a.weight": "w", "a.bias": "b"}
    like = transformation(3, 3).shard({k: NEW[k] for k in ("w", "b", "lora")})
    with pytest.raises(ValueError, match="'lora' is a parameter, and no entry"):
        import_params(tmp_path / "file", like, mapping=mapping)
    with pytest.warns(UserWarning, match=r"lacks 1 leaves.*params\['lora'\]"):
        found = logical(import_params(tmp_path / "file", like, mapping=mapping, partial=True))
    assert np.array_equal(found["w"], PARAMS["w"])
    assert np.array_equal(found["lora"], NEW["lora"])


def test_a_missing_tensor_of_the_base_is_an_error(tmp_path):
    """It is missing if the mapping names it, or if the function given as partial= does not allow its leaf."""
    mapping = {"a.weight": "w", "a.bias": "b"}
    like = transformation(3, 3).shard({k: NEW[k] for k in ("w", "b", "lora")})
    export({"a.weight": PARAMS["w"]}, tmp_path / "mapped")
    with pytest.raises(ValueError, match=r"a\.bias is missing"):
        import_params(tmp_path / "mapped", like, mapping=mapping, partial=True)
    export({"w": PARAMS["w"]}, tmp_path / "plain")
    with pytest.raises(ValueError, match="b is missing") as said:
        import_params(tmp_path / "plain", like, partial=lambda path: "lora" in path)
    assert "lora" not in str(said.value)
    with pytest.raises(ValueError, match="'b' is a parameter, and no entry"):
        import_params(tmp_path / "mapped", like, mapping={"a.weight": "w"}, partial=lambda path: "lora" in path)


def test_leaves_that_partial_names_keep_their_values_silently(tmp_path):
    """Also those that the mapping names: one mapping serves to import the base, and to export all parameters."""
    mapping = {"a.weight": "w", "a.lora": "lora"}
    like = transformation(3, 3).shard({k: NEW[k] for k in ("w", "lora")})
    export({"a.weight": PARAMS["w"]}, tmp_path)
    with warnings.catch_warnings(action="error"):
        found = logical(import_params(tmp_path, like, mapping=mapping, partial=lambda path: path == "lora"))
    assert np.array_equal(found["w"], PARAMS["w"])
    assert np.array_equal(found["lora"], NEW["lora"])
