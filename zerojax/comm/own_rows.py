"""Run bare Pallas kernels on each device's own rows, if `dims.kernels` proves that their rows are independent.

The compiler cannot divide a kernel. Without a proof, every device gathers all rows and runs the whole kernel,
and a warning names the user's line. Kernels in a user's `shard_map` are divided already, so they run unchanged.
"""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from zerojax import compat, jaxprs
from zerojax.comm import rebinding
from zerojax.dims import RowDims, row_dims_of
from zerojax.dims.kernels import OwnRows, own_rows
from zerojax.dims.loops import into_loop

# The names of parameters of calls, remats, loops and branches that have jaxprs.
_BODIES = ("jaxpr", "branches", "call_jaxpr")


def on_own_rows(closed: Any, given: Sequence[RowDims], comm: Any) -> Any:
    """Return a jaxpr whose kernels run on each device's own rows, where `dims.kernels` proves that this is right.

    `given` has the row dims of the arguments. The result is open or closed, as `closed` is. `comm` is a `Collectives`.
    """
    jaxpr, consts = compat.opened(closed)
    found = comm.follower.row_dims(jaxpr, given)

    def rule(eqn, values):
        if not jaxprs.calls_kernel(eqn):
            return None
        row_dims = row_dims_of(eqn.invars, found)
        if (split := own_rows(eqn, row_dims, comm.follower.count)) is not None:
            with eqn.ctx.manager:
                return _on_parts(comm, split, eqn.primitive, values)
        again = _with_bodies(comm, eqn, row_dims)
        return None if again is None else compat.evaluate_one(again, values)

    run = lambda *values: jaxprs.evaluate(jaxpr, consts, values, rule)
    return rebinding.like(jax.make_jaxpr(run)(*(var.aval for var in jaxpr.invars)), closed)


def _on_parts(comm: Any, split: OwnRows, primitive: Any, values: Sequence) -> list:
    def kernel(*values):
        # JAX's interpreter of kernels evaluates the body here, on the mesh of the `shard_map`.
        body = rebinding.all_in_force(split.params["jaxpr"])
        return primitive.bind(*values, **{**split.params, "jaxpr": body})

    return comm.per_shard(kernel, values, split.dims, split.out_dims, comm.axes)


def _with_bodies(comm: Any, eqn: Any, row_dims: Sequence[RowDims]) -> Any:
    if (loop := compat.loop_of(eqn)) is not None:
        inside = into_loop(comm.follower, loop, row_dims)
    elif eqn.primitive.name == "cond":
        inside = row_dims[1:]
    elif compat.evaluated_body(eqn) is not None:  # also of a custom derivative whose forward pass calls it again
        inside = row_dims
    else:
        return None
    again = lambda x: tuple(map(again, x)) if isinstance(x, tuple) else on_own_rows(x, inside, comm)
    return eqn.replace(params={**eqn.params, **{k: again(eqn.params[k]) for k in _BODIES if k in eqn.params}})


def warn_of_kernels(eqns: Iterable) -> list[str]:
    """Warn about kernels that every device runs on all rows, and return the warnings."""
    found = [
        f"`{eqn.primitive.name}` at {compat.line_of(eqn) or 'an unknown line'} runs all rows of the batch on every "
        "device, and its operands are gathered for that: the compiler cannot divide it. Put it into a jax.shard_map "
        'over the data axes, for example jax.shard_map(kernel, mesh=mesh, in_specs=P("data"), out_specs=P("data"))'
        for eqn in eqns
    ]
    for words in found:
        warnings.warn(f"{words}.", stacklevel=2)
    return found
