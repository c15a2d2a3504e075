"""Replace errors that JAX raises about a loss by errors that say what to do."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

DIVIDED_ALREADY = (
    "The loss function divides rows over a mesh axis (with_sharding_constraint, shard_map, or the types of an Explicit "
    'mesh). In device view, each device already has only its own rows. Pass view="global" to zero_shard: then the '
    "loss sees all rows."
)
_AS_VALUE = (
    "Pass the value of the ref as an argument, and return the new one: as aux, or with mutable=True of train_step as "
    "the mutable state."
)
# Rows of (view, pattern of JAX's message, message that replaces it). An empty view means both views.
OF_LOSS = (
    (
        "global",
        r"unbound axis name",
        "The loss function names a mesh axis, for example in lax.psum or lax.axis_index. In global view, one loss is "
        "computed for all devices, and it has no such axis. Remove the collective, because sums already cover all "
        'rows. Or pass view="device" to zero_shard, or put the collective into a jax.shard_map.',
    ),
    (
        "device",
        r"only refer to Auto axes|[Cc]ontext mesh .*Manual.* should match the mesh|of type: AxisType.Manual",
        DIVIDED_ALREADY,
    ),
    (
        "",
        r"passed to \w+ cannot contain axis names that are of type Auto",
        "The loss function sets shardings with jax.sharding.reshard or out_sharding=, which need Explicit mesh axes, "
        "but the axes of this mesh are Auto. Use jax.lax.with_sharding_constraint, or give zero_shard a mesh with "
        "Explicit axes.",
    ),
    (
        "",
        r"Closing over inputs to shard_map|should match the aval mesh",
        "The loss function closes over an array of an Explicit mesh, but inside the loss, arrays are on another mesh. "
        "Pass the array as a further argument of the loss, or close over a NumPy array.",
    ),
)
OF_REFS = (
    (
        "device",
        r"AbstractRef|Ref shape|mutable array reference|JaxprInputEffect",
        "The loss closes over a jax.Ref. In device view, every device would write a different value to it. Pass "
        f'view="global" to zero_shard, or remove the ref. {_AS_VALUE}',
    ),
    (
        "",
        r"mutable array reference|JaxprInputEffect",
        "The loss gives a jax.Ref to jax.checkpoint or to a jax.custom_vjp, which keep it for the backward pass. "
        "zerojax runs the two passes as separate programs, and a ref cannot be passed from one to the other. For a "
        "custom_vjp, let only its backward rule close over the ref. Under jax.checkpoint, remove the ref. "
        f"{_AS_VALUE}",
    ),
    (
        "",
        r"incompatible devices.*ARG_SHARDING with device ids",
        "The loss closes over an array or a jax.Ref that is not on the devices of the mesh. Create a ref on the mesh: "
        f" jax.new_ref(jax.device_put(x, NamedSharding(mesh, PartitionSpec()))). {_AS_VALUE}",
    ),
)


@contextlib.contextmanager
def remedies(view: str, *, of_refs: bool = False) -> Iterator[None]:
    """Replace JAX's errors about a loss, raised inside the `with` block, by errors that say what to do.

    With `of_refs`, only errors about a `jax.Ref` are replaced. JAX raises these also outside of the call of the loss.
    """
    kind, table = (TypeError, OF_REFS) if of_refs else (ValueError, OF_LOSS)
    try:
        yield
    except (AttributeError, NameError, NotImplementedError, TypeError, ValueError) as error:
        for only, pattern, message in table:
            if only in ("", view) and re.search(pattern, str(error), re.DOTALL):
                raise kind(message) from error
        raise
