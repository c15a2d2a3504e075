"""An optax update as equations: traced, calls inlined, and the equations behind some of its results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.core

from zerojax import compat, jaxprs

# What an equation reads from outside: a kind of value, and an index into the values of that kind.
GRAD, STATE, PARAM, EXTRA, CONST, SHARED = "grad", "state", "param", "extra", "const", "shared"
Read = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class Equations:
    """Some of the update's equations.

    Attributes:
        jaxpr: From `reads` to some of the results.
        reads: Its inputs, in order.
    """

    jaxpr: Any
    reads: tuple[Read, ...]

    @functools.cached_property
    def text(self) -> str:
        """Return the equations as text, by which they are compared."""
        return str(self.jaxpr)

    def evaluate(self, values: Sequence) -> list:
        """Evaluate them on the values of `reads`."""
        return jax.core.eval_jaxpr(self.jaxpr, (), *values)

    def indices(self, kind: str) -> tuple[int, ...]:
        """Return the indices of the inputs of one kind."""
        return tuple(i for name, i in self.reads if name == kind)


@dataclasses.dataclass(frozen=True)
class TracedUpdate:
    """An update as equations.

    Attributes:
        jaxpr: From gradients, state, parameters and extra arguments to new parameters and state.
        consts: Arrays that the transformation closed over.
        reads: What each of the jaxpr's inputs is.
        num_params: How many of its results are parameters; the rest are state.
    """

    jaxpr: Any
    consts: tuple
    reads: dict[Any, Read]
    num_params: int

    @functools.cached_property
    def producers(self) -> dict[Any, int]:
        """Map each variable to the equation that makes it."""
        return producers_of(self.jaxpr)

    @functools.cached_property
    def structure(self) -> tuple:
        """Return what two traces of one update, on arrays of different shapes, have in common."""
        return len(self.reads), [(eqn.primitive.name, len(eqn.outvars)) for eqn in self.jaxpr.eqns]

    @functools.cached_property
    def variables(self) -> list:
        """Return all variables in order. Those of two traces of one structure correspond."""
        return [*self.reads, *(var for eqn in self.jaxpr.eqns for var in eqn.outvars)]

    @functools.cached_property
    def positions(self) -> dict[Any, int]:
        """Map each variable to its index among `variables`."""
        return {var: n for n, var in enumerate(self.variables)}

    @property
    def num_state(self) -> int:
        """Return how many of the results are state."""
        return len(self.jaxpr.outvars) - self.num_params

    def equations(self, eqns: Sequence[int], reads: dict[Any, Read], outvars: Sequence) -> Equations:
        """Return the equations with some indices, from the variables in `reads` to `outvars`."""
        jaxpr = compat.part_of(self.jaxpr, [self.jaxpr.eqns[e] for e in eqns], list(reads), outvars)
        return Equations(jaxpr, tuple(reads.values()))


def trace_update(update: Callable, grads: Sequence, state: Sequence, params: Sequence, extra: Sequence) -> TracedUpdate:
    """Trace an update of lists: `update(grads, state, params, extra) -> (params, state)`; shapes in."""
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
    """Trace a function and inline the calls in it: `(jaxpr, consts)`."""
    jaxpr, consts = compat.opened(jax.make_jaxpr(fn)(*args))
    return compat.opened(jax.make_jaxpr(functools.partial(jaxprs.inline_calls, jaxpr, consts))(*args))


def producers_of(jaxpr: Any) -> dict[Any, int]:
    """Map each variable of a jaxpr to the index of the equation that makes it."""
    return {var: e for e, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}


def equations_behind(
    jaxpr: Any, producers: dict[Any, int], outvars: Sequence, stop: Collection = ()
) -> tuple[list[int], list]:
    """Return the equations that compute some variables.

    Args:
        jaxpr: The equations.
        producers: As `producers_of` gives them.
        outvars: The variables.
        stop: Variables that are taken as inputs.

    Returns:
        `(eqns, inputs)`: indices of equations, in order, and the variables they start from.
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
