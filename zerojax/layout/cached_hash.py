"""A frozen record whose hash is computed once."""

import dataclasses
import functools


class CachedHash:
    """A frozen record that is part of a pytree's structure, which jit hashes and compares at every call.

    The hash is computed once, and an object is compared with itself by identity.
    """

    @functools.cached_property
    def _fields(self) -> tuple:
        fields = dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
        return tuple(getattr(self, field.name) for field in fields if field.compare)

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._fields)

    def __hash__(self) -> int:
        """Return the hash of all compared fields."""
        return self._hash

    def __getstate__(self) -> dict:
        """Return only the fields: in another process, strings have other hashes."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # pyright: ignore[reportArgumentType]

    def __eq__(self, other) -> bool:
        """Return whether all compared fields are equal."""
        return self is other or (
            type(self) is type(other) and self._hash == other._hash and self._fields == other._fields
        )
