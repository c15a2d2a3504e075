"""Give a call of a function with a custom derivative the quantised weight in place of a parameter that it never reads.

Flax's direct FP8 layers pass both a kernel and its float8 copy to their product. The product reads the copy alone, and
takes the kernel only because the kernel gets the cotangent. It also reads a scale, which the call that quantises the
kernel returns, although the scale does not depend on the kernel. Both would need the whole kernel on every device.
`spared` evaluates such calls without it. `narrow` then finds the copy as the quantised weight to gather.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.core
import numpy as np
from jax import lax

from zerojax import compat, jaxprs
from zerojax.gather.parts import flat


@jax.custom_vjp
def straight_through(weight: jax.Array, quantised: jax.Array) -> jax.Array:
    """Return `quantised` in the type of `weight`. In the backward pass, `weight` gets the whole cotangent."""
    return quantised.astype(weight.dtype)


straight_through.defvjp(
    lambda weight, quantised: (straight_through(weight, quantised), None), lambda _, cotangent: (cotangent, None)
)


def spared(eqn: Any, values: Sequence, dims: Mapping) -> list | None:
    """Evaluate a call of a function with a custom derivative, with fewer uses of parameters. The results are equal.

    Return None if `eqn` is another equation, or if nothing can be spared. `dims` is a result of `parts.dims_of`.
    """
    if not eqn.primitive.name.startswith("custom_vjp"):
        return None
    pairs, alike = _pairs(eqn, dims), _alike_results(eqn, dims)
    if not pairs and not alike:
        return None
    call, values = _Call(eqn), list(values)
    pairs = [(i, j) for i, j in pairs if not call.reads(i) and call.gives_no_cotangent(j)]
    for i, j in pairs:
        values[i] = straight_through(values[i], values[j])
        values[j] = values[i].astype(values[j].dtype)
    divided = [i for i, a in enumerate(eqn.invars) if _dim_of(a, dims) is not None]
    alike = [k for k in alike if call.is_apart(k, divided)]
    if not pairs and not alike:
        return None
    results = compat.evaluate_one(eqn, values)
    for k in alike:
        results[k] = lax.stop_gradient(call.result(k, values))
    return results


def _dim_of(atom: Any, dims: Mapping) -> int | None:
    return None if compat.is_literal(atom) else dims.get(atom)


def _pairs(eqn: Any, dims: Mapping) -> list[tuple[int, int]]:
    """Return pairs of operands: a weight, and a value of the same shape and division that has one byte per element."""
    operands = [(i, a) for i, a in enumerate(eqn.invars) if _dim_of(a, dims) is not None]
    wide = [(i, a) for i, a in operands if a.aval.dtype.itemsize > 1 and jaxprs.differentiable(a.aval.dtype)]
    narrow = [(j, a) for j, a in operands if a.aval.dtype.itemsize == 1 and a.aval.dtype != np.bool_]
    once = lambda a: list(eqn.invars).count(a) == 1
    alike = lambda a, b: a.aval.shape == b.aval.shape and dims[a] == dims[b]
    return [(i, j) for i, a in wide for j, b in narrow if alike(a, b) and once(a) and once(b)]


def _alike_results(eqn: Any, dims: Mapping) -> list[int]:
    """Return the results that are alike on all devices, if the call also has a result that is divided."""
    found = [dims.get(v, -1) for v in eqn.outvars]
    is_divided = any(dim not in (None, -1) for dim in found)
    return [k for k, dim in enumerate(found) if dim is None and is_divided and not compat.is_dropped(eqn.outvars[k])]


class _Call:
    """What a call of a function with a custom derivative reads, in both passes."""

    def __init__(self, eqn: Any):
        self._eqn = eqn
        self._moving = [i for i, a in enumerate(eqn.invars) if _moves(a)]
        self._active = [k for k, v in enumerate(eqn.outvars) if not compat.is_dropped(v) and _moves(v)]

    @functools.cached_property
    def _passes(self) -> Any:
        """Return the flat jaxpr of `(*operands, *cotangents) -> (*results, *cotangents of the operands)`."""

        def both(*args):
            values, cotangents = list(args[: len(self._eqn.invars)]), args[len(self._eqn.invars) :]

            def of_moving(*some):
                for i, x in zip(self._moving, some, strict=True):
                    values[i] = x
                results = compat.evaluate_one(self._eqn, values)
                others = [x for k, x in enumerate(results) if x is not None and k not in self._active]
                return [results[k] for k in self._active], others

            active, pull, others = jax.vjp(of_moving, *(values[i] for i in self._moving), has_aux=True)
            return *active, *others, *pull(list(cotangents))

        atoms = [*self._eqn.invars, *(self._eqn.outvars[k] for k in self._active)]
        closed = flat(jax.make_jaxpr(both)(*(jax.core.ShapedArray(a.aval.shape, a.aval.dtype) for a in atoms)))
        return compat.opened(closed)[0]

    def reads(self, i: int) -> bool:
        """Return whether a result or a cotangent depends on the value of operand `i`."""
        _, reads = jaxprs.needed_for(self._passes.eqns, self._passes.outvars)
        return self._passes.invars[i] in reads

    def gives_no_cotangent(self, i: int) -> bool:
        """Return whether the cotangent of operand `i` is always zero."""
        if i not in self._moving:
            return True
        made = {v: eqn for eqn in self._passes.eqns for v in eqn.outvars}
        atom = self._passes.outvars[len(self._passes.outvars) - len(self._moving) + self._moving.index(i)]
        while not compat.is_literal(atom) and atom in made:
            if made[atom].primitive.name not in ("broadcast_in_dim", "convert_element_type"):
                return False
            atom = made[atom].invars[0]
        return compat.is_literal(atom) and not np.any(atom.val)

    def is_apart(self, k: int, operands: Sequence[int]) -> bool:
        """Return whether result `k` needs none of `operands`, and no cotangent depends on its cotangent."""
        if k in self._active:
            cotangent = self._passes.invars[len(self._eqn.invars) + self._active.index(k)]
            wanted = self._passes.outvars[len(self._passes.outvars) - len(self._moving) :]
            if cotangent in jaxprs.needed_for(self._passes.eqns, wanted)[1]:
                return False
        jaxpr, _ = compat.opened(self._alone(k))
        _, reads = jaxprs.needed_for(jaxpr.eqns, jaxpr.outvars)
        return reads.isdisjoint(jaxpr.invars[i] for i in operands)

    def result(self, k: int, values: Sequence) -> jax.Array:
        """Compute result `k` without the equations that it does not need."""
        jaxpr, consts = compat.opened(self._alone(k))
        part = compat.part_of(jaxpr, jaxprs.alive(jaxpr), [*compat.constvars_of(jaxpr), *jaxpr.invars], jaxpr.outvars)
        return jax.core.eval_jaxpr(part, (), *jaxprs.as_jax_values(consts), *values)[0]

    def _alone(self, k: int) -> Any:
        avals = [jax.core.ShapedArray(a.aval.shape, a.aval.dtype) for a in self._eqn.invars]
        return flat(jax.make_jaxpr(lambda *args: compat.evaluate_one(self._eqn, args)[k])(*avals))


def _moves(atom: Any) -> bool:
    return not compat.is_literal(atom) and jaxprs.differentiable(atom.aval.dtype)
