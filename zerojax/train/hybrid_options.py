"""Choose compiler options for a step with hybrid sharding on GPUs."""

import os
from collections.abc import Mapping
from typing import Any

from zerojax.config import Config

# In hybrid sharding, a step has collectives over NVLink and over the network, which do not share a link. With this
# option, XLA's scheduler does not run them one after another. `xla_gpu_memory_limit_slop_factor` is not set: a lower
# limit saves memory, but XLA keeps to it by repeating matrix products, and not by another schedule.
OVERLAP = "xla_gpu_experimental_parallel_collective_overlap_limit"


def options_of_mesh(config: Config) -> Mapping[str, Any]:
    """Return the options with which a step is compiled if the user gives none. `XLA_FLAGS` has priority."""
    data = config.data
    is_hybrid = config.stage > 0 and 1 < data.size(data.across) < data.workers
    matters = is_hybrid and is_gpu(config) and not config.params_on_disk
    return {OVERLAP: 2} if matters and OVERLAP not in os.environ.get("XLA_FLAGS", "") else {}


def is_gpu(config: Config) -> bool:
    return config.mesh.devices.flat[0].platform in ("cuda", "gpu", "rocm")
