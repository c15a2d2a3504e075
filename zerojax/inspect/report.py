"""Bytes per device, found on live arrays, leaf by leaf."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from zerojax.inspect.report_tree import Leaf, Node, as_rich, as_text, grown
from zerojax.layout.chunked import Chunked, is_chunked
from zerojax.layout.padded import Padded, is_padded

if TYPE_CHECKING:
    from rich.tree import Tree


@dataclasses.dataclass(frozen=True)
class Row:
    """What was found of one leaf.

    Attributes:
        part: The field of the state it stands in: `"params"`, `"opt_state"`, ...
        path: Its path within the part.
        steps: Where it stands in the tree: its part, master weights being one, and its path step by step.
        shape: Logical shape where it is known, else storage shape.
        dtype: Element type.
        place: `"device"`, `"host"` or `"disk"`.
        held: Bytes of each device in that place, padding included.
        total: Bytes of one copy in storage, over all devices.
        where: The `PartitionSpec` and memory kind, or what else is known.
        note: Why it is not divided, or how it is padded; empty where it is plainly cut.
    """

    part: str
    path: str
    steps: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any
    place: str
    held: dict[jax.Device, int]
    total: int
    where: str
    note: str

    @property
    def bytes(self) -> int:
        """Bytes of the device that has most of it."""
        return max(self.held.values(), default=0)

    def __str__(self) -> str:
        """Type, shape, where it lies, and why it is not cut."""
        text = f"{self.dtype}{list(self.shape)}  {self.where}"
        return f"{text}  ({self.note})" if self.note else text


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """Bytes per device of a state. Prints as a tree, by part and module; rich's consoles show it in colours.

    Attributes:
        bytes: For each part, the bytes on the device that holds most of it.
        per_device: For each device, the bytes of all parts.
        rows: One row a leaf.
        host: For each part that waits in host memory, the bytes there of the device that has most.
        disk: As `host`, on disk.
        update: Where the update of what is offloaded runs, and why; empty if nothing is.
    """

    bytes: dict[str, int]
    per_device: dict[jax.Device, int]
    rows: tuple[Row, ...]
    host: dict[str, int] = dataclasses.field(default_factory=dict)
    disk: dict[str, int] = dataclasses.field(default_factory=dict)
    update: str = ""

    @property
    def total(self) -> int:
        """Bytes on the fullest device."""
        return max(self.per_device.values(), default=0)

    @functools.cached_property
    def tree(self) -> Node:
        """Bytes by part, module and leaf; `tree["master"]` are the master weights, `tree["opt_state"]` the rest."""
        return grown(Leaf(row.steps, row.place, row.held, str(row)) for row in self.rows)

    @property
    def title(self) -> str:
        """The totals, in words."""
        count = len(self.per_device)
        waiting = {"in host memory": sum(self.host.values()), "in files": sum(self.disk.values())}
        return "; ".join(
            [
                f"{self.total:,d} bytes on the fullest of {count} device{'s' * (count != 1)}",
                *(f"{size:,d} bytes/device {where}" for where, size in waiting.items() if size),
                *([f"update on the {self.update}"] if self.update else []),
            ]
        )

    def __str__(self) -> str:
        """The totals, and a line for each part, module and leaf; alike modules share one."""
        return f"{self.title}\n\n{as_text(self.tree)}"

    __repr__ = __str__

    def __rich__(self) -> Tree:
        """The same for `rich.print`."""
        return as_rich(self.title, self.tree)


def report(state: Any) -> Report:
    """Find the bytes each device holds of a state, on the live arrays.

    Args:
        state: A `ZeroState`, a Flax `TrainState`, or any pytree of arrays. The parts are
            its fields (or the keys of its topmost node).

    Returns:
        Bytes per device by part, and a row for each leaf: where it lies, and why it is
        not divided if it is not. Reasons are known for a `ZeroState`; of other trees the
        report says what was found.

    Raises:
        TypeError: If a leaf is no array (shapes have no bytes: use `tx.shardings`).
    """
    reasons = known_reasons(state)
    rows: list[Row] = []
    per_device: dict[jax.Device, int] = {}
    places: dict[str, dict[str, dict[jax.Device, int]]] = {"device": {}, "host": {}, "disk": {}}
    for path, x in jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda x: is_padded(x) or is_chunked(x))[0]:
        array = x.storage if isinstance(x, Padded) else x
        part = name_of(path[0]) if path else "array"
        inner = jax.tree_util.keystr(path[1:])
        steps = (part, *map(name_of, path[1:]))
        steps = steps[1:] if inner.startswith(".master") and part == "opt_state" else steps
        if isinstance(array, bool | int | float | complex):
            continue  # a TrainState counts its steps in Python
        if not isinstance(array, jax.Array | Chunked):
            raise TypeError(f"{part}{inner} is a {type(array).__name__}; report measures live jax.Arrays.")
        place, held = place_of(array), bytes_by_device(array)
        devices = places[place].setdefault(part, {})
        for device, size in held.items():
            per_device[device] = per_device.get(device, 0) + (size if place == "device" else 0)
            devices[device] = devices.get(device, 0) + size
        shape = tuple(array.leaf.shape if isinstance(array, Chunked) else x.shape)
        reason = reasons.get((part, inner)) or found_note(x, array, held)
        rows.append(Row(part, inner, steps, shape, x.dtype, place, held, whole_bytes(array), describe(array), reason))
    device, host, disk = ({part: max(sizes.values()) for part, sizes in found.items()} for found in places.values())
    return Report(device, per_device, tuple(rows), host, disk, updated(state))


def place_of(array: jax.Array | Chunked) -> str:
    """Where an array is: `"device"`, `"host"` or `"disk"`."""
    if isinstance(array, Chunked):
        return "host" if array.store is None else "disk"
    return "device" if array.sharding.memory_kind in (None, "device") else "host"


def updated(state: Any) -> str:
    """Where the update of what a state offloads runs, and why; empty if it offloads nothing."""
    choice = getattr(getattr(state, "plan", None), "choice", None)
    return f"{choice.update}: {choice.why}" if choice else ""


def bytes_by_device(array: jax.Array | Chunked) -> dict[jax.Device, int]:
    """Bytes of an array for each device of this process that has some of it."""
    if isinstance(array, Chunked):
        return dict.fromkeys(array.sharding.addressable_devices, array.leaf.local_bytes)
    width = itemsize(array)
    held: dict[jax.Device, int] = {}
    for shard in array.addressable_shards:
        held[shard.device] = held.get(shard.device, 0) + math.prod(shard.data.shape) * width
    return held


def whole_bytes(array: jax.Array | Chunked) -> int:
    """Bytes of one copy of an array."""
    return math.prod(array.shape) * itemsize(array)


def itemsize(array: jax.Array | Chunked) -> int:
    """Bytes of one element; of a PRNG key, of the words behind it."""
    if isinstance(array, jax.Array) and jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        words = jax.random.key_data(array)
        return math.prod(words.shape[array.ndim :]) * words.dtype.itemsize
    return np.dtype(array.dtype).itemsize


def known_reasons(state: Any) -> dict[tuple[str, str], str]:
    """What the layout of a `ZeroState` says of each leaf that is not plainly cut."""
    plan = getattr(state, "plan", None)
    if plan is None:
        return {}
    parts = {"params": plan.layout.params, "opt_state": plan.state}
    return {(part, leaf.path): leaf_note(leaf) for part, leaves in parts.items() for leaf in leaves}


def leaf_note(leaf) -> str:
    """One leaf's layout in words; empty if it is cut with nothing to add."""
    padding = f"padded by {leaf.padding} elements" if leaf.padding else ""
    if leaf.kind == "sharded":
        return padding and f"dim {leaf.dim} {padding}"
    said = f"{leaf.kind}: {leaf.reason}" if leaf.reason else leaf.kind
    return f"{said}; {padding}" if padding else said


def found_note(x: Any, array: jax.Array | Chunked, held: dict) -> str:
    """What can be said of a leaf whose layout is not known."""
    if isinstance(x, Padded):
        return f"dim {x.dim} padded from {x.shape[x.dim]} to {x.storage.shape[x.dim]}"
    if isinstance(array, Chunked):
        return ""
    alone = held and max(held.values()) == whole_bytes(array)
    return "whole on each of its devices" if alone and len(held) > 1 else ""


def describe(array: jax.Array | Chunked) -> str:
    """Where an array lies, in a few words."""
    sharding = array.sharding
    spec = getattr(sharding, "spec", None)
    if isinstance(array, Chunked):
        where = "on disk" if array.store is not None else "in host memory"
        return f"{spec} {where}, {len(array.chunking.extents)} piece{'s' * (len(array.chunking.extents) > 1)}"
    kind = sharding.memory_kind
    alone = next(iter(sharding.device_set)) if len(sharding.device_set) == 1 else None
    text = f"{spec}" if spec is not None else f"device {alone.id}" if alone else type(sharding).__name__
    return text if kind in (None, "device") else f"{text} in {kind}"


def name_of(key: Any) -> str:
    """One step of a path as a word."""
    return jax.tree_util.keystr((key,), simple=True)
