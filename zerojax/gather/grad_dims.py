"""In which order of dims the gradient of a parameter is made.

The gradient of `w` in `x @ w` is a product that JAX transposes to the order of `w`. A
compiler may fold that transpose into the product and pick a slower kernel for it, or copy
the full gradient. Reduce-scattered as the product leaves it, only the shard is transposed.
"""

from collections.abc import Mapping, Sequence

from zerojax import compat
from zerojax.jaxprs import uses_of


def orders(jaxpr, variables: Sequence) -> list[tuple[int, ...]]:
    """Return, for each of `variables`, its dims in the order of the gradient, or `()` if the order is its own."""
    uses, _ = uses_of(jaxpr)
    found = [_orders(var, uses) for var in variables]
    return [next(iter(some)) if len(some) == 1 else () for some in found]


def _orders(var, uses: Mapping) -> set[tuple[int, ...]]:
    """Return the orders of dims in which the uses of `var` make its gradient."""
    found: set[tuple[int, ...]] = set()
    for eqn, index in uses.get(var, ()):
        if eqn.primitive.name == "dot_general":
            found.add(_of_product(eqn, index))
        elif eqn.primitive.name == "convert_element_type":
            found |= _orders(eqn.outvars[0], uses)
        elif (body := compat.inlined_body(eqn)) is not None:
            found |= _orders(body.invars[index], uses_of(body)[0])
        else:
            found.add(())
    return found


def _of_product(eqn, index: int) -> tuple[int, ...]:
    """Return batch dims, free dims, and contracted dims in the order of the other operand's contracted dims."""
    contracted, batch = eqn.params["dimension_numbers"]
    pairs = sorted(zip(contracted[1 - index], contracted[index], strict=True))
    summed = [dim for _, dim in pairs]
    free = [dim for dim in range(len(eqn.invars[index].aval.shape)) if dim not in (*batch[index], *summed)]
    order = (*batch[index], *free, *summed)
    return () if order == tuple(sorted(order)) else order
