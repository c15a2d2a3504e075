"""Decide which cores have owners. A core is the part of an update that needs a full matrix.

With owners, cores with equal programs are stacked, and one owner (one or a few devices) computes each core. Without
owners, the compiler divides every product of a core among all devices. Each product then needs an all-reduce, and every
device repeats the products that cannot be divided, such as the square of a Gram matrix. The times of both ways are
estimated from the traced program, and the faster way is chosen. `Costs.follow` finds the index of the
sharded dim in every variable by the rules of `zerojax.dims`, and counts the FLOPs of divided and of repeated products.

References:
    Liu et al. 2025, arXiv 2502.16982, section 2.3: Muon that gathers each matrix on one of the devices.
    Ahn et al. 2025, arXiv 2504.05295: orthonormalised updates that compute each matrix on one device.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from zerojax import compat, jaxprs, signatures
from zerojax.config import Config
from zerojax.dims import NOWHERE, Context, Follower, on_dim
from zerojax.dims.moves import free_dims
from zerojax.optim.cores import CoreFinder, equations_after
from zerojax.optim.traced import Core, Given, OwnedCores, TracedUpdate, layouts_of_item, trace_update
from zerojax.optim.wrapped import FlatUpdate, TransformationError
from zerojax.primitives import Kind

# TF32 FLOPs per second and NVLink bytes per second of an H200, and the shortest time of a collective in seconds. Only
# their ratios matter, which differ little between GPUs. With fixed numbers, plans made on different devices agree.
FLOPS, LINK, LATENCY = 495e12, 450e9, 10e-6
# Bytes of the largest matrix that one device may update. The device then holds several arrays of this size.
LARGEST = 1 << 30
# A decomposition of an (m, n) matrix with m >= n takes this factor times m * n^2 FLOPs.
# Source: Golub and Van Loan 2013, sections 4.2 to 8.6.
DECOMPOSITION_FLOPS: Mapping[str, float] = {
    "cholesky": 1 / 3,
    "eig": 25.0,
    "eigh": 9.0,
    "geqrf": 2.0,
    "householder_product": 2.0,
    "lu": 1.0,
    "qr": 4.0,
    "schur": 25.0,
    "svd": 14.0,
    "triangular_solve": 1.0,
    "tridiagonal": 4 / 3,
}


class OwnedUpdate(NamedTuple):
    """The cores of an update that owners compute.

    For every other parameter whose update multiplies matrices, `left` has the reason why owners do not update it.
    """

    owned: tuple[OwnedCores, ...] = ()
    left: Mapping[int, str] = MappingProxyType({})


def owned_update(update: FlatUpdate, given: Given, traced: TracedUpdate, streamed: Collection[int] = ()) -> OwnedUpdate:
    """Find the cores that owners compute. With `matrix_updates="auto"`, owners compute a core only if that is faster.

    `traced` is the update of the `given` logical arrays. The `streamed` parameters have offloaded state, so owners
    compute a batch of them at a time; see `_batches`.
    """
    cores, left = CoreFinder(traced, *update.leaves).find()
    stacks = {i: core.arrays[0][1].shape[0] for i, core in cores.items() if _is_stack(core, traced)}
    sliced, size = _sliced(update, given, traced, [cores[i] for i in stacks])
    alike: dict[Any, list[Core]] = {}
    for i, core in cores.items():
        each = size if i in stacks else 0
        key = signatures.signature(core.jaxpr(sliced if each else traced))
        if key is None or not core.arrays:
            left[i] = "its update has effects, or reads nothing that is sharded"
        else:
            alike.setdefault((key, layouts_of_item(core, each), each, i in streamed), []).append(core)
    owned = []
    for (*_, each, is_streamed), members in alike.items():
        counts = tuple(stacks[core.leaf] // each if each else 1 for core in members)
        together = OwnedCores(tuple(members), counts, each, members[0].jaxpr(sliced if each else traced))
        for batch in _batches(update.config, together) if is_streamed else [together]:
            chosen, reason = _choose(update.config, batch)
            owned += [chosen] if chosen.cores else []
            left |= {core.leaf: reason for core in batch.cores[len(chosen.cores) :]}
    return _without_chains(traced, OwnedUpdate(tuple(owned), left))


def _batches(config: Config, whole: OwnedCores) -> list[OwnedCores]:
    """Divide cores into batches of at most one item and `chunk_bytes` per device; see `OwnedCores.counts` for items."""
    assert config.offload is not None
    batches: list[list[Core]] = []
    items = local_bytes = math.inf
    for core, count in zip(whole.cores, whole.counts, strict=True):
        size = sum(leaf.local_bytes for _, leaf in core.arrays)
        if items + count > whole.leaf.shards or local_bytes + size > config.offload.chunk_bytes:
            batches.append([])
            items = local_bytes = 0
        batches[-1].append(core)
        items, local_bytes = items + count, local_bytes + size
    return [whole.take(batch) for batch in batches]


def _sliced(update: FlatUpdate, given: Given, traced: TracedUpdate, stacks: Sequence[Core]) -> tuple[TracedUpdate, int]:
    """Trace the update on short stacks of matrices. Return the trace, and the number of matrices per stack.

    The number is 1 if stacks of one matrix give the same program as `traced`. Otherwise, it is the smallest common
    divisor above 1 of all stacks' lengths. If such stacks do not give the same program either, return `traced` and 0.
    """
    shapes = {core.leaf: update.leaves.grads[core.leaf].shape for core in stacks}
    common = math.gcd(*(shape[0] for shape in shapes.values()))
    for size in [1, *(n for n in range(2, common + 1) if common % n == 0)][: 2 if stacks else 0]:
        try:
            sliced = trace_update(update, given, {i: (size, *shape[1:]) for i, shape in shapes.items()})
        except TransformationError:  # a transformation may refuse a stack as short as this
            continue
        if _same_equations(traced, sliced, {n for core in stacks for n in core.shared}):
            return sliced, size
    return traced, 0


def _same_equations(a: TracedUpdate, b: TracedUpdate, shared: Collection[int]) -> bool:
    """Return whether two traces differ only in shapes. The shapes of their `shared` variables must be equal, too."""
    outline = lambda traced: [len(traced.reads), *((e.primitive.name, len(e.outvars)) for e in traced.jaxpr.eqns)]
    return outline(a) == outline(b) and all(a.variables[n].aval.shape == b.variables[n].aval.shape for n in shared)


def _is_stack(core: Core, traced: TracedUpdate) -> bool:
    """Return whether `core` updates each matrix of a stack separately, and dim 0 of the stack is not sharded."""
    leaves = [leaf for _, leaf in (*core.arrays, *core.outs)]
    is_stack = lambda leaf: len(leaf.shape) > 2 and leaf.dim != 0 and 1 < leaf.shape[0] == leaves[0].shape[0]
    if not core.arrays or core.small or core.small_outs or not all(map(is_stack, leaves)):
        return False
    found = Costs()
    try:
        outs = found.follow(core.jaxpr(traced), [0] * len(core.arrays) + [None] * len(core.shared))
    except LostError:
        return False
    return outs == [0] * len(core.outs) and not found.sums


def _choose(config: Config, whole: OwnedCores) -> tuple[OwnedCores, str]:
    """Choose how many cores owners compute, and with how many devices per owner, so that the update is fastest.

    Return the chosen first cores of `whole`, perhaps none, and the reason why the other cores have no owners.
    """
    first, counts, shards = whole.cores[0], whole.counts, whole.leaf.shards
    sizes = [leaf.bytes for leaves in layouts_of_item(first, whole.size) for leaf in leaves]
    work, follows = _costs_of(first, whole.jaxpr)
    sharded = _seconds(work.divided / shards + work.repeated, 2 * (shards - 1) / shards * work.summed, work.sums)
    if not follows:  # the compiler gathers the matrix
        sharded = _seconds(work.flops, sum(sizes) * (shards - 1) / shards, 2)
    several = follows and len(whole.leaf.axes) == 1
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
                some = whole.take(whole.cores[:count])
                times = {"seconds": seconds, "seconds_sharded": sharded * items}
                best = total, dataclasses.replace(some, within=within, **times)
    if best is None:
        return whole.take(()), f"a matrix of {max(sizes)} bytes is more than one device should take"
    if config.matrix_updates == "auto" and best[0] >= sharded * sum(counts):
        return whole.take(()), "that is cheaper"
    return best[1], "owners share the others evenly"


def _costs_of(core: Core, jaxpr: Any) -> "tuple[Costs, bool]":
    """Return the costs of one item of `core`, and whether the sharded dim can be followed through its equations."""
    dims: list = [where.dim for _, where in core.arrays] + [None] * (len(core.small) + len(core.shared))
    found, whole = Costs(), Costs()
    try:
        found.follow(jaxpr, dims)
    except LostError:
        whole.follow(jaxpr, [None] * len(dims))
        return whole, False
    return found, True


def _seconds(flops: float, sent: float, collectives: float) -> float:
    return flops / FLOPS + sent / LINK + collectives * LATENCY


def _even(counts: Sequence[int], owners: int) -> int:
    """Return the largest n for which the items of the first n cores can be divided evenly among the owners."""
    totals = [sum(counts[:n]) for n in range(len(counts) + 1)]
    return max(n for n, total in enumerate(totals) if total % owners == 0)


def _without_chains(traced: TracedUpdate, found: OwnedUpdate) -> OwnedUpdate:
    """Drop cores that read results of other cores, because owners compute all cores at the same time."""
    inside, late = equations_after(traced.jaxpr, [core for each in found.owned for core in each.cores])
    made = {traced.positions[var] for e in inside | late for var in traced.jaxpr.eqns[e].outvars}
    is_chained = lambda each: any(made.intersection(core.inputs) for core in each.cores)
    reason = "its update reads what is computed of other matrices"
    left = {core.leaf: reason for each in filter(is_chained, found.owned) for core in each.cores}
    return OwnedUpdate(tuple(each for each in found.owned if not is_chained(each)), {**found.left, **left})


class LostError(Exception):
    """The index of the sharded dim is unknown, because an equation mixes it with other dims, or no rule is known."""


@dataclasses.dataclass
class Costs:
    """The costs of equations if one dim of their operands is sharded. `follow` counts the costs.

    A `dims.Follower` alone cannot follow this dim, because the operands of a product may be sharded on different dims.
    """

    divided: float = 0.0  # FLOPs of products that each device computes in part, because an operand has the sharded dim
    repeated: float = 0.0  # FLOPs of all other products, which every device computes in full
    # bytes of results that are all-reduced because they are sums over the dim, plus half the bytes of gathered arrays
    summed: float = 0.0
    sums: float = 0.0  # the number of all-reduces and gathers

    @property
    def flops(self) -> float:
        return self.divided + self.repeated

    def add(self, other: "Costs", times: float = 1) -> None:
        self.divided += times * other.divided
        self.repeated += times * other.repeated
        self.summed += times * other.summed
        self.sums += times * other.sums

    def sum(self, var: Any, share: float = 1) -> None:
        """Count a collective on `var` that sends `share` times the bytes of an all-reduce."""
        self.summed += share * jaxprs.nbytes(var)
        self.sums += 1

    def follow(self, jaxpr: Any, dims: Sequence[int | None]) -> list[int | None]:
        """Return the index of the sharded dim in each result of a jaxpr, given its index in each argument.

        The index is None for a value without the dim. Raise a `LostError` if an index cannot be found.
        """
        through = functools.partial(self._through, jaxprs.makers(jaxpr.eqns))
        consts = [None] * len(compat.constvars_of(jaxpr))
        return jaxprs.evaluate(jaxpr, consts, dims, through, literal=lambda _: None)

    def _through(self, made: dict, eqn: Any, dims: list[int | None]) -> list[int | None]:
        name = eqn.primitive.name
        if (body := compat.inlined_body(eqn)) is not None:
            return self._inside(body, dims)
        if (loop := compat.loop_of(eqn)) is not None:
            return self._loop(loop, dims)
        if name == "while":
            return self._while(eqn, dims)
        if name == "cond":
            return self._cond(eqn, dims)
        if name == "dot_general":
            return [self._dot(eqn, *dims)]
        if jaxprs.facts(eqn).kind is Kind.DECOMPOSITION:
            return self._decomposition(eqn, dims)
        return self._moved(eqn, dims, made)

    def _inside(self, jaxpr: Any, dims: Sequence[int | None], times: float = 1) -> list[int | None]:
        inside = Costs()
        outs = inside.follow(jaxpr, dims)
        self.add(inside, times)
        return outs

    def _loop(self, loop: compat.LoopEqn, dims: list[int | None]) -> list[int | None]:
        """Follow the dim through a loop. Raise a `LostError` if the loop moves the dim in a carry, or scans over it."""
        sliced = loop.consts + loop.carry
        inside = dims[:sliced] + [None if d is None else d - 1 for d in dims[sliced:]]
        if -1 in inside:
            raise LostError(loop)
        outs = self._inside(compat.opened(loop.body)[0], inside, loop.length)
        if outs[: loop.carry] != dims[loop.consts : sliced]:
            raise LostError(loop)
        return outs[: loop.carry] + [None if d is None else d + 1 for d in outs[loop.carry :]]

    def _while(self, eqn: Any, dims: list[int | None]) -> list[int | None]:
        """Follow the dim through a while loop, like `_loop`. Count one iteration, because their number is unknown."""
        first, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        carry = dims[first + consts :]
        self._inside(compat.opened(eqn.params["cond_jaxpr"])[0], [*dims[:first], *carry])
        if self._inside(compat.opened(eqn.params["body_jaxpr"])[0], dims[first:]) != carry:
            raise LostError(eqn)
        return carry

    def _cond(self, eqn: Any, dims: list[int | None]) -> list[int | None]:
        """Follow the dim through branches, which must all move it to the same dim. Count the branch with most FLOPs."""
        branches = [(Costs(), compat.opened(branch)[0]) for branch in eqn.params["branches"]]
        found = [inside.follow(body, dims[1:]) for inside, body in branches]
        if any(outs != found[0] for outs in found):
            raise LostError(eqn)
        costliest = max((inside for inside, _ in branches), key=lambda inside: inside.flops)
        # But count the collectives of any branch, because `_is_stack` asks whether there is a collective at all.
        costliest.sums = max(inside.sums for inside, _ in branches)
        self.add(costliest)
        return found[0]

    def _dot(self, eqn: Any, lhs: int | None, rhs: int | None) -> int | None:
        """Return the index of the dim in the result of a `dot_general`, or None if the result does not have the dim."""
        (contracted, batch), free = eqn.params["dimension_numbers"], free_dims(eqn)
        if lhs is None and rhs is None:
            self.repeated += jaxprs.dot_flops(eqn)
            return None
        self.divided += jaxprs.dot_flops(eqn)
        pairs = [*zip(*batch, strict=True), *zip(*contracted, strict=True)]
        if lhs is not None and rhs is not None and (lhs, rhs) not in pairs:
            # The product does not pair the two dims. Gather the second operand: half the bytes of an all-reduce.
            self.sum(eqn.invars[1], 0.5)
            rhs = None
        place = next((n for n, (i, j) in enumerate(pairs) if lhs == i or rhs == j), None)
        if place is not None and place < len(batch[0]):
            return place
        if place is not None:
            self.sum(eqn.outvars[0])
            return None
        rows, columns = free
        if lhs is not None:
            return len(batch[0]) + rows.index(lhs)
        assert rhs is not None
        return len(batch[0]) + len(rows) + columns.index(rhs)

    def _decomposition(self, eqn: Any, dims: list[int | None]) -> list[int | None]:
        """Count a matrix decomposition. Return the index of the dim, which must be a batch dim, in each result."""
        shape = eqn.invars[0].aval.shape
        *batch, m, n = shape if len(shape) > 1 else (1, *shape)
        if eqn.primitive.name == "triangular_solve":
            m, n = math.prod(eqn.invars[1].aval.shape[-2:]) // n, n
        flops = DECOMPOSITION_FLOPS[eqn.primitive.name] * math.prod(batch) * max(m, n) * min(m, n) ** 2
        dim = dims[0]
        if any(d != dim for d in dims) or (dim is not None and dim >= len(batch)):
            raise LostError(eqn)
        if dim is None:
            self.repeated += flops
        else:
            self.divided += flops
        return [dim] * len(eqn.outvars)

    def _moved(self, eqn: Any, dims: list[int | None], made: dict) -> list[int | None]:
        """Follow the dim through an equation without products, by the rules of `zerojax.dims`."""
        sizes = {atom.aval.shape[d] for atom, d in zip(eqn.invars, dims, strict=True) if d is not None}
        if not sizes:
            for body in compat.inner_jaxprs(eqn):  # such as those of a linear solve
                self._inside(body, [None] * len(body.invars))
            return [None] * len(eqn.outvars)
        if len(sizes) > 1:
            raise LostError(eqn)
        count = sizes.pop()
        row_dims = [NOWHERE if d is None else on_dim(d) for d in dims]
        found = []
        for var, rows in zip(eqn.outvars, Follower(count).through(eqn, row_dims, Context(count, made)), strict=True):
            if rows is not None and not rows.places:
                self.sum(var)
                found.append(None)
                continue
            place = None if rows is None else rows.only
            if place is None or place.outer > 1 or var.aval.shape[place.dim] != count:
                raise LostError(eqn)
            found.append(place.dim)
        return found
