"""Run by test_ports.py, twice: loops on four devices of each of two processes.

python two_processes.py STAGE NAME... PORT PROCESS
"""

import importlib
import json
import sys
from pathlib import Path

import jax

sys.path.append(str(Path(__file__).parents[2] / "examples"))
stage, *names, port, process = sys.argv[1:]
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(process))
assert jax.device_count() == 8
for name in names:
    history = importlib.import_module(name).zero(int(stage))
    print(json.dumps({name: [float(x) for x in jax.tree.leaves(history)]}), flush=True)
