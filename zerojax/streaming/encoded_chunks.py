"""Update a parameter and its encoded state on arrays of shape `[*rows, blocks, width]`.

The conversions work within blocks, and all other equations of such an update are elementwise. So all of them can run in
the shape of the blocks. With arrays of shape `[*rows, n]` in between, XLA:CPU would find the block of every element by
division, and vectorise nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from zerojax.layout.encoding import Encoding
from zerojax.narrow_state.rounding import RULES, EncodedBlocks, blocks_of, to_blocks, to_rows
from zerojax.optim.equations import evaluate_as
from zerojax.optim.traced import STATE


def updated_blocks(key: Any, values: Sequence[Array], shape: tuple[int, ...]) -> list[Array]:
    """Evaluate the update of a chunk of the wide shape `shape`, and return the new parameter and the new state.

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
    """Evaluate the update. `values` are wide blocks of this shape, `EncodedBlocks` and scalars."""

    def rule(eqn: Any, operands: Sequence) -> list | None:
        if eqn.primitive.name not in RULES:
            return None
        of = eqn.params["encoding"]
        *wide, old = operands
        if of.unused:  # an update may change the unused elements; make them zero, so that they do not set the scale
            wide = [to_blocks(to_rows(x, of), of) for x in wide]
        return [RULES[eqn.primitive.name](*wide, old, of)]

    new = evaluate_as(key.equations.jaxpr, (), values, shape, rule)
    return [x if isinstance(x, EncodedBlocks) else jnp.broadcast_to(x, shape) for x in new]
