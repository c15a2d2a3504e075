"""Stage 3's engine: gather each parameter where it is used.

program   a loss's jaxpr, cut into segments that use parameters together
tape      runs the segments forward and backward, gathering ahead of each
vjp       a segment's two passes, and what must be kept between them
weight, collectives, evaluate   a shard; how shards move; casts made before the gather
working_set   how much is gathered at a time
"""

from zerojax.gather.engine import block, gather_on_use
from zerojax.gather.residuals import HostShard
from zerojax.gather.working_set import WorkingSet, working_set

__all__ = ["HostShard", "WorkingSet", "block", "gather_on_use", "working_set"]
