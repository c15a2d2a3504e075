"""What a checkpoint has, held against what is wanted of it."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any
from urllib.parse import quote

import jax
import jax.numpy as jnp

from zerojax.checkpoint.arrays import Wanted, is_key
from zerojax.checkpoint.canonical import Slot, divided, exactly_wider
from zerojax.checkpoint.integrity import Record
from zerojax.layout.leaf import Leaf

NAMED = 5
LONGEST_FOLDER = 200


@dataclasses.dataclass(frozen=True)
class Match:
    """Which leaves are restored, and what is left over.

    Attributes:
        pairs: What was saved and where it goes, leaf by leaf.
        missing: Names that are wanted and were not saved, or not so.
        unused: Names that were saved and are not wanted, or not so.
        cast: Names of parameters that are rounded to the narrower type they are stored in.
    """

    pairs: tuple[tuple[Record, Slot], ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    cast: tuple[str, ...]


def records_of(slots: dict[str, Slot]) -> tuple[Record, ...]:
    """What is written of the leaves of a state, each in a folder of its own; those without elements in none."""
    taken: set[str] = set()
    records = []
    for slot in slots.values():
        folder = ""
        if slot.leaf.size:
            folder = plain = folder_name(slot.path)
            while folder.lower() in taken:
                folder = f"{plain}~{len(taken)}"
            taken.add(folder.lower())
        shape = tuple(slot.leaf.shape)
        key = str(jax.random.key_impl(slot.array)) if is_key(slot.array) else None
        records.append(Record(slot.name, slot.path, shape, slot.dtype, slot.leaf.kind, folder, key))
    return tuple(records)


def folder_name(path: tuple[str, ...]) -> str:
    """A leaf's keys as the name of a folder."""
    name = ".".join(quote(key, safe="") for key in path)
    if len(name) <= LONGEST_FOLDER:
        return name
    return f"{name[: LONGEST_FOLDER - 20]}~{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def match(saved: tuple[Record, ...], slots: dict[str, Slot], *, partial: bool, where: str) -> Match:
    """Hold what was saved against what is wanted.

    Args:
        saved: The leaves of a checkpoint.
        slots: The leaves wanted.
        partial: Whether differences are borne.
        where: The checkpoint, for the error.

    Raises:
        ValueError: If they differ and `partial` is false, naming the first paths and both values.
    """
    records = {record.name: record for record in saved}
    trouble = {name: why for name, slot in slots.items() if (why := difference(records.get(name), slot))}
    beyond = {name: f"{record.described} was saved, nothing is wanted" for name, record in records.items()}
    trouble |= {name: why for name, why in beyond.items() if name not in slots}
    if trouble and not partial:
        first = "\n".join(f"  {name}: {why}" for name, why in list(trouble.items())[:NAMED])
        more = f"\n  and {len(trouble) - NAMED} more" if len(trouble) > NAMED else ""
        raise ValueError(
            f"{where} is of another model, optimizer or precision than the state given as like=:\n{first}{more}\n"
            f"Make that state as the saved one was made, or pass partial=True to restore what matches."
        )
    pairs = tuple((records[name], slot) for name, slot in slots.items() if name not in trouble)
    return Match(
        pairs,
        missing=tuple(name for name in slots if name in trouble),
        unused=tuple(name for name in records if name in trouble),
        cast=tuple(slot.name for record, slot in pairs if rounds(record, slot)),
    )


def difference(record: Record | None, slot: Slot) -> str:
    """Why a leaf cannot be restored, in words; empty if it can."""
    wanted = f"{slot.dtype}{list(slot.leaf.shape)}"
    if record is None:
        return f"nothing was saved, {wanted} is wanted"
    if record.shape != tuple(slot.leaf.shape):
        return f"{record.described} was saved, {wanted} is wanted"
    if record.dtype == slot.dtype or takes_any(slot) or rounds(record, slot):
        return ""
    if record.key is None and not is_key(slot.array) and exactly_wider(record.dtype, slot.array.dtype):
        return ""
    return f"{record.described} was saved, {wanted} is wanted, which may not hold every number of it"


def rounds(record: Record, slot: Slot) -> bool:
    """Whether the saved parameter is rounded, as `create` would, to the type this stage keeps it in."""
    return slot.narrow and record.dtype != slot.dtype and exactly_wider(slot.dtype, record.dtype)


def takes_any(slot: Slot) -> bool:
    """Moments of integer parameters: optax makes floats of them at its first update."""
    return slot.path[0] == "opt_state" and jnp.issubdtype(slot.leaf.dtype, jnp.integer)


def reading(record: Record, slot: Slot) -> tuple[Wanted, tuple[Leaf, Leaf, Any] | None]:
    """How to read a leaf, and the conversion that is left to do, if any.

    Cut and whole leaves differ in their padding alone, which reading adds and drops. From and
    to flat, and between types, the array is converted on the devices.
    """
    array, leaf = slot.array, slot.leaf
    shape = tuple(array.shape)
    if record.key is not None:
        raw = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, array.dtype))
        return Wanted(record.folder, tuple(raw.shape), raw.dtype, array.sharding, record.key), None
    dtype = jnp.dtype(record.dtype)
    target = dataclasses.replace(leaf, dtype=dtype if takes_any(slot) else array.dtype)
    source, sharding = dataclasses.replace(leaf, dtype=dtype), array.sharding
    if (record.kind == "flat") != (leaf.kind == "flat"):
        source, sharding = divided(source, sharding)
        if record.kind == "flat":
            source = dataclasses.replace(source, kind="flat", dim=None)
            sharding = flat_sharding(source, sharding)
            if sharding is array.sharding:
                source = dataclasses.replace(source, shards=1)
        shape = source.storage_shape
    same = source == target
    return Wanted(record.folder, shape, dtype, sharding), None if same else (source, target, array.sharding)


def flat_sharding(leaf: Leaf, sharding: Any) -> Any:
    """Flat storage divided over the axis, where there is a mesh that has it."""
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or not set(leaf.axes) <= set(mesh.axis_names):
        return sharding
    return jax.sharding.NamedSharding(mesh, leaf.spec)
