"""Define the option `Wire`, which says which collectives send quantised data."""

import dataclasses
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Literal

from zerojax.config.checks import check_count, check_word
from zerojax.config.chosen import checked_where, chooses
from zerojax.config.data_mesh import in_words

Format = Literal["int4", "int8", "float8_e4m3fn", "float8_e5m2"]
# Bits per element.
FORMATS = MappingProxyType({"int4": 4, "int8": 8, "float8_e4m3fn": 8, "float8_e5m2": 8})
SCALE_BYTES = 4
# The smallest number of blocks per shard. A smaller shard would be mostly padding and scales.
LEAST_BLOCKS = 8


@dataclasses.dataclass(frozen=True)
class Wire:
    """The collectives that send quantised data. Data is quantised block by block, with one scale per block.

    Stored parameters and optimizer state are not rounded. Only the gathered copies of parameters, and the partial sums
    of gradients that devices send, are rounded. A quantised reduction is one all-to-all per mesh axis, beginning with
    the innermost axis. Each device adds up the received blocks in float32. So a gradient is rounded once per axis.

    Attributes:
        gather: The format in which stage 3 all-gathers parameters, such as `"int8"`. None: not quantised.
        reduce: The format in which gradients are reduce-scattered, such as `"int4"`. None: not quantised.
        block: Number of elements that share a scale. At least 2, and even.
        rounding: How gradients are rounded to integers: `"nearest"` or `"stochastic"`. The expected value of stochastic
            rounding is the exact number. Its pseudo-random bits are a hash of the number and its position.
        over: The mesh axes whose collectives are quantised, such as `"host"`. None: all axes. If other axes also
            shard a parameter, the quantised shards are gathered over `over` first, and then over the other axes.
        where: The parameters that are quantised: a function of `(path, leaf)`, where `leaf` is a `jax.ShapeDtypeStruct`
            of logical shape, or shell patterns such as `("*/kernel",)`. None: all except vectors and parameters with
            "embed" in their path. Shards of fewer than `8 * block` elements are never quantised.

    Raises:
        TypeError: If `where` or `over` has a wrong type.
        ValueError: If a format is unknown, `block` is odd or below 2, or nothing is quantised.

    References:
        Wang et al. 2023, arXiv 2306.10209, sections 3.2 (qwZ) and 3.4 (qgZ): ZeRO++.

    Examples:
        >>> wire = Wire(gather="int8", reduce="int4")
    """

    argument = "wire"  # of `zero_shard`

    gather: Format | None = None
    reduce: Format | None = None
    block: int = 256
    rounding: Literal["nearest", "stochastic"] = "nearest"
    over: str | tuple[str, ...] | None = None
    where: Callable[[str, Any], bool] | Sequence[str] | None = None

    def __post_init__(self):
        """Check every field, and convert axes and patterns to tuples."""
        for name in ("gather", "reduce"):
            check_word(f"Wire({name}=)", getattr(self, name), (None, *FORMATS))
        if self.gather is None and self.reduce is None:
            raise ValueError('Wire() quantises nothing. Give gather= or reduce=, such as gather="int8".')
        check_word("Wire(rounding=)", self.rounding, ("nearest", "stochastic"))
        if self.rounding == "stochastic" and self.reduce not in ("int4", "int8"):
            raise ValueError(
                f'Wire(rounding="stochastic") rounds gradients to integers, and reduce={self.reduce!r} sends none. '
                f'Give reduce="int4" or "int8", or leave rounding out.'
            )
        check_count("Wire(block=)", self.block, "elements", least=2)
        if self.block % 2:
            raise ValueError(f"Wire(block={self.block}) must be even: two elements of 4 bits share a byte.")
        over = (self.over,) if isinstance(self.over, str) else self.over
        if over is not None and (not over or not all(isinstance(axis, str) for axis in over)):
            raise TypeError(f'Wire(over=) names mesh axes, such as "host", not {self.over!r}.')
        object.__setattr__(self, "over", None if over is None else tuple(over))
        object.__setattr__(self, "where", checked_where("Wire(where=)", self.where))

    def check(self, config: Any) -> None:
        """Raise a ValueError if there is no collective to quantise, or if a sum would be rounded more than once.

        Args:
            config: The configuration with all options.
        """
        if config.stage == 0:
            raise ValueError(
                "Stage 0 all-reduces gradients, and with wire= every partial sum would be rounded. Use stage "
                "1, 2 or 3, whose reductions send each gradient once."
            )
        if self.gather and config.stage != 3:
            raise ValueError(
                f"Wire(gather={self.gather!r}) needs stage 3: stage {config.stage} stores what it gathers, so that "
                f"only rounded parameters would remain. Give only Wire(reduce=)."
            )
        if self.reduce and config.shard_axis:
            raise ValueError(
                f"Tuning(shard_axis={config.shard_axis!r}) all-reduces shards of gradients over the other axes, and "
                f"with Wire(reduce={self.reduce!r}) sums would be rounded once more. Use params_axis, which "
                f"reduce-scatters these shards."
            )
        if missing := tuple(axis for axis in self.over or () if axis not in config.axis):
            raise ValueError(
                f"Wire(over=) names {in_words(missing)}, over which no rows are divided: axis={config.axis!r}. "
                f"Name some of these axes."
            )

    def reason_against(self, path: str, leaf: Any, shard_size: int) -> str:
        """Return the reason why a parameter is not quantised, or an empty string if it is quantised.

        Args:
            path: The path of the parameter, "/"-separated.
            leaf: A `jax.ShapeDtypeStruct` of logical shape.
            shard_size: Number of elements of one device's shard.
        """
        if self.where is None:
            if len(leaf.shape) < 2:
                return "a vector"
            if "embed" in path.lower():
                return "an embedding by its name"
        elif not chooses(self.where, path, leaf):
            return "not in Wire(where=)"
        if shard_size < LEAST_BLOCKS * self.block:
            return f"small: {shard_size} elements per shard, under {LEAST_BLOCKS} blocks of {self.block}"
        return ""
