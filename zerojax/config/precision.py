"""The options `Precision` and `DynamicScale`: the element types of a step, and the loss scale."""

import dataclasses
import numbers
import warnings
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.compat import common_dtype
from zerojax.config.checks import check_count

LARGEST_SCALE = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class DynamicScale:
    """A loss scale that rises and falls, so that it stays just below the scale at which gradients overflow.

    A step whose gradients overflow is skipped. After `growth_interval` steps in a row without overflow, the scale is
    multiplied by `factor`. The first `hysteresis - 1` overflows, counted from the start or the last growth, do not
    change the scale. Every later overflow divides it by `factor`.

    Attributes:
        initial: The scale of the first step.
        growth_interval: Number of steps in a row without overflow after which the scale grows.
        factor: The factor by which the scale grows or falls.
        hysteresis: 1 plus the number of overflows that do not change the scale. With 1, each overflow lowers the scale.
        floor: The smallest scale. Steps that overflow at this scale are also skipped.

    Raises:
        ValueError: If a number is out of range.

    References:
        Micikevicius et al. 2018, arXiv 1710.03740, section 3.2.

    Examples:
        >>> precision = Precision.fp16(loss_scale=DynamicScale(initial=2.0**12))
    """

    initial: float = 2.0**16
    growth_interval: int = 2000
    factor: float = 2.0
    hysteresis: int = 1
    floor: float = 1.0

    def __post_init__(self):
        """Check every field."""
        check_count("growth_interval", self.growth_interval, "steps", least=1)
        check_count("hysteresis", self.hysteresis, "overflows", least=1)
        for name, bound in {"floor": 0.0, "factor": 1.0}.items():
            if not bound < getattr(self, name) <= LARGEST_SCALE:
                raise ValueError(
                    f"DynamicScale({name}=) must be greater than {bound} and finite in float32, but is "
                    f"{getattr(self, name)}."
                )
        if not self.floor <= self.initial <= LARGEST_SCALE:
            raise ValueError(
                f"DynamicScale(initial={self.initial}) must be finite in float32, and at least floor={self.floor}."
            )


@dataclasses.dataclass(frozen=True)
class Precision:
    """The element types in which a step computes, sums gradients and keeps parameters.

    Stage 3 stores shards of the parameters in `master`, and casts them to `compute` before each gather. Stages 0 to 2,
    and stage 3 with `Offload` or `Tuning(params_axis=)`, store the parameters in `compute`, and keep master weights in
    the optimizer state.

    Attributes:
        compute: Floating type of the parameters that the loss function sees.
        reduce: Floating type in which gradients are summed over devices and microbatches.
        master: Floating type of the weights that the optimizer updates.
        loss_scale: `train_step` multiplies the loss by this number, and divides the gradients by it. None, a
            constant, a `DynamicScale`, or `"dynamic"` for `DynamicScale()`. The loss should be float32, because float16
            cannot represent a cotangent of 2^16.
        keep: `keep(path, leaf) -> bool` chooses parameters that the loss sees in `master`, such as norms and routers.
            `path` is "/"-separated, and `leaf` is a `jax.ShapeDtypeStruct` of logical shape. None: no parameter.
        cast_inputs: Whether float leaves of the batch are cast to `compute`. Without the cast, float32 inputs make a
            layer compute in float32. Integers, bools, leaves with one number per row (such as a target or a weight) and
            further arguments are never cast. Pass masks of tokens as bools, because the sum of a mask that was cast to
            a narrow float type would be rounded.

    Raises:
        TypeError: If a type is not a floating type, or `keep` is not callable.
        ValueError: If `master` is narrower than `compute`, the scale is not positive, or a type needs x64.

    References:
        Micikevicius et al. 2018, arXiv 1710.03740.

    Examples:
        >>> tx = zero_shard(optax.adamw(3e-4), stage=3, precision=Precision.bf16())
    """

    argument = "precision"  # of `zero_shard`

    compute: Any = jnp.float32
    reduce: Any = jnp.float32
    master: Any = jnp.float32
    loss_scale: float | Literal["dynamic"] | DynamicScale | None = None
    keep: Callable[[str, Any], bool] | None = None
    cast_inputs: bool = True

    def __post_init__(self):
        """Check every field. Convert types to dtypes, and the loss scale to a float or a `DynamicScale`."""
        for name in ("compute", "reduce", "master"):
            dtype = jnp.dtype(getattr(self, name))
            if not jnp.issubdtype(dtype, jnp.floating):
                raise TypeError(f"Precision({name}=) is a floating type such as jnp.bfloat16, not {dtype}.")
            object.__setattr__(self, name, dtype)
            if jax.dtypes.canonicalize_dtype(dtype) != dtype:
                raise ValueError(
                    f"Precision({name}={dtype}) needs jax.config.update('jax_enable_x64', True), without which JAX "
                    f"would use float32. Enable it, or use a narrower type."
                )
        if common_dtype(self.compute, self.master) != self.master:
            raise ValueError(
                f"Precision(master={self.master}) is narrower than compute={self.compute}: the optimizer would update "
                f"coarser weights than the loss sees. Give master=jnp.float32, or another type that is not narrower."
            )
        if self.keep is not None and not callable(self.keep):
            raise TypeError(f"Precision(keep=) is a function of (path, leaf), not {type(self.keep).__name__}.")
        scale = DynamicScale() if self.loss_scale == "dynamic" else self.loss_scale
        if isinstance(scale, bool) or not isinstance(scale, DynamicScale | numbers.Real | None):
            raise TypeError(f'Precision(loss_scale=) is None, a number, "dynamic" or a DynamicScale, not {scale!r}.')
        if scale is not None and not isinstance(scale, DynamicScale):
            scale = float(scale)
            if not 0 < scale <= LARGEST_SCALE:
                raise ValueError(f"Precision(loss_scale={scale}) must be positive, and finite in float32.")
        if scale is None and self.compute == jnp.float16:
            warnings.warn(
                "Precision(compute=float16) without loss_scale: gradients under 6e-8 become zero. "
                'Pass loss_scale="dynamic", or use Precision.fp16().',
                stacklevel=3,
            )
        object.__setattr__(self, "loss_scale", scale)

    @classmethod
    def fp32(cls, **changes: Any) -> "Precision":
        """Return a `Precision` with float32 for every type. `changes` sets further fields."""
        return cls(**changes)

    @classmethod
    def bf16(cls, **changes: Any) -> "Precision":
        """Return a `Precision` that computes in bfloat16, and sums and updates in float32. `changes` sets fields."""
        return cls(**{"compute": jnp.bfloat16, **changes})

    @classmethod
    def fp16(cls, **changes: Any) -> "Precision":
        """Return a `Precision` that computes in float16 with a dynamic loss scale. `changes` sets further fields."""
        return cls(**{"compute": jnp.float16, "loss_scale": "dynamic", **changes})
