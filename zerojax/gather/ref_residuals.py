"""Residuals that are refs, which a `custom_vjp` or a `jax.checkpoint` keeps to use them in its backward pass.

JAX returns no ref from a trace. So `traced_passes` returns what the ref holds instead, and `with_refs` undoes that.
"""

from collections.abc import Sequence
from typing import Any

from zerojax import jaxprs


def with_refs(jaxpr: Any, chosen: Sequence[bool]) -> Any:
    """Replace those of the last results that are `chosen`, and read a ref each, by the refs."""
    first = len(jaxpr.outvars) - len(chosen)
    made = jaxprs.makers(jaxpr.eqns)
    reads = {i: made[jaxpr.outvars[i]] for i, on in enumerate(chosen, first) if on}
    dropped = {*map(id, reads.values())}
    outs = [reads[i].invars[0] if i in reads else atom for i, atom in enumerate(jaxpr.outvars)]
    return jaxpr.replace(eqns=[eqn for eqn in jaxpr.eqns if id(eqn) not in dropped], outvars=outs)
