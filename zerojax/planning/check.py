"""Check a stage's contract on the compiled gradient: memory, elements moved, and overlap.

A "stage 3" that silently keeps the gathered parameters, or gathers them all at once, is the
commonest failure in JAX. Here the compiled program is compared with the contract, which is of
the model and not of the program, and what exceeds it is traced back to leaves and to lines.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.comm.collectives import LABEL
from zerojax.comm.explicit import auto_context, to_auto
from zerojax.comm.quantised import Codec
from zerojax.comm.wire import Encoding
from zerojax.config import Config, Wire
from zerojax.gather import WorkingSet
from zerojax.gpus.topology import absent_mesh_like
from zerojax.inspect.collectives import Collective, Collectives, cause_of, collectives
from zerojax.inspect.hlo import read
from zerojax.inspect.memory import memory_analysis
from zerojax.inspect.overlap import Overlap, overlap
from zerojax.inspect.roofline import kernels, product_flops
from zerojax.layout.leaf import Leaf
from zerojax.layout.tree import Layout, layout_of
from zerojax.placement.storage import padded_forms
from zerojax.planning.activations import plain_gradient, program_of
from zerojax.planning.shapes import logical_shapes, shape_of
from zerojax.train.arguments import packed
from zerojax.train.batch import place_batch
from zerojax.train.loss import Loss
from zerojax.train.tree_api import value_and_grad_tree
from zerojax.zero import ZeroTransformation

MIB = 2**20
MOST_CAUSES = 5
# Tolerances of the contract: what is within them is no finding.
MEMORY_SLACK, VOLUME_SLACK, FLOPS_SLACK, LEAST_HIDDEN = 1.10, 1.02, 1.02, 0.95


@dataclasses.dataclass(frozen=True)
class Check:
    """A compiled gradient beside the contract of its stage.

    Attributes:
        stage: ZeRO stage.
        devices: Data-parallel workers.
        peak: Bytes per device: arguments, results and temporary memory.
        floor: The same with the temporary memory of plain jit on replicated parameters,
            which gathers nothing, and three times the largest layer of the model: one in use,
            one prefetched, and its gradients.
        gathered: Elements all-gathered, full tensors.
        gathered_formula: Elements that the stage gathers at most.
        reduced: Elements reduce-scattered or all-reduced, full tensors.
        reduced_formula: Elements that the stage reduces at most.
        flops: FLOPs of a device's matrix products, by the type of the operands.
        flops_formula: FLOPs of plain jit's, in all.
        hidden: Share of the collective bytes hidden by matrix products; None on CPU, whose
            collectives are synchronous.
        findings: What exceeds the contract, with leaves and lines of the model.
    """

    stage: int
    devices: int
    peak: int
    floor: int
    gathered: int
    gathered_formula: int
    reduced: int
    reduced_formula: int
    flops: dict[str, int]
    flops_formula: int
    hidden: float | None
    findings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the contract is kept."""
        return not self.findings

    def __str__(self) -> str:
        """A table, then the findings."""
        hidden = "no overlap on CPU: collectives are synchronous" if self.hidden is None else f"{self.hidden:.1%}"
        lines = [
            f"stage {self.stage}, {self.devices} devices     compiled         contract",
            f"  peak, MiB/device   {self.peak / MIB:14,.1f}   {self.floor / MIB:14,.1f}",
            f"  gathered, elements {self.gathered:14,d}   {self.gathered_formula:14,d}",
            f"  reduced, elements  {self.reduced:14,d}   {self.reduced_formula:14,d}",
            f"  products, MFLOP    {sum(self.flops.values()) / 1e6:14,.1f}   {self.flops_formula / 1e6:14,.1f}   "
            + ", ".join(f"{kind} {flops / 1e6:,.1f}" for kind, flops in self.flops.items()),
            f"  hidden bytes       {hidden}",
        ]
        lines += [f"finding: {finding}" for finding in self.findings] or ["no findings"]
        return "\n".join(lines)


@auto_context()
def check(
    tx: ZeroTransformation,
    loss_fn: Callable,
    params: Any,
    batch: Any,
    *args: Any,
    topology: str | None = None,
    has_aux: bool = False,
    weighted: bool = False,
) -> Check:
    """Compile the gradient of a loss and compare it with the contract of its stage.

    Nothing is run. Printed, the result says peak memory beside its floor, elements moved
    beside the formula, FLOPs beside plain jit's and by type, the share of communication hidden by
    matrix products, and for each finding the leaves and the lines of the model that cause it,
    why, and what to change.

    Args:
        tx: From `zero_shard`.
        loss_fn: As for `value_and_grad`.
        params: Parameters in any form; shapes are enough.
        batch: The global batch; shapes are enough.
        *args: Further arguments of the loss.
        topology: Absent GPUs to compile for, as `"h200:8"` or `"h100:8x8"`; needs the
            extra `aot`. Default: the mesh of `tx`.
        has_aux: As for `value_and_grad`.
        weighted: As for `value_and_grad`.

    Returns:
        A `Check`; its `ok` says whether the contract is kept.

    Raises:
        ValueError: If the topology is unknown, the axes do not divide the batch, or the loss names
            them: it is compared with plain jit, which has none.
        ModuleNotFoundError: If `topology` is given and the extra `aot` is not installed.
    """
    shapes = to_auto(logical_shapes(params, keep_shardings=topology is None))
    axes, mesh = tx.config.axis, tx.config.mesh
    mesh = mesh if topology is None else absent_mesh_like(mesh, topology, axes=axes)
    config = dataclasses.replace(tx.config, user_mesh=mesh)
    stored = ZeroTransformation.of(config).shard(shapes)
    loss = Loss(loss_fn, has_aux, weighted)
    rows = place_batch(config, jax.tree.map(shape_of, batch))
    return check_program(config, layout_of(config, shapes), loss, stored, rows, to_auto(packed(args)))


def check_program(config: Config, layout: Layout, loss: Loss, params: Any, batch: Any, args: tuple) -> Check:
    """Compile the gradient of a loss on a mesh and compare it with the contract of its stage.

    Args:
        config: Stage and mesh; of real or absent devices.
        layout: Layout of the parameters.
        loss: The loss function.
        params: Parameters in storage; shapes with shardings are enough.
        batch: The batch; shapes with shardings are enough.
        args: Further arguments of the loss.
    """
    forms = padded_forms(params)

    def gradient(params, batch, *args):
        return value_and_grad_tree(config, loss, params, None, batch, *args, layout=layout, forms=forms)

    compiled = jax.jit(gradient).lower(params, batch, *args).compile()
    memory = memory_analysis(compiled)
    resident = memory.argument_size_in_bytes + memory.output_size_in_bytes
    try:
        plain = plain_gradient(layout, loss, batch, args, mesh=config.mesh)
    except NameError as error:
        raise ValueError(
            "The loss function names a mesh axis, as in lax.pmean, and plain jit, with which check compares it, has "
            "none. Check it without that collective."
        ) from error
    listed, hiding, program = collectives(compiled), overlap(compiled), program_of(config, layout, loss, batch, args)
    gathers = listed.of("all-gather")
    reductions = Collectives(c for c in listed if c.kind in ("reduce-scatter", "all-reduce") or _is_quantised(c))
    peak = resident + memory.temp_size_in_bytes
    floor = resident + memory_analysis(plain).temp_size_in_bytes + 3 * program.layer
    flops, formula = (product_flops(kernels(read(one))) for one in (compiled, plain))
    flops_formula = sum(formula.values())
    is_float = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.inexact)
    sizes = {leaf.path: program.repeats.get(i, 1) * leaf.size for i, leaf in enumerate(layout.params)}
    sharded = [leaf for leaf in layout.params if is_float(leaf) and leaf.dim is not None]
    wire = config.wire
    gathered = _elements(gathers, wire and wire.gather, wire)
    reduced = _elements(reductions, wire and wire.reduce, wire)
    gathered_formula = (2 if config.reshard_after_forward else 1) * sum(sizes[leaf.path] for leaf in sharded)
    trained = layout.trained_only()
    # In hybrid sharding each shard is reduced across, too.
    again = lambda leaf: (leaf.kind != "replicated" and not set(config.data.batch) <= set(leaf.axes)) / leaf.shards
    pairs = zip(trained.params, trained.grads, strict=True)
    parts = [(param, grad if param.dim is None else param) for param, grad in pairs if is_float(param)]
    reduced_formula = sum(int(sizes[param.path] * (_hops(config, leaf) + again(leaf))) for param, leaf in parts)
    on_cpu = config.mesh.devices.flat[0].platform == "cpu"
    findings = [
        *_memory_findings(peak, floor, program, sharded, gathers),
        *_volume_findings("gathered", gathered, gathered_formula, gathers),
        *_volume_findings("reduced", reduced, reduced_formula, reductions),
        *_flops_findings(sum(flops.values()), flops_formula, program),
        *([] if on_cpu else _overlap_findings(hiding)),
    ]
    return Check(
        stage=config.stage,
        devices=config.data.workers,
        peak=peak,
        floor=floor,
        gathered=gathered,
        gathered_formula=gathered_formula,
        reduced=reduced,
        reduced_formula=reduced_formula,
        flops=flops,
        flops_formula=flops_formula,
        hidden=None if on_cpu else hiding.hidden_share,
        findings=tuple(findings),
    )


def _is_quantised(collective: Collective) -> bool:
    """Whether it is a hop of a reduction of quantised gradients."""
    found = LABEL.search(collective.op_name)
    return collective.kind == "all-to-all" and found is not None and found[1] == "reduce_scatter"


def _elements(which: Collectives, fmt: str | None, wire: Wire | None) -> int:
    """Elements that collectives move; bytes of quantised ones are counted as the elements they stand for."""
    moved = which.moved(unknown_once=True).elements
    if wire is None or fmt is None:
        return moved
    narrow = Collectives(c for c in which if c.dtype == "u8").moved(unknown_once=True).elements
    return moved - narrow + narrow * wire.block // Codec(fmt, wire.block).bytes(wire.block)


def _hops(config: Config, leaf: Leaf) -> float:
    """How often an element of a gradient is reduced: one that is quantised axis by axis, each time among those left."""
    if Encoding(wire=config.wire).reduce_codec(leaf) is None:
        return 1
    return sum(1 / config.data.size(leaf.axes[k + 1 :]) for k in range(len(leaf.axes)))


def _memory_findings(
    peak: int, floor: int, program: WorkingSet, sharded: Sequence[Leaf], gathers: Collectives
) -> list[str]:
    if not sharded:
        return []
    slack, over = (MEMORY_SLACK - 1) * floor, (peak - floor) / MIB
    found = [str(one) for one in program.whole if one.bytes - (one.layers > 1) * one.bytes // one.layers > slack]
    if peak - floor > slack:
        causes = "" if found else f". Gathered: {_causes(gathers)}"
        found.insert(
            0, f"a device needs {over:,.1f} MiB beyond plain jit's activations, the shards and three layers{causes}"
        )
    return found


def _flops_findings(flops: int, formula: int, program: WorkingSet) -> list[str]:
    if flops <= FLOPS_SLACK * formula:
        return []
    why = "" if not program.recomputed else f". Products of parameters alone: {'; '.join(program.recomputed)}"
    return [f"{(flops - formula) / 1e6:,.1f} MFLOP of products are computed beyond plain jit's{why}"]


def _volume_findings(verb: str, elements: int, formula: int, which: Collectives) -> list[str]:
    if elements <= VOLUME_SLACK * formula + 64 * len(which):  # norms, weights and counts are scalars, and free
        return []
    return [f"{elements - formula:,d} elements are {verb} beyond the contract. Most: {_causes(which)}"]


def _overlap_findings(hiding: Overlap) -> list[str]:
    if not hiding.in_flight or hiding.hidden_share >= LEAST_HIDDEN:
        return []
    exposed = [f.collective for f in hiding.exposed]
    return [f"only {hiding.hidden_share:.1%} of collective bytes hide behind products. Exposed: {_causes(exposed)}"]


def _causes(which: Sequence[Collective]) -> str:
    """The leaves and lines that cause some collectives, most bytes first."""
    sizes: Counter[str] = Counter()
    for c in which:
        sizes[cause_of(c)] += c.bytes * c.times_if_once
    return "; ".join(f"{name} ({size / MIB:,.1f} MiB)" for name, size in sizes.most_common(MOST_CAUSES))
