"""Choose which values to save, by an integer program that minimises recomputation within a budget of bytes.

Every equation is recomputed or not, and every named value is saved or not. Each residual, and each value that a
recomputed equation reads, must be saved or recomputed. Collectives are never recomputed. Without the budget this is a
minimum cut, whose relaxation is integral. The budget adds one knapsack constraint, so that the solver needs few
branches.

References:
    Jain et al. 2020, arXiv 1910.02653 (Checkmate): rematerialisation as an integer program.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from zerojax.budget.graph import Graph

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
        saved: Names of the values that are saved.
        saved_bytes: Bytes saved per call, without the block's arguments.
        flops: FLOPs that the backward pass repeats.
        most_bytes: Bytes of all values that the backward pass reads, without the block's arguments.
        most_flops: FLOPs that the backward pass repeats if no value is saved.
    """

    saved: tuple[str, ...]
    saved_bytes: int
    flops: int
    most_bytes: int
    most_flops: int


def choose_saved(graph: Graph, budget: int) -> Choice:
    """Return the choice that saves at most `budget` bytes and repeats the fewest FLOPs.

    Raises:
        ValueError: If the results of the block's collectives need more than the budget.
    """
    if not graph.equations:
        return Choice((), 0, 0, 0, 0)
    cost, sizes = np.array([eqn.cost for eqn in graph.equations], float), _sizes(graph)
    found = _minimised(graph, np.concatenate([cost, _PRICE * sizes]), cost.sum(), budget)
    if found is None:
        raise ValueError(
            f"remat_within(budget=) allows {budget} bytes per call, and the results of collectives, which are not "
            f"repeated, need {least_bytes(graph)}. Raise the budget, or call the collectives outside of the function."
        )
    recomputed, saved = np.split(found, [len(graph.equations)])
    flops = np.array([eqn.flops for eqn in graph.equations], float)
    return Choice(
        saved=tuple(value.name for value, on in zip(graph.values, saved, strict=True) if on),
        saved_bytes=int(sizes @ saved),
        flops=int(flops @ recomputed),
        most_bytes=graph.bytes,
        most_flops=int(flops.sum()),
    )


def least_bytes(graph: Graph) -> int:
    """Return the least number of bytes that a block must save: the results of its collectives."""
    if not any(eqn.is_collective for eqn in graph.equations):
        return 0
    sizes = _sizes(graph)
    objective = np.concatenate([np.zeros(len(graph.equations)), sizes])
    found = _minimised(graph, objective, sizes.sum(), sizes.sum())
    assert found is not None, "everything can be saved"
    return int(objective @ found)


def _sizes(graph: Graph) -> np.ndarray:
    return np.array([value.bytes for value in graph.values], float)


def _minimised(graph: Graph, objective: np.ndarray, scale: float, budget: float) -> np.ndarray | None:
    """Return the solution of a block's integer program, or None if the values that must be saved exceed the budget.

    The variables are whether each equation is recomputed, followed by whether each value is saved. The costs in
    `objective` are divided by `scale`, the sum of all costs.
    """
    import scipy.optimize

    optimize: Any = scipy.optimize  # scipy's annotations say `float` where scipy accepts arrays
    count, sizes = len(graph.equations), _sizes(graph)
    recomputable = [not eqn.is_collective for eqn in graph.equations]
    savable = [not value.is_form_of_argument and value.bytes <= budget for value in graph.values]
    # Sizes are in thousandths of the budget. The solver's tolerance of 1e-6 is then below a byte for small budgets.
    limits = np.concatenate([np.zeros(count), 1000 * sizes / max(budget, 1)])
    found = optimize.milp(
        _ALL * objective / max(scale, 1.0),
        integrality=np.ones_like(objective),
        bounds=optimize.Bounds(0, np.array([*recomputable, *savable], float)),
        constraints=[
            optimize.LinearConstraint(*_available(graph), np.inf),
            optimize.LinearConstraint(limits[None], -np.inf, 1000 * min(budget, 1)),
        ],
        options={"mip_rel_gap": 0, "node_limit": _BRANCHES},
    )
    return None if found.x is None else np.round(found.x).astype(bool)


def _available(graph: Graph) -> tuple:
    """Return the matrix and bounds of the constraints that every value read is saved or recomputed."""
    from scipy import sparse

    count = len(graph.equations)
    ways = [{i: 1} for i in range(count)]  # the variables that make an equation's results available
    for i, value in enumerate(graph.values):
        ways[value.equation][count + i] = 1
    readers = [(source, reader) for reader, eqn in enumerate(graph.equations) for source in eqn.reads]
    rows = [ways[source] for source in graph.residuals]
    rows += [{**ways[source], reader: -1} for source, reader in readers]
    bounds = [1] * len(graph.residuals) + [0] * len(readers)
    entries = [(i, j, x) for i, row in enumerate(rows) for j, x in row.items()]
    i, j, x = zip(*entries, strict=True) if entries else ((), (), ())
    return sparse.csr_array((x, (i, j)), shape=(len(rows), count + len(graph.values))), np.array(bounds, float)
