"""Remove the scale of the loss's cotangent from the new values of overwritten leaves.

An overwritten leaf takes its gradient as its new value, so the backward pass computes this value. A step multiplies the
cotangent of the loss by the loss scale, and divides it by the weight of a weighted loss. The computation of a new value
is analysed to find how the value depends on the cotangent:

- A value that is linear in the cotangent, such as a derivative, is divided by the cotangent.
- A statistic of activations or weights does not depend on the cotangent, and is not changed.
- A statistic of the backward pass, such as the largest cotangent of a layer, is nonlinear in the cotangent. The next
  step's cotangents have the same scale, so such a statistic must keep the scale, and is not changed either.
"""

import enum
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from zerojax import compat, jaxprs, primitives
from zerojax.layout.leaf import replace_items
from zerojax.train.loss import LossInputs, View


class Dependence(enum.IntEnum):
    """How a value depends on the cotangent of the loss."""

    ZERO = 0  # zero, whatever the cotangent is
    CONSTANT = 1
    LINEAR = 2
    OTHER = 3

    @classmethod
    def joined(cls, kinds: "Sequence[Dependence]") -> "Dependence":
        """Return the kind of a value that is a sum of values with these `kinds`, or a selection among such values."""
        found = set(kinds) - {cls.ZERO}
        return cls.OTHER if len(found) > 1 else next(iter(found), cls.ZERO)


def without_scale(view: View, values: list, given: LossInputs, cotangent: Array) -> list:
    """Divide new values of overwritten parameters by the loss's cotangent, if they are linear in this cotangent.

    To find out which values are linear, the loss is traced once more, on shapes.
    """
    overwritten, precision = view.layout.overwritten, view.config.precision
    is_mean = view.is_one_loss or not view.loss.weighted
    if is_mean and (precision is None or precision.loss_scale is None):
        return values

    def loss(given: LossInputs) -> Array:
        params = jax.tree.unflatten(view.layout.treedef, given.stored)
        return view.call(params, given.mutable, given.batch, *given.args).total

    def backward(cotangent: Array, given: LossInputs) -> list:
        of_values = lambda values: loss(given._replace(stored=replace_items(given.stored, overwritten, values)))
        return jax.vjp(of_values, [given.stored[i] for i in overwritten])[1](cotangent)[0]

    pairs = zip(view.layout.params, given.stored, strict=True)
    shapes = given._replace(stored=[jax.ShapeDtypeStruct(leaf.shape, x.dtype) for leaf, x in pairs])
    jaxpr, _ = compat.opened(jax.make_jaxpr(backward)(jax.ShapeDtypeStruct((), cotangent.dtype), shapes))
    kinds = dependence(jaxpr, [Dependence.LINEAR, *[Dependence.CONSTANT] * (len(jaxpr.invars) - 1)])
    pairs = zip(values, kinds, strict=True)
    return [x / cotangent.astype(x.dtype) if kind is Dependence.LINEAR else x for x, kind in pairs]


def dependence(jaxpr: Any, args: Sequence[Dependence]) -> list[Dependence]:
    consts: list = [Dependence.CONSTANT] * len(compat.constvars_of(jaxpr))
    literal = lambda value: Dependence.CONSTANT if np.any(value) else Dependence.ZERO
    return jaxprs.evaluate(jaxpr, consts, args, _kinds_of, literal=literal)


def _kinds_of(eqn: Any, kinds: Sequence[Dependence]) -> Sequence[Dependence]:
    facts, body = jaxprs.facts(eqn), compat.inlined_body(eqn)
    if body is not None:
        return dependence(body, kinds)
    if facts.kind is primitives.Kind.IDENTITY:
        return kinds
    if (loop := compat.loop_of(eqn)) is not None:
        return _of_loop(loop, kinds)
    depends = [kind >= Dependence.LINEAR for kind in kinds]
    joint = range(len(kinds))[facts.jointly_linear]
    if joint and not any(on for i, on in enumerate(depends) if i not in joint):
        found = Dependence.joined([kinds[i] for i in joint])
    elif facts.linear and depends.count(True) <= 1 and (eqn.primitive.name != "div" or not any(depends[1:])):
        found = Dependence.ZERO if kinds[0] is Dependence.ZERO else max(kinds)
    else:
        found = Dependence.OTHER if any(depends) else Dependence.CONSTANT
    return [found] * len(eqn.outvars)


def _of_loop(loop: compat.LoopEqn, kinds: Sequence[Dependence]) -> Sequence[Dependence]:
    body, _ = compat.opened(loop.body)
    first, last = loop.consts, loop.consts + loop.carry
    carry = list(kinds[first:last])
    while True:
        results = dependence(body, [*kinds[:first], *carry, *kinds[last:]])
        joined = [Dependence.joined(pair) for pair in zip(carry, results, strict=False)]
        if joined == carry:
            return [*carry, *results[loop.carry :]]
        carry = joined
