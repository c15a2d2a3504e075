"""Trace and lower kernels for GPUs that this machine does not have, and refuse programs that name other devices.

JAX has no option to say for which GPUs cuDNN attention and Pallas kernels are traced. So `kernels_for` answers JAX's
questions about the GPU while its context lasts, for the thread that entered it. Tested with jax 0.10.2 and 0.12.0.
"""

from __future__ import annotations

import contextlib
import importlib.util
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from zerojax import compat, jaxprs

# A version of cuDNN that supports every form of attention that JAX offers. JAX asks for it before it traces an
# attention, and XLA compiles cuDNN's calls without the library.
CUDNN = 91400
# If two threads answered at the same time, each could put back the answers of the other.
_ONE_AT_A_TIME = threading.RLock()


def lowered(traced: Any, mesh: Mesh) -> Any:
    """Lower a traced program for `mesh`.

    Raises:
        ValueError: If the program names other devices, or another number of devices. XLA's compiler for GPUs ends the
            process if a sharding has another number of devices than the program.
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
                    f"{mesh.size} devices, or make the loss and zero_shard on zerojax.gpus.devices.absent_mesh. An "
                    f"estimate computes the rows of one device: give it the loss without the mesh."
                )
    return traced.lower()


@contextlib.contextmanager
def kernels_for(mesh: Mesh) -> Iterator[None]:
    """Enter a context in which attention of cuDNN and kernels of Pallas are traced and lowered for the GPUs of a mesh.

    cuDNN attention: JAX asks the installed cuDNN for its version, and the first local GPU for what it can compute.

    Pallas: JAX asks the context's mesh for its GPU, or else the first local device. `use_abstract_mesh` has the type of
    the GPU, but around a whole program it would change the types of all arrays. So only this question is asked inside
    it.
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
        return lambda *args: (answer if threading.get_ident() == thread else before)(*args)

    with _ONE_AT_A_TIME, contextlib.ExitStack() as stack:
        for module, name, make in answers:
            if hasattr(module, name):  # jax 0.10 asks fewer questions
                before = getattr(module, name)
                stack.callback(setattr, module, name, before)
                setattr(module, name, in_this_thread(before, make(before)))
        yield
