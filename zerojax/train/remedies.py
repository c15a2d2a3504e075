"""Replace errors that JAX raises about a loss by errors that say what to do."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

DIVIDED_ALREADY = (
    "The loss function divides rows over a mesh axis (with_sharding_constraint, shard_map, or the types of an Explicit "
    "mesh), and in device view its "
    'rows are divided already. Pass view="global" to zero_shard, where it sees them all.'
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
        "The loss function names a mesh axis, as in lax.psum or lax.axis_index. In global view there is one loss for "
        "all devices, without such an axis. Drop the collective: sums are over all rows already. Or pass "
        'view="device" to zero_shard, or put the collective into a jax.shard_map.',
    ),
    (
        "device",
        r"only refer to Auto axes|[Cc]ontext mesh .*Manual.* should match the mesh|of type: AxisType.Manual",
        DIVIDED_ALREADY,
    ),
    (
        "",
        r"passed to \w+ cannot contain axis names that are of type Auto",
        "The loss function names the types of arrays (jax.sharding.reshard, out_sharding=), which takes Explicit axes, "
        "and the axes of the mesh are Auto. Use jax.lax.with_sharding_constraint, or give zero_shard a mesh with "
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
        "The loss closes over a jax.Ref. In device view every device would write a value of its own to it. Pass "
        f'view="global" to zero_shard, where there is one loss. Or do without the ref. {_AS_VALUE}',
    ),
    (
        "",
        r"mutable array reference|JaxprInputEffect",
        "The loss gives a jax.Ref to jax.checkpoint or to a jax.custom_vjp, which keep it for the backward pass. "
        "zerojax runs the two passes as separate programs, and a ref cannot be passed from one to the other. For a "
        "custom_vjp, let only its backward rule close over the ref. Under jax.checkpoint, do without the ref. "
        f"{_AS_VALUE}",
    ),
    (
        "",
        r"incompatible devices.*ARG_SHARDING with device ids",
        "The loss closes over an array or a jax.Ref on other devices than those of the mesh. If it is a ref, make it "
        f"on the mesh: jax.new_ref(jax.device_put(x, NamedSharding(mesh, PartitionSpec()))). {_AS_VALUE}",
    ),
)


@contextlib.contextmanager
def remedies(view: str, *, of_refs: bool = False) -> Iterator[None]:
    """Replace errors of JAX about a loss in this view, inside of the `with` block, by errors that say what to do.

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
