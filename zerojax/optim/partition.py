"""Choose the state to offload, and partition an optax update into groups of results.

A group is computed when its offloaded state is on the device. Transformations are not recognised by name. `tx.update`
is traced, to find the offloaded arrays that each result depends on. Results that depend on no offloaded array (a count,
a schedule, the norm of all gradients) form the first group, which runs in the program that computes the gradients. Any
other group has all results that depend on the same offloaded arrays. If these results are elementwise, the group is
updated in chunks.
"""

import collections
import dataclasses
import functools
import warnings
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import compat, jaxprs
from zerojax.layout.leaf import Leaf
from zerojax.offload.chunked import Chunking, chunking_of, row_chunkings_of
from zerojax.offload.options import Offload
from zerojax.optim.elementwise import LEAF, MIXED, SCALAR, Known, has_products, walk
from zerojax.optim.owned import OwnedUpdate, owned_update
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
    trace_update,
    union,
)
from zerojax.optim.wrapped import FlatUpdate, TransformationError
from zerojax.placement.storage import shapes

# A unit is a set of state leaves that are offloaded together. The integer i means all state that mirrors trained
# parameter i. ("state", k) means only leaf k.
Unit = int | tuple[str, int]

# Bytes of the largest array of a chunk that a loop on the device updates. Such a chunk stays in a cache.
RESIDENT_BYTES = 4 << 20
PLACES = {"device": "on the device", "host": "in host memory", "disk": "on disk"}


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
        first: The group of the results that depend on no offloaded array. Its equations return these results, and then
            the shared values, which the other groups read.
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


@dataclasses.dataclass(frozen=True)
class PlannedUpdate:
    """Analyses of a step's update (`flat`, a `FlatUpdate`). Each analysis runs once, when it is first needed.

    `traced`, `owned` and `partition` raise a `TransformationError`, or the transformation's own error, if the update
    needs arguments that a step does not give.
    """

    flat: FlatUpdate

    @functools.cached_property
    def units(self) -> dict[int, Unit]:
        """Map each offloaded state leaf to its `Unit`. At least `Offload.fraction` of the bytes are offloaded.

        Without an offload, encoded state has units, too, unless the update multiplies matrices.
        """
        if self.flat.config.offload is None:
            state, param_of = self.flat.leaves.state, self.flat.leaves.param_of
            if all(leaf.encoding is None for leaf in state) or any(map(has_products, self.traced.jaxpr.eqns)):
                return {}
            encoded = {i for leaf, i in zip(state, param_of, strict=True) if leaf.encoding is not None}
            return {k: i for k, i in enumerate(param_of) if i in encoded and i is not None}
        units, sizes = self._candidates, collections.Counter[Unit]()
        for k, unit in units.items():
            sizes[unit] += self.flat.leaves.state[k].local_bytes
        room, kept = round(sizes.total() * (1 - self._offload.fraction)), set()
        for unit, size in sorted(sizes.items(), key=lambda item: (-item[1], str(item[0]))):  # the largest unit first
            if size <= room:
                kept.add(unit)
                room -= size
        return {k: unit for k, unit in units.items() if unit not in kept}

    @property
    def _candidates(self) -> dict[int, Unit]:
        """Map each leaf of the state that may be offloaded to its unit. Small leaves stay on the device."""
        leaves = zip(self.flat.trained.paths, shapes(self.flat.trained.grads), strict=True)
        # Leave out scalar and empty parameters: their state in Adafactor cannot be divided like the parameter.
        covered = [bool(x.shape and x.size) and self._offload.covers(path, x) for path, x in leaves]
        return {
            k: ("state", k) if i is None else i
            for k, (leaf, i) in enumerate(zip(self.flat.leaves.state, self.flat.leaves.param_of, strict=True))
            if leaf.shape != () and leaf.kind != "flat" and (leaf.encoding or jnp.issubdtype(leaf.dtype, jnp.inexact))
            if leaf.size >= self.flat.config.persist_below and (i is None or covered[i])
        }

    @property
    def _offload(self) -> Offload:
        assert isinstance(self.flat.config.offload, Offload)
        return self.flat.config.offload

    @functools.cached_property
    def _params_on_disk(self) -> frozenset[int]:
        sharded = (i for i, leaf in enumerate(self.flat.trained.params) if leaf.kind == "sharded")
        return frozenset(sharded if self.flat.config.params_on_disk else ())

    @functools.cached_property
    def _chunkings_of_params(self) -> dict[int, Chunking]:
        """Map each parameter on disk, or with offloaded state, to the chunks into which its update may be divided."""
        (grads, state, _), offload = self.flat.leaves, self.flat.config.offload
        most = RESIDENT_BYTES if offload is None else offload.chunk_bytes
        by_row = row_chunkings_of(grads, most) if self._params_on_disk else {}
        itemsizes: dict[int, int] = {}
        for k, i in self.units.items():
            if isinstance(i, int):
                itemsizes[i] = max(itemsizes.get(i, grads[i].dtype.itemsize), state[k].dtype.itemsize)
        encoded = {i for k, i in self.units.items() if state[k].encoding is not None}
        chunkings = {
            i: chunking_of(grads[i], most * grads[i].dtype.itemsize // size, encoded=i in encoded)
            for i, size in itemsizes.items()
        }
        return chunkings | {i: by_row[i] for i in self._params_on_disk}

    @functools.cached_property
    def traced(self) -> TracedUpdate:
        return trace_update(self.flat, self.flat.planned_shapes())

    @functools.cached_property
    def _units_behind(self) -> dict[Any, frozenset]:
        """Map each variable to the units that it depends on. A parameter on disk also counts as a unit."""
        units = {STATE: self.units, PARAM: {i: i for i in self._params_on_disk}}
        reads = ((v, units.get(kind, {}).get(k)) for v, (kind, k) in self.traced.reads.items())
        return dependencies(self.traced.jaxpr, {v: frozenset((unit,)) for v, unit in reads if unit is not None})

    @functools.cached_property
    def _shared_scalars(self) -> set:
        """Return the scalars that depend on no offloaded array. They are computed once, and passed to all groups."""
        made = (var for eqn in self.traced.jaxpr.eqns for var in eqn.outvars)
        return {var for var in made if var.aval.shape == () and var not in self._units_behind}

    @functools.cached_property
    def _groups(self) -> list[list[int]]:
        """Return the indices of the results of each group with offloaded state.

        A group also updates every parameter that it reads. Otherwise another group might replace the parameter's old
        value before this group reads it.
        """
        if not (self.units or self._params_on_disk):
            return []
        units, traced = self.units, self.traced
        params = {v: frozenset((i,)) for v, (kind, i) in traced.reads.items() if kind == PARAM}
        needs_params = dependencies(traced.jaxpr, params, self._shared_scalars)
        units_of: list[set] = [{i} for i in range(traced.num_params)]
        units_of += [{units[k]} if k in units else set() for k in range(len(traced.state_outs))]
        outvars = traced.jaxpr.outvars
        offloaded = [union(self._units_behind, [var]) for var in outvars]
        touched = [units_of[o] | offloaded[o] | union(needs_params, [var]) for o, var in enumerate(outvars)]
        active = {o for o in range(len(outvars)) if offloaded[o] or (o >= traced.num_params and units_of[o])}
        # If an active result reads a parameter, the parameter's update becomes active.
        read = lambda o: (x for x in touched[o] if isinstance(x, int))
        results = sorted(jaxprs.reached(active | self._params_on_disk, read))
        return [[results[n] for n in group] for group in connected([touched[o] for o in results])]

    @functools.cached_property
    def owned(self) -> OwnedUpdate:
        """Return the cores that owners compute."""
        if not self.flat.may_have_owners:
            return OwnedUpdate()
        streamed = {o for outs in self._groups for o in outs if o < len(self.flat.leaves.grads)}
        return owned_update(self.flat, self.flat.planned_shapes(), self.traced, streamed)

    @functools.cached_property
    def partition(self) -> Partition:
        try:
            groups = join_by_owners(self._groups, self.owned)
        except TransformationError as error:
            raise error.__cause__ or error from None
        traced, shared = self.traced, dict[Any, int]()
        found = tuple(self._group(outs, shared) for outs in groups)
        # The first group computes the shared values, and the results that no other group computes.
        taken = {o for outs in groups for o in outs}
        outs = [o for o in range(len(traced.jaxpr.outvars)) if o not in taken]
        results = [*(traced.jaxpr.outvars[o] for o in outs), *shared]
        eqns, inputs = equations_behind(traced.jaxpr, traced.producers, results)
        equations = traced.equations(eqns, {var: traced.reads[var] for var in inputs}, results, self.owned.owned)
        params = tuple(o for o in outs if o < traced.num_params)
        resident = tuple(o - traced.num_params for o in outs if o >= traced.num_params)
        first = UpdateGroup(params, (), resident, None, equations)
        warn_of_lost_effects(traced.jaxpr)
        shared_shapes = tuple(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in shared)
        return Partition(first, shared_shapes, found, traced.consts)

    def _group(self, outs: Sequence[int], shared: dict[Any, int]) -> UpdateGroup:
        """Return the group of the results `outs`. Add the shared values that they need, with indices, to `shared`.

        A group gets gradients, parameters, constants and its offloaded state. All other inputs are shared values.
        """
        traced, units, count = self.traced, self.units, self.traced.num_params
        params = tuple(o for o in outs if o < count)
        leaves = [o - count for o in outs if o >= count]
        state, resident = (tuple(k for k in leaves if (k in units) == on) for on in (True, False))
        results = [traced.jaxpr.outvars[o] for o in (*params, *(count + k for k in (*state, *resident)))]
        eqns, inputs = equations_behind(traced.jaxpr, traced.producers, results, self._shared_scalars)
        reads: dict[Any, Read] = {}
        for var in inputs:
            kind, i = traced.reads.get(var, (SHARED, 0))
            is_shared = kind in (SHARED, EXTRA) or (kind == STATE and i not in units)
            reads[var] = (SHARED, shared.setdefault(var, len(shared))) if is_shared else (kind, i)
        equations = traced.equations(eqns, reads, results, self.owned.owned)
        chunking = self._chunkings_of_params.get(params[0]) if len(params) == 1 and not resident else None
        if chunking is not None and not may_chunk(equations, units, params[0], self.flat.leaves.state, state):
            chunking = None
        return UpdateGroup(params, state, resident, chunking, equations)

    @property
    def chunkings(self) -> tuple[Chunking | None, ...]:
        """Return the chunking of each leaf of the state, or None for a leaf that stays on the device."""
        state, found = self.flat.leaves.state, {}
        for group in self.partition.groups if self.units and self.flat.config.offload else ():
            found |= {k: group.chunking or Chunking(0, state[k].local_shape[:1]) for k in group.state}
        return tuple(map(found.get, range(len(state))))

    @property
    def has_owners(self) -> bool | None:
        """Return whether owners compute cores, or None if the update needs arguments that a step does not give."""
        try:
            return bool(self.owned.owned)
        except TransformationError:
            return None

    def owners_in_words(self) -> str:
        """Return a line per set of equal cores with owners, and a line per reason why other leaves have no owners."""
        if self.has_owners is None:
            return ""
        path_of = lambda i: self.flat.leaves.grads[i].path
        lines = [cores_in_words(each, [path_of(core.leaf) for core in each.cores]) for each in self.owned.owned]
        by_reason: dict[str, list[str]] = {}
        for i, reason in sorted(self.owned.left.items()):
            by_reason.setdefault(reason, []).append(path_of(i))
        lines += [f"{first_of(x)}: divided among all devices: {reason}" for reason, x in by_reason.items()]
        return "\n".join(f"update of {line}" for line in lines)

    def groups_in_words(self) -> str:
        """Return one line per set of similar groups, with their parameters and where their state is between steps.

        Return an empty string if nothing is offloaded.
        """
        offload, leaves = self.flat.config.offload, self.flat.leaves
        alike: dict[tuple, list[list[str]]] = {}
        for group in (self.partition.first, *self.partition.groups) if offload and self.units else ():
            state = group.state or group.resident
            paths = [leaves.grads[i].path for i in group.params] or [f"opt_state{leaves.state[k].path}" for k in state]
            place = "device" if group is self.partition.first else offload.optimizer or "device"
            if paths:
                key = PLACES[place], len(group.chunks), len(group.params), len(state)
                alike.setdefault(key, []).append(paths)
        lines = []
        for (place, chunks, _, count), members in alike.items():
            number = f"{len(members)} groups, each" if len(members) > 1 else "one group"
            divided = f", in {chunks} chunks" if chunks > 1 else ""
            state = f"{count} {'leaf' if count == 1 else 'leaves'} of the state"
            paths = first_of([path for paths in members for path in paths])
            lines.append(f"update of {paths}: {number} with {state} {place}{divided}")
        return "\n".join(lines)


# Cached, because tracing takes seconds for a deep model, and a sharding plan and its step ask for the same update.
planned_update = functools.lru_cache(maxsize=8)(PlannedUpdate)


def join_by_owners(groups: Sequence[Sequence[int]], owned: OwnedUpdate) -> list[list[int]]:
    """Join groups that have cores in the same `OwnedCores`, because owners compute these cores together."""
    group_of = {o: n for n, outs in enumerate(groups) for o in outs}
    together = [{group_of[core.leaf] for core in each.cores if core.leaf in group_of} for each in owned.owned]
    sets = [*({n} for n in range(len(groups))), *filter(None, together)]
    return [sorted(o for n in joined if n < len(groups) for o in groups[n]) for joined in connected(sets)]


def warn_of_lost_effects(jaxpr: Any) -> None:
    """Warn about equations that have effects, but are in no group because no result needs them."""
    needed = {*map(id, jaxprs.needed_for(jaxpr.eqns, jaxpr.outvars)[0])}
    for eqn in jaxpr.eqns:
        if eqn.effects and id(eqn) not in needed:
            warnings.warn(
                f"`{compat.name_of(eqn)}` at {compat.line_of(eqn)} does not run: an update of offloaded state computes "
                f"only what its results need. Move it into the loss, or out of the step.",
                stacklevel=2,
            )


def may_chunk(
    equations: Equations, units: dict[int, Unit], i: int, leaves: Sequence[Leaf], state: Sequence[int]
) -> bool:
    """Return whether the group of parameter `i` may be updated in chunks, because its equations are elementwise.

    Element n of each result must depend only on scalars, and on element n of the parameter's arrays. For example, a
    group with a norm of offloaded state, or with a `cond` over all leaves, cannot be chunked. The equations
    replace the parameter and the leaves `state` of `leaves`. Encoded arrays count as the wide arrays they represent.
    """
    if any(eqn.effects for eqn in equations.jaxpr.eqns):
        return False  # `evaluate_as` would run the effects of both branches of a `cond`, once per chunk
    of_param = lambda kind, k: units.get(k) == i if kind == STATE else kind in (GRAD, PARAM) and k == i
    wide = lambda k, shape: shape if (encoding := leaves[k].encoding) is None else encoding.shape
    jaxpr = equations.jaxpr
    param, *replaced = (var.aval.shape for var in jaxpr.outvars)
    wanted = {param, *map(wide, state, replaced)}

    def known(var, read: Read) -> Known:
        if var.aval.shape == ():
            return Known(SCALAR)
        shape = wide(read[1], var.aval.shape) if read[0] == STATE else var.aval.shape
        return Known(LEAF, leaf=i) if of_param(*read) and {shape} == wanted else Known(MIXED)

    results = walk(jaxpr, (), list(map(known, jaxpr.invars, equations.reads)))
    return len(wanted) == 1 and all(x.kind != MIXED for x in results)


def dependencies(jaxpr: Any, known: dict[Any, frozenset], without: Collection = ()) -> dict[Any, frozenset]:
    """Map each variable to the union of the `known` sets of the variables it depends on. Skip those in `without`."""
    known = dict(known)
    for eqn in jaxpr.eqns:
        if found := union(known, eqn.invars):
            known |= {var: found for var in eqn.outvars if var not in without}
    return known


def connected(sets: Sequence[Collection]) -> list[list[int]]:
    """Group `sets` that overlap, directly or through other sets. Return the indices of the sets in each group."""
    holders: dict[Any, list[int]] = {}
    for n, elements in enumerate(sets):
        for x in elements:
            holders.setdefault(x, []).append(n)
    overlapping = lambda n: [m for x in sets[n] for m in holders.pop(x, ())]
    is_new = lambda n: not holders.keys().isdisjoint(sets[n])  # no group has taken the elements
    return [sorted(jaxprs.reached([n], overlapping)) for n in range(len(sets)) if is_new(n)]


def cores_in_words(owned: OwnedCores, paths: Sequence[str]) -> str:
    """Return a line that compares the time of the update of `paths` with owners to the time without owners."""
    each = f"{owned.within} devices each" if owned.within > 1 else "one device each"
    matrices = "1 matrix" if owned.matrices == 1 else f"{owned.matrices} matrices"
    return (
        f"{first_of(paths)}: {matrices} by {owned.leaf.shards // owned.within} owners, {each}: "
        f"{1e3 * owned.seconds:.3g} ms instead of {1e3 * owned.seconds_sharded:.3g}, at peak rates"
    )


def first_of(paths: Sequence[str]) -> str:
    return paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
