"""Stage 3's engine: gather each parameter where it is used.

engine          `gather_on_use`, and `block`
program         divides a loss's jaxpr into segments
layer_stacks    loops that use a stack of layers otherwise become scans over it
segments, scan  what runs together: its forward pass, backward pass and residuals
run             runs the segments forward and backward
schedule        when each gather starts, and each gradient is reduced
vjp             a function's two passes, and what must be kept between them
sharded_param   a parameter's shard, and what is done to it before the gather
evaluate        casts made before the gather
working_set     how much is gathered at a time
tiled           a loop over tiles of a sequence, as one block
"""

from zerojax.gather.engine import block, gather_on_use, row_states, split_arrays
from zerojax.gather.residuals import StandIn
from zerojax.gather.tiled import tiled
from zerojax.gather.vjp import RowStates, traced_passes
from zerojax.gather.working_set import WorkingSet, working_set

__all__ = [
    "RowStates",
    "StandIn",
    "WorkingSet",
    "block",
    "gather_on_use",
    "row_states",
    "split_arrays",
    "tiled",
    "traced_passes",
    "working_set",
]
