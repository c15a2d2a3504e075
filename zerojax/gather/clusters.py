"""Find equations that need one whole parameter and have small results, so that they share a gather of the parameter.

Power iterations and orthogonality penalties are such equations. If their results only scale weights, as a spectral norm
does, the equations are repeated where the weight is used (`only_scales`). Otherwise they are a cluster: they join a
block that gathers the weight already (`Clusters`).
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any, NamedTuple

from zerojax import compat, jaxprs
from zerojax.gather.sharded_param import WEIGHT_ARITHMETIC, ShardedParam

CONTROL = frozenset({"scan", "while", "cond", "shard_map", "custom_jvp_call", "custom_vjp_call", "pallas_call"})


def is_plain(eqn: Any) -> bool:
    """Return whether an equation can run in any block. Effects, remats, kernels and loops over layers cannot."""
    if eqn.effects or eqn.primitive.name in ("shard_map", "pallas_call") or compat.is_remat(eqn):
        return False
    # The arrays of which iterations read rows may be stacks of layers. Power iterations read none.
    loop = compat.loop_of(eqn)
    return loop is None or len(eqn.invars) == loop.consts + loop.carry


def only_scales(eqns: Sequence, eqn: Any, is_known: Callable[[Any], bool], final: Collection) -> bool:
    """Return whether the results of an equation are read only to change weights element by element.

    Args:
        eqns: The equations that are not decided yet, in order.
        eqn: An equation on parameters alone.
        is_known: Whether a variable is a parameter, or is computed from parameters alone.
        final: The variables that the function returns.
    """
    derived, known = set(eqn.outvars), set()
    scales = False
    for reader in eqns:
        reads = jaxprs.variables_in(reader.invars)
        if derived.isdisjoint(reads):
            if is_plain(reader) and all(v in known or is_known(v) for v in reads):
                known.update(reader.outvars)
            continue
        weights = [v for v in reads if v not in derived]
        if not is_plain(reader) or not all(v in known or is_known(v) for v in weights):
            return False
        out, size = reader.outvars[0].aval, max(v.aval.size for v in reads if v in derived)
        if (
            reader.primitive.name in WEIGHT_ARITHMETIC
            and out.size > size
            and any(v.aval.shape == out.shape for v in weights)
        ):
            scales = True
        else:
            derived.update(reader.outvars)
    return scales and derived.isdisjoint(final)


def weights_late(jaxpr: Any, params: Collection) -> Any:
    """Move each equation on parameters alone just before the first equation that combines its result with activations.

    A penalty that the loss computes before its model can then join the blocks of the model. `params` are the sharded
    parameters.
    """
    weights, free, late, eqns = set(params), set(), {}, []
    for eqn in jaxpr.eqns:
        reads = jaxprs.variables_in(eqn.invars)
        if free.issuperset(reads):
            free.update(eqn.outvars)
        elif is_plain(eqn) and all(v in weights or v in free for v in reads):
            weights.update(eqn.outvars)
            late[id(eqn)] = eqn
            continue
        if late and not weights.isdisjoint(reads):
            needed, _ = jaxprs.needed_for(list(late.values()), reads)
            eqns += [late.pop(id(one)) for one in needed]
        eqns.append(eqn)
    return jaxpr.replace(eqns=[*eqns, *late.values()])


class Joined(NamedTuple):
    """A block that an equation can join.

    Attributes:
        root: The variable of the only parameter from which the equation's operands are computed.
        place: The index of the block's draft.
        again: Equations on values that are alike on all devices. The block computes them again, because the segment
            that computes them runs later.
    """

    root: Any
    place: int
    again: Sequence


@dataclasses.dataclass
class Clusters:
    """Finds the block that an equation can join, among the decisions so far.

    Attributes:
        params: See `Decisions`.
        repeated: See `Decisions`.
        alike: Variables that have the same value on all devices.
        made: The equation of each variable.
        made_in: For each variable, the index of the draft that computes it.
        blocks: For each parameter, by its variable, the index of the last draft that gathers it.
        roots: For each value that a block computes from only one parameter, the variable of this parameter.
    """

    params: Mapping[Any, ShardedParam]
    repeated: Mapping
    alike: Set
    made: Mapping
    made_in: Mapping
    blocks: dict = dataclasses.field(default_factory=dict)
    roots: dict = dataclasses.field(default_factory=dict)

    def root_of(self, reads: Collection) -> Any:
        """Return the variable of the only parameter from which `reads` are computed, or None if not exactly one is."""
        found, pending, seen = set(), [*reads], set()
        while pending:
            var = pending.pop()
            if var in self.params:
                found.add(self.params[var].root)
            elif var in self.roots:
                found.add(self.roots[var])
            elif var in self.repeated and var not in seen:
                pending += jaxprs.variables_in(self.repeated[var].invars)
            seen.add(var)
        return found.pop() if len(found) == 1 else None

    def joined(self, eqn: Any) -> Joined | None:
        """Return the block that gathers the only parameter of `eqn`, or None if `eqn` cannot run in that block."""
        reads = jaxprs.variables_in(eqn.invars)
        root = self.root_of(reads)
        place = self.blocks.get(root)
        if place is None or not is_plain(eqn):
            return None
        again: dict = {}
        pending, seen = reads, set()
        while pending:
            var = pending.pop()
            if var in seen:
                continue
            seen.add(var)
            if var in self.params:
                if any(self.made_in.get(v, -1) >= place for v in self.params[var].operands):
                    return None
            elif var in self.repeated:
                pending += jaxprs.variables_in(self.repeated[var].invars)
            elif var not in self.roots and var not in self.alike:
                return None
            elif self.made_in.get(var, -1) > place:
                made = self.made[var]
                of_params = any(v in self.params or v in self.repeated for v in jaxprs.variables_in(made.invars))
                if of_params or var in self.roots or not is_plain(made):
                    return None
                again[id(made)] = made
                pending += jaxprs.variables_in(made.invars)
        return Joined(root, place, list(again.values()))
