"""Refuse to average the microbatches of a loss that is a sum over the rows of the batch.

The loss is traced for one microbatch and for all of them. From its result, each trace is followed back through linear
equations to the sums over rows, and the constant factors on the way are multiplied. Where the factor of all rows is
the factor of a microbatch divided by the number of microbatches, the loss is a mean. Where both factors are equal, it
is a sum. Everything else, such as a sum divided by a count of tokens, is not decided here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from zerojax import compat, jaxprs
from zerojax.dims import NOWHERE, Follower, State, at
from zerojax.train.loss import LossInputs, View


def check_reduction(view: View, given: LossInputs) -> None:
    """Raise a ValueError if the loss sums over rows, and its microbatches would be averaged.

    `given` has the rows of all microbatches of one call: of all devices, or in device view of one.
    """
    if view.loss.weighted or view.loss.reduction is not None:
        return
    part = lambda x: jax.ShapeDtypeStruct((x.shape[0] // view.accumulate, *x.shape[1:]), x.dtype)
    micro = jax.tree.map(part, given.batch)
    for one, all_rows in zip(_factors(view, given, micro), _factors(view, given, given.batch), strict=False):
        if one and all_rows and np.isclose(one, all_rows, rtol=1e-3):
            raise ValueError(
                f"The loss is a sum over the rows of the batch, and accumulate={view.accumulate} averages microbatches:"
                f" the loss would be 1/{view.accumulate} of the sum over all rows. Give reduction='sum' if all of its "
                f"terms are such sums, or return the mean over the rows. reduction='mean' averages all the same."
            )


def _factors(view: View, given: LossInputs, batch: Any) -> Iterator[float | None]:
    """Yield the constant factor of each sum over rows in the loss of `batch`. None: the factor is not known."""
    leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in view.layout.params]
    rows = jax.tree.leaves(batch)
    shaped = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in rows]

    def loss(leaves, rows):
        params, batch_ = jax.tree.unflatten(view.layout.treedef, leaves), jax.tree.unflatten(structure, rows)
        return view.call(params, given.mutable, batch_, *given.args).total

    structure = jax.tree.structure(batch)
    jaxpr, consts = compat.opened(jax.make_jaxpr(loss)(leaves, shaped))
    inlined = jax.make_jaxpr(lambda *args: jaxprs.inline_calls(jaxpr, consts, *args))(*leaves, *shaped)
    states = [*[NOWHERE] * len(leaves), *[at(0)] * len(rows)]
    return _factors_of_sums(compat.opened(inlined)[0], states, rows[0].shape[0])


def _number(atom: Any) -> float | None:
    return float(atom.val) if compat.is_literal(atom) and np.ndim(atom.val) == 0 else None


def _factors_of_sums(jaxpr: Any, given: Sequence[State], rows: int) -> Iterator[float | None]:
    """Yield the factors of the sums over `rows` rows that the first result adds up; see `_factors`."""
    found = Follower(rows).states(jaxpr, given)
    made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    of_rows = {var for var, state in zip(jaxpr.invars, given, strict=True) if state is not NOWHERE}
    # Values without rows that are computed from several rows, such as the mean of a batch, and what depends on them.
    joint = set()
    has_rows = lambda var: (state := found[var]) is not None and bool(state.places)
    for eqn in jaxpr.eqns:
        inputs = set(jaxprs.variables_in(eqn.invars))
        if inputs & of_rows:
            of_rows.update(eqn.outvars)
            joint.update(var for var in eqn.outvars if inputs & joint or not has_rows(var))

    def follow(atom: Any, factor: float) -> Iterator[float | None]:
        if compat.is_literal(atom) or atom not in of_rows:
            return
        if (eqn := made.get(atom)) is None or found[atom] is None:
            yield None
            return
        name = compat.name_of(eqn)
        if name == "reduce_sum" and has_rows(eqn.invars[0]):
            if 0 not in eqn.invars[0].aval.shape:
                yield None if eqn.invars[0] in joint else factor
        elif jaxprs.facts(eqn).linear and len(eqn.invars) == 1:
            yield from follow(eqn.invars[0], factor)
        elif name in ("add", "add_any", "sub"):
            for one in eqn.invars:
                yield from follow(one, factor)
        elif name == "mul" and (value := _number(eqn.invars[0])):
            yield from follow(eqn.invars[1], factor * value)
        elif name in ("mul", "div") and (value := _number(eqn.invars[1])):
            yield from follow(eqn.invars[0], factor * value if name == "mul" else factor / value)
        else:
            yield None

    return follow(jaxpr.outvars[0], 1.0)
