"""Evaluate the update of a parameter and of its encoded state on arrays that are divided into the encoding's blocks.

The equations are elementwise but for the conversions, which work within blocks, so they are evaluated on arrays of
shape `[*rows, blocks, width]`. If each conversion returned an array `[*rows, n]`, XLA:CPU would compute every element's
block with divisions, and vectorise nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from zerojax.layout.encoding import Encoding
from zerojax.narrow_state.rounding import RULES, EncodedBlocks, blocks_of, to_blocks, to_rows
from zerojax.optim.equations import evaluate_as
from zerojax.optim.traced import STATE

if TYPE_CHECKING:
    from jaxtyping import Array


def updated_blocks(key: Any, values: Sequence[Array], shape: tuple[int, ...]) -> list[Array]:
    """Evaluate the equations of a chunk of this shape, and return the new parameter and the new state.

    `key` is a `chunk_programs.ProgramKey`, and `values` are its `operands`.
    """
    written = [*(None for _ in key.params), *(leaf.encoding for leaf in key.state)]
    encoding: Encoding = next(filter(None, written))
    block_shape = (*shape[:-1], encoding.blocks, encoding.width)

    def divided(x: Array, read: tuple[str, int]) -> Any:
        kind, i = read
        if kind == STATE and (of := key.state[i].encoding) is not None:
            return blocks_of(x, of)
        return to_blocks(x, encoding) if jnp.shape(x) == shape else x

    new = evaluated_blocks(key, list(map(divided, values, key.reads)), block_shape)
    return [to_rows(x, of or encoding) for x, of in zip(new, written, strict=True)]


def evaluated_blocks(key: Any, values: list, shape: tuple[int, ...]) -> list:
    """Evaluate the equations on wide blocks of this shape, and on `EncodedBlocks`."""

    def rule(eqn: Any, operands: Sequence) -> list | None:
        if eqn.primitive.name not in RULES:
            return None
        of = eqn.params["encoding"]
        *wide, old = operands
        if of.unused:  # may be anything after an update, and must not be the largest element of a block
            wide = [to_blocks(to_rows(x, of), of) for x in wide]
        return [RULES[eqn.primitive.name](*wide, old, of)]

    new = evaluate_as(key.equations.jaxpr, (), values, shape, rule)
    return [x if isinstance(x, EncodedBlocks) else jnp.broadcast_to(x, shape) for x in new]
