"""Register zerojax's pytree nodes with `flax.serialization`, so that Flax can convert them to state dicts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def serialize(cls: type, to_state_dict: Callable[[Any], Any], from_state_dict: Callable[[Any, Any], Any]) -> None:
    """Register a class with `flax.serialization`, once. Do nothing if the user did not import Flax."""
    flax = sys.modules.get("flax.serialization")
    if flax is not None and not flax.is_serializable(cls):
        flax.register_serialization_state(cls, to_state_dict, from_state_dict)


def current_path() -> str:
    return sys.modules["flax.serialization"].current_path()


def serialize_fields(cls: type, fields: tuple[str, ...], rebuild: Callable[[Any, dict[str, Any]], Any]) -> None:
    """Register a dataclass whose state dict contains the given fields. They must be arrays or trees of arrays.

    `rebuild(target, fields)` returns a copy of `target`, the object to restore into, with restored fields.
    """

    def to_state_dict(x: Any) -> dict[str, Any]:
        flax = sys.modules["flax.serialization"]
        return {name: flax.to_state_dict(getattr(x, name)) for name in fields}

    def from_state_dict(target: Any, state: dict[str, Any]) -> Any:
        if set(state) != set(fields):
            raise ValueError(
                f"{current_path()} is restored from {sorted(state)}, and a {cls.__name__} has {sorted(fields)}. Give "
                f"the bytes of a state that was made as this one was."
            )
        flax = sys.modules["flax.serialization"]
        return rebuild(target, {k: flax.from_state_dict(getattr(target, k), state[k], name=k) for k in fields})

    serialize(cls, to_state_dict, from_state_dict)
