"""Compile a step, a jitted function or a gradient for GPUs that this machine does not have. Arguments may be shapes.

To trace cuDNN attention or a Pallas kernel, JAX asks which GPU the local machine has, and no option names another GPU.
So `kernels_for` replaces the functions with which JAX asks, in one thread. Tested with jax 0.10.2 and 0.12.0.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from zerojax import compat, jaxprs
from zerojax.budget.blocks import Blocks, memory_of_blocks
from zerojax.comm.mesh import PLANNED, auto_context
from zerojax.comm.typed import TypedLoss, on_one_device
from zerojax.config import Config
from zerojax.config.data_mesh import axes_of
from zerojax.gather.working_set import WorkingSet, working_set
from zerojax.gpus.devices import Topology, absent_mesh, absent_mesh_like
from zerojax.inspect.hlo import peak_bytes
from zerojax.layout.leaf import is_padded, replace_items
from zerojax.layout.tree import Layout, canonical
from zerojax.offload.host import pinned_limit
from zerojax.placement.storage import cast
from zerojax.planning.compiled_plan import CompiledStep
from zerojax.planning.stage_bytes import estimate_stage
from zerojax.streaming.stores import kept_on_device
from zerojax.streaming.stream import StreamedUpdate
from zerojax.train.fitting import devices_of_a_block
from zerojax.train.loss import Loss
from zerojax.train.state import ZeroState
from zerojax.train.step import Step
from zerojax.units import format_bytes
from zerojax.zero import ZeroTransformation

MANY_PROGRAMS = (
    'With Offload(params="disk") a step is many programs, and plan and check compile one. zerojax.estimate gives the '
    "bytes of parameters on disk, and what a step reads and writes. For its time and memory, run a step."
)
# The version of cuDNN that JAX is told if cuDNN is not installed. This version supports every form of attention that
# JAX offers. XLA compiles calls of cuDNN without the library.
CUDNN = 91400
# Held while functions of JAX are replaced. Otherwise another thread could take a replacement for JAX's own function.
_ONE_AT_A_TIME = threading.RLock()


# A function that compiles the program for a batch of shapes, and a number that must divide the rows of the batch.
AbsentProgram = tuple[Callable[[Any], CompiledStep], int]


def program_of_step(step: Step, state: Any, args: tuple, topology: str, usable: int) -> AbsentProgram:
    """Return the `AbsentProgram` of `step` for the GPUs of `topology`. The state is sharded again for these GPUs.

    A step with `memory="auto"` is compiled to take at most `usable` bytes per device.
    """
    config, shapes = moved_to(topology, step, state)
    options = step.options
    if options.memory == "auto":
        options = dataclasses.replace(options, memory=usable)
    blocks = Blocks()
    # A plan lists the blocks that tracing finds in the loss. A step with `memory=` looks for the blocks by itself.
    observed = step.program.loss.fn if options.memory is not None else blocks.observed(step.program.loss.fn)
    # Without a reduction, the loss would be traced again for all rows, and the list would have blocks of that trace.
    reduction = step.program.loss.reduction if step.program.loss.weighted else step.program.loss.reduction or "mean"
    loss = dataclasses.replace(step.program.loss, fn=observed, reduction=reduction)
    moved, accumulate = Step(config, loss, options), options.accumulate
    estimate = estimate_stage(config, shapes.plan, accumulate)
    known = *offload_notes(moved, shapes), *pinning_note(estimate.host * Topology.parse(topology).per_host)

    @auto_context()
    def compile_step(batch: Any) -> CompiledStep:
        given = shapes, abstract(batch), *abstract(args)
        with kernels_for(config.mesh):
            # To trace a step with `memory=`, programs are compiled. So check the meshes first, without this option.
            traced = moved.under(config).trace(*given)
            check_meshes(traced, config.mesh)
            fit = None if options.memory is None else moved.memory_fit(*given)
            program = (moved if fit else traced).lower(*(given if fit else ())).compile()
        notes = (*([str(fit)] if fit else []), *moved.compiled_with)
        return CompiledStep(
            program,
            # The formula counts only the data axes, so it is too low if the compiler uses other axes, too.
            sent_formula=None if config.data.compiler_axes else estimate.sent,
            estimate=estimate,
            notes=(*known, *notes),
            updates=tuple(shapes.plan.update_in_words),
            blocks=fit.blocks if fit else memory_of_blocks(blocks, 1.0, devices_of_a_block(config)),
            options=moved.compiler_options,
            kept=sum(kept_on_device(config, shapes.plan).values()),
            update=update,
        )

    streamed = StreamedUpdate(config, shapes.plan) if shapes.plan.offloaded else None
    update = streamed if streamed is not None and streamed.update == "device" else None
    return compile_step, config.data.workers * accumulate


def moved_to(topology: str | None, step: Step, state: Any) -> tuple[Config, ZeroState]:
    """Return the configuration of `step` for the GPUs of `topology`, and the shapes of `state` on their mesh.

    With `topology=None`, the step's mesh is kept.
    """
    if step.config.params_on_disk:
        raise NotImplementedError(MANY_PROGRAMS)
    if not isinstance(state, ZeroState):
        raise TypeError(
            f"A step of train_step needs its ZeroState, not {type(state).__name__}. Make the state with "
            f"tx.create(params); shapes are enough: tx.create(jax.eval_shape(init))."
        )
    config, layout = step.config, state.plan.layout
    if topology is not None:
        mesh = absent_mesh_like(config.user_mesh, topology, axes=config.axis)
        config = dataclasses.replace(config, user_mesh=mesh)
    # Users give parameters to `create` in logical shapes, sharded only over the mesh axes of the model.
    over_others = lambda leaf: NamedSharding(config.mesh, PartitionSpec(*leaf.others)) if any(leaf.others) else None
    params = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=over_others(leaf)) for leaf in layout.grads]
    logical = jax.tree.unflatten(layout.treedef, params)
    return config, ZeroTransformation.of(config).create(logical, mutable=abstract(state.mutable))


def offload_notes(step: Step, state: ZeroState) -> tuple[str, ...]:
    """Return notes on the costs of offloaded state that a plan's figures do not include. Empty without an offload."""
    if not any(state.plan.chunkings):
        return ()
    most = max(peak_bytes(lowered.compile()) for lowered in step.lower_update(state))
    return (
        "The program and its collectives end with the gradients; the formula is of the whole step. The "
        f"offloaded state is updated afterwards, chunk by chunk, in programs of up to {format_bytes(most)} each.",
        "The compiler does not see memory kinds of absent devices: host memory is an estimate, and parameters in host "
        "memory count as the device's.",
    )


def pinning_note(needed: int) -> tuple[str, ...]:
    if not needed:
        return ()
    return (
        f"A host pins up to {format_bytes(2 * needed)} for {format_bytes(needed)}, because JAX doubles the regions "
        f"that it pins. To pin no more than needed, set {pinned_limit(needed)}.",
    )


def program_of_function(f: Any, state: Any, batch: Any, args: tuple, topology: str) -> AbsentProgram:
    """Return the `AbsentProgram` of the jitted `f` for `topology`. The arguments keep their `PartitionSpec`s."""
    unplanned = TypeError(
        f"plan takes a step of tx.train_step or a function of jax.jit, not {type(f).__name__}. Give jax.jit(f). Such "
        f"a function takes modules of NNX apart: give it the state of graphdef, state = nnx.split((model, optimizer)), "
        f"merge it there with nnx.merge(graphdef, state), and return nnx.state((model, optimizer))."
    )
    if not callable(getattr(f, "trace", None)):
        raise unplanned
    shardings = filter(None, map(named_sharding, jax.tree.leaves((state, batch, args))))
    meshes = {sharding.mesh for sharding in shardings}
    if len({mesh.shape_tuple for mesh in meshes}) > 1:
        raise ValueError(
            f"The arguments are on meshes of different axes: {', '.join(sorted(str(dict(m.shape)) for m in meshes))}. "
            f"Put all of them on one mesh."
        )
    devices = absent_mesh(topology).devices
    given = next(iter(meshes)) if meshes else Mesh(np.array(jax.devices()[:1]), ("data",))
    if given.size != devices.size:
        raise ValueError(
            f"The arguments are on a mesh {dict(given.shape)}, and {topology!r} has {devices.size} devices. Give "
            f"arguments or shapes with NamedShardings on a mesh of {devices.size} devices; "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={devices.size} simulates them."
        )
    mesh = Mesh(devices.reshape(tuple(given.shape.values())), given.axis_names, axis_types=given.axis_types)
    context = jax.sharding.get_abstract_mesh()
    placed = functools.partial(on_mesh, mesh)

    def compile_function(batch: Any) -> CompiledStep:
        named = contextlib.nullcontext() if context.empty else jax.set_mesh(mesh)
        with kernels_for(mesh), PLANNED(mesh), named:
            try:
                traced = f.trace(placed(state), placed(batch), *placed(args))
                if not isinstance(traced, jax.stages.Traced):  # of nnx.jit
                    raise unplanned
                lowering = lowered(traced, mesh)
            except ValueError as error:
                error.add_note(
                    "If the function names a mesh in in_shardings= or out_shardings=, leave them out: its arguments "
                    "have shardings."
                )
                raise
            return CompiledStep(lowering.compile())

    sharded = filter(None, map(named_sharding, jax.tree.leaves(batch)))
    shards = (math.prod(mesh.shape[axis] for axis in axes_of(sharding.spec[:1])) for sharding in sharded)
    return compile_function, math.lcm(*shards)


def check_meshes(traced: Any, mesh: Mesh) -> None:
    """Raise a ValueError if a traced program names devices that `mesh` does not have, or a mesh of another size.

    XLA's compiler for GPUs would end the process if a sharding and the program had different numbers of devices.
    """
    here = set(mesh.devices.flat)
    for eqn in jaxprs.equations(compat.opened(traced.jaxpr)[0]):
        for x in jax.tree.leaves(dict(compat.params_of(eqn))):
            named = getattr(x, "mesh", x)
            if not isinstance(named, Mesh | AbstractMesh) or named.empty:
                continue
            if named.size != mesh.size or (isinstance(named, Mesh) and not set(named.devices.flat) <= here):
                line = compat.line_of(eqn)
                which = f"{dict(named.shape)} at {line}" if line else f"{dict(named.shape)}"
                raise ValueError(
                    f"The program names a mesh {which}, and is compiled for "
                    f"{mesh.size} x {mesh.devices.flat[0].device_kind}. Name mesh.abstract_mesh of a mesh of "
                    f"{mesh.size} devices, or make the loss and zero_shard on zerojax.gpus.devices.absent_mesh. In a "
                    f"jitted function, put the state and the batch on a mesh with the axes of zero_shard's mesh. "
                    f"plan.fit computes the rows of one device: give it the loss without the mesh."
                )


def lowered(traced: Any, mesh: Mesh) -> Any:
    check_meshes(traced, mesh)
    return traced.lower()


def program_of(config: Config, layout: Layout, loss: Loss, batch: Any, args: tuple, mutable: Any = None) -> WorkingSet:
    """Trace a loss, and return the parameters that stage 3 gathers to compute the loss. Empty at other stages."""
    if config.stage < 3:
        return WorkingSet()

    def value(params, batch, mutable, *args):
        params = jax.tree.unflatten(layout.treedef, cast(jax.tree.leaves(params), layout.compute))
        return typed.call(params, mutable, batch, args)

    tree, typed = jax.tree.unflatten(layout.treedef, layout.params), TypedLoss(on_one_device(config), layout, loss)
    return working_set(value, tree, batch, mutable, *args, prefetch=config.prefetch, shared_bytes=config.shared_bytes)


def plain_gradient(
    layout: Layout,
    loss: Loss | TypedLoss,
    batch: Any,
    args: tuple,
    *,
    mesh: Mesh,
    accumulated: frozenset[int] = frozenset(),
    mutable: Any = None,
) -> Any:
    """Trace a loss's gradient under plain jit with replicated parameters, to measure the memory of activations.

    This memory is the temporary memory of the compiled program. But XLA may keep activations in the buffer of a full
    gradient that is not computed yet, and stage 3 has no such buffers. So the gradient of each parameter in
    `accumulated` (indices) is added to an input, whose buffer XLA cannot reuse. The gradient of a stacked leaf needs no
    input: a loop fills the gradient step by step, so its buffer is occupied throughout the loop.

    Leaves of `batch` without a sharding are replicated.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    leaves = [
        jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=replicated)
        for leaf, dtype in zip(layout.params, layout.compute, strict=True)
    ]
    differentiated = [i for i in layout.trained if jnp.issubdtype(leaves[i].dtype, jnp.inexact)]

    def value(values, leaves, mutable, batch, *args):
        params = jax.tree.unflatten(layout.treedef, replace_items(leaves, differentiated, values))
        returned = loss.call(params, mutable, batch, args)
        return returned.total / returned.weight

    def gradient(buffers, *args):
        loss, grads = jax.value_and_grad(value)(*args)
        return loss, [buffers[i] + g if i in buffers else g for i, g in zip(differentiated, grads, strict=True)]

    buffers = {i: leaves[i] for i in differentiated if i in accumulated}
    values = [leaves[i] for i in differentiated]
    return jax.jit(gradient, donate_argnums=0).trace(buffers, values, leaves, mutable, batch, *args)


@contextlib.contextmanager
def kernels_for(mesh: Mesh) -> Iterator[None]:
    """Enter a context in which attention of cuDNN and kernels of Pallas are traced and lowered for the GPUs of a mesh.

    The functions with which JAX asks the local machine are replaced. On a mesh without GPUs, nothing is replaced.

    - cuDNN attention asks for the version of cuDNN, and for the compute capability of the first local GPU.
    - Pallas asks for the GPU of the context's mesh, or else of the first local device. Only the function that asks
      runs inside `use_abstract_mesh` with the GPU of `mesh`: tracing the program there would change its arrays' types.
    """
    from jax._src.cudnn import fused_attention_stablehlo as attention

    device = mesh.devices.flat[0]
    capability = getattr(device, "compute_capability", None)
    if device.platform not in ("gpu", "cuda") or capability is None:
        yield
        return
    number = lambda text: tuple(int(part) for part in text.split("."))

    def installed_or_recent(version: Callable) -> Callable:
        def either() -> int:
            try:
                return version()
            except RuntimeError:  # cuDNN is not installed
                return CUDNN

        return either

    def asked_on_mesh(ask: Callable) -> Callable:
        def asked() -> Any:
            here, kind = jax.sharding.get_abstract_mesh(), mesh.abstract_mesh
            kind = kind if here.empty else here.update(abstract_device=kind.abstract_device)
            with jax.sharding.use_abstract_mesh(kind):
                return ask()

        return asked

    answers = [
        (attention, "check_cudnn_version", installed_or_recent),
        (attention, "check_compute_capability", lambda _: lambda least: number(capability) >= number(least)),
        (attention, "is_cuda_compute_capability_equal", lambda _: lambda equal: number(capability) == number(equal)),
    ]
    if importlib.util.find_spec("jax._src.pallas.triton.gpu_info") is not None:  # jax 0.12
        answers.append((importlib.import_module("jax._src.pallas.triton.gpu_info"), "get_gpu_info", asked_on_mesh))
    thread = threading.get_ident()

    def in_this_thread(before: Callable, answer: Callable) -> Callable:
        return lambda *args, **named: (answer if threading.get_ident() == thread else before)(*args, **named)

    with _ONE_AT_A_TIME, contextlib.ExitStack() as stack:
        for module, name, make in answers:
            if hasattr(module, name):  # jax 0.10 asks fewer questions
                before = getattr(module, name)
                stack.callback(setattr, module, name, before)
                setattr(module, name, in_this_thread(before, make(before)))
        yield


def is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, type)


def shape_of(x: Any, sharding: NamedSharding | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=sharding)


def abstract(tree: Any) -> Any:
    """Replace the arrays in `tree` by shapes without shardings. Static arguments and Python numbers are unchanged."""
    return jax.tree.map(lambda x: shape_of(x) if is_array(x) else x, tree)


def named_sharding(x: Any) -> NamedSharding | None:
    sharding = getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def on_mesh(mesh: Mesh, tree: Any) -> Any:
    """Replace arrays by shapes on `mesh` with the same `PartitionSpec`s. An array without a spec is replicated."""

    def move(x: Any) -> Any:
        sharding = named_sharding(x)
        spec = PartitionSpec() if sharding is None else sharding.spec
        return shape_of(x, NamedSharding(mesh, spec)) if is_array(x) else x

    return jax.tree.map(move, tree)


def logical_shapes(params: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, canonical(x.dtype)), params, is_leaf=is_padded)


def rows_of(batch: Any) -> int | None:
    lengths = {jnp.shape(x)[:1] for x in jax.tree.leaves(batch)}
    (only,) = lengths if len(lengths) == 1 else ((),)
    return only[0] if only else None


def with_rows(batch: Any, rows: int) -> Any:
    resized = lambda x: shape_of(x, named_sharding(x)).update(shape=(rows, *jnp.shape(x)[1:]))
    return jax.tree.map(resized, batch)
