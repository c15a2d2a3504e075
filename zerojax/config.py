"""What the caller chose, checked once: the words every other module uses."""

from __future__ import annotations

import dataclasses
import numbers
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

STAGES = {
    0: "everything replicated",
    1: "optimizer state sharded",
    2: "optimizer state and gradients sharded",
    3: "optimizer state, gradients and parameters sharded",
}
PERSIST_BELOW = 8192
BUCKET_BYTES = 128 << 20
LARGEST_SCALE = float(np.finfo(np.float32).max)


def check_count(name: str, value: Any, unit: str, *, least: int) -> None:
    """Refuse what is no count.

    Raises:
        TypeError: If it is no int.
        ValueError: If it is below `least`.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} counts {unit} and must be an int, not {value!r}.")
    if value < least:
        raise ValueError(f"{name} counts {unit} and must be at least {least}, but is {value}.")


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
            if not getattr(self, name) > bound:
                raise ValueError(f"DynamicScale({name}=) must be greater than {bound}, but is {getattr(self, name)}.")
        if not self.floor <= self.initial <= LARGEST_SCALE:
            raise ValueError(
                f"DynamicScale(initial={self.initial}) must be finite in float32, and at least floor={self.floor}."
            )


@dataclasses.dataclass(frozen=True)
class Precision:
    """In which types a step computes, sums and keeps its parameters.

    Stage 3 keeps the shards in `master` and casts them to `compute` before they are
    gathered. Stages 0 to 2 keep a whole copy in `compute`, and the master weights, divided
    as the stage divides it, in the optimizer state. The batch is left as it is: cast
    inputs where the model wants it.

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
        if jnp.promote_types(self.compute, self.master) != self.master:
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
        """Everything in float32; `changes` are fields of `Precision`."""
        return cls(**changes)

    @classmethod
    def bf16(cls, **changes: Any) -> Precision:
        """Compute in bfloat16; sums and master weights in float32. `changes` are fields of `Precision`."""
        return cls(**{"compute": jnp.bfloat16, **changes})

    @classmethod
    def fp16(cls, **changes: Any) -> Precision:
        """Compute in float16 with a dynamic loss scale. `changes` are fields of `Precision`."""
        return cls(**{"compute": jnp.float16, "loss_scale": "dynamic", **changes})


@dataclasses.dataclass(frozen=True)
class Paths:
    """A mask as a predicate: which of the leaves whose paths are known are meant.

    Attributes:
        known: Paths of all leaves of the mask.
        meant: Those whose value is true.
    """

    known: frozenset[str]
    meant: frozenset[str]

    @classmethod
    def of(cls, mask: Any) -> Paths:
        """The predicate of a tree of bools with the structure of the parameters.

        Raises:
            TypeError: If a leaf is no bool.
            ValueError: If two leaves have one path.
        """
        leaves = jax.tree_util.tree_flatten_with_path(mask)[0]
        found = {path_of(path): x for path, x in leaves}
        if len(found) < len(leaves):
            raise ValueError("Two leaves of the mask in trainable= have one path. Rename the keys that contain '/'.")
        for path, x in found.items():
            if not isinstance(x, bool | np.bool_):
                raise TypeError(
                    f"trainable= is read as a mask, and its leaf {path!r} is {x!r}. Give a tree of bools with the "
                    f"structure of the parameters, or a function of (path, leaf)."
                )
        return cls(frozenset(found), frozenset(path for path, x in found.items() if x))

    def __call__(self, path: str, leaf: Any) -> bool:
        """Whether the leaf at `path` is meant.

        Raises:
            ValueError: If the mask has no such leaf.
        """
        if path not in self.known:
            raise ValueError(
                f"The mask in trainable= has no leaf {path!r}, which the parameters have. "
                f"Give a tree of bools with the structure of the parameters, or a function of (path, leaf)."
            )
        return path in self.meant

    def check(self, paths: Iterable[str]) -> None:
        """Refuse a mask that has more leaves than the parameters.

        Raises:
            ValueError: Naming the first such leaf.
        """
        if surplus := sorted(self.known.difference(paths)):
            raise ValueError(
                f"The mask in trainable= has a leaf {surplus[0]!r}, which the parameters have not. "
                f"Give a tree of bools with the structure of the parameters, or a function of (path, leaf)."
            )


def path_of(keys: tuple) -> str:
    """A leaf's path as predicates are given it: its keys, "/"-separated."""
    if len(keys) > 1 and keys[-1] == jax.tree_util.GetAttrKey(
        "value"
    ):  # inside an nnx Variable, which may be a leaf too
        keys = keys[:-1]
    return jax.tree_util.keystr(keys, simple=True, separator="/")


@dataclasses.dataclass(frozen=True)
class Config:
    """A transformation and where its parts live.

    Attributes:
        tx: The optax transformation that is wrapped.
        stage: ZeRO stage, 0 to 3.
        mesh: Mesh with Auto axes.
        axis: The mesh axis that everything is divided over.
        persist_below: A leaf with fewer elements is not cut by dim: at stage 3 its
            parameter stays whole, and its gradient and optimizer state lie flat.
        prefetch: How many uses ahead stage 3 starts a gather; 0 is none.
        bucket_bytes: A layer's leaves travel together up to this many logical bytes.
        reshard_after_forward: Whether stage 3 drops gathered parameters after the forward pass.
        precision: Types of a step; None leaves every type as the parameters and the loss have it.
        trainable: `trainable(path, leaf) -> bool`; None trains every leaf.

    Raises:
        TypeError: If `tx` is no optax transformation, a count is no integer, or precision no `Precision`.
        ValueError: If the stage is unknown or a count negative.
    """

    tx: optax.GradientTransformation
    stage: int
    mesh: Mesh
    axis: str = "data"
    persist_below: int = PERSIST_BELOW
    prefetch: int = 1
    bucket_bytes: int = BUCKET_BYTES
    reshard_after_forward: bool = True
    precision: Precision | None = None
    trainable: Callable[[str, Any], bool] | None = None

    def __post_init__(self):
        """Check every field."""
        if not (callable(getattr(self.tx, "init", None)) and callable(getattr(self.tx, "update", None))):
            raise TypeError(
                f"zero_shard wraps an optax transformation, which has init and update; got {type(self.tx).__name__}. "
                f"For example: zero_shard(optax.adamw(3e-4), stage=3)."
            )
        if isinstance(self.stage, bool) or self.stage not in STAGES or not isinstance(self.stage, int):
            known = "; ".join(f"{stage}: {what}" for stage, what in STAGES.items())
            raise ValueError(f"Unknown ZeRO stage {self.stage!r}. Give one of {known}.")
        for name, unit in {"persist_below": "elements", "prefetch": "uses", "bucket_bytes": "bytes"}.items():
            check_count(name, getattr(self, name), unit, least=0)
        if not isinstance(self.precision, Precision | None):
            raise TypeError(f"precision is a zerojax.Precision, such as Precision.bf16(), not {self.precision!r}.")

    @property
    def keeps_master(self) -> bool:
        """Whether parameters are a copy of master weights that lie in the optimizer state."""
        wide = self.precision
        return wide is not None and self.stage < 3 and wide.compute != wide.master

    @property
    def shards(self) -> int:
        """Size of the mesh axis."""
        return self.mesh.shape[self.axis]
