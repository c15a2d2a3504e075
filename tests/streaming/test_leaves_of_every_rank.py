"""Offloaded state of leaves of every rank, empty ones and scalars among them, updates as in optax."""

import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from conftest import quick_or_slow
from parity import assert_parity

from zerojax import Offload, zero_shard

PARAMS = {
    "scalar": jnp.float32(2),
    "vector": jnp.arange(1.0, 10.0),
    "matrix": jnp.linspace(-1, 1, 128).reshape(16, 8),
    "cube": jnp.full((8, 3, 4), 0.3),
    "empty": jnp.zeros((0, 4)),
}
ROWS = jnp.linspace(-1, 1, 32).reshape(8, 4)
QUICK = {
    "adaptive_grad_clip": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.adam(1e-2)),
}
# With their usual arguments, but for the learning rate. What optax cannot do on these leaves is not here.
NAMES = """adabelief adadelta adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion nadam nadamw
    noisy_sgd optimistic_gradient_descent radam rmsprop rprop sign_sgd sgd yogi""".split()
CONTRIB = "acprop ademamix dog dowg prodigy schedule_free_adamw schedule_free_sgd".split()
OTHERS = {name: lambda name=name: getattr(optax, name)(1e-2) for name in NAMES}
OTHERS |= {name: lambda name=name: getattr(optax.contrib, name)(1e-2) for name in CONTRIB}
OTHERS |= {
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "clip_by_block_rms": lambda: optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(1e-2, momentum=0.9)),
    "trust_ratio": lambda: optax.chain(optax.scale_by_adam(), optax.scale_by_trust_ratio(), optax.scale(-1e-2)),
    "param_block": lambda: optax.chain(optax.adam(1e-2), optax.scale_by_param_block_rms()),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "rss": lambda: optax.chain(optax.scale_by_rss(), optax.scale_by_stddev(), optax.scale(-1e-2)),
}


def loss(params, rows):
    products = rows @ params["cube"].sum(1).T @ params["matrix"][:8] + params["vector"][:8]
    return jnp.mean(products**2) * params["scalar"] + jnp.sum(params["empty"])


def check(name, offload, mesh):
    tx = zero_shard((QUICK | OTHERS)[name](), stage=3, mesh=mesh, persist_below=0, offload=offload)
    assert_parity(tx, loss, PARAMS, [ROWS] * 2, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", quick_or_slow([(name,) for name in OTHERS], [(name,) for name in QUICK]))
def test_offloaded_state_of_every_rank(name, mesh):
    check(name, Offload(optimizer="host"), mesh)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adafactor", "multi_steps", "prodigy"])
def test_state_of_every_rank_on_disk(name, mesh, tmp_path):
    """Every transformation of `OTHERS` was run once; these three have state that no other one has."""
    check(name, Offload(optimizer="disk", path=tmp_path), mesh)
