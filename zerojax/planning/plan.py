"""Compile a step or jitted function for GPUs that this machine does not have, and choose how to train on them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import optax

from zerojax.comm.mesh import auto_context
from zerojax.config import STAGES, Config, check_count
from zerojax.config.precision import Precision
from zerojax.gpus.devices import Device, Rates, Topology, absent_mesh
from zerojax.offload.options import Offload
from zerojax.planning.absent_program import logical_shapes, program_of_function, program_of_step, rows_of, with_rows
from zerojax.planning.compiled_plan import Plan, read_plan
from zerojax.planning.fit import Candidate, Fit, PlainGradient, SearchSpace, search
from zerojax.train.loss import Loss
from zerojax.train.step import Step
from zerojax.units import parse_bytes
from zerojax.zero import ZeroTransformation

MOST_DEVICES = 1024
# In the search for the largest batch: compilations after which bisection replaces interpolation.
PATIENCE = 8
ROUND_BITS = 5
OFFLOADS = (None, Offload(optimizer="host"))  # the default choices of `plan.fit`
UNEVEN_ROWS = (
    "{} is searched in rows, but the leaves of this batch have different numbers of rows on dim 0, or no dim 0. Pass "
    "values that belong to no row as further arguments, after the batch."
)


class FitOptions(TypedDict, total=False):
    """Further options of `plan.fit`, whose docstring describes them."""

    rows: int | Sequence[int] | None
    precision: Precision | Sequence[Precision | None] | None
    recompute: bool
    progress: bool
    memory: float | str | None
    rates: Any
    has_aux: bool
    weighted: bool


class Planner:
    """The function `plan`. It is an object, so that it can have the attribute `fit`."""

    def __call__(
        self,
        step: Any,
        state: Any,
        batch: Any,
        *args: Any,
        topology: str = "h200:8",
        largest_batch: bool = False,
        memory: float | str | None = None,
        rates: Any = None,
    ) -> Plan:
        """Compile a step for GPUs that this machine need not have, and return its memory and time. Nothing is run.

        A `Plan` has memory and time. The attribute `plan` of a `ZeroState` is something else: a `ShardingPlan`.

        Args:
            step: A step of `tx.train_step`, on any mesh. Or a jitted function `f(state, batch, *args)`, whose arguments
                are on a mesh with the topology's number of devices, and keep their `PartitionSpec`s. A transformation
                of `zero_shard` that it calls follows them to the GPUs.
            state: The state, or its shapes. The parameters and optimizer state of a `ZeroState` are sharded again for
                the GPUs.
            batch: The global batch; shapes are enough. For a step, all leaves have the same number of rows.
            *args: Further arguments; shapes are enough.
            topology: The GPUs, such as `"h200:8"`, `"h100:64"`, `"h100:8x8"` (eight hosts of eight), `"a100-80:16"` or
                `"b200:8"`.
            largest_batch: Whether to search for the largest batch that fits. This takes four to eight compilations.
            memory: Bytes of a device that the program may take, such as `"72 GB"` (default: 95% of its memory). A step
                with `memory="auto"` is fitted into these bytes, or into 76% of the memory if that is less, because of
                the limit of XLA's scheduler.
            rates: Achievable rates: the path of a file that `zerojax doctor --json` wrote on such a GPU, or a dict
                with some of these names. In bytes per second: `link`, sent by a GPU within its host; `network`, sent by
                a GPU to other hosts; `host_link`, in each direction between a GPU and its host; `disk`, read and
                written by a GPU's share of the disk, together; `memory`, read and written. `products`: FLOP/s by type.
                `slowdown`: the share by which collectives slow products. `device`: the GPU, as JAX calls it. By
                default, rates have their usual shares of the peak rates, and the time of the disk is left out.

        Returns:
            A `Plan`. It prints a verdict, memory and time. `print(plan.details)` prints all tables.

        Raises:
            TypeError: If `step` cannot be lowered, the state of a step is not a `ZeroState`, or an option is unknown.
            ValueError: If the topology is unknown, a mesh does not fit it, the devices do not divide the batch,
                `memory` or a rate is not above 0, `rates` has an unknown name or is of another GPU, or the leaves of
                the batch have different numbers of rows (for a step, or with `largest_batch`).
            NotImplementedError: If the parameters are on disk.
            ModuleNotFoundError: If the extra `aot` is not installed.
        """
        gpus = Topology.parse(topology)
        rates, device, rows = Rates.parse(rates), Device.of(gpus), rows_of(batch)
        most = parse_memory(memory)
        rates.of(gpus)  # raises for rates of another GPU before anything is compiled
        usable = device.usable(most)
        if largest_batch and not rows:
            raise ValueError(UNEVEN_ROWS.format("The largest batch"))
        if largest_batch and isinstance(step, Step) and step.options.memory is not None:
            raise ValueError(
                f"The step has memory={step.options.memory!r}, with which fewer activations are saved for larger "
                "batches, and largest_batch=True compares batches at equal activations. Plan the step without one of "
                "them."
            )
        if isinstance(step, Step):
            program, unit = program_of_step(step, state, args, topology, device.fitted(most))
        else:
            program, unit = program_of_function(step, state, batch, args, topology)
        compiled, largest = program(batch), None
        if largest_batch and rows:
            peak = lambda n: compiled.peak if n * unit == rows else program(with_rows(batch, n * unit)).peak
            largest = unit * largest_that_fits(peak, usable, start=rows // unit)
        return read_plan(compiled, topology, batch=rows, largest_batch=largest, memory=most, rates=rates)

    @auto_context()
    def fit(
        self,
        tx: optax.GradientTransformation,
        loss_fn: Callable | Mapping[str, Callable],
        params: Any,
        batch: Any,
        *args: Any,
        gpu: str = "h200",
        devices: int | None = 8,
        stages: int | Sequence[int] = tuple(STAGES),
        offload: Offload | Sequence[Offload | None] | None = OFFLOADS,
        **options: Unpack[FitOptions],
    ) -> Fit:
        """Find the stage, loss, offload, precision and batch size that fit into memory at the least time per row.

        Candidates are estimated from each loss's gradient, compiled for one GPU and each number of rows. A candidate is
        rejected if its estimate exceeds the memory by more than a quarter. The rest are sorted by seconds per row.
        Times within 2% count as equal, and are sorted by preference: no offload, a low stage, the first precision, the
        first loss, a small batch. The steps are compiled in this order, and the first that fits is chosen.

        Args:
            tx: Any optax transformation. If it comes from `zero_shard`, its stage, mesh and offload are replaced.
            loss_fn: As for `train_step`. Or several losses by name that compute the same value, such as
                `{"plain": loss, "remat": loss_with_remat_in_each_layer}`. `jax.checkpoint` around the entire loss saves
                no memory, because everything that it recomputes is in memory at once.
            params: Parameters in any form; shapes are enough.
            batch: A batch of any number of rows, the same in each leaf; shapes are enough.
            *args: Further arguments of the loss; shapes are enough.
            gpu: Kind of GPU, such as `"h200"`.
            devices: Number of GPUs. None tries 1, 2, 4, 8 and so on, until a candidate fits.
            stages: ZeRO stages to choose from, one or several.
            offload: Offloads to choose from, one or several. None is no offload. Parameters on disk are not supported.
                The compiled plan counts parameters in host memory as device memory.
            **options: `rows`: rows of the global batch, one number or several; numbers that the devices do not divide
                are ignored. By default, rows start at one per device, and double while a row gets 2% cheaper and a
                candidate fits. `precision`: precisions to choose from, one or several (default: that of `tx`).
                `recompute`: if True, steps get `memory="auto"`, so that their layers save as many activations as fit.
                Then no loss with remat is needed. `progress`: whether to print each candidate to stderr (default:
                True). As for a plan: `memory`, `rates`. Without `rates`, costs are at peak rates. As for `train_step`:
                `has_aux`, `weighted`.

        Returns:
            A `Fit` with the choice, its compiled plan, and all candidates.

        Raises:
            ValueError: If nothing fits, an argument is invalid, or the leaves of the batch differ in rows.
            TypeError: If a number of rows or of devices is not an integer, or an option is unknown.
            NotImplementedError: If an offload has parameters on disk.
            ModuleNotFoundError: If the extra `aot` is not installed.
        """
        named = loss_fn if isinstance(loss_fn, Mapping) else {"loss": loss_fn}
        if not (losses := {str(name): loss for name, loss in named.items()}):
            raise ValueError("loss_fn names no loss. Give a loss, or several losses by name.")
        counts = counts_of(devices)
        if not rows_of(batch):
            raise ValueError(UNEVEN_ROWS.format("The cheapest batch"))
        loss_options: Any = {name: options.get(name, False) for name in ("has_aux", "weighted")}
        space = space_of(tx, gpu, stages, offload, options)
        any_mesh = absent_mesh(f"{gpu}:{counts[0]}")  # raises early if the extra is missing or the GPU is unknown
        config = tx.config if isinstance(tx, ZeroTransformation) else Config(tx, 0, any_mesh)
        if config.batch_spec is not None:
            raise ValueError(
                "plan.fit chooses among data axes only, and batch_spec= of tx divides dims over others. Fit without "
                "it, or compare plans of several meshes: zerojax.plan(step, state, batch, topology=...)."
            )
        shapes, row = logical_shapes(params), with_rows(batch, 1)

        def compile_plan(candidate: Candidate) -> Plan:
            topology, resized = space.topology(candidate.devices), with_rows(batch, candidate.rows)
            chosen = {name: getattr(candidate, name) for name in ("stage", "offload", "precision")}
            mesh = absent_mesh(topology, axes=config.axis)
            sharded = ZeroTransformation.of(dataclasses.replace(config, user_mesh=mesh, **chosen))
            step = sharded.train_step(losses[candidate.loss], memory=candidate.memory, **loss_options)
            given: Any = {"topology": topology, "memory": space.memory, "rates": space.rates}
            return self(step, sharded.create(shapes), resized, *args, **given)

        of_loss = lambda f: PlainGradient(Loss(f, **loss_options), args, gpu, recompute=space.recompute)
        gradients = {name: of_loss(f) for name, f in losses.items()}
        return search(config, gradients, shapes, row, space=space, counts=counts, compile_plan=compile_plan)


plan = Planner()


def space_of(tx: Any, gpu: str, stages: Any, offload: Any, options: FitOptions) -> SearchSpace:
    if unknown := sorted(options.keys() - FitOptions.__annotations__.keys()):
        raise TypeError(f"plan.fit has no option {unknown[0]!r}. It has {', '.join(FitOptions.__annotations__)}.")
    precision = options.get("precision", tx.config.precision if isinstance(tx, ZeroTransformation) else None)
    return SearchSpace(
        gpu,
        stages=as_sequence(stages),
        offloads=as_sequence(offload),
        rows=None if (rows := options.get("rows")) is None else as_sequence(rows),
        memory=parse_memory(options.get("memory")),
        rates=Rates.parse(options.get("rates")),
        precisions=as_sequence(precision),
        recompute=bool(options.get("recompute")),
        progress=bool(options.get("progress", True)),
    )


def counts_of(devices: int | None) -> list[int]:
    if devices is None:
        return [2**i for i in range(MOST_DEVICES.bit_length())]
    check_count("devices", devices, "GPUs", least=1)
    return [int(devices)]


def parse_memory(given: float | str | None) -> int | None:
    return None if given is None else parse_bytes("memory", given, least=1)


def as_sequence(given: Any) -> Sequence[Any]:
    return given if isinstance(given, Sequence) and not isinstance(given, str) else (given,)


def largest_that_fits(peak: Callable[[int], float], usable: float, *, start: int) -> int:
    """Return the largest count whose peak is at most `usable`, or 0 if a count of 1 does not fit.

    Only round counts are tried (`round_down`): the compiler pads all others, which makes their peaks jump. At round
    counts, peaks are almost linear, so the next guess is where the line through the two peaks nearest to `usable`
    reaches `usable`. The search ends at two neighbouring round counts of which only the smaller fits.

    `peak(count)` compiles for a count of at least 1, and returns the peak bytes. `start` is any first guess.
    """
    peaks: dict[int, float] = {}
    fits, exceeds, guess = 0, None, start
    while exceeds is None or exceeds > next_round(fits):
        peaks[guess] = peak(guess)
        fits, exceeds = (guess, exceeds) if peaks[guess] <= usable else (fits, guess)
        guess = next_guess(peaks, usable, fits, exceeds)
    return fits


def next_guess(peaks: dict[int, float], usable: float, fits: int, exceeds: int | None) -> int:
    """Return the next count to try: a round count above `fits`, and below `exceeds` unless that is None."""
    guess = 8 * fits if exceeds is None else (fits + exceeds) // 2
    if 2 <= len(peaks) <= PATIENCE:
        (a, x), (b, y) = sorted(sorted(peaks.items(), key=lambda item: abs(item[1] - usable))[:2])
        guess = int(a + (usable - x) * (b - a) / (y - x)) if y > x else guess
    most = round_down(64 * fits if exceeds is None else exceeds - 1)
    return min(max(round_down(max(guess, 0)), next_round(fits)), max(most, 1))


def round_down(count: int) -> int:
    """Return the largest round count up to `count`. Round counts have at most five significant bits."""
    zeros = max(0, count.bit_length() - ROUND_BITS)
    return count >> zeros << zeros


def next_round(count: int) -> int:
    return round_down(count) + (1 << max(0, count.bit_length() - ROUND_BITS))
