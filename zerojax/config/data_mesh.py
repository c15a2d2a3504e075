"""The axes of a mesh that divide a batch and shard arrays, and their conversion to and from a `PartitionSpec`."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from jax.sharding import PartitionSpec


@dataclasses.dataclass(frozen=True)
class DataMesh:
    """The names and sizes of a mesh's axes, and the data-parallel axes among them. A `DataMesh` has no devices.

    Axes that are not data-parallel (tensor, expert, sequence) are left to the compiler. If the axes
    `params` are the first of the axes `grads`, a device's shard of a gradient is a part of its shard of the parameter.

    References:
        Rajbhandari et al. 2020, arXiv 1910.02054, section 5; Zhao et al. 2023, arXiv 2304.11277, section 3.2 (hybrid
        sharding); Wang et al. 2023, arXiv 2306.10209, section 3.3 (parameters within a host).
    """

    sizes: tuple[tuple[str, int], ...]  # of every axis of the mesh, in the mesh's order
    batch: tuple[str, ...]  # the axes that divide the rows of the batch
    params: tuple[str, ...] = ()  # the axes that shard the parameters; empty if they are replicated
    grads: tuple[str, ...] = ()
    opt_state: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()  # data axes that also divide experts; a leaf that names one stays divided over it

    @classmethod
    def for_stage(
        cls,
        sizes: Mapping[str, int],
        axes: tuple[str, ...],
        stage: int,
        shard_axes: tuple[str, ...] = (),
        params_axes: tuple[str, ...] = (),
        expert_axes: tuple[str, ...] = (),
    ) -> "DataMesh":
        """Return the axes for a ZeRO stage. `axes` divide the batch. `Tuning` and `zero_shard` describe the others."""
        # An axis of one device counts as an axis that shards. Otherwise gradients would be reduced over it.
        whole = tuple(axis for axis in axes if sizes[axis] == 1)
        with_whole = lambda some: (*some, *(axis for axis in whole if axis not in some)) if some else ()
        params_axes, inner = with_whole(params_axes), with_whole(shard_axes) or axes
        inner = (*params_axes, *(axis for axis in inner if axis not in params_axes))
        params = (params_axes or inner) if stage == 3 else ()
        grads, opt_state = (inner if stage >= first else () for first in (2, 1))
        return cls(tuple(sizes.items()), axes, params=params, grads=grads, opt_state=opt_state, experts=expert_axes)

    def size(self, axes: tuple[str, ...]) -> int:
        sizes = dict(self.sizes)
        return math.prod(sizes[axis] for axis in axes)

    @property
    def workers(self) -> int:
        return self.size(self.batch)

    def in_words(self) -> str:
        """Describe the axes over which the stage shards arrays, and the axes over which the stage replicates arrays."""
        rest = tuple(axis for axis in self.batch if self.opt_state and axis not in self.opt_state)
        words = in_words(self.opt_state or self.batch) + (f", replicated over {in_words(rest)}" if rest else "")
        return words + (f", parameters over {in_words(self.params)}" if self.params not in ((), self.opt_state) else "")

    @property
    def across(self) -> tuple[str, ...]:
        """Return the batch axes over which shards are replicated, as in hybrid sharding."""
        parts = [part for part in (self.params, self.grads, self.opt_state) if part]
        return tuple(axis for axis in self.batch if any(axis not in part for part in parts))

    @property
    def compiler_axes(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.sizes if name not in self.batch)


@dataclasses.dataclass(frozen=True)
class LayoutPolicy:
    """The options that decide how leaves are laid out. They contain no function, because jit compares them."""

    stage: int
    data: DataMesh
    persist_below: int
    stores_compute_dtype: bool = True
    params_on_host: bool = False
    encodes_state: bool = False  # whether the last dim of large leaves must not be sharded, because it has blocks


def spec_entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return axes[0] if len(axes) == 1 else axes or None


def dim_spec(dim: int | None, axes: tuple[str, ...]) -> PartitionSpec:
    """Return the spec of an array that `axes` divide along `dim` only. If `dim` is None, the array is replicated."""
    return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, spec_entry(axes))


def is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def entry_axes(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes in one entry of a `PartitionSpec`; empty if the entry is None or unconstrained."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def axes_of(*specs: Iterable) -> list[str]:
    return [axis for spec in specs for entry in spec for axis in entry_axes(entry)]


def in_words(axes: tuple[str, ...]) -> str:
    """Describe mesh axes for an error: `axis 'data'`, or `axes 'host' and 'gpu'`."""
    names = [repr(axis) for axis in axes]
    return f"axis {names[0]}" if len(names) == 1 else f"axes {', '.join(names[:-1])} and {names[-1]}"


def resolve_axes(axis: str | tuple[str, ...] | None, argument: str = "axis") -> tuple[str, ...]:
    """Return the axes that the caller named, as a tuple. `axis=` must name an axis, and other arguments may be None."""
    if axis is None and argument != "axis":
        return ()
    axes = (axis,) if isinstance(axis, str) else axis
    if not isinstance(axes, tuple | list) or not all(isinstance(name, str) for name in axes):
        raise TypeError(f'{argument}= names one mesh axis, or several, such as "gpu" or ("host", "gpu"), not {axis!r}.')
    if not axes or len(set(axes)) < len(axes):
        raise ValueError(f"{argument}={axis!r} must name at least one mesh axis, and each only once.")
    return tuple(axes)
