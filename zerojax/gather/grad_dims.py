"""In which order of dims the gradient of a weight is made.

The gradient of `w` in `x @ w` is a product that JAX transposes to the order of `w`. A
compiler may fold that transpose into the product and pick a slower one for it, or copy
the whole gradient. Reduce-scattered as the product leaves it, only the shard is transposed.
"""

from collections.abc import Mapping, Sequence

from zerojax import compat
from zerojax.gather.evaluate import uses_of


def orders(jaxpr, variables: Sequence) -> list[tuple[int, ...]]:
    """For each of `variables`, its dims in the order of the gradient; `()` if it has their own order."""
    uses, _ = uses_of(jaxpr)
    found = [_orders(var, uses) for var in variables]
    return [next(iter(some)) if len(some) == 1 else () for some in found]


def _orders(var, uses: Mapping) -> set[tuple[int, ...]]:
    """The orders in which the uses of `var` make its gradient."""
    found: set[tuple[int, ...]] = set()
    for eqn, index in uses.get(var, ()):
        if eqn.primitive.name == "dot_general":
            found.add(_of_product(eqn, index))
        elif eqn.primitive.name == "convert_element_type":
            found |= _orders(eqn.outvars[0], uses)
        elif (body := eqn.params["jaxpr"] if compat.is_remat(eqn) else compat.called(eqn)) is not None:
            inner, _ = compat.opened(body)
            found |= _orders(inner.invars[index], uses_of(inner)[0])
        else:
            found.add(())
    return found


def _of_product(eqn, index: int) -> tuple[int, ...]:
    """Batch dims, those that are kept, and those that are contracted, in the order of the other operand's."""
    contracted, batch = eqn.params["dimension_numbers"]
    pairs = sorted(zip(contracted[1 - index], contracted[index], strict=True))
    summed = [dim for _, dim in pairs]
    kept = [dim for dim in range(len(eqn.invars[index].aval.shape)) if dim not in (*batch[index], *summed)]
    order = (*batch[index], *kept, *summed)
    return () if order == tuple(sorted(order)) else order
