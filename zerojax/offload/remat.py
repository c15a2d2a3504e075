"""Offload named activations to host memory with a remat policy.

Between the forward and the backward pass, an activation is in pinned host memory. Inside a scan, the compiler stacks
the activations, one row per iteration, and must read the rows back from the last to the first. On GPU, jaxlib before
0.11.2 silently reads the rows from the first to the last (openxla/xla#46231). So the policy refuses such a jaxlib.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jaxlib

_HOST = "pinned_host"
_FIRST_CORRECT_ON_GPU = (0, 11, 2)


def remat_policy(*names: str, save: Sequence[str] = ()) -> Callable[..., Any]:
    """Return a policy for `jax.checkpoint` that offloads named activations to host memory.

    Name activations in the model with `jax.ad_checkpoint.checkpoint_name`. Activations whose names are not given here
    are recomputed in the backward pass. A name that the model does not use has no effect. To offload a layer's input,
    as DeepSpeed's `cpu_checkpointing` does, name the input on the first line of the checkpointed function.

    Scan the layers, or train at stage 3. In an unrolled model below stage 3, XLA:GPU (seen on jaxlib 0.12.0)
    copies each activation only when the backward pass needs it, which saves no memory.

    Args:
        *names: Names of the activations to offload to pinned host memory.
        save: Names of the activations to keep in device memory.

    Returns:
        A policy, for the argument `policy` of `jax.checkpoint` and `flax.linen.remat`.

    Raises:
        TypeError: If a name is not a string.
        ValueError: If there is no name to offload, if a name is empty, or if a name is in both `names` and `save`.
        RuntimeError: If the backend has no pinned host memory, or if its jaxlib reads offloaded activations back in the
            wrong order.

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
            "remat_policy() was given no name to offload. Name at least one activation, or use "
            "jax.checkpoint_policies.save_only_these_names if all activations stay on the device."
        )
    if both := sorted({*names} & {*save}):
        raise ValueError(
            f"{', '.join(map(repr, both))} cannot be offloaded and saved on the device at once. Take each name out of "
            "`names` or out of `save`."
        )
    require_offload(jax.local_devices(backend=jax.default_backend())[0])
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(save),
        names_which_can_be_offloaded=list(names),
        offload_src="device",
        offload_dst=_HOST,
    )


def require_offload(device: Any, version: str = jaxlib.__version__) -> None:
    """Raise a `RuntimeError` if the backend of `device` cannot offload activations with this version of jaxlib."""
    keep = "the activations on the device with jax.checkpoint_policies.save_only_these_names"
    kinds = sorted({memory.kind for memory in device.addressable_memories()})
    if _HOST not in kinds:
        # JAX treats every other kind as device memory, and would silently keep the activations on the device.
        other = "unpinned_host" in kinds
        raise RuntimeError(
            f"Activations cannot be offloaded on the backend {device.platform!r}: its devices have the memory kinds "
            f"{', '.join(kinds) or 'none'}, not {_HOST}"
            f"{' (jax.checkpoint offloads to pinned_host alone, not to unpinned_host)' if other else ''}. Keep {keep}, "
            f"or recompute them: jax.checkpoint without a policy."
        )
    found = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if device.platform in ("gpu", "cuda", "rocm") and found < _FIRST_CORRECT_ON_GPU:
        raise RuntimeError(
            f"Activations cannot be offloaded with jaxlib {version} on the backend {device.platform!r}: inside a scan "
            f"it reads them back in the wrong order (openxla/xla#46231), so gradients would be wrong. Install jaxlib "
            f"{'.'.join(map(str, _FIRST_CORRECT_ON_GPU))} or newer, or keep {keep}."
        )
