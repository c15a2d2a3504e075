"""Choose the state to offload, and partition an optax update into groups of results.

A group is computed when its offloaded state is on the device. Transformations are not recognised by name. `tx.update`
is traced, to find the offloaded arrays that each result depends on. Results that depend on no offloaded array (a count,
a schedule, the norm of all gradients) form the first group, which runs in the program that computes the gradients. All
results that depend on the same offloaded arrays form another group. If all results of a group are elementwise, the
group is updated in chunks.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import warnings
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import compat, jaxprs
from zerojax.offload.chunked import Chunking, chunking_of, row_chunkings_of
from zerojax.offload.options import Offload
from zerojax.optim.elementwise import LEAF, MIXED, SCALAR, Known, walk
from zerojax.optim.owned import OwnedUpdate
from zerojax.optim.traced import (
    EXTRA,
    GRAD,
    PARAM,
    SHARED,
    STATE,
    Equations,
    OwnedCores,
    Read,
    TracedUpdate,
    equations_behind,
    union,
)
from zerojax.optim.transformation import FlatUpdate
from zerojax.placement.storage import shapes

# A unit is a set of state leaves that are offloaded together. The integer i means all state that mirrors trained
# parameter i. ("state", k) means only leaf k.
Unit = int | tuple[str, int]


@dataclasses.dataclass(frozen=True)
class OffloadedState:
    """Choose the offloaded part of an update's state, from shapes alone."""

    update: FlatUpdate

    @functools.cached_property
    def units(self) -> dict[int, Unit]:
        """Map each offloaded leaf of the state to its unit. The largest that fit in the device's share stay there."""
        if self.update.config.offload is None:
            return {}
        units, sizes = self._candidates, collections.Counter[Unit]()
        for k, unit in units.items():
            sizes[unit] += self.update.leaves.state[k].local_bytes
        room, kept = round(sizes.total() * (1 - self._offload.fraction)), set()
        for unit, size in sorted(sizes.items(), key=lambda item: (-item[1], str(item[0]))):
            if size <= room:
                kept.add(unit)
                room -= size
        return {k: unit for k, unit in units.items() if unit not in kept}

    @property
    def _candidates(self) -> dict[int, Unit]:
        """Map each leaf of the state that may be offloaded to its unit. Small leaves stay on the device."""
        leaves = zip(self.update.trained.paths, shapes(self.update.trained.grads), strict=True)
        # Leave out scalars and empty leaves, because their state in Adafactor cannot be divided like the parameter.
        covered = [bool(x.shape and x.size) and self._offload.covers(path, x) for path, x in leaves]
        return {
            k: ("state", k) if i is None else i
            for k, (leaf, i) in enumerate(zip(self.update.leaves.state, self.update.leaves.param_of, strict=True))
            if leaf.shape != () and leaf.kind != "flat" and jnp.issubdtype(leaf.dtype, jnp.inexact)
            if leaf.size >= self.update.config.persist_below and (i is None or covered[i])
        }

    @functools.cached_property
    def params_on_disk(self) -> frozenset[int]:
        sharded = (i for i, leaf in enumerate(self.update.trained.params) if leaf.kind == "sharded")
        return frozenset(sharded if self.update.config.params_on_disk else ())

    @property
    def _offload(self) -> Offload:
        assert isinstance(self.update.config.offload, Offload)
        return self.update.config.offload

    @functools.cached_property
    def chunkings(self) -> dict[int, Chunking]:
        """Map each parameter that is updated by a group to the chunks in which its update may be divided."""
        (grads, state, _), most = self.update.leaves, self._offload.chunk_bytes
        by_row = row_chunkings_of(grads, most) if self.params_on_disk else {}
        itemsizes: dict[int, int] = {}
        for k, i in self.units.items():
            if isinstance(i, int):
                itemsizes[i] = max(itemsizes.get(i, grads[i].dtype.itemsize), state[k].dtype.itemsize)
        chunkings = {i: chunking_of(grads[i], most * grads[i].dtype.itemsize // size) for i, size in itemsizes.items()}
        return chunkings | {i: by_row[i] for i in self.params_on_disk}


@dataclasses.dataclass(frozen=True)
class UpdateGroup:
    """Results of an update that are computed together.

    Attributes:
        params: Indices of the trained parameters that the group updates.
        state: Indices of the offloaded state leaves that the group reads and replaces.
        resident: Indices of the state leaves on the device that the group replaces.
        chunking: How the parameter and its state are chunked; None if the group is updated as full arrays.
        equations: The equations, in logical shapes. The results are parameters, then offloaded state, then resident
            state.
    """

    params: tuple[int, ...]
    state: tuple[int, ...]
    resident: tuple[int, ...]
    chunking: Chunking | None
    equations: Equations

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        return ((0, 0),) if self.chunking is None else self.chunking.chunks

    def reads(self, kind: str) -> tuple[int, ...]:
        return self.equations.indices(kind)


@dataclasses.dataclass(frozen=True)
class Partition:
    """An update that is divided into groups.

    Attributes:
        first: The group of the results that depend on no offloaded array. After these results, its equations return the
            shared values, which the other groups read.
        shared_shapes: The shapes and types of the shared values.
        groups: All other groups.
        consts: The arrays that the transformation closes over.
    """

    first: UpdateGroup
    shared_shapes: tuple[jax.ShapeDtypeStruct, ...]
    groups: tuple[UpdateGroup, ...]
    consts: tuple

    @property
    def grads(self) -> tuple[int, ...]:
        return tuple(sorted({i for group in self.groups for i in group.reads(GRAD)}))


def partition(
    traced: TracedUpdate,
    offloaded: OffloadedState,
    groups: Sequence[Sequence[int]],
    owned: Sequence[OwnedCores],
) -> Partition:
    """Partition an update of logical arrays into groups.

    `groups` has the indices of each group's results, without the first group. Owners compute the cores `owned`.
    """
    units, num_params, outvars = offloaded.units, traced.num_params, traced.jaxpr.outvars
    scalars = shared_scalars(traced, units_behind(traced, offloaded))
    shared: dict[Any, int] = {}
    found = []
    for outs in groups:
        params = tuple(o for o in outs if o < num_params)
        leaves = [o - num_params for o in outs if o >= num_params]
        state, resident = (tuple(k for k in leaves if (k in units) == on) for on in (True, False))
        results = [outvars[o] for o in (*params, *(num_params + k for k in (*state, *resident)))]
        eqns, inputs = equations_behind(traced.jaxpr, traced.producers, results, scalars)
        # A group gets gradients, parameters, constants and its offloaded state. All other inputs are shared values.
        reads: dict[Any, Read] = {}
        for var in inputs:
            kind, i = traced.reads.get(var, (SHARED, 0))
            is_shared = kind in (SHARED, EXTRA) or (kind == STATE and i not in units)
            reads[var] = (SHARED, shared.setdefault(var, len(shared))) if is_shared else (kind, i)
        equations = traced.equations(eqns, reads, results, owned)
        chunking = offloaded.chunkings.get(params[0]) if len(params) == 1 and not resident else None
        if chunking is not None and not may_chunk(equations, units, params[0]):
            chunking = None
        found.append(UpdateGroup(params, state, resident, chunking, equations))
    # The first group computes the shared values, and the results that no other group computes.
    taken = {o for outs in groups for o in outs}
    outs = [o for o in range(len(outvars)) if o not in taken]
    results = [*(outvars[o] for o in outs), *shared]
    eqns, inputs = equations_behind(traced.jaxpr, traced.producers, results)
    equations = traced.equations(eqns, {var: traced.reads[var] for var in inputs}, results, owned)
    params, resident = (o for o in outs if o < num_params), (o - num_params for o in outs if o >= num_params)
    first = UpdateGroup(tuple(params), (), tuple(resident), None, equations)
    shared_shapes = tuple(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in shared)
    warn_of_lost_effects(traced.jaxpr)
    return Partition(first, shared_shapes, tuple(found), traced.consts)


def warn_of_lost_effects(jaxpr: Any) -> None:
    """Warn about an equation with effects that no group computes, because no result needs it."""
    needed = {*map(id, jaxprs.needed_for(jaxpr.eqns, jaxpr.outvars)[0])}
    for eqn in jaxpr.eqns:
        if eqn.effects and id(eqn) not in needed:
            warnings.warn(
                f"`{compat.name_of(eqn)}` at {compat.line_of(eqn)} does not run: an update of offloaded state computes "
                f"only what its results need. Move it into the loss, or out of the step.",
                stacklevel=2,
            )


def merged(groups: Sequence[Sequence[int]], owned: OwnedUpdate) -> list[list[int]]:
    """Join those of `groups` that have cores in one element of `owned`, because owners compute these cores together."""
    group_of = {o: n for n, outs in enumerate(groups) for o in outs}
    together = [{group_of[core.leaf] for core in each.cores if core.leaf in group_of} for each in owned.owned]
    sets = [*({n} for n in range(len(groups))), *filter(None, together)]
    return [sorted(o for n in joined if n < len(groups) for o in groups[n]) for joined in connected(sets)]


def may_chunk(equations: Equations, units: dict[int, Unit], i: int) -> bool:
    """Return whether the group of parameter `i` may be updated in chunks, because its equations are elementwise.

    Element i of each result must depend only on scalars, and on element i of arrays of the parameter. For example, a
    group with a norm of offloaded state, or with a `cond` over all leaves, cannot be chunked.
    """
    if any(eqn.effects for eqn in equations.jaxpr.eqns):
        return False  # `evaluate_as` would run the effects of both branches of a `cond`, once per chunk
    of_param = lambda kind, k: units.get(k) == i if kind == STATE else kind in (GRAD, PARAM) and k == i
    jaxpr, wanted = equations.jaxpr, {var.aval.shape for var in equations.jaxpr.outvars}

    def known(var, read: Read) -> Known:
        if var.aval.shape == ():
            return Known(SCALAR)
        return Known(LEAF, leaf=i) if of_param(*read) and {var.aval.shape} == wanted else Known(MIXED)

    results = walk(jaxpr, (), list(map(known, jaxpr.invars, equations.reads)))
    return len(wanted) == 1 and all(x.kind != MIXED for x in results)


def dependencies(jaxpr: Any, known: dict[Any, frozenset], without: Collection = ()) -> dict[Any, frozenset]:
    """Return the union of `known` that each variable depends on, except through the variables in `without`."""
    known = dict(known)
    for eqn in jaxpr.eqns:
        if found := union(known, eqn.invars):
            known |= {var: found for var in eqn.outvars if var not in without}
    return known


def units_behind(traced: TracedUpdate, state: OffloadedState) -> dict[Any, frozenset]:
    """Return the units of the offloaded arrays that each variable depends on. Parameters on disk count as offloaded."""
    units = {STATE: state.units, PARAM: {i: i for i in state.params_on_disk}}
    reads = ((v, units.get(kind, {}).get(k)) for v, (kind, k) in traced.reads.items())
    return dependencies(traced.jaxpr, {v: frozenset((unit,)) for v, unit in reads if unit is not None})


def shared_scalars(traced: TracedUpdate, offloaded: Collection) -> set:
    """Return the scalars that are not in `offloaded`. They are computed once, and passed to all groups."""
    made = (var for eqn in traced.jaxpr.eqns for var in eqn.outvars)
    return {var for var in made if var.aval.shape == () and var not in offloaded}


def groups_of(traced: TracedUpdate, state: OffloadedState) -> list[list[int]]:
    """Return the indices of the results of each group with offloaded state.

    A group also updates every parameter that it reads. If another group updated the parameter, the old value might be
    overwritten before it is read.
    """
    units, num_params, outvars = state.units, traced.num_params, traced.jaxpr.outvars
    needs_offloaded = units_behind(traced, state)
    params = {v: frozenset((i,)) for v, (kind, i) in traced.reads.items() if kind == PARAM}
    needs_params = dependencies(traced.jaxpr, params, shared_scalars(traced, needs_offloaded))
    units_of: list[set] = [{i} for i in range(num_params)]
    units_of += [{units[k]} if k in units else set() for k in range(len(traced.state_outs))]
    offloaded = [union(needs_offloaded, [var]) for var in outvars]
    touched = [units_of[o] | offloaded[o] | union(needs_params, [var]) for o, var in enumerate(outvars)]
    active = {o for o in range(len(outvars)) if offloaded[o] or (o >= num_params and units_of[o])}
    # If an active result reads a parameter, the parameter's update becomes active.
    read = lambda o: (x for x in touched[o] if isinstance(x, int))
    results = sorted(jaxprs.reached(active | state.params_on_disk, read))
    return [[results[n] for n in group] for group in connected([touched[o] for o in results])]


def connected(sets: Sequence[Collection]) -> list[list[int]]:
    """Group `sets` that overlap, directly or through other sets. Return the indices of the sets in each group."""
    holders: dict[Any, list[int]] = {}
    for n, elements in enumerate(sets):
        for x in elements:
            holders.setdefault(x, []).append(n)
    overlapping = lambda n: [m for x in sets[n] for m in holders.pop(x, ())]
    is_new = lambda n: not holders.keys().isdisjoint(sets[n])  # no group has taken the elements
    return [sorted(jaxprs.reached([n], overlapping)) for n in range(len(sets)) if is_new(n)]
