"""Read by pyright alone, in `make lint`: what it must refuse is marked, and a mark without need is an error."""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import assert_type

import jax
import optax

from zerojax import Offload, ZeroState, zero_shard


def loop(state: ZeroState, batch: jax.Array):
    tx = zero_shard(optax.sgd(0.1), stage=3, view="device", offload=Offload(optimizer="host"))
    step = tx.train_step(lambda params, batch: batch.mean())
    state, metrics = step(state, batch)
    assert_type(metrics["grad_norm"], jax.Array)
    assert_type(metrics["loss_scale"], jax.Array)
    print(metrics["los"])  # pyright: ignore[reportGeneralTypeIssues]
    zero_shard(optax.sgd(0.1), stage=5)  # pyright: ignore[reportArgumentType]
    zero_shard(optax.sgd(0.1), stage="3")  # pyright: ignore[reportArgumentType]
    zero_shard(optax.sgd(0.1), stage=3, view="rows")  # pyright: ignore[reportArgumentType]
    zero_shard(optax.sgd(0.1), stage=3, mesh=jax.devices())  # pyright: ignore[reportArgumentType]
    zero_shard(optax.sgd(0.1), stage=3, offload="host")  # pyright: ignore[reportArgumentType]
    zero_shard(optax.sgd(0.1), stage=3, precision="bf16")  # pyright: ignore[reportArgumentType]
    zero_shard(optax.sgd(0.1), stage=3, offset=1)  # pyright: ignore[reportCallIssue]
    zero_shard(0.1, stage=3)  # pyright: ignore[reportArgumentType]
    Offload(optimizer="gpu")  # pyright: ignore[reportArgumentType]
    tx.train_step(lambda params, batch: batch.mean(), accumulat=2)  # pyright: ignore[reportCallIssue]
