"""Move computations on the layers of a stack into the loop over this stack, which gathers each layer anyway.

A loss may compute a value of every layer outside of the loop over its layers: a spectral norm by which the stack is
divided before the loop, or an orthogonality penalty, as a batched expression or as a second loop. The whole stack, or
each layer once more, would be gathered for that. `moved_into_loops` lets an iteration of the loop compute the value of
its layer (`parts`). If the rest of the loss reads the values, the loop also returns them.

Values that can be computed on shards, such as norms, stay outside, unless the loop itself reads them.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zerojax import compat, jaxprs, names, signatures
from zerojax.gather.on_parts import Layer, along, evaluate_parts
from zerojax.gather.parts import call, dims_of
from zerojax.gather.sharded_param import OF_SHARDS, OF_STACKS
from zerojax.layout.leaf import Leaf

# Changes of a stack that stay outside of the loop. Others, such as a transpose of each layer, would copy the shards.
_KEPT = OF_SHARDS - OF_STACKS


class End(NamedTuple):
    """A value of all layers that equations outside of the loop read."""

    var: Any  # has one value per layer
    # The equation that reads `var`, if it sums over the dim of layers and further dims. An iteration then sums over the
    # further dims, so that the loop returns a small value.
    reduction: Any = None

    @property
    def result(self) -> Any:
        return self.var if self.reduction is None else self.reduction.outvars[0]


@dataclasses.dataclass
class Host:
    """A loop over layers, with further values of these layers that it will compute."""

    loops: list  # the loop, followed by other loops over its stacks, which only read parameters; empty for a new loop
    ends: list[End] = dataclasses.field(default_factory=list)  # the values that the loop returns
    computed: dict = dataclasses.field(default_factory=dict)  # operands of which each iteration computes its row

    @property
    def stacks(self) -> list:
        found = dict.fromkeys(v for eqn in self.loops for v in stacks_of(eqn))
        return [v for v in found if v not in self.computed]

    @property
    def targets(self) -> list:
        return list(dict.fromkeys([*self.computed, *(end.var for end in self.ends)]))

    @property
    def results(self) -> list:
        return [*(v for eqn in self.loops for v in eqn.outvars), *(end.result for end in self.ends)]

    @property
    def reads(self) -> list:
        loops = [(eqn, _loop(eqn)) for eqn in self.loops]
        return jaxprs.variables_in(a for eqn, loop in loops for a in eqn.invars[: loop.consts + loop.carry])


def _loop(eqn: Any) -> compat.LoopEqn:
    loop = compat.loop_of(eqn)
    assert loop is not None
    return loop


def stacks_of(eqn: Any) -> list:
    loop = _loop(eqn)
    return jaxprs.variables_in(eqn.invars[loop.consts + loop.carry :])


def moved_into_loops(jaxpr: Any, leaves: Sequence[Leaf | None], alike: Sequence[bool]) -> tuple[Any, Sequence]:
    """Return `(jaxpr, consts)`, where loops over stacks compute the values that need a whole layer.

    For each argument, `leaves` has the layout of a sharded parameter, or None, and `alike` says whether all devices
    have the same value. A jaxpr without such values is returned unchanged.
    """
    layouts = {v: leaf for v, leaf in zip(jaxpr.invars, leaves, strict=True) if leaf is not None}
    given = [v for v, on in zip(jaxpr.invars, alike, strict=True) if on or v in layouts]
    lengths = dict.fromkeys(loop.length for eqn in jaxpr.eqns if (loop := compat.loop_of(eqn)))
    for length in lengths:
        analysis = Layers(jaxpr, layouts, given, length)
        if not analysis.has_candidates or signatures.has_effects(jaxpr):
            continue
        if (nodes := _in_order(analysis, analysis.hosts())) is not None:
            closed = jax.make_jaxpr(functools.partial(_run, analysis, nodes))(*(v.aval for v in jaxpr.invars))
            # Another length would need the analysis of the new jaxpr. Losses with loops of several lengths are rare.
            return compat.opened(closed)
    return jaxpr, ()


class Layers:
    """Finds the values of a jaxpr that have one entry per layer, for all stacks of `length` layers."""

    def __init__(self, jaxpr: Any, layouts: Mapping[Any, Leaf], given: Collection, length: int):
        """Find the loops and their stacks.

        `layouts` has the layouts of sharded parameters. `given` has all arguments that are alike on all devices.
        """
        self.jaxpr, self.length, self.given = jaxpr, length, given
        self.made = jaxprs.makers(jaxpr.eqns)
        loops = [(eqn, compat.loop_of(eqn)) for eqn in jaxpr.eqns]
        self.loops = [eqn for eqn, loop in loops if loop is not None and loop.length == length]
        self.scanned = {v for eqn in self.loops for v in stacks_of(eqn)}
        _, reads = jaxprs.needed_for(jaxpr.eqns, list(self.scanned))
        has_dim = lambda v: v in reads and v.aval.shape[:1] == (length,)
        self.params = {v: leaf for v, leaf in layouts.items() if has_dim(v) and leaf.dim != 0}
        others = [v for v in given if v not in layouts and has_dim(v)]
        self.stacks = dict.fromkeys([*self.params, *others], 0)

    @functools.cached_property
    def weights(self) -> set:
        """Return the variables that depend on parameters and on other arguments that are alike, and on nothing else."""
        found = set(self.given)
        for eqn in self.jaxpr.eqns:
            if found.issuperset(jaxprs.variables_in(eqn.invars)):
                found.update(eqn.outvars)
        return found

    @property
    def has_candidates(self) -> bool:
        """Return whether an equation outside of loops reads a stack, or one of several loops reads parameters alone."""
        derived = set(self.stacks)
        for eqn in self.jaxpr.eqns if derived and self.length > 1 else ():
            reads = jaxprs.variables_in(eqn.invars)
            if derived.isdisjoint(reads):
                continue
            if compat.loop_of(eqn) is not None:
                if len(self.loops) > 1 and self.weights.issuperset(reads):
                    return True
            elif eqn.primitive.name in _KEPT:
                derived.update(eqn.outvars)
            else:
                return True
        return False

    @functools.cached_property
    def dims(self) -> dict:
        """Return, for each variable, the dim of layers, or None; see `dims_of`."""
        return dims_of(self.jaxpr, {v: self.stacks.get(v) for v in self.jaxpr.invars}, layers=True)

    @functools.cached_property
    def whole(self) -> set:
        """Return the variables with a dim of layers that need a whole layer, because shards cannot compute them."""
        given = {v: leaf.dim for v, leaf in self.params.items() if not any(leaf.others)}
        on_shards = dims_of(self.jaxpr, given | dict.fromkeys(v for v in self.jaxpr.invars if v not in self.params))
        return {v for v, dim in self.dims.items() if dim is not None and v not in on_shards}

    def cone(self, targets: Iterable, stops: Collection) -> tuple[list, list, list]:
        """Return `(equations, stacks, others)` from which an iteration computes its rows of `targets`.

        The stacks are arguments, or variables in `stops`, or arrays such as masks that have a row per layer. The others
        have no dim of layers.
        """
        needed, stacks, others = set(), {}, {}

        def reads(var):
            eqn, dim = self.made.get(var), self.dims.get(var)
            if dim is not None and (eqn is None or var in stops):
                stacks[var] = None
            elif eqn is None or (dim is None and eqn.primitive.name != "broadcast_in_dim"):
                others[var] = None
            else:
                needed.add(id(eqn))
                return jaxprs.variables_in(eqn.invars)
            return ()

        jaxprs.reached(targets, reads)
        eqns = [eqn for eqn in self.jaxpr.eqns if id(eqn) in needed]
        # Rows that the loop reads are kept for the backward pass, which can then compute the changed layer again.
        by_row = lambda eqn: jaxprs.facts(eqn).elementwise and self.dims[eqn.outvars[0]] == 0
        for eqn in eqns:
            for v in others.keys() & jaxprs.variables_in(eqn.invars):
                is_row = by_row(eqn) and v.aval.shape == eqn.outvars[0].aval.shape
                others[v] = others[v] is not False and is_row
        rows = [v for v, is_row in others.items() if is_row]
        return eqns, [*stacks, *rows], [v for v in others if v not in rows]

    def roots(self, var: Any) -> set:
        return {v for v in self.cone([var], ())[1] if v in self.params}

    def hosts(self) -> list[Host]:
        """Return the loops that compute further values, and new loops for values that no existing loop can compute."""
        hosts: list[Host] = []
        for eqn in sorted(self.loops, key=self._is_of_weights):  # Loops of parameters alone come last.
            host = next((host for host in hosts if self._is_of_weights(eqn) and self._can_join(eqn, host)), None)
            if host is not None:
                host.loops.append(eqn)
            else:
                hosts.append(host := Host([eqn]))
            host.computed |= dict.fromkeys(v for v in stacks_of(eqn) if self._is_computed(v))
        for end in self._ends():
            roots = self.roots(end.var)
            host = next((host for host in hosts if self._can_compute(end, roots, host)), None)
            if host is None:
                hosts.append(host := Host([]))
            host.ends.append(end)
        for host in hosts:
            self._without_second_gathers(host)
        return [host for host in hosts if host.ends or host.computed or len(host.loops) > 1]

    def _is_of_weights(self, eqn: Any) -> bool:
        return self.weights.issuperset(jaxprs.variables_in(eqn.invars))

    def _is_computed(self, var: Any) -> bool:
        """Return whether an iteration should compute its row of `var`.

        It should if `var` changes a sharded stack, or is much larger than the stacks from which it is computed, such as
        a product of low-rank factors.
        """
        if self.dims.get(var) != 0 or var in self.stacks:
            return False
        eqns, stacks, _ = self.cone([var], ())
        if self.params.keys().isdisjoint(stacks):
            return 2 * sum(v.aval.size for v in stacks) <= var.aval.size
        return any(eqn.primitive.name not in _KEPT for eqn in eqns)

    def _without_second_gathers(self, host: Host) -> None:
        """Let an iteration compute casts and transposes of its layers, if it needs these layers anyway."""
        stacks = set(self.cone(host.targets, host.stacks)[1]) & self.params.keys()
        for var in host.stacks:
            if var not in self.stacks and self.dims.get(var) == 0 and self.roots(var) & stacks:
                host.computed[var] = None

    def inputs(self, host: Host) -> list:
        _, stacks, others = self.cone(host.targets, host.stacks)
        return [*host.reads, *host.stacks, *stacks, *others]

    def _behind(self, variables: Iterable) -> set:
        return jaxprs.needed_for(self.jaxpr.eqns, list(variables))[1]

    def _can_join(self, eqn: Any, host: Host) -> bool:
        loop, other = _loop(eqn), _loop(host.loops[0])
        roots_of = lambda eqn: {r for v in stacks_of(eqn) if self.dims.get(v) == 0 for r in self.roots(v)}
        return (
            (loop.reverse == other.reverse or not loop.carry)
            and not roots_of(eqn).isdisjoint(roots_of(host.loops[0]))
            and self._behind(self.inputs(host)).isdisjoint(eqn.outvars)
            and self._behind(jaxprs.variables_in(eqn.invars)).isdisjoint(host.results)
        )

    def _can_compute(self, end: End, roots: set, host: Host) -> bool:
        own = {root for v in [*host.stacks, *host.computed] if self.dims.get(v) is not None for root in self.roots(v)}
        if not host.loops:
            own = {root for other in host.ends for root in self.roots(other.var)}
        _, stacks, others = self.cone([end.var], host.stacks)
        before = self._behind(self.inputs(host)).isdisjoint([end.var, end.result])
        return bool(roots & own) and before and self._behind([*stacks, *others]).isdisjoint(host.results)

    def _ends(self) -> list[End]:
        """Return the values that need a whole layer, and that equations without a dim of layers read."""
        found, is_end = [], lambda v: v in self.whole and v in self.weights and v not in self.stacks
        for eqn in self.jaxpr.eqns:
            reads = [v for v in jaxprs.variables_in(eqn.invars) if is_end(v)]
            if not reads or any(self.dims.get(v) is not None for v in eqn.outvars):
                continue
            if eqn in self.loops:
                loop = _loop(eqn)
                consts = jaxprs.variables_in(eqn.invars[: loop.consts + loop.carry])
                reads = [v for v in reads if v in consts]
            reduces = eqn.primitive.name == "reduce_sum" and len(eqn.params["axes"]) > 1
            found += [End(v, eqn if reduces else None) for v in reads]
        found += [End(v) for v in jaxprs.variables_in(self.jaxpr.outvars) if is_end(v)]
        return list({end.result: end for end in found if self._is_small(end)}.values())

    def _is_small(self, end: End) -> bool:
        """Return whether the loop returns at most half as many elements as the largest stack has."""
        size = end.var.aval.size if end.reduction is None else self.length * end.result.aval.size
        return 2 * size <= max((v.aval.size for v in self.roots(end.var)), default=0)


def _in_order(analysis: Layers, hosts: Sequence[Host]) -> list | None:
    """Return the equations, with hosts instead of their loops, so that each one follows everything that it reads.

    Return None if there is no host, or if two hosts would read results of each other.
    """
    first = {id(host.loops[0]): host for host in hosts if host.loops}
    left_out = {id(analysis.made[end.result]) for host in hosts for end in host.ends}
    left_out |= {id(eqn) for host in hosts for eqn in host.loops[1:]}
    waiting: list = [host for host in hosts if not host.loops]
    waiting += [first.get(id(eqn), eqn) for eqn in analysis.jaxpr.eqns if id(eqn) not in left_out]
    known, nodes = {*analysis.jaxpr.invars, *compat.constvars_of(analysis.jaxpr)}, []
    while waiting:
        later = []
        for node in waiting:
            is_host = isinstance(node, Host)
            if known.issuperset(analysis.inputs(node) if is_host else jaxprs.variables_in(node.invars)):
                nodes.append(node)
                known.update(node.results if is_host else node.outvars)
            else:
                later.append(node)
        if len(later) == len(waiting):
            return None
        waiting = later
    return nodes if hosts else None


def _run(analysis: Layers, nodes: Sequence, *args: Any) -> list:
    """Evaluate equations and hosts in order, and return the results of the jaxpr."""
    env = dict(zip(analysis.jaxpr.invars, args, strict=True))
    value = lambda atom: atom.val if compat.is_literal(atom) else env[atom]
    for node in nodes:
        if isinstance(node, Host):
            env.update(zip(node.results, _run_host(analysis, node, value), strict=True))
        else:
            with names.at(node):
                results = compat.evaluate_one(node, [value(a) for a in node.invars])
            env.update(zip(node.outvars, results, strict=True))
    return [value(a) for a in analysis.jaxpr.outvars]


def _run_host(analysis: Layers, host: Host, value: Callable[[Any], Any]) -> list:
    """Run the loop of a host, and return the host's results. `value` returns the value of an operand."""
    eqns, stacks, others = analysis.cone(host.targets, host.stacks)
    jaxpr = compat.part_of(analysis.jaxpr, eqns, [*stacks, *others], host.targets)
    dims = [*[0] * len(stacks), *[None] * len(others)]
    loops = [(eqn, _loop(eqn)) for eqn in host.loops]
    scanned = list(dict.fromkeys([*host.stacks, *stacks]))

    def iteration(carries, slices):
        index, slices = slices
        rows, layer = dict(zip(scanned, slices, strict=True)), Layer(analysis.length, 1, analysis.length, (), index)
        # Not `lax.expand_dims`: behind a broadcast, the backward pass could not compute a changed layer again.
        given = [*(lax.reshape(rows[v], (1, *rows[v].shape)) for v in stacks), *map(value, others)]
        found = dict(zip(host.targets, evaluate_parts(jaxpr, given, along(dims, layer)), strict=True))
        rows |= {v: lax.squeeze(found[v], [0]) for v in host.computed}
        carry, results = [], []
        for (eqn, loop), before in zip(loops, carries, strict=True):
            consts = map(value, eqn.invars[: loop.consts])
            outs = call(loop.body, *consts, *before, *(rows[v] for v in stacks_of(eqn)))
            carry.append(outs[: loop.carry])
            results.append(outs[loop.carry :])
        return carry, (results, [_end_of_layer(end, found[end.var], analysis.dims[end.var]) for end in host.ends])

    main = loops[0][1] if loops else None
    options = {"reverse": main.reverse, "unroll": main.unroll} if main else {}
    before = [[value(a) for a in eqn.invars[loop.consts : loop.consts + loop.carry]] for eqn, loop in loops]
    with names.at(host.loops[0] if loops else analysis.made[host.ends[0].var]):
        slices = jnp.arange(analysis.length), [value(v) for v in scanned]
        carries, (stacked, ends) = lax.scan(iteration, before, slices, length=analysis.length, **options)
    of_loops = [x for carry, results in zip(carries, stacked, strict=True) for x in [*carry, *results]]
    return of_loops + [_end(end, x, analysis.dims[end.var]) for end, x in zip(host.ends, ends, strict=True)]


def _end_of_layer(end: End, x: jax.Array, dim: int) -> jax.Array:
    """Return the value of `end` in one layer, without the dim of layers. `x` is the layer of its variable."""
    x = lax.squeeze(x, [dim])
    axes = () if end.reduction is None else end.reduction.params["axes"]
    return jnp.sum(x, tuple(d - (d > dim) for d in axes if d != dim), x.dtype)


def _end(end: End, x: jax.Array, dim: int) -> jax.Array:
    """Return the value of `end`, given the values of all layers."""
    return jnp.moveaxis(x, 0, dim) if end.reduction is None else jnp.sum(x, 0, x.dtype)
