"""`gather_on_use` rewrites a loss of full parameters to take shards, as a function that JAX differentiates.

An evaluation needs this, because its caller may take the gradient. A training step runs both passes itself (`engine`).
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax

from zerojax import names
from zerojax.comm.collectives import Collectives
from zerojax.gather.engine import run_backward, run_forward, trace_loss
from zerojax.gather.schedule import Options
from zerojax.gather.segments import Program, Static
from zerojax.layout.leaf import Leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StandIn:
    """A parameter for `gather_on_use`, and zeros that are differentiated instead of the parameter.

    JAX gives a cotangent the shape and the memory of its primal. If a gradient needs another shape or memory, zeros in
    that shape and memory are differentiated instead. No equation reads the zeros. For a shard in host memory, the zeros
    are on the device. If a gradient is reduced after the pass, the zeros may have a dim of partial sums in front.

    Attributes:
        value: The parameter in storage.
        zeros: Zeros with the gradient's shape and memory, and the parameter's type.
    """

    value: Any
    zeros: Any


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


def as_function(program: Program, options: Options, zeros: Mapping[int, jax.ShapeDtypeStruct]) -> Callable:
    """Return the program as a function `run(*arguments, *zeros)` with a backward pass.

    `zeros` has the shapes of the zeros of `StandIn`s, by the index of the argument.
    """
    count = len(program.invars)

    @jax.custom_vjp
    def run(*args):
        with names.outside_transforms():
            return run_forward(program, args[:count], None, options)[0]

    def forward(*args):
        active = [arg.perturbed for arg in args[:count]]
        for place, stand_in in zip(zeros, args[count:], strict=True):
            active[place] = stand_in.perturbed
        values = [arg.value for arg in args[:count]]
        with names.outside_transforms():  # The passes of the segments have these names.
            results, kept = run_forward(program, values, active, options)
        return results, (values, kept, Static(active))

    def backward(residuals, cotangents):
        args, kept, active = residuals
        given = [None if isinstance(c, jax.custom_derivatives.SymbolicZero) else c for c in cotangents]
        with names.outside_transforms():
            grads = run_backward(program, args, active.value, kept, given, options)
        # The gradient of an argument that is no sharded parameter may still have partial sums, on one dim in front.
        summed = lambda x, var: x if x is None or x.ndim == var.aval.ndim else x.sum(0)
        pairs = enumerate(zip(grads, program.invars, strict=True))
        for_args = [None if i in zeros else summed(x, var) for i, (x, var) in pairs]
        for_zeros = [None if grads[i] is None else options.comm.like(grads[i], x) for i, x in zeros.items()]
        return (*for_args, *for_zeros)

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run


def _leaves_of(layout, tree) -> list[Leaf]:
    """Return the layout's leaves in the order of the parameters, whose structure is `tree`."""
    leaves, structure = jax.tree.flatten(layout, is_leaf=lambda x: isinstance(x, Leaf))
    if tree != structure:
        raise TypeError(
            f"The layout does not fit the parameters: it has the structure {structure}, they have {tree}. Build the "
            "layout from the same tree of parameters."
        )
    return leaves
