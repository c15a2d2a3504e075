"""Segments that are alike are traced once: the layers of an unrolled model are one program on other parameters."""

import dataclasses
from collections.abc import Hashable, Sequence

import jax

from zerojax.dims import Follower
from zerojax.gather.vjp import Passes, passes


class SharedPasses:
    """The passes of segments that are alike. Lives as long as their program."""

    def __init__(self):
        """Begin with none."""
        self._traced: dict[Hashable, Passes] = {}

    def passes(self, run, params: Sequence, others: Sequence, *, follower: Follower | None, **given) -> Passes:
        """Return `vjp.passes` of one of the segments, traced once for all that are given arrays of these types."""
        types = tuple(jax.typeof(x) for x in (*params, *others))
        key = types, tuple((name, tuple(values)) for name, values in sorted(given.items()))
        if key not in self._traced:
            new = passes(run, params, others, follower=follower, **given)
            self._traced[key] = dataclasses.replace(new, is_shared=True)
        return self._traced[key]
