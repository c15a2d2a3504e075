"""Compute the scalars, such as norms, that an update reduces from gradients in files.

The part of an update that does not depend on offloaded state is traced as one list of equations. An equation that
reduces a gradient on disk to a scalar is called a cut, if the equations before it are elementwise and read nothing
else. They are evaluated chunk by chunk, before the chunk is written. The equations after the cut read only the scalar.
Gradients that other equations read, such as a norm of scaled gradients, are read as whole arrays.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp

from zerojax import compat, jaxprs, signatures
from zerojax.layout.leaf import Leaf
from zerojax.optim.equations import evaluate_as
from zerojax.optim.traced import GRAD, Equations, equations_behind, producers_of
from zerojax.placement.storage import unpadded
from zerojax.staged.sources import OnDisk

if TYPE_CHECKING:
    from jaxtyping import Array

# For each reduction, the function that reduces a chunk, and the function that joins the values of two chunks.
_REDUCTIONS: Mapping[str, tuple[Callable, Callable]] = {
    "reduce_sum": (jnp.sum, jnp.add),
    "reduce_max": (jnp.max, jnp.maximum),
    "reduce_min": (jnp.min, jnp.minimum),
    "reduce_and": (jnp.all, jnp.logical_and),
    "reduce_or": (jnp.any, jnp.logical_or),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """A scalar that is reduced from one gradient."""

    var: Any  # the variable of the scalar
    grad: int  # the index of the gradient among those of the trained parameters
    jaxpr: Any  # the equations that compute the scalar from the gradient
    reduce: Callable  # the function that reduces a chunk
    combine: Callable  # the function that joins the values of two chunks

    def of_chunk(self, chunk: Array) -> Array:
        """Return the scalar of one chunk without padding."""
        *eqns, last = self.jaxpr.eqns
        before = compat.part_of(self.jaxpr, eqns, self.jaxpr.invars, last.invars)
        (x,) = evaluate_as(before, (), [chunk.astype(self.jaxpr.invars[0].aval.dtype)], chunk.shape)
        return self.reduce(jnp.broadcast_to(x, chunk.shape))


class Reductions:
    """The cuts of an update's equations, in the order of the equations."""

    def __init__(self, equations: Equations, on_disk: Collection[int]):
        """Find the cuts. `on_disk` contains the indices of the gradients in files."""
        self.equations, jaxpr = equations, equations.jaxpr
        self._programs: dict[Any, Any] = {}
        pairs = zip(jaxpr.invars, equations.reads, strict=True)
        self._grads = {var: i for var, (kind, i) in pairs if kind == GRAD and i in on_disk}
        needs = {var: frozenset((i,)) for var, i in self._grads.items()}
        producers, self.cuts = producers_of(jaxpr), []
        for eqn in jaxpr.eqns:
            large = frozenset().union(*(needs.get(v, ()) for v in jaxprs.variables_in(eqn.invars)))
            if len(large) == 1 and (cut := self._cut(eqn, next(iter(large)), producers)) is not None:
                self.cuts.append(cut)
            elif large:
                needs |= dict.fromkeys(eqn.outvars, large)
        eqns, inputs = equations_behind(jaxpr, producers, jaxpr.outvars, {cut.var for cut in self.cuts})
        self._rest, self._rest_inputs = [jaxpr.eqns[e] for e in eqns], inputs
        # The indices of the gradients on disk that the equations after the cuts read as whole arrays.
        self.whole = tuple(sorted({self._grads[v] for v in inputs if v in self._grads}))

    def of(self, grad: int) -> list[Cut]:
        return [cut for cut in self.cuts if cut.grad == grad]

    def finishing(self, grad: int, of: OnDisk) -> Any:
        """Return a program `f(chunk, factor) -> (chunk, [sum of squares, cuts...])` for the chunks of a gradient.

        It multiplies a chunk by `factor`, and reduces it to scalars. Chunks of equal layout share a program.
        """
        cuts, leaf, dim = self.of(grad), of.leaf, of.chunking.dim
        key = leaf.shape, leaf.dim, leaf.dtype, dim, tuple(signatures.signature(cut.jaxpr) for cut in cuts)
        if key not in self._programs:
            self._programs[key] = jax.jit(functools.partial(_finished, leaf, dim, cuts), donate_argnums=0)
        return self._programs[key]

    def results(self, known: Mapping) -> list:
        """Return the results of all equations. `known` maps inputs and cuts to their values. Traced under jit."""
        jaxpr = self.equations.jaxpr
        part = compat.part_of(jaxpr, self._rest, self._rest_inputs, jaxpr.outvars)
        return jax.core.eval_jaxpr(part, (), *(known[v] for v in self._rest_inputs))

    def _cut(self, last: Any, grad: int, producers: dict) -> Cut | None:
        """Return the cut that ends with an equation. None: it is no reduction over all dims, or reads other values."""
        jaxpr = self.equations.jaxpr
        if last.primitive.name not in _REDUCTIONS or last.outvars[0].aval.shape:
            return None
        eqns, inputs = equations_behind(jaxpr, producers, last.outvars)
        (*before, _), root = (ordered := [jaxpr.eqns[e] for e in eqns]), inputs[0]
        elementwise = all(
            (jaxprs.facts(one).elementwise or one.primitive.name == "broadcast_in_dim")
            and all(v.aval.shape == root.aval.shape for v in one.outvars)
            for one in before
        )
        if len(inputs) > 1 or not elementwise:
            return None
        part = compat.part_of(jaxpr, ordered, inputs, last.outvars)
        return Cut(last.outvars[0], grad, part, *_REDUCTIONS[last.primitive.name])


def _finished(leaf: Leaf, dim: int, cuts: list[Cut], grad: Array, factor: Array) -> tuple[Array, list[Array]]:
    grad = grad * factor.astype(grad.dtype)
    logical = grad if dim == leaf.dim else unpadded(grad, leaf)  # chunks along the sharded dim have no padding
    return grad, [jnp.sum(jnp.square(jnp.abs(grad).astype(jnp.float32))), *(cut.of_chunk(logical) for cut in cuts)]
