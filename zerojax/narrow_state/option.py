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
    """How the optimizer state is stored between updates.

    An update widens the state to the type that it has without this option, and rounds the new state. Only leaves that
    mirror a parameter are narrow, such as the moments of Adam. A leaf stays wide if its parameter is float64, complex
    or a vector, has fewer than `Tuning(persist_below=)` elements, or has fewer than 64 elements in its last dim or in
    each of its other dims. Equal gradients give the same bits of state on any number of devices.

    Attributes:
        format: `"int8"`: 8 bits per element and a scale per block. Elements are rounded to multiples of 1/128 of the
            power of two above the block's largest magnitude. In blocks without negative elements, such as those of
            second moments, an element has 5 bits of exponent and 3 of mantissa, and does not become zero.
            `"float8"`: the same, but in other blocks, elements have a sign, 4 bits of exponent and 3 of mantissa.
            `"bfloat16"`: 16 bits per element, and no scale.
        block: Largest number of elements per block. A scale takes 4 bytes per block, and a seed 4.
        rounding: `"stochastic"`: round up or down at random, so that the expected result is the exact value. Each block
            has a seed, which every update changes. `"nearest"`: no seeds, but small increments are lost.
        masters: With `Precision.bf16()`, how master weights are stored. `"float32"`: as without this option.
            `"compensated"`: as the bfloat16 parameter plus its rounding error in bfloat16, 4 bytes in all.
            `"rounded"`: as the bfloat16 parameter alone, rounded stochastically, 2 bytes and seeds. In the last two
            cases, stage 3 stores and gathers bfloat16 parameters.
        where: `where(path, leaf) -> bool` chooses the leaves of the state to store narrow, not master weights. `path`
            is "/"-separated, such as `"0/mu/dense/kernel"`, and `leaf` is a `jax.ShapeDtypeStruct` of logical shape.
            None: all that mirror a parameter. Leave out averages of the parameters, which 8 bits would make coarse.

    Raises:
        TypeError: If `where` is not callable, or `block` is not an int.
        ValueError: If another field has an unknown value, or `block` is below 32.

    References:
        Dettmers et al. 2021, arXiv 2110.02861: one scale per block, and codes for second moments that span several
        orders of magnitude. Zamirai et al. 2020, arXiv 2010.06192: compensated or stochastically rounded bfloat16.

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
