"""Error messages that say what to do: each error is raised, and then what it says is done.

Losses and steps are only traced, because all of these errors are found before a program is compiled.
"""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax import Narrow, Offload, Precision, Tuning, zero_shard
from zerojax.checkpoint import export, import_params
from zerojax.data import shard_batches
from zerojax.metrics import Mean, PerRow, Sum

PARAMS = {"w": jnp.linspace(0.1, 1, 64).reshape(8, 8), "b": jnp.ones(8)}
SHAPES = jax.eval_shape(lambda: PARAMS)
X = np.ones((16, 8), np.float32)
KEY = jax.random.key(0)
ZERO = functools.partial(zero_shard, optax.sgd(0.1, momentum=0.9), mesh=mesh_of(8), tuning=Tuning(persist_below=1))
TX = ZERO(stage=3)
GLOBAL, DEVICE = ZERO(stage=3, view="global"), ZERO(stage=3, view="device")
HOST = ZERO(stage=3, offload=Offload(optimizer="host", update="device"))
EXPLICIT = ZERO(stage=3, mesh=mesh_of(8, kind=AxisType.Explicit))
NARROW, THREE = ZERO(stage=3, state=Narrow("int8")), ZERO(stage=3, mesh=mesh_of(3))
MASTERS = ZERO(stage=1, precision=Precision.bf16())
GRID = functools.partial(ZERO, stage=3, mesh=mesh_of(4, 2, names=("data", "seq")))
TILED = GRID(axis="data", batch_spec=P("data", "seq"))


def loss(params, x):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def noisy(params, x, key):
    key = jax.random.wrap_key_data(key) if key.dtype == jnp.uint32 else key
    return loss(params, x + jax.random.normal(key, x.shape))


def with_mutable(params, mutable, x):
    return loss(params, x), mutable


def divided(params, x):
    return loss(params, jax.lax.with_sharding_constraint(x, NamedSharding(mesh_of(8), P("data"))))


def with_aux(make):
    return lambda params, x: (loss(params, x), make(x))


def gradient(fn=loss, batch=X, *args, tx=TX, params=SHAPES, mutable=None, **options):
    state = () if mutable is None else (mutable,)
    run = tx.value_and_grad(fn, mutable=mutable is not None, **options)
    return jax.eval_shape(lambda params: run(params, *state, batch, *args), params)


def in_parts(fn=loss, batch=X, *args, **options):
    return gradient(fn, batch, *args, accumulate=2, **options)


def step(fn=loss, batch=X, *, tx=TX, made=None, mutable=None, **options):
    state = (made or tx).create(SHAPES, mutable=mutable)
    return tx.train_step(fn, **options).trace(state, batch)


def in_jit(fn=loss, tx=TX, **options):
    return jax.jit(tx.train_step(fn, **options)).trace(tx.create(SHAPES), X)


def updated(grads=lambda p: p, tx=TX, params=True):
    update = lambda p: tx.update(grads(p), tx.init(p), *([p] if params else []))
    return jax.eval_shape(update, SHAPES)


def with_state(mutable):
    return TX.train_step(with_mutable, mutable=True).trace(TX.create(SHAPES, mutable=mutable), X)


def of_a_wide_batch(columns, tx=TILED):
    return gradient(lambda p, x: loss(p, x.mean(1)), np.ones((8, columns, 8), np.float32), tx=tx)


class Tensor:
    """An array of another library."""

    shape, dtype = X.shape, "torch.float32"

    def __array__(self, dtype=None, copy=None):
        return X


# What raises, words of the message, what it says to do.
OF_BATCHES = {
    "rows": (lambda: step(batch=X[:10]), r"10 rows.*8 devices\. Give a batch of 8 or 16", lambda: step(batch=X[:8])),
    "rows of microbatches": (
        lambda: gradient(batch=X, accumulate=3),
        r"16 rows.*8 devices of 3 microbatches each.*24 parts.*batch of 24 rows",
        lambda: gradient(batch=np.ones((24, 8), np.float32), accumulate=3),
    ),
    "few rows": (lambda: gradient(batch=X[:3]), "Give a batch of 8 rows", lambda: gradient(batch=X[:8])),
    "scalar": (
        lambda: gradient(lambda p, b: loss(p, b["x"]) * b["s"], {"x": X, "s": 2.0}),
        r"batch\['s'\].*Pass values that belong to no row as further arguments, after the batch",
        lambda: gradient(lambda p, b, s: loss(p, b["x"]) * s, {"x": X}, 2.0),
    ),
    "lists": (
        lambda: gradient(lambda p, b: loss(p, jnp.asarray(b)), X.tolist()),
        r"batch\[0\]\[0\].*lists of numbers as arrays",
        lambda: gradient(batch=np.asarray(X.tolist(), np.float32)),
    ),
    "other rows": (
        lambda: gradient(lambda p, b: loss(p, b["x"]) * b["s"].sum(), {"x": X, "s": np.ones(8)}),
        r"batch\['x'\] has 16 rows, and batch\['s'\] has 8.*as further arguments, after the batch",
        lambda: gradient(lambda p, b, s: loss(p, b["x"]) * s.sum(), {"x": X}, np.ones(8)),
    ),
    "no rows": (lambda: step(batch=X[:0]), r"\[0, 8\], of no rows.*Drop this batch", step),
    "text": (
        lambda: gradient(lambda p, b: loss(p, b["x"]), {"x": X, "ids": np.array(["a"] * 16)}),
        "Leave it out of the batch",
        lambda: gradient(lambda p, b: loss(p, b["x"]), {"x": X}),
    ),
    "tensor": (
        lambda: gradient(batch=Tensor()),
        r"Convert it with np.asarray\(x\), let zerojax.data.shard_batches\(loader, tx\) convert it",
        lambda: [gradient(batch=x) for x in (np.asarray(Tensor()), next(shard_batches([Tensor()], TX)))],
    ),
    "columns": (
        lambda: of_a_wide_batch(7),
        "Give a size of 6 or 8.*or a batch_spec= that does not divide this dim",
        lambda: (of_a_wide_batch(8), of_a_wide_batch(7, GRID(axis="data", batch_spec=P("data")))),
    ),
    "no batch": (
        lambda: TX.value_and_grad(lambda p: loss(p, X))(PARAMS),
        r"closes over are not divided.*loss_fn\(params, batch\), or loss_fn\(params, x=x",
        lambda: jax.eval_shape(lambda p: TX.value_and_grad(loss)(p, x=X), SHAPES),
    ),
    "raw key": (
        lambda: in_parts(noisy, X, jax.random.key_data(KEY)),
        r"args\[0\] is uint32\[2\].*Pass jax.random.key\(seed\), or jax.random.wrap_key_data",
        lambda: in_parts(noisy, X, jax.random.wrap_key_data(jax.random.key_data(KEY))),
    ),
    "unhashable": (
        lambda: gradient(lambda p, x, o: loss(p, x), X, {"names": {1, 2}}),
        r"args\[0\]\['names'\] is a set.*Pass arrays or hashable values, or let the loss close over it",
        lambda: gradient(lambda p, x, o: loss(p, x), X, {"names": frozenset({1, 2})}),
    ),
    "ref": (
        lambda: gradient(lambda p, x, r: loss(p, x), X, {"count": jax.new_ref(jnp.zeros(()))}),
        r"args\[0\]\['count'\] is a jax.Ref.*Pass its value.*as aux, or with mutable=True",
        lambda: gradient(with_mutable, mutable=jnp.zeros(())),
    ),
}
OF_LOSSES = {
    "losses per row": (
        lambda: gradient(lambda p, x: (x @ p["w"]).sum(1)),
        r"has shape \[16\].*Take jnp.mean\(...\) over the rows, or return \(total, weight\) with weighted=True",
        lambda: gradient(lambda p, x: ((x @ p["w"]).sum(), 16.0), weighted=True),
    ),
    "aux": (
        lambda: gradient(with_aux(lambda x: ())),
        r"not a tuple\. For \(loss, aux\) pass has_aux=True",
        lambda: gradient(with_aux(lambda x: ()), has_aux=True),
    ),
    "no weight": (
        lambda: gradient(weighted=True),
        r"returns \(total, weight\)",
        lambda: gradient(lambda p, x: (loss(p, x), 1.0), weighted=True),
    ),
    "no mutable": (
        lambda: gradient(lambda p, m, x: ((loss(p, x), 1.0), m), mutable=X, weighted=True, has_aux=True),
        r"returns \(\(total, weight\), mutable, aux\)",
        lambda: gradient(lambda p, m, x: ((loss(p, x), 1.0), m, ()), mutable=X, weighted=True, has_aux=True),
    ),
    "other mutable": (
        lambda: gradient(lambda p, m, x: (loss(p, x), [m]), mutable=X),
        "Return a state of the same structure",
        lambda: gradient(with_mutable, mutable=X),
    ),
    "mutable of another type": (
        lambda: gradient(lambda p, m, x: (loss(p, x), m.astype(int)), mutable=X),
        "Return the same shape and type",
        lambda: gradient(with_mutable, mutable=X),
    ),
    "None": (lambda: gradient(lambda p, x: None), "is its `return` missing", gradient),
    "integer": (lambda: gradient(lambda p, x: jnp.sum(x > 0)), "Compute it with floating point", gradient),
    "rows in aux": (
        lambda: in_parts(with_aux(lambda x: {"rows": x[:, 0]}), has_aux=True),
        r"zerojax\.metrics: Mean\(x\).*PerRow\(x\) for one entry per row",
        lambda: in_parts(with_aux(lambda x: {"rows": PerRow(x[:, 0]), "m": Mean(x.mean())}), has_aux=True),
    ),
    "all rows in aux": (
        lambda: gradient(with_aux(lambda x: x.T @ x), has_aux=True, tx=DEVICE),
        'Or let the loss see all rows: zero_shard.*view="global"',
        lambda: gradient(with_aux(lambda x: x.T @ x), has_aux=True, tx=GLOBAL),
    ),
    "count in aux": (
        lambda: in_parts(with_aux(lambda x: {"n": Mean(jnp.int32(1))}), has_aux=True),
        r"aux\['n'\] is int32.*mark it with zerojax\.metrics\.Sum",
        lambda: in_parts(with_aux(lambda x: {"n": Sum(jnp.int32(1))}), has_aux=True),
    ),
    "scalar rows in aux": (
        lambda: in_parts(with_aux(lambda x: PerRow(x.sum())), has_aux=True),
        r"Mark it with zerojax\.metrics\.Mean or zerojax\.metrics\.Sum",
        lambda: in_parts(with_aux(lambda x: (Mean(x.sum()), Sum(x.sum()))), has_aux=True),
    ),
    "sum": (
        lambda: in_parts(lambda p, x: ((x @ p["w"]) ** 2).sum()),
        "Give reduction='sum'",
        lambda: in_parts(lambda p, x: ((x @ p["w"]) ** 2).sum(), reduction="sum"),
    ),
    "weights and reduction": (
        lambda: gradient(weighted=True, reduction="sum"),
        "Give one of them",
        lambda: gradient(reduction="sum"),
    ),
    "divided rows": (lambda: gradient(divided, tx=DEVICE), 'Pass view="global"', lambda: gradient(divided, tx=GLOBAL)),
    "trained key": (
        lambda: gradient(params=SHAPES | {"key": KEY}),
        "freeze it: trainable=lambda path, x: not jnp.issubdtype",
        lambda: gradient(
            params=SHAPES | {"key": KEY},
            tx=ZERO(stage=3, trainable=lambda path, x: not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)),
        ),
    ),
    "float8": (
        lambda: gradient(params=SHAPES | {"q": jnp.ones((8, 8), jnp.float8_e4m3fn)}),
        "Keep the parameter in bfloat16 or wider and cast it in the loss",
        lambda: gradient(
            lambda p, x: loss(p, x) * p["q"].astype(jnp.float8_e4m3fn).astype(jnp.float32).mean(),
            params=SHAPES | {"q": jnp.ones((8, 8), jnp.bfloat16)},
        ),
    ),
}
OF_STEPS = {
    "no state": (lambda: TX.train_step(loss)(PARAMS, X), r"not dict.*tx\.create\(params\)", step),
    "shapes": (lambda: TX.train_step(loss)(TX.create(SHAPES), X), "`lower` and `trace` of the step take shapes", step),
    "other stage": (lambda: step(made=ZERO(stage=1)), r"Make it with this transformation's create\(params\)", step),
    "other mesh": (
        lambda: TX.train_step(loss)(THREE.create(PARAMS), X),
        r"on 3 devices .* on 8 devices .* move a live state with reshard\(state, to=tx\)",
        lambda: TX.train_step(loss)(THREE.reshard(THREE.create(PARAMS), to=TX), X),
    ),
    "narrow": (
        lambda: step(made=NARROW),
        r"persist_below=1, state=Narrow\(\.\.\.\)\), and .* \(persist_below=1\)",
        lambda: step(made=NARROW, tx=NARROW),
    ),
    "no mutable": (lambda: with_state(None), r"tx\.create\(params, mutable=", lambda: with_state(X)),
    "mutable": (
        lambda: step(mutable=X),
        "Pass mutable=True to train_step, or make the state without it",
        lambda: (with_state(X), step()),
    ),
    "memory in jit": (
        lambda: in_jit(memory="1 GB"),
        r"use zerojax\.remat_within in the loss instead",
        lambda: in_jit(zerojax.remat_within(loss, budget="1 GB")),
    ),
    "options in jit": (
        lambda: in_jit(compiler_options={"xla_cpu_enable_fast_math": False}),
        r"Pass the options to the jax.jit that calls the step.*xla_cpu_enable_fast_math",
        lambda: jax.jit(TX.train_step(loss), compiler_options={"xla_cpu_enable_fast_math": False}),
    ),
    "memory without a limit": (
        lambda: step(memory="auto"),
        'Give the bytes per device, such as memory="72 GB"',
        lambda: TX.train_step(loss, memory="72 GB"),
    ),
    "no memory": (
        lambda: TX.train_step(loss).memory_fit(TX.create(SHAPES), X),
        r"Make it with tx\.train_step\(loss, memory=",
        lambda: TX.train_step(loss, memory="1 GB"),
    ),
    "options": (
        lambda: TX.train_step(loss, compiler_options="fast"),
        r"With \{\} the step has no options",
        lambda: step(compiler_options={}),
    ),
    "value of an option": (
        lambda: TX.train_step(loss, compiler_options={"xla_cpu_enable_fast_math": None}),
        "str, bool, int or float",
        lambda: TX.train_step(loss, compiler_options={"xla_cpu_enable_fast_math": False}),
    ),
    "no parameters": (
        lambda: updated(tx=MASTERS, params=False),
        r"Call update\(grads, state, params\)",
        lambda: updated(tx=MASTERS),
    ),
    "other gradients": (
        lambda: updated(lambda p: {"w": p["w"]}),
        r"it lacks \['b'\]\. Pass the gradients of the parameters given",
        updated,
    ),
    "gradients of other shapes": (
        lambda: updated(lambda p: p | {"b": p["w"]}),
        r"grads\['b'\] has shape \[8, 8\], but its parameter has \[8\].*Pass gradients of these parameters",
        updated,
    ),
}
CASES = {
    f"{kind}, {name}": case
    for kind, cases in (("batch", OF_BATCHES), ("loss", OF_LOSSES), ("step", OF_STEPS))
    for name, case in cases.items()
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_message_says_to_do_works(case):
    broken, words, mended = CASES[case]
    with pytest.raises((ValueError, TypeError), match=f"(?s){words}"):
        broken()
    mended()


def test_what_messages_about_used_states_say_to_do_works():
    one = HOST.train_step(loss)
    state = HOST.create(PARAMS)
    after, _ = one(state, X)
    with pytest.raises(ValueError, match="Continue with the state that the step returned"):
        one(state, X)
    with pytest.raises(ValueError, match=r"Call tx.unshard\(state.params\) and tx.unshard\(state.opt_state\)"):
        HOST.unshard(after)
    with pytest.raises(TypeError, match=r"Checkpointer, or convert it with tx.unshard\(opt_state\)"):
        pickle.dumps(after)
    pickle.dumps(jax.device_get((HOST.unshard(after.params), HOST.unshard(after.opt_state, after.params))))
    jax.block_until_ready(one(after, X))


def test_what_messages_about_parameters_on_disk_say_to_do_works(tmp_path):
    tx = ZERO(stage=3, offload=Offload(optimizer="disk", params="disk", path=tmp_path / "state"))
    with pytest.raises(ValueError, match="Leave out memory="):
        tx.train_step(loss, memory="1 GB")
    with pytest.raises(TypeError, match=r"Make it with this transformation's tx\.create"):
        tx.train_step(loss)(TX.create(PARAMS), X)
    state = tx.create(PARAMS)
    with pytest.raises(TypeError, match="Call it from Python"):
        jax.jit(tx.eval_step(loss))(state.params, X)
    np.testing.assert_allclose(tx.eval_step(loss)(state.params, X), loss(PARAMS, X), rtol=1e-5)
    with pytest.raises(TypeError, match=r"Call the step as it is, outside of jax\.jit"):
        tx.train_step(loss).trace(state, X)
    with pytest.raises(
        TypeError,
        match=r"are on disk, and tx\.value_and_grad runs one program.*Train them with the step of tx\.train_step",
    ):
        tx.value_and_grad(loss)(state.params, X)
    sharded = tx.shard(PARAMS)
    with pytest.raises(ValueError, match=r"export\(params, path\), and then state.replace"):
        tx.train_step(loss)(state.replace(params=sharded), X)
    export(sharded, tmp_path / "weights")
    state = state.replace(params=import_params(tmp_path / "weights", state.params))
    state, metrics = tx.train_step(loss)(state, X)
    np.testing.assert_allclose(metrics["loss"], loss(PARAMS, X), rtol=1e-5)
    zerojax.offload.close(state)
    with pytest.raises(ValueError, match=r"zerojax\.offload\.close was called\. Make a state with tx\.create"):
        tx.eval_step(loss)(state.params, X)
    tx.eval_step(loss)(tx.create(PARAMS).params, X)
