"""Check whether a compiled step keeps its stage's contract on memory, communication and FLOPs.

The most common failure in JAX is a "stage 3" that silently keeps gathered parameters, or gathers all parameters at
once. The second most common is a program in which the compiler moves activations between devices. `check` compares the
compiled program with limits computed from the model alone (contract.py). Each excess is a finding.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from zerojax.comm.mesh import auto_context, to_auto, with_types
from zerojax.comm.owners import EXCHANGE
from zerojax.comm.partial_sums import ROWS_UNKNOWN
from zerojax.comm.quantised import Codec
from zerojax.config import Config
from zerojax.config.wire import Wire
from zerojax.inspect.compiled_collectives import FREE, CollectivePiece, CompiledCollectives, pieces
from zerojax.inspect.hlo import Module, memory_analysis, peak_bytes, read
from zerojax.inspect.roofline import kernels, overlap, product_flops
from zerojax.planning.absent_program import abstract, kernels_for, lowered, moved_to
from zerojax.planning.contract import Contract, contract_of
from zerojax.train.arguments import packed, place_batch
from zerojax.train.state import ZeroState
from zerojax.train.step import Step
from zerojax.units import format_bytes, format_flops

MOST_CAUSES = 5
# Tolerances of the contract: an excess within them is not a finding.
MEMORY_SLACK, VOLUME_SLACK, FLOPS_SLACK, LEAST_HIDDEN = 1.10, 1.02, 1.02, 0.95
MOST_SHARES = 2  # a device may compute this many times its share: products of weights have no rows
REDUCTIONS = ("all-reduce", "reduce-scatter")
# Likely reasons why the compiler added a collective, by kind. Collectives of zerojax have labels that say the reason.
WHY = {
    "all-gather": "the operation that reads the array takes all rows, or divides a dim that does not hold the rows",
    "all-reduce": "the array is a sum over a dim that the compiler divides, so each device has a partial sum",
    "reduce-scatter": "the array is a sum over a dim that the compiler divides, and each device needs a part of it",
    "all-to-all": "the compiler exchanges rows: one operation divides another dim than the next",
    "ragged-all-to-all": "the compiler exchanges rows between devices, as many as each device needs",
    "collective-permute": "rows are shifted between devices: an array is sliced, padded or reshaped along rows",
    "collective-broadcast": "one device has the array, and all devices need it",
}
IN_GLOBAL_VIEW = (
    "Keep the rows of the batch in one dim of each array there, without picking or reordering them, or, if the loss is "
    'a mean over rows, pass view="device" to zero_shard'
)
USED_ONCE = "Each use moves a leaf again: use it in one layer, or join its uses in one zerojax.block"
IN_DEVICE_VIEW = (
    "In device view only the loss function itself can ask for this: look for a collective or a constraint there"
)


@dataclasses.dataclass(frozen=True)
class Check:
    """A compiled step, compared with the contract of its stage.

    Attributes:
        stage: ZeRO stage.
        devices: Number of data-parallel workers.
        peak: Peak bytes per device: the sum of arguments, results and temporary memory.
        floor: Bytes per device that the contract allows: the program's arguments and results, the gradients, and the
            memory of the backward pass or of the update, whichever is larger. The backward pass may take the temporary
            memory of plain jit with replicated parameters, and 3 x the largest layer (in use, prefetched, gradients).
        gathered: Elements of parameters that are all-gathered, counted in full tensors.
        gathered_formula: The limit of the contract on `gathered`.
        reduced: Elements of gradients that are reduce-scattered or all-reduced, counted in full tensors.
        reduced_formula: The limit of the contract on `reduced`.
        activations: Bytes of all other arrays that the loss moves along the data axes, such as activations that are
            gathered, summed, exchanged or shifted.
        activations_formula: Bytes of activations that plain jit moves with replicated parameters.
        update: Bytes that the compiler moves for the optimizer's update. Exchanges between owners are not included.
        flops: FLOPs of a device's matrix products, by the type of the operands.
        flops_formula: FLOPs of plain jit's matrix products, of all types.
        hidden: Share of the collectives' bytes that overlap with matrix products. None on CPU, where nothing overlaps.
        findings: One sentence per excess, with leaves and lines of the model.
    """

    stage: int
    devices: int
    peak: int
    floor: int
    gathered: int
    gathered_formula: int
    reduced: int
    reduced_formula: int
    activations: int
    activations_formula: int
    update: int
    flops: dict[str, int]
    flops_formula: int
    hidden: float | None
    findings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def verdict(self) -> str:
        """Return one sentence: whether the program keeps the contract, or the first finding, with a remedy."""
        if self.findings:
            return f"not as stage {self.stage} should be: {self.findings[0]}"
        hidden = "" if self.hidden is None else f"; {self.hidden:.0%} of the communication is hidden"
        return f"as stage {self.stage} should be: {format_bytes(self.peak)} per device{hidden}"

    def __str__(self) -> str:
        """Return the verdict, a table with the program's figures and the contract's, and all other findings."""
        row = lambda name, compiled, contract="": f"  {name:24s}{compiled:>14s}{contract:>14s}"
        size, count, flops = format_bytes, "{:,d}".format, sum(self.flops.values())
        by_type = ", ".join(f"{kind} {format_flops(flops)}" for kind, flops in self.flops.items())
        lines = [
            self.verdict,
            f"{f'{self.devices} devices':26s}{'compiled':>14s}{'contract':>14s}",
            row("peak of a device", size(self.peak), size(self.floor)),
            row("elements gathered", count(self.gathered), count(self.gathered_formula)),
            row("elements reduced", count(self.reduced), count(self.reduced_formula)),
            row("activations moved", size(self.activations), size(self.activations_formula)),
            row("moved for the update", size(self.update)),
            row("matrix products", format_flops(flops), format_flops(self.flops_formula)) + f"   {by_type}",
            row("communication hidden", "none on CPU" if self.hidden is None else f"{self.hidden:.1%}"),
        ]
        return "\n".join([*lines, *(f"also: {finding}" for finding in self.findings[1:])])


@auto_context()
def check(step: Step, state: ZeroState, batch: Any, *args: Any, topology: str | None = None) -> Check:
    """Compile a training step, and compare it with the contract of its stage.

    The contract includes microbatches, the optimizer's update, and the gathers after the update. With offloaded state,
    the program up to the gradients is checked. Nothing is run.

    The printed result begins with a verdict, followed by a table of the program's figures and the contract's. Each
    finding says which leaves and lines of the model cause the excess, why, and what to change.

    Args:
        step: A step of `tx.train_step`.
        state: Its state; shapes are enough.
        batch: The global batch; shapes are enough.
        *args: Further arguments of the loss.
        topology: GPUs to compile for, such as `"h200:8"` or `"h100:8x8"`, which this machine need not have. This needs
            the extra `aot`. Default: the devices in the mesh of the step.

    Returns:
        A `Check`. Its `ok` says whether the program keeps the contract.

    Raises:
        TypeError: If `step` is not a step, or `state` is not a `ZeroState`.
        NotImplementedError: If the parameters are on disk.
        ValueError: If the topology is unknown, the axes do not divide the batch, or the loss names a mesh axis. The
            contract is computed from the loss under plain jit, which has no mesh axes.
        ModuleNotFoundError: If `topology` is given and the extra `aot` is not installed.
    """
    if not isinstance(step, Step):
        raise TypeError(f"check takes (step, state, batch), with a step of tx.train_step, not {type(step).__name__}.")
    config, shapes = moved_to(topology, step, state)
    moved, placed = step.under(config), place_batch(config, abstract(batch), step.options.accumulate)
    rows, given = to_auto(placed), to_auto(with_types(packed(args)))
    with kernels_for(config.mesh):
        compiled = lowered(moved.trace(shapes, abstract(batch), *abstract(args)), config.mesh).compile()
        return check_program(compiled, moved, shapes, rows, abstract(given))


def check_program(compiled: Any, step: Step, state: ZeroState, rows: Any, args: tuple) -> Check:
    config = step.config
    peak, contract = peak_bytes(compiled), contract_of(step, state, rows, args)
    floor = peak - memory_analysis(compiled).temp_size_in_bytes + contract.temporary
    module = read(compiled)
    hiding, flops = overlap(module), product_flops(kernels(module))
    found = [*along_data(pieces(module), config)]
    moved = exchanged(found, contract.reduced, contract.sizes)
    plain = exchanged(along_data(pieces(contract.plain), config), contract.gradients, contract.sizes)
    gathers = [piece for piece in found if piece.label == "gather"]
    reductions = [*(piece for piece in found if piece.label in ("reduce_scatter", "all_reduce")), *moved.completing]
    wire = config.wire
    gathered = _elements_moved(gathers, wire and wire.gather, wire)
    reduced = _elements_moved(reductions, wire and wire.reduce, wire)
    on_cpu = config.mesh.devices.flat[0].platform == "cpu"
    findings = [
        *memory_findings(peak, floor, contract, (piece for piece in found if piece.kind == "all-gather")),
        *volume_findings("gathered", gathered, contract.gathered, gathers),
        *volume_findings("reduced", reduced, contract.reduced, reductions),
        *activation_findings(config, moved, plain, contract),
        *sum_findings(moved, contract),
        *step.program.loss.undivided,
        *update_findings(moved, contract),
        *flops_findings(sum(flops.values()), contract),
        *([] if on_cpu else overlap_findings(hiding, module)),
    ]
    return Check(
        stage=config.stage,
        devices=config.data.workers,
        peak=peak,
        floor=floor,
        gathered=gathered,
        gathered_formula=contract.gathered,
        reduced=reduced,
        reduced_formula=contract.reduced,
        activations=moved.bytes,
        activations_formula=contract.times * plain.bytes,
        update=moved.of_update,
        flops=flops,
        flops_formula=contract.flops,
        hidden=None if on_cpu else hiding.hidden_share,
        findings=tuple(findings),
    )


def along_data(found: Iterable[CollectivePiece], config: Config) -> Iterator[CollectivePiece]:
    """Yield the pieces in `found` that move along data axes. The other pieces move only along the model's axes."""
    mesh, data = config.mesh, config.data.batch
    for piece in found:
        at = np.unravel_index(piece.collective.group, mesh.devices.shape)
        if any(name in data and len(set(where)) > 1 for name, where in zip(mesh.axis_names, at, strict=True)):
            yield piece


def _elements_moved(which: Sequence[CollectivePiece], fmt: str | None, wire: Wire | None) -> int:
    """Return how many elements the pieces `which` move. A quantised payload counts as the elements that it encodes."""
    moved = sum(piece.elements for piece in which)
    if wire is None or fmt is None:
        return moved
    narrow = sum(piece.elements for piece in which if piece.collective.dtype == "u8")
    return moved - narrow + narrow * wire.block // Codec(fmt, wire.block).bytes(wire.block)


@dataclasses.dataclass(frozen=True)
class Exchanged:
    """The collectives that the compiler added to a program."""

    pieces: tuple[tuple[CollectivePiece, int], ...]  # each with its bytes; mostly activations
    completing: tuple[CollectivePiece, ...]  # sums of gradients over the devices

    @property
    def bytes(self) -> int:
        return sum(size for piece, size in self.pieces if not piece.is_of_update)

    @property
    def of_update(self) -> int:
        return sum(size for piece, size in self.pieces if piece.is_of_update)


def exchanged(found: Iterable[CollectivePiece], gradients: int, sizes: frozenset[int]) -> Exchanged:
    """Separate the collectives that the compiler added into sums of gradients and everything else.

    Collectives of zerojax have labels, and are left out. The program does not say which other sums are of gradients. A
    sum outside of the forward pass counts as a gradient's if its number of elements is in `sizes`. As XLA may also join
    small gradients in one sum, further sums count until all reductions together have `gradients` elements.
    """
    others, sums, completing, lacking = [], [], [], gradients
    for piece in found:
        if piece.label:
            lacking -= piece.elements if piece.label != "gather" else 0
        elif piece.is_free:
            continue
        elif piece.kind in REDUCTIONS and not piece.is_of_update:
            sums.append(piece)
        elif EXCHANGE not in piece.op_name:
            others.append((piece, piece.bytes))
    is_gradient = lambda piece: piece.once in sizes and ("transpose(" in piece.op_name or "jvp(" not in piece.op_name)
    for piece in sorted(sums, key=is_gradient, reverse=True):
        share = piece.elements if is_gradient(piece) else min(piece.elements, max(lacking, 0))
        lacking -= share
        if share:
            completing.append(piece)
        if piece.elements > share:
            others.append((piece, piece.bytes * (piece.elements - share) // piece.elements))
    return Exchanged(tuple(others), tuple(completing))


def activation_findings(config: Config, moved: Exchanged, plain: Exchanged, contract: Contract) -> list[str]:
    """Find activations that plain jit does not move, by collective and line of the model."""
    over = moved.bytes - contract.times * plain.bytes
    if over <= _slack(contract) + (VOLUME_SLACK - 1) * contract.times * plain.bytes:
        return []
    ours, theirs = _by_line(moved, 1), _by_line(plain, contract.times)
    beyond = sorted(((size - theirs[key], key) for key, size in ours.items() if size > theirs[key]), reverse=True)
    remedy = IN_GLOBAL_VIEW if config.view == "global" else IN_DEVICE_VIEW
    return [
        f"{format_bytes(size)} of activations are moved beyond plain jit's, {_what(moved, kind, line)} "
        f"at {line}: {WHY[kind]}. {remedy}."
        for size, (kind, line) in beyond[:MOST_CAUSES]
        if size > 0.01 * over
    ]


def sum_findings(moved: Exchanged, contract: Contract) -> list[str]:
    """Find gradients that the compiler all-reduces although the stage shards these gradients."""
    summed = [piece for piece in moved.completing if piece.kind == "all-reduce"]
    over = sum(piece.elements for piece in summed) - contract.replicated
    if not contract.is_even or over <= (VOLUME_SLACK - 1) * contract.reduced + FREE * len(moved.completing):
        return []
    most = _most((piece.line, piece.bytes) for piece in summed)
    if any(ROWS_UNKNOWN in piece.op_name for piece in moved.completing):
        why = "zerojax could not follow the rows of the batch to the product, and left the sum to the compiler"
    else:
        why = "The compiler summed over the rows before zerojax could divide the sum"
    return [
        f"{over:,d} elements of gradients are all-reduced by the compiler at their product, although each device keeps "
        f"a shard: twice the bytes of a reduce-scatter. Most: {most}. {why}. {IN_GLOBAL_VIEW}."
    ]


def update_findings(moved: Exchanged, contract: Contract) -> Iterator[str]:
    operation = lambda piece: f"{piece.kind} of {piece.op_name.rpartition('/')[2]}"
    if not contract.update and moved.of_update > _slack(contract):
        most = _most((operation(piece), size) for piece, size in moved.pieces if piece.is_of_update)
        yield (
            f"{format_bytes(moved.of_update)} are moved for the optimizer's update, which is computed shard by shard: "
            f"{most}. An operation of the update joins elements of several devices. "
            "print(state.plan) lists the replicated leaves."
        )


def memory_findings(peak: int, floor: int, contract: Contract, gathers: Iterable[CollectivePiece]) -> list[str]:
    slack, program = (MEMORY_SLACK - 1) * floor, contract.program
    found = [str(one) for one in program.whole if one.bytes - (one.layers > 1) * one.bytes // one.layers > slack]
    if peak - floor > slack:
        gathered = "" if found else causes_of(gathers)
        causes = f". Gathered: {gathered}. {USED_ONCE}" if gathered else ""
        kept = ", the shards and three layers" if program.layer else " and what the stage keeps"
        found.insert(0, f"a device needs {format_bytes(peak - floor)} beyond plain jit's activations{kept}{causes}")
    return found


def flops_findings(flops: int, contract: Contract) -> Iterator[str]:
    if flops > FLOPS_SLACK * contract.flops:
        yield f"{(flops - contract.flops) / 1e6:,.1f} MFLOP of products are computed beyond plain jit's"
    if contract.share is not None and min(flops, contract.flops) > MOST_SHARES * contract.share:
        yield (
            f"each device computes {format_flops(flops)} of products, and its share is {format_flops(contract.share)}: "
            "the compiler does not divide the rows of all products, under plain jit, too, because it cannot tell which "
            f"dim holds them. {IN_GLOBAL_VIEW}."
        )


def volume_findings(verb: str, elements: int, formula: int, which: Sequence[CollectivePiece]) -> Iterator[str]:
    if elements > VOLUME_SLACK * formula + FREE * len(which):  # scalars, such as norms, weights and counts, are free
        most = causes_of(which)
        yield f"{elements - formula:,d} elements are {verb} beyond the contract. Most: {most}. {USED_ONCE}."


def overlap_findings(moved: CompiledCollectives, module: Module) -> Iterator[str]:
    if moved.hidden_share < LEAST_HIDDEN:
        exposed = causes_of(pieces(module, moved.exposed))
        yield (
            f"only {moved.hidden_share:.1%} of collective bytes hide behind products. Exposed: {exposed}. Try a larger "
            "prefetch= or bucket_bytes= of Tuning. Nothing hides collectives of activations, or of a single layer."
        )


def causes_of(which: Iterable[CollectivePiece]) -> str:
    return _most((piece.cause, piece.bytes) for piece in which)


def _most(sizes: Iterable[tuple[str, int]]) -> str:
    total: Counter[str] = Counter()
    for name, size in sizes:
        total[name] += size
    most = total.most_common(MOST_CAUSES)
    return "; ".join(f"{name} ({format_bytes(size)})" for name, size in most if 100 * size > total.total())


def _slack(contract: Contract) -> float:
    """Return a tolerance in bytes, which is a small share of the communication that the stage needs."""
    return (VOLUME_SLACK - 1) * 4 * (contract.gathered + contract.reduced)


def _by_line(moved: Exchanged, times: int) -> Counter[tuple[str, str]]:
    sizes: Counter[tuple[str, str]] = Counter()
    for piece, size in moved.pieces:
        if not piece.is_of_update:
            sizes[piece.kind, piece.line] += times * size
    return sizes


def _what(moved: Exchanged, kind: str, line: str) -> str:
    """Describe the largest collective of `kind` at `line`: its largest array, and the dim of an all-gather."""
    found = (piece for piece, _ in moved.pieces if piece.kind == kind and piece.line == line)
    c = max(found, key=lambda piece: piece.bytes).collective
    array = max(c.arrays, key=lambda array: array.bytes)
    along = f" along dim {c.dim}" if kind == "all-gather" and c.dim is not None and len(c.arrays) == 1 else ""
    article = "an" if kind.startswith("a") else "a"
    return f"{article} {kind} of {array.dtype}[{','.join(map(str, array.shape))}]{along}"
