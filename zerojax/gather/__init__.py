"""Stage 3's engine: gather each parameter where it is used, and reduce-scatter its gradient.

The engine traces the loss, divides its equations into segments, and runs the segments forward and backward. Around each
segment it gathers the segment's parameters. Read the files in this order:

The way of a loss:
    engine          `gather_on_use` rewrites a loss to take shards; `block` marks a layer
    planner         from the jaxpr of the loss to a `Program`, in five steps
    rules           the table of rules that decides about each equation
    assembly        completes the segments that the rules drafted
    segments        `Program` and `Segment`: plain, block, held
    run             runs a program forward, and backward over the residuals
    schedule        when each gather starts, and when each gradient is reduced

Inside a segment:
    sharded_param   a parameter's shard, and the equations that are applied to it before the gather
    evaluate        runs equations on parameters that were gathered in a narrower type
    vjp             the two passes of a segment, and the residuals that it must keep
    residuals       the records that go from the forward pass to the backward pass
    grad_dims       the order of dims in which a gradient is computed

Loops:
    loop            the operands of a scan over layers, and the gathers of one iteration
    scan            a scan over layers, as a segment, and its forward pass
    scan_backward   its backward pass: a pipeline of four stages
    nested          a loop over microbatches, each iteration of which runs a program

Details that a first reading can skip:
    layer_stacks    turns other loops over layers into scans
    merged          merges equations that compute the same value
    held            which products of parameters are computed once
    working_set     how much is gathered at a time, for `check` and `estimate`
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
