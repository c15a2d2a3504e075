"""Markers for the auxiliary results (aux) of a loss. They say how the values of devices and microbatches are combined.

In global view without microbatches, the loss is called only once, and its aux is returned unchanged.
"""

import dataclasses
from typing import Any

import jax
from jaxtyping import PyTree

__all__ = ["Mean", "PerRow", "Replicated", "Sum"]


def __dir__() -> list[str]:
    return sorted([*__all__, "__doc__", "__name__", "__file__"])


@dataclasses.dataclass(frozen=True)
class Marker:
    """A pytree node in aux. The class of the node says how the arrays in the node are combined."""

    tree: PyTree

    def __init_subclass__(cls):
        """Register a marker as a pytree node."""
        jax.tree_util.register_dataclass(cls, ["tree"], [])


class Mean(Marker):
    """Mark floats that are means over rows. They are averaged over microbatches and devices.

    The average uses the weights of a weighted loss. Float scalars without a marker count as `Mean`.

    Examples:
        >>> return loss, zerojax.metrics.Mean(jnp.mean(correct))
    """


class Sum(Marker):
    """Mark sums over rows, such as counts. They are added up over microbatches and devices.

    Examples:
        >>> return loss, zerojax.metrics.Sum(jnp.sum(mask))
    """


class PerRow(Marker):
    """Mark arrays whose dim 0 has one entry per row, such as logits. The entries of all rows are returned, in order.

    Examples:
        >>> return loss, zerojax.metrics.PerRow(logits)
    """


class Replicated(Marker):
    """Mark values that are equal on every device, such as a counter. The last microbatch's value is returned.

    Examples:
        >>> return loss, zerojax.metrics.Replicated(count + 1)
    """


def is_marker(x: Any) -> bool:
    return isinstance(x, Marker)


def unmarked(aux: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.tree if is_marker(x) else x, aux, is_leaf=is_marker)
