"""Trace an optax update into equations, inline its calls, and find the equations that compute some of its results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.core

from zerojax import compat, jaxprs
from zerojax.optim.owned_group import Core, OwnedGroup

# Each input of an update is named by its kind, and by its index among the inputs of this kind.
GRAD, STATE, PARAM, EXTRA, CONST, SHARED = "grad", "state", "param", "extra", "const", "shared"
Read = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class Equations:
    """A part of the equations of an update."""

    jaxpr: Any  # the equations; they compute some of the update's results from the inputs in `reads`
    reads: tuple[Read, ...]  # the kind and index of each input, in order
    # the cores among these equations that owners compute; their indices refer to `jaxpr` and `variables`
    owned: tuple[OwnedGroup, ...] = ()

    @functools.cached_property
    def key(self) -> tuple:
        return str(self.jaxpr), tuple(group.structure for group in self.owned)

    @functools.cached_property
    def variables(self) -> list:
        return [*self.jaxpr.invars, *(var for eqn in self.jaxpr.eqns for var in eqn.outvars)]

    def indices(self, kind: str) -> tuple[int, ...]:
        return tuple(i for name, i in self.reads if name == kind)


@dataclasses.dataclass(frozen=True)
class TracedUpdate:
    """An update that was traced into equations."""

    # the equations; they compute new parameters and state from gradients, state, parameters and extra values
    jaxpr: Any
    consts: tuple  # the arrays that the transformation closes over
    reads: dict[Any, Read]  # for each input variable, its kind and index
    num_params: int  # the number of results that are parameters; the remaining results are state

    @functools.cached_property
    def producers(self) -> dict[Any, int]:
        return producers_of(self.jaxpr)

    @functools.cached_property
    def structure(self) -> tuple:
        """Return the structure of the trace. Traces that differ only in shapes have equal structures."""
        return len(self.reads), [(eqn.primitive.name, len(eqn.outvars)) for eqn in self.jaxpr.eqns]

    @functools.cached_property
    def variables(self) -> list:
        """Return all variables in order. If two traces have equal structures, their variables correspond."""
        return [*self.reads, *(var for eqn in self.jaxpr.eqns for var in eqn.outvars)]

    @functools.cached_property
    def positions(self) -> dict[Any, int]:
        return {var: n for n, var in enumerate(self.variables)}

    @property
    def num_state(self) -> int:
        return len(self.jaxpr.outvars) - self.num_params

    def core_jaxpr(self, core: Core) -> Any:
        """Return `core` as a jaxpr from its inputs to its results, with the shapes of this trace."""
        of = lambda indices: [self.variables[n] for n in indices]
        return compat.part_of(self.jaxpr, [self.jaxpr.eqns[e] for e in core.eqns], of(core.inputs), of(core.results))

    def equations(
        self, eqns: Sequence[int], reads: dict[Any, Read], outvars: Sequence, owned: Sequence[OwnedGroup] = ()
    ) -> Equations:
        """Return `eqns` as a program from `reads` to `outvars`. Keep the cores of `owned` that `eqns` contains."""
        jaxpr = compat.part_of(self.jaxpr, [self.jaxpr.eqns[e] for e in eqns], list(reads), outvars)
        part, position = Equations(jaxpr, tuple(reads.values())), {e: n for n, e in enumerate(eqns)}
        variables = {self.positions[var]: n for n, var in enumerate(part.variables)}
        inside = []
        for group in owned:
            if cores := [core for core in group.cores if position.keys() >= set(core.eqns)]:
                cores = [(core, core.renumbered(position, variables)) for core in cores]
                taken = group.take([core for core, _ in cores])
                inside.append(dataclasses.replace(taken, cores=tuple(core for _, core in cores)))
        return dataclasses.replace(part, owned=tuple(inside))


def trace_update(update: Callable, grads: Sequence, state: Sequence, params: Sequence, extra: Sequence) -> TracedUpdate:
    """Trace a function of lists, `update(grads, state, params, extra) -> (params, state)`, on arrays or shapes."""
    counts = {GRAD: len(grads), STATE: len(state), PARAM: len(params), EXTRA: len(extra)}

    def flat(*values):
        given = iter(values)
        new_params, new_state = update(*([next(given) for _ in range(count)] for count in counts.values()))
        return [*new_params, *new_state]

    jaxpr, consts = trace_inlined(flat, *grads, *state, *params, *extra)
    names: list[Read] = [(kind, i) for kind, count in counts.items() for i in range(count)]
    reads = dict(zip(jaxpr.invars, names, strict=True))
    reads |= {var: (CONST, i) for i, var in enumerate(compat.constvars_of(jaxpr))}
    return TracedUpdate(jaxpr, tuple(consts), reads, len(params))


def trace_inlined(fn: Callable, *args: Any) -> tuple[Any, Sequence]:
    """Trace a function, inline the calls in its jaxpr, and return `(jaxpr, consts)`."""
    jaxpr, consts = compat.opened(jax.make_jaxpr(fn)(*args))
    return compat.opened(jax.make_jaxpr(functools.partial(jaxprs.inline_calls, jaxpr, consts))(*args))


def producers_of(jaxpr: Any) -> dict[Any, int]:
    """Map each variable of a jaxpr to the index of the equation that computes it."""
    return {var: e for e, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}


def equations_behind(
    jaxpr: Any, producers: dict[Any, int], outvars: Sequence, stop: Collection = ()
) -> tuple[list[int], list]:
    """Return the indices of the equations that compute `outvars`, and the input variables that these equations read.

    `producers` is the result of `producers_of`. The variables in `stop` count as inputs.
    """
    pending, inputs, eqns = list(outvars), {}, set()
    while pending:
        var = pending.pop()
        if compat.is_literal(var) or var in inputs:
            continue
        if var in stop or var not in producers:
            inputs[var] = None
        elif (e := producers[var]) not in eqns:
            eqns.add(e)
            pending += jaxpr.eqns[e].invars
    return sorted(eqns), list(inputs)


def union(known: dict[Any, frozenset], atoms: Sequence) -> frozenset:
    """Return the union of `known[atom]` for all `atoms`. Literals and unknown variables have the empty set."""
    return frozenset().union(*(known.get(atom, ()) for atom in atoms if not compat.is_literal(atom)))
