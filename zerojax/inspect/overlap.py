"""How much of a compiled program's communication hides behind its matrix products."""

import re
from dataclasses import dataclass
from typing import Any

from zerojax.inspect.collectives import Collective, collectives_of
from zerojax.inspect.hlo import Module, read

_PRODUCTS = frozenset({"dot", "ragged-dot", "scaled-dot", "convolution"})
# Library calls that are products; cuBLAS also solves triangles and cuDNN also normalises.
_LIBRARY = re.compile(r'custom_call_target="(?:__cublas\$(?!triangular)|__cudnn\$(?!norm)|__onednn\$matmul|[^"]*gemm)')


@dataclass(frozen=True)
class InFlight:
    """One collective, and the matrix products that execute between its start and its done, in each execution."""

    collective: Collective
    products: int

    @property
    def bytes(self) -> int:
        """Return bytes of the full tensor times executions. A loop of unknown trip count counts as one iteration."""
        return self.collective.bytes * self.collective.times_if_once


@dataclass(frozen=True)
class Overlap:
    """The collectives of one program with the products that hide each; print it for a table."""

    in_flight: tuple[InFlight, ...]

    def of(self, *kinds: str) -> "Overlap":
        """Return the collectives of the given kinds alone."""
        return Overlap(tuple(f for f in self.in_flight if f.collective.kind in kinds))

    @property
    def bytes(self) -> int:
        """Return bytes of all collectives: full tensors times executions."""
        return sum(f.bytes for f in self.in_flight)

    @property
    def hidden_bytes(self) -> int:
        """Return the part of `bytes` during whose collectives at least one product executes."""
        return sum(f.bytes for f in self.in_flight if f.products)

    @property
    def hidden_share(self) -> float:
        """Return `hidden_bytes / bytes`; 1.0 for a program that moves nothing."""
        return self.hidden_bytes / self.bytes if self.bytes else 1.0

    @property
    def exposed(self) -> tuple[InFlight, ...]:
        """Return collectives that no product hides, most bytes first."""
        return tuple(sorted((f for f in self.in_flight if not f.products), key=lambda f: -f.bytes))

    def __str__(self) -> str:
        groups = dict.fromkeys((f.collective.computation, f.collective.kind) for f in self.in_flight)
        lines = [f"{'computation':32} {'kind':20} {'in text':>8} {'MiB':>11} {'hidden':>7}"]
        for computation, kind in groups:
            group = Overlap(tuple(f for f in self.of(kind).in_flight if f.collective.computation == computation))
            lines.append(
                f"{computation[:32]:32} {kind:20} {len(group.in_flight):8} {group.bytes / 2**20:11.2f} "
                f"{group.hidden_share:7.1%}"
            )
        lines.append(f"{'all':53} {len(self.in_flight):8} {self.bytes / 2**20:11.2f} {self.hidden_share:7.1%}")
        return "\n".join(lines)


def overlap(compiled: Any) -> Overlap:
    """Find, for every collective, the matrix products that execute while it is in flight.

    A product is a dot or convolution, a library call that is one, or a fusion that contains one. A
    loop between start and done counts its products times its trip count (once if that is unknown),
    a conditional those of its branch with fewest. A synchronous collective has none; one whose done
    is in another computation is taken to be in flight until the end of its own. It is a count, not
    a time: one small product makes a large collective count as hidden.

    Args:
        compiled: What `jax.jit(f).lower(...).compile()` gives, or its HLO text.

    Returns:
        Each collective with its products, and the hidden share of the bytes.

    Raises:
        TypeError: If `compiled` is no compiled program.
        ValueError: If the text is not HLO, is truncated, or is not scheduled.
    """
    module = read(compiled)
    if "is_scheduled=true" not in module.text.partition("\n")[0]:
        raise ValueError(
            "Cannot read overlap from HLO that is not scheduled: the order of its lines means nothing. "
            "Give the text of compile(), not that of lower()."
        )
    windows, outer = _windows(module), dict.fromkeys(module.entries, 0)
    for caller in module.callers_first:
        for call in module.calls[caller]:
            # A wrapped collective is in flight as long as its wrapper. Of several callers the one with fewest counts.
            products = outer[caller] + windows[caller].get(call.instruction.name, 0)
            outer[call.callee] = min(products, outer.get(call.callee, products))
    return Overlap(
        tuple(InFlight(c, outer[c.computation] + windows[c.computation].get(c.name, 0)) for c in collectives_of(module))
    )


def _windows(module: Module) -> dict[str, dict[str, int]]:
    """Return, for each computation and asynchronous start, the products that execute before its done."""
    products: dict[str, int] = {}
    windows: dict[str, dict[str, int]] = {}
    for name in reversed(module.callers_first):
        windows[name], products[name] = _schedule(module, name, products)
    return windows


def _schedule(module: Module, computation: str, products: dict[str, int]) -> tuple[dict[str, int], int]:
    """Return products between each start and its done, and those of the computation. `products` are its callees'."""
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
