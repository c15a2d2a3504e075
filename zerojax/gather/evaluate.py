"""Evaluate a jaxpr whose parameters arrive in the narrow type they were gathered in.

A model keeps float32 parameters and computes in bfloat16: somewhere in a layer, often
inside its remat, stands a cast. Gathering after the cast moves half the bytes, so the
shard is cast first; `Narrow` is the promise that the layer's own cast has been made
already. What meets a `Narrow` without casting it gets it widened back.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax

from zerojax import compat
from zerojax.gather.sharded_param import narrower

LAYOUTS = frozenset({"transpose", "reshape", "squeeze", "expand_dims", "slice", "name", "stop_gradient", "copy"})


@dataclasses.dataclass(frozen=True)
class Narrow:
    """A gathered parameter in the type its uses cast it to.

    Attributes:
        value: The array, already cast.
        dtype: The type the jaxpr believes it has.
    """

    value: jax.Array
    dtype: np.dtype


def widen(value):
    """The array a jaxpr expects; only values that went through a `Narrow` cost a cast."""
    return lax.convert_element_type(value.value, value.dtype) if isinstance(value, Narrow) else value


def evaluate(jaxpr, consts: Sequence, args: Sequence) -> list:
    """Evaluate a jaxpr, some of whose arguments may be `Narrow`; the results never are.

    Calls are opened: autodiff would otherwise hand their residuals over as results of one
    equation, of which nobody can tell any more which depend on parameters alone.
    """
    env = dict(zip(compat.constvars_of(jaxpr), consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom):
        return atom.val if compat.is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, _apply(jaxpr, eqn, [read(atom) for atom in eqn.invars]), strict=True))
    return [widen(read(atom)) for atom in jaxpr.outvars]


def _apply(jaxpr, eqn, values: Sequence) -> Sequence:
    name = eqn.primitive.name
    if (body := compat.called(eqn)) is not None:
        return evaluate(*compat.opened(body), values)
    if compat.is_remat(eqn):
        return remat(eqn, values)
    if not any(isinstance(value, Narrow) for value in values):
        return compat.evaluate_one(jaxpr, eqn, values)
    if name == "convert_element_type" and eqn.params["new_dtype"] == values[0].value.dtype:
        return [values[0].value]
    if name in LAYOUTS and len(values) == 1:
        return [Narrow(compat.evaluate_one(jaxpr, eqn, [values[0].value])[0], values[0].dtype)]
    return compat.evaluate_one(jaxpr, eqn, [widen(value) for value in values])


def remat(eqn, values: Sequence) -> list:
    """The user's own `jax.checkpoint`, with the user's policy, on `values`."""
    dtypes = [value.dtype if isinstance(value, Narrow) else None for value in values]
    arrays = [value.value if isinstance(value, Narrow) else value for value in values]

    def body(*arrays):
        inner = [a if d is None else Narrow(a, d) for a, d in zip(arrays, dtypes, strict=True)]
        return evaluate(*compat.opened(eqn.params["jaxpr"]), inner)

    policy, prevent_cse = eqn.params["policy"], eqn.params["prevent_cse"]
    return jax.checkpoint(body, policy=policy, prevent_cse=prevent_cse)(*arrays)


def demanded(jaxpr, variables: Sequence) -> list[np.dtype | None]:
    """The narrower type that every use of a variable casts it to, or None, for each of `variables`."""
    uses, results = uses_of(jaxpr)
    found = [_demands(var, uses, results) for var in variables]
    return [next(iter(types)) if len(types) == 1 and None not in types else None for types in found]


def _demands(var, uses: dict, results: frozenset) -> set[np.dtype | None]:
    """Types that `var` is cast to; None stands for a use that does not cast to a narrower one."""
    found: set[np.dtype | None] = {None} if var in results else set()
    for eqn, index in uses.get(var, ()):
        name = eqn.primitive.name
        if name == "convert_element_type" and narrower(eqn.params["new_dtype"], var.aval.dtype):
            found.add(np.dtype(eqn.params["new_dtype"]))
        elif name in LAYOUTS and len(eqn.invars) == 1:
            found |= _demands(eqn.outvars[0], uses, results)
        elif (body := eqn.params["jaxpr"] if compat.is_remat(eqn) else compat.called(eqn)) is not None:
            inner, _ = compat.opened(body)
            found |= _demands(inner.invars[index], *uses_of(inner))
        elif name == "scan" and not _is_carried(eqn, index):
            inner, _ = compat.opened(eqn.params["jaxpr"])
            found |= _demands(inner.invars[index], *uses_of(inner))
        else:
            found.add(None)
    return found


def _is_carried(eqn, index: int) -> bool:
    parts = compat.scan_parts(eqn)
    return parts.consts <= index < parts.consts + parts.carry


def uses_of(jaxpr) -> tuple[dict, frozenset]:
    """`(variable -> [(equation, which operand)], variables that are results)`."""
    uses: dict = {}
    for eqn in jaxpr.eqns:
        for index, atom in enumerate(eqn.invars):
            if not compat.is_literal(atom):
                uses.setdefault(atom, []).append((eqn, index))
    return uses, frozenset(atom for atom in jaxpr.outvars if not compat.is_literal(atom))
