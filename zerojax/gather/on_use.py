"""Call a program as a function that JAX differentiates.

An evaluation needs this, because its caller may take the gradient. A training step runs both passes itself (`engine`).
"""

from collections.abc import Callable

import jax

from zerojax import compat, names
from zerojax.gather.engine import run_backward, run_forward
from zerojax.gather.schedule import Options
from zerojax.gather.segments import Program


def as_function(program: Program, options: Options) -> Callable:
    """Return a program as a function of its arguments, with a backward pass.

    The derivative with respect to a sharded parameter is a shard of the sum over devices, with zeros in the padding.
    A shard in host memory is copied to the device before each gather, and its derivative is copied to the host.
    In device view, derivatives with respect to other arguments are not summed over devices, and the function must be
    called inside a `jax.shard_map` that is manual over the axes of `options.comm`.

    References:
        Rajbhandari et al. 2020, arXiv 1910.02054, section 5.
    """

    @jax.custom_vjp
    def run(*args):
        with names.outside_transforms():
            return run_forward(program, args, None, options)[0]

    def forward(*args):
        active, values = [arg.perturbed for arg in args], [arg.value for arg in args]
        with names.outside_transforms():  # The passes of the segments have these names.
            results, kept = run_forward(program, values, active, options)
        return results, (values, kept)

    def backward(residuals, cotangents):
        args, kept = residuals
        given = [None if isinstance(c, jax.custom_derivatives.SymbolicZero) else c for c in cotangents]
        with names.outside_transforms():
            grads = run_backward(program, args, kept, given, options)

        def like_primal(grad, arg, var):
            # The gradient of an argument that is not a sharded parameter may have partial sums, on an extra dim 0.
            grad = grad if grad.ndim == var.aval.ndim else grad.sum(0)
            return jax.device_put(grad, jax.memory.Space.Host) if compat.in_host_memory(jax.typeof(arg)) else grad

        triples = zip(grads, args, program.invars, strict=True)
        return tuple(grad if grad is None else like_primal(grad, arg, var) for grad, arg, var in triples)

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run
