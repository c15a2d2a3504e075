"""Partition an optax update: what needs no offloaded state, and groups of leaves that are updated together.

Nothing is known about transformations by name. `tx.update` is traced, and each result is
followed back to the offloaded arrays it depends on. What depends on none (a count, a
schedule, the norm of all gradients) is computed once, with the gradients. Results that
depend on the same offloaded arrays form one group; if all of them are elementwise, the
group is updated in chunks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from zerojax import compat
from zerojax.layout.chunked import Chunking
from zerojax.optim.traced import EXTRA, GRAD, PARAM, SHARED, STATE, Equations, Read, TracedUpdate, equations_behind

# What an offloaded leaf of the state belongs to: a trained parameter, by index, or ("state", k), itself alone.
Owner = int | tuple[str, int]


@dataclasses.dataclass(frozen=True)
class UpdateGroup:
    """The update of leaves whose offloaded state is needed at the same time.

    Attributes:
        params: Trained parameters that it updates.
        state: Offloaded leaves of the state, which it reads and replaces.
        resident: Leaves of the state on the device that it replaces.
        chunking: How the parameter and its state are chunked; None: updated as full arrays.
        equations: For each length of a chunk, the equations; under 0 those on full arrays.
            Results: parameters, offloaded state, resident state.
    """

    params: tuple[int, ...]
    state: tuple[int, ...]
    resident: tuple[int, ...]
    chunking: Chunking | None
    equations: dict[int, Equations]

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """Return `(start, length)` of each chunk, or `(0, 0)` for full arrays."""
        return ((0, 0),) if self.chunking is None else self.chunking.chunks

    def reads(self, kind: str) -> tuple[int, ...]:
        """Return the indices of the inputs of one kind."""
        return next(iter(self.equations.values())).indices(kind)


@dataclasses.dataclass(frozen=True)
class Partition:
    """A partitioned update.

    Attributes:
        resident: What depends on no offloaded array. Results: parameters, state, shared values.
        resident_params: Trained parameters that `resident` updates.
        resident_state: Leaves of the state that `resident` replaces.
        num_shared: How many values `resident` computes for the groups.
        groups: The rest.
        consts: Arrays that the transformation closed over.
    """

    resident: Equations
    resident_params: tuple[int, ...]
    resident_state: tuple[int, ...]
    num_shared: int
    groups: tuple[UpdateGroup, ...]
    consts: tuple

    @property
    def grads(self) -> tuple[int, ...]:
        """Return the gradients that the groups read."""
        return tuple(sorted({i for group in self.groups for i in group.reads(GRAD)}))

    @property
    def shared_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Return shapes and types of the shared values."""
        outvars = self.resident.jaxpr.outvars
        return [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in outvars[len(outvars) - self.num_shared :]]


def partition(
    traced: TracedUpdate,
    owners: dict[int, Owner],
    chunkings: dict[int, Chunking],
    retrace: Callable[[dict[int, int]], TracedUpdate],
) -> Partition:
    """Partition an update into groups.

    Args:
        traced: The update of logical arrays.
        owners: The leaves of the state that are offloaded, each with its owner.
        chunkings: For parameters whose update is elementwise, how they may be chunked.
        retrace: The update with the parameters of `chunkings` as chunks of the lengths given.
    """
    depends = Dependencies.of(traced, owners)
    chunk_traces = ChunkTraces(chunkings, retrace)
    num_params, outvars = traced.num_params, traced.jaxpr.outvars
    shared: dict[Any, int] = {}
    groups = []
    for outs in groups_of(traced, owners, depends):
        params = tuple(o for o in outs if o < num_params)
        leaves = [o - num_params for o in outs if o >= num_params]
        state = tuple(k for k in leaves if k in owners)
        resident = tuple(k for k in leaves if k not in owners)
        outs = [*params, *(num_params + k for k in (*state, *resident))]
        eqns, inputs = equations_behind(
            traced.jaxpr, traced.producers, [outvars[o] for o in outs], depends.shared_scalars
        )
        reads: dict[Any, Read] = {}
        for var in inputs:
            kind, i = traced.reads.get(var, (SHARED, 0))
            is_shared = kind in (SHARED, EXTRA) or (kind == STATE and i not in owners)
            reads[var] = (SHARED, shared.setdefault(var, len(shared))) if is_shared else (kind, i)
        alone = len(params) == 1 and not resident
        chunking = chunkings.get(params[0]) if alone and may_chunk(traced, owners, eqns, reads, outs) else None
        traces = {0: traced} if chunking is None else chunk_traces.by_length(params[0])
        if any(other.structure != traced.structure for other in traces.values()):
            chunking, traces = None, {0: traced}
        equations = {}
        for length, other in traces.items():
            same = {other.variables[traced.positions[var]]: read for var, read in reads.items()}
            equations[length] = other.equations(eqns, same, [other.jaxpr.outvars[o] for o in outs])
        groups.append(UpdateGroup(params, state, resident, chunking, equations))
    return with_resident(traced, tuple(groups), list(shared))


def with_resident(traced: TracedUpdate, groups: tuple[UpdateGroup, ...], shared: Sequence) -> Partition:
    """Return the partition with what no group computes, and the variables that groups share."""
    taken_params = {i for group in groups for i in group.params}
    taken_state = {k for group in groups for k in (*group.state, *group.resident)}
    params = tuple(i for i in range(traced.num_params) if i not in taken_params)
    state = tuple(k for k in range(traced.num_state) if k not in taken_state)
    outvars = [traced.jaxpr.outvars[o] for o in (*params, *(traced.num_params + k for k in state))] + list(shared)
    eqns, inputs = equations_behind(traced.jaxpr, traced.producers, outvars)
    equations = traced.equations(eqns, {var: traced.reads[var] for var in inputs}, outvars)
    return Partition(equations, params, state, len(shared), groups, traced.consts)


def may_chunk(
    traced: TracedUpdate, owners: dict[int, Owner], eqns: Sequence[int], reads: dict[Any, Read], outs: Sequence[int]
) -> bool:
    """Return whether a parameter's group may be updated in chunks.

    It must reduce nothing, and read and compute only scalars and arrays of the parameter's
    shape that are its own. An equation with several results, such as a `cond` over all
    leaves, reads other leaves too.
    """
    i, shape = outs[0], traced.jaxpr.outvars[outs[0]].aval.shape

    def fits(var, read: Read) -> bool:
        kind, k = read
        own = owners.get(k) == i if kind == STATE else kind in (GRAD, PARAM) and k == i
        return var.aval.shape == () or (own and var.aval.shape == shape)

    return (
        all(fits(var, read) for var, read in reads.items())
        and all(traced.jaxpr.outvars[o].aval.shape == shape for o in outs)
        and not any(reduces(traced.jaxpr.eqns[e]) for e in eqns)
    )


def reduces(eqn: Any) -> bool:
    """Return whether an equation, or one inside it, reduces an array."""
    name = eqn.primitive.name
    inner = (e for jaxpr in compat.inner_jaxprs(eqn) for e in jaxpr.eqns)
    return (name.startswith("reduce") and name != "reduce_precision") or any(map(reduces, inner))


@dataclasses.dataclass(frozen=True)
class Dependencies:
    """What the variables of a traced update are computed from.

    Attributes:
        offloaded: For each variable, the owners of the offloaded arrays it depends on; no entry for none.
        params: For each variable, the parameters it depends on other than through `shared_scalars`.
        shared_scalars: Scalars that depend on nothing offloaded: they are computed once.
    """

    offloaded: dict[Any, frozenset]
    params: dict[Any, frozenset]
    shared_scalars: frozenset

    @classmethod
    def of(cls, traced: TracedUpdate, owners: dict[int, Owner]) -> Dependencies:
        """Follow the equations once."""
        scalars: set = set()
        reads = traced.reads.items()
        offloaded = {v: frozenset((owners[k],)) for v, (kind, k) in reads if kind == STATE and k in owners}
        params = {v: frozenset((i,)) for v, (kind, i) in reads if kind == PARAM}
        for eqn in traced.jaxpr.eqns:
            needs_offloaded, needs_params = (union(known, eqn.invars) for known in (offloaded, params))
            for var in eqn.outvars:
                if needs_offloaded:
                    offloaded[var] = needs_offloaded
                elif var.aval.shape == ():
                    scalars.add(var)
                    continue
                if needs_params:
                    params[var] = needs_params
        return cls(offloaded, params, frozenset(scalars))


def union(known: dict[Any, frozenset], atoms: Sequence) -> frozenset:
    """Return everything that is known of some variables. Literals depend on nothing."""
    return frozenset().union(*(known.get(atom, ()) for atom in atoms if not compat.is_literal(atom)))


def groups_of(traced: TracedUpdate, owners: dict[int, Owner], depends: Dependencies) -> list[list[int]]:
    """Return the indices of results that are computed together, group by group.

    A group updates every parameter it reads: the update overwrites the old one.
    """
    num_params, outvars = traced.num_params, traced.jaxpr.outvars
    own: list[set] = [{i} for i in range(num_params)]
    own += [{owners[k]} if k in owners else set() for k in range(traced.num_state)]
    offloaded = [union(depends.offloaded, [var]) for var in outvars]
    touched = [own[o] | offloaded[o] | union(depends.params, [var]) for o, var in enumerate(outvars)]
    active = {o for o in range(len(outvars)) if offloaded[o] or (o >= num_params and own[o])}
    parent: dict[Owner, Owner] = {}

    def root(x: Owner) -> Owner:
        while parent.setdefault(x, x) != x:
            x = parent[x]
        return x

    fresh = active
    while fresh:
        for o in sorted(fresh):
            first, *others = touched[o]
            for x in (first, *others):
                parent[root(x)] = root(first)
        fresh = {i for i in range(num_params) if i in parent} - active
        active |= fresh
    groups: dict[Owner, list[int]] = {}
    for o in sorted(active):
        groups.setdefault(root(next(iter(touched[o]))), []).append(o)
    return list(groups.values())


class ChunkTraces:
    """Traces of an update on chunks: one for those of full length, and one for the last ones."""

    def __init__(self, chunkings: dict[int, Chunking], retrace: Callable[[dict[int, int]], TracedUpdate]):
        """Store the arguments; nothing is traced yet."""
        self._lengths = {i: tuple(dict.fromkeys(chunking.extents)) for i, chunking in chunkings.items()}
        self._traced = functools.cache(
            lambda n: retrace({i: lengths[min(n, len(lengths) - 1)] for i, lengths in self._lengths.items()})
        )

    def by_length(self, i: int) -> dict[int, TracedUpdate]:
        """Return, for each length of parameter `i`'s chunks, the trace with chunks of that length."""
        return {length: self._traced(n) for n, length in enumerate(self._lengths[i])}
