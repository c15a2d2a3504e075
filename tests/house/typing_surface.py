"""Read by pyright alone, in `make lint`: what it must refuse is marked, and a mark without need is an error."""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import assert_type

import jax
import optax

import zerojax
from zerojax import Offload, Tuning, Wire, ZeroState, estimate, zero_shard


def loop(state: ZeroState, batch: jax.Array):
    tx = zero_shard(optax.sgd(0.1), stage=3, view="device", offload=Offload(optimizer="host"))
    step = tx.train_step(lambda params, batch: batch.mean())
    state, metrics = step(state, batch)
    assert_type(metrics["grad_norm"], jax.Array)
    assert_type(metrics["loss_scale"], jax.Array)
    print(metrics["los"])  # pyright: ignore[reportGeneralTypeIssues]
    zero_shard(optax.sgd(0.1), stage=4)  # pyright: ignore[reportArgumentType]
    zero_shard(optax.sgd(0.1))  # pyright: ignore[reportCallIssue]
    zero_shard(optax.sgd(0.1), stage="3")  # pyright: ignore[reportArgumentType]
    zero_shard(optax.sgd(0.1), stage=3, view="rows")  # pyright: ignore[reportArgumentType]
    zero_shard(optax.sgd(0.1), stage=3, mesh=jax.devices())  # pyright: ignore[reportArgumentType]
    zero_shard(optax.sgd(0.1), stage=3, offload="host")  # pyright: ignore[reportArgumentType]
    zero_shard(optax.sgd(0.1), stage=3, precision="bf16")  # pyright: ignore[reportArgumentType]
    zero_shard(optax.sgd(0.1), stage=3, offset=1)  # pyright: ignore[reportArgumentType]
    zero_shard(0.1, stage=3)  # pyright: ignore[reportArgumentType]
    Offload(optimizer="gpu")  # pyright: ignore[reportArgumentType]
    tx.train_step(lambda params, batch: batch.mean(), accumulat=2)  # pyright: ignore[reportCallIssue]
    Offload("hosst")  # pyright: ignore[reportArgumentType]
    Wire("int5")  # pyright: ignore[reportArgumentType]
    print(zerojax.Rows)  # pyright: ignore[reportAttributeAccessIssue]
    print(zerojax.zero_shrad)  # pyright: ignore[reportAttributeAccessIssue]


def tuning():
    """A setting that is misspelled, or given beside `tuning=`, is found before the script runs."""
    tuned = Tuning(shard_axis="gpu", prefetch=2, bucket_bytes="64 MiB", matrix_updates="owner")
    assert_type(tuned.prefetch, int)
    zero_shard(optax.sgd(0.1), stage=3, axis=("host", "gpu"), tuning=tuned)
    estimate(7e9, tuning=tuned)
    Tuning(prefech=2)  # pyright: ignore[reportCallIssue]
    Tuning(prefetch="2")  # pyright: ignore[reportArgumentType]
    Tuning(matrix_updates="all")  # pyright: ignore[reportArgumentType]
    tuned.prefetch = 1  # pyright: ignore[reportAttributeAccessIssue]
    zero_shard(optax.sgd(0.1), stage=3, tuning={"prefetch": 2})  # pyright: ignore[reportArgumentType]
    zero_shard(optax.sgd(0.1), stage=3, prefetch=2)  # pyright: ignore[reportArgumentType]
    zero_shard(optax.sgd(0.1), stage=3, prefech=2)  # pyright: ignore[reportArgumentType]
    estimate(7e9, prefetch=2)  # pyright: ignore[reportCallIssue]


def loss(params: dict[str, jax.Array], batch: jax.Array, *, scale: float = 1.0) -> jax.Array:
    return scale * (batch @ params["w"]).mean()


def loss_and_rows(params: dict[str, jax.Array], batch: jax.Array) -> tuple[jax.Array, int]:
    return loss(params, batch), len(batch)


def model(key: jax.Array, width: int) -> dict[str, jax.Array]:
    return {"w": jax.random.normal(key, (width, width))}


def functions(batch: jax.Array):
    """What wraps a function has its types."""
    tx = zero_shard(optax.sgd(0.1), stage=3)
    params = tx.init_params(model, jax.random.key(0), 8)
    assert_type(params, dict[str, jax.Array])
    tx.init_params(model, jax.random.key(0), "8")  # pyright: ignore[reportArgumentType]
    differentiated = tx.value_and_grad(loss)
    assert_type(differentiated(params, batch, scale=2.0), tuple[jax.Array, dict[str, jax.Array]])
    differentiated(params, batch, scales=2.0)  # pyright: ignore[reportCallIssue]
    with_aux = tx.value_and_grad(loss_and_rows, has_aux=True)
    assert_type(with_aux(params, batch), tuple[tuple[jax.Array, int], dict[str, jax.Array]])
    assert_type(tx.eval_step(loss)(params, batch), jax.Array)
    tx.eval_step(loss)(params)  # pyright: ignore[reportCallIssue]
    tx.value_and_grad(loss, weighted=True)(params, batch)
    tx.value_and_grad(lambda params, batch: params["w"].sum())(params, batch)
    tx.eval_step(lambda params, batch: params["w"] @ batch)(params, batch)
