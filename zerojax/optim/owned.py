"""Decide which cores owners compute. Cores with equal programs are stacked, and an owner computes each core once.

Without owners, the compiler divides every product of a core among all devices. Then each product needs an all-reduce,
and every device repeats the products that cannot be divided, such as the square of a Gram matrix. The time with owners
and the time without owners are estimated from the FLOPs and bytes in the traced program. The faster way is chosen.

References:
    Liu et al. 2025, arXiv 2502.16982, section 2.3: Muon that gathers each matrix on one of the devices.
    Ahn et al. 2025, arXiv 2504.05295: orthonormalised updates that compute each matrix on one device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from zerojax import jaxprs
from zerojax.config import Config
from zerojax.optim.cores import CoreFinder
from zerojax.optim.dims import LostError, Work, follow
from zerojax.optim.flat_update import UpdatedLeaves
from zerojax.optim.owned_group import Core, OwnedGroup, equations_after, item_of
from zerojax.optim.traced import TracedUpdate
from zerojax.optim.transformation import TransformationError

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
        key = jaxprs.signature(program(core))
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
