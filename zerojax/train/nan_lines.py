"""Find the line that computes a function's first NaN, by evaluating its jaxpr and testing each result.

`note_line` names this line of a loss if `jax_debug_nans` finds a NaN in device view.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax import compat
from zerojax.jaxprs import evaluate
from zerojax.layout.leaf import replace_items
from zerojax.placement.storage import in_logical_shape, to_device
from zerojax.train.checked import fold_keys
from zerojax.train.loss import LossInputs, View

TESTS = {"inf": jnp.isinf, "nan": jnp.isnan}


@dataclasses.dataclass(frozen=True)
class Origin:
    """The place where the first NaN or inf appears when a function is evaluated."""

    kind: str  # `"nan"` or `"inf"`
    primitive: str  # the JAX primitive that computes the first NaN or inf. Empty if an argument already contains a NaN
    where: str  # the source line, such as "model.py:12", or the argument that contains a NaN. Empty if no line is known

    def __str__(self) -> str:
        if not self.primitive:
            return f"the first {self.kind} is given in {self.where}"
        return f"the first {self.kind} is made by {self.primitive} at {self.where or 'an unknown line'}"


def origins(fn: Callable, **given: Any) -> tuple[Origin, ...]:
    """Find where `fn` computes its first NaN, and its first inf if the inf comes before the NaN.

    The function is traced, and then run on the default device one equation at a time. Call this only if a result is not
    finite: for a finite result, `origins` would report an inf that is intended, as in a mask.
    """
    for name, tree in given.items():
        for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
            if has({"nan"}, [x]):
                return (Origin("nan", "", f"{name}{jax.tree_util.keystr(path)}"),)
    jaxpr, consts = compat.opened(jax.make_jaxpr(lambda given: fn(**given))(given))
    walk = Walk()
    walk.run(jaxpr, consts, [jnp.asarray(x) for x in jax.tree.leaves(given)], "")
    return tuple(walk.found.values())


class Walk:
    """An evaluation of a jaxpr. `found` maps "nan" and "inf" to their first origins, in the order of evaluation."""

    def __init__(self):
        self.found: dict[str, Origin] = {}

    def run(self, jaxpr: Any, consts: Sequence, values: Sequence, line: str) -> list:
        """Evaluate `jaxpr`, and add to `found`. `line` is the source line of the equation that calls `jaxpr`."""

        def rule(eqn, values):
            results = compat.evaluate_one(eqn, values)
            for kind in TESTS:
                # A NaN in a result may come from a NaN in an operand, and an inf from a NaN or an inf in an operand.
                causes = {kind, "nan"}
                if not self.found.keys() & causes and has({kind}, results) and not has(causes, values):
                    here = compat.line_of(eqn) or line
                    self.enter(eqn, values, here)
                    self.found.setdefault(kind, Origin(kind, eqn.primitive.name, here))
            return results

        return evaluate(jaxpr, consts, values, rule)

    def enter(self, eqn: Any, values: Sequence, line: str) -> None:
        """Evaluate the jaxpr that `eqn` calls, if any, to find the line in it that computes the NaN or inf."""
        if (loop := compat.loop_of(eqn)) is not None:
            split = loop.consts + loop.carry
            consts, carry, xs = values[: loop.consts], list(values[loop.consts : split]), values[split:]
            for i in reversed(range(loop.length)) if loop.reverse else range(loop.length):
                carry = self.run(*compat.opened(loop.body), [*consts, *carry, *(x[i] for x in xs)], line)[: loop.carry]
                if "nan" in self.found:
                    return
        elif eqn.primitive.name == "cond":
            self.run(*compat.opened(eqn.params["branches"][int(values[0])]), values[1:], line)
        elif (body := compat.params_of(eqn)["jaxpr"] if compat.is_remat(eqn) else compat.called(eqn)) is not None:
            self.run(*compat.opened(body), values, line)


def has(kinds: set[str], values: Sequence) -> bool:
    return any(bool(TESTS[kind](x).any()) for kind in kinds for x in values if is_float(x))


def is_float(x: Any) -> bool:
    """Return whether `x` has a type with NaN and inf. False for None, which replaces unknown and unused values."""
    return x is not None and jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def note_line(error: FloatingPointError, view: View, given: LossInputs) -> None:
    """Add a note to an error of `jax_debug_nans`, with the line of the loss that makes the first NaN.

    If a result has a NaN, JAX evaluates the function again, one operation at a time. But it does not test the
    operations inside of a `shard_map`, and the error only says that the NaN comes from a sharded computation.
    """
    # If the loss cannot be evaluated here, add no note. For example, a kernel may have no rule for `vmap`.
    with contextlib.suppress(Exception), jax.debug_nans(False), jax.debug_infs(False):
        for origin in _origins(view, given):
            error.add_note(f"On the rows of one device, {origin}.")


def _origins(view: View, given: LossInputs) -> tuple:
    """Find the first NaN of the loss and its gradient, with `vmap` over the axes of devices instead of `shard_map`."""
    data, layout = view.config.data, view.layout
    stored = [in_logical_shape(to_device(x), leaf) for x, leaf in zip(given.stored, layout.params, strict=True)]
    trained = layout.trained

    def of_device(rows):
        args = fold_keys(given.args, lax.axis_index(data.batch))

        def total(values):
            params = jax.tree.unflatten(layout.treedef, replace_items(stored, trained, values))
            return view.call(params, given.mutable, rows, *args).total

        return jax.value_and_grad(total)([stored[i] for i in trained])

    of_all = of_device
    for axis in reversed(data.batch):
        of_all = jax.vmap(of_all, axis_name=axis)
    sizes = [view.config.mesh.shape[axis] for axis in data.batch]
    batch = jax.tree.map(lambda x: x.reshape(*sizes, x.shape[0] // data.workers, *x.shape[1:]), given.batch)
    return origins(lambda rows: of_all(rows), rows=batch)  # `vmap` maps keywords, too
