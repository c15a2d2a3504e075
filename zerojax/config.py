"""What the caller chose, checked once: the words every other module uses."""

from __future__ import annotations

import dataclasses
import fnmatch
import numbers
import os
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
CHUNK_BYTES = 32 << 20
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
class Offload:
    """What waits outside the device's memory, and where it is updated.

    Optimizer state, master weights with it, lies in pinned host memory or in files, each
    device's part with the device's host, in chunks that are fetched, updated and put back
    while their neighbours travel. Arrays of fewer than `persist_below` elements, scalars
    among them, stay on the device. Where `precision` computes in a narrower type, stage 3
    keeps its shards in that type: the master weights wait with the optimizer state.

    Attributes:
        optimizer: `"host"`: pinned host memory. `"disk"`: files under `path`. None: the device.
        params: `"host"`: at stage 3, shards of parameters wait in host memory and are
            fetched where they are gathered, in each pass anew, and for their update: the
            device holds those of a few uses or of two updates. Gradients, and leaves below
            `persist_below`, are on the device. None: the device.
        update: Where the optax update runs. `"device"`: the state travels through the
            device. `"host"`: gradients travel to the host, and new parameters back.
            `"auto"`: link and host memory are measured once, and the faster way is taken.
        fraction: How much of the optimizer state is offloaded, by bytes, from 0 to 1; the
            rest stays on the device. `"auto"`: as little as `budget` allows.
        budget: For `fraction="auto"`: bytes a device has for parameters, gradients,
            optimizer state and the chunks under way; activations are beyond it.
        where: Parameters whose state may be offloaded: `where(path, leaf) -> bool`, as for
            `Precision.keep`, or shell patterns such as `("*/kernel",)`. None: all.
        path: For `"disk"`: the folder of the files; each process makes its own in it.
        chunk_bytes: Bytes per device of the largest piece of an array that is copied at once.

    Raises:
        TypeError: If a field is of another type.
        ValueError: If a word is unknown, a number out of range, or fields do not go together.

    References:
        Ren et al. 2021, arXiv 2101.06840 (ZeRO-Offload); Rajbhandari et al. 2021, arXiv
        2104.07857 (ZeRO-Infinity).
    """

    optimizer: Literal["host", "disk"] | None = None
    params: Literal["host"] | None = None
    update: Literal["auto", "device", "host"] = "auto"
    fraction: float | Literal["auto"] = 1.0
    budget: int | None = None
    where: Callable[[str, Any], bool] | tuple[str, ...] | None = None
    path: str | os.PathLike | None = None
    chunk_bytes: int = CHUNK_BYTES

    def __post_init__(self):
        """Check every field, and write paths and patterns in one way."""
        check_word("Offload(optimizer=)", self.optimizer, (None, "host", "disk"))
        check_word("Offload(params=)", self.params, (None, "host"))
        check_word("Offload(update=)", self.update, ("auto", "device", "host"))
        check_count("Offload(chunk_bytes=)", self.chunk_bytes, "bytes", least=1)
        if self.optimizer is None:
            beside = "; the update of offloaded parameters goes through the host" if self.params else ""
            raise ValueError(f'Offload() moves nothing without optimizer="host" or optimizer="disk"{beside}.')
        self._check_fraction()
        if (self.path is not None) != (self.optimizer == "disk"):
            raise ValueError(
                f'Offload(optimizer={self.optimizer!r}, path={self.path!r}): optimizer="disk" needs path=, the folder '
                f"for its files, and nothing else takes one."
            )
        if self.path is not None:
            object.__setattr__(self, "path", os.fspath(self.path))
        if self.where is not None and not callable(self.where):
            patterns = (self.where,) if isinstance(self.where, str) else tuple(self.where)
            if not all(isinstance(pattern, str) for pattern in patterns):
                raise TypeError(f"Offload(where=) is a function of (path, leaf) or shell patterns, not {self.where!r}.")
            object.__setattr__(self, "where", patterns)

    def _check_fraction(self) -> None:
        fraction = self.fraction
        if fraction == "auto":
            if self.budget is None:
                raise ValueError('Offload(fraction="auto") needs budget=, the bytes a device has for model states.')
            return check_count("Offload(budget=)", self.budget, "bytes", least=1)
        if isinstance(fraction, bool) or not isinstance(fraction, numbers.Real) or not 0 <= fraction <= 1:
            raise ValueError(f'Offload(fraction=) is a number from 0 to 1 or "auto", not {fraction!r}.')
        if self.budget is not None:
            raise ValueError('Offload(budget=) is for fraction="auto" alone.')
        return None

    def means(self, path: str, leaf: Any) -> bool:
        """Whether the state of the parameter at a path may be offloaded.

        Args:
            path: "/"-separated.
            leaf: A `jax.ShapeDtypeStruct` of logical shape.
        """
        if self.where is None:
            return True
        if callable(self.where):
            return bool(self.where(path, leaf))
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in self.where)


def check_word(name: str, value: Any, known: tuple) -> None:
    """Refuse a word that is none of those known.

    Raises:
        ValueError: Naming those known.
    """
    if value not in known:
        raise ValueError(f"{name} is one of {', '.join(map(repr, known))}, not {value!r}.")


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
        offload: What waits in host memory or on disk; None: nothing.

    Raises:
        TypeError: If `tx` is no optax transformation, a count is no integer, or precision or offload of another type.
        ValueError: If the stage is unknown or a count negative, or the stage cannot offload.
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
    offload: Offload | None = None

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
        if not isinstance(self.offload, Offload | None):
            raise TypeError(f'offload is a zerojax.Offload, such as Offload(optimizer="host"), not {self.offload!r}.')
        if self.offload is not None and self.stage == 0:
            raise ValueError(
                "Stage 0 divides nothing, so every device would hold the whole optimizer state on the host. "
                "Offload at stage 1, 2 or 3."
            )
        if self.offload is not None and self.offload.params is not None and self.stage != 3:
            raise ValueError(
                f'Offload(params="host") needs stage 3: at stage {self.stage} the loss needs every parameter whole, '
                f"on the device."
            )

    @property
    def narrows(self) -> bool:
        """Whether parameters are stored in the type they are computed in: not where stage 3 updates its shards."""
        return self.stage < 3 or self.offload is not None

    @property
    def hosts_params(self) -> bool:
        """Whether parameters that are cut wait in host memory."""
        return self.offload is not None and self.offload.params == "host"

    @property
    def keeps_master(self) -> bool:
        """Whether parameters are a copy of master weights that lie in the optimizer state."""
        wide = self.precision
        return wide is not None and self.narrows and wide.compute != wide.master

    @property
    def shards(self) -> int:
        """Size of the mesh axis."""
        return self.mesh.shape[self.axis]
