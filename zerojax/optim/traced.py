"""Trace an optax update into equations, with all calls inlined, and describe parts of these equations.

A `Core` is the part of a leaf's update that needs the full leaf. `OwnedCores` are cores with equal programs.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from zerojax import compat, jaxprs
from zerojax.layout.leaf import Leaf
from zerojax.optim.wrapped import NO_MESH, FlatUpdate, UpdatedLeaves, guarded

# Each input of an update is named by its kind, and by its index among the inputs of this kind.
GRAD, STATE, PARAM, EXTRA, CONST, SHARED, CUT = "grad", "state", "param", "extra", "const", "shared", "cut"
Read = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class Equations:
    """A part of the equations of an update."""

    whole: "TracedUpdate"
    eqns: tuple[int, ...]  # the indices of the equations in `whole`
    jaxpr: Any  # the equations; they compute some of the update's results from the inputs in `reads`
    reads: tuple[Read, ...]  # the kind and index of each input, in order
    owned: "tuple[OwnedCores, ...]" = ()  # the cores among these equations that owners compute

    @functools.cached_property
    def key(self) -> tuple:
        """Return a value that is equal for parts that compute the same."""
        position = {e: n for n, e in enumerate(self.eqns)}
        of = lambda owned: tuple(tuple(position[e] for e in core.eqns) for core in owned.cores)
        return str(self.jaxpr), tuple((of(owned), owned.counts, owned.size, owned.within) for owned in self.owned)

    def indices(self, kind: str) -> tuple[int, ...]:
        return tuple(i for name, i in self.reads if name == kind)


@dataclasses.dataclass(frozen=True)
class TracedUpdate:
    """An update that was traced into equations."""

    # the equations; they compute new parameters and state from gradients, state, parameters and extra values
    jaxpr: Any
    consts: tuple  # the arrays that the transformation closes over
    reads: dict[Any, Read]  # for each input variable, its kind and index
    num_params: int  # the number of results that are parameters, or their updates; the remaining results are state

    @functools.cached_property
    def producers(self) -> dict[Any, int]:
        return producers_of(self.jaxpr)

    @functools.cached_property
    def variables(self) -> list:
        """Return all variables in order. In two traces of the same equations, equal positions correspond."""
        return [*self.reads, *(var for eqn in self.jaxpr.eqns for var in eqn.outvars)]

    @functools.cached_property
    def positions(self) -> dict[Any, int]:
        return {var: n for n, var in enumerate(self.variables)}

    @property
    def state_outs(self) -> list:
        return self.jaxpr.outvars[self.num_params :]

    def equations(
        self, eqns: Sequence[int], reads: dict[Any, Read], outvars: Sequence, owned: "Sequence[OwnedCores]" = ()
    ) -> Equations:
        """Return `eqns` as a program from `reads` to `outvars`. Keep the cores of `owned` that `eqns` contains."""
        jaxpr = compat.part_of(self.jaxpr, [self.jaxpr.eqns[e] for e in eqns], list(reads), outvars)
        taken = set(eqns)
        inside = [each.take([core for core in each.cores if taken.issuperset(core.eqns)]) for each in owned]
        return Equations(self, tuple(eqns), jaxpr, tuple(reads.values()), tuple(each for each in inside if each.cores))


# The gradients, state, parameters and extra arguments of an update, as arrays or shapes.
Given = tuple[Sequence, Sequence, Sequence | None, dict]


def trace_update(update: FlatUpdate, given: Given, changed: Mapping[int, tuple[int, ...]] = {}) -> TracedUpdate:
    """Trace an update of the arguments `given`. Raise a `TransformationError` if the transformation raises an error.

    `changed` maps the indices of some trained parameters to other shapes. `_state_shape` gives shapes of their state.
    """
    grads, state, params, extra = given
    numbers, tree = jax.tree.flatten(extra)
    inputs = {GRAD: grads, STATE: state, PARAM: params or [], EXTRA: list(filter(is_traced, numbers))}
    names: list[Read] = [(kind, i) for kind, values in inputs.items() for i in range(len(values))]

    def flat(*values):
        remaining = iter(values)
        grads, state, moved, arrays = ([next(remaining) for _ in of_kind] for of_kind in inputs.values())
        filled = jax.tree.unflatten(tree, [arrays.pop(0) if is_traced(x) else x for x in numbers])
        new_params, new_state = guarded(update)(grads, state, None if params is None else moved, filled)
        return [*new_params, *new_state]

    def shape_of(kind: str, i: int) -> jax.ShapeDtypeStruct:
        new = _state_shape(update.leaves, i, changed) if kind == STATE else None if kind == EXTRA else changed.get(i)
        x = inputs[kind][i]
        return jax.ShapeDtypeStruct(new or x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))

    with jax.sharding.use_abstract_mesh(NO_MESH):
        jaxpr, consts = trace_inlined(flat, *(shape_of(kind, i) for kind, i in names))
    reads: dict[Any, Read] = dict(zip(jaxpr.invars, names, strict=True))
    reads |= {var: (CONST, i) for i, var in enumerate(compat.constvars_of(jaxpr))}
    return TracedUpdate(jaxpr, tuple(consts), reads, len(grads))


def is_traced(x: Any) -> bool:
    """Return whether an extra argument of an update is an array or an array's shape. Other arguments are static."""
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct)


def _state_shape(leaves: UpdatedLeaves, k: int, changed: Mapping[int, tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the new shape of state leaf `k` if its parameter is in `changed`, or None if the shape stays."""
    i, leaf = leaves.param_of[k], leaves.state[k]
    if i is None or i not in changed:
        return None
    param, new = leaves.grads[i].shape, changed[i]
    if leaf.shape == param:
        return new
    return (new[0], *leaf.shape[1:]) if leaf.shape[:1] == param[:1] and new[1:] == param[1:] else None


def trace_inlined(fn: Callable, *args: Any) -> tuple[Any, Sequence]:
    """Trace a function, inline the calls in its jaxpr, and return `(jaxpr, consts)`."""
    jaxpr, consts = compat.opened(jax.make_jaxpr(fn)(*args))
    return compat.opened(jax.make_jaxpr(functools.partial(jaxprs.inline_calls, jaxpr, consts))(*args))


def producers_of(jaxpr: Any) -> dict[Any, int]:
    """Map each variable of a jaxpr to the index of the equation that computes it."""
    return {var: e for e, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}


def equations_behind(
    jaxpr: Any, producers: dict[Any, int], outvars: Sequence, stop: Collection = ()
) -> tuple[list[int], list]:
    """Return the indices of the equations that compute `outvars`, and the input variables that these equations read.

    `producers` is the result of `producers_of`, or a part of it. The variables in `stop` count as inputs.
    """
    is_made = lambda var: var in producers and var not in stop
    read = lambda var: jaxprs.variables_in(jaxpr.eqns[producers[var]].invars) if is_made(var) else ()
    found = jaxprs.reached(jaxprs.variables_in(outvars), read)
    return sorted({producers[var] for var in found if is_made(var)}), [var for var in found if not is_made(var)]


def union(known: dict[Any, frozenset], atoms: Sequence) -> frozenset:
    """Return the union of `known[atom]` for all `atoms`. Literals and unknown variables have the empty set."""
    return frozenset().union(*(known.get(atom, ()) for atom in atoms if not compat.is_literal(atom)))


@dataclasses.dataclass(frozen=True)
class Core:
    """The part of a leaf's update that needs the full leaf. Variables are indices in `TracedUpdate.variables`."""

    leaf: int  # the trained parameter
    eqns: tuple[int, ...]  # the equations of the core in the jaxpr of the update
    arrays: tuple[tuple[int, Leaf], ...]  # the sharded arrays that the core reads, each with its layout
    small: tuple[int, ...]  # other variables that the core reads and that depend on the leaf
    shared: tuple[int, ...]  # variables that the core reads and that do not depend on the leaf, such as a count
    outs: tuple[tuple[int, Leaf], ...]  # the sharded results of the core, each with its layout
    small_outs: tuple[int, ...]  # all other results of the core

    @property
    def inputs(self) -> tuple[int, ...]:
        return *(n for n, _ in self.arrays), *self.small, *self.shared

    def jaxpr(self, traced: TracedUpdate) -> Any:
        """Return the core as a program from its inputs to its results, with the shapes of `traced`."""
        of = lambda indices: [traced.variables[n] for n in indices]
        results = of((*(n for n, _ in self.outs), *self.small_outs))
        return compat.part_of(traced.jaxpr, [traced.jaxpr.eqns[e] for e in self.eqns], of(self.inputs), results)


@dataclasses.dataclass(frozen=True)
class OwnedCores:
    """Cores with equal programs, which owners compute together."""

    cores: tuple[Core, ...]  # one core per parameter
    # the number of items per core; a stack of matrices is divided into items; any other core is one item
    counts: tuple[int, ...]
    size: int  # the number of matrices per item, usually 1; 0 if the parameters are not stacks of matrices
    jaxpr: Any  # the program that computes one item
    within: int = 1  # the number of devices per owner
    seconds: float = 0.0  # the estimated time, at peak rates, if owners compute the cores
    seconds_sharded: float = 0.0  # the estimated time, at peak rates, if each matrix is divided among all devices

    @property
    def matrices(self) -> int:
        return sum(self.counts) * max(self.size, 1)

    @property
    def leaf(self) -> Leaf:
        return self.cores[0].arrays[0][1]

    def take(self, cores: Sequence[Core]) -> "OwnedCores":
        """Return a copy with only the given `cores`, which must be some of `self.cores`."""
        counts = dict(zip((core.leaf for core in self.cores), self.counts, strict=True))
        return dataclasses.replace(self, cores=tuple(cores), counts=tuple(counts[core.leaf] for core in cores))


def layouts_of_item(core: Core, size: int) -> tuple[tuple[Leaf, ...], tuple[Leaf, ...]]:
    """Return the layouts of the arrays and results of one item: `size` matrices, or the whole leaf if `size` is 0."""
    one = lambda leaf: dataclasses.replace(leaf, shape=(size, *leaf.shape[1:])) if size else leaf
    return tuple(one(leaf) for _, leaf in core.arrays), tuple(one(leaf) for _, leaf in core.outs)
