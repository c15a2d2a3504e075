"""Where a function makes its first NaN: its jaxpr is evaluated equation by equation, each one's results tested."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import compat
from zerojax.jaxprs import evaluate

TESTS = {"inf": jnp.isinf, "nan": jnp.isnan}


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where values that are not finite begin.

    Attributes:
        kind: `"nan"` or `"inf"`.
        primitive: The operation of JAX that makes the first, of operands that have none; "" if it was given.
        where: The line of the model, as "model.py:12", "" if it is in none; or the argument it was given in.
    """

    kind: str
    primitive: str
    where: str

    def __str__(self) -> str:
        """Describe the origin."""
        if not self.primitive:
            return f"the first {self.kind} is given in {self.where}"
        return f"the first {self.kind} is made by {self.primitive} at {self.where or 'a line of no model'}"


def origins(fn: Callable, **given: Any) -> tuple[Origin, ...]:
    """Find where a function makes its first NaN, and its first inf where that comes before.

    An inf alone is often meant, as in a mask: callers ask when a result is not finite.

    Args:
        fn: Traced; run on the default device one equation at a time.
        **given: Its arguments, trees of arrays.

    Returns:
        In the order in which they are made. Empty if there are none.
    """
    for name, tree in given.items():
        for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
            if has("nan", [x]):
                return (Origin("nan", "", f"{name}{jax.tree_util.keystr(path)}"),)
    jaxpr, consts = compat.opened(jax.make_jaxpr(lambda given: fn(**given))(given))
    walk = Walk()
    walk.run(jaxpr, consts, [jnp.asarray(x) for x in jax.tree.leaves(given)], "")
    return tuple(walk.found.values())


class Walk:
    """One evaluation, and the first of each kind that it met.

    Attributes:
        found: By kind, in the order of evaluation.
    """

    def __init__(self):
        """Begin with nothing found."""
        self.found: dict[str, Origin] = {}

    def run(self, jaxpr: Any, consts: Sequence, values: Sequence, line: str) -> list:
        """Evaluate a jaxpr; `line` is of the equation that calls it."""

        def rule(eqn, values):
            results = compat.evaluate_one(eqn, values)
            for kind in TESTS:
                if not self.found.keys() & {kind, "nan"} and has(kind, results) and not has_before(kind, values):
                    here = compat.line_of(eqn) or line
                    self.enter(eqn, values, here)
                    self.found.setdefault(kind, Origin(kind, eqn.primitive.name, here))
            return results

        return evaluate(jaxpr, consts, values, rule)

    def enter(self, eqn: Any, values: Sequence, line: str) -> None:
        """Evaluate what an equation calls, to name the line inside."""
        name = eqn.primitive.name
        if (loop := compat.loop_of(eqn)) is not None:
            self.enter_loop(loop, values, line)
        elif name == "cond":
            self.run(*compat.opened(eqn.params["branches"][int(values[0])]), values[1:], line)
        elif compat.is_remat(eqn):
            self.run(*compat.opened(eqn.params["jaxpr"]), values, line)
        elif (body := compat.called(eqn)) is not None:
            self.run(*compat.opened(body), values, line)

    def enter_loop(self, loop: compat.LoopEqn, values: Sequence, line: str) -> None:
        """Evaluate a loop's iterations up to the first that makes one."""
        body, before = compat.opened(loop.body), len(self.found)
        split = loop.consts + loop.carry
        consts, carry, xs = values[: loop.consts], list(values[loop.consts : split]), values[split:]
        for i in reversed(range(loop.length)) if loop.reverse else range(loop.length):
            results = self.run(*body, [*consts, *carry, *(x[i] for x in xs)], line)
            if len(self.found) > before:
                return
            carry = results[: loop.carry]


def has(kind: str, values: Sequence) -> bool:
    """Return whether any of some arrays has a NaN, or an inf."""
    return any(bool(TESTS[kind](x).any()) for x in values if is_float(x))


def has_before(kind: str, values: Sequence) -> bool:
    """Return whether operands explain a nonfinite result: a NaN comes from a NaN, an inf from either."""
    return has("nan", values) or (kind == "inf" and has("inf", values))


def is_float(x: Any) -> bool:
    """Return whether a value can be nonfinite. A dropped result is None."""
    return x is not None and jnp.issubdtype(jnp.result_type(x), jnp.inexact)
