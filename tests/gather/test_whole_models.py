"""Stage 3 of a model that has a shard_map of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from zerojax import zero_shard

X = jax.random.normal(jax.random.key(0), (16, 16))


def assert_same_gradient(tx, loss, plain, params):
    value, grads = tx.value_and_grad(loss)(tx.shard(params), X)
    expected, expected_grads = jax.jit(jax.value_and_grad(plain))(params, X)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    found = jax.tree.leaves(jax.device_get(tx.unshard(grads)))
    for a, b in zip(found, jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)  # float32 sums over devices in another order


@pytest.mark.quick(1)
@pytest.mark.parametrize("view", ["global", "device"])
def test_a_shard_map_over_another_axis_within_the_model(view):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    whole, columns = PartitionSpec(), PartitionSpec(None, "model")

    def plain(params, batch):
        return jnp.tanh(batch @ params["w"]).sum() / batch.shape[0]

    def loss(params, batch):
        part = jax.shard_map(
            lambda w, x: jax.lax.psum(jnp.tanh(x @ w).sum(), "model"),
            mesh=mesh if view == "global" else jax.sharding.get_abstract_mesh(),
            in_specs=(columns, whole),
            out_specs=whole,
            axis_names={"model"},
            check_vma=False,
        )
        return part(params["w"], batch) / batch.shape[0]

    params = {"w": jax.random.normal(jax.random.key(1), (16, 32))}
    tx = zero_shard(optax.sgd(0.1), stage=3, mesh=mesh, persist_below=20, view=view)
    assert_same_gradient(tx, loss, plain, params)
