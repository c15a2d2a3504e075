"""Change the layers of a stack inside of the loop over this stack, which gathers each layer anyway.

A loss may change a stack before the loop over its layers: divide it by its spectral norms, mask it, add a product of
adapters, or transpose each layer. Outside of the loop, this change needs the whole stack. `moved_into_loops` lets each
iteration change only its own layer (`parts`).
"""

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax import compat, jaxprs, signatures
from zerojax.gather.on_parts import Division, evaluate_parts, splits_of
from zerojax.gather.parts import dims_of
from zerojax.gather.sharded_param import OF_SHARDS, OF_STACKS
from zerojax.layout.leaf import Leaf

# Changes of a stack that stay outside of the loop. Others, such as a transpose of each layer, would copy the shards.
_KEPT = OF_SHARDS - OF_STACKS


def moved_into_loops(jaxpr: Any, leaves: Sequence[Leaf | None], alike: Sequence[bool]) -> tuple[Any, Sequence]:
    """Rewrite a jaxpr so that each iteration of a loop over a stack changes its own layer. Return `(jaxpr, consts)`.

    For each argument, `leaves` has the layout of a sharded parameter, or None, and `alike` says whether all devices
    have the same value. A jaxpr without such changes is returned unchanged.
    """
    loops = [(eqn, loop) for eqn in jaxpr.eqns if (loop := compat.loop_of(eqn)) is not None and loop.length > 1]
    of_length = {n: Layers(jaxpr, leaves, alike, n) for n in {loop.length for _, loop in loops}}
    changed = {id(eqn): found for eqn, loop in loops if (found := of_length[loop.length].changed(stacks_of(eqn, loop)))}
    if not changed or signatures.has_effects(jaxpr):
        return jaxpr, ()

    def run(*args):
        known: dict = {}  # the values of variables that equations read; tracers, which must not outlive the trace

        def rule(eqn, values):
            known.update((v, x) for v, x in zip(eqn.invars, values, strict=True) if not compat.is_literal(v))
            if id(eqn) not in changed:
                return None
            loop = compat.loop_of(eqn)
            assert loop is not None
            return of_length[loop.length].run(eqn, loop, changed[id(eqn)], values, known)

        return jaxprs.evaluate(jaxpr, (), args, rule)

    return compat.opened(jax.make_jaxpr(run)(*(v.aval for v in jaxpr.invars)))


def stacks_of(eqn: Any, loop: compat.LoopEqn) -> list:
    return jaxprs.variables_in(eqn.invars[loop.consts + loop.carry :])


class Layers:
    """Finds and computes the values of a jaxpr that have one entry per layer, for all stacks of `length` layers."""

    def __init__(self, jaxpr: Any, leaves: Sequence[Leaf | None], alike: Sequence[bool], length: int):
        """Find the stacks. `leaves` and `alike` are those of `moved_into_loops`."""
        self.jaxpr, self.length, self.made = jaxpr, length, jaxprs.makers(jaxpr.eqns)
        loops = [(eqn, compat.loop_of(eqn)) for eqn in jaxpr.eqns]
        scanned = [v for eqn, loop in loops if loop and loop.length == length for v in stacks_of(eqn, loop)]
        _, reads = jaxprs.needed_for(jaxpr.eqns, scanned)
        self.stacks, self.params = {}, set()
        for v, leaf, on in zip(jaxpr.invars, leaves, alike, strict=True):
            # If devices divide a stack over its layers, an iteration has no shard of its layer.
            if v in reads and v.aval.shape[:1] == (length,) and (on if leaf is None else leaf.dim != 0):
                self.stacks[v] = 0
                self.params.update([v] if leaf is not None else [])

    @functools.cached_property
    def dims(self) -> dict:
        """Return, for each variable, the dim of layers, or None; see `dims_of`."""
        return dims_of(self.jaxpr, {v: self.stacks.get(v) for v in self.jaxpr.invars}, layers=True)

    def cone(self, targets: Iterable, stops: Collection) -> tuple[list, list, list]:
        """Return `(equations, stacks, others)` from which an iteration computes its layer of each target.

        An iteration reads its layer of each of the stacks, which are arguments, variables in `stops`, or arrays with
        one entry per layer, such as masks. It reads the others whole, because they have no dim of layers.
        """
        needed, stacks, others = set(), {}, {}

        def reads(var):
            eqn, dim = self.made.get(var), self.dims.get(var)
            if dim is not None and (eqn is None or var in stops):
                stacks[var] = None
            elif eqn is None or (dim is None and eqn.primitive.name != "broadcast_in_dim"):
                others[var] = None
            else:
                needed.add(id(eqn))
                return jaxprs.variables_in(eqn.invars)
            return ()

        jaxprs.reached(targets, reads)
        eqns = [eqn for eqn in self.jaxpr.eqns if id(eqn) in needed]

        def is_row(var):
            read_by = [eqn.outvars[0] for eqn in eqns if var in jaxprs.variables_in(eqn.invars)]
            by_element = all(jaxprs.facts(self.made[v]).elementwise and self.dims[v] == 0 for v in read_by)
            return by_element and all(v.aval.shape == var.aval.shape for v in read_by)

        # The loop keeps the rows that it reads for the backward pass, which computes the changed layer from them again.
        rows = [v for v in others if is_row(v)]
        return eqns, [*stacks, *rows], [v for v in others if v not in rows]

    def changed(self, scanned: Sequence) -> list:
        """Return those of the loop's stacks `scanned` whose layers the iterations should compute."""
        values = [v for v in scanned if v not in self.stacks and self.dims.get(v) == 0]
        found = [v for v in values if self._is_changed(v)]
        # If an iteration reads a layer anyway, it also casts or transposes the layer, instead of gathering the result.
        read = self.params.intersection(self.cone(found, [v for v in scanned if v not in found])[1])
        return [v for v in values if v in found or not read.isdisjoint(self.cone([v], ())[1])]

    def _is_changed(self, var: Any) -> bool:
        """Return whether `var` is a changed sharded stack, or is much larger than the stacks it is computed from."""
        eqns, stacks, _ = self.cone([var], ())
        if self.params.isdisjoint(stacks):
            return 2 * sum(v.aval.size for v in stacks) <= var.aval.size
        return any(eqn.primitive.name not in _KEPT for eqn in eqns)

    def run(self, eqn: Any, loop: compat.LoopEqn, changed: Sequence, values: Sequence, known: Mapping) -> list:
        """Run a loop whose iterations compute layers of the stacks `changed`. `known` maps variables to values."""
        first, operands = loop.consts + loop.carry, stacks_of(eqn, loop)
        kept = [v for v in operands if v not in changed]
        eqns, stacks, others = self.cone(changed, kept)
        jaxpr = compat.part_of(self.jaxpr, eqns, [*stacks, *others], changed)
        scanned = list(dict.fromkeys([*kept, *stacks]))

        def iteration(values):
            index, *slices = values[first:]
            rows, layer = dict(zip(scanned, slices, strict=True)), Division(self.length, 1, self.length, (), index)
            # Not `lax.expand_dims`: after a broadcast, the backward pass could not compute a changed layer again.
            given = [*(lax.reshape(rows[v], (1, *rows[v].shape)) for v in stacks), *(known[v] for v in others)]
            dims = [*[0] * len(stacks), *[None] * len(others)]
            found = evaluate_parts(jaxpr, given, splits_of(dims, layer), splits_of([0] * len(changed), layer))
            rows |= {v: lax.squeeze(x, [0]) for v, x in zip(changed, found, strict=True)}
            return jaxprs.run(*compat.opened(loop.body), *values[:first], *(rows[v] for v in operands))

        return loop.evaluate(iteration, [*values[:first], jnp.arange(self.length), *(known[v] for v in scanned)])
