"""Find equations that can share a gather with another use of their parameter.

Power iterations and orthogonality penalties need one whole parameter, and have small results. If the results only scale
weights, as a spectral norm does, the equations are repeated where the weight is used (`only_scales`). Otherwise the
equations are a cluster, which joins a block that gathers the parameter already (`block_to_join`). `weights_late` and
`reads_together` move uses of one parameter next to each other. The planner and the rules load this module for losses
with such equations, and for losses that read a parameter more than once.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from zerojax import compat, jaxprs
from zerojax.gather.segments import is_plain


def only_scales(eqns: Sequence, eqn: Any, is_known: Callable[[Any], bool], final: Collection) -> bool:
    """Return whether the results of `eqn`, which reads parameters alone, are used only to scale or mask weights.

    `eqns` are the equations after `eqn`. `is_known` says whether a variable is computed from parameters alone. `final`
    has the results of the loss.
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
        if jaxprs.facts(reader).changes_weights and out.size > size and any(v.aval.shape == out.shape for v in weights):
            scales = True
        else:
            derived.update(reader.outvars)
    return scales and derived.isdisjoint(final)


def weights_late(jaxpr: Any, params: Collection) -> Any:
    """Move equations on parameters alone as late as possible: to the first use with activations, or to the end.

    A penalty on a weight is then computed after the model, so the penalty can join a block of the model that gathers
    the weight. `params` are the sharded parameters.
    """
    weights, late, eqns = jaxprs.roots_of(params, jaxpr).keys(), {}, []
    for eqn in jaxpr.eqns:
        if is_plain(eqn) and not weights.isdisjoint(eqn.outvars):
            late[id(eqn)] = eqn
            continue
        if late and not weights.isdisjoint(reads := jaxprs.variables_in(eqn.invars)):
            needed, _ = jaxprs.needed_for(list(late.values()), reads)
            eqns += [late.pop(id(one)) for one in needed]
        eqns.append(eqn)
    return jaxpr.replace(eqns=[*eqns, *late.values()])


def reads_together(jaxpr: Any, params: Collection) -> Any:
    """Move an equation up to an earlier one that reads the same parameters, so that both share a gather.

    For example, two calls of a network on two views of a batch are then computed side by side, layer by layer. An
    equation moves only if no other equation that reads `params`, the sharded parameters, must run before it. Values
    that are computed early must not take more bytes than the values that are in memory at the earlier equation: its
    parameters, its operands, and values to be read later.
    """
    reads = [jaxprs.variables_in(eqn.invars) for eqn in jaxpr.eqns]
    made = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    roots = jaxprs.roots_of(params, jaxpr)
    uses: dict = {}  # the parameters that each equation reads, except equations on parameters alone
    readers: dict = {}  # the equations that read each parameter, with the same exception
    for i, eqn in enumerate(jaxpr.eqns):
        found = set().union(*(roots.get(v, ()) for v in reads[i]))
        if found and roots.keys().isdisjoint(eqn.outvars):
            uses[i] = found
            for root in found:
                readers.setdefault(root, []).append(i)
    if max(map(len, readers.values()), default=0) < 2 or any(map(compat.is_ref, made)):
        return jaxpr
    unread = Counter(v for each in [*reads, jaxprs.variables_in(jaxpr.outvars)] for v in each)  # the reads to come
    order: dict = {}  # the indices of the equations so far
    early: set = set()  # values that are computed early
    in_memory: set = set()  # values that are computed and still to be read
    blocked: dict = {}  # an equation that cannot move before another one has run -> the other one

    def needed(i: int) -> list | None:
        """Return `i` and the indices of the equations that must run before `i`, or None if `i` cannot move."""
        stays = lambda k: jaxpr.eqns[k].effects or compat.loop_of(jaxpr.eqns[i]) or (k in uses and k != i)
        before = lambda k: () if stays(k) else {made[v] for v in reads[k] if v in made} - order.keys()
        found = jaxprs.reached([i], before)
        if (blocker := next(filter(stays, found), None)) is not None:
            blocked[i] = blocker
        return sorted(found) if blocker is None else None

    def run(i: int) -> None:
        order[i] = None
        unread.subtract(reads[i])
        in_memory.update(v for v in jaxpr.eqns[i].outvars if unread[v] and v not in roots)
        in_memory.difference_update([v for v in reads[i] if not unread[v]])

    for i in range(len(jaxpr.eqns)):
        if i in order:
            continue
        run(i)
        if i not in uses or compat.loop_of(jaxpr.eqns[i]):
            continue
        for j in sorted({j for root in uses[i] for j in readers[root] if j not in order and uses[j] <= uses[i]}):
            # Without another gather between them, `i` and `j` share a gather where they are.
            apart = any(k in uses and k not in order and not uses[k] <= uses[i] for k in range(i, j))
            moved = needed(j) if apart and blocked.get(j, i) in order else None
            if moved is None:
                continue
            reads_of_moved = Counter(v for k in moved for v in reads[k])
            new = {v for k in moved for v in jaxpr.eqns[k].outvars if v not in roots} | (early & in_memory)
            room = sum(map(jaxprs.nbytes, uses[i] | ((in_memory | {*reads[i]}) - early - roots.keys())))
            if sum(jaxprs.nbytes(v) for v in new if unread[v] > reads_of_moved[v]) <= room:
                early |= new
                for k in moved:
                    run(k)
    return jaxpr.replace(eqns=[jaxpr.eqns[i] for i in order])


class Joined(NamedTuple):
    """A block that an equation can join."""

    root: Any  # the variable of the only parameter from which the equation's operands are computed
    place: int  # the index of the block's draft
    # Equations on values that are alike on all devices, as keys. The block computes these equations itself, because
    # the segment that has them runs later.
    again: dict


def block_to_join(so_far: Any, eqn: Any, root: Any, place: int) -> Joined | None:
    """Return the block whose draft has the index `place` if `eqn` can join this block, or otherwise None.

    The block gathers `root`, the only parameter that `eqn` depends on. `so_far` are the `Decisions` so far.
    """
    again: dict = {}
    late: list = []  # variables that the block cannot read, because a later segment computes them

    def behind(var):
        is_of_params = lambda v: v in so_far.params or v in so_far.repeated
        if var in so_far.params:
            late.extend(v for v in so_far.params[var].operands if so_far.made_in.get(v, -1) >= place)
        elif var in so_far.repeated:
            return jaxprs.variables_in(so_far.repeated[var].invars)
        elif var not in so_far.roots and var not in so_far.alike:
            late.append(var)
        elif so_far.made_in.get(var, -1) > place:
            made = so_far.made[var]
            reads = jaxprs.variables_in(made.invars)
            if var not in so_far.roots and is_plain(made) and not any(map(is_of_params, reads)):
                again[made] = None
                return reads
            late.append(var)
        return ()

    jaxprs.reached(jaxprs.variables_in(eqn.invars), behind)
    return None if late else Joined(root, place, again)
