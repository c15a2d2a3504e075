"""Describe the size, leaf or line, and cause of each excess over a contract, and the change that removes the excess."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

from zerojax.comm.partial_sums import ROWS_UNKNOWN
from zerojax.config import Config
from zerojax.inspect.collectives import CompiledCollectives
from zerojax.inspect.hlo import Module
from zerojax.inspect.pieces import FREE, Piece, pieces
from zerojax.planning.contract import Contract

MIB = 2**20
MOST_CAUSES = 5
# Tolerances of the contract: an excess within them is not a finding.
MEMORY_SLACK, VOLUME_SLACK, FLOPS_SLACK, LEAST_HIDDEN = 1.10, 1.02, 1.02, 0.95
REDUCTIONS = ("all-reduce", "reduce-scatter")
# Likely reasons why the compiler added a collective, by kind. (Collectives of zerojax have labels.)
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
IN_DEVICE_VIEW = (
    "In device view only the loss function itself can ask for this: look for a collective or a constraint there"
)


@dataclasses.dataclass(frozen=True)
class Exchanged:
    """The collectives that the compiler added to a program."""

    pieces: tuple[tuple[Piece, int], ...]  # with bytes; mostly activations
    completed: int  # gradient elements that `completing` all-reduces
    completing: tuple[Piece, ...]  # the sums that complete gradients

    @property
    def bytes(self) -> int:
        return sum(size for piece, size in self.pieces if not piece.is_of_update)

    @property
    def of_update(self) -> int:
        return sum(size for piece, size in self.pieces if piece.is_of_update)


def exchanged(found: Iterable[Piece], gradients: int, sizes: frozenset[int]) -> Exchanged:
    """Divide the pieces that the compiler added, which have no label, into sums of gradients and everything else.

    The program does not say which sums are of gradients. A sum in the backward pass with as many elements as a gradient
    counts as a gradient. The compiler also joins small arrays into one sum, so other sums count as gradients until all
    elements of gradients are found.
    """
    others, sums, completing, lacking = [], [], [], gradients
    for piece in found:
        if piece.label:
            lacking -= piece.elements if piece.label != "gather" else 0
        elif piece.is_free:
            continue
        elif piece.kind in REDUCTIONS and not piece.is_of_update:
            sums.append(piece)
        elif not piece.is_exchange:
            others.append((piece, piece.bytes))
    is_gradient = lambda piece: piece.once in sizes and ("transpose(" in piece.op_name or "jvp(" not in piece.op_name)
    for piece in sorted(sums, key=is_gradient, reverse=True):
        share = piece.elements if is_gradient(piece) else min(piece.elements, max(lacking, 0))
        lacking -= share
        if share:
            completing.append(piece)
        if piece.elements > share:
            others.append((piece, piece.bytes * (piece.elements - share) // piece.elements))
    completed = sum(piece.elements for piece in completing if piece.kind == "all-reduce")
    return Exchanged(tuple(others), completed, tuple(completing))


def activation_findings(config: Config, moved: Exchanged, plain: Exchanged, contract: Contract) -> list[str]:
    """Find activations that plain jit does not move, by collective and line of the model."""
    over = moved.bytes - contract.times * plain.bytes
    if over <= _slack(contract) + (VOLUME_SLACK - 1) * contract.times * plain.bytes:
        return []
    ours, theirs = _by_line(moved, 1), _by_line(plain, contract.times)
    beyond = sorted(((size - theirs[key], key) for key, size in ours.items() if size > theirs[key]), reverse=True)
    remedy = IN_GLOBAL_VIEW if config.view == "global" else IN_DEVICE_VIEW
    return [
        f"{size / MIB:,.1f} MiB of activations are moved beyond plain jit's, {_what(moved, kind, line)} "
        f"at {line}: {WHY[kind]}. {remedy}."
        for size, (kind, line) in beyond[:MOST_CAUSES]
        if size > 0.01 * over
    ]


def sum_findings(moved: Exchanged, contract: Contract) -> list[str]:
    """Find gradients that the compiler all-reduces although the stage shards these gradients."""
    over = moved.completed - contract.replicated
    if not contract.is_even or over <= (VOLUME_SLACK - 1) * contract.reduced + FREE * len(moved.completing):
        return []
    most = _most((piece.line, piece.bytes) for piece in moved.completing if piece.kind == "all-reduce")
    if any(ROWS_UNKNOWN in piece.op_name for piece in moved.completing):
        why = "zerojax could not follow the rows of the batch to the product, and left the sum to the compiler"
    else:
        why = "The compiler summed over the rows before zerojax could divide the sum"
    return [
        f"{over:,d} elements of gradients are all-reduced by the compiler at their product, although each device keeps "
        f"a shard: twice the bytes of a reduce-scatter. Most: {most}. {why}. {IN_GLOBAL_VIEW}."
    ]


def update_findings(moved: Exchanged, contract: Contract) -> list[str]:
    """Find bytes that the compiler moves for an update that should move nothing."""
    if contract.update or moved.of_update <= _slack(contract):
        return []
    operation = lambda piece: f"{piece.kind} of {piece.op_name.rpartition('/')[2]}"
    most = _most((operation(piece), size) for piece, size in moved.pieces if piece.is_of_update)
    return [
        f"{moved.of_update / MIB:,.1f} MiB are moved for the optimizer's update, which is computed shard by shard: "
        f"{most}. An operation of the update joins elements of several devices. "
        "print(state.plan) lists the replicated leaves."
    ]


def memory_findings(peak: int, floor: int, contract: Contract, gathers: Iterable[Piece]) -> list[str]:
    """Find memory beyond the floor, and parameters that are gathered whole."""
    slack, over, program = (MEMORY_SLACK - 1) * floor, (peak - floor) / MIB, contract.program
    found = [str(one) for one in program.whole if one.bytes - (one.layers > 1) * one.bytes // one.layers > slack]
    if peak - floor > slack:
        gathered = "" if found else causes_of(gathers)
        causes = f". Gathered: {gathered}" if gathered else ""
        kept = ", the shards and three layers" if program.layer else " and what the stage keeps"
        found.insert(0, f"a device needs {over:,.1f} MiB beyond plain jit's activations{kept}{causes}")
    return found


def flops_findings(flops: int, contract: Contract) -> list[str]:
    """Describe the excess if the program has more FLOPs of matrix products than plain jit."""
    formula = contract.flops
    if flops <= FLOPS_SLACK * formula:
        return []
    return [f"{(flops - formula) / 1e6:,.1f} MFLOP of products are computed beyond plain jit's"]


def volume_findings(verb: str, elements: int, formula: int, which: Sequence[Piece]) -> list[str]:
    if elements <= VOLUME_SLACK * formula + FREE * len(which):  # scalars, such as norms, weights and counts, are free
        return []
    return [f"{elements - formula:,d} elements are {verb} beyond the contract. Most: {causes_of(which)}"]


def overlap_findings(moved: CompiledCollectives, module: Module) -> list[str]:
    if moved.hidden_share >= LEAST_HIDDEN:
        return []
    exposed = pieces(module, moved.exposed)
    return [f"only {moved.hidden_share:.1%} of collective bytes hide behind products. Exposed: {causes_of(exposed)}"]


def causes_of(which: Iterable[Piece]) -> str:
    return _most((piece.cause, piece.bytes) for piece in which)


def _most(sizes: Iterable[tuple[str, int]]) -> str:
    total: Counter[str] = Counter()
    for name, size in sizes:
        total[name] += size
    return "; ".join(f"{name} ({size / MIB:,.1f} MiB)" for name, size in total.most_common(MOST_CAUSES))


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
    """Describe the array of the largest collective of `kind` at `line`, and the dim along which it is gathered."""
    found = (piece for piece, _ in moved.pieces if piece.kind == kind and piece.line == line)
    c = max(found, key=lambda piece: piece.bytes).collective
    array = max(c.arrays, key=lambda array: array.bytes)
    along = f" along dim {c.dim}" if kind == "all-gather" and c.dim is not None and len(c.arrays) == 1 else ""
    article = "an" if kind.startswith("a") else "a"
    return f"{article} {kind} of {array.dtype}[{','.join(map(str, array.shape))}]{along}"
