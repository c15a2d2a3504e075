"""What a plain step loads and enters: the core, and no satellite."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

import zerojax

ROOT = Path(zerojax.__file__).parent
# Rooms that a step without options must not load: an option brings its own code.
SATELLITES = {"budget", "checkpoint", "cli", "data", "doctor", "flax_nnx", "gpus", "inspect", "offload", "planning"}
SATELLITES |= {"staged", "streaming", "user_code"}
# Modules of the room `gather` that are loaded for losses beyond a plain network.
RARE = """clusters equal known_parts loop merged narrow on_parts paired parts per_layer reduced scan scan_backward
    shardwise sliced tiled unread unrolled working_set""".split()
# Most lines in loaded modules; per stage, most files of which a function is called, and most lines in them.
LOADED = 14_000
ENTERED = {0: (30, 6_700), 1: (30, 6_700), 3: (37, 8_500)}
SCRIPT = """
import json, sys
import jax, jax.numpy as jnp, optax
from zerojax import zero_shard

entered = set()

def loss(params, batch):
    hidden = jax.nn.relu(batch["x"] @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] + params["b2"] - batch["y"]) ** 2)

params = {"w1": jnp.ones((64, 128)), "b1": jnp.zeros(128), "w2": jnp.ones((128, 64)), "b2": jnp.zeros(64)}
batch = {"x": jnp.ones((16, 64)), "y": jnp.ones((16, 64))}

def note(frame, event, argument):
    if event == "call" and frame.f_code.co_name != "<module>":
        entered.add(frame.f_code.co_filename)

sys.setprofile(note)
tx = zero_shard(optax.adamw(3e-4), stage=int(sys.argv[1]))
state, step = tx.create(params), tx.train_step(loss)
step(state, batch)
sys.setprofile(None)
modules = [(name, m.__file__) for name, m in sys.modules.items() if name.split(".")[0] == "zerojax"]
print(json.dumps({"loaded": modules, "entered": sorted(entered)}))
"""


@functools.cache
def first_step(stage):
    """`(modules loaded, files entered)` of a first step of a two-layer model, with paths below `zerojax`."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(stage)], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    entered = [Path(x) for x in found["entered"] if Path(x).is_relative_to(ROOT)]
    return found["loaded"], entered


def lines(paths):
    return sum(len(Path(path).read_text().splitlines()) for path in set(paths))


@pytest.mark.parametrize("stage", ENTERED)
def test_a_step_without_options_loads_and_enters_the_core_alone(stage):
    loaded, entered = first_step(stage)
    assert lines(path for _, path in loaded) <= LOADED
    names = {name for name, _ in loaded}
    assert not {name.split(".")[1] for name in names if "." in name} & SATELLITES
    assert "zerojax.gather.planner" in names
    assert not {f"zerojax.gather.{name}" for name in RARE} & names
    files, most = ENTERED[stage]
    assert len(entered) <= files, sorted(map(str, entered))
    assert lines(entered) <= most
