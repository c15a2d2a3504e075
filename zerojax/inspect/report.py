"""Count the bytes of a state's arrays on each device, leaf by leaf."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import jax
import numpy as np

from zerojax.inspect.planned import planned
from zerojax.inspect.report_table import Row, as_text
from zerojax.layout.chunked import Chunked
from zerojax.layout.padded import Padded
from zerojax.placement.misplaced import Misplaced, misplaced
from zerojax.placement.storage import is_stored_node
from zerojax.placement.unusable import unusable_named


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """Bytes per device of a state. `print` shows a table of parts and leaves.

    Attributes:
        bytes: For each part, the bytes on the device that holds the most bytes of this part.
        per_device: For each device, the bytes of all parts.
        rows: One row per leaf.
        host: For each part offloaded to host memory, the bytes of the device with the most bytes in host memory.
        disk: For each part offloaded to disk, the bytes of the device with the most bytes on disk.
        matrices: Which matrices owners update, what this saves, and why owners do not update the other matrices.
        groups: The groups of the update, and where each group's state is kept, one per line. Empty without offload.
        misplaced: For each leaf that is not placed as planned, by path: the planned and the actual placement.
        compiled: Sentences about the compiler options of a step, if `report` was given the step.
    """

    bytes: dict[str, int]
    per_device: dict[jax.Device, int]
    rows: tuple[Row, ...]
    host: dict[str, int] = dataclasses.field(default_factory=dict)
    disk: dict[str, int] = dataclasses.field(default_factory=dict)
    matrices: str = ""
    groups: str = ""
    misplaced: dict[str, Misplaced] = dataclasses.field(default_factory=dict)
    compiled: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Return the bytes on the fullest device."""
        return max(self.per_device.values(), default=0)

    @property
    def title(self) -> str:
        """Return the totals in one line."""
        count = len(self.per_device)
        offloaded = {"in host memory": sum(self.host.values()), "in files": sum(self.disk.values())}
        return "; ".join(
            [
                f"{self.total:,d} bytes on the fullest of {count} device{'s' * (count != 1)}",
                *(f"{size:,d} bytes/device {where}" for where, size in offloaded.items() if size),
            ]
        )

    def __str__(self) -> str:
        """Return totals, notes, and a line per part and leaf. Leaves that differ only in numbers share a line."""
        head = self.title, self.padding, self.warning, self.groups, self.matrices, *self.compiled
        return "\n".join([*filter(None, head), "", as_text(self.rows)])

    __repr__ = __str__

    @property
    def padding(self) -> str:
        """Describe the padded parameters in one line. Empty if no parameter is padded."""
        count = sum(row.part == "params" and "padded" in row.note for row in self.rows)
        if not count:
            return ""
        padded = f"{count} parameters are padded" if count > 1 else "1 parameter is padded"
        return f"{padded}: take statistics of zerojax.logical(params), and chain transformations inside of zero_shard"

    @property
    def warning(self) -> str:
        """Describe how many leaves are not placed as planned, and the first such leaf. Empty if all are as planned."""
        if not self.misplaced:
            return ""
        path, how = next(iter(self.misplaced.items()))
        count = f"{len(self.misplaced)} of {len(self.rows)} leaves"
        return f"{count} are placed otherwise than planned, such as {path.lstrip('.')} ({how})"


def report(state: Any, tx: Any = None) -> Report:
    """Count the bytes of a state's arrays on each device.

    The plan is known for a `ZeroState`, for a `TrainState` whose `tx` is zerojax's, and if `tx` is given. For any other
    tree, the report only describes the arrays.

    Args:
        state: A `ZeroState`, a Flax `TrainState`, or any pytree of arrays. The parts are its fields, or the keys of its
            topmost node.
        tx: The transformation that made `state`, if `state` is parameters or an optimizer state. Or the step that
            trains `state`. Then the report also says which rules took the loss's equations on parameters, and with
            which compiler options the step was compiled.

    Returns:
        The bytes per device of each part, and a row for each leaf. A row has the leaf's sharding, the reason if it is
        not sharded, and the planned placement if the leaf is not placed as planned.

    Raises:
        TypeError: If a leaf is not an array (shapes have no bytes: use `tx.shardings`), or `state` is None.
        ValueError: If an array was donated to an earlier step. The error names the array.
    """
    if state is None:
        raise TypeError(
            "report measures live jax.Arrays, and None has none. Pass a state; did a function return nothing?"
        )
    with unusable_named(None, state=state):
        return measured(state, tx)


def measured(state: Any, tx: Any) -> Report:
    plan = planned(state, tx)
    elsewhere: dict[str, Misplaced] = {}
    rows: list[Row] = []
    per_device: dict[jax.Device, int] = {}
    places: dict[str, dict[str, dict[jax.Device, int]]] = {"device": {}, "host": {}, "disk": {}}
    for path, x in jax.tree_util.tree_flatten_with_path(state, is_leaf=is_stored_node)[0]:
        array = x.storage if isinstance(x, Padded) else x
        part = name_of(path[0]) if path else "array"
        inner = jax.tree_util.keystr(path[1:])
        keys = (part, *map(name_of, path[1:]))
        keys = keys[1:] if inner.startswith(".master") and part == "opt_state" else keys
        if isinstance(array, bool | int | float | complex):
            continue  # a Flax TrainState counts its steps in Python
        if not isinstance(array, jax.Array | Chunked):
            raise TypeError(
                f"{part}{inner} is a {type(array).__name__}; report measures live jax.Arrays, which have bytes on "
                f"devices. Pass arrays, or use tx.shardings for shapes."
            )
        place, sizes, kept = place_of(array), device_bytes(array), kept_bytes(array)
        for where, found in ((place, sizes), ("device", kept)):
            for device, size in found.items():
                totals = places[where].setdefault(part, {})
                per_device[device] = per_device.get(device, 0) + (size if where == "device" else 0)
                totals[device] = totals.get(device, 0) + size
        shape = tuple(array.leaf.shape if isinstance(array, Chunked) else x.shape)
        whole = jax.tree_util.keystr(path)
        if whole in plan.leaves and (found := misplaced(plan.leaves[whole], x, plan.data)):
            elsewhere[whole] = found
            note = "; ".join(filter(None, (plan.notes[whole], str(found))))
        else:
            note = plan.notes.get(whole) or note_from_array(x, array, sizes)
        texts = describe(array), note
        rows.append(Row(part, inner, keys, shape, x.dtype, place, sizes, kept, global_bytes(array), *texts))
    device, host, disk = ({part: max(sizes.values()) for part, sizes in parts.items()} for parts in places.values())
    of_state = getattr(state, "plan", None)
    matrices, groups = getattr(of_state, "matrices", None), str(getattr(of_state, "groups", ""))
    totals = device, per_device, tuple(rows), host, disk
    compiled = getattr(tx, "compiled_with", ())
    return Report(*totals, str(matrices or ""), groups, elsewhere, compiled)


def place_of(array: jax.Array | Chunked) -> str:
    if isinstance(array, Chunked):
        return "host" if array.store is None else "disk"
    return "device" if array.sharding.memory_kind in (None, "device") else "host"


def device_bytes(array: jax.Array | Chunked) -> dict[jax.Device, int]:
    """Return the bytes of an array's shards by device of this process, without chunks that are kept on the device."""
    if isinstance(array, Chunked):
        kept = kept_bytes(array)
        return {x: array.leaf.local_bytes - kept.get(x, 0) for x in array.sharding.addressable_devices}
    sizes = Counter[jax.Device]()
    for shard in array.addressable_shards:
        sizes[shard.device] += math.prod(shard.data.shape) * itemsize(array)
    return dict(sizes)


def kept_bytes(array: jax.Array | Chunked) -> dict[jax.Device, int]:
    """Return the bytes of an offloaded leaf's chunks that are on the device, as `Offload(device_bytes=)` keeps them."""
    sizes = Counter[jax.Device]()
    if isinstance(array, Chunked) and array.store is None:
        for chunk in array.chunks:
            if place_of(chunk) == "device":
                sizes.update(device_bytes(chunk))
    return dict(sizes)


def global_bytes(array: jax.Array | Chunked) -> int:
    return math.prod(array.shape) * itemsize(array)


def itemsize(array: jax.Array | Chunked) -> int:
    """Return the bytes of one element. For a PRNG key, these are the bytes of its key data."""
    if isinstance(array, jax.Array) and jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        words = jax.random.key_data(array)
        return math.prod(words.shape[array.ndim :]) * words.dtype.itemsize
    return np.dtype(array.dtype).itemsize


def note_from_array(x: Any, array: jax.Array | Chunked, sizes: dict[jax.Device, int]) -> str:
    if isinstance(x, Padded):
        return f"dim {x.dim} padded from {x.shape[x.dim]} to {x.storage.shape[x.dim]}"
    if isinstance(array, Chunked):
        return ""
    return "replicated" if len(sizes) > 1 and max(sizes.values()) == global_bytes(array) else ""


def describe(array: jax.Array | Chunked) -> str:
    """Describe the sharding of an array, its memory unless this is device memory, and its chunks."""
    sharding = array.sharding
    spec = getattr(sharding, "spec", None)
    if isinstance(array, Chunked):
        memory, count = "on disk" if array.store is not None else "in host memory", len(array.chunking.extents)
        kept = sum(place_of(chunk) == "device" for chunk in array.chunks) if array.store is None else 0
        text = f"{spec} {memory}, {count} chunk{'s' * (count > 1)}"
        return f"{text}, of which {kept} on the device" if kept else text
    kind = sharding.memory_kind
    only = next(iter(sharding.device_set)) if len(sharding.device_set) == 1 else None
    text = f"{spec}" if spec is not None else f"device {only.id}" if only else type(sharding).__name__
    return text if kind in (None, "device") else f"{text} in {kind}"


def name_of(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)
