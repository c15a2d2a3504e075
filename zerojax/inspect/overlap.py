"""Find out how much of a compiled program's communication is hidden, because it runs during matrix products."""

import dataclasses
import re
from typing import Any

from zerojax.inspect.collectives import CompiledCollectives, collectives_of
from zerojax.inspect.hlo import Module, read

_PRODUCTS = frozenset({"dot", "ragged-dot", "scaled-dot", "convolution"})
# Library calls that are products. The pattern leaves out cuBLAS's triangular solves and cuDNN's normalisations.
_LIBRARY = re.compile(r'custom_call_target="(?:__cublas\$(?!triangular)|__cudnn\$(?!norm)|__onednn\$matmul|[^"]*gemm)')


def overlap(compiled: Any) -> CompiledCollectives:
    """List the collectives of a scheduled program, with the matrix products that execute while each is in flight.

    A product is a dot or a convolution, a library call that computes either, or a fusion that contains either. The
    products of a loop are multiplied by its trip count, if that is known. Of a conditional, the branch with the fewest
    products counts. A synchronous collective has no products. If the done is in another computation, the collective
    counts as in flight until the end of its computation. The count does not measure time: one small product hides even
    a large collective.
    """
    module = read(compiled)
    if "is_scheduled=true" not in module.text.partition("\n")[0]:
        raise ValueError(
            "Cannot read overlap from HLO that is not scheduled: the order of its lines means nothing. "
            "Give the text of compile(), not of lower()."
        )
    products: dict[str, int] = {}
    windows: dict[str, dict[str, int]] = {}
    for name in reversed(module.callers_first):
        windows[name], products[name] = _schedule(module, name, products)
    outer = dict.fromkeys(module.entries, 0)
    for caller in module.callers_first:
        for call in module.calls[caller]:
            # A wrapped collective is in flight as long as its wrapper. The caller with the fewest products counts.
            around = outer[caller] + windows[caller].get(call.instruction.name, 0)
            outer[call.callee] = min(around, outer.get(call.callee, around))
    during = lambda c: outer[c.computation] + windows[c.computation].get(c.name, 0)
    return CompiledCollectives(dataclasses.replace(c, products=during(c)) for c in collectives_of(module))


def _schedule(module: Module, computation: str, products: dict[str, int]) -> tuple[dict[str, int], int]:
    """Return the number of products between each start and its done, and the number in the whole computation.

    `products` has the number of products of each computation that this computation calls.
    """
    started: dict[str, tuple[str, int]] = {}
    windows: dict[str, int] = {}
    called: dict[str, list[int]] = {}
    for call in module.calls[computation]:
        trips = 1 if call.trip_count is None else call.trip_count
        called.setdefault(call.instruction.name, []).append(products[call.callee] * trips)
    executed = 0
    for i in module.computations[computation].instructions:
        if i.opcode.endswith(("-update", "-done")) and i.operands[0] in started:
            start, before = started.pop(i.operands[0])
            if i.opcode.endswith("-done"):
                windows[start] = executed - before
            else:
                started[i.name] = start, before
            continue
        if i.opcode in _PRODUCTS or (i.opcode == "custom-call" and _LIBRARY.search(i.attributes)):
            executed += 1
        elif inner := called.get(i.name):
            if i.opcode.startswith("fusion"):
                executed += min(1, sum(inner))
            else:
                executed += min(inner) if i.opcode == "conditional" else sum(inner)
        if not i.is_synchronous:
            started[i.name] = i.name, executed
    return windows | {start: executed - before for start, before in started.values()}, executed
