"""A base class for frozen dataclasses that computes the hash only once."""

import dataclasses
import functools


class CachedHash:
    """A base class for frozen dataclasses in the structure of a pytree, which jit hashes and compares at every call.

    To make this fast, the hash is computed once, and an object equals itself without a comparison of fields.
    """

    @functools.cached_property
    def _fields(self) -> tuple:
        fields = dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
        return tuple(getattr(self, field.name) for field in fields if field.compare)

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._fields)

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict:
        """Return only the fields, without the cached hash, because hashes of strings differ between processes."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # pyright: ignore[reportArgumentType]

    def __eq__(self, other) -> bool:
        """Return whether all compared fields are equal."""
        return self is other or (
            type(self) is type(other) and self._hash == other._hash and self._fields == other._fields
        )
