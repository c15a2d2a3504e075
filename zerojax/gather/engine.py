"""`gather_on_use`: a loss function on whole parameters, rewritten to take shards."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from zerojax import compat
from zerojax.gather import segments as programs
from zerojax.gather.passes import run_backward, run_forward
from zerojax.gather.residuals import Fixed, HostShard, Static
from zerojax.gather.schedule import Options
from zerojax.layout.leaf import Leaf

# Measured on the GPT yardstick (8 x H200, unrolled): 32 MiB hides 87% of the bytes, 128 MiB, a layer in one piece, 96%.
BUCKET_BYTES = 128 << 20


def gather_on_use(
    fn: Callable,
    layout: Any,
    *,
    axis: tuple[str, ...],
    prefetch: int = 1,
    bucket_bytes: int = BUCKET_BYTES,
    reshard_after_forward: bool = True,
    reduce: np.dtype | None = None,
) -> Callable:
    """Rewrite `fn(params, *args)` to take this device's shards of `params`.

    Every cut parameter is all-gathered where it is used, dropped, gathered once more in
    the backward pass, and its gradient is reduce-scattered. `fn` is not changed: it is
    traced on logical shapes and its equations are evaluated anew. The result is for use
    inside `jax.shard_map` that is manual over `axis`.

    Args:
        fn: Any function of parameters and further arguments.
        layout: A tree of `Leaf` with the structure of `params`.
        axis: Mesh axis the parameters are cut over.
        prefetch: How many uses ahead a gather may start; 0 starts each when its use is due.
        bucket_bytes: Leaves used together are gathered together, up to this many bytes.
        reshard_after_forward: False keeps gathered parameters for the backward pass:
            two collectives a parameter instead of three, at the cost of their memory.
        reduce: Floating type in which gradients are summed over the devices; None: their own.

    Returns:
        `wrapped(local_params, *args)`, which returns what `fn` does. Its derivative with
        respect to a cut parameter is this device's shard of the sum over devices, zeros
        in the padding; with respect to anything else it is this device's own. It can be
        differentiated in reverse, once. A shard that waits in host memory is given as a `HostShard`,
        and brought to the device where it is gathered.

    Raises:
        ValueError: If an option is out of range, or a shard is not of its leaf's local shape.
        TypeError: If `layout` has not the structure of `params`.

    References:
        Rajbhandari et al. 2020, arXiv 1910.02054, section 5.
    """
    if prefetch < 0 or bucket_bytes < 0:
        raise ValueError(
            f"prefetch={prefetch} and bucket_bytes={bucket_bytes} must both be at least 0; prefetch=0 starts each "
            "gather when its use is due, bucket_bytes=0 gathers every leaf by itself."
        )
    options = Options(axis, prefetch, bucket_bytes, reshard_after_forward, reduce)

    def wrapped(local_params, *args):
        found, tree = jax.tree.flatten(local_params, is_leaf=lambda x: isinstance(x, HostShard))
        shards = [x.shard if isinstance(x, HostShard) else x for x in found]
        device_zeros = {i: x.device_zeros for i, x in enumerate(found) if isinstance(x, HostShard)}
        leaves = _checked(tree.unflatten(shards), layout, axis)
        whole = [
            jax.ShapeDtypeStruct(leaf.shape, shard.dtype) if leaf.kind == "sharded" else shard
            for leaf, shard in zip(leaves, shards, strict=True)
        ]
        program, arrays, consts, structure = traced(fn, tree, leaves, whole, args)
        run = _differentiable(program, options, tuple(device_zeros))
        results = run(*shards, *arrays, *consts, *device_zeros.values())
        return jax.tree.unflatten(structure, results)

    return wrapped


class Traced(NamedTuple):
    """A function as a program.

    Attributes:
        program: Its arguments are the parameters, then `arrays`, then `consts`.
        arrays: Those of the function's further arguments that are arrays.
        consts: Arrays that it closes over.
        structure: Of what it returns.
    """

    program: programs.Program
    arrays: list
    consts: list
    structure: Any


def traced(fn: Callable, tree: Any, leaves: Sequence[Leaf], whole: Sequence, args: Sequence) -> Traced:
    """Trace `fn` on whole parameters and cut it into segments.

    Args:
        fn: As for `gather_on_use`.
        tree: Structure of the parameters.
        leaves: How each of them is laid out.
        whole: Arrays or shapes of them; logical shape.
        args: Further arguments of `fn`; shapes are enough.
    """
    known, arrays, put_back = _without_constants(args)

    def on_leaves(whole, arrays):
        return fn(tree.unflatten(whole), *put_back(known, arrays))

    closed, shape = jax.make_jaxpr(on_leaves, return_shape=True)(whole, arrays)
    cut = [leaf.kind == "sharded" for leaf in leaves] + [False] * len(arrays)
    program, consts = _planned(closed, leaves, cut)
    return Traced(program, arrays, consts, jax.tree.structure(shape))


def block(fn: Callable) -> Callable:
    """Mark `fn` as one layer: its parameters are gathered together, and dropped when it returns.

    For models whose layers are not under `jax.checkpoint`. Nothing else changes: outside
    of `gather_on_use` this is `jax.jit`.

    Args:
        fn: A function of arrays; parameters must be arguments, or closed over.

    Returns:
        A function that does what `fn` does.

    Examples:
        >>> import jax.numpy as jnp
        >>> layer = block(lambda w, x: jnp.tanh(x @ w))
        >>> layer(jnp.ones((2, 2)), jnp.zeros((1, 2)))
        Array([[0., 0.]], dtype=float32)
    """

    def zerojax_block(*args, **kwargs):
        return fn(*args, **kwargs)

    zerojax_block.__name__ = programs.BLOCK_NAME
    return jax.jit(zerojax_block)


def _checked(local_params, layout, axis: tuple[str, ...]) -> list[Leaf]:
    """The layout's leaves, in the order of the parameters."""
    leaves, tree = jax.tree.flatten(layout, is_leaf=lambda x: isinstance(x, Leaf))
    found = jax.tree.structure(local_params)
    if tree != found:
        raise TypeError(
            f"The layout does not fit the parameters: it has the structure {tree}, they have {found}. Build the "
            "layout from the same tree of parameters."
        )
    size = lax.axis_size(axis)
    for leaf, shard in zip(leaves, jax.tree.leaves(local_params), strict=True):
        if leaf.kind == "sharded" and leaf.shards != size:
            raise ValueError(
                f"params{leaf.path} is laid out for {leaf.shards} shards, but mesh axis {axis!r} has {size} devices. "
                "Build the layout for this mesh."
            )
        required = leaf.local_shape if leaf.kind == "sharded" else leaf.shape
        if tuple(shard.shape) != required:
            raise ValueError(
                f"params{leaf.path} arrives with shape {tuple(shard.shape)} on a device, but its layout ({leaf.kind}) "
                f"requires {required}. Pass the leaf in its storage layout, with `Leaf.local_spec` in `in_specs`."
            )
    return leaves


def _without_constants(args: Sequence) -> tuple[list, list, Callable]:
    """Part arrays from what is no array (flags, names), which `fn` may branch on."""
    leaves, tree = jax.tree.flatten(args)
    is_array = [isinstance(x, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)) for x in leaves]
    known = [None if on else x for x, on in zip(leaves, is_array, strict=True)]
    arrays = [x for x, on in zip(leaves, is_array, strict=True) if on]

    def put_back(known, arrays):
        rest = iter(arrays)
        return tree.unflatten([next(rest) if on else x for x, on in zip(known, is_array, strict=True)])

    return known, arrays, put_back


def _planned(closed, leaves: Sequence[Leaf], cut: Sequence[bool]) -> tuple[programs.Program, list]:
    """The program of a traced function, and the constants that are its last arguments."""
    jaxpr, consts = compat.opened(closed)

    def flat(args, consts):
        return programs.inlined(jaxpr, consts, args, cut)

    shapes = [var.aval for var in jaxpr.invars]
    again = jax.make_jaxpr(flat)(shapes, list(consts))
    jaxpr, more = compat.opened(again)
    constvars = compat.constvars_of(jaxpr)
    bare = compat.part_of(jaxpr, jaxpr.eqns, [*jaxpr.invars, *constvars], jaxpr.outvars)
    rest = len(bare.invars) - len(leaves)
    layouts = [leaf if leaf.kind == "sharded" else None for leaf in leaves] + [None] * rest
    return programs.plan(bare, layouts), [*consts, *more]


def _differentiable(program: programs.Program, options: Options, far: Sequence[int]) -> Callable:
    """The program as a function of its arguments, and stand-ins of those in `far`, with `tape`'s backward pass."""
    count = len(program.invars)

    @jax.custom_vjp
    def run(*args):
        return run_forward(program, args[:count], None, options)[0]

    def forward(*args):
        active = [arg.perturbed for arg in args[:count]]
        for place, device_zeros in zip(far, args[count:], strict=True):
            active[place] = device_zeros.perturbed
        values = [arg.value for arg in args[:count]]
        results, kept = run_forward(program, values, active, options)
        return results, (values, kept, Fixed(Static(active)))

    def backward(residuals, cotangents):
        args, kept, fixed = residuals
        active = fixed.static.value
        given = [None if isinstance(c, jax.custom_derivatives.SymbolicZero) else c for c in cotangents]
        found = run_backward(program, args, active, kept, given, options)
        return (*(None if i in far else x for i, x in enumerate(found)), *(found[i] for i in far))

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run
