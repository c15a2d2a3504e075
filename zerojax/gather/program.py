"""A loss function as a list of segments, as `planner` makes it and `run` runs it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from zerojax.dims import State
from zerojax.gather.segments import Segment
from zerojax.gather.sharded_param import ShardedParam


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function, divided into segments.

    Attributes:
        invars: Variables of the arguments: parameters' shards, other arguments, constants.
        segments: In the order in which they run.
        outs: What the function returns: variables, `Gathered` parameters, or literals.
        joined: Stacks that are made of parameters of one layout (`jnp.stack`), by their variable.
        held: Values computed from parameters alone, once for all segments that read them.
        rows: Where variables hold the rows of the batch; empty if nothing follows them.
        decisions: Each equation of the function, with the name of the rule that it fell under (`rules.RULES`).
    """

    invars: tuple
    segments: tuple[Segment, ...]
    outs: tuple
    joined: Mapping[Any, tuple[ShardedParam, ...]]
    held: frozenset
    rows: Mapping[Any, State]
    decisions: tuple[tuple[Any, str], ...]
