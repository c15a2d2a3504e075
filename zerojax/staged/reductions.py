"""Compute the scalars, such as norms, that an update reduces from gradients in files.

The part of an update that does not depend on offloaded state is traced as one list of equations. An equation that
reduces a gradient on disk to a scalar is called a cut. The equations before the cut are evaluated chunk by chunk if
they are elementwise. The equations after the cut read only the scalar. Cuts that need the results of other cuts are
evaluated in later rounds, and each round reads the gradients again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp

from zerojax import compat, jaxprs
from zerojax.optim.traced import GRAD, Equations, equations_behind, producers_of
from zerojax.streaming.host_update import evaluate_as

if TYPE_CHECKING:
    from jaxtyping import Array

_COMBINED: Mapping[str, Callable] = {
    "reduce_sum": jnp.add,
    "reduce_max": jnp.maximum,
    "reduce_min": jnp.minimum,
    "reduce_and": jnp.logical_and,
    "reduce_or": jnp.logical_or,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """A scalar that is reduced from one gradient.

    Attributes:
        var: The variable of the scalar.
        grad: The index of the gradient among those of the trained parameters.
        round: The round in which the cut is evaluated: 1, or a later round if the cut needs other cuts.
        jaxpr: The equations that compute the scalar from `inputs`.
        inputs: The variable of the gradient, then variables whose values are known before the round, such as scalars.
        combine: The function that joins the values of two chunks. None if the cut needs the whole gradient.
    """

    var: Any
    grad: int
    round: int
    jaxpr: Any
    inputs: tuple
    combine: Callable | None

    def of_chunk(self, chunk: Array, known: Sequence[Array] = ()) -> Array:
        """Return the scalar of one chunk without padding. `known` contains the values of the other inputs."""
        *eqns, last = self.jaxpr.eqns
        values = [chunk.astype(self.inputs[0].aval.dtype), *known]
        before = compat.part_of(self.jaxpr, eqns, self.jaxpr.invars, last.invars)
        (x,) = evaluate_as(before, (), values, chunk.shape)
        reduced = {"reduce_sum": jnp.sum, "reduce_max": jnp.max, "reduce_min": jnp.min}
        reduced |= {"reduce_and": jnp.all, "reduce_or": jnp.any}
        return reduced[last.primitive.name](jnp.broadcast_to(x, chunk.shape))

    def of_whole(self, grad: Array, known: Sequence[Array]) -> Array:
        """Return the scalar of the whole gradient without padding. `known` contains the values of the other inputs."""
        values = [grad.astype(self.inputs[0].aval.dtype), *known]
        return jax.core.eval_jaxpr(self.jaxpr, (), *values)[0]


class Reductions:
    """The cuts of an update's equations.

    Attributes:
        cuts: The cuts, in the order of the equations.
        whole: Indices of the gradients on disk that the equations after the cuts read as whole arrays.
    """

    def __init__(self, equations: Equations, on_disk: Collection[int]):
        """Find the cuts. `on_disk` contains the indices of the gradients in files."""
        self.equations, jaxpr = equations, equations.jaxpr
        pairs = zip(jaxpr.invars, equations.reads, strict=True)
        self._grads = {var: i for var, (kind, i) in pairs if kind == GRAD and i in on_disk}
        needs = {var: frozenset((i,)) for var, i in self._grads.items()}
        rounds: dict[Any, int] = {}
        producers, self.cuts = producers_of(jaxpr), []
        for eqn in jaxpr.eqns:
            reads = jaxprs.variables_in(eqn.invars)
            large = frozenset().union(*(needs.get(v, ()) for v in reads))
            after = max((rounds.get(v, 0) for v in reads), default=0)
            if len(large) == 1 and all(v.aval.shape == () for v in eqn.outvars) and len(eqn.outvars) == 1:
                cut = self._cut(eqn, next(iter(large)), after + 1, needs, producers)
                self.cuts.append(cut)
                rounds[cut.var] = cut.round
                continue
            for var in eqn.outvars:
                rounds[var] = after
                if large:
                    needs[var] = large
        eqns, inputs = equations_behind(jaxpr, producers, jaxpr.outvars, {cut.var for cut in self.cuts})
        self._rest, self._rest_inputs = [jaxpr.eqns[e] for e in eqns], inputs
        self.whole = tuple(sorted({self._grads[v] for v in inputs if v in self._grads}))

    @property
    def rounds(self) -> int:
        return max((cut.round for cut in self.cuts), default=0)

    def at_once(self, grad: int) -> list[Cut]:
        """Return the cuts that need only the chunks of this gradient, and are evaluated before a chunk is written."""
        return [cut for cut in self.cuts if cut.grad == grad and cut.combine is not None and len(cut.inputs) == 1]

    def later(self, number: int) -> list[Cut]:
        return [cut for cut in self.cuts if cut.round == number and cut not in self.at_once(cut.grad)]

    def small_values(self, cuts: Sequence[Cut], known: Mapping) -> dict:
        """Return the inputs of some cuts except gradients, by variable, from the `known` values. Traced under jit."""
        wanted = list(dict.fromkeys(v for cut in cuts for v in cut.inputs[1:]))
        jaxpr = self.equations.jaxpr
        eqns, inputs = equations_behind(jaxpr, producers_of(jaxpr), wanted, set(known))
        part = compat.part_of(jaxpr, [jaxpr.eqns[e] for e in eqns], inputs, wanted)
        return dict(zip(wanted, jax.core.eval_jaxpr(part, (), *(known[v] for v in inputs)), strict=True))

    def results(self, known: Mapping) -> list:
        """Return the results of all equations. `known` maps inputs and cuts to their values. Traced under jit."""
        jaxpr = self.equations.jaxpr
        part = compat.part_of(jaxpr, self._rest, self._rest_inputs, jaxpr.outvars)
        return jax.core.eval_jaxpr(part, (), *(known[v] for v in self._rest_inputs))

    def _cut(self, eqn: Any, grad: int, number: int, needs: Mapping, producers: dict) -> Cut:
        jaxpr = self.equations.jaxpr
        pending, eqns, inputs = [eqn], {}, {}
        while pending:
            one = pending.pop()
            if id(one) in eqns:
                continue
            eqns[id(one)] = one
            for v in jaxprs.variables_in(one.invars):
                if v in producers and (v in needs or v.aval.shape != ()):
                    pending.append(jaxpr.eqns[producers[v]])
                else:
                    inputs[v] = None
        root = next(v for v in inputs if v in self._grads)
        inputs = (root, *(v for v in inputs if v is not root))
        ordered = [one for one in jaxpr.eqns if id(one) in eqns]
        part = compat.part_of(jaxpr, ordered, inputs, eqn.outvars)
        by_chunk = self._is_by_chunk(ordered, root, inputs)
        return Cut(eqn.outvars[0], grad, number, part, inputs, _COMBINED[eqn.primitive.name] if by_chunk else None)

    def _is_by_chunk(self, eqns: Sequence, root: Any, inputs: Sequence) -> bool:
        """Return whether a cut's equations are elementwise, except the last, which reduces over all dims."""
        *before, last = eqns
        shape = root.aval.shape
        full = last.primitive.name in _COMBINED and len(last.params["axes"]) == len(shape)
        elementwise = all(
            one.primitive.name in jaxprs.ELEMENTWISE | {"broadcast_in_dim"}
            and all(v.aval.shape == shape for v in one.outvars)
            for one in before
        )
        return full and elementwise and all(v.aval.shape == () for v in inputs[1:])


def combined(cut: Cut, values: Sequence[Array]) -> Array:
    """Combine the scalars that a cut has for each chunk of a gradient."""
    assert cut.combine is not None
    return functools.reduce(cut.combine, values)
