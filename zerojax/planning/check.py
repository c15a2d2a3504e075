"""Check a step's contract on its compiled program: memory, bytes moved, and overlap.

"Stage 3" that silently keeps the gathered parameters, or gathers them all at once, is the
commonest failure in JAX. Here the program says what it does, and what falls short is
traced back to leaves and to lines of the model.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from zerojax.config import Config
from zerojax.gpus.topology import absent_mesh
from zerojax.inspect.collectives import Collective, Collectives, collectives
from zerojax.inspect.overlap import Overlap, overlap
from zerojax.layout.leaf import Leaf
from zerojax.layout.padded import is_padded
from zerojax.layout.tree import Layout, layout_of
from zerojax.placement.storage import padded_forms
from zerojax.planning.activations import memory_of, plain_gradient
from zerojax.train.batch import place_batch
from zerojax.train.loss import Loss
from zerojax.train.tree_api import value_and_grad_tree
from zerojax.zero import ZeroTransformation

MIB = 2**20
MOST_CAUSES = 5
LABEL = re.compile(r"zerojax_(?:gather|reduce_scatter)\[(.*?)\][/)]")
# What the figures may exceed the contract by before it counts as a finding.
MEMORY_SLACK, VOLUME_SLACK, HIDDEN_LEAST = 1.10, 1.02, 0.95


@dataclasses.dataclass(frozen=True)
class Check:
    """What a compiled gradient program does, beside what its stage promises.

    Attributes:
        stage: ZeRO stage.
        devices: Size of the mesh axis.
        peak: Bytes a device needs: arguments, results and temporary memory.
        floor: The same with the temporary memory of plain jit on whole parameters, which
            gathers nothing, and three times the largest gather: a layer in use, one
            ahead, and its gradients.
        gathered: Elements all-gathered, full tensors.
        gathered_formula: Elements that the stage gathers at most.
        reduced: Elements reduce-scattered or all-reduced, full tensors.
        reduced_formula: Elements that the stage reduces at most.
        hidden: Share of the collective bytes with a matrix product in flight; None on CPU,
            whose collectives are synchronous.
        findings: What falls short, in words, with leaves and lines of the model.
    """

    stage: int
    devices: int
    peak: int
    floor: int
    gathered: int
    gathered_formula: int
    reduced: int
    reduced_formula: int
    hidden: float | None
    findings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing falls short."""
        return not self.findings

    def __str__(self) -> str:
        """A table, then the findings."""
        hidden = "no overlap on CPU: collectives are synchronous" if self.hidden is None else f"{self.hidden:.1%}"
        lines = [
            f"stage {self.stage}, {self.devices} devices        found         contract",
            f"  peak, MiB/device   {self.peak / MIB:14,.1f}   {self.floor / MIB:14,.1f}",
            f"  gathered, elements {self.gathered:14,d}   {self.gathered_formula:14,d}",
            f"  reduced, elements  {self.reduced:14,d}   {self.reduced_formula:14,d}",
            f"  hidden bytes       {hidden}",
        ]
        lines += [f"falls short: {finding}" for finding in self.findings] or ["nothing falls short"]
        return "\n".join(lines)


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
    """Compile the gradient of a loss and hold it against its stage's contract.

    Nothing is run. Printed, the result says peak memory beside its floor, elements moved
    beside the formula, the share of communication hidden behind matrix products, and for
    what falls short the leaves and the lines of the model that cause it.

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
        A `Check`; its `ok` says whether nothing falls short.

    Raises:
        ValueError: If the topology is unknown, or the axis does not divide the batch.
        ModuleNotFoundError: If `topology` is given and the extra `aot` is not installed.
    """
    shapes = as_shapes(params, keep_shardings=topology is None)
    if topology is not None:
        tx = ZeroTransformation.of(dataclasses.replace(tx.config, mesh=absent_mesh(topology, axes=tx.config.axis)))
    stored = tx.shard(shapes)
    loss = Loss(loss_fn, has_aux, weighted)
    rows = place_batch(tx.config, jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), batch))
    return check_program(tx.config, layout_of(tx.config, shapes), loss, stored, rows, args)


def check_program(config: Config, layout: Layout, loss: Loss, params: Any, batch: Any, args: tuple) -> Check:
    """Compile the gradient of a loss and hold it against its stage's contract.

    Args:
        config: Stage and mesh; of real or absent devices.
        layout: Layout of the parameters.
        loss: The loss function.
        params: Parameters in storage; shapes with shardings are enough.
        batch: The batch, laid out; shapes with shardings are enough.
        args: Further arguments of the loss.

    Returns:
        The figures and what falls short.
    """
    forms = padded_forms(params)

    def gradient(params, batch, *args):
        return value_and_grad_tree(config, loss, params, batch, *args, layout=layout, forms=forms)

    compiled = jax.jit(gradient).lower(params, batch, *args).compile()
    memory = memory_of(compiled)
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes
    found, flights = collectives(compiled), overlap(compiled)
    plain = memory_of(plain_gradient(layout, loss, batch, args, mesh=config.mesh))
    layer = max((c.bytes for c in found.of("all-gather")), default=0)
    peak = kept + memory.temp_size_in_bytes
    floor = kept + plain.temp_size_in_bytes + 3 * layer
    is_float = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.inexact)
    cut = [leaf for leaf in layout.params if is_float(leaf) and leaf.dim is not None]
    gathered = found.moved("all-gather", unknown_once=True).elements
    reduced = found.moved("reduce-scatter", "all-reduce", unknown_once=True).elements
    gathered_formula = (2 if config.reshard_after_forward else 1) * sum(leaf.size for leaf in cut)
    reduced_formula = sum(leaf.size for leaf in layout.trained_only().params if is_float(leaf))
    on_cpu = config.mesh.devices.flat[0].platform == "cpu"
    findings = [
        *_memory_findings(peak, floor, cut, found),
        *_volume_findings("gathered", gathered, gathered_formula, found.of("all-gather")),
        *_volume_findings("reduced", reduced, reduced_formula, found.of("reduce-scatter", "all-reduce")),
        *([] if on_cpu else _overlap_findings(flights)),
    ]
    hidden = None if on_cpu else flights.hidden_share
    return Check(
        config.stage,
        config.data.workers,
        peak,
        floor,
        gathered,
        gathered_formula,
        reduced,
        reduced_formula,
        hidden,
        tuple(findings),
    )


def _memory_findings(peak: int, floor: int, cut: Sequence[Leaf], found: Collectives) -> list[str]:
    if peak <= MEMORY_SLACK * floor or not cut:
        return []
    over = (peak - floor) / MIB
    causes = _causes(found.of("all-gather"))
    return [f"a device needs {over:,.1f} MiB more than plain jit's activations and the shards. Gathered: {causes}"]


def _volume_findings(verb: str, found: int, formula: int, which: Collectives) -> list[str]:
    if found <= VOLUME_SLACK * formula + 64 * len(which):  # norms, weights and counts are scalars, and free
        return []
    return [f"{found - formula:,d} elements are {verb} beyond the contract. Most: {_causes(which)}"]


def _overlap_findings(flights: Overlap) -> list[str]:
    if not flights.flights or flights.hidden_share >= HIDDEN_LEAST:
        return []
    exposed = [flight.collective for flight in flights.exposed]
    return [f"only {flights.hidden_share:.1%} of collective bytes hide behind products. Exposed: {_causes(exposed)}"]


def _causes(which: Sequence[Collective]) -> str:
    """The leaves and lines behind some collectives, those that move most first."""
    moved: Counter[str] = Counter()
    for c in which:
        moved[_cause(c)] += c.bytes * c.times_if_once
    return "; ".join(f"{name} ({size / MIB:,.1f} MiB)" for name, size in moved.most_common(MOST_CAUSES))


def _cause(c: Collective) -> str:
    if label := LABEL.search(c.op_name):
        return label.group(1).replace("\\", "")
    own = [frame for frame in c.frames if not re.search(r"site-packages|/zerojax/|<frozen|runpy", frame)]
    return own[0] if own else c.op_name or c.name


def as_shapes(params: Any, *, keep_shardings: bool) -> Any:
    """Logical shapes of parameters in any form; their shardings say which other axes divide them."""

    def shape(x):
        sharding = getattr(x.storage if is_padded(x) else x, "sharding", None)
        kept = sharding if keep_shardings and isinstance(sharding, NamedSharding) and not is_padded(x) else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=kept)

    return jax.tree.map(shape, params, is_leaf=is_padded)
