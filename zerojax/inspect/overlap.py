"""How much of a compiled program's communication hides behind its matrix products."""

import re
from dataclasses import dataclass
from typing import Any

from zerojax.inspect.collectives import Collective, find
from zerojax.inspect.hlo import Module, read

_PRODUCTS = frozenset({"dot", "ragged-dot", "scaled-dot", "convolution"})
# Library calls that are products; cuBLAS also solves triangles and cuDNN also normalises.
_LIBRARY = re.compile(r'custom_call_target="(?:__cublas\$(?!triangular)|__cudnn\$(?!norm)|__onednn\$matmul|[^"]*gemm)')


@dataclass(frozen=True)
class Flight:
    """One collective, and the matrix products that execute between its start and its done, each time it runs."""

    collective: Collective
    products: int

    @property
    def bytes(self) -> int:
        """Bytes of the full tensor, executions multiplied in; a loop of unknown turns counts as one turn."""
        return self.collective.bytes * self.collective.times_if_once


@dataclass(frozen=True)
class Overlap:
    """The collectives of one program with what hides each; print it for a table."""

    flights: tuple[Flight, ...]

    def of(self, *kinds: str) -> "Overlap":
        """Those of the given kinds of collective alone."""
        return Overlap(tuple(f for f in self.flights if f.collective.kind in kinds))

    @property
    def bytes(self) -> int:
        """Bytes of all collectives, full tensors, executions multiplied in."""
        return sum(f.bytes for f in self.flights)

    @property
    def hidden_bytes(self) -> int:
        """Of these, the bytes with at least one product in flight."""
        return sum(f.bytes for f in self.flights if f.products)

    @property
    def hidden_share(self) -> float:
        """`hidden_bytes / bytes`; 1.0 for a program that moves nothing."""
        return self.hidden_bytes / self.bytes if self.bytes else 1.0

    @property
    def exposed(self) -> tuple[Flight, ...]:
        """What hides behind nothing, most bytes first."""
        return tuple(sorted((f for f in self.flights if not f.products), key=lambda f: -f.bytes))

    def __str__(self) -> str:
        groups = dict.fromkeys((f.collective.computation, f.collective.kind) for f in self.flights)
        lines = [f"{'computation':32} {'kind':20} {'in text':>8} {'MiB':>11} {'hidden':>7}"]
        for computation, kind in groups:
            group = Overlap(tuple(f for f in self.of(kind).flights if f.collective.computation == computation))
            lines.append(
                f"{computation[:32]:32} {kind:20} {len(group.flights):8} {group.bytes / 2**20:11.2f} "
                f"{group.hidden_share:7.1%}"
            )
        lines.append(f"{'all':53} {len(self.flights):8} {self.bytes / 2**20:11.2f} {self.hidden_share:7.1%}")
        return "\n".join(lines)


def overlap(compiled: Any) -> Overlap:
    """Find, for every collective, the matrix products that execute while it is in flight.

    A product is a dot or convolution, a library call that is one, or a fusion that holds one. A
    loop between start and done counts its products times its turns (once if the turns are
    unknown), a conditional those of its branch with fewest. A collective that is synchronous has
    none; one whose done stands in another computation is taken to fly to the end of its own. It is
    a count, not a time: one small product makes a large collective count as hidden.

    Args:
        compiled: What `jax.jit(f).lower(...).compile()` gives, or its HLO text.

    Returns:
        Each collective with its products, and the hidden share of the bytes.

    Raises:
        TypeError: If `compiled` is no compiled program.
        ValueError: If the text is not HLO, is cut, or is not scheduled.
    """
    module = read(compiled)
    if "is_scheduled=true" not in module.text.partition("\n")[0]:
        raise ValueError(
            "Cannot read overlap from HLO that is not scheduled: the order of its lines means nothing. "
            "Give the text of compile(), not that of lower()."
        )
    windows, flying = _windows(module), dict.fromkeys(module.entries, 0)
    for caller in module.callers_first:
        for call in module.calls[caller]:
            # What an asynchronous start wraps is in flight as long as the wrapper. Of several callers the worst counts.
            products = flying[caller] + windows[caller].get(call.instruction.name, 0)
            flying[call.callee] = min(products, flying.get(call.callee, products))
    return Overlap(
        tuple(Flight(c, flying[c.computation] + windows[c.computation].get(c.name, 0)) for c in find(module))
    )


def _windows(module: Module) -> dict[str, dict[str, int]]:
    """By computation and asynchronous start, the products that execute before its done."""
    products: dict[str, int] = {}
    windows: dict[str, dict[str, int]] = {}
    for name in reversed(module.callers_first):
        windows[name], products[name] = _schedule(module, name, products)
    return windows


def _schedule(module: Module, computation: str, products: dict[str, int]) -> tuple[dict[str, int], int]:
    """Walk one computation: the products in each window, and those of the whole; `products` are its callees'."""
    begun: dict[str, tuple[str, int]] = {}
    windows: dict[str, int] = {}
    inside: dict[str, list[int]] = {}
    for call in module.calls[computation]:
        turns = 1 if call.turns is None else call.turns
        inside.setdefault(call.instruction.name, []).append(products[call.callee] * turns)
    executed = 0
    for i in module.computations[computation].instructions:
        if i.opcode.endswith(("-update", "-done")) and i.operands[0] in begun:
            start, before = begun.pop(i.operands[0])
            if i.opcode.endswith("-done"):
                windows[start] = executed - before
            else:
                begun[i.name] = start, before
            continue
        if i.opcode in _PRODUCTS or (i.opcode == "custom-call" and _LIBRARY.search(i.attributes)):
            executed += 1
        elif i.name in inside:
            here = inside[i.name]
            if i.opcode.startswith("fusion"):
                executed += min(1, sum(here))
            else:
                executed += min(here) if i.opcode == "conditional" else sum(here)
        if not i.synchronous:
            begun[i.name] = i.name, executed
    return windows | {start: executed - before for start, before in begun.values()}, executed
