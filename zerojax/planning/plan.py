"""`plan`: a training step, or any jitted function, compiled for GPUs that are not there."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.config import STAGES, Config, Offload, check_count
from zerojax.gpus.devices import USABLE, Device
from zerojax.gpus.topology import Topology, absent_like, absent_mesh
from zerojax.layout.tree import Layout
from zerojax.offload.measure import Choice
from zerojax.planning.activations import PlainGradient
from zerojax.planning.check import as_shapes
from zerojax.planning.compiled_plan import STATE_PARTS, Plan, largest_that_fits, peak_of, planned
from zerojax.planning.estimate import in_words, stage_estimate
from zerojax.planning.fit import MOST_DEVICES, Candidate, Fit, Limits, search
from zerojax.train.loss import Loss
from zerojax.train.state import ZeroState
from zerojax.train.step import Step
from zerojax.zero import ZeroTransformation

UNEVEN_ROWS = (
    "{} is looked for in rows, but the leaves of this batch have different numbers of them on dim 0, or none. Pass "
    "values that belong to no row as further arguments, after the batch."
)
OFFLOADS = (None, Offload(optimizer="host"))  # what `plan.fit` chooses from


class Moved(NamedTuple):
    """A program on its way to absent GPUs.

    Attributes:
        lower: Lowers it for a batch of shapes.
        unit: What the rows of a batch are a multiple of.
        known: What `planned` is told of it.
    """

    lower: Callable[[Any], Any]
    unit: int
    known: dict[str, Any]


class Planner:
    """The function `plan`, an object so that its searches can stand beside it."""

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

        Args:
            step: Of `tx.train_step`, on any mesh; or a jitted function `f(state, batch,
                *args)`, whose arguments' `NamedSharding`s are carried over. Of several mesh
                axes the one that divides the batch's rows grows or shrinks to the GPUs.
            state: The state, or its shapes; of a `ZeroState` the parameters count, and the step's own
                transformation lays them and its optimizer state out anew for the GPUs.
            batch: The global batch; shapes are enough.
            *args: Further arguments; shapes are enough.
            topology: The GPUs: `"h200:8"`, `"h100:64"` or `"h100:8x8"` (eight machines of
                eight), `"a100-80:16"`, `"b200:8"`.
            memory: Bytes of a device that the program may take. Default: 95% of what there is.
            link: Bytes per second that a GPU sends within its machine. Default: NVLink's.
            network: Bytes per second that a GPU sends to other machines. Default: its adapter's.
            largest_batch: Whether to look for the largest batch that fits, which takes four
                to eight compilations more.

        Returns:
            The plan; print it for tables.

        Raises:
            TypeError: If `step` cannot be lowered, or a step of zerojax is given no `ZeroState`.
            ValueError: If the topology is unknown, a mesh does not fit it, the devices do not
                divide the batch, or a speed is not above 0.
            ModuleNotFoundError: If the extra `aot` is not installed.
        """
        device = Device.of(Topology.parse(topology), link=link, network=network)
        rows = rows_of(batch)
        if largest_batch and not rows:
            raise ValueError(UNEVEN_ROWS.format("The largest batch"))
        move = moved_step if isinstance(step, Step) else moved_function
        moved = move(step, state, batch, args, topology)
        compiled = moved.lower(batch).compile()
        usable = USABLE * device.memory if memory is None else memory
        largest = largest_rows(moved, batch, rows, peak_of(compiled), usable) if largest_batch and rows else None
        return planned(
            compiled,
            topology,
            device,
            memory=usable,
            batch=rows,
            largest_batch=largest,
            **moved.known,
        )

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
        rows: int | Sequence[int] | None = None,
        memory: float | None = None,
        link: float | None = None,
        network: float | None = None,
        host_link: float | None = None,
        has_aux: bool = False,
        weighted: bool = False,
    ) -> Fit:
        """Find the stage, loss, offload and batch that cost least a row and fit, or the fewest GPUs for a model.

        Candidates are estimated first: the plain gradient of each loss is compiled for one
        GPU and each number of rows, for its activations and its kernels' time, and layouts
        say the rest. They are put in order of estimated seconds a row; costs within 2% count
        as equal, and then no offload, a low stage, an early loss and a small batch come
        first. What the estimate says exceeds the memory by more than a quarter is left out;
        of the others the first whose compiled step fits is chosen.

        Args:
            tx: Any optax transformation; or what `zero_shard` gave, whose precision and
                thresholds are kept and whose stage, mesh and offload are replaced.
            loss_fn: As for `train_step`; or several by name that compute the same, such as
                `{"plain": loss, "remat": loss_with_remat_in_each_layer}`. `jax.checkpoint`
                around a whole loss saves nothing: what it recomputes lives all at once.
            params: Parameters in any form; shapes are enough.
            batch: A batch of any number of rows; shapes are enough.
            *args: Further arguments of the loss; shapes are enough.
            gpu: Which, as in a topology: `"h200"`.
            devices: How many; None looks for the fewest: 1, 2, 4, 8 and so on.
            stages: Which may be chosen, one or several.
            offload: What may be chosen, one or several; None is nothing. Stage 0 offloads nothing. The compiled
                check does not see host memory, and counts offloaded parameters as the device's.
            rows: Of the global batch, one number or several to choose from; those that the
                devices divide count. Default: one a device, doubled as long as a row gets
                2% cheaper by it and something fits.
            memory: As for a plan.
            link: As for a plan.
            network: As for a plan.
            host_link: Bytes per second each way between a GPU and its host. Default: PCIe's.
            has_aux: As for `train_step`.
            weighted: As for `train_step`.

        Returns:
            The choice, its compiled plan, and everything tried; print it for a table.

        Raises:
            ValueError: If nothing fits, the GPU is unknown, an option is out of range, no loss is
                given, or the leaves of the batch have different numbers of rows.
            TypeError: If a number of rows or of devices is no integer.
            ModuleNotFoundError: If the extra `aot` is not installed.
        """
        named = loss_fn if isinstance(loss_fn, Mapping) else {"loss": loss_fn}
        losses = {str(name): loss for name, loss in named.items()}
        if not losses:
            raise ValueError("loss_fn names no loss. Give one, or several by name.")
        some = None if rows is None else several(rows)
        for count in some or ():
            check_count("rows", count, "rows of the global batch", least=1)
        if devices is not None:
            check_count("devices", devices, "GPUs", least=1)
        if not rows_of(batch):
            raise ValueError(UNEVEN_ROWS.format("The cheapest batch"))
        limits = Limits(gpu, several(stages), several(offload), some, memory, link, network, host_link)
        counts = [2**i for i in range(MOST_DEVICES.bit_length())] if devices is None else [devices]
        first = absent_mesh(f"{gpu}:{counts[0]}")  # says at once what is not installed, or not known
        config = tx.config if isinstance(tx, ZeroTransformation) else Config(tx, 0, first)
        shapes = as_shapes(params, keep_shardings=False)

        def check(found: Candidate) -> Plan:
            topology = f"{gpu}:{found.devices}"
            mesh = absent_mesh(topology, axes=config.axis)
            sharded = ZeroTransformation.of(
                dataclasses.replace(config, stage=found.stage, offload=found.offload, mesh=mesh)
            )
            step = sharded.train_step(losses[found.remat], has_aux=has_aux, weighted=weighted)
            state, some = sharded.create(shapes), with_rows(batch, found.rows)
            return self(step, state, some, *args, topology=topology, memory=memory, link=link, network=network)

        plain = {name: PlainGradient(Loss(loss, has_aux, weighted), args, gpu) for name, loss in losses.items()}
        return search(config, plain, shapes, with_rows(batch, 1), limits=limits, counts=counts, check=check)


plan = Planner()


def several(given: Any) -> Sequence[Any]:
    """What may be chosen: a sequence, or one thing alone."""
    return given if isinstance(given, Sequence) else (given,)


def moved_step(step: Step, state: Any, batch: Any, args: tuple, topology: str) -> Moved:
    """A step of zerojax on absent GPUs: its state laid out for them, by shapes."""
    if not isinstance(state, ZeroState):
        raise TypeError(
            f"A step of train_step is planned with its ZeroState, not {type(state).__name__}. Make one with "
            f"tx.create(params), of which shapes are enough: tx.create(jax.eval_shape(init))."
        )
    config = step.config
    config = dataclasses.replace(config, mesh=absent_like(config.mesh, topology, axes=config.axis))
    there = absent_state(ZeroTransformation.of(config), state)
    moved, shapes = step.under(config), jax.tree.map(shape_of, args)
    accumulate = step.options.accumulate
    row = stage_estimate(config, there.plan.layout, there.plan, accumulate)
    alone = len(config.mesh.axis_names) == 1  # the formula knows nothing of what other axes divide and move
    return Moved(
        lambda batch: moved.lower(there, jax.tree.map(shape_of, batch), *shapes),
        config.data.workers * accumulate,
        {
            "parts": {**STATE_PARTS, "batch": "batch"},
            "sent_formula": row.sent if alone else None,
            "host": row.host,
            "disk": row.disk,
            "notes": offload_notes(moved, there) if any(there.plan.chunkings) else (),
        },
    )


def absent_state(tx: ZeroTransformation, state: ZeroState) -> ZeroState:
    """A state of any mesh as shapes on the mesh of a transformation."""
    mutable = jax.tree.map(shape_of, state.mutable)
    there = tx.create(logical_shapes(state.plan.layout, tx.config.mesh), mutable=mutable)
    if not any(there.plan.chunkings):
        return there
    # Where the update runs is measured on live devices, which these are not.
    choice = state.plan.choice or Choice("device", "as long as nothing was measured")
    return there.replace(plan=dataclasses.replace(there.plan, choice=choice))


def logical_shapes(layout: Layout, mesh: Mesh) -> Any:
    """The parameters of a layout as a user would give their shapes, other mesh axes included."""
    leaves = [
        jax.ShapeDtypeStruct(
            part.shape,
            part.dtype,
            sharding=NamedSharding(mesh, PartitionSpec(*part.others)) if any(part.others) else None,
        )
        for part in layout.grads
    ]
    return jax.tree.unflatten(layout.treedef, leaves)


def offload_notes(step: Step, state: ZeroState) -> tuple[str, ...]:
    """What a plan says of offloaded state."""
    extra = max(peak_of(lowered.compile()) for lowered in step.lower_update(state))
    return (
        "The program, its collectives and its time go up to the gradients; the formula is of the whole step. The "
        f"update of what is offloaded follows piece by piece, in programs that hold up to {in_words(extra)} each.",
        "The compiler does not see memory kinds of absent devices: what waits on the host is an estimate, and "
        "parameters in host memory count as the device's.",
    )


def moved_function(f: Any, state: Any, batch: Any, args: tuple, topology: str) -> Moved:
    """A jitted function on absent GPUs: its arguments lie there as they lie on their own mesh."""
    if not callable(getattr(f, "lower", None)):
        raise TypeError(
            f"plan takes a step of tx.train_step or a jitted function, not {type(f).__name__}. Give jax.jit(f)."
        )
    meshes = {x.sharding.mesh for x in jax.tree.leaves((state, batch, args)) if is_laid_out(x)}
    if len({(mesh.axis_names, tuple(mesh.shape.values())) for mesh in meshes}) > 1:
        raise ValueError(
            f"The arguments lie on meshes of different axes: {', '.join(sorted(str(dict(m.shape)) for m in meshes))}. "
            f"Lay all of them out on one mesh."
        )
    given = next(iter(meshes)) if meshes else Mesh(np.array(jax.devices()[:1]), ("data",))
    axes = given.axis_names if len(given.axis_names) == 1 else batch_axes(batch)
    mesh = absent_like(given, topology, axes=axes)
    there = lambda tree: jax.tree.map(functools.partial(laid_out, mesh), tree)
    state, args = there(state), there(args)

    def lower(batch: Any) -> Any:
        try:
            return f.lower(state, there(batch), *args)
        except ValueError as error:
            if not re.search("incompatible devices|memory kind", str(error), re.IGNORECASE):
                raise
            raise ValueError(
                "The function names devices of its own, in in_shardings, out_shardings or a sharding constraint, and "
                "cannot be moved to absent ones. Leave the layout to its arguments, or name axes alone."
            ) from error

    divided = [x.sharding for x in jax.tree.leaves(there(batch)) if is_laid_out(x)]
    unit = math.lcm(*(rows_divided(sharding) for sharding in divided))
    whole = "Nothing says how an argument is divided, so every device does the same. Give arguments NamedShardings."
    return Moved(lower, unit, {} if meshes or mesh.size == 1 else {"notes": (whole,)})


def is_laid_out(x: Any) -> bool:
    """Whether a leaf lies on a mesh."""
    return isinstance(getattr(x, "sharding", None), NamedSharding)


def batch_axes(batch: Any) -> tuple[str, ...]:
    """The mesh axes that the rows of a batch are divided over, if all of its leaves agree on them."""
    specs = [x.sharding.spec for x in jax.tree.leaves(batch) if is_laid_out(x)]
    first = {spec[0] for spec in specs if len(spec)}
    axes = first.pop() if len(first) == 1 else None
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def rows_divided(sharding: NamedSharding) -> int:
    """Into how many parts a sharding divides dim 0."""
    names = sharding.spec[0] if len(sharding.spec) else None
    return math.prod(sharding.mesh.shape[name] for name in ((names,) if isinstance(names, str) else names or ()))


def laid_out(mesh: Mesh, x: Any) -> Any:
    """The shape of an array as it would lie on another mesh; whole on every device if it lies on none."""
    if not is_array(x):
        return x
    spec = x.sharding.spec if is_laid_out(x) else PartitionSpec()
    return jax.ShapeDtypeStruct(x.shape, jnp.result_type(x), sharding=NamedSharding(mesh, spec))


def shape_of(x: Any) -> Any:
    """The shape of an array, wherever it lies, in the type that jit gives it; anything else is left alone."""
    return jax.ShapeDtypeStruct(x.shape, jnp.result_type(x)) if is_array(x) else x


def is_array(x: Any) -> bool:
    """Whether a leaf is an array or its shape: no Python number, and no type, which has a dtype and no shape."""
    return hasattr(x, "dtype") and not isinstance(x, type)


def rows_of(batch: Any) -> int | None:
    """Rows of a batch; None if its leaves differ."""
    rows = {jnp.shape(x)[:1] for x in jax.tree.leaves(batch)}
    (only,) = rows if len(rows) == 1 else ((),)
    return only[0] if only else None


def with_rows(batch: Any, rows: int) -> Any:
    """A batch of another number of rows, as shapes; each leaf stays where it lies."""

    def one(x: Any) -> jax.ShapeDtypeStruct:
        sharding = x.sharding if is_laid_out(x) else None
        return jax.ShapeDtypeStruct((rows, *jnp.shape(x)[1:]), jnp.result_type(x), sharding=sharding)

    return jax.tree.map(one, batch)


def largest_rows(moved: Moved, batch: Any, rows: int, peak: int, usable: float) -> int:
    """Rows of the largest batch that fits, where one of `rows` has the peak given."""
    peaks = {rows // moved.unit: peak}

    def peak_at(count: int) -> int:
        if count not in peaks:
            peaks[count] = peak_of(moved.lower(with_rows(batch, count * moved.unit)).compile())
        return peaks[count]

    return moved.unit * largest_that_fits(peak_at, usable, start=rows // moved.unit)
