"""A remat policy that offloads named activations to host memory, after a self-test of the compiler.

Between the forward and the backward pass an activation is in pinned host memory. Inside a
scan the compiler stacks it, one iteration a row, and must read the rows back from the last
to the first; jaxlib 0.11.0 silently reads them from the first to the last on GPU. (0.10.2,
the oldest version that is supported, compiles the same wrong addresses for a GPU; 0.11.2
and 0.12.0 are right.) The first policy in a process differentiates a small scan with and
without offloading and compares: a list of versions would miss the next such bug.
"""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

_HOST = "pinned_host"
_ISSUE = "openxla/xla#46231"
_ITERATIONS = 6
_ROW = (8, 128)


def remat_policy(*names: str, save: Sequence[str] = ()) -> Callable[..., Any]:
    """A policy for `jax.checkpoint` that offloads named activations to host memory.

    Name activations in the model with `jax.ad_checkpoint.checkpoint_name`. Those not named
    here are recomputed in the backward pass; a name that the model never gives does nothing.
    To offload a layer's input, as DeepSpeed's `cpu_checkpointing` does, name it on the first
    line of the checkpointed function.

    Scan the layers, or train at stage 3. Elsewhere in an unrolled model XLA:GPU (seen on
    jaxlib 0.12.0) copies each activation only when the backward pass needs it, and saves nothing.

    The first call in a process runs the self-test: two small compilations on the first
    local device, with default compiler options. It may be called anywhere, while tracing too.

    Args:
        *names: Activations to offload to pinned host memory.
        save: Activations to keep in device memory.

    Returns:
        What `jax.checkpoint` and `flax.linen.remat` take as `policy`.

    Raises:
        TypeError: If a name is not a string.
        ValueError: If there is no name to offload, a name is empty, or one is in both lists.
        RuntimeError: If the backend has no pinned host memory, or the self-test finds gradients
            to be wrong when activations are offloaded.

    Examples:
        >>> policy = remat_policy("layer_input", save=["attention"])
        >>> def layer(x, w):
        ...     x = checkpoint_name(x, "layer_input")
        ...     return jnp.tanh(checkpoint_name(x @ w, "attention")), None
        >>> def loss(ws, x):
        ...     return jnp.sum(jax.lax.scan(jax.checkpoint(layer, policy=policy), x, ws)[0])
        >>> jax.grad(loss)(jnp.zeros((3, 2, 2)), jnp.ones((1, 2))).shape
        (3, 2, 2)
    """
    if isinstance(save, str):
        raise TypeError(f"save={save!r} is one string, where a list of names is expected. Write save=[{save!r}].")
    for name in (*names, *save):
        if not isinstance(name, str):
            raise TypeError(
                f"Activations are known by the names given to checkpoint_name, which are strings, not {name!r} "
                f"({type(name).__name__}). Write remat_policy('a', 'b', save=['c']); spread a list with a star."
            )
        if not name:
            raise ValueError("An activation's name is empty. Give the name that checkpoint_name gave it.")
    if not names:
        raise ValueError(
            "remat_policy() was given no name to offload. Name at least one activation; where all stay on the device, "
            "use jax.checkpoint_policies.save_only_these_names."
        )
    if both := sorted({*names} & {*save}):
        raise ValueError(
            f"{', '.join(map(repr, both))} cannot be offloaded and saved on the device at once. Take each name out of "
            "`names` or out of `save`."
        )
    _test_once(jax.default_backend())
    return offloading(names, save)


def offloading(names: Sequence[str], save: Sequence[str] = ()) -> Callable[..., Any]:
    """The policy of `remat_policy`, without the self-test."""
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(save),
        names_which_can_be_offloaded=list(names),
        offload_src="device",
        offload_dst=_HOST,
    )


@functools.cache
def _test_once(platform: str) -> None:
    """The self-test on a platform; the next call repeats one that failed."""
    device = jax.local_devices(backend=platform)[0]
    require_pinned_host(device)
    # A new thread has no trace, mesh or default device of the caller. Under jax.ensure_compile_time_eval, made
    # for this, a scan with offloaded residuals fails (jax 0.10.2, 0.12.0).
    with ThreadPoolExecutor(max_workers=1) as thread:
        thread.submit(compare, functools.partial(probe_gradients, device=device), platform).result()


def require_pinned_host(device: Any) -> None:
    """Refuse a device whose backend has no pinned host memory.

    Args:
        device: A `jax.Device`.

    Raises:
        RuntimeError: Naming the backend and the kinds of memory it has.
    """
    kinds = sorted({memory.kind for memory in device.addressable_memories()})
    if _HOST in kinds:
        return
    # jax takes every other kind for device memory, and would silently keep the activations there.
    other = " (jax.checkpoint offloads to pinned_host alone, not to unpinned_host)" if "unpinned_host" in kinds else ""
    raise RuntimeError(
        f"Activations cannot be offloaded on the backend {device.platform!r}: its devices have the memory kinds "
        f"{', '.join(kinds) or 'none'}, not {_HOST}{other}. Keep the activations on the device with "
        "jax.checkpoint_policies.save_only_these_names, or have them recomputed by naming none."
    )


def probe_gradients(policy: Callable[..., Any], *, device: Any = None) -> list[Float[np.ndarray, "..."]]:
    """Gradients of a small scan under a remat policy.

    The weights differ by iteration and element, so that reading another iteration's
    activations gives other numbers. There are no matrix products, whose rounding might
    differ between two compilations.

    Args:
        policy: A policy that decides on `"zerojax_probe_input"` and `"zerojax_probe_inner"`.
        device: Where to run; None for the default device.

    Returns:
        The gradients of the weights, one row an iteration, and of the scan's first input.
    """

    def body(x, w):
        x = checkpoint_name(x, "zerojax_probe_input")
        inner = checkpoint_name(x * w, "zerojax_probe_inner")
        return jnp.sin(inner) + 0.5 * x, None

    def loss(weights, x):
        return jnp.sum(jnp.square(jax.lax.scan(jax.checkpoint(body, policy=policy), x, weights)[0]))

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(*jax.device_put(probe_inputs(), device))
    return [np.asarray(gradient) for gradient in jax.device_get(gradients)]


def probe_inputs() -> tuple[Float[np.ndarray, "iterations a b"], Float[np.ndarray, "a b"]]:
    """Weights and first input of the self-test's scan."""
    size = _ROW[0] * _ROW[1]
    weights = np.linspace(0.4, 1.6, _ITERATIONS * size, dtype=np.float32).reshape(_ITERATIONS, *_ROW)
    return weights, np.linspace(0.5, 1.0, size, dtype=np.float32).reshape(_ROW)


def compare(gradients: Callable[[Callable[..., Any]], Sequence[np.ndarray]], platform: str) -> None:
    """Refuse a backend on which offloading changes gradients.

    Args:
        gradients: What `probe_gradients` is: from a policy to the gradients under it.
        platform: Name of the backend, for the message.

    Raises:
        RuntimeError: If they differ by more than rounding.
    """
    names = ["zerojax_probe_input", "zerojax_probe_inner"]
    saved = gradients(jax.checkpoint_policies.save_only_these_names(*names))
    offloaded = gradients(offloading(names))
    largest = max(float(np.max(np.abs(a))) for a in saved)
    # NumPy's maximum: Python's may skip a NaN.
    difference = np.max([np.max(np.abs(a - b)) for a, b in zip(saved, offloaded, strict=True)])
    # Two compilations of the same few float32 operations may fuse them differently: some roundings of 1e-7 each.
    # Activations of another iteration differ by tenths. Not `>`: a NaN is refused.
    if not difference <= 1e-5 * largest:
        raise RuntimeError(
            f"Activations cannot be offloaded with jaxlib {jaxlib.__version__} on the backend {platform!r}: in a small "
            f"scan the gradients with offloading differ from those without by up to {difference:.3g}, where the "
            f"largest is {largest:.3g}. A known cause: jaxlib 0.11.0 reads offloaded activations of a scan in the "
            f"wrong order on GPU ({_ISSUE}); 0.11.2 and 0.12.0 do not. Install another jaxlib, or keep the activations "
            "on the device with jax.checkpoint_policies.save_only_these_names."
        )
