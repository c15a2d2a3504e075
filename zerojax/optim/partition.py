"""An optax update cut into parts: what the device does at once, and one task for each offloaded leaf.

Nothing is known about transformations by name. `tx.update` is traced, and from each
result it is followed back which offloaded arrays it depends on. What depends on none (a
count, a schedule, the norm of all gradients) is computed once, with the gradients.
Results that depend on the same offloaded arrays are one task; if all of them are
computed element by element, the task runs piece by piece.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core

from zerojax import compat, jaxprs
from zerojax.layout.chunked import Chunking

# What a part of the update reads: a kind and an index into the arrays of that kind.
GRAD, STATE, PARAM, EXTRA, CONST, SHARED = "grad", "state", "param", "extra", "const", "shared"
Read = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class Traced:
    """The update as equations, calls inlined.

    Attributes:
        jaxpr: From gradients, state, parameters and extra arguments to new parameters and state.
        consts: Arrays that the transformation closed over.
        reads: What each of the jaxpr's inputs is.
        moved: How many of its results are parameters; the rest are state.
    """

    jaxpr: Any
    consts: tuple
    reads: dict[Any, Read]
    moved: int

    @functools.cached_property
    def places(self) -> dict[Any, tuple[int, int]]:
        """For each variable the equation that makes it, -1 for the inputs, and which of its results it is."""
        found = {var: (-1, i) for i, var in enumerate(self.reads)}
        for e, eqn in enumerate(self.jaxpr.eqns):
            found |= {var: (e, i) for i, var in enumerate(eqn.outvars)}
        return found

    @functools.cached_property
    def inputs(self) -> list:
        """The variables it begins from."""
        return list(self.reads)

    @functools.cached_property
    def names(self) -> list[str]:
        """The primitives, in order: two traces of one update have the same."""
        return [eqn.primitive.name for eqn in self.jaxpr.eqns]

    def at(self, place_array: tuple[int, int]) -> Any:
        """The variable at a place."""
        e, i = place_array
        return self.inputs[i] if e < 0 else self.jaxpr.eqns[e].outvars[i]


@dataclasses.dataclass(frozen=True)
class Part:
    """Some of the update's equations.

    Attributes:
        jaxpr: From `reads` to some of the results.
        reads: What it reads, in order.
    """

    jaxpr: Any
    reads: tuple[Read, ...]

    @functools.cached_property
    def text(self) -> str:
        """The equations as text: two parts with the same text do the same."""
        return str(self.jaxpr)

    def on(self, values: Sequence) -> list:
        """Evaluate it on what it reads."""
        return jax.core.eval_jaxpr(self.jaxpr, (), *values)

    def of(self, kind: str) -> tuple[int, ...]:
        """Indices of what it reads of one kind."""
        return tuple(i for name, i in self.reads if name == kind)


@dataclasses.dataclass(frozen=True)
class Task:
    """The update of parameters whose offloaded state has to be there at the same time.

    Attributes:
        params: Trained parameters it moves.
        state: Offloaded leaves of the state, which it reads and replaces.
        resident: Leaves of the state on the device that it replaces.
        cut: How the parameter and its state are cut into pieces; None: as wholes.
        parts: For each length of a piece, the equations; under 0 those on wholes. Results:
            parameters, offloaded state, resident state.
    """

    params: tuple[int, ...]
    state: tuple[int, ...]
    resident: tuple[int, ...]
    chunking: Chunking | None
    parts: dict[int, Part]

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """`(start, length)` of each piece; `(0, 0)` for the whole."""
        return (
            ((0, 0),) if self.chunking is None else tuple(zip(self.chunking.starts, self.chunking.extents, strict=True))
        )

    def reading(self, kind: str) -> tuple[int, ...]:
        """Indices of what it reads of one kind."""
        return next(iter(self.parts.values())).of(kind)


@dataclasses.dataclass(frozen=True)
class Split:
    """A whole update in parts.

    Attributes:
        first: What depends on no offloaded array. Results: `moved`, `resident`, `shared`.
        moved: Trained parameters that `first` moves.
        resident: Leaves of the state that `first` replaces.
        shared: How many values it computes for the tasks.
        tasks: The rest.
        consts: Arrays that the transformation closed over.
    """

    first: Part
    moved: tuple[int, ...]
    resident: tuple[int, ...]
    shared: int
    tasks: tuple[Task, ...]
    consts: tuple


def trace(update: Callable, grads: Sequence, state: Sequence, params: Sequence, extra: Sequence) -> Traced:
    """Trace an update of lists: `update(grads, state, params, extra) -> (params, state)`; shapes in."""
    arguments = [*grads, *state, *params, *extra]
    counts = {GRAD: len(grads), STATE: len(state), PARAM: len(params), EXTRA: len(extra)}
    names: list[Read] = [(kind, i) for kind, count in counts.items() for i in range(count)]

    def flat(*values):
        given = iter(values)
        lists = [[next(given) for _ in range(count)] for count in counts.values()]
        moved, new = update(*lists)
        return [*moved, *new]

    jaxpr, consts = compat.opened(jax.make_jaxpr(flat)(*arguments))
    jaxpr, consts = compat.opened(jax.make_jaxpr(functools.partial(jaxprs.inline_calls, jaxpr, consts))(*arguments))
    reads = dict(zip(jaxpr.invars, names, strict=True))
    reads |= {var: (CONST, i) for i, var in enumerate(compat.constvars_of(jaxpr))}
    return Traced(jaxpr, tuple(consts), reads, len(params))


def split(
    whole: Traced,
    offloaded: dict[int, int | None],
    chunkings: dict[int, Chunking],
    retraced: Callable[[dict[int, int]], Traced],
) -> Split:
    """Cut an update into parts.

    Args:
        whole: The update of logical arrays.
        offloaded: The leaves of the state that are offloaded, each with the parameter it
            belongs to, or None.
        chunkings: For parameters whose update is computed element by element, how they may be cut.
        retraced: The update with the parameters of `chunkings` as pieces of the lengths given.
    """
    known = Known.of(whole, offloaded)
    chunks = ChunkTraces(chunkings, retraced)
    shared: dict[Any, int] = {}
    tasks = []
    for params, state, resident in grouped(whole, offloaded, known):
        outs = [*params, *(whole.moved + k for k in (*state, *resident))]
        eqns, inputs = carve(known.makers, whole.jaxpr, outs, known.early)
        reads = {}
        for var in inputs:
            kind, i = whole.reads.get(var, (SHARED, 0))
            late = kind in (SHARED, EXTRA) or (kind == STATE and i not in offloaded)
            reads[var] = (SHARED, shared.setdefault(var, len(shared))) if late else (kind, i)
        alone = len(params) == 1 and not resident and keeps_to_itself(whole, offloaded, eqns, reads, outs)
        own = chunkings.get(params[0]) if alone else None
        lengths = (0,) if own is None else tuple(dict.fromkeys(own.extents))
        traces = {n: whole if own is None else chunks.traced(params[0], n) for n in lengths}
        if any(other.names != whole.names for other in traces.values()):
            own, traces = None, {0: whole}
        parts = {n: part(whole, other, eqns, reads, outs) for n, other in traces.items()}
        tasks.append(Task(params, state, resident, own, parts))
    taken = {i for task in tasks for i in task.params}
    kept = {k for task in tasks for k in (*task.state, *task.resident)}
    moved = tuple(i for i in range(whole.moved) if i not in taken)
    resident = tuple(k for k in range(len(whole.jaxpr.outvars) - whole.moved) if k not in kept)
    results = [whole.jaxpr.outvars[o] for o in (*moved, *(whole.moved + k for k in resident))]
    first = early_part(whole, known, [*results, *shared])
    return Split(first, moved, resident, len(shared), tuple(tasks), whole.consts)


def keeps_to_itself(
    whole: Traced, offloaded: dict[int, int | None], eqns: Sequence[int], reads: dict[Any, Read], outs: Sequence[int]
) -> bool:
    """Whether a parameter's task makes sense of pieces: it sums nothing up, and meets only scalars and like arrays.

    An equation with several results, such as a `cond` over all leaves, brings other leaves along.
    """
    i, shape = outs[0], whole.jaxpr.outvars[outs[0]].aval.shape

    def fits(var, read: Read) -> bool:
        kind, k = read
        mine = offloaded.get(k) == i if kind == STATE else kind in (GRAD, PARAM) and k == i
        return var.aval.shape == () or (mine and var.aval.shape == shape)

    return (
        all(fits(var, read) for var, read in reads.items())
        and all(whole.jaxpr.outvars[o].aval.shape == shape for o in outs)
        and not any(sums_up(whole.jaxpr.eqns[e]) for e in eqns)
    )


def sums_up(eqn: Any) -> bool:
    """Whether an equation, or one inside it, reduces an array."""
    name = eqn.primitive.name
    within = (inner for jaxpr in compat.inner_jaxprs(eqn) for inner in jaxpr.eqns)
    return (name.startswith("reduce") and name != "reduce_precision") or any(sums_up(inner) for inner in within)


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known of the variables of a traced update.

    Attributes:
        makers: For each variable, the index of the equation that makes it.
        needs: For each variable, the units whose offloaded arrays it depends on; no entry for none.
            A unit is a parameter's index, or `("state", k)` for a leaf that belongs to none.
        touches: For each variable, the parameters it is made of without passing through `early`.
        early: Scalars that depend on nothing offloaded: they are computed once.
    """

    makers: dict[Any, int]
    needs: dict[Any, frozenset]
    touches: dict[Any, frozenset]
    early: frozenset

    @classmethod
    def of(cls, whole: Traced, offloaded: dict[int, int | None]) -> Known:
        """Follow the equations once."""
        makers, early = {}, set()
        far = {v: k for v, (kind, k) in whole.reads.items() if kind == STATE and k in offloaded}
        needs = {v: frozenset((unit(offloaded, k),)) for v, k in far.items()}
        touches = {v: frozenset((i,)) for v, (kind, i) in whole.reads.items() if kind == PARAM}
        none = frozenset()
        for e, eqn in enumerate(whole.jaxpr.eqns):
            read = [v for v in eqn.invars if not compat.is_literal(v)]
            distant, near = (none.union(*(known.get(v, none) for v in read)) for known in (needs, touches))
            for var in eqn.outvars:
                makers[var] = e
                if distant:
                    needs[var] = distant
                elif var.aval.shape == ():
                    early.add(var)
                    continue
                if near:
                    touches[var] = near
        return cls(makers, needs, touches, frozenset(early))


def unit(offloaded: dict[int, int | None], k: int) -> Any:
    """The unit that an offloaded leaf of the state belongs to."""
    owner = offloaded[k]
    return ("state", k) if owner is None else owner


def grouped(whole: Traced, offloaded: dict[int, int | None], known: Known) -> list[tuple[tuple, tuple, tuple]]:
    """The tasks: parameters, offloaded state and resident state that are computed together.

    A task moves every parameter it reads: once the parameter has moved, the old one is gone.
    """
    none, outvars = frozenset(), whole.jaxpr.outvars
    look = lambda found, var: none if compat.is_literal(var) else found.get(var, none)
    own = [frozenset((i,)) for i in range(whole.moved)]
    own += [frozenset((unit(offloaded, k),)) if k in offloaded else none for k in range(len(outvars) - whole.moved)]
    touched = [mine | look(known.needs, var) | look(known.touches, var) for mine, var in zip(own, outvars, strict=True)]
    active = {o for o, var in enumerate(outvars) if look(known.needs, var) or (o >= whole.moved and own[o])}
    joined: dict[Any, Any] = {}

    def root(x):
        while joined.setdefault(x, x) != x:
            x = joined[x]
        return x

    fresh = active
    while fresh:
        for o in sorted(fresh):
            first, *others = touched[o]
            for x in (first, *others):
                joined[root(x)] = root(first)
        fresh = {i for i in range(whole.moved) if i in joined} - active
        active |= fresh
    members: dict[Any, list[int]] = {}
    for o in sorted(active):
        members.setdefault(root(next(iter(touched[o]))), []).append(o)
    return [
        (
            tuple(o for o in outs if o < whole.moved),
            tuple(o - whole.moved for o in outs if o >= whole.moved and o - whole.moved in offloaded),
            tuple(o - whole.moved for o in outs if o >= whole.moved and o - whole.moved not in offloaded),
        )
        for outs in members.values()
    ]


def carve(makers: dict[Any, int], jaxpr: Any, outs: Sequence[int], stop: frozenset) -> tuple[list[int], list]:
    """The equations behind some results, as indices in order, and the variables they begin from."""
    wanted, inputs, eqns = [jaxpr.outvars[o] for o in outs], {}, set()
    while wanted:
        var = wanted.pop()
        if compat.is_literal(var) or var in inputs:
            continue
        if var in stop or var not in makers:
            inputs[var] = None
        elif (e := makers[var]) not in eqns:
            eqns.add(e)
            wanted += jaxpr.eqns[e].invars
    return sorted(eqns), list(inputs)


def early_part(whole: Traced, known: Known, results: Sequence) -> Part:
    """The equations behind some variables that depend on nothing offloaded."""
    alone = whole.jaxpr.replace(outvars=list(results))
    eqns, inputs = carve(known.makers, alone, range(len(results)), frozenset())
    jaxpr = compat.part_of(whole.jaxpr, [whole.jaxpr.eqns[e] for e in eqns], inputs, results)
    return Part(jaxpr, tuple(whole.reads[var] for var in inputs))


def part(whole: Traced, other: Traced, eqns: Sequence[int], reads: dict[Any, Read], outs: Sequence[int]) -> Part:
    """Equations of `whole`, given by their places, as they stand in another trace of the same update."""
    jaxpr = compat.part_of(
        other.jaxpr,
        [other.jaxpr.eqns[e] for e in eqns],
        [other.at(whole.places[var]) for var in reads],
        [other.jaxpr.outvars[o] for o in outs],
    )
    return Part(jaxpr, tuple(reads.values()))


class ChunkTraces:
    """Traces of an update of pieces: one for the pieces that are alike, and one for the last ones."""

    def __init__(self, chunkings: dict[int, Chunking], retraced: Callable[[dict[int, int]], Traced]):
        """Nothing is traced yet."""
        self._lengths = {i: tuple(dict.fromkeys(chunking.extents)) for i, chunking in chunkings.items()}
        self._traced = functools.cache(
            lambda place_array: retraced({i: ns[min(place_array, len(ns) - 1)] for i, ns in self._lengths.items()})
        )

    def traced(self, i: int, length: int) -> Traced:
        """The trace in which pieces of parameter `i` have this length."""
        return self._traced(self._lengths[i].index(length))
