"""A cotangent holds the rows where its primal holds them, so each gradient is a sum over rows, and reduce-scattered."""

import math
import re

import jax
import optax
import pytest
from measured import mesh, placed
from programs import TABLE
from registry import DEVICES

from zerojax import Tuning, zero_shard

# Conditions of a loop, entries that an index chooses, noise that the loss draws, and slices of rows.
NAMES = "slot_attention dqn noise_contrast dpo_halves dit_scan dit_remat vocabulary_chunks last_token".split()
NAMES += "mixture_of_depths sparse_autoencoder energy_model reward_pairs world_model".split()


@pytest.mark.quick(5)
@pytest.mark.parametrize("name", NAMES)
def test_every_gradient_is_reduced_and_no_activation_is_a_partial_sum(name):
    params, batch, args = TABLE[name].shapes()
    (rows,) = {x.shape[0] for x in jax.tree.leaves(batch)}
    for stage in (0, 2):
        tx = zero_shard(optax.sgd(0.1), stage=stage, mesh=mesh(), tuning=Tuning(persist_below=0))
        gradient = jax.jit(tx.value_and_grad(TABLE[name].loss))
        text = gradient.lower(tx.shard(params), placed(batch, "data"), *args).as_text()
        assert not re.findall(rf"tensor<{DEVICES}x{rows}x[x\d]*f32>", text)
    operands = re.findall(r'"stablehlo.reduce_scatter".*?\}\) : \(tensor<([\dx]*)xf32>', text, re.DOTALL)
    found = sum(math.prod(map(int, shape.split("x"))) for shape in operands)
    assert found == sum(x.size for x in jax.tree.leaves(params))
