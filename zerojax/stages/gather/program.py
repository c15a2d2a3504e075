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
import math
from collections.abc import Sequence
from typing import Any

import jax

from zerojax import compat
from zerojax.layout.leaf import Leaf
from zerojax.stages.gather import evaluate
from zerojax.stages.gather.weight import Weight, extended, root_weight

# How the jit that `zerojax.block` puts around a function is known again in a jaxpr.
BLOCK_NAME = "zerojax_block"

_CONTROL = frozenset({"scan", "while", "cond", "shard_map", "custom_jvp_call", "custom_vjp_call", "pallas_call"})

_DEVICE_DEPENDENT = frozenset({"axis_index", "rng_uniform", "shard_map", "pallas_call"})


@dataclasses.dataclass(frozen=True)
class Segment:
    """Equations that run together.

    Attributes:
        kind: `"plain"`, `"block"` or `"scan"`.
        jaxpr: The equations, from `(*weights, *others)` to `results`.
        weights: Parameters to gather for them.
        others: Variables read that are not gathered parameters.
        results: What later segments or the caller read: variables, or `Whole` parameters.
    """

    kind: str
    jaxpr: Any
    weights: tuple[Weight, ...]
    others: tuple
    results: tuple

    def run(self, weights: Sequence, others: Sequence) -> list:
        """The results, given the gathered parameters in the type they are gathered in."""
        if not self.weights:
            return jax.core.eval_jaxpr(self.jaxpr, (), *others)
        values = [
            value if weight.dtype == weight.wide else evaluate.Narrow(value, weight.wide)
            for value, weight in zip(weights, self.weights, strict=True)
        ]
        return evaluate.evaluate(self.jaxpr, (), [*values, *others])


@dataclasses.dataclass(frozen=True)
class Whole:
    """A parameter, or something made of parameters alone, that the function returns.

    Attributes:
        var: Its variable, by which its shard is known.
    """

    var: Any


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


def plan(jaxpr, leaves: Sequence[Leaf | None]) -> Program:
    """Cut an inlined jaxpr into segments.

    Args:
        jaxpr: Without constants; arguments first among which are the parameters.
        leaves: For each argument, its layout if it is a cut parameter, else None.
    """
    weights = {var: root_weight(var, leaf) for var, leaf in zip(jaxpr.invars, leaves, strict=True) if leaf is not None}
    travelling: dict = {}
    uniform: set = set()
    pieces: list[tuple[str, list]] = [("plain", [])]
    for eqn in jaxpr.eqns:
        reads = [atom for atom in eqn.invars if not compat.is_literal(atom)]
        if uniform.issuperset(reads) and not eqn.effects and eqn.primitive.name not in _DEVICE_DEPENDENT:
            uniform.update(eqn.outvars)
        touched = [var for var in reads if var in weights or var in travelling]
        if not touched:
            if pieces[-1][0] != "plain":
                pieces.append(("plain", []))
            pieces[-1][1].append(eqn)
            continue
        first = eqn.invars[0]
        # Slicing shards gives one slice only if every device slices at the same place.
        if touched == [first] and first in weights and uniform.issuperset(reads[1:]):
            if (weight := extended(weights[first], eqn)) is not None:
                weights[eqn.outvars[0]] = weight
                continue
        if _travels(eqn, [not compat.is_literal(a) and (a in weights or a in travelling) for a in eqn.invars]):
            travelling |= dict.fromkeys(eqn.outvars, eqn)
            continue
        pieces.append(("scan" if eqn.primitive.name == "scan" else "block", [eqn]))
    returned = [v for v in jaxpr.outvars if not compat.is_literal(v) and (v in weights or v in travelling)]
    if returned:
        pieces.append(("returned", []))
    return _assembled(jaxpr, pieces, weights, travelling, tuple(dict.fromkeys(returned)))


def _assembled(jaxpr, pieces, weights: dict, travelling: dict, returned: tuple) -> Program:
    """Segments with their inputs and outputs."""
    order = {id(eqn): i for i, eqn in enumerate(jaxpr.eqns)}
    closed: list[tuple[str, list, dict, list]] = []
    for kind, eqns in pieces:
        wanted = list(returned) if kind == "returned" else []
        full, used, others = _with_travellers(eqns, wanted, weights, travelling, order)
        if full or wanted:
            closed.append((kind, full, used, others))
    readers: dict = {}
    for index, (_, _, used, others) in enumerate(closed):
        operands = [v for name in used for v in weights[name].operands]
        for var in [*others, *operands]:
            readers.setdefault(var, set()).add(index)
    final = {atom for atom in jaxpr.outvars if not compat.is_literal(atom)}
    segments = []
    for index, (kind, eqns, used, others) in enumerate(closed):
        made = [v for eqn in eqns for v in eqn.outvars if not compat.is_dropped(v) and v not in travelling]
        results = [v for v in made if v in final or readers.get(v, set()) - {index}]
        keys = results
        if kind == "returned":
            kind, results, keys = "block", list(returned), [Whole(v) for v in returned]
        segments.append(_segment(jaxpr, kind, eqns, {v: weights[v] for v in used}, others, results, keys))
    outs = tuple(Whole(a) if not compat.is_literal(a) and a in returned else a for a in jaxpr.outvars)
    return Program(tuple(jaxpr.invars), tuple(segments), outs)


def _with_travellers(eqns, wanted, weights: dict, travelling: dict, order: dict):
    """`(equations, weights used, others read)`, the travelling equations they need put before them."""
    needed: dict = {}
    pending = [atom for eqn in eqns for atom in eqn.invars if not compat.is_literal(atom)] + wanted
    while pending:
        var = pending.pop()
        if var in travelling and id(travelling[var]) not in needed:
            needed[id(travelling[var])] = travelling[var]
            pending.extend(atom for atom in travelling[var].invars if not compat.is_literal(atom))
    full = sorted(needed.values(), key=lambda eqn: order[id(eqn)]) + list(eqns)
    made = {var for eqn in full for var in eqn.outvars}
    reads = dict.fromkeys(a for eqn in full for a in eqn.invars if not compat.is_literal(a))
    reads |= dict.fromkeys(wanted)
    used = {var: None for var in reads if var in weights}
    others = [var for var in reads if var not in weights and var not in made]
    return full, used, others


def _segment(jaxpr, kind: str, eqns, used: dict, others, results, keys) -> Segment:
    """A segment whose parameters are gathered in the narrowest type that loses nothing."""
    names = tuple(used)
    part = compat.part_of(jaxpr, eqns, [*names, *others], results)
    demands = evaluate.demanded(part, names)
    weights = tuple(weight.narrowed(dtype) for weight, dtype in zip(used.values(), demands, strict=True))
    return Segment(kind, part, weights, tuple(others), tuple(keys))
