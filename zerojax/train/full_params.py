"""Differentiate a loss of full parameters, at stages 0 to 2, or on one device.

The loss is traced once per step, for one microbatch. If several devices share the rows, its gradients are partial sums,
one per worker, which the caller reduces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from zerojax import compat, jaxprs
from zerojax.dims import NOWHERE
from zerojax.dims.follow import param_states, row_states
from zerojax.gather.vjp import RowStates, Sums, traced_passes
from zerojax.jaxprs import alike_args, split_arrays
from zerojax.layout.leaf import Leaf
from zerojax.placement.storage import unpadded
from zerojax.train.loss import DIFFERING, OF_ROWS, LossInputs, Returned, View, at_least_float32

if TYPE_CHECKING:
    from jaxtyping import Array, Shaped


@dataclasses.dataclass(frozen=True)
class FullLoss:
    """A loss on full parameters that was traced once.

    Attributes:
        run: `run(args, results)` returns the leaves of the loss's `Returned`. The first is the total.
        structure: The tree that these leaves form.
        results: The results of the reductions that are computed on shards; often none.
        moving: The indices of the results that have cotangents. A number of elements is an integer and has none.
        pull: `pull(cotangents of the moving results)` returns the gradients' shards by the index of the parameter. In
            device view, each device gives the cotangent of its own loss.
    """

    run: Callable[[Sequence, Sequence], list]
    structure: Any
    results: Sequence[Array] = ()
    moving: Sequence[int] = ()
    pull: Callable[[Sequence[Array]], Mapping[int, Shaped[Array, "*local"]]] = lambda cotangents: {}


def traced_once(view: View, given: LossInputs) -> FullLoss:
    """Trace the loss of one microbatch, and compute its reductions of parameters on shards (stages 1 and 2)."""
    first = lambda batch: jax.tree.map(lambda x: view.microbatches_of(x)[0], batch)
    one = given if view.accumulate == 1 else given._replace(batch=compat.eval_shape(first, given.batch))
    function, shapes = flat_loss(view, one)
    closed, returned = jax.make_jaxpr(function, return_shape=True)(shapes)
    structure = jax.tree.structure(returned)
    pairs = zip(view.layout.trained, view.grads, strict=True)
    leaves = {i: leaf for i, leaf in pairs if leaf.kind == "sharded" and leaf.shards > 1}
    if leaves:
        # A small trained parameter is no shard, and its gradient would be the sum of two that are reduced differently.
        moved = {*view.layout.trained, *view.layout.overwritten} - leaves.keys()
        further = (given.mutable, given.batch, *given.args)
        alike = [*(i not in moved for i in range(len(given.stored))), *alike_args(further, DIFFERING)]
        stored = [leaves.get(i) for i in range(len(alike))]
        apart = None
        if may_reduce(compat.opened(closed)[0], stored, alike):
            from zerojax.gather.apart import taken_apart

            apart = taken_apart(closed, stored, alike)
        if apart is not None:
            from zerojax.train.apart import reductions_on_shards

            args, is_sum = [*given.stored, *split_arrays(further)[0]], view.accumulate > 1
            return FullLoss(apart.run_rest, structure, *reductions_on_shards(apart, args, leaves, view.comm, is_sum))
    jaxpr, consts = compat.opened(closed)
    consts = jaxprs.as_jax_values(consts)
    return FullLoss(lambda args, _: jaxprs.run(jaxpr, consts, *args), structure)


def may_reduce(jaxpr: Any, leaves: Sequence[Leaf | None], alike: Sequence[bool]) -> bool:
    """Return whether a reduction reads parameters, and otherwise only values that are alike, or whether a call may."""
    every = list(zip(jaxpr.invars, leaves, alike, strict=True))
    differing = jaxprs.dependent_on([v for v, leaf, on in every if leaf is None and not on], jaxpr.eqns)
    weights = jaxprs.dependent_on([v for v, leaf, _ in every if leaf is not None], jaxpr.eqns) - differing
    for eqn in jaxpr.eqns:
        reads = jaxprs.variables_in(eqn.invars)
        reduces = jaxprs.facts(eqn).is_combinable or eqn.primitive.name == "dot_general"
        reduces = compat.called(eqn) is not None or (reduces and differing.isdisjoint(reads))
        if reduces and not weights.isdisjoint(reads):
            return True
    return False


def flat_loss(view: View, given: LossInputs) -> tuple[Callable, list]:
    """Return the loss as a function of a list of arrays, and this list: stored parameters, then further arguments."""
    loss, leaves, count = view.checked_call, view.layout.params, len(given.stored)
    arrays, put_back = split_arrays((given.mutable, given.batch, *given.args))

    def function(values: Sequence[Array]) -> Returned:
        full = [unpadded(x, leaf) for x, leaf in zip(values[:count], leaves, strict=True)]
        return loss(jax.tree.unflatten(view.layout.treedef, full), *put_back(values[count:]))

    return function, [*given.stored, *arrays]


def full_passes(view: View, given: LossInputs, full: FullLoss) -> tuple[Returned, Callable]:
    """Run the loss forward on full parameters.

    Returns:
        The values that the loss returns, and a function from the cotangent of the loss to
        `(gradients, values of overwritten parameters)`. Gradients are partial sums, one per worker.
    """
    further = (given.mutable, given.batch, *given.args)
    args = [*given.stored, *split_arrays(further)[0]]
    trained, overwritten, comm = view.layout.trained, view.layout.overwritten, view.comm
    values, count = [*args, *full.results], len(args)
    experts = {i: axes if view.reduces_each else () for i, axes in comm.experts(view.layout.params).items()}
    of_params, others = param_states(given.stored, experts), row_states(further, OF_ROWS, comm.follower)
    states = [*of_params, *others, *[NOWHERE] * len(full.results)]
    wanted = [*trained, *(count + k for k in full.moving)]
    active = [i in wanted or i in overwritten for i in range(len(values))]
    run = lambda _, values: full.run(values[:count], values[count:])
    rows = RowStates(states, (), comm.follower, comm)
    passes = traced_passes(run, (), values, trained=(), active=active, wanted=(0,), rows=rows)
    results, saved = passes.run((), values)

    def pull(cotangent: Array) -> tuple[list[Array], list[Array]]:
        _, found = passes.pull(comm, (), values, saved, [cotangent], sums=Sums.of(wanted, experts))
        of = dict(zip(passes.active_others, found, strict=True))
        return [of[i] for i in wanted], [of[i] for i in overwritten]

    return jax.tree.unflatten(full.structure, results), pull


def with_shards(
    grads: Sequence[Array], trained: Sequence[int], shards: Mapping[int, Array]
) -> list[Shaped[Array, "*local"]]:
    """Add the results of `FullLoss.pull` to gradients that are reduced."""
    wide = lambda grad, i: at_least_float32(grad) + at_least_float32(shards[i]) if i in shards else grad
    return [wide(grad, i) for grad, i in zip(grads, trained, strict=True)]
