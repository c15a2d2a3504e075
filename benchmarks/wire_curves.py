"""Train the example's GPT with and without quantised collectives, and compare the losses.

    python benchmarks/wire_curves.py                       800 steps each, and results/wire.json

It runs stage 3 on 8 GPUs or simulated devices, with the same data and initial weights. For "two hosts", two
halves of the devices stand for two hosts, and parameters are sharded within a host. The result is the held-out loss in
bits per byte at the end.
"""

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType

from zerojax import Tuning, Wire, zero_shard

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples"))

import train_gpt  # noqa: E402
from gpt import next_byte_loss  # noqa: E402
from text import load  # noqa: E402

# Two hosts, simulated: parameters are sharded within one, gradients and optimizer state over both.
TWO_HOSTS = {"axis": ("host", "gpu"), "tuning": Tuning(params_axis="gpu")}
WAYS = {
    "as they are": {},
    "gather int8": {"wire": Wire("int8")},
    "gather int8, reduce int8": {"wire": Wire("int8", "int8")},
    "gather int8, reduce int4": {"wire": Wire("int8", "int4")},
    "gather int8, reduce int4, two hosts": {"wire": Wire("int8", "int4"), **TWO_HOSTS},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--json", type=Path, default=HERE / "results" / "wire.json")
    asked = parser.parse_args()
    last = {name: learn(asked.steps, options) for name, options in WAYS.items()}
    exact = last["as they are"]
    for name, bits in last.items():
        print(f"{name:52} {bits:.4f} bits per byte held out, {bits / exact - 1:+.2%}")
    found = {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "steps": asked.steps,
        "held out, bits per byte": {name: round(bits, 5) for name, bits in last.items()},
        "beside as they are": {name: round(bits / exact - 1, 5) for name, bits in last.items()},
    }
    asked.json.write_text(json.dumps(found, indent=2) + "\n")


def learn(steps: int, options: dict[str, Any]) -> float:
    """Train one model, and return its held-out loss in bits per byte."""
    sys.argv[1:] = ["--steps", str(steps)]
    args = train_gpt.options()
    mesh = train_gpt.mesh_of(args.devices)
    if axes := options.get("axis"):
        mesh = jax.make_mesh((2, mesh.size // 2), axes, axis_types=(AxisType.Auto,) * 2)
    tx = zero_shard(train_gpt.optimizer_of(args), stage=3, mesh=mesh, **options)
    model, init = train_gpt.model_of(args)
    state = tx.create(tx.init_params(init))
    curve = train_gpt.train(tx, state, next_byte_loss(model), load(None), args, steps=args.steps)[1]
    return curve.held_out[steps]


if __name__ == "__main__":
    main()
