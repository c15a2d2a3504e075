"""Print a report's table of parts and leaves with their bytes. Leaves that differ only in numbers share a line."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

TITLES = {"device": "bytes/device", "host": "in host memory", "disk": "in files"}
NUMBER = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class Row:
    """One leaf of a state."""

    part: str  # the field of the state that contains the leaf: `"params"`, `"opt_state"` and others
    path: str  # the leaf's path within the part
    keys: tuple[str, ...]  # the leaf's path in the report: its part, or "master", then one key per level
    shape: tuple[int, ...]  # the logical shape if it is known, otherwise the storage shape
    dtype: Any  # element type
    place: str  # `"device"`, `"host"` or `"disk"`
    device_bytes: dict[jax.Device, int]  # for each device, the bytes in this place, with padding
    kept: dict[jax.Device, int]  # for each device, the bytes of an offloaded leaf's chunks that are on the device
    total: int  # bytes of the global array in storage
    sharding: str  # the `PartitionSpec` and the memory kind. A sharding without a spec is described in words
    note: str  # why the leaf is replicated or flat, or how it is padded. Empty for a sharded leaf without padding

    @property
    def bytes(self) -> int:
        return max(self.device_bytes.values(), default=0)

    def __str__(self) -> str:
        text = f"{self.dtype}{list(self.shape)}  {self.sharding}"
        return f"{text}  ({self.note})" if self.note else text


def bytes_by_place(rows: Sequence[Row]) -> dict[str, int]:
    """Return the bytes of the device with the most bytes in each place."""
    totals: dict[str, Counter] = {place: Counter() for place in TITLES}
    for row in rows:
        totals[row.place].update(row.device_bytes)
        totals["device"].update(row.kept)
    return {place: max(total.values(), default=0) for place, total in totals.items()}


def as_text(rows: Sequence[Row]) -> str:
    used = bytes_by_place(rows)
    places = [place for place in TITLES if place == "device" or used[place]]
    sections: dict[str, dict[tuple, list[Row]]] = {}
    for row in rows:
        devices = tuple(row.device_bytes.items()), tuple(row.kept.items())
        alike = NUMBER.sub("#", "/".join(row.keys)), str(row), devices
        sections.setdefault(row.keys[0], {}).setdefault(alike, []).append(row)
    lines = [("", *(TITLES[place] for place in places), "")]
    for part, groups in sections.items():
        if len(groups) > 1:
            lines.append((part, *cells_of([row for group in groups.values() for row in group], places), ""))
        for group in groups.values():
            cells, times = cells_of(group[:1], places), f"{len(group)} x " * (len(group) > 1)
            columns = zip(*(row.keys for row in group), strict=True)
            keys = [key[0] if len(set(key)) == 1 else NUMBER.sub("#", key[0]) for key in columns]
            label = "/".join(keys) if len(groups) == 1 else f"  {'/'.join(keys[1:])}"
            lines.append((label, *(text and times + text for text in cells), str(group[0])))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([label.ljust(widths[0]), *map(str.rjust, cells, widths[1:]), text]).rstrip()
        for label, *cells, text in lines
    )


def cells_of(rows: Sequence[Row], places: Sequence[str]) -> list[str]:
    found = bytes_by_place(rows)
    is_shown = lambda place: found[place] or (place == "device" and not any(found.values()))
    return [f"{found[place]:,d}" if is_shown(place) else "" for place in places]
