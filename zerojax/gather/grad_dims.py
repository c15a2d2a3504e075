"""Find the order of dims in which a parameter's gradient is computed. `assembly` asks for it, `schedule` applies it.

JAX computes the gradient of `w` in `x @ w` as a product, and transposes the product to the order of `w`. If a
reduce-scatter follows, the compiler may fold that transpose into the product and pick a slower kernel for it, or copy
the full gradient. So the gradient is reduce-scattered with its dims in the product's order, and only the shard is
transposed.
"""

from collections.abc import Mapping, Sequence

from zerojax import compat
from zerojax.jaxprs import uses_of


def orders(jaxpr, variables: Sequence) -> list[tuple[int, ...]]:
    """Return, for each variable, the order of dims in which its gradient is computed; `()` for an unchanged order."""
    uses, _ = uses_of(jaxpr)
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
            orders |= _orders(body.invars[index], uses_of(body)[0])
        else:
            orders.add(())
    return orders


def _of_product(eqn, index: int) -> tuple[int, ...]:
    """Return the order of an operand's dims in the operand's gradient, or `()` if the order is unchanged."""
    # The gradient has the batch dims, then the free dims, then the contracted dims in the order of the other operand.
    contracted, batch = eqn.params["dimension_numbers"]
    pairs = sorted(zip(contracted[1 - index], contracted[index], strict=True))
    summed = [dim for _, dim in pairs]
    free = [dim for dim in range(len(eqn.invars[index].aval.shape)) if dim not in (*batch[index], *summed)]
    order = (*batch[index], *free, *summed)
    return () if order == tuple(sorted(order)) else order
