"""Choose which values to save, by an integer program that minimises recomputation within a budget of bytes.

Every equation is recomputed or not, and every named value is saved or not. Each residual, and each value that a
recomputed equation reads, must be saved or recomputed. Without the budget this is a minimum cut, whose relaxation is
integral. The budget adds one knapsack constraint, so that the solver needs few branches.

References:
    Jain et al. 2020, arXiv 1910.02653 (Checkmate): rematerialisation as an integer program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np

from zerojax.budget.graph import Graph
from zerojax.gpus.devices import host_bytes_per_flop, kind_of

Fate = Literal["save", "recompute", "offload"]
# The sum of all costs in the objective. The solver ends its search within 1e-6 of the least objective, so that a larger
# budget never repeats more FLOPs. A relative gap of 0.1%, which was used before, may be a small product.
_ALL = 1e6
# The price of a saved byte in FLOPs, because the byte is written and read. So no copies of a saved value in another
# shape or type are saved. A larger budget still never repeats more FLOPs: if its choice saves more than a smaller
# budget allows, it repeats fewer FLOPs to be worth the price. Otherwise it is a choice of the smaller budget, too.
_PRICE = 0.2
# The limit on the solver's branches. A limit on time would give different choices on different machines.
_BRANCHES = 5000


@dataclasses.dataclass(frozen=True)
class Choice:
    """The values that a block saves, and the FLOPs that its backward pass repeats.

    Attributes:
        saved: Names of the values that are saved on the device.
        offloaded: Names of the values that are saved in host memory.
        saved_bytes: Bytes saved on the device per call, without the block's arguments.
        offloaded_bytes: Bytes saved in host memory per call.
        flops: FLOPs that the backward pass repeats.
        most_bytes: Bytes of all values that the backward pass reads, without the block's arguments.
        most_flops: FLOPs that the backward pass repeats if no value is saved.
    """

    saved: tuple[str, ...]
    offloaded: tuple[str, ...]
    saved_bytes: int
    offloaded_bytes: int
    flops: int
    most_bytes: int
    most_flops: int


def choose(
    graph: Graph, budget: int, *, fates: Mapping[str, Fate], repeat_collectives: bool, host_bytes: int | None = 0
) -> Choice:
    """Return the choice that repeats the fewest FLOPs.

    Args:
        graph: The graph of the block.
        budget: The largest number of bytes that may be saved on the device.
        fates: What to do with the values that the user named, by name.
        repeat_collectives: Whether the backward pass may repeat collectives.
        host_bytes: The largest number of bytes that may be offloaded in addition to the values that `fates` offloads.
            None: as many as the link to the host copies, together with these values, while the block is computed.

    Raises:
        ValueError: If the values that must be saved need more than the budget.
    """
    program = _Program(graph, fates, repeat_collectives)
    if host_bytes is None:
        host_bytes = max(bytes_in_time(graph) - int(program.pinned), 0)
    found = program.solve(budget, host_bytes)
    if found is None:
        least = program.least_bytes(host_bytes)
        raise ValueError(
            f"remat(budget=) allows {budget} bytes per call, and the values that must be saved need {least}: those "
            f'that named= says to "save", and results of collectives. Raise the budget, or allow '
            f"repeat_collectives=True."
        )
    return found


def bytes_in_time(graph: Graph) -> int:
    """Return the bytes that the link to the host copies in each direction while the block's FLOPs are computed.

    The forward pass of the block computes at least these FLOPs, and its backward pass about twice as many. So the
    copies of one block are complete before those of the next block begin. The GPU is this machine's, or an H200.
    """
    kind = kind_of(jax.local_devices()[0].device_kind) or "h200"
    return int(host_bytes_per_flop(kind) * sum(eqn.flops for eqn in graph.equations))


def least_bytes(graph: Graph) -> int:
    """Return the least number of bytes that a block must save: the results of its collectives."""
    if not any(eqn.is_collective for eqn in graph.equations):
        return 0
    return _Program(graph, {}, repeat_collectives=False).least_bytes(0)


class _Program:
    """The integer program of one block.

    The variables are, in this order, whether each equation is recomputed, whether each value is saved, and
    whether each value is offloaded.
    """

    def __init__(self, graph: Graph, fates: Mapping[str, Fate], repeat_collectives: bool):
        self.graph = graph
        self.equations, self.values = len(graph.equations), len(graph.values)
        self.bytes = np.array([value.bytes for value in graph.values], float)
        self.cost = np.array([eqn.cost for eqn in graph.equations], float)
        self.upper = np.ones(self.equations + 2 * self.values)
        self.lower = np.zeros_like(self.upper)
        collective = [eqn.is_collective and not repeat_collectives for eqn in graph.equations]
        self.upper[: self.equations][collective] = 0
        for i, value in enumerate(graph.values):
            fate = fates.get(value.name) if value.users_name else None
            saved, offloaded = self.equations + i, self.equations + self.values + i
            self.upper[saved] = fate == "save" or (not value.users_name and not value.is_form_of_argument)
            self.lower[saved] = fate == "save"
            self.upper[offloaded] = fate == "offload" or (fate is None and self.upper[saved])
            self.lower[offloaded] = fate == "offload"
            if fate in ("recompute", "offload"):
                self._only_by_name(value.equation)
        self.pinned = self.lower[self.equations + self.values :] @ self.bytes

    def _only_by_name(self, equation: int) -> None:
        """Forbid saving a value that the user named under the name that zerojax gave to the same value."""
        for i, value in enumerate(self.graph.values):
            if value.equation in self.graph.equations[equation].reads and not value.users_name:
                self.upper[[self.equations + i, self.equations + self.values + i]] = 0

    def _available(self) -> tuple:
        """Return the matrix and bounds of the constraints that every value read is saved, offloaded or recomputed."""
        from scipy import sparse

        ways = [{i: 1} for i in range(self.equations)]  # the variables that make an equation's results available
        for i, value in enumerate(self.graph.values):
            ways[value.equation] |= {self.equations + i: 1, self.equations + self.values + i: 1}
        readers = [(source, reader) for reader, eqn in enumerate(self.graph.equations) for source in eqn.reads]
        rows = [ways[source] for source in self.graph.residuals]
        rows += [{**ways[source], reader: -1} for source, reader in readers]
        bounds = [1] * len(self.graph.residuals) + [0] * len(readers)
        entries = [(i, j, x) for i, row in enumerate(rows) for j, x in row.items()]
        i, j, x = zip(*entries, strict=True) if entries else ((), (), ())
        return sparse.csr_array((x, (i, j)), shape=(len(rows), len(self.upper))), np.array(bounds, float)

    def _run(self, objective: np.ndarray, budget: float, host_bytes: float) -> np.ndarray | None:
        """Return the variables with the least objective, or None if the constraints cannot be met."""
        import scipy.optimize
        from scipy import sparse

        optimize: Any = scipy.optimize  # scipy's annotations say `float` where scipy accepts arrays
        matrix, bounds = self._available()
        allowed = np.array([budget, host_bytes + self.pinned])
        # Sizes are in thousandths of the limits. The solver's tolerance of 1e-6 is then below a byte for small budgets.
        sizes = 1000 * sparse.kron(sparse.diags_array(1 / np.maximum(allowed, 1)), self.bytes)
        limits = sparse.hstack([sparse.csr_array((2, self.equations)), sizes])
        too_large = np.concatenate([np.zeros(self.equations, bool), *(self.bytes > limit for limit in allowed)])
        if (self.lower[too_large] > 0).any():
            return None
        found = optimize.milp(
            objective,
            integrality=np.ones_like(objective),
            bounds=optimize.Bounds(self.lower, np.where(too_large, 0, self.upper)),
            constraints=[
                optimize.LinearConstraint(matrix, bounds, np.inf),
                optimize.LinearConstraint(limits, -np.inf, 1000 * np.minimum(allowed, 1)),
            ],
            options={"mip_rel_gap": 0, "node_limit": _BRANCHES},
        )
        return None if found.x is None else np.round(found.x).astype(bool)

    def solve(self, budget: float, host_bytes: float) -> Choice | None:
        """Return the choice with the least cost, or None if the values that must be saved exceed the budget."""
        if not self.equations:
            return Choice((), (), 0, 0, 0, 0, 0)
        price = _PRICE * self.bytes
        objective = np.concatenate([self.cost, price, 2 * price])  # it costs more to offload a value than to save it
        found = self._run(_ALL * objective / max(self.cost.sum(), 1.0), budget, host_bytes)
        if found is None:
            return None
        recomputed, saved, offloaded = np.split(found, [self.equations, self.equations + self.values])
        flops = np.array([eqn.flops for eqn in self.graph.equations], float)
        names = lambda chosen: tuple(v.name for v, on in zip(self.graph.values, chosen, strict=True) if on)
        return Choice(
            saved=names(saved),
            offloaded=names(offloaded & ~saved),
            saved_bytes=int(self.bytes @ saved),
            offloaded_bytes=int(self.bytes @ (offloaded & ~saved)),
            flops=int(flops @ recomputed),
            most_bytes=self.graph.bytes,
            most_flops=int(flops.sum()),
        )

    def least_bytes(self, host_bytes: float) -> int:
        objective = np.concatenate([np.zeros(self.equations), self.bytes, np.zeros(self.values)])
        found = self._run(_ALL * objective / max(self.bytes.sum(), 1.0), self.bytes.sum(), host_bytes)
        assert found is not None, "everything can be saved"
        return int(objective @ found)
