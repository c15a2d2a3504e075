"""Decide which cores owners compute. Cores with equal programs are stacked, and an owner computes each core once.

Without owners, the compiler divides every product of a core among all devices. Then each product needs an all-reduce,
and every device repeats the products that cannot be divided, such as the square of a Gram matrix. The time with owners
and the time without owners are estimated from the FLOPs and bytes in the traced program. The faster way is chosen.
`follow` finds the index of the sharded dim in every variable of the program, by the rules of `zerojax.dims`. It counts
which products are divided over the devices, and which products every device repeats.

References:
    Liu et al. 2025, arXiv 2502.16982, section 2.3: Muon that gathers each matrix on one of the devices.
    Ahn et al. 2025, arXiv 2504.05295: orthonormalised updates that compute each matrix on one device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from zerojax import compat, costs, jaxprs, signatures
from zerojax.config import Config
from zerojax.dims import NOWHERE, Context, Follower, at
from zerojax.dims.moves import free_dims
from zerojax.optim.cores import CoreFinder
from zerojax.optim.elementwise import has_products
from zerojax.optim.traced import Core, OwnedGroup, TracedUpdate, equations_after, item_of
from zerojax.optim.transformation import TransformationError, UpdatedLeaves
from zerojax.primitives import Kind

# TF32 FLOPs per second and NVLink bytes per second of an H200, and the shortest time of a collective in seconds. Only
# their ratios matter, which differ little between GPUs. With fixed numbers, plans made on different devices agree.
FLOPS, LINK, LATENCY = 495e12, 450e9, 10e-6
# Bytes of the largest matrix that one device may update. The device then holds several arrays of this size.
LARGEST = 1 << 30


@dataclasses.dataclass(frozen=True)
class OwnedUpdate:
    """The cores of an update that owners compute, in groups.

    `left` maps every other parameter whose update multiplies matrices to the reason why owners do not update it.
    """

    groups: tuple[OwnedGroup, ...]
    left: dict[int, str]


def owned_update(
    config: Config,
    leaves: UpdatedLeaves,
    traced: TracedUpdate,
    trace: Callable[[dict[int, tuple[int, ...]]], TracedUpdate],
    streamed: Collection[int] = (),
) -> OwnedUpdate:
    """Find the cores that owners compute. With `matrix_updates="auto"`, owners compute a core only if that is faster.

    `traced` is the update of logical arrays. `trace` traces the update with other shapes of some parameters. The
    `streamed` parameters have offloaded state, so owners compute a batch of them at a time; see `_batches`.
    """
    cores, left = CoreFinder(traced, *leaves).find()
    stacks = {i: core.arrays[0][1].shape[0] for i, core in cores.items() if _is_stack(core, traced)}
    sliced, size = _sliced(traced, trace, leaves, stacks)
    sizes = {i: size if i in stacks else 0 for i in cores}
    program = lambda core: (sliced if sizes[core.leaf] else traced).core_jaxpr(core)
    alike: dict[Any, list[Core]] = {}
    for i, core in cores.items():
        if not sizes[i] and any(where.dim is None for _, where in core.arrays):
            continue
        key = signatures.signature(program(core))
        layouts = tuple(item_of(where, sizes[i]) for _, where in (*core.arrays, *core.outs))
        if key is None or not core.arrays:
            left[i] = "its update has effects, or reads nothing that is sharded"
        else:
            alike.setdefault((key, layouts, i in streamed), []).append(core)
    groups = []
    for (*_, is_streamed), members in alike.items():
        counts = tuple(stacks[core.leaf] // size if sizes[core.leaf] else 1 for core in members)
        everything = OwnedGroup(tuple(members), counts, sizes[members[0].leaf], program(members[0]))
        for group in _batches(config, everything) if is_streamed else [everything]:
            chosen = _choose(config, group)
            groups += [chosen] if isinstance(chosen, OwnedGroup) else []
            taken = {core.leaf for core in chosen.cores} if isinstance(chosen, OwnedGroup) else set()
            reason = chosen if isinstance(chosen, str) else "owners share the others evenly"
            left |= {core.leaf: reason for core in group.cores if core.leaf not in taken}
    return _without_chains(traced, OwnedUpdate(tuple(groups), left))


def _batches(config: Config, group: OwnedGroup) -> list[OwnedGroup]:
    """Divide `group` into batches. A batch has at most one item per device, and at most `chunk_bytes` per device."""
    assert config.offload is not None
    batches: list[list[Core]] = []
    items = local_bytes = math.inf
    for core, count in zip(group.cores, group.counts, strict=True):
        size = sum(leaf.local_bytes for _, leaf in core.arrays)
        if items + count > group.leaf.shards or local_bytes + size > config.offload.chunk_bytes:
            batches.append([])
            items = local_bytes = 0
        batches[-1].append(core)
        items, local_bytes = items + count, local_bytes + size
    return [group.take(batch) for batch in batches]


def _sliced(
    traced: TracedUpdate, trace: Callable, leaves: UpdatedLeaves, stacks: dict[int, int]
) -> tuple[TracedUpdate, int]:
    """Trace the update on short stacks of matrices. Return the trace, and the number of matrices per stack.

    The number is 1 if stacks of one matrix give the same program as `traced`. Otherwise, it is the next common divisor
    of all stacks' lengths. If that gives another program, too, return `traced` and 0.
    """
    common = math.gcd(*stacks.values())
    for size in [1, *(n for n in range(2, common + 1) if common % n == 0)][: 2 if stacks else 0]:
        try:
            sliced = trace({i: (size, *leaves.grads[i].shape[1:]) for i in stacks})
        except TransformationError:  # a transformation may refuse a stack as short as this
            continue
        if sliced.structure == traced.structure:
            return sliced, size
    return traced, 0


def _is_stack(core: Core, traced: TracedUpdate) -> bool:
    """Return whether `core` updates each matrix of a stack separately, and dim 0 of the stack is not sharded."""
    arrays = (*core.arrays, *core.outs)
    count = arrays[0][1].shape[0]
    if any(len(where.shape) < 3 or where.shape[0] != count or where.dim == 0 for _, where in arrays) or count == 1:
        return False
    if core.small or core.small_outs:
        return False
    dims: list = [0] * len(core.arrays) + [None] * len(core.shared)
    try:
        outs, _ = follow(traced.core_jaxpr(core), dims, may_sum=False)
    except LostError:
        return False
    return outs == [0] * len(core.outs)


def _choose(config: Config, group: OwnedGroup) -> OwnedGroup | str:
    """Return `group` with the cores and devices per owner that take the least time, or why owners compute no core."""
    first, counts, shards = group.cores[0], group.counts, group.leaf.shards
    sizes = [item_of(where, group.size).bytes for _, where in (*first.arrays, *first.outs)]
    work, follows = _work(first, group.jaxpr)
    sharded = _seconds(work.divided / shards + work.repeated, 2 * (shards - 1) / shards * work.summed, work.sums)
    if not follows:  # the compiler gathers the matrix
        sharded = _seconds(work.flops, sum(sizes) * (shards - 1) / shards, 2)
    several = follows and len(group.leaf.axes) == 1
    best = None
    for within in (w for w in range(1, shards) if shards % w == 0 and (several or w == 1)):
        owners = shards // within
        if max(sizes) > LARGEST * within:
            continue
        for count in {len(counts), _even(counts, owners)} - {0}:
            items = sum(counts[:count])
            slots = -(-items // owners)
            sent = sum(sizes) * slots / within * ((owners - 1) / owners + (within > 1))
            sent += slots * 2 * (within - 1) / within * work.summed
            flops = slots * (work.divided / within + work.repeated)
            seconds = _seconds(flops, sent, 2 + (slots * work.sums if within > 1 else 0))
            total = seconds + sharded * (sum(counts) - items)
            if best is None or total < best[0]:
                several_cores = {"cores": group.cores[:count], "counts": counts[:count], "within": within}
                times = {"seconds": seconds, "seconds_sharded": sharded * items}
                best = total, dataclasses.replace(group, **several_cores, **times)
    if best is None:
        return f"a matrix of {max(sizes)} bytes is more than one device should take"
    if config.matrix_updates == "auto" and best[0] >= sharded * sum(counts):
        return "that is cheaper"
    return best[1]


def _work(core: Core, jaxpr: Any) -> tuple[Work, bool]:
    """Return the cost of one item of `core`, and whether its products can be divided along the sharded dim."""
    dims: list = [where.dim for _, where in core.arrays] + [None] * (len(core.small) + len(core.shared))
    try:
        return follow(jaxpr, dims, may_sum=True)[1], True
    except LostError:
        try:
            return follow(jaxpr, [None] * len(dims), may_sum=True)[1], False
        except LostError:
            return Work(), False


def _seconds(flops: float, sent: float, collectives: float) -> float:
    return flops / FLOPS + sent / LINK + collectives * LATENCY


def _even(counts: Sequence[int], owners: int) -> int:
    """Return the largest n for which the items of the first n cores can be divided evenly among the owners."""
    totals = [sum(counts[:n]) for n in range(len(counts) + 1)]
    return max(n for n, total in enumerate(totals) if total % owners == 0)


def _without_chains(traced: TracedUpdate, found: OwnedUpdate) -> OwnedUpdate:
    """Drop each group that reads results of another group, because all groups run at the same time."""
    inside, late = equations_after(traced.jaxpr, [core for group in found.groups for core in group.cores])
    made = {traced.positions[var] for e in inside | late for var in traced.jaxpr.eqns[e].outvars}
    chained = [g for g in found.groups if any(made.intersection(core.inputs) for core in g.cores)]
    reason = "its update reads what is computed of other matrices"
    left = {core.leaf: reason for group in chained for core in group.cores}
    return OwnedUpdate(tuple(group for group in found.groups if group not in chained), found.left | left)


class LostError(Exception):
    """The index of the dim is unknown, because an equation mixes the dim with other dims, or has no rule."""


@dataclasses.dataclass
class Work:
    """The cost of equations if one dim of their operands is sharded."""

    divided: float = 0.0  # FLOPs of products whose operands have the dim, of which each device computes a part
    repeated: float = 0.0  # FLOPs of all other products, which every device computes in full
    # bytes of results that are all-reduced because they are summed over the dim, and half of those that are gathered
    summed: float = 0.0
    sums: float = 0.0  # the number of all-reduces and gathers

    @property
    def flops(self) -> float:
        return self.divided + self.repeated

    def add(self, other: Work, times: float = 1) -> None:
        self.divided += times * other.divided
        self.repeated += times * other.repeated
        self.summed += times * other.summed
        self.sums += times * other.sums

    def sum(self, var: Any, share: float = 1) -> None:
        """Count a collective on `var` that sends `share` times the bytes of an all-reduce."""
        self.summed += share * jaxprs.nbytes(var)
        self.sums += 1


def follow(jaxpr: Any, dims: Sequence[int | None], *, may_sum: bool) -> tuple[list[int | None], Work]:
    """Return the index of one dim in each result of a jaxpr, given its index in each argument, and the cost.

    The index is None for a value without the dim. Raise a `LostError` if an index cannot be found, or if the dim is
    summed over and `may_sum` is false.
    """
    found, work, made = dict(zip(jaxpr.invars, dims, strict=True)), Work(), {}
    of = lambda atom: None if compat.is_literal(atom) else found.get(atom)
    for eqn in jaxpr.eqns:
        given = [of(atom) for atom in eqn.invars]
        found.update(zip(eqn.outvars, _through(eqn, given, may_sum, work, made), strict=True))
        made.update(dict.fromkeys(eqn.outvars, eqn))
    return [of(atom) for atom in jaxpr.outvars], work


def _through(eqn: Any, dims: list[int | None], may_sum: bool, work: Work, made: dict) -> list[int | None]:
    name, body = eqn.primitive.name, compat.inlined_body(eqn)
    if body is not None:
        return _inner(body, dims, may_sum, work)
    if (loop := compat.loop_of(eqn)) is not None:
        return _through_loop(eqn, loop, dims, may_sum, work)
    if name == "cond":
        return _through_cond(eqn, dims, may_sum, work)
    if name == "dot_general":
        return [_through_dot(eqn, dims, may_sum, work)]
    if jaxprs.facts(eqn).kind is Kind.DECOMPOSITION:
        return _through_decomposition(eqn, dims, work)
    if all(d is None for d in dims):
        if has_products(eqn):  # such as a while loop, whose length is unknown: count one iteration
            for inner in compat.inner_jaxprs(eqn):
                _inner(inner, [None] * len(inner.invars), may_sum, work)
        return [None] * len(eqn.outvars)
    return _moved(eqn, dims, may_sum, work, made)


def _inner(jaxpr: Any, dims: Sequence[int | None], may_sum: bool, work: Work, times: float = 1) -> list[int | None]:
    outs, inside = follow(jaxpr, dims, may_sum=may_sum)
    work.add(inside, times)
    return outs


def _through_loop(
    eqn: Any, loop: compat.LoopEqn, dims: list[int | None], may_sum: bool, work: Work
) -> list[int | None]:
    """Return the index of the dim in each result of a loop. The loop must not move it in a carry, or scan over it."""
    sliced = loop.consts + loop.carry
    if 0 in dims[sliced:]:
        raise LostError(eqn)
    inside = dims[:sliced] + [None if d is None else d - 1 for d in dims[sliced:]]
    body = compat.opened(loop.body)[0]
    outs = _inner(body, inside, may_sum, work, loop.length)
    if outs[: loop.carry] != dims[loop.consts : sliced]:
        raise LostError(eqn)
    return outs[: loop.carry] + [None if d is None else d + 1 for d in outs[loop.carry :]]


def _through_cond(eqn: Any, dims: list[int | None], may_sum: bool, work: Work) -> list[int | None]:
    """Return the index of the dim in each result of a cond. Branches must agree. Add the costliest branch to `work`."""
    found = [follow(compat.opened(branch)[0], dims[1:], may_sum=may_sum) for branch in eqn.params["branches"]]
    if any(outs != found[0][0] for outs, _ in found):
        raise LostError(eqn)
    work.add(max((inside for _, inside in found), key=lambda inside: inside.flops))
    return found[0][0]


def _through_dot(eqn: Any, dims: list[int | None], may_sum: bool, work: Work) -> int | None:
    """Return the index of the dim in the result of a `dot_general`, or None if the dim is contracted."""
    contracted, batch = eqn.params["dimension_numbers"]
    flops = float(costs.dot_flops(eqn))
    if dims == [None, None]:
        work.repeated += flops
        return None
    work.divided += flops
    pairs = [(pair, n, False) for n, pair in enumerate(zip(*batch, strict=True))]
    pairs += [(pair, n, True) for n, pair in enumerate(zip(*contracted, strict=True))]
    has = lambda pair: any(d is not None and d == int(of) for d, of in zip(dims, pair, strict=True))
    found = [one for one in pairs if has(one[0])]
    matched = len(found) == 1 and tuple(dims) == tuple(map(int, found[0][0]))
    if not may_sum and not (matched and not found[0][2]):
        raise LostError(eqn)
    if None not in dims and not matched:
        # The dim has another role in the second operand. Gathering this operand sends half the bytes of an all-reduce.
        work.sum(eqn.invars[1], 0.5)
        dims = [dims[0], None]
        found = [one for one in pairs if has(one[0])]
    for _, place, sums in found:
        if sums:
            work.sum(eqn.outvars[0])
        return None if sums else place
    free = free_dims(eqn)
    if dims[0] is not None:
        return len(batch[0]) + free[0].index(dims[0])
    assert dims[1] is not None
    return len(batch[0]) + len(free[0]) + free[1].index(dims[1])


def _through_decomposition(eqn: Any, dims: list[int | None], work: Work) -> list[int | None]:
    """Return the index of the dim in each result of a matrix decomposition. The dim must be a batch dim."""
    shape = eqn.invars[0].aval.shape
    *batch, m, n = shape if len(shape) > 1 else (1, *shape)
    if eqn.primitive.name == "triangular_solve":
        m, n = math.prod(eqn.invars[1].aval.shape[-2:]) // n, n
    flops = costs.DECOMPOSITION_FLOPS[eqn.primitive.name] * math.prod(batch) * max(m, n) * min(m, n) ** 2
    given = {d for d in dims if d is not None}
    if not given:
        work.repeated += flops
        return [None] * len(eqn.outvars)
    if len(given) > 1 or max(given) >= len(batch) or None in dims:
        raise LostError(eqn)
    work.divided += flops
    return [max(given)] * len(eqn.outvars)


def _moved(eqn: Any, dims: list[int | None], may_sum: bool, work: Work, made: dict) -> list[int | None]:
    """Return the index of the dim in each result of an equation without products, by the rules of `zerojax.dims`."""
    sizes = {atom.aval.shape[d] for atom, d in zip(eqn.invars, dims, strict=True) if d is not None}
    if len(sizes) > 1:
        raise LostError(eqn)
    count = sizes.pop()
    states = [NOWHERE if d is None else at(d) for d in dims]
    found = []
    for var, state in zip(eqn.outvars, Follower(count).through(eqn, states, Context(count, made)), strict=True):
        place = None if state is None else state.only
        if (
            state is None
            or len(state.places) > 1
            or (place and (place.outer > 1 or var.aval.shape[place.dim] != count))
        ):
            raise LostError(eqn)
        if place is None and not may_sum:
            raise LostError(eqn)
        if place is None:
            work.sum(var)
        found.append(None if place is None else place.dim)
    return found
