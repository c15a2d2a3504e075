"""Owner-computed updates: cores of one program are stacked, and each is computed by one device, once.

Otherwise the compiler divides every product of a core among all devices: it sums over them after each, and what
cannot be divided (the square of a Gram matrix) every device repeats. What is cheaper is decided by counting FLOPs
and bytes in the traced program.

References:
    Liu et al. 2025, arXiv 2502.16982, section 2.3: Muon with the matrices gathered on some devices.
    Ahn et al. 2025, arXiv 2504.05295: orthonormalised updates, each matrix by one device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from zerojax import compat, jaxprs
from zerojax.config import Config
from zerojax.layout.leaf import Leaf
from zerojax.optim.cores import Core, CoreFinder
from zerojax.optim.dims import LostError, Work, follow
from zerojax.optim.guarded import TransformationError
from zerojax.optim.traced import TracedUpdate

# An H200's TF32 products and NVLink, and what a collective takes at least. Their ratios decide, and differ little
# between GPUs; where nothing is known of the devices, these count.
FLOPS, LINK, LATENCY = 495e12, 450e9, 10e-6
# Bytes of a matrix that one device may take whole; it holds several of its size while it computes.
LARGEST = 1 << 30


@dataclasses.dataclass(frozen=True)
class OwnedGroup:
    """Cores of one program that are computed together.

    Attributes:
        cores: One a parameter.
        counts: How many items each is: one, or what a stack of matrices is divided into.
        size: Length of an item's dim 0 where the parameters are stacks of matrices, mostly 1; 0: they are not.
        jaxpr: The program of one item.
        within: How many devices compute one matrix.
        seconds: Estimated for all of them at peak rates, computed by owners.
        seconds_sharded: The same, each divided among all devices.
    """

    cores: tuple[Core, ...]
    counts: tuple[int, ...]
    size: int
    jaxpr: Any
    within: int
    seconds: float
    seconds_sharded: float

    @property
    def items(self) -> int:
        """Return the number of items."""
        return sum(self.counts)

    @property
    def leaf(self) -> Leaf:
        """Return the layout of the first array that is moved."""
        return self.cores[0].arrays[0][1]

    def item(self, leaf: Leaf) -> Leaf:
        """Return the layout of one item of an array."""
        return item_of(leaf, self.size)


class UpdatedLeaves(NamedTuple):
    """What an update reads and replaces.

    Attributes:
        grads: One `Leaf` a trained parameter, for its gradient and its update.
        state: One `Leaf` for each leaf of the state.
        owners: For each leaf of the state, the trained parameter it belongs to, or None.
    """

    grads: tuple[Leaf, ...]
    state: tuple[Leaf, ...]
    owners: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class OwnedUpdate:
    """Which cores of an update are computed by owners.

    Attributes:
        traced: The update.
        groups: The cores.
        left: Why other parameters whose matrices are multiplied are not among them.
    """

    traced: TracedUpdate
    groups: tuple[OwnedGroup, ...]
    left: dict[int, str]


def owned_update(
    config: Config, leaves: UpdatedLeaves, traced: TracedUpdate, retrace: Callable[[frozenset[int], int], TracedUpdate]
) -> OwnedUpdate:
    """Find what owners compute.

    Args:
        config: What is chosen: by cost, or always, or never.
        leaves: How they are sharded.
        traced: The update of logical arrays.
        retrace: The update with some parameters, and what is as long of their state, being the first of a stack's
            matrices alone, as many as it is told.
    """
    cores, left = CoreFinder(traced, *leaves).find()
    stacks = {i: core.arrays[0][1].shape[0] for i, core in cores.items() if _is_stack(core, traced)}
    sliced, size = _sliced(traced, retrace, stacks)
    stacks = stacks if size else {}
    alike: dict[Any, list[Core]] = {}
    for i, core in cores.items():
        jaxpr = core.jaxpr(sliced if i in stacks else traced)
        if i not in stacks and any(where.dim is None for _, where in core.arrays):
            continue
        key = jaxprs.signature(jaxpr)
        layouts = tuple(item_of(where, size if i in stacks else 0) for _, where in (*core.arrays, *core.outs))
        if key is None or not core.arrays:
            left[i] = "its update has effects, or reads nothing that is sharded"
        else:
            alike.setdefault((key, layouts), []).append(core)
    groups = []
    for members in alike.values():
        of_stacks = size if members[0].leaf in stacks else 0
        counts = tuple(stacks[core.leaf] // size if of_stacks else 1 for core in members)
        jaxpr = members[0].jaxpr(sliced if of_stacks else traced)
        chosen = _choose(config, OwnedGroup(tuple(members), counts, of_stacks, jaxpr, 1, 0.0, 0.0))
        taken = {core.leaf for core in chosen.cores} if isinstance(chosen, OwnedGroup) else set()
        if isinstance(chosen, OwnedGroup):
            groups.append(chosen)
        reason = chosen if isinstance(chosen, str) else "owners share the others evenly"
        left |= {core.leaf: reason for core in members if core.leaf not in taken}
    return _without_chains(OwnedUpdate(traced, tuple(groups), left))


def _sliced(traced: TracedUpdate, retrace: Callable, stacks: dict[int, int]) -> tuple[TracedUpdate, int]:
    """Return the same program on a few matrices of each stack, and their number, or 0 if there is no such program.

    One alone may make another program: `jax.numpy` takes batches of one apart.
    """
    common = math.gcd(*stacks.values())
    for size in [1, *(n for n in range(2, common + 1) if common % n == 0)][: 2 if stacks else 0]:
        try:
            sliced = retrace(frozenset(stacks), size)
        except TransformationError:  # a transformation may take no stack as short as this
            continue
        if sliced.structure == traced.structure:
            return sliced, size
    return traced, 0


def item_of(leaf: Leaf, size: int) -> Leaf:
    """Return the layout of one item; see `OwnedGroup.size`."""
    shape = (size, *leaf.shape[1:]) if size else leaf.shape
    return dataclasses.replace(leaf, path="", reason="", shape=shape)


def _is_stack(core: Core, traced: TracedUpdate) -> bool:
    """Return whether a core is a batch of matrices over dim 0, and dim 0 is not the sharded dim."""
    arrays = (*core.arrays, *core.outs)
    count = arrays[0][1].shape[0]
    if any(len(where.shape) < 3 or where.shape[0] != count or where.dim == 0 for _, where in arrays) or count == 1:
        return False
    if core.small or core.small_outs:
        return False
    dims: list = [0] * len(core.arrays) + [None] * len(core.shared)
    try:
        outs, _ = follow(core.jaxpr(traced), dims, may_sum=False)
    except LostError:
        return False
    return outs == [0] * len(core.outs)


def _choose(config: Config, group: OwnedGroup) -> OwnedGroup | str:
    """Return the cheapest way to compute cores of one program, perhaps only some of them, or why owners do not."""
    first, counts, shards = group.cores[0], group.counts, group.leaf.shards
    sizes = [group.item(where).bytes for _, where in (*first.arrays, *first.outs)]
    work, follows = _work(first, group.jaxpr)
    sharded = _seconds(work.divided / shards + work.repeated, 2 * (shards - 1) / shards * work.summed, work.sums)
    if not follows:  # the compiler gathers it
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
    """Return the cost of one matrix, and whether its products can be divided along the sharded dim."""
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
    """Return how many leaves, counted from the first, the owners share evenly; 0 if none."""
    totals = [sum(counts[:n]) for n in range(len(counts) + 1)]
    return max(n for n, total in enumerate(totals) if total % owners == 0)


def _without_chains(found: OwnedUpdate) -> OwnedUpdate:
    """Drop groups that read what another group computes, because all groups are computed at once."""
    made: set = set()
    variables = found.traced.variables
    cores = [core for group in found.groups for core in group.cores]
    inside = {e for core in cores for e in core.eqns}
    for e, eqn in enumerate(found.traced.jaxpr.eqns):
        if e in inside or any(not compat.is_literal(v) and v in made for v in eqn.invars):
            made.update(eqn.outvars)
    reads = lambda core: (*(n for n, _ in core.arrays), *core.small, *core.shared)
    chained = [g for g in found.groups if any(variables[n] in made for core in g.cores for n in reads(core))]
    reason = "its update reads what is computed of other matrices"
    left = {core.leaf: reason for group in chained for core in group.cores}
    groups = tuple(group for group in found.groups if group not in chained)
    return dataclasses.replace(found, groups=groups, left=found.left | left)
