"""Compile functions that name the caller's devices for other devices, by replacing private parts of JAX meanwhile.

A step gets a mesh of the other devices from its configuration. A loss names meshes by itself, in a `jax.shard_map` or
in shardings: a closure of the loss holds `tx.config.mesh`, or the mesh that the caller made. Only JAX sees these
meshes, when it traces the loss.

Nothing here replaces anything when it is imported. Each context puts back what it found, and holds only for the thread
that entered it. Tested with jax 0.10.2 and 0.12.0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import source_info_util
from jax.extend.core import Primitive
from jax.sharding import AbstractMesh, Mesh, NamedSharding

# A version of cuDNN that supports every form of attention that JAX offers. JAX asks for it before it traces an
# attention, and XLA compiles cuDNN's calls without the library.
CUDNN = 91400
# If two threads replaced functions at the same time, each could put back what the other had replaced.
_ONE_AT_A_TIME = threading.RLock()
# A function of JAX to replace: its owner, its name, and a function that returns the new function, given the old one.
Replacement = tuple[Any, str, Callable[[Callable], Callable]]


@dataclasses.dataclass(frozen=True)
class MovedMeshes:
    """Replaces the meshes that a loss names. The step's mesh becomes a mesh of other devices with the same axes."""

    given: Mesh  # the mesh of the step
    target: Mesh  # the mesh of the devices to compile for, with the axes of `given` in other sizes, perhaps

    def __call__(self, mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
        given, target = self.given, self.target
        same_axes = set(mesh.axis_names) == set(target.axis_names)
        if isinstance(mesh, AbstractMesh):
            before, kind = given.abstract_mesh.abstract_device, target.abstract_mesh.abstract_device
            is_moved = mesh.abstract_device == kind != before
            if mesh.empty or is_moved or not same_axes or dict(mesh.shape) != dict(given.shape):
                return mesh
            sizes = tuple(target.shape[axis] for axis in mesh.axis_names)
            return mesh.update(axis_sizes=sizes, abstract_device=kind)
        devices = set(mesh.devices.flat)
        if mesh.empty or (devices <= set(target.devices.flat) and devices != set(given.devices.flat)):
            return mesh
        if not same_axes:
            raise ValueError(
                f"The loss names a mesh {dict(mesh.shape)}, and the step's mesh is {dict(given.shape)}. Only the "
                f"step's mesh is known to become {dict(target.shape)}. Name the axes of the step's mesh in the loss."
            )
        devices = target.devices.transpose([target.axis_names.index(axis) for axis in mesh.axis_names])
        return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


@dataclasses.dataclass(frozen=True)
class OnOneDevice:
    """Replaces the meshes that a loss names by meshes of one device for its own rows, in which each axis has size 1."""

    target: Mesh  # a mesh of one device
    data_axes: tuple[str, ...]  # the axes that divide the rows

    def __call__(self, mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
        is_here = isinstance(mesh, AbstractMesh) or set(mesh.devices.flat) <= set(self.target.devices.flat)
        if mesh.size <= 1 and is_here:
            return mesh
        divided = [axis for axis, size in mesh.shape.items() if size > 1]
        if len(divided) > 1 and not set(divided) <= set(self.data_axes):
            raise ValueError(
                f"The loss names a mesh {dict(mesh.shape)}, and its cost is computed for one device, which has a share "
                f"of the rows and the whole model. Compile the step for all devices: zerojax.plan(step, state, batch, "
                f"topology=...)."
            )
        ones = (1,) * len(mesh.axis_names)
        if isinstance(mesh, AbstractMesh):
            return mesh.update(axis_sizes=ones, abstract_device=self.target.abstract_mesh.abstract_device)
        return Mesh(self.target.devices.reshape(ones), mesh.axis_names, axis_types=mesh.axis_types)


@contextlib.contextmanager
def meshes_moved(move: MovedMeshes | OnOneDevice) -> Iterator[dict[str, None]]:
    """Enter a context in which JAX traces, lowers and compiles functions as if they named the meshes of `move`.

    A function names a mesh in a `jax.shard_map`, in shardings that it gives to functions of JAX, and in functions that
    its derivative calls later. All of them bind a primitive with the mesh among its parameters, so `bind` is the one
    place that sees all of them. Some functions compare the mesh with shapes and with the context before they bind.

    JAX caches the traces of inner functions. `move`, which is hashable, becomes part of the cache's keys. So this
    context does not find traces that name the caller's devices, and the caller's step finds no traces of this context.
    """
    from jax._src import config, pjit, shard_map, sharding_impls

    _hide_frames()
    notes: dict[str, None] = {}  # on meshes whose sizes were changed, as keys

    def replace(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
        found = move(mesh)
        if dict(found.shape) != dict(mesh.shape):
            notes[
                f"The loss names a mesh {dict(mesh.shape)}, which is planned as {dict(found.shape)}. What Python "
                f"computes from its sizes keeps the value: in a shard_map, use jax.lax.axis_size instead."
            ] = None
        return found

    moved = functools.partial(_with_meshes, replace)

    def bind_moved(bind: Callable) -> Callable:
        return lambda self, *args, **params: bind(self, *args, **moved(params))

    def first_moved(fn: Callable) -> Callable:
        return lambda given, *rest, **options: fn(moved(given), *rest, **options)

    def check_mesh_moved(check: Callable) -> Callable:
        def check_moved(mesh: Any, *args: Any) -> tuple:
            # The caller keeps the returned mesh for later calls. So return the mesh that was given.
            checked, names = check(moved(mesh), *args)
            return (checked if mesh is None else mesh), names

        return check_moved

    canonical = sharding_impls.canonicalize_sharding
    importers = [m for m in list(sys.modules.values()) if vars(m).get("canonicalize_sharding") is canonical]
    replacements = [
        (Primitive, "bind", bind_moved),
        (shard_map, "_shmap_checks", check_mesh_moved),
        (shard_map, "_check_specs_vs_args", lambda check: lambda f, mesh, *rest: check(f, moved(mesh), *rest)),
        (pjit, "prepare_axis_resources", first_moved),
        (pjit, "_resolve_and_lower", lambda lower: lambda args, **params: lower(args, **moved(params))),
        *((module, "canonicalize_sharding", first_moved) for module in importers),
    ]
    with kernels_for(move.target), _functions_replaced(replacements), contextlib.ExitStack() as stack:
        # Part of the key of JAX's caches. JAX reads nothing else from it.
        before = config.mesh_context_manager.swap_local((*config.mesh_context_manager.value, move))
        stack.callback(config.mesh_context_manager.set_local, before)
        yield notes


@contextlib.contextmanager
def kernels_for(mesh: Mesh) -> Iterator[None]:
    """Enter a context in which attention of cuDNN and kernels of Pallas are traced and lowered for the GPUs of a mesh.

    cuDNN attention: JAX asks the installed cuDNN for its version, and the first local GPU for what it can compute.

    Pallas: a kernel in a `jax.shard_map` is lowered for the GPUs of the mesh, and any other kernel for the first local
    device. `use_abstract_mesh` has the type of the GPU, but around a whole program it would change the types of all
    arrays. So only the question about the GPU is asked inside it.
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

    replacements: list[Replacement] = [
        (attention, "check_cudnn_version", installed_or_recent),
        (attention, "check_compute_capability", lambda _: lambda least: number(capability) >= number(least)),
        (attention, "is_cuda_compute_capability_equal", lambda _: lambda equal: number(capability) == number(equal)),
    ]
    if importlib.util.find_spec("jax._src.pallas.triton.gpu_info") is not None:  # jax 0.12
        gpu_info: Any = importlib.import_module("jax._src.pallas.triton.gpu_info")

        def asked_on_mesh(ask: Callable) -> Callable:
            def asked() -> Any:
                here, kind = jax.sharding.get_abstract_mesh(), mesh.abstract_mesh
                if here.abstract_device is not None:
                    return ask()
                kind = kind if here.empty else here.update(abstract_device=kind.abstract_device)
                with jax.sharding.use_abstract_mesh(kind):
                    return ask()

            return asked

        replacements.append((gpu_info, "get_gpu_info", asked_on_mesh))
    with _functions_replaced(replacements):
        yield


@functools.cache
def _hide_frames() -> None:
    """Let JAX name the caller's line as the origin of an equation, and not this file, which is now above every bind."""
    source_info_util.register_exclusion(__file__)


def _with_meshes(replace: Callable[[Any], Any], value: Any) -> Any:
    """Replace the meshes in `value`, a parameter of a primitive or a tree of shardings."""
    if isinstance(value, Mesh | AbstractMesh):
        return replace(value)
    if isinstance(value, NamedSharding):
        mesh = replace(value.mesh)
        return value if mesh is value.mesh else NamedSharding(mesh, value.spec, memory_kind=value.memory_kind)
    if isinstance(value, dict):
        return {name: _with_meshes(replace, x) for name, x in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_with_meshes(replace, x) for x in value))
    if type(value) in (tuple, list):
        return type(value)(_with_meshes(replace, x) for x in value)
    return value


@contextlib.contextmanager
def _functions_replaced(replacements: list[Replacement]) -> Iterator[None]:
    """Replace functions while the context lasts, except those that JAX lacks. Other threads call the old functions."""
    thread = threading.get_ident()

    def either(before: Callable, value: Callable) -> Callable:
        return lambda *args, **options: (value if threading.get_ident() == thread else before)(*args, **options)

    with _ONE_AT_A_TIME, contextlib.ExitStack() as stack:
        for owner, name, make in replacements:
            if hasattr(owner, name):
                before = getattr(owner, name)
                stack.callback(setattr, owner, name, before)
                setattr(owner, name, either(before, make(before)))
        yield
