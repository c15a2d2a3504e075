"""Published parameters are those of `unshard`, in other names, shapes and types, within a bucket of memory."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from models import awkward_batches, awkward_params
from test_reshard import Held, hybrid
from test_round_trips import trained, transformation

import zerojax
from zerojax import Offload, Precision, zero_shard
from zerojax.checkpoint import CheckpointError, export, publish_files, published_files, publishing, read_published
from zerojax.placement import pieces

P = PartitionSpec
BUCKET = 1000  # bytes: of the two largest weights, boxes are sent
WAYS = {
    "stage 1": {"stage": 1, "precision": Precision.bf16()},
    "stage 3": {"stage": 3},
    "params_axis": hybrid(params_axis="gpu"),
    "host": {"stage": 3, "offload": Offload(optimizer="host", params="host")},
}


def engine(*shape):
    """A mesh of the last devices, of which some train, too."""
    names = ("x", "y")[: len(shape)]
    return jax.make_mesh(shape, names, devices=jax.devices()[8 - int(np.prod(shape)) :])


def flat(tree):
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {".".join(str(key.key) for key in path): np.asarray(x) for path, x in found}


def assert_equal(found, expected):
    assert list(found) == list(expected)
    for name, x in expected.items():
        assert (found[name].dtype, found[name].shape) == (x.dtype, x.shape), name
        assert np.asarray(found[name]).tobytes() == x.tobytes(), name


SLOW = pytest.mark.slow


@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way == "params_axis" else SLOW) for way in WAYS])
def test_the_numbers_are_those_of_unshard(way):
    tx = transformation(**WAYS[way])
    state = tx.create(awkward_params())
    expected = flat(tx.unshard(state.params))
    mesh = engine(2, 2)
    divided = {"tied": P("x", None), "layer.w": P("y", "x"), "frozen": P(("x", "y"))}
    where = lambda name, shape: NamedSharding(mesh, divided.get(name, P()))
    found = dict(zerojax.publish(state.params, where, bucket_bytes=BUCKET))
    assert_equal(found, expected)
    assert all(x.sharding == where(name, x.shape) for name, x in found.items())


def stacked_params():
    keys = iter(jax.random.split(jax.random.key(5), 8))
    draw = lambda *shape: jax.random.normal(next(keys), shape)
    attention = {name: draw(3, 16, 4, 8) for name in "qkv"}  # layers, width, heads, size of a head
    return {
        "embed": draw(40, 16),
        "blocks": {**attention, "up": draw(3, 16, 64), "norm": draw(3, 16)},
        "bias": draw(48),
    }


MAPPING = {
    "wte": "embed",
    "h.{i}.qkv": [(f"blocks/{x}", "(h+ d) e -> e h d") for x in "qkv"],
    "h.{i}.up": ("blocks/up", "out in -> in out"),
    "h.{i}.norm": "blocks/norm",
    "bias": "bias",
}
SPECS = {"wte": P("x"), "qkv": P("x", "y"), "up": P("y", "x"), "norm": P(), "bias": P(("x", "y"))}


@pytest.mark.parametrize("stage", [pytest.param(1, marks=SLOW), 3])
@pytest.mark.parametrize("bucket", [pytest.param(1 << 20, marks=SLOW), 900])
def test_names_shapes_and_types_are_those_that_export_writes(stage, bucket, tmp_path):
    from safetensors.numpy import load_file

    tx = zero_shard(optax.adam(1e-2), stage=stage, mesh=mesh_of(8), persist_below=20)
    state, mesh = tx.create(stacked_params()), engine(2, 2)
    [file] = export(state, tmp_path / "out", mapping=MAPPING, dtype=jnp.float16)
    expected = load_file(file)
    where = lambda name, shape: NamedSharding(mesh, SPECS[name.rpartition(".")[2]])
    found = dict(zerojax.publish(state, where, mapping=MAPPING, dtype=jnp.float16, bucket_bytes=bucket))
    assert_equal(found, {name: expected[name] for name in found})
    assert found.keys() == expected.keys()
    assert found["h.1.qkv"].sharding == NamedSharding(mesh, P("x", "y"))


def test_shardings_are_a_tree_a_dict_or_one():
    tx, other = transformation(3), transformation(3, 4, persist_below=10**6)
    params, one = tx.shard(awkward_params()), SingleDeviceSharding(jax.devices()[3])
    expected = flat(tx.unshard(params))
    tree = other.shardings(params).params
    found = dict(zerojax.publish(params, tree))
    assert_equal(found, expected)
    assert found["layer.w"].sharding == tree["layer"]["w"]
    found = dict(zerojax.publish(params, dict.fromkeys(expected, one)))
    assert_equal(found, expected)
    assert {x.device for x in found.values()} == {jax.devices()[3]}
    for logical in (awkward_params(), jax.device_get(awkward_params())):
        assert_equal(dict(zerojax.publish(logical, one)), expected)


def test_a_step_runs_between_tensors_if_they_are_held():
    tx = transformation(3)
    state, step = trained(tx)
    expected = {
        name: x.astype(jnp.bfloat16) if x.dtype == np.float32 else x
        for name, x in flat(tx.unshard(state.params)).items()
    }
    where = NamedSharding(engine(2), P())
    kept = zerojax.publish(state.params, where, hold=True, dtype=jnp.bfloat16)
    lost = zerojax.publish(state.params, where)
    found = dict([next(kept), next(lost)][:1])
    state, _ = step(state, awkward_batches(3)[2])
    assert_equal(found | dict(kept), expected)
    with pytest.raises(ValueError, match=r"was used up before it was published: .*or pass hold=True"):
        dict(lost)
    old = state.params
    step(state, awkward_batches(3)[2])
    with pytest.raises(ValueError, match=r"params\['\w+'\]\S* was used up"):
        zerojax.publish(old, where)


def test_held_parameters_are_divided_even_if_they_are_replicated(mesh):
    params = {"w": jnp.ones((16, 24)), "b": jnp.ones(3)}
    state = zero_shard(optax.sgd(1.0), stage=0, mesh=mesh).create(params)
    sources = [publishing.Source(name, (name,), x, leaf) for (name,), x, leaf in publishing.params_of(state)]
    kept = {one.name: publishing.held(one, jnp.bfloat16).array for one in sources}
    assert kept["w"].addressable_shards[0].data.nbytes == 16 * 24 * 2 // 8
    assert kept["w"].dtype == jnp.bfloat16


LARGE = dict.fromkeys("abcd", (64, 256)) | {"flat": (32768,), "bias": (256,)}
LIMIT = 16384  # bytes: a large leaf of 64 kB is sent in 8 boxes


@pytest.mark.parametrize("stage", [pytest.param(0, marks=SLOW), 3])
def test_a_device_holds_at_most_a_bucket_beyond_the_state_and_the_tensors(stage, monkeypatch):
    tx = zero_shard(optax.adam(1e-2), stage=stage, mesh=mesh_of(8), persist_below=300)
    params = {name: jax.random.normal(jax.random.key(i), shape) for i, (name, shape) in enumerate(LARGE.items())}
    step = tx.train_step(lambda params, batch: sum(jnp.sum(x * batch.mean()) for x in jax.tree.leaves(params)))
    state, _ = step(tx.create(params), jnp.ones(8))
    expected = flat(tx.unshard(state.params))
    params = None
    held = Held(monkeypatch)
    before, found, published = held.now(), {}, collections.Counter()
    mesh = engine(4)
    for name, x in zerojax.publish(state, NamedSharding(mesh, P("x")), bucket_bytes=LIMIT):
        assert_equal({name: x}, {name: expected[name]})
        found[name] = x
        for device in mesh.devices.flat:
            published[device, "device"] += x.nbytes // 4
        for where, most in held.most.items():
            assert most - before[where] <= published[where] + LIMIT, (name, where)
        held.most.clear()
    assert set(found) == set(LARGE)


@pytest.mark.usefixtures("optimized")
def test_a_box_and_what_its_program_needs_are_at_most_a_bucket(mesh):
    shape, box = (256, 512), (64, 512)  # a box of half a bucket
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P("data")))
    at = jax.ShapeDtypeStruct((2,), jnp.int32, sharding=NamedSharding(mesh, P()))
    used = pieces.taking(mesh, P("data"), shape, box).lower(x, at).compile().memory_analysis()
    assert used.temp_size_in_bytes + used.output_size_in_bytes <= 2 * 64 * 512 * 4


def test_what_does_not_fit_is_named():
    params, where = {"w": jnp.ones((6, 4)), "b": jnp.ones(3)}, NamedSharding(engine(4), P("x"))
    one = SingleDeviceSharding(jax.devices()[0])
    both = {"w": one, "b": one}
    for error, says, call in (
        (ValueError, "The tensor 'b' of the shape .3. cannot be divided", lambda: zerojax.publish(params, where)),
        (ValueError, "shardings= has no sharding for the tensor 'w'", lambda: zerojax.publish(params, {"b": one})),
        (ValueError, "not fit the tensors b, w.*\n.*v has a sh", lambda: zerojax.publish(params, {**both, "v": one})),
        (ValueError, "'b' is a parameter, and no entry", lambda: zerojax.publish(params, where, mapping={"x": "w"})),
        (TypeError, "drop.key is a PRNG key", lambda: zerojax.publish({"drop": {"key": jax.random.key(0)}}, one)),
        (TypeError, r"params\['step'\] is of type int", lambda: zerojax.publish({"step": 3}, one)),
        (ValueError, "which would destroy weights", lambda: zerojax.publish(params, where, dtype=jnp.int8)),
    ):
        with pytest.raises(error, match=says):
            call()
    tied = {"x": ["w", ("v", "a b -> b a")]}
    for bucket in (8, 1 << 20):
        whole = NamedSharding(engine(4), P())
        same = {"w": jnp.arange(24.0).reshape(6, 4), "v": jnp.arange(24.0).reshape(6, 4).T}
        [(_, x)] = zerojax.publish(same, whole, mapping=tied, bucket_bytes=bucket)
        assert np.array_equal(x, same["w"])
        with pytest.raises(ValueError, match="several parameters the tensor 'x', but they are not equal"):
            dict(zerojax.publish(same | {"v": same["v"] + 1}, whole, mapping=tied, bucket_bytes=bucket))


# --- files -------------------------------------------------------------------------------------------------------


def test_another_program_reads_the_newest_version(tmp_path):
    tx, other = transformation(3), transformation(3, 4)
    state = tx.create(awkward_params())
    expected = flat(tx.unshard(state.params))
    like = other.shard(jax.eval_shape(awkward_params))
    assert read_published(tmp_path, like) is None
    for version in (3, 4, 7):
        assert publish_files(state, tmp_path, version=version) == tmp_path / f"version_000000000{version}"
    assert published_files.versions_in(tmp_path) == [4, 7]
    with pytest.raises(CheckpointError, match="has version 7 already"):
        publish_files(state, tmp_path, version=7)
    with pytest.raises(ValueError, match="keep"):
        publish_files(state, tmp_path, version=8, keep=0)
    version, params = read_published(tmp_path, like, after=4)
    assert version == 7
    assert_equal(flat(other.unshard(params)), expected)
    assert read_published(tmp_path, like, after=7) is None
    file = tmp_path / "version_0000000007" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model.safetensors has other contents than were published"):
        read_published(tmp_path, like)


def test_a_version_that_is_removed_while_it_is_read_gives_way_to_the_next(tmp_path, monkeypatch):
    params, check = {"w": jnp.ones(4)}, published_files.check_digests
    publish_files(params, tmp_path, version=1)

    def late(path):
        check(path)
        if path.name.endswith("1"):
            publish_files({"w": 2 * jnp.ones(4)}, tmp_path, version=2, keep=1)

    monkeypatch.setattr(published_files, "check_digests", late)
    version, found = read_published(tmp_path, params)
    assert (version, float(found["w"][0])) == (2, 2.0)


def test_what_killed_runs_left_behind_is_removed(tmp_path):
    for name in (".version_0000000003", "..version_0000000005.tmp-17"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"a half")
    (tmp_path / ".version_of_another_kind").mkdir()
    publish_files({"w": jnp.ones(4)}, tmp_path, version=8)
    assert {one.name for one in tmp_path.iterdir()} == {"version_0000000008", ".version_of_another_kind"}


def test_an_old_version_goes_as_a_whole(tmp_path, monkeypatch):
    remove, seen = published_files.shutil.rmtree, []

    def recorded(path):
        seen.append(published_files.versions_in(tmp_path))
        remove(path)

    monkeypatch.setattr(published_files.shutil, "rmtree", recorded)
    for version in (1, 2):
        publish_files({"w": jnp.ones(4)}, tmp_path, version=version, keep=1)
    assert seen == [[2]]  # version 1 has no name any more when its first file is removed
    assert [one.name for one in tmp_path.iterdir()] == ["version_0000000002"]
