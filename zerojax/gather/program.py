"""A loss function as a list of segments: its jaxpr is divided where parameters are used.

Equations on parameters alone (a transpose, a reshape, a merged LoRA) are not run in place but
repeated in every segment that reads their result, so that nothing of a gathered parameter's
size outlives a segment.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from zerojax import compat, jaxprs
from zerojax.gather import evaluate
from zerojax.gather.grad_dims import orders
from zerojax.gather.layer_stacks import Derived, over_stacks
from zerojax.gather.scan import ScanSegment
from zerojax.gather.segments import BlockSegment, Gathered, PlainSegment, Segment
from zerojax.gather.sharded_param import ShardedParam, extended, root_param
from zerojax.layout.leaf import Leaf

# The name, in a jaxpr, of the jit that `zerojax.block` puts around a function.
BLOCK_NAME = "zerojax_block"

_CONTROL = frozenset({"scan", "while", "cond", "shard_map", "custom_jvp_call", "custom_vjp_call", "pallas_call"})
_DEVICE_DEPENDENT = frozenset({"axis_index", "rng_uniform", "shard_map", "pallas_call"})


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function, divided into segments.

    Attributes:
        invars: Variables of the arguments: parameters' shards, other arguments, constants.
        segments: In the order in which they run.
        outs: What the function returns: variables, `Gathered` parameters, or literals.
    """

    invars: tuple
    segments: tuple[Segment, ...]
    outs: tuple


def inlined(jaxpr, consts: Sequence, args: Sequence, sharded: Sequence[bool]) -> list:
    """Evaluate `jaxpr`, inlining the calls (`jax.jit` and its kin) that parameters are passed to.

    Stacks of layers become what a loop scans over, where it can (`layer_stacks`).

    Args:
        jaxpr: What to evaluate.
        consts: Its constants.
        args: Its arguments.
        sharded: For each argument, whether it is a sharded parameter.
    """
    counts: set = set()

    def rule(eqn, values):
        derived = [isinstance(value, Derived) for value in values]
        body = compat.called(eqn)
        if eqn.primitive.name == "iota" and len(eqn.params["shape"]) == 1:
            counts.update(eqn.outvars)
        if any(derived) and eqn.primitive.name == "scan":
            scanned = over_stacks(eqn, values, counts)
            if scanned is not None:
                return scanned
        if any(derived) and body is not None and eqn.params.get("name") != BLOCK_NAME:
            return jaxprs.evaluate(*compat.opened(body), values, rule)
        results = compat.evaluate_one(eqn, [_bare(value) for value in values])
        if any(derived) and _repeatable(eqn, derived):
            return [Derived(x, eqn, tuple(values)) for x in results]
        return results

    marked = [Derived(arg) if on else arg for arg, on in zip(args, sharded, strict=True)]
    return [_bare(value) for value in jaxprs.evaluate(jaxpr, consts, marked, rule)]


def _bare(value):
    return value.value if isinstance(value, Derived) else value


def _repeatable(eqn, from_params: Sequence[bool]) -> bool:
    """Whether an equation reads parameters alone and may be repeated in each segment that needs it."""
    for atom, is_param in zip(eqn.invars, from_params, strict=True):
        if not is_param and not compat.is_literal(atom):
            return False
    if eqn.effects or eqn.primitive.name in _CONTROL or compat.is_remat(eqn) or compat.called(eqn) is not None:
        return False
    # What shrinks a parameter (a norm, a row) is worth storing, and a segment by itself: repeated, it would
    # make a penalty on all parameters gather all of them at once.
    largest = max((math.prod(atom.aval.shape) for atom in eqn.invars), default=0)
    return all(2 * math.prod(var.aval.shape) > largest for var in eqn.outvars)


@dataclasses.dataclass
class _Draft:
    """A segment before its inputs and outputs are known.

    Attributes:
        make: Its class.
        eqns: Its equations.
        gathers: Variables that it gathers for later segments, in place of equations.
        reads: Which variables it reads as another segment gathered them.
    """

    make: type[Segment]
    eqns: list
    gathers: tuple = ()
    reads: Mapping = dataclasses.field(default_factory=dict)


def plan(jaxpr, leaves: Sequence[Leaf | None]) -> Program:
    """Divide an inlined jaxpr into segments.

    Args:
        jaxpr: Without constants.
        leaves: For each argument, its layout if it is a sharded parameter, else None.
    """
    params = {var: root_param(var, leaf) for var, leaf in zip(jaxpr.invars, leaves, strict=True) if leaf is not None}
    repeated: dict = {}
    uniform: set = set()
    drafts = [_Draft(PlainSegment, [])]
    stateful = _between_refs(jaxpr)
    for index, eqn in enumerate(jaxpr.eqns):
        if index in stateful:
            drafts += [_Draft(BlockSegment, [])] * (index == stateful.start)
            drafts[-1].eqns.append(eqn)
            continue
        reads = jaxprs.variables_in(eqn.invars)
        if uniform.issuperset(reads) and not eqn.effects and eqn.primitive.name not in _DEVICE_DEPENDENT:
            uniform.update(eqn.outvars)
        touched = [var for var in reads if var in params or var in repeated]
        if not touched:
            if drafts[-1].make is not PlainSegment:
                drafts.append(_Draft(PlainSegment, []))
            drafts[-1].eqns.append(eqn)
            continue
        first = eqn.invars[0]
        # Slicing shards gives one slice only if every device slices at the same index.
        alone = touched == [first] and first in params and uniform.issuperset(reads[1:])
        if alone and (param := extended(params[first], eqn)) is not None:
            params[eqn.outvars[0]] = param
        elif _repeatable(eqn, [not compat.is_literal(a) and (a in params or a in repeated) for a in eqn.invars]):
            repeated |= dict.fromkeys(eqn.outvars, eqn)
        elif eqn.primitive.name == "scan":
            early = [v for i, v in enumerate(eqn.invars) if v in touched and not _by_iteration(eqn, i, params)]
            early = tuple(dict.fromkeys(early))
            drafts += [_Draft(BlockSegment, [], early)] * bool(early)
            drafts.append(_Draft(ScanSegment, [eqn], reads={v: Gathered(v, len(drafts) - 1) for v in early}))
        else:
            drafts.append(_Draft(BlockSegment, [eqn]))
    returned = tuple(dict.fromkeys(v for v in jaxprs.variables_in(jaxpr.outvars) if v in params or v in repeated))
    if returned:
        drafts.append(_Draft(BlockSegment, [], returned))
    outs = tuple(Gathered(v, len(drafts) - 1) if v in returned else v for v in jaxpr.outvars)
    return Program(tuple(jaxpr.invars), _assembled(jaxpr, drafts, params, repeated), outs)


def _between_refs(jaxpr) -> range:
    """The equations, by index, from a first `jax.new_ref` to the last use of one: a ref cannot leave its segment."""
    touching = [i for i, eqn in enumerate(jaxpr.eqns) if any(map(compat.is_ref, [*eqn.invars, *eqn.outvars]))]
    return range(touching[0], touching[-1] + 1) if touching else range(0)


def _by_iteration(eqn, index: int, params: Mapping) -> bool:
    """Whether a scan's operand may stay sharded: a constant, or a stack not sharded over its layers."""
    scan, var = compat.scan_params(eqn), eqn.invars[index]
    if var not in params or scan.length == 0:
        return False
    return index < scan.consts or (index >= scan.consts + scan.carry and params[var].leaf.dim != 0)


def _assembled(
    jaxpr, drafts: Sequence[_Draft], params: Mapping[Any, ShardedParam], repeated: Mapping
) -> tuple[Segment, ...]:
    """Segments with their inputs and outputs."""
    order = {id(eqn): i for i, eqn in enumerate(jaxpr.eqns)}
    closed = [_with_repeated(draft, params, repeated, order) for draft in drafts]
    readers: dict = {}
    for index, (_, used, others) in enumerate(closed):
        for var in [*others, *(v for name in used for v in params[name].operands)]:
            readers.setdefault(var, set()).add(index)
    final = set(jaxprs.variables_in(jaxpr.outvars))
    segments = []
    for index, (draft, (eqns, used, others)) in enumerate(zip(drafts, closed, strict=True)):
        computed = [v for eqn in eqns for v in eqn.outvars if not compat.is_dropped(v) and v not in repeated]
        results = list(draft.gathers) or [v for v in computed if v in final or readers.get(v, set()) - {index}]
        part = compat.part_of(jaxpr, eqns, [*used, *others], results)
        line = compat.line_of(draft.eqns[0]) if draft.eqns else ""
        demands = zip(used, evaluate.demanded(part, used), orders(part, used), strict=True)
        uses = tuple(params[v].used(line, dtype, order) for v, dtype, order in demands)
        keys = tuple(Gathered(v, index) for v in draft.gathers) or tuple(results)
        if part.eqns or draft.gathers:
            make = draft.make if uses else PlainSegment
            segments.append(make(part, uses, tuple(draft.reads.get(v, v) for v in others), keys))
    return tuple(segments)


def _with_repeated(draft: _Draft, params: Mapping, repeated: Mapping, order: Mapping) -> tuple[list, list, list]:
    """`(equations, parameters used, others read)`, equations that are repeated put before the draft's own."""
    needed: dict = {}
    pending = [v for eqn in draft.eqns for v in jaxprs.variables_in(eqn.invars)] + list(draft.gathers)
    pending = [v for v in pending if v not in draft.reads]
    while pending:
        var = pending.pop()
        if var in repeated and id(repeated[var]) not in needed:
            needed[id(repeated[var])] = repeated[var]
            pending.extend(jaxprs.variables_in(repeated[var].invars))
    eqns = sorted(needed.values(), key=lambda eqn: order[id(eqn)]) + draft.eqns
    computed = {var for eqn in eqns for var in eqn.outvars}
    reads = dict.fromkeys([*(v for eqn in eqns for v in jaxprs.variables_in(eqn.invars)), *draft.gathers])
    used = [var for var in reads if var in params and var not in draft.reads]
    return eqns, used, [var for var in reads if var not in used and var not in computed]
