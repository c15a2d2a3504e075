"""An option that chooses parameters by name, and whose name matches nothing."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import mesh_of

from zerojax import Offload, Precision, Wire, zero_shard

PARAMS = {"layers": {"lora_a": jnp.ones((16, 8)), "Kernel": jnp.ones((8, 16))}, "embedding": jnp.ones((32, 8))}


def named(name, path, leaf):
    return name in path


OPTIONS = {
    "trainable=": lambda where: {"trainable": where},
    "overwrite=": lambda where: {"overwrite": where},
    "Precision(keep=)": lambda where: {"precision": Precision.bf16(keep=where)},
    "Offload(where=)": lambda where: {"offload": Offload(optimizer="host", where=where)},
    "Wire(where=)": lambda where: {"wire": Wire(reduce="int8", where=where)},
}
DOORS = {
    "create": lambda tx: tx.create(PARAMS),
    "init": lambda tx: tx.init(PARAMS),
    "init_params": lambda tx: tx.create(tx.init_params(lambda: PARAMS)),
    "shapes": lambda tx: tx.create(jax.eval_shape(lambda: PARAMS)),
}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("option", OPTIONS)
def test_a_name_that_matches_nothing_is_named(option, stage):
    tx = zero_shard(
        optax.adam(1e-3), stage=stage, mesh=mesh_of(8), **OPTIONS[option](lambda path, leaf: "lorra" in path)
    )
    with pytest.raises(ValueError) as caught:
        tx.create(PARAMS)
    said = f"{option} chooses none of the 3 parameters. Paths that come close: 'layers/lora_a'. Correct the name"
    assert said in str(caught.value)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("where", [lambda path, leaf: path.endswith("kernel"), functools.partial(named, "norm")])
def test_at_every_door(where, door):
    with pytest.raises(ValueError, match=r"trainable= chooses none of the 3 parameters.*'layers/(Kernel|lora_a)'"):
        DOORS[door](zero_shard(optax.adam(1e-3), stage=0, mesh=mesh_of(8), trainable=where))


def test_patterns_and_masks():
    with pytest.raises(ValueError, match=r"Offload\(where=\) chooses none.*come close: 'embedding'"):
        zero_shard(optax.adam(1e-3), stage=1, offload=Offload(optimizer="host", where="embeding*")).create(PARAMS)
    mask = jax.tree.map(lambda _: False, PARAMS)
    with pytest.raises(ValueError, match="trainable= chooses none of the 3 parameters"):
        zero_shard(optax.adam(1e-3), stage=1, trainable=mask).create(PARAMS)
    zero_shard(optax.adam(1e-3), stage=1, overwrite=mask).create(PARAMS)
    zero_shard(optax.adam(1e-3), stage=1, trainable=lambda path, leaf: "lorra" in path).create({})
