"""The entry of the engine. `gather_on_use` rewrites a loss of full parameters to take shards. `block` marks a layer.

`train.view` calls `gather_on_use` at stage 3. `gather_on_use` traces the loss, lets `planner` divide it into segments
(`trace_loss`), and returns the resulting program as a differentiable function (`run.as_function`).
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax import compat, jaxprs, names
from zerojax.comm.collectives import Collectives
from zerojax.dims import NOWHERE, UNKNOWN, Follower, State, at
from zerojax.gather.options import Options
from zerojax.gather.planner import planned
from zerojax.gather.residuals import StandIn
from zerojax.gather.run import as_function
from zerojax.gather.segments import Program
from zerojax.layout.leaf import Leaf

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


def gather_on_use(
    fn: Callable,
    layout: Any,
    *,
    comm: Collectives,
    prefetch: int = 1,
    reshard_after_forward: bool = True,
    of_rows: Collection[int] = (),
    differing: Collection[int] | None = None,
) -> Callable:
    """Rewrite `fn(params, *args)` to take shards of `params`. `layout` is a tree of `Leaf` with their structure.

    `of_rows` has the indices of the `args` that hold the rows of the batch on dim 0, and `differing` of those that may
    differ between devices (None: all). Without `reshard_after_forward`, a parameter needs two collectives instead of
    three, but all gathered parameters are in memory at once. In device view, the result must be called inside a
    `jax.shard_map` that is manual over the axes of `comm`.

    The derivative with respect to a sharded parameter is a shard of the sum over devices, with zeros in the padding;
    with respect to any other argument, it is this device's derivative. A parameter may be given as a `StandIn`: JAX
    then differentiates its zeros, so the gradient may have another shape or be in other memory. A shard in host memory
    must be given so, and is copied to the device before each gather.

    References:
        Rajbhandari et al. 2020, arXiv 1910.02054, section 5.
    """
    options = Options(comm, prefetch, reshard_after_forward)

    def wrapped(params, *args):
        given, tree = jax.tree.flatten(params, is_leaf=lambda x: isinstance(x, StandIn))
        shards = [x.value if isinstance(x, StandIn) else x for x in given]
        zeros = {i: x.zeros for i, x in enumerate(given) if isinstance(x, StandIn)}
        leaves = _leaves_of(layout, jax.tree.structure(tree.unflatten(shards)))
        comm.check(shards, leaves)
        full = [
            jax.ShapeDtypeStruct(leaf.shape, shard.dtype) if leaf.kind == "sharded" else shard
            for leaf, shard in zip(leaves, shards, strict=True)
        ]
        on_leaves = lambda full, *args: fn(tree.unflatten(full), *args)
        unlike = range(len(args)) if differing is None else differing
        program, arrays, consts, structure = trace_loss(on_leaves, leaves, full, args, of_rows, comm, unlike)
        # Only the shapes of the zeros are passed on. A backward pass that closes over a tracer would keep the trace of
        # the derivative alive.
        run = as_function(program, options, {i: jax.ShapeDtypeStruct(x.shape, x.dtype) for i, x in zeros.items()})
        results = run(*shards, *arrays, *consts, *zeros.values())
        return jax.tree.unflatten(structure, results)

    return wrapped


def trace_loss(
    fn: Callable,
    leaves: Sequence[Leaf],
    full: Sequence,
    args: Sequence,
    of_rows: Collection[int] = (),
    comm: Collectives | None = None,
    differing: Collection[int] | None = None,
    *,
    by_row: Collection[int] = (),
) -> tuple[Program, list, list, Any]:
    """Trace `fn(params, *args)`, which takes a list of parameters, and divide it into segments.

    The parameters have the layouts `leaves`, and the arrays or shapes `full`. In global view, `comm.follower` finds
    which dims of each value hold the rows of the batch. A parameter's gradient is a sum over such a dim, which
    `Collectives` divides into one partial sum per worker (`comm.partial_sums`). The total is the same for any dim, so a
    wrong dim costs time and not correctness. If `differing` is None, parameters are neither reduced nor quantised on
    shards. Scans over the parameters `by_row` are unrolled.

    Returns:
        The program, the arrays among `args`, the arrays that the loss closes over, and the structure of the loss's
        results. The arguments of the program are the parameters, followed by both lists of arrays.
    """
    arrays, put_back = split_arrays(args)
    follower, experts = None, []
    if comm is not None:
        follower = comm.follower
        experts = [i for i in comm.experts(leaves) if leaves[i].kind != "sharded"]
    given = param_states(full, experts) + row_states(args, of_rows, follower)
    on_arrays = lambda full, arrays: fn(full, *put_back(arrays))
    closed, shape = jax.make_jaxpr(on_arrays, return_shape=True)(list(full), arrays)
    check_types(compat.opened(closed)[0])
    of_params = [i not in experts for i in range(len(full))]
    alike = None if differing is None else of_params + alike_args(args, differing)
    sharded = [leaf if leaf.kind == "sharded" else None for leaf in leaves]
    program, consts = planned(closed, sharded, given, follower, alike, by_row)
    if experts:
        program = dataclasses.replace(program, experts=frozenset(program.invars[i] for i in experts))
    return program, arrays, consts, jax.tree.structure(shape)


def check_types(jaxpr: Any) -> None:
    """Raise a TypeError if the loss computes a value whose type is defined with `jax.experimental.hijax`."""
    for eqn in jaxprs.equations(jaxpr):
        for var in eqn.outvars:
            if not hasattr(var.aval, "dtype") and not compat.is_ref(var) and compat.is_high(var):
                raise TypeError(
                    f"The loss makes a value of type {var.aval} at {compat.line_of(eqn)}. Stage 3 divides a loss by "
                    "the sizes of its arrays, and a value of a type of jax.experimental.hijax has no size. "
                    "Compute with arrays there, or use stage 2."
                )


def block(fn: Callable) -> Callable:
    """Mark `fn` as one layer, whose parameters are gathered together, and dropped when `fn` returns.

    Use `block` for models whose layers are not under `jax.checkpoint`. Outside of stage 3, `block` is `jax.jit`.

    Args:
        fn: A function of arrays. It takes parameters as arguments, or closes over them.

    Returns:
        A function that returns the results of `fn`.

    Examples:
        >>> import jax.numpy as jnp
        >>> layer = block(lambda w, x: jnp.tanh(x @ w))
        >>> layer(jnp.ones((2, 2)), jnp.zeros((1, 2)))
        Array([[0., 0.]], dtype=float32)
    """

    def zerojax_block(*args, **kwargs):
        return fn(*args, **kwargs)

    zerojax_block.__name__ = names.BLOCK
    return jax.jit(zerojax_block)


def _leaves_of(layout, tree) -> list[Leaf]:
    """Return the layout's leaves in the order of the parameters, whose structure is `tree`."""
    leaves, structure = jax.tree.flatten(layout, is_leaf=lambda x: isinstance(x, Leaf))
    if tree != structure:
        raise TypeError(
            f"The layout does not fit the parameters: it has the structure {structure}, they have {tree}. Build the "
            "layout from the same tree of parameters."
        )
    return leaves


def split_arrays(args: Sequence) -> tuple[list, Callable]:
    """Return the arrays in `args`, and a function that puts arrays back among the other values (flags, names)."""
    leaves, tree = jax.tree.flatten(args)
    is_array = [isinstance(x, _ARRAYS) for x in leaves]

    def put_back(arrays):
        remaining = iter(arrays)
        return tree.unflatten([next(remaining) if on else x for x, on in zip(leaves, is_array, strict=True)])

    return [x for x, on in zip(leaves, is_array, strict=True) if on], put_back


def alike_args(args: Sequence, differing: Collection[int]) -> list[bool]:
    """Return, for each array in `args`, whether it is alike on all devices. Integers may be PRNG keys, which differ."""
    return [
        i not in differing and jnp.issubdtype(x.dtype, jnp.inexact)
        for i, arg in enumerate(args)
        for x in jax.tree.leaves(arg)
        if isinstance(x, _ARRAYS)
    ]


def param_states(params: Sequence, experts: Collection[int]) -> list[State]:
    """Return the state of each parameter: no dim holds rows. It is unknown for experts, which a data axis divides."""
    return [UNKNOWN if i in experts else NOWHERE for i in range(len(params))]


def row_states(args: Sequence, of_rows: Collection[int], follower: Follower | None) -> list[State]:
    """Return the state of each array in `args`. Dim 0 holds the rows of the batch if the argument is in `of_rows`."""
    # If the devices do not divide the number of rows, as in some evaluations, every device holds the whole array.
    count = 1 if follower is None else follower.count
    return [
        at(0) if i in of_rows and x.shape and x.shape[0] % count == 0 else NOWHERE
        for i, arg in enumerate(args)
        for x in jax.tree.leaves(arg)
        if isinstance(x, _ARRAYS)
    ]
