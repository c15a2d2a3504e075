"""Call private functions of JAX for what its public API lacks. CONTRIBUTING.md lists them, with the reasons."""

import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax


def coordination_client() -> Any:
    """Return the client of JAX's coordination service, through which processes communicate without devices."""
    from jax._src import distributed

    return distributed.global_state.client


def host_buffer(shape: Sequence[int], dtype) -> Any:
    """Return an uninitialised array in host memory. Call this function while tracing.

    `jax.lax.scan` makes the same array for results in host memory. The public API can only copy an array from the
    device to the host, so the array would exist on the device first.
    """
    from jax._src.lax import lax

    return jax.lax.broadcast(lax.empty2(dtype, memory_space=jax.memory.Space.Host), tuple(shape))


@functools.cache
def replaced_primitives() -> dict[type, str]:
    """Map each class of `HiPrim` to the name of the primitive that it replaces. Older versions of JAX lack some."""
    from jax._src import ad_checkpoint, hijax

    classes = {
        (ad_checkpoint, "CheckpointName"): "name",
        (ad_checkpoint, "CheckpointNameFwd"): "name",
        (ad_checkpoint, "RematTraced"): "checkpoint",
        (hijax, "CustomJVPTraced"): "custom_jvp_call",
        (hijax, "CustomVJPTraced"): "custom_vjp_call",
    }
    return {getattr(module, name): of for (module, name), of in classes.items() if hasattr(module, name)}


# Functions that sum an expression over the leaves of a tree, by module. Zeros in a leaf do not change the sum.
_SUMS_OVER_TREES = {
    "optax.tree_utils._tree_math": ("tree_sum", "tree_vdot"),
    "jax._src.scipy.sparse.linalg": ("_vdot_real_tree", "_vdot_tree"),
}


def is_sum_over_tree() -> bool:
    """Return whether a known function that sums over a tree makes the `Padded` array that calls this function.

    `jax.tree.map` makes a `Padded` around the result of the mapped function. A scalar result may be a sum, which zeros
    in the padding do not change, as in `optax.chain(optax.clip_by_global_norm(1.0), zero_shard(...))`. It may also be a
    mean or a minimum, which the padding makes wrong. `Padded` does not see which function was mapped, so this function
    looks in the stack for functions that sum. An error that is raised later, when the `Padded` is read, would miss a
    mean, because `jax.tree.reduce` reads the stored arrays directly.
    """
    frame = sys._getframe(1)
    between = ("zerojax.layout.padded", "jax._src.tree", "jax.tree")  # the frames of the node and of jax.tree.map
    while frame is not None and frame.f_globals.get("__name__", "").startswith(between):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name in _SUMS_OVER_TREES.get(frame.f_globals.get("__name__", ""), ())
