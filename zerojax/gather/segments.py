"""A loss function as a list of segments: which equations run together on which gathered parameters.

The loss's jaxpr is cut where parameters are used:

plain   consecutive equations that use no cut parameter
block   a use: one equation, a user's remat, or what `zerojax.block` marks
scan    a loop over stacked layers, each turn of which is a block

Equations on parameters alone (a transpose, a reshape, a merged LoRA) are not run where
they stand but travel into every block that uses their result, so that nothing of a
gathered parameter's size outlives a block.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.core

from zerojax import compat
from zerojax.gather import evaluate
from zerojax.gather.grad_dims import orders
from zerojax.gather.sharded_param import ShardedParam, extended, root_param
from zerojax.layout.leaf import Leaf

# How the jit that `zerojax.block` puts around a function is known again in a jaxpr.
BLOCK_NAME = "zerojax_block"

_CONTROL = frozenset({"scan", "while", "cond", "shard_map", "custom_jvp_call", "custom_vjp_call", "pallas_call"})

_PRODUCTS = frozenset({"dot_general", "ragged_dot_general", "conv_general_dilated", "pallas_call", "ffi_call"})
_DEVICE_DEPENDENT = frozenset({"axis_index", "rng_uniform", "shard_map", "pallas_call"})


@dataclasses.dataclass(frozen=True)
class Segment:
    """Equations that run together.

    Attributes:
        kind: `"plain"`, `"block"` or `"scan"`.
        jaxpr: The equations, from `(*weights, *others)` to `results`.
        weights: Parameters to gather for them.
        others: What else is read: variables, or `Whole` parameters.
        results: What later segments or the caller read: variables, or `Whole` parameters.
    """

    kind: str
    jaxpr: Any
    weights: tuple[ShardedParam, ...]
    others: tuple
    results: tuple

    @functools.cached_property
    def computes(self) -> bool:
        """Whether there is enough work in it to hide communication behind: a matrix product or a kernel."""
        return _has_product(self.jaxpr)

    def run(self, weights: Sequence, others: Sequence) -> list:
        """The results, given the gathered parameters in the type they are gathered in."""
        if not self.weights:
            return jax.core.eval_jaxpr(self.jaxpr, (), *others)
        values = [
            value if weight.dtype == weight.wide else evaluate.Narrow(value, weight.wide)
            for value, weight in zip(weights, self.weights, strict=True)
        ]
        return evaluate.evaluate(self.jaxpr, (), [*values, *others])


def _has_product(jaxpr) -> bool:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _PRODUCTS or any(map(_has_product, compat.inner_jaxprs(eqn))):
            return True
    return False


@dataclasses.dataclass(frozen=True)
class Whole:
    """A parameter, or something made of parameters alone, that has to be had whole from some segment on.

    Attributes:
        var: Its variable, by which its shard is known.
        segment: Which segment gathers it.
    """

    var: Any
    segment: int


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function, cut into segments.

    Attributes:
        invars: Variables of the arguments: parameters' shards, other arguments, constants.
        segments: In the order in which they run.
        outs: What the function returns: variables, `Whole` parameters, or literals.
    """

    invars: tuple
    segments: tuple[Segment, ...]
    outs: tuple


@dataclasses.dataclass(frozen=True)
class _Derived:
    """A value made of weights alone, while call equations are inlined."""

    value: Any


def inlined(jaxpr, consts: Sequence, args: Sequence, cut: Sequence[bool]) -> list:
    """Evaluate `jaxpr`, opening the calls (`jax.jit` and its kin) that parameters are passed to.

    Args:
        jaxpr: What to evaluate.
        consts: Its constants.
        args: Its arguments.
        cut: For each argument, whether it is a cut parameter.
    """
    marked = [_Derived(arg) if is_cut else arg for arg, is_cut in zip(args, cut, strict=True)]
    return [_bare(value) for value in _inline(jaxpr, consts, marked)]


def _bare(value):
    return value.value if isinstance(value, _Derived) else value


def _inline(jaxpr, consts: Sequence, args: Sequence) -> list:
    env = dict(zip(compat.constvars_of(jaxpr), consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom):
        return atom.val if compat.is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        body = compat.called(eqn)
        touched = any(isinstance(value, _Derived) for value in values)
        if touched and body is not None and eqn.params.get("name") != BLOCK_NAME:
            results = _inline(*compat.opened(body), values)
        else:
            results = compat.evaluate_one(jaxpr, eqn, [_bare(value) for value in values])
            if touched and _travels(eqn, [isinstance(v, _Derived) for v in values]):
                results = [_Derived(result) for result in results]
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _travels(eqn, from_weights: Sequence[bool]) -> bool:
    """Whether an equation is on weights alone and may be made anew in each block that needs it."""
    for atom, is_weight in zip(eqn.invars, from_weights, strict=True):
        if not is_weight and not compat.is_literal(atom):
            return False
    if eqn.effects or eqn.primitive.name in _CONTROL or compat.is_remat(eqn) or compat.called(eqn) is not None:
        return False
    # What shrinks a weight (a norm, a row) is worth keeping, and gathering for by itself:
    # were it to travel, a penalty on all parameters would gather all of them at once.
    largest = max((math.prod(atom.aval.shape) for atom in eqn.invars), default=0)
    return all(2 * math.prod(var.aval.shape) > largest for var in eqn.outvars)


@dataclasses.dataclass
class _Piece:
    """A segment in the making: its equations, or the variables it has to gather and hand on."""

    kind: str
    eqns: list
    wanted: tuple = ()
    whole: dict = dataclasses.field(default_factory=dict)


def plan(jaxpr, leaves: Sequence[Leaf | None]) -> Program:
    """Cut an inlined jaxpr into segments.

    Args:
        jaxpr: Without constants; arguments first among which are the parameters.
        leaves: For each argument, its layout if it is a cut parameter, else None.
    """
    weights = {var: root_param(var, leaf) for var, leaf in zip(jaxpr.invars, leaves, strict=True) if leaf is not None}
    travelling: dict = {}
    uniform: set = set()
    pieces = [_Piece("plain", [])]
    for eqn in jaxpr.eqns:
        reads = [atom for atom in eqn.invars if not compat.is_literal(atom)]
        if uniform.issuperset(reads) and not eqn.effects and eqn.primitive.name not in _DEVICE_DEPENDENT:
            uniform.update(eqn.outvars)
        touched = [var for var in reads if var in weights or var in travelling]
        if not touched:
            if pieces[-1].kind != "plain":
                pieces.append(_Piece("plain", []))
            pieces[-1].eqns.append(eqn)
            continue
        first = eqn.invars[0]
        # Slicing shards gives one slice only if every device slices at the same place.
        alone = touched == [first] and first in weights and uniform.issuperset(reads[1:])
        if alone and (weight := extended(weights[first], eqn)) is not None:
            weights[eqn.outvars[0]] = weight
            continue
        if _travels(eqn, [not compat.is_literal(a) and (a in weights or a in travelling) for a in eqn.invars]):
            travelling |= dict.fromkeys(eqn.outvars, eqn)
            continue
        if eqn.primitive.name == "scan":
            early = [v for i, v in enumerate(eqn.invars) if v in touched and not _in_turns(eqn, i, weights)]
            early = tuple(dict.fromkeys(early))
            pieces += [_Piece("whole", [], early)] * bool(early)
            pieces.append(_Piece("scan", [eqn], whole={v: Whole(v, len(pieces) - 1) for v in early}))
        else:
            pieces.append(_Piece("block", [eqn]))
    returned = tuple(v for v in jaxpr.outvars if not compat.is_literal(v) and (v in weights or v in travelling))
    if returned:
        pieces.append(_Piece("whole", [], tuple(dict.fromkeys(returned))))
    outs = tuple(Whole(v, len(pieces) - 1) if v in returned else v for v in jaxpr.outvars)
    return Program(tuple(jaxpr.invars), _assembled(jaxpr, pieces, weights, travelling), outs)


def _in_turns(eqn, index: int, weights: dict) -> bool:
    """Whether a scan's operand may stay a shard until its turn: a constant, or a stack not cut over its layers."""
    parts, var = compat.scan_parts(eqn), eqn.invars[index]
    if var not in weights or parts.length == 0:
        return False
    return index < parts.consts or (index >= parts.consts + parts.carry and weights[var].dim != 0)


def _assembled(jaxpr, pieces: Sequence[_Piece], weights: dict, travelling: dict) -> tuple[Segment, ...]:
    """Segments with their inputs and outputs."""
    order = {id(eqn): i for i, eqn in enumerate(jaxpr.eqns)}
    closed = [_with_travellers(piece, weights, travelling, order) for piece in pieces]
    readers: dict = {}
    for index, (_, used, others) in enumerate(closed):
        operands = [v for name in used for v in weights[name].operands]
        for var in [*others, *operands]:
            readers.setdefault(var, set()).add(index)
    final = {atom for atom in jaxpr.outvars if not compat.is_literal(atom)}
    segments = []
    for index, (piece, (eqns, used, others)) in enumerate(zip(pieces, closed, strict=True)):
        made = [v for eqn in eqns for v in eqn.outvars if not compat.is_dropped(v) and v not in travelling]
        results = list(piece.wanted) or [v for v in made if v in final or readers.get(v, set()) - {index}]
        names = tuple(used)
        part = compat.part_of(jaxpr, eqns, [*names, *others], results)
        demands, made_in = evaluate.demanded(part, names), orders(part, names)
        line = compat.line_of(piece.eqns[0]) if piece.eqns else ""
        narrow = tuple(
            dataclasses.replace(weights[v].narrowed(dtype), line=line, order=order)
            for v, dtype, order in zip(names, demands, made_in, strict=True)
        )
        kind = "block" if piece.kind == "whole" else piece.kind
        keys = tuple(Whole(v, index) for v in piece.wanted) or tuple(results)
        if part.eqns or piece.wanted:
            segments.append(Segment(kind, part, narrow, tuple(piece.whole.get(v, v) for v in others), keys))
    return tuple(segments)


def _with_travellers(piece: _Piece, weights: dict, travelling: dict, order: dict):
    """`(equations, weights used, others read)`, the travelling equations they need put before them."""
    needed: dict = {}
    reads = [a for eqn in piece.eqns for a in eqn.invars if not compat.is_literal(a)] + list(piece.wanted)
    pending = [] if piece.kind == "scan" else list(reads)
    while pending:
        var = pending.pop()
        if var in travelling and id(travelling[var]) not in needed:
            needed[id(travelling[var])] = travelling[var]
            pending.extend(atom for atom in travelling[var].invars if not compat.is_literal(atom))
    full = sorted(needed.values(), key=lambda eqn: order[id(eqn)]) + list(piece.eqns)
    made = {var for eqn in full for var in eqn.outvars}
    reads = dict.fromkeys(a for eqn in full for a in eqn.invars if not compat.is_literal(a))
    reads |= dict.fromkeys(piece.wanted)
    used = {var: None for var in reads if var in weights and var not in piece.whole}
    others = [var for var in reads if var not in used and var not in made]
    return full, used, others
