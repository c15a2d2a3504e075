"""`plan`: a training step, or any jitted function, compiled for absent GPUs; and `plan.fit`, which chooses one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import optax

from zerojax.comm.explicit import auto_context
from zerojax.config import STAGES, Config, Offload, check_count
from zerojax.gpus.devices import USABLE, Device
from zerojax.gpus.topology import Topology, absent_mesh
from zerojax.inspect.memory import peak_bytes
from zerojax.planning.absent_program import AbsentProgram, program_of_function, program_of_step
from zerojax.planning.activations import PlainGradient
from zerojax.planning.candidates import Candidate, SearchSpace
from zerojax.planning.compiled_plan import Plan
from zerojax.planning.fit import Fit, search
from zerojax.planning.largest_batch import largest_that_fits
from zerojax.planning.options import FitOptions, split_options
from zerojax.planning.read_plan import read_plan
from zerojax.planning.shapes import logical_shapes, rows_of, with_rows
from zerojax.train.loss import Loss
from zerojax.train.step import Step
from zerojax.zero import ZeroTransformation

MOST_DEVICES = 1024
OFFLOADS = (None, Offload(optimizer="host"))  # what `plan.fit` chooses from unless told
UNEVEN_ROWS = (
    "{} is searched in rows, but the leaves of this batch have different numbers of them on dim 0, or none. Pass "
    "values that belong to no row as further arguments, after the batch."
)


class Planner:
    """The function `plan`, an object so that `plan.fit` can be beside it."""

    def __call__(
        self,
        step: Any,
        state: Any,
        batch: Any,
        *args: Any,
        topology: str = "h200:8",
        memory: float | None = None,
        link: float | None = None,
        network: float | None = None,
        largest_batch: bool = False,
    ) -> Plan:
        """Compile a step for absent GPUs and read off what it would do there; nothing is run.

        This plan is about memory and time. How arrays are sharded is a `ShardingPlan`, in `ZeroState.plan`.

        Args:
            step: Of `tx.train_step`, on any mesh; or a jitted function `f(state, batch,
                *args)`, whose arguments keep their `PartitionSpec`s. Of several mesh axes
                those that shard the batch's rows grow or shrink to the GPUs.
            state: The state, or its shapes; of a `ZeroState` the parameters count, which the
                step's transformation shards anew for the GPUs, with its optimizer state.
            batch: The global batch, of as many rows in each leaf unless `step` is a function; shapes
                are enough.
            *args: Further arguments; shapes are enough.
            topology: The GPUs: `"h200:8"`, `"h100:64"` or `"h100:8x8"` (eight hosts of
                eight), `"a100-80:16"`, `"b200:8"`.
            memory: Bytes of a device that the program may take. Default: 95% of its memory.
            link: Bytes per second that a GPU sends within its host. Default: NVLink's.
            network: Bytes per second that a GPU sends to other hosts. Default: its adapter's.
            largest_batch: Whether to search for the largest batch that fits, which takes four
                to eight more compilations.

        Returns:
            The plan; print it for tables.

        Raises:
            TypeError: If `step` cannot be lowered, or a step of zerojax is given no `ZeroState`.
            ValueError: If the topology is unknown, a mesh does not fit it, the devices do not
                divide the batch, its leaves differ in rows where they must not (a step's, and with
                `largest_batch`), or a speed is not above 0.
            ModuleNotFoundError: If the extra `aot` is not installed.
        """
        device = Device.of(Topology.parse(topology), link=link, network=network)
        rows = rows_of(batch)
        if largest_batch and not rows:
            raise ValueError(UNEVEN_ROWS.format("The largest batch"))
        program_of = program_of_step if isinstance(step, Step) else program_of_function
        program = program_of(step, state, batch, args, topology)
        compiled = program.compile(batch)
        usable = USABLE * device.memory if memory is None else memory
        largest = largest_rows(program, batch, rows, peak_bytes(compiled), usable) if largest_batch and rows else None
        return read_plan(compiled, topology, device, program.facts, batch=rows, usable=usable, largest_batch=largest)

    @auto_context()
    def fit(
        self,
        tx: optax.GradientTransformation,
        loss_fn: Callable | Mapping[str, Callable],
        params: Any,
        batch: Any,
        *args: Any,
        gpu: str = "h200",
        devices: int | str | None = 8,
        stages: int | Sequence[int] = tuple(STAGES),
        offload: Offload | Sequence[Offload | None] | None = OFFLOADS,
        **options: Unpack[FitOptions],
    ) -> Fit:
        """Find the stage, loss, offload and batch that fit at least cost per row, or the fewest GPUs for a model.

        Candidates are estimated first: the plain gradient of each loss is compiled for one GPU
        and each number of rows. They are ordered by estimated seconds per row; costs within 2%
        are equal, and then no offload, a low stage, shards over all devices, an early loss and a small batch
        come first.
        Those whose estimate exceeds the memory by more than a quarter are rejected; of the
        others the first whose compiled step fits is chosen.


        Args:
            tx: Any optax transformation; or one of `zero_shard`, whose precision and
                thresholds are kept and whose stage, mesh and offload are replaced.
            loss_fn: As for `train_step`; or several by name that compute the same, such as
                `{"plain": loss, "remat": loss_with_remat_in_each_layer}`. `jax.checkpoint`
                around the entire loss saves nothing: all it recomputes is live at once.
            params: Parameters in any form; shapes are enough.
            batch: A batch of any number of rows, the same in each leaf; shapes are enough.
            *args: Further arguments of the loss; shapes are enough.
            gpu: Kind of GPU, as in a topology: `"h200"`.
            devices: Number of GPUs; None searches for the fewest: 1, 2, 4, 8 and so on. Or a topology, such as
                `"h200:8x8"`, in place of `gpu` too: then `shard_axis` and `params_axis` within its hosts are chosen
                from as well, and replace those of `tx`.
            stages: ZeRO stages to choose from, one or several.
            offload: Offloads to choose from, one or several; None is no offload, the only one at
                stage 0. The compiled plan counts parameters in host memory as the device's.
            **options: `rows` of the global batch, one number or several; those not divisible by the devices are
                ignored. By default one per device, doubled as long as a row gets 2% cheaper by it and something fits.
                As for a plan: `memory`, `link`, `network`; `host_link`, bytes per second each way between a GPU and
                its host (default: PCIe's); as for `train_step`: `has_aux`, `weighted`.

        Returns:
            The choice, its compiled plan, and everything tried; print it for a table.

        Raises:
            ValueError: If nothing fits, the GPU is unknown, an option is out of range, no loss is
                given, or the leaves of the batch have different numbers of rows.
            TypeError: If a number of rows or of devices is no integer, or an option is unknown.
            ModuleNotFoundError: If the extra `aot` is not installed.
        """
        named = loss_fn if isinstance(loss_fn, Mapping) else {"loss": loss_fn}
        losses = {str(name): loss for name, loss in named.items()}
        if not losses:
            raise ValueError("loss_fn names no loss. Give one, or several by name.")
        hosts = None
        if isinstance(devices, str) and ":" in devices:
            parsed = Topology.parse(devices)
            gpu, hosts, devices = parsed.kind, parsed.hosts, parsed.size
        if devices is not None:
            check_count("devices", devices, "GPUs", least=1)
        if not rows_of(batch):
            raise ValueError(UNEVEN_ROWS.format("The cheapest batch"))
        loss_options, hardware = split_options(options)
        row_counts = None if (rows := hardware.pop("rows", None)) is None else as_sequence(rows)
        space = SearchSpace(gpu, as_sequence(stages), as_sequence(offload), row_counts, hosts=hosts, **hardware)
        counts = [2**i for i in range(MOST_DEVICES.bit_length())] if devices is None else [int(devices)]
        any_mesh = absent_mesh(f"{gpu}:{counts[0]}")  # raises early if the extra is missing or the GPU unknown
        config = tx.config if isinstance(tx, ZeroTransformation) else Config(tx, 0, any_mesh)
        if config.batch_spec is not None:
            raise ValueError(
                "plan.fit lays out data axes alone, and batch_spec= of tx divides dims over others. Fit without it, or "
                "compare plans of meshes that have them: zerojax.plan(step, state, batch, topology=...)."
            )
        shapes = logical_shapes(params, keep_shardings=False)

        def compile_plan(candidate: Candidate) -> Plan:
            topology, axes = space.topology(candidate.devices), space.axes(config)
            chosen = {"stage": candidate.stage, "offload": candidate.offload}
            if hosts is not None:
                chosen |= {"axis": axes, "shard_axis": candidate.shard_axis, "params_axis": candidate.params_axis}
            mesh = absent_mesh(topology, axes=axes)
            sharded = ZeroTransformation.of(dataclasses.replace(config, user_mesh=mesh, **chosen))
            step, resized = sharded.train_step(losses[candidate.loss], **loss_options), with_rows(batch, candidate.rows)
            limits = {name: getattr(space, name) for name in ("memory", "link", "network")}
            return self(step, sharded.create(shapes), resized, *args, topology=topology, **limits)

        gradients = {name: PlainGradient(Loss(loss, **loss_options), args, gpu) for name, loss in losses.items()}
        row = with_rows(batch, 1)
        return search(config, gradients, shapes, row, space=space, counts=counts, compile_plan=compile_plan)


plan = Planner()


def as_sequence(given: Any) -> Sequence[Any]:
    """Return a single thing as a sequence of one."""
    return given if isinstance(given, Sequence) else (given,)


def largest_rows(program: AbsentProgram, batch: Any, rows: int, peak: int, usable: float) -> int:
    """Return the rows of the largest batch that fits, given the peak of a batch of `rows`."""
    unit = program.row_multiple
    peaks = {rows // unit: peak}

    def peak_at(count: int) -> int:
        if count not in peaks:
            peaks[count] = peak_bytes(program.compile(with_rows(batch, count * unit)))
        return peaks[count]

    return unit * largest_that_fits(peak_at, usable, start=rows // unit)
