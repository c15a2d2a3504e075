"""Evaluate a jaxpr with a rule: every pass over equations in this library is one rule given to `evaluate`."""

from collections.abc import Callable, Sequence
from typing import Any

from zerojax import compat

Rule = Callable[[Any, list], Sequence | None]


def evaluate(
    jaxpr: Any, consts: Sequence, args: Sequence, rule: Rule, *, literal: Callable[[Any], Any] = lambda value: value
) -> list:
    """Evaluate a jaxpr, equation by equation.

    Args:
        jaxpr: An open jaxpr, as `compat.opened` gives it.
        consts: Values of its constants.
        args: Values of its arguments: arrays, tracers, or whatever `rule` makes sense of.
        rule: `rule(eqn, values)` gives the results of one equation, or None to have its
            primitive bound to `values` as it stands.
        literal: What a literal's value is taken for; itself by default.

    Returns:
        One value for each of the jaxpr's results.
    """
    env = dict(zip(compat.constvars_of(jaxpr), consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom):
        return literal(atom.val) if compat.is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        results = rule(eqn, values)
        if results is None:
            results = compat.evaluate_one(jaxpr, eqn, values)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def inline_calls(jaxpr: Any, consts: Sequence, *args: Any) -> list:
    """Evaluate a jaxpr with the calls in it (`jax.jit` and its kin) opened."""

    def rule(eqn, values):
        body = compat.called(eqn)
        return None if body is None else inline_calls(*compat.opened(body), *values)

    return evaluate(jaxpr, consts, args, rule)
