"""What collectives carry in few bits: parameters as they are gathered, gradients as they are reduced."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Literal

from zerojax.config.checks import check_count, check_word

Format = Literal["int4", "int8", "float8_e4m3fn", "float8_e5m2"]
# Bits of an element.
FORMATS = MappingProxyType({"int4": 4, "int8": 8, "float8_e4m3fn": 8, "float8_e5m2": 8})
SCALE_BYTES = 4
# A shard of fewer blocks is mostly padding and scales.
LEAST_BLOCKS = 8


@dataclasses.dataclass(frozen=True)
class Wire:
    """Quantise what collectives carry, block by block, each with a scale of its own that travels with it.

    Stored parameters and optimizer state stay as they are: what is rounded is the copy of a parameter that the loss
    sees, and each device's part of a gradient. Reductions are all-to-alls, one for each mesh axis, the innermost first.
    What arrives is summed in float32, so each gradient, and each sum over one axis, is rounded once.

    Attributes:
        gather: Format in which stage 3 all-gathers parameters, such as `"int8"`; None: as they are.
        reduce: Format in which gradients are reduce-scattered, such as `"int4"`; None: as they are.
        block: Elements that share a scale.
        rounding: How gradients are rounded to integers: `"nearest"`, or `"stochastic"`: up or down, each as often as
            makes the mean right, drawn from the bits of the number itself and where it is.
        error_feedback: Whether what rounding takes from a sum that goes across hosts is kept, in float32 beside the
            optimizer state, and added to the next step's. Needs `params_axis=`, whose reduction across is once a step.
        over: The mesh axes whose links carry it, such as `"host"`; over others all is sent as it is. None: all axes.
        where: Which parameters: a function of `(path, leaf)`, `leaf` a `jax.ShapeDtypeStruct` of logical shape, or
            shell patterns such as `("*/kernel",)`. None: all but vectors, and those with "embed" in their path.
            Parameters of which a device's shard has fewer than `8 * block` elements are sent as they are all the same.

    Raises:
        TypeError: If `where` or `over` is of another type.
        ValueError: If a format is unknown, the block is empty or odd, or nothing is quantised.

    References:
        Wang et al. 2023, arXiv 2306.10209, sections 3.2 (qwZ) and 3.4 (qgZ): ZeRO++.
        Karimireddy et al. 2019, arXiv 1901.09847, algorithm 2; Xie et al. 2024, arXiv 2407.04480 (LoCo): feedback.

    Examples:
        >>> wire = Wire(gather="int8", reduce="int4")
    """

    gather: Format | None = None
    reduce: Format | None = None
    block: int = 256
    rounding: Literal["nearest", "stochastic"] = "nearest"
    error_feedback: bool = False
    over: str | tuple[str, ...] | None = None
    where: Callable[[str, Any], bool] | Sequence[str] | None = None

    def __post_init__(self):
        """Check every field, and write axes and patterns in one way."""
        for name in ("gather", "reduce"):
            check_word(f"Wire({name}=)", getattr(self, name), (None, *FORMATS))
        if self.gather is None and self.reduce is None:
            raise ValueError('Wire() quantises nothing without gather= or reduce=, such as gather="int8".')
        check_word("Wire(rounding=)", self.rounding, ("nearest", "stochastic"))
        if self.rounding == "stochastic" and self.reduce not in ("int4", "int8"):
            raise ValueError(
                f'Wire(rounding="stochastic") rounds gradients to integers, and reduce={self.reduce!r} sends none. '
                f'Give reduce="int4" or "int8", or leave rounding out.'
            )
        if not isinstance(self.error_feedback, bool):
            raise TypeError(f"Wire(error_feedback=) is True or False, not {self.error_feedback!r}.")
        if self.error_feedback and self.reduce is None:
            raise ValueError('Wire(error_feedback=True) is of gradients. Give reduce= too, such as reduce="int4".')
        check_count("Wire(block=)", self.block, "elements", least=2)
        if self.block % 2:
            raise ValueError(f"Wire(block={self.block}) must be even: two elements of 4 bits share a byte.")
        over = (self.over,) if isinstance(self.over, str) else self.over
        if over is not None and (not over or not all(isinstance(axis, str) for axis in over)):
            raise TypeError(f'Wire(over=) names mesh axes, such as "host", not {self.over!r}.')
        object.__setattr__(self, "over", None if over is None else tuple(over))
        if self.where is not None and not callable(self.where):
            patterns = (self.where,) if isinstance(self.where, str) else tuple(self.where)
            if not all(isinstance(pattern, str) for pattern in patterns):
                raise TypeError(f"Wire(where=) is a function of (path, leaf) or shell patterns, not {self.where!r}.")
            object.__setattr__(self, "where", patterns)

    def reason_against(self, path: str, leaf: Any, shard_size: int) -> str:
        """Explain why a parameter is sent unquantised; empty if it is quantised.

        Args:
            path: "/"-separated.
            leaf: A `jax.ShapeDtypeStruct` of logical shape.
            shard_size: Elements of one device's shard.
        """
        if self.where is None:
            if len(leaf.shape) < 2:
                return "a vector"
            if "embed" in path.lower():
                return "an embedding by its name"
        elif not (
            self.where(path, leaf)
            if callable(self.where)
            else any(fnmatch.fnmatchcase(path, pattern) for pattern in self.where)
        ):
            return "not in Wire(where=)"
        if shard_size < LEAST_BLOCKS * self.block:
            return f"small: {shard_size} elements a shard, under {LEAST_BLOCKS} blocks of {self.block}"
        return ""
