"""Find the values that a block's backward pass reads, and choose which of them to save within a budget of bytes.

An integer program minimises recomputation. Every equation is recomputed or not, and every named value is saved or not.
Each residual, and each value that a recomputed equation reads, must be saved or recomputed. Collectives are never
recomputed. Without the budget, the program is a minimum cut, and its linear relaxation has an integral solution. The
budget adds only one knapsack constraint, so the solver needs few branches.

References:
    Jain et al. 2020, arXiv 1910.02653 (Checkmate): rematerialisation as an integer program.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from zerojax import compat, jaxprs
from zerojax.primitives import Kind

PREFIX = "zerojax_value_"
CALLED_BACK = "zerojax_called_back"  # the name of values that a callback such as `jax.debug.print` gets
# The cost of a byte that is written again, in FLOPs. It only decides between equations that cost equally many FLOPs.
_FLOPS_PER_BYTE = 1e-6
# Kinds of primitives that cost no FLOPs, because they only move or rename elements.
_FREE_KINDS = frozenset({Kind.IDENTITY, Kind.LAYOUT, Kind.JOIN, Kind.INDEXING})
_FREE = frozenset(
    "bitcast_convert_type convert_element_type copy random_clone random_seed random_unwrap random_wrap "
    "stop_gradient".split()
)
# FLOPs of the Threefry rounds per 32-bit word of random bits.
_RANDOM_BITS = 100
# Costs are scaled to have this sum. The solver stops within 1e-6 of the least objective, so that a larger budget never
# repeats more FLOPs. A relative gap of 0.1% was rejected, because a small product may have 0.1% of the FLOPs.
_ALL = 1e6
# The price of a saved byte in FLOPs, because the byte is written and read. Without a price, copies of a saved value in
# another shape or type could be saved, too. A larger budget still never repeats more FLOPs, because the solver pays for
# more bytes only if fewer FLOPs are repeated.
_PRICE = 0.2
# In a loop, a saved byte is copied into a stack and out of it. So a value is saved only if it spares this share of the
# FLOPs per byte that the products of the block cost on average. Attention scores, for example, spare less.
_WORTH = 0.5
# The limit on the solver's branches. A limit on time would give different choices on different machines.
_BRANCHES = 5000


@dataclasses.dataclass(frozen=True)
class Value:
    """A value that can be saved, because `jax.checkpoint` knows it by a name."""

    name: str  # the name, given by `run_named`
    equation: int  # the index in `Graph.equations` of the equation that names the value
    bytes: int  # the size of the value
    is_form_of_argument: bool  # whether the value is an argument of the block in another shape or type


@dataclasses.dataclass(frozen=True)
class Equation:
    """An equation of the forward pass, or of its derivative, on which the backward pass depends."""

    reads: tuple[int, ...]  # the indices of the equations whose results this equation reads
    cost: float  # the FLOPs to compute the equation again, plus a small part of the bytes that it writes
    flops: int  # the FLOPs to compute the equation again
    products: int  # the part of `flops` in products, loops and calls
    is_collective: bool  # whether other devices take part in the equation


@dataclasses.dataclass(frozen=True)
class Graph:
    """The values that a block's backward pass depends on."""

    equations: tuple[Equation, ...]  # in the order in which they are computed
    values: tuple[Value, ...]  # the values that can be saved
    residuals: tuple[int, ...]  # the indices of the equations whose results the backward pass reads
    bytes: int  # the size of all values that the backward pass reads, without the block's arguments
    # The size of the values that XLA keeps if nothing is recomputed on purpose. XLA keeps operands and results of
    # products. A kernel that reads an elementwise function of a kept value recomputes that function.
    kept: int
    largest: int  # the size of the largest value


def run_named(jaxpr: Any, consts: Sequence, *args: Any) -> list:
    """Evaluate a jaxpr with calls inlined, and name each value, so that a `jax.checkpoint` policy can select values."""
    numbers = itertools.count()

    def name(x: Any, var: Any) -> Any:
        # Scalars cost almost no memory. JAX decides whether to keep them.
        number = next(numbers)
        is_named = x is not None and is_array_atom(var) and var.aval.size > 1
        return checkpoint_name(x, f"{PREFIX}{number}") if is_named else x

    def rule(eqn, values):
        if compat.called(eqn) is not None:
            return jaxprs.evaluate_call(eqn, values, rule)
        if jaxprs.facts(eqn).kind is Kind.DEBUG:
            # With this name, the operands of a callback count as saved, so the backward pass does not call back again.
            values = [checkpoint_name(x, CALLED_BACK) for x in values]
        results = compat.evaluate_one(eqn, values)
        return [name(x, var) for x, var in zip(results, eqn.outvars, strict=True)]

    return jaxprs.evaluate(jaxpr, consts, args, rule)


def without_consts(jaxpr: Any) -> tuple[Any, list]:
    """Return a jaxpr that takes its constants as its first arguments, and the shapes of all arguments."""
    inputs = [*compat.constvars_of(jaxpr), *jaxpr.invars]
    return compat.part_of(jaxpr, jaxpr.eqns, inputs, jaxpr.outvars), [var.aval for var in inputs]


def graph_of(jaxpr: Any, consts: Sequence, avals: Sequence) -> Graph:
    def residuals(*args):
        _, pull = jax.vjp(functools.partial(run_named, jaxpr, consts), *args)
        return jax.tree.leaves(pull)

    linear = compat.opened(jax.make_jaxpr(residuals)(*avals))
    inlined = functools.partial(jaxprs.inline_calls, *linear)
    return _graph(compat.opened(jax.make_jaxpr(inlined)(*avals))[0])


def _graph(jaxpr: Any) -> Graph:
    given = {*jaxpr.invars, *compat.constvars_of(jaxpr)}
    wanted = {var for var in jaxprs.variables_in(jaxpr.outvars) if var not in given}
    eqns, _ = jaxprs.needed_for(jaxpr.eqns, [*wanted])
    maker = {var: i for i, eqn in enumerate(eqns) for var in eqn.outvars}
    read_by = [{maker[v] for v in jaxprs.variables_in(eqn.invars) if v in maker} for eqn in eqns]
    forms: set[int] = set()
    for i, eqn in enumerate(eqns):
        # Arguments of the block stay in memory, so none is saved again in another shape or type.
        if _is_form(eqn) and read_by[i] <= forms:
            forms.add(i)
    return Graph(
        equations=tuple(map(_equation, eqns, read_by)),
        values=tuple(
            Value(compat.params_of(eqn)["name"], i, bytes_written(eqn), is_form_of_argument=i in forms)
            for i, eqn in enumerate(eqns)
            if compat.name_of(eqn) == "name" and compat.params_of(eqn)["name"].startswith(PREFIX)
        ),
        residuals=tuple(sorted({maker[var] for var in wanted})),
        bytes=sum(jaxprs.nbytes(var) for var in wanted if is_array_atom(var)),
        kept=_bytes_kept(eqns, {maker[var] for var in wanted}, read_by, _in_memory(jaxpr)),
        largest=max(map(bytes_written, eqns), default=0),
    )


def _in_memory(jaxpr: Any) -> set:
    """Return the variables that XLA writes to memory: operands and results of products, and results of reductions."""
    same, found = {}, set()
    for eqn in jaxpr.eqns:
        facts = jaxprs.facts(eqn)
        if facts.is_view and not compat.is_literal(eqn.invars[0]):
            same[eqn.outvars[0]] = same.get(eqn.invars[0], eqn.invars[0])
        elif not (facts.elementwise or facts.kind is Kind.JOIN or _is_form(eqn)):
            # XLA computes the operands of a reduction inside of the reduction's kernel.
            operands = () if facts.kind is Kind.REDUCTION else jaxprs.variables_in(eqn.invars)
            found |= {same.get(var, var) for var in operands} | set(eqn.outvars)
    return found


def _bytes_kept(eqns: Sequence, wanted: set[int], read_by: Sequence[set[int]], in_memory: set) -> int:
    """Return the bytes of the values in memory from which XLA can compute the results of the equations `wanted`."""
    total, seen, pending = 0, set[int](), [*wanted]
    while pending:
        i = pending.pop()
        if i in seen:
            continue
        seen.add(i)
        if not in_memory.isdisjoint(eqns[i].outvars):
            total += bytes_written(eqns[i])
        else:
            pending += read_by[i]
    return total


def _is_form(eqn: Any) -> bool:
    facts = jaxprs.facts(eqn)
    return facts.is_view or facts.kind is Kind.LAYOUT or compat.name_of(eqn) in ("convert_element_type", "copy")


def _equation(eqn: Any, reads: set[int]) -> Equation:
    flops = flops_of(eqn)
    products = flops if jaxprs.facts(eqn).kind is Kind.PRODUCT or compat.inner_jaxprs(eqn) else 0
    written = 0 if compat.name_of(eqn) == "name" else bytes_written(eqn)
    # Repeating a collective would use the links, not only this device's time.
    is_collective = any(jaxprs.facts(e).kind is Kind.COLLECTIVE for e in jaxprs.with_inner(eqn))
    return Equation(tuple(sorted(reads)), flops + _FLOPS_PER_BYTE * written, flops, products, is_collective)


def flops_of(eqn: Any) -> int:
    """Return the FLOPs of one equation, like XLA's cost analysis: two per multiply-add, otherwise one per element.

    A loop, a conditional or a call has the FLOPs of the equations inside it.
    """
    name, facts = compat.name_of(eqn), jaxprs.facts(eqn)
    if name == "dot_general":
        return jaxprs.dot_flops(eqn)
    if name == "conv_general_dilated":
        features = eqn.params["dimension_numbers"].rhs_spec[0]
        kernel = eqn.invars[1].aval
        return 2 * _elements(eqn.outvars[0]) * kernel.size // max(kernel.shape[features], 1)
    if name == "cond":
        return max(_flops_inside(compat.opened(branch)[0]) for branch in eqn.params["branches"])
    if (loop := compat.loop_of(eqn)) is not None:
        return loop.length * _flops_inside(compat.opened(loop.body)[0])
    if inner := compat.inner_jaxprs(eqn):
        return sum(map(_flops_inside, inner))
    if facts.kind in _FREE_KINDS or name in _FREE:
        return 0
    if facts.draws:
        return _RANDOM_BITS * sum(map(_elements, eqn.outvars))
    if facts.kind in (Kind.REDUCTION, Kind.ALONG, Kind.WINDOW):
        return sum(_elements(atom) for atom in eqn.invars)
    return sum(map(_elements, eqn.outvars))


def bytes_written(eqn: Any) -> int:
    return sum(jaxprs.nbytes(var) for var in eqn.outvars if is_array_atom(var))


def is_array_atom(atom: Any) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and hasattr(dtype, "itemsize") and hasattr(atom.aval, "size") and not compat.is_ref(atom)


def _flops_inside(jaxpr: Any) -> int:
    return sum(map(flops_of, jaxpr.eqns))


def _elements(atom: Any) -> int:
    return getattr(atom.aval, "size", 0)


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


def choose_saved(graph: Graph, budget: int, *, in_loop: bool = False) -> Choice:
    """Return the choice that saves at most `budget` bytes and repeats the fewest FLOPs.

    With `in_loop`, return the choice of least time. Only products and saved bytes count as time: XLA computes other
    equations, such as those of a softmax, inside of kernels that read their operands anyway.
    """
    if not graph.equations:
        return Choice((), 0, 0, 0, 0)
    cost, sizes, price = np.array([eqn.cost for eqn in graph.equations], float), _sizes(graph), _PRICE
    if in_loop and (products := np.array([eqn.products for eqn in graph.equations], float)).any():
        cost, price = products + _FLOPS_PER_BYTE * cost, _WORTH * products.sum() / max(graph.kept, 1)
    found = _minimised(graph, np.concatenate([cost, price * sizes]), cost.sum(), budget)
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

    The solution has one boolean per equation (whether it is recomputed), followed by one per value (whether it is
    saved). `objective` has their costs, which are divided by `scale`, the sum of all costs.
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
    """Return the matrix and the lower bounds of the constraints: each value that is read is saved or recomputed."""
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
