"""An update that is not added: the value that a parameter takes.

`optax.apply_updates` adds an update to its parameter. From one float32 number to another there is not always a third
that leads exactly there when it is added, so a parameter that takes a value gets it from this node.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from jaxtyping import Array, Shaped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NewValue:
    """An update in a tree of updates: `parameter + NewValue(value)` is `value`.

    Attributes:
        value: What the parameter becomes; logical shape.
    """

    value: Shaped[Array, "*logical"]

    __array_ufunc__ = None  # NumPy leaves the sum to `__radd__`

    def __radd__(self, parameter: Any) -> Shaped[Array, "*logical"]:
        """Return the value, whatever the parameter was."""
        return self.value
