"""Compile the update of matrices on the GPT yardstick, alone, for absent GPUs.

    python benchmarks/matrix_updates.py                              8 layers, 8 x H200
    python benchmarks/matrix_updates.py --topology h200:8x8          64 GPUs
    python benchmarks/matrix_updates.py --scan --optimizers muon-all

It needs the extra `aot`, and no GPU. `muon` is optax's default, which treats every 2-D parameter as a matrix, the
embedding too. `muon-hidden` leaves the embedding to Adam, as Muon's authors do. `muon-all` treats all matrices of a
block as such, attention's too, scanned or not. `sent` is the bytes that a device sends, `products` the least time of
its matrix products.
"""

import argparse
import datetime
import json
import os
import pathlib
import time

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import optax
import optax.contrib
import yardstick
from optax.contrib import MuonDimensionNumbers

from zerojax import Tuning, collectives, zero_shard
from zerojax.gpus.devices import Device, Topology, absent_mesh
from zerojax.inspect.hlo import read
from zerojax.inspect.roofline import overlap, roofline


def hidden_matrices(params):
    """Muon's dimension numbers of the two products of each block's MLP."""
    lead = lambda path: 1 if path[0].key == "blocks" else 0
    is_matrix = lambda path, x: path[0].key != "Embed_0" and x.ndim == 2 + lead(path) and path[-1].key == "kernel"
    one = lambda path, x: MuonDimensionNumbers(lead(path), lead(path) + 1) if is_matrix(path, x) else None
    return jax.tree_util.tree_map_with_path(one, params)


def all_matrices(params):
    """The same with attention's, whose heads are dims of their own."""

    def one(path, x):
        lead = 1 if path[0].key == "blocks" else 0
        if path[-1].key != "kernel" or x.ndim != 3 + lead:
            return None
        if path[-2].key == "o":
            return MuonDimensionNumbers((lead, lead + 1), lead + 2)
        return MuonDimensionNumbers(lead, (lead + 1, lead + 2))

    is_numbers = lambda x: isinstance(x, MuonDimensionNumbers)
    attention = jax.tree_util.tree_map_with_path(one, params)
    return jax.tree.map(
        lambda a, b: a or b, attention, hidden_matrices(params), is_leaf=lambda x: x is None or is_numbers(x)
    )


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-4),
    "muon": lambda: optax.contrib.muon(1e-3),
    "muon-hidden": lambda: optax.contrib.muon(1e-3, muon_weight_dimension_numbers=hidden_matrices),
    "muon-all": lambda: optax.contrib.muon(1e-3, muon_weight_dimension_numbers=all_matrices),
}


def measure(optimizer: str, how: str, *, topology: str = "h200:8", layers: int = 8, scan: bool = False) -> dict:
    """Compile one update and read its figures off the program."""
    mesh = absent_mesh(topology)
    init, _, _ = yardstick.build("gpu", scan=scan, layers=layers)
    tx = zero_shard(OPTIMIZERS[optimizer](), stage=3, mesh=mesh, tuning=Tuning(matrix_updates=how))
    params = tx.shard(jax.eval_shape(init, jax.random.key(0)))
    state = tx.create(params)
    start = time.perf_counter()
    compiled = jax.jit(tx.update).lower(params, state.opt_state, params).compile()
    text, gpu = compiled.as_text(), Device.of(Topology.parse(topology))
    found, times = collectives(text), roofline(read(text), overlap(text), gpu)
    return {
        "optimizer": optimizer,
        "matrix_updates": how,
        "topology": topology,
        "scan": scan,
        "sent GB": round(found.moved().sent / 1e9, 4),
        "all-to-alls": len(found.of("all-to-all")),
        "all-reduces": len(found.of("all-reduce")),
        "largest gathered or summed": max((c.elements for c in found if c.kind != "all-to-all"), default=0),
        "products ms": round(1e3 * times.products, 3),
        "temp MiB": round(compiled.memory_analysis().temp_size_in_bytes / 2**20, 1),
        "compile s": round(time.perf_counter() - start, 1),
        "report": state.plan.matrices,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="h200:8")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--scan", action="store_true")
    parser.add_argument("--optimizers", nargs="+", default=["muon", "muon-hidden"], choices=OPTIMIZERS)
    parser.add_argument("--ways", nargs="+", default=["sharded", "auto"])
    parser.add_argument("--out", type=pathlib.Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    rows = []
    for optimizer in args.optimizers:
        for how in args.ways:
            row = measure(optimizer, how, topology=args.topology, layers=args.layers, scan=args.scan)
            rows.append(row)
            print(*(f"{key} {value}" for key, value in row.items()), sep="  ", flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        found = {"date": datetime.date.today().isoformat(), "jax": jax.__version__, "compiled only": True, "rows": rows}
        args.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
