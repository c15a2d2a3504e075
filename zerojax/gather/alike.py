"""Segments that are alike are traced once: the layers of an unrolled model are one program on other parameters."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence

import jax

from zerojax.gather.vjp import Passes, RowStates, traced_passes


class SharedPasses:
    """The passes of segments that are alike. Lives as long as their program."""

    def __init__(self):
        """Begin with none."""
        self._traced: dict[Hashable, Passes] = {}

    def passes(
        self,
        run: Callable,
        params: Sequence,
        others: Sequence,
        *,
        trained: Sequence[bool],
        active: Sequence[bool],
        rows: RowStates,
    ) -> Passes:
        """Return `traced_passes` of one of the segments, traced once for all that are given arrays of these types."""
        types = tuple(jax.typeof(x) for x in (*params, *others))
        key = types, tuple(trained), tuple(active), tuple(rows.others), tuple(rows.results)
        if key not in self._traced:
            new = traced_passes(run, params, others, trained=trained, active=active, rows=rows)
            self._traced[key] = dataclasses.replace(new, is_shared=True)
        return self._traced[key]
