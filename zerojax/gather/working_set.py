"""How much is gathered at a time: read off the segments of a loss, before anything is compiled."""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from zerojax.gather.engine import trace_loss
from zerojax.gather.nested import NestedSegment
from zerojax.gather.rules import RULES, RUN_IN_PLACE
from zerojax.gather.segments import Gathered, Program, Segment, bytes_of
from zerojax.gather.whole import Whole, named, recomputed, wholes
from zerojax.layout.leaf import Leaf


class WorkingSet(NamedTuple):
    """What is gathered of a function's parameters.

    Attributes:
        bytes: Gathered parameters on a device at once, at most: those of one use (a block, an iteration of a
            scan), of the uses that are prefetched, and whatever is gathered for several segments.
        stacks: Indices of the parameters that are stacks, of which each iteration of a scan uses one layer.
        layer: Bytes of the largest use, where of a stack that is gathered whole one layer counts.
        repeats: For parameters that a loop over microbatches gathers once more in each iteration, by index, how often.
        whole: What is gathered whole, and why.
        recomputed: Products of parameters alone that are computed in several places, each with its line.
        rules: For each rule of the planner, by its name, the equations on parameters that fell under it, with lines.
    """

    bytes: int = 0
    stacks: frozenset[int] = frozenset()
    layer: int = 0
    repeats: Mapping[int, int] = MappingProxyType({})
    whole: tuple[Whole, ...] = ()
    recomputed: tuple[str, ...] = ()
    rules: Mapping[str, tuple[str, ...]] = MappingProxyType({})


def working_set(fn: Callable, layout: Any, *args: Any, prefetch: int = 1) -> WorkingSet:
    """Compute what `gather_on_use` would gather of a function's parameters.

    Args:
        fn: As for `gather_on_use`.
        layout: A tree of `Leaf`; parameters are assumed to be in the leaves' types.
        *args: Further arguments of `fn`; shapes are enough.
        prefetch: As for `gather_on_use`.
    """
    leaves, tree = jax.tree.flatten(layout, is_leaf=lambda x: isinstance(x, Leaf))
    full = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    program = trace_loss(fn, tree, leaves, full, args).program
    lasting = [s for s in program.segments if any(isinstance(result, Gathered) for result in s.results)]
    passing = [s for s in program.segments if s.params and s not in lasting]
    uses = list(itertools.chain.from_iterable(segment.gathered_bytes for segment in passing))
    at_once = [sum(uses[i : i + 1 + prefetch]) for i in range(len(uses))]
    stacks = {param.root for segment in passing for param in segment.stacks}
    nested = [s for s in program.segments if isinstance(s, NestedSegment)]
    repeats = Counter({param.root: s.loop.length for s in nested for param in s.params})
    whole = wholes(program)
    return WorkingSet(
        sum(bytes_of(segment.params) for segment in lasting) + max(at_once, default=0),
        frozenset(i for i, var in enumerate(program.invars) if var in stacks),
        max(map(_layer_bytes, program.segments, whole), default=0),
        {i: repeats[var] for i, var in enumerate(program.invars) if var in repeats},
        tuple(itertools.chain.from_iterable(whole)),
        tuple(recomputed(program)),
        rules_of(program),
    )


def rules_of(program: Program) -> dict[str, tuple[str, ...]]:
    """Return the equations on parameters under each rule, in the order of the rules; loops of their own included."""
    inner = (segment.program for segment in program.segments if isinstance(segment, NestedSegment))
    found = [pair for each in (program, *inner) for pair in each.decisions]
    by_rule = {rule.name: tuple(named(eqn) for eqn, name in found if name == rule.name) for rule in RULES}
    return {name: places for name, places in by_rule.items() if places and name != RUN_IN_PLACE}


def _layer_bytes(segment: Segment, whole: Sequence[Whole]) -> int:
    """Return the bytes of a segment's largest use, if nothing were gathered whole."""
    of_loops = sum(one.bytes - one.bytes // one.layers for one in whole)
    return max(max(segment.gathered_bytes, default=0) - of_loops, 0)
