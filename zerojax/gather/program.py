"""A loss function as a list of segments: its jaxpr is divided where parameters are used.

Equations on parameters alone (a transpose, a reshape, a merged LoRA) are not run in place but
repeated in every segment that reads their result, so that nothing of a gathered parameter's
size outlives a segment. Matrix products among them that would cost more than `REPEATED` of all
products are computed once, and kept like an activation.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

from zerojax import compat, jaxprs
from zerojax.dims import NOWHERE, Follower, State
from zerojax.gather import evaluate
from zerojax.gather.grad_dims import orders
from zerojax.gather.layer_stacks import Derived, combined, evaluated, over_stacks
from zerojax.gather.merged import merged
from zerojax.gather.nested import MOST_ITERATIONS, NestedSegment, iterations_are_independent
from zerojax.gather.scan import ScanSegment
from zerojax.gather.segments import BlockSegment, Gathered, HeldSegment, PlainSegment, Segment
from zerojax.gather.sharded_param import (
    OF_STACKS,
    ShardedParam,
    can_be_stacked,
    extended,
    root_param,
    scanned_over,
    stack_of,
)
from zerojax.layout.leaf import Leaf

# The name, in a jaxpr, of the jit that `zerojax.block` puts around a function.
BLOCK_NAME = "zerojax_block"

REPEATED = 0.05  # of all FLOPs: what is worth holding
MOST_HELD = 4  # of the largest use's bytes: what may be held
_CONTROL = frozenset({"scan", "while", "cond", "shard_map", "custom_jvp_call", "custom_vjp_call", "pallas_call"})
_DEVICE_DEPENDENT = frozenset({"axis_index", "rng_uniform", "shard_map", "pallas_call"})


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function, divided into segments.

    Attributes:
        invars: Variables of the arguments: parameters' shards, other arguments, constants.
        segments: In the order in which they run.
        outs: What the function returns: variables, `Gathered` parameters, or literals.
        joined: Stacks that are made of parameters of one layout (`jnp.stack`), by their variable.
        held: What is computed of parameters alone, once for all segments that read it.
        rows: Where variables hold the rows of the batch; empty if nothing follows them.
    """

    invars: tuple
    segments: tuple[Segment, ...]
    outs: tuple
    joined: Mapping[Any, tuple[ShardedParam, ...]]
    held: frozenset
    rows: Mapping[Any, State]


def planned(
    closed, leaves: Sequence[Leaf | None], given: Sequence[State], follower: Follower | None
) -> tuple[Program, list]:
    """Return the program of a traced function, and the constants that are its last arguments.

    `leaves` are the layouts of its first arguments, None for those that are not sharded. `given` says where each of
    its arguments holds the rows of the batch, which `follower`, if there is one, follows.
    """
    jaxpr, consts = compat.opened(closed)
    missing = [None] * (len(jaxpr.invars) - len(leaves))
    sharded = [leaf is not None for leaf in [*leaves, *missing]]

    def flat(args, consts):
        return inlined(jaxpr, consts, args, sharded)

    again = jax.make_jaxpr(flat)([var.aval for var in jaxpr.invars], list(consts))
    jaxpr, more = compat.opened(again)
    bare = compat.part_of(jaxpr, jaxprs.alive(jaxpr), [*jaxpr.invars, *compat.constvars_of(jaxpr)], jaxpr.outvars)
    bare = merged(bare, [var for var, leaf in zip(bare.invars, leaves, strict=False) if leaf is not None])
    missing = [None] * (len(bare.invars) - len(leaves))
    rest = [NOWHERE] * (len(bare.invars) - len(given))
    rows = {} if follower is None else follower.with_implied(bare, follower.states(bare, [*given, *rest]))
    return plan(bare, [*leaves, *missing], rows, follower), jaxprs.as_jax_values([*consts, *more])


def inlined(jaxpr, consts: Sequence, args: Sequence, sharded: Sequence[bool]) -> list:
    """Evaluate `jaxpr`, inlining the calls (such as `jax.jit`) that parameters are passed to.

    Stacks of layers become what a loop scans over, where it can (`layer_stacks`).

    Args:
        jaxpr: What to evaluate.
        consts: Its constants.
        args: Its arguments.
        sharded: For each argument, whether it is a sharded parameter.
    """
    known: dict = {}

    def rule(eqn, values):
        derived = [isinstance(value, Derived) and value.of_params for value in values]
        body = compat.called(eqn)
        if (value := evaluated(eqn, known)) is not None:
            known[eqn.outvars[0]] = value
        if any(derived) and eqn.primitive.name == "scan":
            scanned = over_stacks(eqn, values, known)
            if scanned is not None:
                return scanned
        if any(derived) and body is not None and eqn.params.get("name") != BLOCK_NAME:
            return jaxprs.evaluate(*compat.opened(body), values, rule)
        results = compat.evaluate_one(eqn, [_bare(value) for value in values])
        if any(derived) and _repeatable(eqn, derived):
            return [Derived(x, eqn, tuple(values)) for x in results]
        return combined(eqn, values, results) or results

    marked = [Derived(arg) if on else arg for arg, on in zip(args, sharded, strict=True)]
    return [_bare(value) for value in jaxprs.evaluate(jaxpr, consts, marked, rule)]


def _bare(value):
    return value.value if isinstance(value, Derived) else value


def _repeatable(eqn, from_params: Sequence[bool]) -> bool:
    """Return whether an equation reads parameters alone and may be repeated in each segment that needs it."""
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
        make: Its class, or what makes one of it.
        eqns: Its equations.
        gathers: Variables that it gathers for later segments, in place of equations.
        reads: Which variables it reads as another segment gathered them.
    """

    make: Callable[..., Segment]
    eqns: list
    gathers: tuple = ()
    reads: Mapping = dataclasses.field(default_factory=dict)


def plan(
    jaxpr, leaves: Sequence[Leaf | None], rows: Mapping[Any, State] = MappingProxyType({}), follower: Any = None
) -> Program:
    """Divide an inlined jaxpr into segments.

    Args:
        jaxpr: Without constants.
        leaves: For each argument, its layout if it is a sharded parameter, else None.
        rows: Where each variable holds the rows of the batch.
        follower: What found that, or None.
    """
    nest = functools.partial(_nested, rows=rows, follower=follower)
    program, params, repeated = _plan(jaxpr, leaves, frozenset(), nest)
    held = _costly(jaxpr, program, params, repeated)
    program = _plan(jaxpr, leaves, held, nest)[0] if held else program
    return dataclasses.replace(program, rows=rows)


def _plan(jaxpr, leaves: Sequence[Leaf | None], held: frozenset, nest: Callable) -> tuple[Program, Mapping, Mapping]:
    """Return the program, its parameters by variable, and the equations that segments repeat, by their results."""
    params = {var: root_param(var, leaf) for var, leaf in zip(jaxpr.invars, leaves, strict=True) if leaf is not None}
    joined: dict = {}
    repeated: dict = {}
    uniform: set = set()
    scanned = scanned_over(jaxpr)
    uses, final = jaxprs.uses_of(jaxpr)
    drafts = [_Draft(PlainSegment, [])]
    stateful = _between_refs(jaxpr)
    of_params = lambda eqn: [not compat.is_literal(a) and (a in params or a in repeated) for a in eqn.invars]
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
        alone &= eqn.primitive.name not in OF_STACKS or eqn.outvars[0] in scanned
        if alone and (param := extended(params[first], eqn)) is not None:
            params[eqn.outvars[0]] = param
        elif not scanned.isdisjoint(eqn.outvars) and (members := _joined(eqn.outvars[0], eqn, params, repeated)):
            joined[eqn.outvars[0]] = members
            params[eqn.outvars[0]] = stack_of(eqn.outvars[0], members)
        elif not held.isdisjoint(eqn.outvars):
            drafts.append(_Draft(HeldSegment, [eqn]))
        elif _repeatable(eqn, of_params(eqn)) or (all(of_params(eqn)) and _scales_a_weight(eqn, uses)):
            repeated |= dict.fromkeys(eqn.outvars, eqn)
        elif _changes_a_weight(eqn, params, repeated) and _has_one_reader(eqn.outvars[0], uses, final):
            repeated[eqn.outvars[0]] = eqn
        elif eqn.primitive.name == "scan":
            if (body := nest(eqn, touched, params)) is not None:
                drafts.append(_Draft(functools.partial(NestedSegment, program=body[0], consts=body[1]), [eqn]))
                continue
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
    segments = _assembled(jaxpr, drafts, params, repeated)
    return Program(tuple(jaxpr.invars), segments, outs, joined, held, {}), params, repeated


def _nested(
    eqn,
    touched: Collection,
    params: Mapping[Any, ShardedParam],
    *,
    rows: Mapping[Any, State],
    follower: Follower | None,
) -> tuple[Program, list] | None:
    """Return the program of a loop's body and its constants, if parameters should stay sharded until it uses them."""
    scan = compat.scan_params(eqn)
    constants = set(jaxprs.variables_in(eqn.invars[: scan.consts]))
    is_constant = constants.issuperset(touched) and params.keys() >= set(touched)
    if scan.length > MOST_ITERATIONS or not is_constant or not iterations_are_independent(scan):
        return None
    found = [None if compat.is_literal(a) else params.get(a) for a in eqn.invars]
    if any(param and param.leaf.further > 1 for param in found):  # its gradients are no shards of the body's arguments
        return None
    leaves = [param and dataclasses.replace(param.leaf, dtype=param.wide) for param in found]
    states = [NOWHERE if compat.is_literal(a) else rows.get(a, NOWHERE) for a in eqn.invars]
    inside = [] if follower is None else follower.into_scan(eqn, states)
    program, consts = planned(scan.body, leaves, inside, follower)
    largest = max((size for segment in program.segments for size in segment.gathered_bytes), default=0)
    return (program, consts) if 2 * largest < sum(leaf.bytes for leaf in leaves if leaf) else None


def _costly(jaxpr, program: Program, params: Collection, repeated: Mapping) -> frozenset:
    """Return which repeated equations to compute once: those that segments read directly and that need a product."""
    counts = Counter(id(eqn) for segment in program.segments for eqn in segment.jaxpr.eqns)
    again = {id(eqn): (counts[id(eqn)] - 1) * _flops(eqn) for eqn in repeated.values()}
    if sum(again.values()) <= REPEATED * sum(map(_flops, jaxpr.eqns)):
        return frozenset()
    costly: dict = {}  # of parameters alone
    for var, eqn in repeated.items():
        reads = jaxprs.variables_in(eqn.invars)
        if all(v in params or v in costly for v in reads):
            costly[var] = again[id(eqn)] > 0 or any(costly.get(v) for v in reads)
    uses, _ = jaxprs.uses_of(jaxpr)
    held: dict = {}  # for each costly value, whether it is of one that is held
    for var, on in costly.items():
        of_held = any(held.get(v) is not None for v in jaxprs.variables_in(repeated[var].invars))
        is_read = any(eqn.outvars[0] not in costly for eqn, _ in uses.get(var, ()) if eqn.outvars)
        if of_held or (on and is_read):
            held[var] = of_held
    room, chosen = MOST_HELD * max(max(segment.gathered_bytes) for segment in program.segments), set()
    for var in (var for var, of_held in held.items() if not of_held):
        room -= jaxprs.nbytes(var)
        if room >= 0:
            chosen.add(var)
    return frozenset(chosen)


def _flops(eqn) -> int:
    """Return the floating-point operations of an equation's matrix products."""
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        lhs = eqn.invars[0].aval.shape
        return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(lhs[dim] for dim in contracted)
    times = compat.scan_params(eqn).length if eqn.primitive.name == "scan" else 1
    return times * sum(_flops(inner) for body in compat.inner_jaxprs(eqn) for inner in body.eqns)


def _changes_a_weight(eqn, params: Mapping, repeated: Mapping) -> bool:
    """Return whether an equation combines a parameter elementwise with another value (a mask, noise, a gain)."""

    def is_weight(atom) -> bool:
        if compat.is_literal(atom) or atom.aval.shape != eqn.outvars[0].aval.shape:
            return False
        return atom in params or (atom in repeated and repeated[atom].primitive.name != "broadcast_in_dim")

    return eqn.primitive.name in jaxprs.ELEMENTWISE and eqn.outvars[0].aval.ndim > 1 and any(map(is_weight, eqn.invars))


def _scales_a_weight(eqn, uses: Mapping) -> bool:
    """Return whether an equation sums a weight only in order to scale it (a norm)."""
    if eqn.primitive.name not in ("reduce_sum", "reduce_max"):
        return False
    readers, shape = uses.get(eqn.outvars[0], ()), eqn.invars[0].aval.shape
    while len(readers) == 1 and readers[0][0].primitive.name in jaxprs.ELEMENTWISE | {"broadcast_in_dim", "reshape"}:
        (out,) = readers[0][0].outvars
        if out.aval.shape == shape:
            return True
        readers = uses.get(out, ())
    return False


def _has_one_reader(var, uses: Mapping, final: Collection) -> bool:
    """Return whether a variable is read once, and not by a loop, so that it may be computed where it is read."""
    readers = uses.get(var, ())
    return len(readers) == 1 and var not in final and readers[0][0].primitive.name not in _CONTROL


def _joined(var, eqn, params: Mapping, repeated: Mapping) -> tuple[ShardedParam, ...]:
    """Return the parameters that `jnp.stack` joins into a variable, or none if the equation does something else."""
    if eqn is None:
        return ()
    if eqn.primitive.name == "stack" and eqn.params["axis"] == 0:
        parts = [(params[v],) if v in params else () for v in eqn.invars]
    elif eqn.primitive.name == "concatenate" and eqn.params["dimension"] == 0:
        parts = [_joined(v, repeated.get(v), params, repeated) for v in eqn.invars]
    else:
        parts = []
    if parts:
        members = tuple(param for part in parts for param in part)
        return members if all(parts) and can_be_stacked(members) else ()
    of = eqn.invars[0]
    is_layer = eqn.primitive.name in ("broadcast_in_dim", "reshape") and var.aval.shape == (1, *of.aval.shape)
    return (params[of],) if is_layer and of in params else ()


def _between_refs(jaxpr) -> range:
    """Return indices of equations from the first `jax.new_ref` to the last use of a ref, which share a segment."""
    touching = [i for i, eqn in enumerate(jaxpr.eqns) if any(map(compat.is_ref, [*eqn.invars, *eqn.outvars]))]
    return range(touching[0], touching[-1] + 1) if touching else range(0)


def _by_iteration(eqn, index: int, params: Mapping) -> bool:
    """Return whether a scan's operand may stay sharded: a constant, or a stack not sharded over its layers."""
    scan, var = compat.scan_params(eqn), eqn.invars[index]
    if var not in params or scan.length == 0:
        return False
    return index < scan.consts or (index >= scan.consts + scan.carry and params[var].leaf.dim != 0)


def _assembled(
    jaxpr, drafts: Sequence[_Draft], params: Mapping[Any, ShardedParam], repeated: Mapping
) -> tuple[Segment, ...]:
    """Return the segments with their inputs and outputs."""
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
    """Return `(equations, parameters used, others read)`, with repeated equations put before the draft's own."""
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
