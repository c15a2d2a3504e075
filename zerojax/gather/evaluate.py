"""Evaluate a jaxpr on parameters that were gathered in a narrower type than the jaxpr expects.

`planner` asks `demanded` for the type to which each use casts its parameter, and `orders` for the order of dims in
which each use computes the parameter's gradient. Segments and scans call `evaluate_gathered`.

A model may keep float32 parameters and compute in bfloat16. It then casts each parameter somewhere in a layer, often
inside the layer's remat. Casting the shard before the gather halves the bytes. A `Cast` is a gathered value that has
already been cast. The equation of the cast returns the value as it is. For any other equation, the value is cast back.

JAX computes the gradient of `w` in `x @ w` as a product, and transposes the product to the order of `w`. If a
reduce-scatter follows, the compiler may fold the transpose into the product, whose kernel is then slower, or copy the
full gradient. So the gradient is reduce-scattered with its dims in the product's order (`orders`), and only the shard
is transposed.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax import lax

from zerojax import compat, jaxprs
from zerojax.gather.sharded_param import ShardedParam, narrower
from zerojax.primitives import WIDEN


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cast:
    """A gathered parameter in the type to which its uses cast it, although the jaxpr expects `dtype`."""

    value: jax.Array
    dtype: np.dtype = dataclasses.field(metadata={"static": True})


def as_gathered(value: jax.Array, param: ShardedParam) -> jax.Array | Cast:
    return value if value.dtype == param.wide else Cast(value, param.wide)


def uncast(value):
    """Return the array that a jaxpr expects, given a value that may be `Cast`."""
    return lax.convert_element_type(value.value, value.dtype) if isinstance(value, Cast) else value


def evaluate_gathered(jaxpr, consts: Sequence, args: Sequence) -> list:
    """Evaluate a jaxpr on arguments that may be `Cast`, and return arrays.

    Calls are inlined. Otherwise autodiff would return all residuals of a call as results of one equation, and `vjp`
    could not tell which of them depend on parameters alone.
    """
    return [uncast(value) for value in jaxprs.evaluate(jaxpr, consts, args, _rule)]


def _rule(eqn, values: Sequence) -> Sequence | None:
    name = compat.name_of(eqn)
    if compat.called(eqn) is not None:
        return list(map(uncast, jaxprs.evaluate_call(eqn, values, _rule)))
    if compat.is_remat(eqn):
        return jaxprs.evaluate_remat(eqn, values, evaluate_gathered)
    if name == WIDEN:
        from zerojax.gather.shardwise import evaluate_widen

        z, *others = values
        return evaluate_widen(eqn, z.value if isinstance(z, Cast) else z, [*map(uncast, others)])
    if not any(isinstance(value, Cast) for value in values):
        return None
    if name == "convert_element_type" and eqn.params["new_dtype"] == values[0].value.dtype:
        return [values[0].value]
    if _is_layout(eqn):
        return [Cast(compat.evaluate_one(eqn, [values[0].value])[0], values[0].dtype)]
    return compat.evaluate_one(eqn, [uncast(value) for value in values])


def _is_layout(eqn) -> bool:
    """Return whether an equation has one operand and commutes with a cast."""
    return len(eqn.invars) == 1 and (jaxprs.facts(eqn).is_view or compat.name_of(eqn) in ("copy", "rev", "slice"))


def demanded(jaxpr, variables: Sequence) -> list[np.dtype | None]:
    """Return, for each variable, the narrower type to which all its uses cast it, or None if there is no such type."""
    uses, results = jaxprs.uses_of(jaxpr)
    demands = [_demands(var, uses, results) for var in variables]
    return [next(iter(types)) if len(types) == 1 else None for types in demands]


def _demands(var, uses: dict, results: frozenset) -> set[np.dtype | None]:
    """Return the narrower types to which the uses of `var` cast it. The set has None if a use does not cast `var`."""
    types: set[np.dtype | None] = {None} if var in results else set()
    for eqn, index in uses.get(var, ()):
        name = compat.name_of(eqn)
        if name == WIDEN and index == 0:
            types.add(np.dtype(eqn.params["dtype"]))
        elif name == "convert_element_type" and narrower(eqn.params["new_dtype"], var.aval.dtype):
            types.add(np.dtype(eqn.params["new_dtype"]))
        elif _is_layout(eqn):
            types |= _demands(eqn.outvars[0], uses, results)
        elif (body := _body(eqn, index)) is not None:
            types |= _demands(body.invars[index], *jaxprs.uses_of(body))
        else:
            types.add(None)
    return types


def _body(eqn, index: int):
    """Return the jaxpr to which `eqn` passes operand `index` as argument `index`, or None (as for a loop's carry)."""
    if (loop := compat.loop_of(eqn)) is not None:
        carried = loop.consts <= index < loop.consts + loop.carry
        return None if carried else compat.opened(loop.body)[0]
    return compat.inlined_body(eqn)


def orders(jaxpr, variables: Sequence) -> list[tuple[int, ...]]:
    """Return, for each variable, the order of dims in which its gradient is computed; `()` for an unchanged order."""
    uses, _ = jaxprs.uses_of(jaxpr)
    choices = [_orders(var, uses) for var in variables]
    return [next(iter(orders)) if len(orders) == 1 else () for orders in choices]


def _orders(var, uses: Mapping) -> set[tuple[int, ...]]:
    """Return the orders of dims in which the uses of a variable compute its gradient."""
    orders: set[tuple[int, ...]] = set()
    for eqn, index in uses.get(var, ()):
        if eqn.primitive.name == "dot_general":
            orders.add(_of_product(eqn, index))
        elif eqn.primitive.name == "convert_element_type":
            orders |= _orders(eqn.outvars[0], uses)
        elif (body := compat.inlined_body(eqn)) is not None:
            orders |= _orders(body.invars[index], jaxprs.uses_of(body)[0])
        else:
            orders.add(())
    return orders


def _of_product(eqn, index: int) -> tuple[int, ...]:
    """Return the order of dims in which JAX computes the gradient of operand `index`, or `()` if it is unchanged."""
    # The gradient has the batch dims, then the free dims, then the contracted dims in the order of the other operand.
    contracted, batch = eqn.params["dimension_numbers"]
    pairs = sorted(zip(contracted[1 - index], contracted[index], strict=True))
    summed = [dim for _, dim in pairs]
    free = [dim for dim in range(len(eqn.invars[index].aval.shape)) if dim not in (*batch[index], *summed)]
    order = (*batch[index], *free, *summed)
    return () if order == tuple(sorted(order)) else order
