"""A frozen record whose hash is computed once."""

import dataclasses
import functools


class CachedHash:
    """A frozen record that rides in a pytree's structure, where jit hashes and compares it at every call.

    The hash is computed once, and the same object is equal to itself at no cost.
    """

    @functools.cached_property
    def _fields(self) -> tuple:
        fields = dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
        return tuple(getattr(self, field.name) for field in fields if field.compare)

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._fields)

    def __hash__(self) -> int:
        """Hash of all fields."""
        return self._hash

    def __getstate__(self) -> dict:
        """Return the fields alone, because another process hashes strings differently."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # pyright: ignore[reportArgumentType]

    def __eq__(self, other) -> bool:
        """Return whether all fields are equal."""
        return self is other or (
            type(self) is type(other) and self._hash == other._hash and self._fields == other._fields
        )
