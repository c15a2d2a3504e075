"""Let functions with a custom derivative that read a parameter only to quantise it take the quantised value instead.

Quantised products are functions with a custom derivative. In Flax's direct FP8 layers, a product takes both the kernel
and a float8 copy of the kernel. The product reads only the copy, and takes the kernel to give the kernel a cotangent.
The call that quantises the kernel also returns a scale, which does not depend on the kernel. But a call computes all
its results from all its operands, so a reader of the scale needs the kernel. In qwix, the product quantises the kernel
itself. All these calls would need the whole kernel on every device. `spared` evaluates them without the kernel:
equations that `narrow` can move to the shards compute the quantised value first, and the product takes this value.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from zerojax import compat, jaxprs
from zerojax.gather.parts import both_passes, dims_of, function_of, with_cotangent_of, without_calls


def is_small(v: Any, var: Any) -> bool:
    """Return whether the value of `v` has at most an eighth of the elements of the value of `var`."""
    return 8 * v.aval.size <= var.aval.size


def spared(eqn: Any, values: Sequence, dims: Mapping) -> list | None:
    """Evaluate a call of a function with a custom derivative from fewer parameters. The results are the same.

    Return None if `eqn` is another equation, or if nothing can be spared. `dims` is a result of `parts.dims_of`.
    """
    if not compat.name_of(eqn).startswith("custom_vjp"):
        return None
    given = [None if compat.is_literal(a) else dims.get(a, -1) for a in eqn.invars]
    divided = [i for i, dim in enumerate(given) if dim not in (None, -1)]
    results = [dims.get(v, -1) for v in eqn.outvars if not compat.is_dropped(v)]
    if not divided or (-1 not in results and None not in results):
        return None
    # Zero cotangents of Flax's extended types are -inf, which must not be added to the cotangents of the shards.
    if any(jax.dtypes.issubdtype(a.aval.dtype, jax.dtypes.extended) for a in eqn.invars):
        return None
    call = _Call(eqn)
    if call.consts:  # The parts of `passes` would need these constants as arguments.
        return None
    if -1 in results:
        return next((found for i in divided if (found := call.opened(i, given, values)) is not None), None)
    if set(results) == {None}:
        return None
    alike = [k for k, v in enumerate(eqn.outvars) if not compat.is_dropped(v) and dims[v] is None]
    apart = {k: x for k in alike if (x := call.apart(k, divided, values)) is not None}
    return [apart.get(k, x) for k, x in enumerate(compat.evaluate_one(eqn, values))] if apart else None


class _Call:
    """A call of a function with a custom derivative, and the equations of both its passes."""

    def __init__(self, eqn: Any):
        differentiable = lambda atom: jaxprs.differentiable(atom.aval.dtype)
        self.eqn = eqn
        self.moving = [i for i, a in enumerate(eqn.invars) if not compat.is_literal(a) and differentiable(a)]
        kept = [k for k, v in enumerate(eqn.outvars) if not compat.is_dropped(v)]
        self.active = [k for k in kept if differentiable(eqn.outvars[k])]  # they have cotangents
        self.order = [*self.active, *(k for k in kept if k not in self.active)]  # of the results in `passes`
        run, active = functools.partial(compat.evaluate_one, eqn), {k: eqn.outvars[k] for k in self.active}
        passes = both_passes(run, eqn.invars, self.moving, active, results="all")
        self.passes, self.consts = compat.opened(without_calls(passes))
        count, first = len(eqn.invars), len(self.order)
        self.operands, self.cotangents = list(self.passes.invars[:count]), list(self.passes.invars[count:])
        self.results = list(self.passes.outvars[:first])
        self.pulled = dict(zip(self.moving, self.passes.outvars[first:], strict=True))

    def opened(self, i: int, given: Sequence[int | None], values: Sequence) -> list | None:
        """Evaluate the call with the quantised value of operand `i` instead of the operand.

        `given` has each operand's divided dim, None if devices have equal operands, or -1 without entry in `dims_of`.
        Return None if the call also reads operand `i` itself, or does not quantise it.
        """
        eqn, weight = self.eqn, self.eqn.invars[i]
        if not jaxprs.differentiable(weight.aval.dtype) or weight.aval.dtype.itemsize == 1:
            return None
        if list(eqn.invars).count(weight) > 1:
            return None
        var = self.operands[i]
        dims = dims_of(self.passes, {v: dim for v, dim in zip(self.operands, given, strict=True) if dim != -1})
        depends = jaxprs.dependent_on([var], self.passes.eqns)
        small = {v for v in depends if v is not var and v in dims and (dims[v] is None or is_small(v, var))}
        is_copy = lambda v: dims[v] == dims[var] and v.aval.shape == var.aval.shape and v.aval.dtype.itemsize == 1
        copies = [v for v in dims if is_copy(v) and v.aval.dtype != np.bool_ and (v in depends or self._is_unmoved(v))]
        for copy in reversed(copies):
            rest = [eqn for eqn in self.passes.eqns if not {*eqn.outvars} <= {*small, copy}]
            inside, reads = jaxprs.needed_for(rest, self.passes.outvars)
            if copy in reads and var not in reads:
                cut = [copy, *(v for v in dims if v in small and v in reads)]
                return self._evaluated(i, cut, inside, values)
        return None

    def _is_unmoved(self, var: Any) -> bool:
        """Return whether `var` is an operand whose cotangent is always zero."""
        if var not in self.operands:
            return False
        atom, made = self.pulled.get(self.operands.index(var)), jaxprs.makers(self.passes.eqns)
        while not compat.is_literal(atom) and atom in made:
            if made[atom].primitive.name not in ("broadcast_in_dim", "convert_element_type"):
                return False
            atom = made[atom].invars[0]
        return atom is None or (compat.is_literal(atom) and not np.any(atom.val))

    def _evaluated(self, i: int, cut: Sequence, inside: Sequence, values: Sequence) -> list:
        """Evaluate the call. The equations `inside` compute both passes from the variables `cut` and the operands.

        The first variable of `cut` is the quantised value of operand `i`.
        """
        jaxpr, size = self.passes, len(self.eqn.invars)
        copy, *scales = function_of(jaxpr, (), self.operands, cut)(*values)
        others = [k for k in range(size) if k != i and self.operands[k] is not cut[0]]
        reads = [*cut, *(self.operands[k] for k in others)]
        of_cotangents = jaxprs.dependent_on(self.cotangents, jaxpr.eqns)
        backward = [eqn for eqn in inside if not of_cotangents.isdisjoint(eqn.outvars)]
        forward = [eqn for eqn in inside if of_cotangents.isdisjoint(eqn.outvars)]
        read = {*jaxprs.variables_in(self.pulled.values())}.union(*(jaxprs.variables_in(e.invars) for e in backward))
        residuals = [v for v in [*reads, *jaxprs.makers(forward)] if v in read]
        first = function_of(jaxpr, (), reads, [*self.results, *residuals])
        second = function_of(jaxpr, (), [*residuals, *self.cotangents], list(self.pulled.values()))

        def both(weight, *args):
            found = first(weight.astype(copy.dtype), *args)
            return tuple(found[: len(self.results)]), found[len(self.results) :]

        @jax.custom_vjp
        def product(*args):
            return both(*args)[0]

        def backward_pass(kept, cotangents):
            pulled = second(*kept, *cotangents[: len(self.active)])
            pulled = dict(zip(self.moving, pulled, strict=True))
            return (pulled[i], *[None] * len(scales), *(pulled.get(k) for k in others))

        product.defvjp(both, backward_pass)
        weight = with_cotangent_of(copy.astype(values[i].dtype), values[i])
        scales = [lax.stop_gradient(x) for x in scales]
        found = product(weight, *scales, *(values[k] for k in others))
        by_place = dict(zip(self.order, found, strict=True))
        return [by_place.get(k) for k in range(len(self.eqn.outvars))]

    def apart(self, k: int, operands: Collection[int], values: Sequence) -> jax.Array | None:
        """Compute result `k` alone. Return None if the result needs one of `operands`, or if its cotangent is read."""
        result = self.results[self.order.index(k)]
        _, moved = jaxprs.needed_for(self.passes.eqns, list(self.pulled.values()))
        _, reads = jaxprs.needed_for(self.passes.eqns, [result])
        is_moving = k in self.active and self.cotangents[self.active.index(k)] in moved
        if is_moving or not reads.isdisjoint(self.operands[i] for i in operands):
            return None
        return lax.stop_gradient(function_of(self.passes, (), self.operands, [result])(*values)[0])
