"""Parameters under the names and in the forms of other libraries: read straight into shards, and written back."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoints import saved
from command_line import refused, run
from conftest import mesh_of
from flax import nnx
from safetensors.numpy import load_file, save_file

from zerojax import Precision, Tuning, zero_shard
from zerojax.checkpoint import export, import_params, importing
from zerojax.checkpoint.manifest import read_manifest
from zerojax.layout.leaf import is_padded

MAPPING = {
    "embed.weight": ["embed", ("head", "v e -> e v")],
    "h.{i}.qkv.weight": [(f"blocks/{name}", "(h+ d) e -> e h d") for name in "qkv"],
    "h.{i}.out.weight": ("blocks/out", "e (h d) -> h d e"),
    "h.{i}.out.bias": "blocks/bias",
    "h.{i}.pair.weight": [("blocks/gate", "(h d+) e -> e h d"), ("blocks/up", "(h d+) e -> e h d")],
    "h.{i}.experts.{j}.weight": ("blocks/experts", "out in -> in out"),
    "h.{i}.norm.weight": "layers_{i}/norm/scale",
    "h.{i}.down.weight": ("layers_{i}/down/kernel", "out in -> in out"),
    "h.{i}.experts.{j}.skip": "layers_{i}/skip",
    "h.{i}.rotary.frequency": None,
    "position": ("position", "() () e -> e"),
    "count": "count",
}


def file_of():
    """Tensors as another library would write them."""
    rng = np.random.default_rng(0)
    shapes = {"qkv.weight": ((3 + 1 + 1) * 4, 6), "out.weight": (6, 3 * 4), "out.bias": 6}
    shapes |= {"pair.weight": (3 * (2 + 5), 6), "norm.weight": 6, "down.weight": (6, 17)}
    shapes |= {f"experts.{j}.{name}": shape for j in range(3) for name, shape in (("weight", (5, 6)), ("skip", 5))}
    shapes = {f"h.{i}.{name}": shape for i in range(2) for name, shape in shapes.items()}
    shapes |= {"embed.weight": (11, 6), "position": (1, 1, 6)}
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return tensors | {"count": np.arange(3, dtype=np.int32)}


def params_of(tensors):
    """The model's parameters, made of them in plain NumPy."""
    t, layers, experts = tensors, range(2), range(3)
    stack = lambda name: np.stack([t[f"h.{i}.{name}"] for i in layers])
    qkv = stack("qkv.weight").reshape(2, 5, 4, 6).transpose(0, 3, 1, 2)
    pair = stack("pair.weight").reshape(2, 3, 7, 6).transpose(0, 3, 1, 2)
    blocks = {
        "q": qkv[:, :, :3],
        "k": qkv[:, :, 3:4],
        "v": qkv[:, :, 4:],
        "out": stack("out.weight").transpose(0, 2, 1).reshape(2, 3, 4, 6),
        "bias": stack("out.bias"),
        "gate": pair[..., :2],
        "up": pair[..., 2:],
        "experts": np.stack([np.stack([t[f"h.{i}.experts.{j}.weight"].T for j in experts]) for i in layers]),
    }
    rest = {"embed": t["embed.weight"], "head": t["embed.weight"].T, "position": t["position"][0, 0]}
    unrolled = {
        f"layers_{i}": {
            "norm": {"scale": t[f"h.{i}.norm.weight"]},
            "down": {"kernel": t[f"h.{i}.down.weight"].T},
            "skip": np.stack([t[f"h.{i}.experts.{j}.skip"] for j in experts]),
        }
        for i in layers
    }
    return {"blocks": blocks, "count": t["count"], **rest, **unrolled}


TENSORS = file_of()
PARAMS = params_of(TENSORS)
SHAPES = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tensors in two files with an index."""
    folder = tmp_path_factory.mktemp("published")
    where = {name: f"{'ab'[k % 2]}.safetensors" for k, name in enumerate(TENSORS)}
    for file in set(where.values()):
        save_file({name: TENSORS[name] for name in TENSORS if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def transformation(stage, count=8, precision=None):
    return zero_shard(
        optax.sgd(1e-2), stage=stage, mesh=mesh_of(count), tuning=Tuning(persist_below=16), precision=precision
    )


def assert_same(found, expected):
    found, structure = jax.tree.flatten(found, is_leaf=is_padded)
    assert structure == jax.tree.structure(expected)
    for x, (path, y) in zip(found, jax.tree_util.tree_flatten_with_path(expected)[0], strict=True):
        assert x.dtype == y.dtype, path
        np.testing.assert_array_equal(np.asarray(x), y, err_msg=str(path))


@pytest.mark.parametrize(("stage", "count"), [(3, 8), (3, 3), (0, 8), (0, 1)])
def test_every_form_is_read_into_any_layout(stage, count, folder, monkeypatch):
    """Nothing is read but shards, and a shard that devices share is read once."""
    read, view = [], importing.view
    monkeypatch.setattr(importing, "view", lambda *args: read.append(view(*args)) or read[-1])
    monkeypatch.setattr(importing, "BLOCK_BYTES", 64)  # so that these small tensors are copied in several blocks
    like = transformation(stage, count).shard(SHAPES)
    found = import_params(folder, like, mapping=MAPPING)
    assert_same(found, PARAMS)
    assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(lambda x: x.sharding, like)
    assert sum(x.nbytes for x in read) == sum(x.nbytes for x in jax.tree.leaves(PARAMS))


def test_a_mapping_is_its_own_way_back(folder, tmp_path):
    read = import_params(folder, transformation(3).shard(SHAPES), mapping=MAPPING)
    for way, params in {"arrays": PARAMS, "shards": read}.items():
        (written,) = export(params, tmp_path / way, mapping=MAPPING)
        assert_same(load_file(written), TENSORS)
        assert b'"format": "pt"' in written.read_bytes()[:100]  # or transformers refuses it


def test_a_checkpoint_is_exported_by_a_mapping_too(tmp_path, mesh):
    """Of leaves that are sharded, padded, flat and stacked; by the command line."""
    rng = np.random.default_rng(0)
    params = {"stack": rng.normal(size=(3, 24, 13)), "small": rng.normal(size=(3, 5)), "bias": rng.normal(size=7)}
    params = {name: x.astype(np.float32) for name, x in params.items()}
    saved(tmp_path / "saved", transformation(1, precision=Precision.bf16()).create(params), step=1)
    kinds = {leaf.name: leaf.kind for leaf in read_manifest(tmp_path / "saved" / "step_00000001").leaves}
    assert (kinds["params['stack']"], kinds["params['small']"]) == ("sharded", "flat")
    names = tmp_path / "names.py"
    names.write_text('MAPPING = {"h.{i}.w": ("stack", "o i -> i o"), "h.{i}.b": "small", "b": "bias"}')
    done = run("export", tmp_path / "saved", tmp_path / "out", "--mapping", f"{names}:MAPPING")
    assert done.exit_code == 0, done.stderr
    expected = {"b": params["bias"], **{f"h.{i}.b": x for i, x in enumerate(params["small"])}}
    expected |= {f"h.{i}.w": x.T for i, x in enumerate(params["stack"])}
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), expected)
    failed = refused("export", tmp_path / "saved", tmp_path / "no", "--mapping", f"{names}:WRONG")
    assert "does not define WRONG" in failed


@pytest.mark.parametrize(("stage", "count", "precision"), [(1, 8, Precision.bf16()), (3, 3, None), (0, 1, None)])
def test_narrow_files_are_widened(stage, count, precision, tmp_path):
    tensors = {name: x.astype(jnp.bfloat16) for name, x in TENSORS.items() if ".out." in name}
    save_file(tensors, tmp_path / "model.safetensors")
    expected = {name: np.asarray(PARAMS["blocks"][name], jnp.bfloat16).astype(np.float32) for name in ("out", "bias")}
    tx = transformation(stage, count, precision)
    like = tx.create(jax.eval_shape(lambda: expected))
    mapping = {"h.{i}.out.weight": ("out", "e (h d) -> h d e"), "h.{i}.out.bias": "bias"}
    state = tx.create(import_params(tmp_path, like, mapping=mapping))
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(tx.create(expected)), strict=True):
        assert x.sharding == y.sharding
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    export(state, tmp_path / "out")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), expected)


def problems(call, *args, **kwargs):
    with pytest.raises(ValueError, match=r"nothing was read|does not fit") as caught:
        call(*args, **kwargs)
    return str(caught.value).split("\n  ")[1:]


def test_all_that_is_wrong_is_listed_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(importing, "view", None)
    tensors = dict(TENSORS)
    del tensors["position"], tensors["h.0.norm.weight"], tensors["h.1.norm.weight"]
    tensors |= {"h.2.norm.weight": np.ones(6, np.float32), "h.7.rotary.frequency": np.ones(3)}
    tensors |= {"h.0.out.weight": TENSORS["h.0.out.weight"].T.copy(), "count": np.ones(3, np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    mapping = MAPPING | {"h.{i}.out.bias": "bias"}
    assert problems(import_params, tmp_path, SHAPES, mapping=mapping) == [
        "'h.{i}.out.bias': there is no parameter 'bias'",
        "'blocks/bias' is a parameter, and no entry of the mapping names it",
        "h.0.out.weight has the shape [12, 6] in the file, and [6, 12] is wanted",
        "h.0.norm.weight is missing (and 1 more like it)",
        "position is missing",
        "count is float32 in the file, and int32 is wanted",
        "h.2.norm.weight is only in the file: map it to a parameter, or to None",
    ]


def indexed(name):
    return {"model.safetensors.index.json": json.dumps({"weight_map": {"w": name}})}


NO_FILES = {
    "above": (indexed("../model.safetensors"), ValueError, r"index.json names .*not a file beside it"),
    "absolute": (indexed("/etc/passwd"), ValueError, r"index.json names .*not a file beside it"),
    "in a folder": (indexed("a/b"), ValueError, r"index.json names .*not a file beside it"),
    "the folder above": (indexed(".."), ValueError, r"index.json names .*not a file beside it"),
    "missing": (indexed("other.safetensors"), FileNotFoundError, "is not there, though the index beside it names it"),
    "too long": (indexed("x" * 5000), FileNotFoundError, "is not there, though the index beside it names it"),
    "no index": ({"model.safetensors.index.json": "{"}, ValueError, "index.json is no index of safetensors"),
    "empty": ({"a.safetensors": ""}, ValueError, r"a.safetensors is no intact file of safetensors"),
    "nonsense": ({"a.safetensors": "nonsense of some length"}, ValueError, r"a.safetensors is no intact file"),
}


@pytest.mark.parametrize("what", NO_FILES)
def test_files_that_cannot_be_read_are_named(what, tmp_path):
    files, error, says = NO_FILES[what]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(error, match=says):
        import_params(tmp_path, {"w": jnp.ones(3)})


ONES = {"a": np.ones(6), "layers_0": {"a": np.ones(6)}, "layers_1": {"a": np.ones(6)}, "seven": np.ones(7)}
ONES |= {"b": np.ones((6, 4)), "matrix": np.ones((5, 4))}
PROPER = {"a": "a", "b": ("b", "o i -> i o"), "h.{i}.a": "layers_{i}/a", "seven": "seven", "matrix": "matrix"}
WRONG = {
    "names no parameter": ({"a": "x"}, "'a': there is no parameter 'x'"),
    "has no pattern": ({"b": ("b", "transpose")}, "'b': 'transpose' is no pattern"),
    "has a name on one side": ({"b": ("b", "a b -> b c")}, "'b': 'a b -> b c' is no pattern"),
    "merges dims": ({"a": ("a", "a b -> (a b)")}, "'a': 'a b -> (a b)' is no pattern"),
    "has a pattern of other dims": ({"a": ("a", "a b -> b a")}, "'a' has the shape [6], and 'a b -> b a' gives 2 dims"),
    "is stacked too often": (
        {"a": None, "c.{i}.{j}": "a"},
        "'c.{i}.{j}': 'a' has the shape [6], and the name, stacked over i, j, gives 2 dims",
    ),
    "has a placeholder too many": ({"h.a": "layers_{i}/a"}, "'layers_{i}/a' has the placeholder 'i', which"),
    "claims a leaf again": ({"again": "a"}, "'again': 'a' has an entry already, 'a'"),
    "claims a leaf twice": ({"a": ["a", "a"]}, "'a' has an entry already, 'a'"),
    "makes a name again": ({"a": None, "b": None, "{i}": "a", "{j}": "b"}, "'{j}': '0' has another entry"),
    "ties what differs": (
        {"a": ["a", "b"]},
        "'a': its parameters are tied, and make tensors of the shapes [[6], [6, 4]]",
    ),
    "divides and ties": (
        {"a": [("a", "a -> a"), ("layers_0/a", "a+ -> a")], "h.{i}.a": None},
        "'a': if one pattern has a +, all patterns must have the same left side",
    ),
    "divides what differs": (
        {"a": [("b", "o+ i -> i o"), ("matrix", "o+ i -> i o")], "b": None, "matrix": None},
        "'a': its parameters follow one another along 'o', and differ in other sizes",
    ),
    "stacks unlike numbers": (
        {"h.{j}": ["a", "seven"], "a": None, "seven": None},
        "'h.{j}': 'h.6' is for 2 parameters, and there are 1",
    ),
    "divides one dim of two": (
        {"a": [("layers_0/a", "a+ -> a"), ("b", "a+ -> a")]},
        "'b' has the shape [6, 4], and 'a+ -> a' gives 1 dims",
    ),
    "has three parts": ({"a": ("a", "a -> a", "b")}, "'a': ('a', 'a -> a', 'b') is neither a path nor a path and a"),
    "has none": ({"a": []}, "'a': an empty list names no parameter; None leaves its tensors out"),
    "is not there": ({"a": None}, "'a' is a parameter, and no entry of the mapping names it"),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_entry_is_named_that(what, tmp_path):
    entries, text = WRONG[what]
    found = problems(export, ONES, tmp_path / "out", mapping=PROPER | entries)
    assert text in found[0]
    assert not list(tmp_path.iterdir())


def test_what_has_no_elements_and_what_has_no_dims(tmp_path, mesh):
    tensors = {"scalar": np.float32(3), "empty": np.ones((0, 4), np.float32)}
    save_file(jax.tree.map(np.asarray, tensors), tmp_path / "model.safetensors")
    params = {"scalar": np.float32(3), "empty": np.ones((4, 0), np.float32), "stack": np.ones((0, 4), np.float32)}
    mapping = {"scalar": "scalar", "empty": ("empty", "a b -> b a"), "h.{i}": "stack"}
    like = transformation(3).shard(jax.eval_shape(lambda: params))
    assert_same(import_params(tmp_path, like, mapping=mapping), params)


def test_a_mapping_that_is_none(tmp_path):
    with pytest.raises(TypeError, match=r"mapping= is .*, a function. Give a dict of names in files."):
        export(ONES, tmp_path / "out", mapping=lambda: PROPER)


def test_modules_of_nnx(tmp_path, mesh):
    """Whose paths end in `value`, which is not written."""
    kernel = np.random.default_rng(0).normal(size=(24, 16)).astype(np.float32)
    save_file({"proj.weight": kernel}, tmp_path / "model.safetensors")
    module = lambda: nnx.Linear(16, 24, use_bias=False, rngs=nnx.Rngs(0))
    tx = zero_shard(optax.sgd(1e-2), stage=3, mesh=mesh, tuning=Tuning(persist_below=16))
    mapping = {"proj.weight": ("kernel", "out in -> in out")}
    found = import_params(tmp_path, tx.shard(jax.eval_shape(lambda: nnx.state(module()))), mapping=mapping)
    np.testing.assert_array_equal(found["kernel"].get_value(), kernel.T)
    export(found, tmp_path / "out", mapping=mapping)
    np.testing.assert_array_equal(load_file(tmp_path / "out" / "model.safetensors")["proj.weight"], kernel)
