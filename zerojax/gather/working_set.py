"""Count how much is gathered at a time, and find stacks that are gathered whole, not one layer at a time.

`planning` calls `working_set`, which reads the segments of a loss before anything is compiled. `check` and `estimate`
print the result.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from zerojax import compat, jaxprs
from zerojax.gather.engine import gather_groups, trace_loss
from zerojax.gather.segments import BlockSegment, Program, Segment
from zerojax.gather.sharded_param import ShardedParam, bytes_of
from zerojax.layout.leaf import Leaf
from zerojax.units import format_bytes

_REMEDY = (
    "Scan over a stack (jax.lax.scan, nn.scan), change its layers in the loop's body, leave microbatches to "
    "accumulate= of train_step, and change a single weight under jax.checkpoint."
)


class Whole(NamedTuple):
    """Parameters that are gathered whole, or kept like activations."""

    path: str  # the path of the largest of these parameters, and the line that uses it
    bytes: int  # the bytes of all these parameters
    layers: int  # the number of layers in these bytes

    def __str__(self) -> str:
        return f"{self.path} ({format_bytes(self.bytes)}) is gathered whole, or kept for the backward pass. {_REMEDY}"


class WorkingSet(NamedTuple):
    """The gathered parameters of a function."""

    # The bytes that a device holds at most at once: the largest sum for one use (a block, an iteration of a scan) and
    # its prefetched uses, and everything that is gathered for several segments.
    bytes: int = 0
    stacks: frozenset[int] = frozenset()  # indices of the stacks of which each iteration of a scan uses one layer
    layer: int = 0  # bytes of the largest use; a stack that is gathered whole counts as one layer
    whole: tuple[Whole, ...] = ()  # the parameters that are gathered whole


def working_set(fn: Callable, layout: Any, *args: Any, prefetch: int = 1, shared_bytes: int = 0) -> WorkingSet:
    """Find which parameters of `fn` the engine would gather at once, and how many bytes they have.

    The parameters have the types of the leaves of `layout`. `args` may be arrays or shapes. The first of them is the
    batch, and devices have the others in full. `shared_bytes` is as in `Collectives`.
    """
    leaves, tree = jax.tree.flatten(layout, is_leaf=lambda x: isinstance(x, Leaf))
    full = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    on_leaves = lambda full, *args: fn(tree.unflatten(full), *args)
    program, *_ = trace_loss(on_leaves, leaves, full, args, differing=[0])
    gathering = [s for s in program.segments if s.params]
    numbered = [*zip(gather_groups(gathering, shared_bytes), gathering, strict=True)]
    passing = [(number, segment) for number, segment in numbered if not segment.lasting]
    groups = [[segment for _, segment in group] for _, group in itertools.groupby(passing, lambda pair: pair[0])]
    shared = [bytes_of(p for segment in group for p in segment.params) * (len(group) > 1) for group in groups]
    pairs = zip(groups, shared, strict=True)
    uses = [size for group, together in pairs for size in ([together] if together else group[0].gathered_bytes)]
    at_once = [sum(uses[i : i + 1 + prefetch]) for i in range(len(uses))]
    stacks = {param.root for _, segment in passing for param in segment.stacks}
    whole = [list(_of_segment(program, segment)) for segment in program.segments]
    return WorkingSet(
        sum(bytes_of(segment.params) for segment in gathering if segment.lasting) + max(at_once, default=0),
        frozenset(i for i, var in enumerate(program.invars) if var in stacks),
        max([*map(_layer_bytes, program.segments, whole), *shared], default=0),
        tuple(itertools.chain.from_iterable(whole)),
    )


def _layer_bytes(segment: Segment, whole: Sequence[Whole]) -> int:
    """Return the bytes of a segment's largest use. A stack that is gathered whole counts as one layer."""
    beyond_a_layer = sum(stack.bytes - stack.bytes // stack.layers for stack in whole)
    return max(max(segment.gathered_bytes, default=0) - beyond_a_layer, 0)


def _of_segment(program: Program, segment: Segment) -> Iterator[Whole]:
    """Yield the parameters that a segment of a program gathers whole."""
    if segment.lasting:
        reader = next((s for s in program.segments if not set(segment.results).isdisjoint(s.others)), None)
        layers = 1 if reader is None else _scanned(reader, segment.results)
        if reader is not None and layers == 1:  # Each iteration needs all of it.
            return
        path = max(segment.params, key=lambda param: param.leaf.bytes).leaf.path
        line = compat.line_of(segment.jaxpr.eqns[-1]) if segment.jaxpr.eqns else ""
        path += (f" {line}" if line else "") + (f" and {more} more" if (more := len(segment.params) - 1) else "")
        yield Whole(path, bytes_of(segment.params), layers)
        return
    for param, var in zip(segment.params, segment.jaxpr.invars, strict=False):
        if _reads_rows(segment.jaxpr, var):
            yield Whole(param.leaf.path, param.leaf.bytes, var.aval.shape[0])
        elif isinstance(segment, BlockSegment) and (kept := _kept(segment, param, var)) is not None:
            yield Whole(param.leaf.path, jaxprs.nbytes(kept), 1)


def _scanned(reader: Segment, early: Sequence) -> int:
    """Return the length of the loop `reader` if it scans over all values `early`, or 1 if one of them is a constant."""
    (eqn,) = reader.jaxpr.eqns
    loop = compat.loop_of(eqn)
    assert loop is not None
    given = dict(zip(reader.others, reader.jaxpr.invars[len(reader.params) :], strict=True))
    places = [eqn.invars.index(given[x]) for x in early if x in given]
    return loop.length if all(place >= loop.consts for place in places) else 1


def _reads_rows(jaxpr: Any, var: Any, *, in_loop: bool = False) -> bool:
    """Return whether loops read an argument only row by row: as slices of one row, or by a scan in another loop."""
    uses = jaxprs.uses_of(jaxpr)[0].get(var, ())
    is_result = var in jaxprs.variables_in(jaxpr.outvars)
    return bool(uses) and not is_result and all(_reads_row(eqn, place, in_loop) for eqn, place in uses)


def _reads_row(eqn: Any, place: int, in_loop: bool) -> bool:
    """Return whether an equation, perhaps in a loop, reads an operand row by row. See `_reads_rows`."""
    if eqn.primitive.name == "dynamic_slice":
        is_matrix = len(eqn.invars[place].aval.shape) > 1
        return in_loop and place == 0 and eqn.params["slice_sizes"][:1] == (1,) and is_matrix
    body = compat.inlined_body(eqn)
    if (loop := compat.loop_of(eqn)) is not None:
        if place >= loop.consts + loop.carry:
            return in_loop  # The outermost loop gathers one layer at a time.
        body, in_loop = compat.opened(loop.body)[0] if place < loop.consts else None, True
    return body is not None and _reads_rows(body, body.invars[place], in_loop=in_loop)


def _kept(segment: Segment, param: ShardedParam, var: Any) -> Any:
    """Return the variable of an elementwise change of a parameter, if the backward pass keeps its value, or None."""
    if len(param.leaf.shape) < 2:
        return None
    params = set(segment.jaxpr.invars[: len(segment.params)])
    for eqn in segment.jaxpr.eqns:
        reads = jaxprs.variables_in(eqn.invars)
        if params.issuperset(reads):
            params.update(eqn.outvars)
        elif var in reads and jaxprs.facts(eqn).changes_weights and eqn.outvars[0] in segment.results:
            return eqn.outvars[0]
    return None
