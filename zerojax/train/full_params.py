"""Differentiate a loss of full parameters, at stages 0 to 2, or on one device.

If several devices share the rows, the gradients are partial sums, one per worker, which the caller reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from zerojax import names
from zerojax.dims.follow import param_states, row_states
from zerojax.gather.vjp import RowStates, Sums, traced_passes
from zerojax.jaxprs import split_arrays
from zerojax.placement.storage import unpadded
from zerojax.train.loss import OF_ROWS, LossInputs, Returned, View

if TYPE_CHECKING:
    from jaxtyping import Array


def full_passes(view: View, given: LossInputs) -> tuple[Returned, Callable]:
    """Run the loss forward on full parameters.

    Returns:
        The values that the loss returns, and a function from the cotangent of the loss to
        `(gradients, values of overwritten parameters)`. Gradients are partial sums, one per worker.
    """
    layout, comm, further = view.layout, view.comm, (given.mutable, given.batch, *given.args)
    trained, overwritten, count = layout.trained, layout.overwritten, len(given.stored)
    arrays, put_back = split_arrays(further)
    structure: Any = None

    def run(_: Sequence, values: Sequence) -> list[Array]:
        nonlocal structure
        full = [unpadded(x, leaf) for x, leaf in zip(values[:count], layout.params, strict=True)]
        returned = view.checked_call(jax.tree.unflatten(layout.treedef, full), *put_back(values[count:]))
        leaves, structure = jax.tree.flatten(returned)
        return leaves

    values = [*given.stored, *arrays]
    experts = {i: axes if view.reduces_each else () for i, axes in comm.experts(layout.params).items()}
    states = [*param_states(given.stored, experts), *row_states(further, OF_ROWS, comm.follower)]
    active = [i in trained or i in overwritten for i in range(len(values))]
    rows = RowStates(states, (), comm.follower, comm)
    passes = traced_passes(run, (), values, active=active, wanted=(0,), rows=rows)
    with names.in_scopes((), "jvp"):
        results, saved = passes.run((), values)

    def pull(cotangent: Array) -> tuple[list[Array], list[Array]]:
        with names.in_scopes((), "transpose", "jvp"):
            _, found = passes.pull(comm, (), values, saved, [cotangent], sums=Sums.of(trained, experts))
        of = dict(zip(passes.active_others, found, strict=True))
        return [of[i] for i in trained], [of[i] for i in overwritten]

    return jax.tree.unflatten(structure, results), pull
