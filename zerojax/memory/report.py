"""Bytes per device, found on live arrays, leaf by leaf."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from ..layout.padded import Padded, is_padded


@dataclasses.dataclass(frozen=True)
class Row:
    """What was found of one leaf.

    Attributes:
        part: The field of the state it stands in: `"params"`, `"opt_state"`, ...
        path: Its path within the part.
        shape: Logical shape where it is known, else storage shape.
        dtype: Element type.
        bytes: Bytes on the device that holds most of it, padding included.
        total: Bytes of one copy in storage, over all devices.
        where: The `PartitionSpec` and memory kind, or what else is known.
        note: Why it is not divided, or how it is padded; empty where it is plainly cut.
    """

    part: str
    path: str
    shape: tuple[int, ...]
    dtype: Any
    bytes: int
    total: int
    where: str
    note: str


@dataclasses.dataclass(frozen=True)
class Report:
    """Bytes per device of a state.

    Attributes:
        bytes: For each part, the bytes on the device that holds most of it.
        per_device: For each device, the bytes of all parts.
        rows: One row a leaf.
    """

    bytes: dict[str, int]
    per_device: dict[jax.Device, int]
    rows: tuple[Row, ...]

    @property
    def total(self) -> int:
        """Bytes on the fullest device."""
        return max(self.per_device.values(), default=0)

    def __str__(self) -> str:
        """A table: the parts, then a line for every leaf."""
        lines = [f"{part:12s} {size:>14,d} bytes/device" for part, size in self.bytes.items()]
        lines += [f"{'all':12s} {self.total:>14,d} bytes on the fullest of {len(self.per_device)} devices", ""]
        for row in self.rows:
            text = f"{row.part}{row.path}  {row.dtype}{list(row.shape)}  {row.bytes:,d} bytes/device  {row.where}"
            lines.append(f"{text}  ({row.note})" if row.note else text)
        return "\n".join(lines)


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
    by_part: dict[str, dict[jax.Device, int]] = {}
    for path, x in jax.tree_util.tree_flatten_with_path(state, is_leaf=is_padded)[0]:
        array = x.storage if isinstance(x, Padded) else x
        part = name_of(path[0]) if path else "array"
        inner = jax.tree_util.keystr(path[1:])
        if isinstance(array, bool | int | float | complex):
            continue  # a TrainState counts its steps in Python
        if not isinstance(array, jax.Array):
            raise TypeError(f"{part}{inner} is a {type(array).__name__}; report measures live jax.Arrays.")
        held = bytes_by_device(array)
        for device, size in held.items():
            per_device[device] = per_device.get(device, 0) + size
            devices = by_part.setdefault(part, {})
            devices[device] = devices.get(device, 0) + size
        reason = reasons.get((part, inner)) or found_note(x, array, held)
        where = describe(array.sharding)
        rows.append(
            Row(part, inner, tuple(x.shape), x.dtype, max(held.values(), default=0), whole_bytes(array), where, reason)
        )
    return Report({part: max(sizes.values()) for part, sizes in by_part.items()}, per_device, tuple(rows))


def bytes_by_device(array: jax.Array) -> dict[jax.Device, int]:
    """Bytes of an array on each device of this process that holds some of it."""
    width = itemsize(array)
    held: dict[jax.Device, int] = {}
    for shard in array.addressable_shards:
        held[shard.device] = held.get(shard.device, 0) + math.prod(shard.data.shape) * width
    return held


def whole_bytes(array: jax.Array) -> int:
    """Bytes of one copy of an array."""
    return math.prod(array.shape) * itemsize(array)


def itemsize(array: jax.Array) -> int:
    """Bytes of one element; of a PRNG key, of the words behind it."""
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
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
    if leaf.kind == "cut":
        return padding and f"dim {leaf.dim} {padding}"
    said = f"{leaf.kind}: {leaf.reason}" if leaf.reason else leaf.kind
    return f"{said}; {padding}" if padding else said


def found_note(x: Any, array: jax.Array, held: dict) -> str:
    """What can be said of a leaf whose layout is not known."""
    if isinstance(x, Padded):
        return f"dim {x.dim} padded from {x.shape[x.dim]} to {x.storage.shape[x.dim]}"
    alone = held and max(held.values()) == whole_bytes(array)
    return "whole on each of its devices" if alone else ""


def describe(sharding: Sharding) -> str:
    """A sharding in a few words."""
    spec = getattr(sharding, "spec", None)
    kind = sharding.memory_kind
    text = f"{spec}" if spec is not None else type(sharding).__name__
    return text if kind in (None, "device") else f"{text} in {kind}"


def name_of(key: Any) -> str:
    """The first step of a path as a word."""
    return jax.tree_util.keystr((key,), simple=True)
