"""`gather_on_use`: a loss function of full parameters, rewritten to take shards."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from zerojax import compat
from zerojax.comm.collectives import Collectives
from zerojax.dims import NOWHERE, Follower, State, at
from zerojax.gather.planner import BLOCK_NAME, planned
from zerojax.gather.residuals import StandIn
from zerojax.gather.run import as_function
from zerojax.gather.schedule import Options
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
) -> Callable:
    """Rewrite `fn(params, *args)` to take shards of `params`.

    Every sharded parameter is all-gathered where it is used, dropped, gathered once more in
    the backward pass, and its gradient is reduce-scattered. `fn` is not changed: it is
    traced on logical shapes and its equations are evaluated again.

    Args:
        fn: Any function of parameters and further arguments.
        layout: A tree of `Leaf` with the structure of `params`.
        comm: What gathers shards and reduces gradients. The result is used where its collectives may
            be: `ManualCollectives` inside a `jax.shard_map` that is manual over its axes.
        prefetch: How many uses ahead a gather may start; 0 starts each when its use is due.
        reshard_after_forward: False keeps gathered parameters for the backward pass:
            two collectives a parameter instead of three, at the cost of their memory.
        of_rows: Which of `args`, by index, hold the rows of the batch on dim 0.

    Returns:
        `wrapped(shards, *args)`, which returns what `fn` does. Its derivative with respect to
        a sharded parameter is a shard of the sum over devices, zeros in the padding; with
        respect to anything else it is this device's own. It can be differentiated in reverse;
        the gradient then in either mode. A parameter may be given as a `StandIn`; a shard in host
        memory has to be, and is copied to the device where it is gathered.

    Raises:
        ValueError: If `prefetch` is negative, or a shard is not laid out as its leaf says.
        TypeError: If `layout` has not the structure of `params`.

    References:
        Rajbhandari et al. 2020, arXiv 1910.02054, section 5.
    """
    if prefetch < 0:
        raise ValueError(f"prefetch={prefetch} must be at least 0; 0 starts each gather when its use is due.")
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
        program, arrays, consts, structure = trace_loss(fn, tree, leaves, full, args, of_rows, comm.follower)
        # Shapes alone: a backward pass that closes over a tracer keeps the trace of the derivative alive.
        run = as_function(program, options, {i: jax.ShapeDtypeStruct(x.shape, x.dtype) for i, x in zeros.items()})
        results = run(*shards, *arrays, *consts, *zeros.values())
        return jax.tree.unflatten(structure, results)

    return wrapped


class TracedLoss(NamedTuple):
    """A function as a program.

    Attributes:
        program: Its arguments are the parameters, then `arrays`, then `consts`.
        arrays: Those of the function's further arguments that are arrays.
        consts: Arrays that it closes over.
        structure: Of what it returns.
    """

    program: Program
    arrays: list
    consts: list
    structure: Any


def trace_loss(
    fn: Callable,
    tree: Any,
    leaves: Sequence[Leaf],
    full: Sequence,
    args: Sequence,
    of_rows: Collection[int] = (),
    follower: Follower | None = None,
) -> TracedLoss:
    """Trace `fn` on full parameters and divide it into segments.

    Args:
        fn: As for `gather_on_use`.
        tree: Structure of the parameters.
        leaves: How each of them is laid out.
        full: Arrays or shapes of them; logical shape.
        args: Further arguments of `fn`; shapes are enough.
        of_rows: Which of `args` hold the rows of the batch on dim 0.
        follower: Follows the rows through the program; None does not.
    """
    arrays, put_back = split_arrays(args)
    given = [NOWHERE] * len(full) + row_states(args, of_rows, follower)

    def on_leaves(full, arrays):
        return fn(tree.unflatten(full), *put_back(arrays))

    closed, shape = jax.make_jaxpr(on_leaves, return_shape=True)(full, arrays)
    check_types(compat.opened(closed)[0])
    program, consts = planned(closed, [leaf if leaf.kind == "sharded" else None for leaf in leaves], given, follower)
    return TracedLoss(program, arrays, consts, jax.tree.structure(shape))


def check_types(jaxpr: Any) -> None:
    """Refuse values that are no arrays: of the user's own types, by `jax.experimental.hijax`.

    Raises:
        TypeError: With the type, and the line where one is made.
    """
    for eqn in jaxpr.eqns:
        for var in eqn.outvars:
            if not hasattr(var.aval, "dtype") and not compat.is_ref(var) and compat.is_high(var):
                raise TypeError(
                    f"The loss makes a value of type {var.aval} at {compat.line_of(eqn)}. At stage 3 a loss is divided "
                    "where it uses its parameters, by the sizes of its arrays, and a value of a type of "
                    "jax.experimental.hijax has none. Compute with arrays there, or use stage 2."
                )
        for inner in compat.inner_jaxprs(eqn):
            check_types(inner)


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

    zerojax_block.__name__ = BLOCK_NAME
    return jax.jit(zerojax_block)


def _leaves_of(layout, tree) -> list[Leaf]:
    """Return the layout's leaves in the order of the parameters, whose structure is `tree`."""
    leaves, found = jax.tree.flatten(layout, is_leaf=lambda x: isinstance(x, Leaf))
    if tree != found:
        raise TypeError(
            f"The layout does not fit the parameters: it has the structure {found}, they have {tree}. Build the "
            "layout from the same tree of parameters."
        )
    return leaves


def split_arrays(args: Sequence) -> tuple[list, Callable]:
    """Separate the arrays among `args` from flags, names and other values that `fn` may branch on."""
    leaves, tree = jax.tree.flatten(args)
    is_array = [isinstance(x, _ARRAYS) for x in leaves]

    def put_back(arrays):
        rest = iter(arrays)
        return tree.unflatten([next(rest) if on else x for x, on in zip(leaves, is_array, strict=True)])

    return [x for x, on in zip(leaves, is_array, strict=True) if on], put_back


def row_states(args: Sequence, of_rows: Collection[int], follower: Follower | None) -> list[State]:
    """Say where each array among `args` holds the rows of the batch: on dim 0 of those that are named.

    An array whose rows the devices do not divide evenly, such as the batch of an evaluation, is whole on each of them.
    """
    count = 1 if follower is None else follower.count
    return [
        at(0) if i in of_rows and x.shape and x.shape[0] % count == 0 else NOWHERE
        for i, arg in enumerate(args)
        for x in jax.tree.leaves(arg)
        if isinstance(x, _ARRAYS)
    ]
