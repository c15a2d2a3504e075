"""Every check of an option: the last value that passes, the first that is refused, and the records that result."""

import pickle
import warnings

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of, shape
from flat_options import tuned
from jax.sharding import AxisType, PartitionSpec

from zerojax import Tuning, zero_shard
from zerojax.config import Config, DataMesh, check_count, check_word, path_of, tuning
from zerojax.config.batch_dims import BatchSpec, is_divisible
from zerojax.config.chosen import LeafMask
from zerojax.config.config import mesh_record, rebuilt_mesh
from zerojax.config.data_mesh import axes_of, entry_axes, in_words, spec_entry
from zerojax.config.precision import LARGEST_SCALE, DynamicScale, Precision
from zerojax.config.tuning import OVERLAP, options_of_mesh
from zerojax.config.wire import LEAST_BLOCKS, Wire
from zerojax.offload.options import Offload

AXES = ("host", "gpu")
HOST = Offload(optimizer="host")
BOTH = Offload(optimizer="host", params="host")


def config(stage=3, axis=AXES, **options):
    return Config(optax.sgd(1.0), stage, mesh_of(2, 4), axis=axis, **options)


def zero(axis=AXES, stage=1, mesh=None, **options):
    return zero_shard(optax.sgd(1.0), stage=stage, mesh=mesh or mesh_of(2, 4), axis=axis, **tuned(**options))


@pytest.mark.parametrize("stage", [4, -1, "3", 2.0, True, None])
def test_an_unknown_stage(stage):
    with pytest.raises(ValueError, match=r"Unknown ZeRO stage .*0: everything replicated"):
        zero(stage=stage)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: zero("batch"), ValueError, r"no axis 'batch': its axes are \('host', 'gpu'\).*axis="),
        (lambda: zero(("host", "rack")), ValueError, "no axis 'rack'"),
        (lambda: zero(("gpu", "gpu")), ValueError, "each only once"),
        (lambda: zero(()), ValueError, "at least one"),
        (lambda: zero(None), TypeError, "names one mesh axis, or several"),
        (lambda: zero(0), TypeError, "names one mesh axis, or several"),
        (lambda: zero(("data", 1)), TypeError, "names one mesh axis, or several"),
        (lambda: zero(mesh=mesh_of(2, 4, kind=AxisType.Manual)), ValueError, r"Manual axes: 'host'.*Auto or Explicit"),
        (lambda: zero(mesh=jax.devices()), TypeError, r"jax\.sharding\.Mesh, not list"),
        (lambda: zero_shard(optax.sgd(1.0), stage=1, axis=AXES), ValueError, "names several axes, and no mesh"),
        (lambda: zero_shard(3e-4, stage=1), TypeError, "wraps an optax transformation.*got float"),
        (lambda: zero(persist_below=-1), ValueError, "persist_below counts elements"),
        (lambda: zero(persist_below=1e5), TypeError, "persist_below counts elements and must be an int, not 100000.0"),
        (lambda: zero(persist_below=True), TypeError, "persist_below counts elements and must be an int, not True"),
        (lambda: check_count("n", 2, "rows", least=3), ValueError, "at least 3, but is 2"),
        (lambda: check_word("w", "c", ("a", None)), ValueError, "w is one of 'a', None, not 'c'"),
        (lambda: config(view="device "), ValueError, "view= is one of"),
        (lambda: Tuning(matrix_updates="all"), ValueError, "matrix_updates= is one of"),
        (lambda: config(shard_axis=("rack",)), ValueError, "shard_axis names axis 'rack', over which no rows"),
        (lambda: config(params_axis=("gpu", "rack")), ValueError, "params_axis names axis 'rack'"),
        (lambda: config(2, params_axis=("gpu",)), ValueError, "needs stage 3: stage 2"),
        (lambda: config(params_axis=("gpu",), shard_axis=("gpu",)), ValueError, "Give one of them"),
        (lambda: config(params_axis=("gpu",), offload=BOTH), ValueError, "shards a parameter like its optimizer state"),
        (lambda: Tuning(prefetch=-1), ValueError, "prefetch counts groups and must be at least 0"),
        (lambda: Tuning(bucket_bytes=-1), ValueError, "bucket_bytes=-1 is no size of at least 0 bytes"),
        (lambda: Tuning(reshard_after_forward=8), TypeError, "reshard_after_forward is True or False, not 8"),
        (lambda: Tuning(shard_axis=("gpu", "gpu")), ValueError, "each only once"),
        (lambda: zero_shard(optax.sgd(1.0), stage=1, tuning={"prefetch": 2}), TypeError, "tuning is a zerojax.Tuning"),
        (lambda: zero_shard(optax.sgd(1.0), stage=1, prefetch=2), TypeError, r"Give tuning=Tuning\(prefetch=2\)"),
        (lambda: zero_shard(optax.sgd(1.0), stage=1, prefech=2), TypeError, "unexpected keyword argument 'prefech'"),
        (lambda: config(precision="bf16"), TypeError, r"precision is a zerojax.Precision.*not 'bf16'"),
        (lambda: config(offload="host"), TypeError, r"offload is a zerojax.Offload.*not 'host'"),
        (lambda: config(wire="int8"), TypeError, r"wire is a zerojax.Wire.*not 'int8'"),
        (lambda: config(0, offload=HOST), ValueError, "Stage 0 shards nothing"),
        (lambda: config(2, offload=BOTH), ValueError, "needs stage 3: at stage 2"),
        (lambda: config(0, wire=Wire(reduce="int8")), ValueError, "Stage 0 all-reduces"),
        (lambda: config(2, wire=Wire(gather="int8")), ValueError, "stage 2 stores what it gathers"),
        (lambda: config(shard_axis=("gpu",), wire=Wire(reduce="int8")), ValueError, "rounded once more"),
        (lambda: config(wire=Wire(reduce="int8", over="rack")), ValueError, r"over=\) names axis 'rack'"),
        (lambda: Wire(gather="int3"), ValueError, r"Wire\(gather=\) is one of None, 'int4'"),
        (lambda: Wire(reduce=8), ValueError, r"Wire\(reduce=\) is one of"),
        (lambda: Wire(), ValueError, "quantises nothing"),
        (lambda: Wire(gather="int8", rounding="up"), ValueError, r"Wire\(rounding=\)"),
        (lambda: Wire(gather="int8", rounding="stochastic"), ValueError, "reduce=None sends none"),
        (lambda: Wire(reduce="float8_e5m2", rounding="stochastic"), ValueError, "sends none"),
        (lambda: Wire(gather="int8", block=1), ValueError, "at least 2"),
        (lambda: Wire(gather="int8", block=3), ValueError, "must be even"),
        (lambda: Wire(gather="int8", over=()), TypeError, "names mesh axes"),
        (lambda: Wire(gather="int8", over=("host", 1)), TypeError, "names mesh axes"),
        (lambda: Wire(gather="int8", where=(1,)), TypeError, r"Wire\(where=\) is a function of"),
        (lambda: DynamicScale(growth_interval=0), ValueError, "at least 1"),
        (lambda: DynamicScale(hysteresis=0), ValueError, "at least 1"),
        (lambda: DynamicScale(factor=1.0), ValueError, "greater than 1.0"),
        (lambda: DynamicScale(factor=float("inf")), ValueError, "finite in float32"),
        (lambda: DynamicScale(factor=float("nan")), ValueError, "factor=.*but is nan"),
        (lambda: DynamicScale(initial=float("nan")), ValueError, "initial=nan"),
        (lambda: DynamicScale(floor=0.0), ValueError, "greater than 0.0"),
        (lambda: DynamicScale(initial=0.5), ValueError, "at least floor=1.0"),
        (lambda: DynamicScale(initial=1e39), ValueError, "finite in float32"),
        (lambda: Precision(compute=jnp.int8), TypeError, "is a floating type"),
        (lambda: Precision(reduce="float64"), ValueError, "jax_enable_x64"),
        (lambda: Precision(master=jnp.bfloat16), ValueError, "narrower than compute"),
        (lambda: Precision(compute=jnp.float16, master=jnp.bfloat16, loss_scale=1), ValueError, "narrower"),
        (lambda: Precision(keep="norm"), TypeError, "keep=.*not str"),
        (lambda: Precision(loss_scale=True), TypeError, "not True"),
        (lambda: Precision(loss_scale="static"), TypeError, "not 'static'"),
        (lambda: Precision(loss_scale=0), ValueError, "must be positive"),
        (lambda: Precision(loss_scale=1e39), ValueError, "finite in float32"),
        (lambda: LeafMask.of({"a/b": True, "a": {"b": True}}), ValueError, "have one path"),
        (lambda: LeafMask.of({"a": 1}, "overwrite"), TypeError, "overwrite= is read as a mask, and its leaf 'a' is 1"),
        (lambda: LeafMask.of({"a": True})("b", None), ValueError, "has no leaf 'b'"),
        (lambda: LeafMask.of({"a": True, "b": True}).check(["a"]), ValueError, "has a leaf 'b', which"),
    ],
)
def test_what_an_option_cannot_be_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_sizes_are_numbers_or_text():
    offload = Offload(optimizer="host", chunk_bytes="64 KB", device_bytes="1.5 GiB")
    assert (offload.chunk_bytes, offload.device_bytes) == (64_000, 3 << 29)
    assert zero_shard(optax.sgd(0.1), stage=1, tuning=Tuning(bucket_bytes="4 MiB")).config.bucket_bytes == 4 << 20
    assert Offload(optimizer="host", chunk_bytes=32e6).chunk_bytes == 32_000_000
    for wrong in ("64 KB/s", "-1 MB", "four MB", True, None, float("inf")):
        with pytest.raises((TypeError, ValueError), match=r"chunk_bytes=.*(no size|number of bytes)"):
            Offload(optimizer="host", chunk_bytes=wrong)


def test_the_last_values_that_fit_are_taken():
    check_count("n", 3, "rows", least=3)
    check_word("w", None, ("a", None))
    for stage in range(4):
        config(stage, persist_below=0, prefetch=0, bucket_bytes=0, matrix_updates="owner", view="device")
    config(1, offload=HOST, wire=Wire(reduce="int8"), shard_axis=())
    config(3, offload=BOTH, shard_axis=("gpu",))
    config(3, params_axis=("gpu",), offload=HOST)
    config(3, shard_axis=("gpu",), wire=Wire(gather="int8", over=AXES))
    for over in (None, "host", AXES):
        config(3, params_axis=("gpu",), wire=Wire(reduce="int4", over=over))
    for reduce in ("int4", "int8"):
        assert Wire(reduce=reduce, rounding="stochastic", block=2).over is None
    Offload(optimizer="host", chunk_bytes=1, fraction=0)
    Offload(optimizer="disk", path=".", fraction=1)
    DynamicScale(initial=1.0, growth_interval=1, hysteresis=1, factor=LARGEST_SCALE, floor=1.0)
    DynamicScale(initial=LARGEST_SCALE)
    Precision(loss_scale=LARGEST_SCALE, keep=lambda path, leaf: True)


def test_options_are_kept_in_one_form():
    assert Wire(gather="int8", over="host").over == ("host",)
    assert Wire(gather="int8", over=list(AXES)).over == AXES
    assert Wire(gather="int8", where="*w").where == Offload(optimizer="host", where=["*w"]).where == ("*w",)
    assert Precision(loss_scale=4).loss_scale == 4.0
    assert Precision.fp16().loss_scale == Precision(loss_scale="dynamic").loss_scale == DynamicScale()
    assert Precision.fp32() == Precision()
    types = lambda p: [str(t) for t in (p.compute, p.reduce, p.master)]
    assert types(Precision.bf16(reduce=jnp.bfloat16)) == ["bfloat16", "bfloat16", "float32"]
    assert types(Precision.fp16()) == ["float16", "float32", "float32"]


def test_float16_without_a_scale_warns_and_nothing_else_does():
    with pytest.warns(UserWarning, match="gradients under 6e-8 become zero") as found:
        Precision(compute=jnp.float16)
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({"compute": jnp.float16, "loss_scale": 8}, {"compute": jnp.bfloat16}, {}):
            Precision(**options)


def test_a_wire_says_why_a_parameter_is_sent_as_it_is():
    wire, least = Wire(gather="int8", block=4), 4 * LEAST_BLOCKS
    assert wire.reason_against("w", shape(8, 8), least) == ""
    assert wire.reason_against("w", shape(8, 8), least - 1) == "small: 31 elements per shard, under 8 blocks of 4"
    assert wire.reason_against("w", shape(64), least) == "a vector"
    assert wire.reason_against("Embedder/w", shape(8, 8), least) == "an embedding by its name"
    chosen = Wire(gather="int8", block=4, where="*/kernel")
    assert chosen.reason_against("a/kernel", shape(64), least) == ""
    assert chosen.reason_against("kernel", shape(8, 8), least) == "not in Wire(where=)"


def test_a_mask_is_true_where_its_tree_is():
    mask = LeafMask.of({"a": np.bool_(True), "b": [False, True]})
    assert [mask(path, None) for path in ("a", "b/0", "b/1")] == [True, False, True]
    mask.check(["a", "b/0", "b/1", "c"])


def test_a_path_ends_before_the_value_of_a_variable():
    key, value = jax.tree_util.DictKey("w"), jax.tree_util.GetAttrKey("value")
    assert path_of((key, value)) == path_of((key,)) == "w"
    assert path_of((value,)) == "value"
    assert path_of((key, key)) == "w/w"


@pytest.mark.parametrize(
    ("shard", "params", "parts", "words"),
    [
        ((), (), (AXES, AXES, AXES), "axes 'host' and 'gpu'"),
        (("gpu",), (), (("gpu",),) * 3, "axis 'gpu', replicated over axis 'host'"),
        (
            (),
            ("gpu",),
            (("gpu",), ("gpu", "host"), ("gpu", "host")),
            "axes 'gpu' and 'host', parameters over axis 'gpu'",
        ),
    ],
)
def test_axes_of_each_part_of_the_model_states(shard, params, parts, words):
    mesh = DataMesh.for_stage({"host": 2, "gpu": 4, "model": 3}, AXES, 3, shard, params)
    assert (mesh.params, mesh.grads, mesh.opt_state) == parts
    assert mesh.in_words() == words
    assert mesh.workers == 8
    assert mesh.across == (("host",) if shard or params else ())
    assert (mesh.size(()), mesh.size(("host", "model")), mesh.compiler_axes) == (1, 6, ("model",))


def test_stage_0_counts_workers_and_has_nothing_to_replicate():
    mesh = DataMesh.for_stage({"data": 4}, ("data",), 0)
    assert (mesh.workers, mesh.in_words(), mesh.across) == (4, "axis 'data'", ())


def test_what_a_configuration_derives_from_stage_and_options():
    narrow = Precision.bf16()
    assert [config(stage).stores_compute_dtype for stage in range(4)] == [True, True, True, False]
    assert all(config(**options).stores_compute_dtype for options in ({"offload": HOST}, {"params_axis": ("gpu",)}))
    on_host = [config(**options).layout_policy.params_on_host for options in ({"offload": BOTH}, {"offload": HOST}, {})]
    assert on_host == [True, False, False]
    assert config(2, precision=narrow).has_master_weights
    assert not config(3, precision=narrow).has_master_weights
    assert not config(2, precision=Precision()).has_master_weights
    assert not config(2).has_master_weights


def test_a_batch_is_divisible_if_its_rows_and_the_dims_of_the_spec_are():
    data, spec = (
        DataMesh.for_stage({"data": 4, "sequence": 3}, ("data",), 3),
        BatchSpec.of(PartitionSpec("data", "sequence")),
    )
    assert is_divisible([np.ones((8, 7)), np.ones(4)], data, None)
    for undivided in (np.ones((6, 6)), np.ones(()), [np.ones(8), np.ones(7)]):
        assert not is_divisible(undivided, data, None)
    assert is_divisible([np.ones((4, 6)), np.ones(4)], data, spec)
    assert not is_divisible(np.ones((4, 7)), data, spec)


def test_entries_of_a_spec_and_their_axes_are_inverses():
    for axes in ((), ("a",), ("a", "b")):
        assert entry_axes(spec_entry(axes)) == axes
    assert entry_axes(PartitionSpec.UNCONSTRAINED) == ()
    assert axes_of(PartitionSpec("a", ("b", "a")), (None, "c")) == ["a", "b", "a", "c"]
    assert in_words(("a", "b", "c")) == "axes 'a', 'b' and 'c'"


@pytest.mark.parametrize(
    ("shape", "options", "is_set"),
    [
        ((2, 4), {"shard_axis": ("gpu",)}, True),
        ((2, 4), {"params_axis": ("gpu",)}, True),
        ((2, 4), {}, False),  # all collectives are of one group
        ((1, 8), {"shard_axis": ("gpu",)}, False),
        ((8, 1), {"shard_axis": ("gpu",)}, False),
        ((2, 4), {"shard_axis": ("gpu",), "stage": 0}, False),
    ],
)
def test_two_collectives_run_at_once_on_gpus_where_they_have_two_groups(shape, options, is_set, monkeypatch):
    found = Config(optax.sgd(1.0), **{"stage": 3, "user_mesh": mesh_of(*shape), "axis": AXES} | options)
    assert options_of_mesh(found) == {}  # on CPUs
    monkeypatch.setattr(tuning, "is_gpu", lambda config: True)
    assert options_of_mesh(found) == ({OVERLAP: 2} if is_set else {})
    monkeypatch.setenv("XLA_FLAGS", f"--{OVERLAP}=4")
    assert options_of_mesh(found) == {}


def test_a_pickled_configuration_has_the_mesh_of_the_same_devices():
    again = cloudpickle.loads(cloudpickle.dumps(given := config(precision=Precision.bf16())))
    with pytest.raises(AttributeError, match="no attribute 'tuning'"):
        again.tuning  # noqa: B018
    assert (again.user_mesh, again.precision) == (given.user_mesh, given.precision)


def test_a_mesh_of_devices_that_are_not_there_is_refused():
    *record, platform, ids = pickle.loads(pickle.dumps(mesh_record(mesh_of(4))))
    assert rebuilt_mesh(*record, platform, ids) == mesh_of(4)
    with pytest.raises(ValueError, match=r"\{'data': 4\} with the cpu devices .*77\].* no device 77, only \[0, "):
        rebuilt_mesh(*record, platform, (0, 1, 2, 77))
    with pytest.raises(ValueError, match="devices of other platforms"):
        rebuilt_mesh(*record, "tpu", ids)
