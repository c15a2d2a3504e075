"""Update a chunk of a parameter and of its encoded state, with all arrays divided into the blocks of the encoding.

The equations of a chunk are elementwise but for the conversions, which work within blocks, so they are evaluated on
arrays of shape `[*rows, blocks, width]`. If each conversion returned an array `[*rows, n]`, XLA:CPU would compute every
element's block with divisions, and vectorise nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from zerojax.layout.encoding import Encoding
from zerojax.narrow_state.rounding import RULES, blocks_of, to_blocks, to_rows
from zerojax.optim.equations import evaluate_as

if TYPE_CHECKING:
    from jaxtyping import Array


def updated_blocks(
    jaxpr: Any,
    values: Sequence[Array],
    read: Sequence[Encoding | None],
    written: Sequence[Encoding | None],
    shape: tuple[int, ...],
) -> list[Array]:
    """Evaluate the equations of a chunk of this shape.

    `read` and `written` have the encoding of each value and of each result, or None for a wide array.
    """
    encoding = next(filter(None, written))
    block_shape = (*shape[:-1], encoding.blocks, encoding.width)

    def rule(eqn: Any, operands: Sequence) -> list | None:
        if eqn.primitive.name not in RULES:
            return None
        of = eqn.params["encoding"]
        *wide, old = operands
        if encoding.unused:  # may be anything after an update, and must not be the largest element of a block
            wide = [to_blocks(to_rows(x, of), of) for x in wide]
        return [RULES[eqn.primitive.name](*wide, old, of)]

    def divided(x: Array, of: Encoding | None) -> Any:
        return blocks_of(x, of) if of else to_blocks(x, encoding) if jnp.shape(x) == shape else x

    new = evaluate_as(jaxpr, (), list(map(divided, values, read)), block_shape, rule)
    whole = lambda x, of: to_rows(x, of) if of else to_rows(jnp.broadcast_to(x, block_shape), encoding)
    return list(map(whole, new, written))
