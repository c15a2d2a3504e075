"""A step loads the code of an option if the option is given, and only then."""

import json
import subprocess
import sys

import pytest

OPTIONAL = {"staged", "streaming"} | {
    f"train.{name}"
    for name in "attachments eval_step fitting moved_state optional_outputs params same_run staged_step streamed_step "
    "tree_api".split()
}
PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, optax
import zerojax
from zerojax import zero_shard

def loss(params, x):
    return jnp.mean(zerojax.block(lambda w: jnp.tanh(x @ w))(params["w"]) ** 2)

offload, options = {given}
tx = zero_shard(optax.adam(1e-2), stage=3, offload=offload)
state = tx.create({{"w": jnp.ones((64, 512))}})
step = tx.train_step(loss, **options)
for _ in range(2):
    state, metrics = step(state, jnp.ones((8, 64)))
print(json.dumps(sorted(name for name in sys.modules if name.startswith("zerojax."))))
"""


def loaded(given):
    command = [sys.executable, "-c", PROGRAM.format(given=given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return {name.removeprefix("zerojax.") for name in json.loads(done.stdout)}


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("given", "more"),
    [
        ("None, {}", set()),
        ("zerojax.Offload(optimizer='host'), {}", {"streamed_step", "streaming"}),
        ("None, {'memory': '1 GB'}", {"fitting", "same_run"}),
        ("None, {'timeout': 600}", {"attachments", "same_run"}),
        ("None, {'leaf_norms': True}", {"optional_outputs"}),
    ],
)
def test_an_option_loads_its_own_code_alone(given, more):
    assert OPTIONAL & loaded(given) == {name if name == "streaming" else f"train.{name}" for name in more}
