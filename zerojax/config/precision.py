"""The types a step computes, reduces and updates in, and the loss scale."""

from __future__ import annotations

import dataclasses
import numbers
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.config.checks import check_count

LARGEST_SCALE = float(np.finfo(np.float32).max)


def common_dtype(first: Any, second: Any) -> np.dtype:
    """Return the narrowest type that holds the values of both, also where JAX's promotion is strict for the user."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(first, second)


@dataclasses.dataclass(frozen=True)
class DynamicScale:
    """A loss scale that looks for the largest power of two at which nothing overflows.

    A step whose gradients overflow is skipped. The scale is divided by `factor` once
    `hysteresis` steps have overflowed since it was last raised, and multiplied by it after
    `growth_interval` clean steps in a row.

    Attributes:
        initial: The scale of the first step.
        growth_interval: Clean steps in a row before the scale grows.
        factor: What the scale is multiplied and divided by.
        hysteresis: Overflows before the scale falls; 1 lets each one lower it.
        floor: The scale never falls below this; steps that overflow there are skipped too.

    Raises:
        ValueError: If a number is out of range.

    References:
        Micikevicius et al. 2018, arXiv 1710.03740, section 3.2.
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
    """In which types a step computes, sums and keeps its parameters.

    Stage 3 keeps the shards in `master` and casts them to `compute` before they are
    gathered. Stages 0 to 2 keep a full copy in `compute`, and the master weights, sharded
    as the stage shards them, in the optimizer state. Inputs are cast too, or a layer that
    computes in the widest type it is given would compute in float32.

    Attributes:
        compute: Floating type of the parameters that the loss function sees.
        reduce: Floating type in which gradients are summed over devices and microbatches.
        master: Floating type of the weights that the optimizer updates.
        loss_scale: None; a constant; `"dynamic"`, which is `DynamicScale()`; or one of
            your own. `train_step` multiplies the loss by it and divides the gradient.
            Return the loss in float32: float16 cannot carry 2^16 back.
        keep: `keep(path, leaf) -> bool`: parameters that the loss sees in `master`
            (norms, routers). `path` is "/"-separated, `leaf` a `jax.ShapeDtypeStruct` of
            logical shape. Default: none.
        cast_inputs: Whether the loss sees float leaves of the batch in `compute`, so that
            products run in it. Integers and bools stay, one number a row (a target, a weight)
            and further arguments too. Keep masks of tokens bool: a sum of many narrow ones is
            rounded.

    Raises:
        TypeError: If a type is no floating type, or `keep` is not callable.
        ValueError: If `master` is narrower than `compute`, the scale is not positive, or a
            type needs x64 and that is off.

    References:
        Micikevicius et al. 2018, arXiv 1710.03740.
    """

    compute: Any = jnp.float32
    reduce: Any = jnp.float32
    master: Any = jnp.float32
    loss_scale: float | Literal["dynamic"] | DynamicScale | None = None
    keep: Callable[[str, Any], bool] | None = None
    cast_inputs: bool = True

    def input_dtype(self, shape: Sequence[int], dtype: Any) -> Any:
        """Return the type in which the loss sees a leaf of the batch.

        Args:
            shape: Of the leaf; one of a number a row is not cast.
            dtype: The type it is given in.
        """
        is_cast = self.cast_inputs and len(shape) > 1 and jnp.issubdtype(dtype, jnp.floating)
        return self.compute if is_cast else dtype

    def __post_init__(self):
        """Check every field, and write types and scale in one way."""
        for name in ("compute", "reduce", "master"):
            dtype = jnp.dtype(getattr(self, name))
            if not jnp.issubdtype(dtype, jnp.floating):
                raise TypeError(f"Precision({name}=) is a floating type such as jnp.bfloat16, not {dtype}.")
            object.__setattr__(self, name, dtype)
            if jax.dtypes.canonicalize_dtype(dtype) != dtype:
                raise ValueError(
                    f"Precision({name}={dtype}) needs jax.config.update('jax_enable_x64', True), without which JAX "
                    f"makes float32 of it."
                )
        if common_dtype(self.compute, self.master) != self.master:
            raise ValueError(
                f"Precision(master={self.master}) is narrower than compute={self.compute}: the optimizer would update "
                f"coarser weights than the loss sees. Give master=jnp.float32, or another that holds all of its values."
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
    def fp32(cls, **changes: Any) -> Precision:
        """Return a precision with everything in float32. `changes` are fields of `Precision`."""
        return cls(**changes)

    @classmethod
    def bf16(cls, **changes: Any) -> Precision:
        """Compute in bfloat16; sums and master weights in float32. `changes` are fields of `Precision`."""
        return cls(**{"compute": jnp.bfloat16, **changes})

    @classmethod
    def fp16(cls, **changes: Any) -> Precision:
        """Compute in float16 with a dynamic loss scale. `changes` are fields of `Precision`."""
        return cls(**{"compute": jnp.float16, "loss_scale": "dynamic", **changes})
