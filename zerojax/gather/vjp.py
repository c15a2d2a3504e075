"""A function's two passes, and exactly what has to be kept between them.

Plain autodiff keeps gathered parameters for the backward pass, under many disguises:
transposed, reshaped, named by `checkpoint_name`, passed through a remat's policy. So the
forward pass is traced together with its residuals, and each residual is classified by
what it depends on. One that is an argument is not stored again; one that depends on
gathered parameters alone is dropped, and computed anew when they are gathered again.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.core
import jax.numpy as jnp

from zerojax import compat

Source = tuple[Literal["weight", "other", "saved", "derived"], int]


def differentiable(dtype) -> bool:
    """Whether values of a type have cotangents."""
    return jnp.issubdtype(dtype, jnp.inexact)


@dataclasses.dataclass(frozen=True)
class Traced:
    """A jaxpr whose first arguments are known.

    Attributes:
        jaxpr: Has no constants of its own.
        consts: Its first arguments.
    """

    jaxpr: Any
    consts: Sequence

    def __call__(self, *args) -> list:
        """The results, given the rest of the arguments."""
        if not self.jaxpr.outvars:
            return []
        return jax.core.eval_jaxpr(self.jaxpr, (), *self.consts, *args)


@dataclasses.dataclass(frozen=True)
class Passes:
    """The forward and backward pass of `function(weights, others) -> results`.

    Attributes:
        forward: `(*weights, *others) -> (*results, *saved)`.
        results: Number of results.
        active_weights: Indices of the weights that get cotangents.
        active_others: Indices of the others that get cotangents.
        active_results: Indices of the results that have cotangents.
        sources: Where each residual of the backward pass comes from.
        derive: From the weights in `derive_reads` to the residuals that depend on them alone.
        derive_reads: Indices of weights.
        tree: Tree structure of the backward function, whose leaves are the residuals.
        needed: Indices of the weights that the backward pass reads.
        forward_others: Shapes of the others.
    """

    forward: "Traced"
    results: int
    active_weights: tuple[int, ...]
    active_others: tuple[int, ...]
    active_results: tuple[int, ...]
    sources: tuple[Source, ...]
    derive: "Traced"
    derive_reads: tuple[int, ...]
    tree: Any
    needed: frozenset[int]
    forward_others: tuple

    def run(self, weights: Sequence, others: Sequence) -> tuple[list, list]:
        """`(results, saved)`."""
        found = self.forward(*weights, *others)
        return found[: self.results], found[self.results :]

    def pull(
        self, weights: Sequence, others: Sequence, saved: Sequence, cotangents: Sequence, zero: jax.Array | None = None
    ) -> tuple[list, list]:
        """Cotangents of the active weights and of the active others.

        Args:
            weights: The gathered parameters; those not in `needed` may be None.
            others: As given to `run`.
            saved: As `run` gave them.
            cotangents: One for each of `active_results`.
            zero: If given, a zero out of which arrays of zeros (into which the gradient of a
                lookup is added) are made, so that they are not made before it is there.
        """
        derived = self.derive(*[weights[i] for i in self.derive_reads])
        pools = {"weight": weights, "other": others, "saved": saved, "derived": derived}
        backward = jax.tree.unflatten(self.tree, [pools[pool][index] for pool, index in self.sources])
        if zero is None:
            return backward(list(cotangents))
        closed, shape = jax.make_jaxpr(backward, return_shape=True)(list(cotangents))
        found = _evaluate_with_zeros(*compat.opened(closed), list(cotangents), zero)
        return jax.tree.unflatten(jax.tree.structure(shape), found)


def _evaluate_with_zeros(jaxpr, consts: Sequence, args: Sequence, zero: jax.Array) -> list:
    """Evaluate a jaxpr, making its arrays of zeros out of `zero`."""
    env = dict(zip([*compat.constvars_of(jaxpr), *jaxpr.invars], [*consts, *args], strict=True))
    for eqn in jaxpr.eqns:
        values = [atom.val if compat.is_literal(atom) else env[atom] for atom in eqn.invars]
        if eqn.primitive.name == "broadcast_in_dim" and compat.is_literal(eqn.invars[0]) and not values[0]:
            out = eqn.outvars[0].aval
            results = [jax.lax.broadcast(zero.astype(out.dtype), out.shape)]
        else:
            results = compat.evaluate_one(jaxpr, eqn, values)
        env.update(zip(eqn.outvars, results, strict=True))
    return [atom.val if compat.is_literal(atom) else env[atom] for atom in jaxpr.outvars]


def passes(
    function: Callable, weights: Sequence, others: Sequence, *, trained: Sequence[bool], active: Sequence[bool]
) -> Passes:
    """Trace `function(weights, others)` and its derivative.

    Args:
        function: Takes two lists of arrays and gives one.
        weights: Shapes of the gathered parameters.
        others: Shapes, or arrays, of everything else.
        trained: For each of `weights`, whether its cotangent is wanted.
        active: For each of `others`, whether its cotangent is wanted.
    """
    active_weights = tuple(i for i, on in enumerate(trained) if on and differentiable(weights[i].dtype))
    active_others = tuple(i for i, on in enumerate(active) if on and differentiable(others[i].dtype))
    active_results: tuple[int, ...] = ()

    def both(weights, others):
        def of_active(some_weights, some_others):
            nonlocal active_results
            results = function(
                _replaced(weights, active_weights, some_weights), _replaced(others, active_others, some_others)
            )
            active_results = tuple(i for i, r in enumerate(results) if differentiable(r.dtype))
            return [results[i] for i in active_results], results

        primals = [weights[i] for i in active_weights], [others[i] for i in active_others]
        _, backward, results = jax.vjp(of_active, *primals, has_aux=True)
        return results, backward

    closed, shapes = jax.make_jaxpr(both, return_shape=True)(list(weights), list(others))
    results, tree = len(shapes[0]), jax.tree.structure(shapes[1])
    jaxpr, consts = compat.opened(closed)
    forward, sources, derive, reads = _classified(jaxpr, consts, len(weights), results)
    needed = frozenset(i for pool, i in sources if pool == "weight") | frozenset(reads)
    return Passes(
        forward,
        results,
        active_weights,
        active_others,
        active_results,
        sources,
        derive,
        reads,
        tree,
        needed,
        tuple(v.aval for v in jaxpr.invars[len(weights) :]),
    )


def _replaced(values: Sequence, indices: Sequence[int], new: Sequence) -> list:
    out = list(values)
    for index, value in zip(indices, new, strict=True):
        out[index] = value
    return out


def _classified(jaxpr, consts, weights: int, results: int):
    """Sort the residuals, which stand behind the first `results` outputs of `jaxpr`."""
    constvars = compat.constvars_of(jaxpr)
    arguments = {var: ("weight", i) for i, var in enumerate(jaxpr.invars[:weights])}
    arguments |= {var: ("other", i) for i, var in enumerate(jaxpr.invars[weights:])}
    mixed = _depends_on_more(jaxpr, weights)
    sources, saved, derived = [], {}, {}
    for atom in jaxpr.outvars[results:]:
        if not compat.is_literal(atom) and atom in arguments:
            sources.append(arguments[atom])
        elif not compat.is_literal(atom) and atom in mixed:
            sources.append(("saved", saved.setdefault(atom, len(saved))))
        else:
            key = id(atom) if compat.is_literal(atom) else atom
            sources.append(("derived", derived.setdefault(key, (len(derived), atom))[0]))
    outs = [*jaxpr.outvars[:results], *saved]
    forward = Traced(compat.part_of(jaxpr, jaxpr.eqns, [*constvars, *jaxpr.invars], outs), consts)
    wanted = [atom for _, atom in derived.values()]
    eqns, reads = needed_for(jaxpr.eqns, wanted)
    read = [i for i, var in enumerate(jaxpr.invars[:weights]) if var in reads]
    derive = compat.part_of(jaxpr, eqns, [*constvars, *[jaxpr.invars[i] for i in read]], wanted)
    return forward, tuple(sources), Traced(derive, consts), tuple(read)


def _depends_on_more(jaxpr, weights: int) -> set:
    """Variables that depend on anything but weights and constants, or come out of an effect."""
    mixed = set(jaxpr.invars[weights:])
    for eqn in jaxpr.eqns:
        reads_mixed = any(not compat.is_literal(atom) and atom in mixed for atom in eqn.invars)
        if reads_mixed or eqn.effects:
            mixed.update(eqn.outvars)
    return mixed


def needed_for(eqns: Sequence, wanted: Sequence) -> tuple[list, set]:
    """The equations that `wanted` depend on, in order, and every variable these and `wanted` read."""
    reads = {atom for atom in wanted if not compat.is_literal(atom)}
    kept = []
    for eqn in reversed(eqns):
        if any(var in reads for var in eqn.outvars):
            kept.append(eqn)
            reads.update(atom for atom in eqn.invars if not compat.is_literal(atom))
    return kept[::-1], reads
