"""Check whether a compiled step keeps its stage's contract on memory, communication and FLOPs.

The most common failure in JAX is a "stage 3" that silently keeps gathered parameters, or gathers all parameters at
once. The next is a program in which the compiler moves activations between devices. `check` compares the compiled
program with a contract that follows only from the model. Each excess is a finding, which names leaves and lines.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from zerojax.comm.explicit import auto_context, to_auto, with_types
from zerojax.comm.quantised import Codec
from zerojax.config import Config, Wire
from zerojax.gpus.topology import absent_mesh_like
from zerojax.inspect.hlo import read
from zerojax.inspect.memory import memory_analysis
from zerojax.inspect.overlap import overlap
from zerojax.inspect.pieces import Piece, pieces
from zerojax.inspect.roofline import kernels, product_flops
from zerojax.planning.absent_program import check_planned, state_shapes
from zerojax.planning.contract import Checked, contract_of
from zerojax.planning.findings import (
    MIB,
    activation_findings,
    exchanged,
    flops_findings,
    memory_findings,
    overlap_findings,
    sum_findings,
    update_findings,
    volume_findings,
)
from zerojax.planning.named_meshes import MovedMeshes, in_force
from zerojax.planning.shapes import abstract
from zerojax.train.arguments import packed, place_batch
from zerojax.train.state import ZeroState
from zerojax.train.step import Step
from zerojax.zero import ZeroTransformation


@dataclasses.dataclass(frozen=True)
class Check:
    """A compiled step, compared with the contract of its stage.

    Attributes:
        stage: ZeRO stage.
        devices: Number of data-parallel workers.
        peak: Peak bytes per device: the sum of arguments, results and temporary memory.
        floor: Bytes per device that the contract allows: arguments, results, the temporary memory of plain jit with
            replicated parameters, and three times the largest layer of the model (a layer in use, a prefetched layer,
            and gradients), the gradients, and the update's memory if this exceeds the activations.
        gathered: Elements of parameters that are all-gathered, counted in full tensors.
        gathered_formula: The most elements that the stage may gather.
        reduced: Elements of gradients that are reduce-scattered or all-reduced, counted in full tensors.
        reduced_formula: The most elements that the stage may reduce.
        activations: Bytes of everything else that the loss moves along the data axes: activations that are gathered,
            summed, exchanged or shifted.
        activations_formula: Bytes of activations that plain jit moves with replicated parameters.
        update: Bytes that the compiler moves for the optimizer's update, without the exchanges between owners of
            matrices.
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

    def __str__(self) -> str:
        hidden = "no overlap on CPU: collectives are synchronous" if self.hidden is None else f"{self.hidden:.1%}"
        row = lambda name, compiled, contract: f"  {name:20} {compiled:>12}   {contract:>14}"
        mib, count, mflop = lambda n: f"{n / MIB:,.1f}", lambda n: f"{n:,d}", lambda n: f"{n / 1e6:,.1f}"
        flops = sum(self.flops.values())
        lines = [
            f"stage {self.stage}, {self.devices} devices     compiled         contract",
            row("peak, MiB/device", mib(self.peak), mib(self.floor)),
            row("gathered, elements", count(self.gathered), count(self.gathered_formula)),
            row("reduced, elements", count(self.reduced), count(self.reduced_formula)),
            row("activations, MiB", mib(self.activations), mib(self.activations_formula)),
            row("update moves, MiB", mib(self.update), ""),
            row("products, MFLOP", mflop(flops), mflop(self.flops_formula))
            + "   "
            + ", ".join(f"{kind} {flops / 1e6:,.1f}" for kind, flops in self.flops.items()),
            f"  hidden bytes       {hidden}",
        ]
        lines += [f"finding: {finding}" for finding in self.findings] or ["no findings"]
        return "\n".join(line.rstrip() for line in lines)


@auto_context()
def check(step: Step, state: ZeroState, batch: Any, *args: Any, topology: str | None = None) -> Check:
    """Compile a training step, and compare it with the contract of its stage.

    The contract includes microbatches, the optimizer's update, and the gathers after the update. With offloaded state,
    the program up to the gradients is checked. Nothing is run.

    The printed result has a table of the program's figures and of the contract's figures. Each finding says which
    leaves and lines of the model cause the excess, why, and what to change.

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
        ValueError: If the topology is unknown, the axes do not divide the batch, or the loss names mesh axes. Plain
            jit, with which the loss is compared, has no axes.
        ModuleNotFoundError: If `topology` is given and the extra `aot` is not installed.
    """
    if not isinstance(step, Step):
        raise TypeError(f"check takes (step, state, batch), with a step of tx.train_step, not {type(step).__name__}.")
    check_planned(step, state)
    config, accumulate = step.config, step.options.accumulate
    if topology is not None:
        mesh = absent_mesh_like(config.user_mesh, topology, axes=config.axis)
        config = dataclasses.replace(config, user_mesh=mesh)
    moved, shapes = step.under(config), state_shapes(ZeroTransformation.of(config), state)
    rows, given = to_auto(place_batch(config, abstract(batch), accumulate)), to_auto(with_types(packed(args)))
    with contextlib.nullcontext() if topology is None else in_force(MovedMeshes(step.config.mesh, config.mesh)):
        compiled = moved.lower(shapes, abstract(batch), *abstract(args)).compile()
        mutable = abstract(shapes.mutable)
        checked = Checked(config, shapes.plan, moved.program.loss, rows, abstract(given), accumulate, mutable)
        return check_program(compiled, checked)


def check_program(compiled: Any, checked: Checked) -> Check:
    config = checked.config
    memory, contract = memory_analysis(compiled), contract_of(checked)
    resident = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    peak, floor = resident + memory.temp_size_in_bytes, resident + contract.temporary
    module = read(compiled)
    hiding, flops = overlap(compiled), product_flops(kernels(module))
    found = [*along_data(pieces(module), config)]
    moved = exchanged(found, contract.reduced, contract.sizes)
    plain = exchanged(along_data(pieces(contract.plain), config), contract.gradients, contract.sizes)
    gathers = [piece for piece in found if piece.label == "gather"]
    reductions = [*(piece for piece in found if piece.label in ("reduce_scatter", "all_reduce")), *moved.completing]
    wire = config.wire
    gathered = _elements(gathers, wire and wire.gather, wire)
    reduced = _elements(reductions, wire and wire.reduce, wire)
    on_cpu = config.mesh.devices.flat[0].platform == "cpu"
    findings = [
        *memory_findings(peak, floor, contract, (piece for piece in found if piece.kind == "all-gather")),
        *volume_findings("gathered", gathered, contract.gathered, gathers),
        *volume_findings("reduced", reduced, contract.reduced, reductions),
        *activation_findings(config, moved, plain, contract),
        *sum_findings(moved, contract),
        *checked.loss.undivided,
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


def along_data(found: Iterable[Piece], config: Config) -> Iterator[Piece]:
    """Yield the pieces in `found` that move along data axes. The other pieces move only along the model's axes."""
    mesh, data = config.mesh, config.data.batch
    for piece in found:
        at = np.unravel_index(piece.collective.group, mesh.devices.shape)
        if any(name in data and len(set(where)) > 1 for name, where in zip(mesh.axis_names, at, strict=True)):
            yield piece


def _elements(which: Sequence[Piece], fmt: str | None, wire: Wire | None) -> int:
    """Return how many elements the pieces move. A quantised payload counts as the elements that it encodes."""
    moved = sum(piece.elements for piece in which)
    if wire is None or fmt is None:
        return moved
    narrow = sum(piece.elements for piece in which if piece.collective.dtype == "u8")
    return moved - narrow + narrow * wire.block // Codec(fmt, wire.block).bytes(wire.block)
