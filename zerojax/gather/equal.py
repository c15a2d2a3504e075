"""Let segments with equal equations share their passes, although their equations have the names of different layers.

The passes of equal layers are traced once, and compiled as one function that each layer calls. JAX's name of an
equation in a function is the name scope of the call, followed by the scope in the function. So the scopes in which the
layers differ move from the equations to the call: `Layer_1/mlp` becomes `mlp`, called in the scope `Layer_1`.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from zerojax import compat, names, signatures
from zerojax.comm import rebinding
from zerojax.gather.segments import BlockSegment, Segment


def with_shared_passes(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Let segments that have the same equations on different values share their passes. Return all segments."""
    segments = list(segments)
    keys = [_signature(s) if isinstance(s, BlockSegment) else None for s in segments]
    counts = Counter(key for key in keys if key)
    for key in [key for key, count in counts.items() if count > 1]:
        equal = [i for i, other in enumerate(keys) if other == key]
        jaxpr, scopes = _with_scopes_apart([segments[i].jaxpr for i in equal])
        known: dict = {}
        for i, scope in zip(equal, scopes, strict=True):
            segments[i] = dataclasses.replace(segments[i], jaxpr=jaxpr, shared=known, scope=scope)
    return tuple(segments)


def _signature(segment: Segment) -> Any:
    jaxpr = signatures.signature(segment.jaxpr)
    return jaxpr and (jaxpr, tuple((param.leaf.dtype, param.wide, param.cotangent_dtype) for param in segment.params))


def _with_scopes_apart(equal: Sequence) -> tuple[Any, list[tuple]]:
    """Remove the name scopes in which equal jaxprs differ. Return one jaxpr for all, and the scopes of each."""
    first, apart = equal[0], [[] for _ in equal]
    eqns = list(first.eqns)
    for i, same in enumerate(zip(*(jaxpr.eqns for jaxpr in equal), strict=True)):
        stacks = [names.scopes_of(eqn) for eqn in same]
        size = _differing(stacks)
        eqns[i], inner = _with_inner_apart(same)
        if size:
            eqns[i] = names.with_scopes(eqns[i], stacks[0][size:])
        for scopes, stack, more in zip(apart, stacks, inner, strict=True):
            scopes.append((*stack[:size], *more))
    is_new = any(a is not b for a, b in zip(eqns, first.eqns, strict=True))
    return first.replace(eqns=eqns) if is_new else first, [_joined(scopes) for scopes in apart]


def _with_inner_apart(same: Sequence) -> tuple[Any, list[tuple]]:
    """Call `_with_scopes_apart` on the jaxprs inside equal equations. Return one equation, and the scopes of each."""
    unchanged = same[0], [()] * len(same)
    inner = [compat.inner_jaxprs(eqn) for eqn in same]
    if all(a is b for others in inner[1:] for a, b in zip(inner[0], others, strict=True)):
        return unchanged
    apart = [_with_scopes_apart(jaxprs) for jaxprs in zip(*inner, strict=True)]
    new = {id(old): jaxpr for old, (jaxpr, _) in zip(inner[0], apart, strict=True) if jaxpr is not old}
    eqn = rebinding.with_inner_jaxprs(same[0], new) if new else None
    return (
        unchanged if eqn is None else (eqn, [_joined(of) for of in zip(*(scopes for _, scopes in apart), strict=True)])
    )


def _differing(stacks: Sequence[tuple]) -> int:
    """Return how many of the outermost scopes must be removed so that all `stacks` are equal."""
    depths = enumerate(itertools.zip_longest(*stacks), 1)
    return max((depth for depth, same in depths if len({*same}) > 1), default=0)


def _joined(paths: Sequence[tuple]) -> tuple:
    """Join paths of scopes into one. A segment may begin in one layer and end in another: `Layer_0+Layer_1`."""
    depths = itertools.zip_longest(*dict.fromkeys(paths))
    scopes = [[scope for scope in dict.fromkeys(same) if scope] for same in depths]
    return tuple(same[0] if len(same) == 1 else type(same[0])("+".join(one.name for one in same)) for same in scopes)
