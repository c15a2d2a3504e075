"""The option `Narrow`: the types in which the optimizer state and the master weights are stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import jax.numpy as jnp

from zerojax.config.checks import check_count, check_word

if TYPE_CHECKING:
    from zerojax.config import Config

LEAST_BLOCK = 32
MASTERS = ("float32", "compensated", "rounded")


@dataclasses.dataclass(frozen=True)
class Narrow:
    """Which types the optimizer state is stored in between updates.

    An update widens the state to its own type, chunk by chunk, and rounds the new state. Only leaves that mirror a
    parameter are narrow, such as the moments of Adam. A leaf stays wide if its parameter has fewer than
    `Tuning(persist_below=)` elements, is no matrix, or has fewer than 64 elements in its last dim or in all others.
    The state is the same, bit for bit, on any number of devices.

    Attributes:
        format: `"int8"`: 8 bits per element and a scale per block. Elements are multiples of 1/128 of the power of two
            above the largest. In blocks without negative elements, such as second moments, an element has 5 bits of
            exponent and 3 of mantissa, and does not become zero. `"float8"`: the same, but elements of blocks with
            both signs have 4 bits of exponent and 3 of mantissa. `"bfloat16"`: 16 bits per element.
        block: Largest number of elements per block. Each block takes 8 further bytes, or 4 with `"bfloat16"`.
        rounding: `"stochastic"`: up or down at random, so that the mean of the rounded values is the value. Each block
            has a seed, which each update advances. `"nearest"`: small increments are lost.
        masters: How weights are kept that are wider than the parameters that the loss sees, with
            `Precision.bf16()`. `"float32"`: as without this option. `"compensated"`: as the bfloat16 parameter plus
            its rounding error in bfloat16, 4 bytes in all. `"rounded"`: the bfloat16 parameter alone, stochastically
            rounded, 2 bytes. In the last two cases, stage 3 stores and gathers bfloat16 parameters.
        where: `where(path, leaf) -> bool` chooses leaves of the state to store narrow. `path` is "/"-separated, such
            as `"0/mu/dense/kernel"`, and `leaf` is a `jax.ShapeDtypeStruct` of logical shape. None: all that mirror a
            parameter. Leave out averages of the parameters, which 8 bits would make coarse.

    Raises:
        TypeError: If `where` is not callable, or `block` is no integer.
        ValueError: If a word is unknown, or `block` is below 32.

    References:
        Dettmers et al. 2021, arXiv 2110.02861: blocks with one scale, and codes for the second moment that span
        decades. Zamirai et al. 2020, arXiv 2010.06192: bfloat16 weights, compensated or stochastically rounded.

    Examples:
        >>> tx = zero_shard(optax.adamw(3e-4), stage=3, state=Narrow("int8"))
    """

    argument = "state"  # of `zero_shard`

    format: Literal["int8", "float8", "bfloat16"] = "int8"
    block: int = 256
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    masters: Literal["float32", "compensated", "rounded"] = "float32"
    where: Callable[[str, Any], bool] | None = None

    def __post_init__(self):
        """Check every field."""
        check_word("Narrow(format=)", self.format, ("int8", "float8", "bfloat16"))
        check_word("Narrow(rounding=)", self.rounding, ("stochastic", "nearest"))
        check_word("Narrow(masters=)", self.masters, MASTERS)
        check_count("Narrow(block=)", self.block, "elements", least=LEAST_BLOCK)
        if self.where is not None and not callable(self.where):
            raise TypeError(f"Narrow(where=) is a function of (path, leaf), not {type(self.where).__name__}.")

    def check(self, config: Config) -> None:
        """Raise a ValueError if another option contradicts this one.

        Args:
            config: The configuration with all options.
        """
        types = config.precision and (config.precision.compute, config.precision.master)
        if self.masters != "float32" and types != (jnp.bfloat16, jnp.float32):
            raise ValueError(
                f"Narrow(masters={self.masters!r}) keeps float32 weights in bfloat16, and precision= computes in "
                f"{types[0] if types else 'the type of the parameters'}. Give precision=Precision.bf16(), or leave "
                f"masters= out."
            )
        if config.params_on_disk:
            raise ValueError(
                'Narrow(...) is not possible with Offload(params="disk"), whose step updates the rows of parameters '
                'and state in files together. Use Offload(optimizer="disk"), or leave state= out.'
            )
