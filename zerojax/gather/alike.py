"""Segments that are alike are traced once: the layers of an unrolled model are one program on other parameters."""

import dataclasses
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from zerojax import jaxprs
from zerojax.dims import Follower
from zerojax.gather.vjp import Passes, passes

if TYPE_CHECKING:
    from zerojax.gather.segments import Segment


class Alike:
    """The passes of a program's segments. Lives as long as one trace."""

    def __init__(self, segments: Sequence["Segment"]):
        """Find out which of the segments that gather parameters are alike."""
        self._signatures = {id(segment): _signature(segment) for segment in segments if segment.params}
        self._counts = Counter(filter(None, self._signatures.values()))
        self._traced: dict[Hashable, Passes] = {}

    def passes(
        self, segment: "Segment", params: Sequence, others: Sequence, *, follower: Follower | None, **given: Sequence
    ) -> Passes:
        """Return `vjp.passes` of a segment. Segments that are alike share one result, which is traced once."""
        signature = self._signatures[id(segment)]
        if self._counts[signature] < 2:
            return passes(segment.run, params, others, follower=follower, **given)
        types = tuple(jax.typeof(x) for x in (*params, *others))
        key = signature, types, tuple((name, tuple(values)) for name, values in sorted(given.items()))
        if key not in self._traced:
            new = passes(segment.run, params, others, follower=follower, **given)
            self._traced[key] = dataclasses.replace(new, is_shared=True)
        return self._traced[key]


def _signature(segment: "Segment") -> Any:
    jaxpr = jaxprs.signature(segment.jaxpr)
    return jaxpr and (jaxpr, tuple((param.leaf.dtype, param.wide) for param in segment.params))
