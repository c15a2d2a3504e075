"""The gradients that `value_and_grad` returns are sharded if their form allows that."""

import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import mesh_of
from jax.sharding import AxisType

from zerojax import Tuning, zero_shard
from zerojax.layout.tree import layout_of
from zerojax.train.tree_api import TreeForm


@pytest.mark.parametrize(("stage", "sharded"), [(0, set()), (1, set()), (2, {"even"}), (3, {"even", "odd"})])
def test_gradients_are_sharded_if_their_form_allows_it(stage, sharded):
    """At stage 2 the parameter of a padded gradient is a plain array, so the gradient is one, too."""
    params = {"even": jnp.ones((8, 3)), "odd": jnp.ones((7, 5)), "small": jnp.ones(3)}
    tx = zero_shard(optax.sgd(1.0), stage=stage, mesh=mesh_of(4), tuning=Tuning(persist_below=10))
    stored = tx.shard(params)
    loss = lambda params, rows: rows.mean() * sum(jnp.sum(x**2) for x in jax.tree.leaves(params))
    _, grads = tx.value_and_grad(loss)(stored, jnp.ones(4))
    is_sharded = lambda x: not jax.tree.leaves(x)[0].sharding.is_fully_replicated
    assert {name for name, x in grads.items() if is_sharded(x)} == sharded
    specs = {name: sharding.spec for name, sharding in tx.shardings(params).grads.items()}
    assert {name for name, spec in specs.items() if any(spec)} == sharded


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2)])
def test_gradients_are_sharded_like_the_optimizer_state_over_all_axes(sizes):
    """Each host stores all parameters, but only its part of the gradients and of the optimizer state."""
    mesh = jax.make_mesh(sizes, ("host", "gpu"), axis_types=(AxisType.Auto,) * 2)
    tx = zero_shard(
        optax.sgd(1.0), stage=3, mesh=mesh, axis=("host", "gpu"), tuning=Tuning(params_axis="gpu", persist_below=1)
    )
    layout = layout_of(tx.config, {"w": jnp.ones((16, 3))})
    (grad,) = TreeForm(tx.config, layout, (None,)).grads
    assert (grad.axes, grad.shards, grad.dim) == (layout.grads[0].axes, 8, 0)
