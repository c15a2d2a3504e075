"""The report finds bytes on live arrays and says why a leaf is not divided."""

import jax
import jax.numpy as jnp
import optax
from models import awkward_params

from zerojax import Padded, report, zero_shard


def test_every_leaf_is_cut_or_has_a_reason(mesh):
    for stage in (0, 1, 3):
        state = zero_shard(optax.adamw(1e-3), stage=stage, mesh=mesh, persist_below=50).create(awkward_params())
        for row in report(state).rows:
            assert row.note or row.bytes * 8 == row.total, row


def test_padding_and_persistence_are_told(mesh):
    state = zero_shard(optax.adamw(1e-3), stage=3, mesh=mesh, persist_below=50).create(awkward_params())
    text = str(report(state))
    assert "params['uneven']  float32[13, 7]  52 bytes/device" in text  # 13 x 8 elements over 8 devices
    assert "(dim 1 padded by 13 elements)" in text
    assert "persist_below=50" in text
    assert isinstance(state.params["uneven"], Padded)


def test_bytes_of_any_pytree():
    found = report({"a": jnp.ones((4, 4)), "keys": jax.random.key(0)})
    assert found.bytes == {"a": 64, "keys": 8}
    assert found.total == 72
