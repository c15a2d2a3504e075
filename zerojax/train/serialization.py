"""What `flax.serialization` makes of states; `layout.padded` says what it makes of a `Padded`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from zerojax.layout.chunked import Chunked
from zerojax.layout.serialization import serialize, serialize_fields
from zerojax.optim.returned_state import Annotated
from zerojax.train.loss_scaling import ScalingState
from zerojax.train.state import ZeroState


def known_to_flax() -> None:
    """Let `flax.serialization` take states apart and put them together, if it is in use."""
    rebuilt = lambda target, found: dataclasses.replace(target, **found)
    serialize_fields(ZeroState, fields_of(ZeroState, "plan"), placed)
    serialize_fields(ScalingState, fields_of(ScalingState), rebuilt)
    serialize_fields(Annotated, ("state",), rebuilt)
    refuse = lambda node, *_: node.__reduce__()
    serialize(Chunked, refuse, refuse)


def fields_of(cls: Any, *static: str) -> tuple[str, ...]:
    """Return the names of a record's fields, without some."""
    return tuple(field.name for field in dataclasses.fields(cls) if field.name not in static)


def placed(target: ZeroState, found: dict[str, Any]) -> ZeroState:
    """Return a state of restored fields, on the devices as the one it is restored into: a step takes no other."""
    restored = dataclasses.replace(target, **found)
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), restored, target)
