"""Find the operation that produces a function's first NaN: evaluate its jaxpr, and test each equation's results."""

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
    """The first NaN or inf of a function.

    Attributes:
        kind: `"nan"` or `"inf"`.
        primitive: The JAX primitive that produces the value from operands without it. Empty if an argument has it.
        where: The line of the model, such as "model.py:12", or the argument. Empty if no line of the model is known.
    """

    kind: str
    primitive: str
    where: str

    def __str__(self) -> str:
        """Describe the origin in words."""
        if not self.primitive:
            return f"the first {self.kind} is given in {self.where}"
        return f"the first {self.kind} is made by {self.primitive} at {self.where or 'an unknown line'}"


def origins(fn: Callable, **given: Any) -> tuple[Origin, ...]:
    """Find where a function produces its first NaN, and its first inf if the inf comes before the NaN.

    The function is traced, and then run on the default device one equation at a time. Call this only if a result is not
    finite, because an inf alone is often intended, as in a mask.
    """
    for name, tree in given.items():
        for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
            if has({"nan"}, [x]):
                return (Origin("nan", "", f"{name}{jax.tree_util.keystr(path)}"),)
    jaxpr, consts = compat.opened(jax.make_jaxpr(lambda given: fn(**given))(given))
    walk = Walk()
    walk.run(jaxpr, consts, [jnp.asarray(x) for x in jax.tree.leaves(given)], "")
    return tuple(walk.found.values())


@dataclasses.dataclass
class Walk:
    """An evaluation of a jaxpr. `found` maps "nan" and "inf" to their first origins, in the order of evaluation."""

    found: dict[str, Origin] = dataclasses.field(default_factory=dict)

    def run(self, jaxpr: Any, consts: Sequence, values: Sequence, line: str) -> list:
        """Evaluate a jaxpr. `line` is the line of the equation that calls it."""

        def rule(eqn, values):
            results = compat.evaluate_one(eqn, values)
            for kind in TESTS:
                # Operands can explain a result: a NaN operand explains a NaN or an inf, and an inf operand an inf.
                causes = {kind, "nan"}
                if not self.found.keys() & causes and has({kind}, results) and not has(causes, values):
                    here = compat.line_of(eqn) or line
                    self.enter(eqn, values, here)
                    self.found.setdefault(kind, Origin(kind, eqn.primitive.name, here))
            return results

        return evaluate(jaxpr, consts, values, rule)

    def enter(self, eqn: Any, values: Sequence, line: str) -> None:
        """Evaluate the jaxpr that an equation calls, to find the line inside this jaxpr."""
        if (loop := compat.loop_of(eqn)) is not None:
            self.enter_loop(loop, values, line)
        elif eqn.primitive.name == "cond":
            self.run(*compat.opened(eqn.params["branches"][int(values[0])]), values[1:], line)
        elif (body := eqn.params["jaxpr"] if compat.is_remat(eqn) else compat.called(eqn)) is not None:
            self.run(*compat.opened(body), values, line)

    def enter_loop(self, loop: compat.LoopEqn, values: Sequence, line: str) -> None:
        """Evaluate a loop's iterations up to the first iteration that produces a NaN."""
        body = compat.opened(loop.body)
        split = loop.consts + loop.carry
        consts, carry, xs = values[: loop.consts], list(values[loop.consts : split]), values[split:]
        for i in reversed(range(loop.length)) if loop.reverse else range(loop.length):
            results = self.run(*body, [*consts, *carry, *(x[i] for x in xs)], line)
            if "nan" in self.found:
                return
            carry = results[: loop.carry]


def has(kinds: set[str], values: Sequence) -> bool:
    """Return whether any of the arrays has an element of one of these kinds, which are `"nan"` and `"inf"`."""
    return any(bool(TESTS[kind](x).any()) for kind in kinds for x in values if is_float(x))


def is_float(x: Any) -> bool:
    """Return whether a value can be a NaN or an inf. None, an unused result of an equation, cannot."""
    return x is not None and jnp.issubdtype(jnp.result_type(x), jnp.inexact)
