"""How much is gathered at a time: read off the segments of a loss, before anything is compiled."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from zerojax.gather.engine import traced
from zerojax.gather.scan import loop_of
from zerojax.gather.segments import Segment, Whole
from zerojax.gather.sharded_param import ShardedParam
from zerojax.layout.leaf import Leaf


class WorkingSet(NamedTuple):
    """What is gathered of a function's parameters.

    Attributes:
        bytes: Gathered parameters that a device holds at once, at most: those of one use (a
            block, a turn of a scan) and of the uses that are prefetched, and whatever has to be had whole.
        turned: Indices of the parameters that are stacks, of which each turn of a scan uses one layer.
    """

    bytes: int
    turned: frozenset[int]


def working_set(fn: Callable, layout: Any, *args: Any, prefetch: int = 1) -> WorkingSet:
    """Find what `gather_on_use` would gather of a function's parameters.

    Args:
        fn: As for `gather_on_use`.
        layout: A tree of `Leaf`; parameters are taken to arrive in the leaves' types.
        *args: Further arguments of `fn`; shapes are enough.
        prefetch: As for `gather_on_use`.
    """
    leaves, tree = jax.tree.flatten(layout, is_leaf=lambda x: isinstance(x, Leaf))
    whole = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    program = traced(fn, tree, leaves, whole, args).program
    segments = program.segments
    lasting = [segment for segment in segments if any(isinstance(result, Whole) for result in segment.results)]
    passing = [segment for segment in segments if segment.weights and segment not in lasting]
    uses = list(itertools.chain.from_iterable(in_turns(segment) for segment in passing))
    at_once = [sum(uses[i : i + 1 + prefetch]) for i in range(len(uses))]
    turning = {weight.root for segment in passing if segment.kind == "scan" for weight in loop_of(segment).turning}
    return WorkingSet(
        sum(gathered_bytes(segment.weights) for segment in lasting) + max(at_once, default=0),
        frozenset(i for i, var in enumerate(program.invars) if var in turning),
    )


def in_turns(segment: Segment) -> list[int]:
    """Bytes gathered by each use of a segment: of a scan two turns, which stand for all, and hold no more at once."""
    if segment.kind != "scan":
        return [gathered_bytes(segment.weights)]
    loop = loop_of(segment)
    return [gathered_bytes(loop.first(0))] * min(loop.parts.length, 2)


def gathered_bytes(weights: Sequence[ShardedParam]) -> int:
    """Bytes of some weights, logical shape, in the types they are gathered in; each gather counts once."""
    unique = {weight.key: weight for weight in weights}
    return sum(math.prod(weight.shape) * np.dtype(weight.dtype).itemsize for weight in unique.values())
