"""Move computations on the layers of a stack into the loop over this stack, which gathers each layer anyway.

A loss may compute a value of every layer outside of the loop over its layers: a spectral norm by which the stack is
divided before the loop, or an orthogonality penalty, as a batched expression or as a second loop. The whole stack, or
each layer once more, would be gathered for that. `moved_into_loops` lets an iteration of the loop compute the value of
its layer (`parts`). If the rest of the loss reads the values, the loop also returns them.

Values that can be computed on shards, such as norms, stay outside, unless the loop itself reads them.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

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


@dataclasses.dataclass
class Host:
    """A loop over layers, with further values of these layers that it will compute."""

    loops: list  # the loop, followed by other loops over its stacks, which only read parameters
    computed: dict = dataclasses.field(default_factory=dict)  # operands of which each iteration computes its row

    @property
    def stacks(self) -> list:
        found = dict.fromkeys(v for eqn in self.loops for v in stacks_of(eqn))
        return [v for v in found if v not in self.computed]

    @property
    def results(self) -> list:
        return [v for eqn in self.loops for v in eqn.outvars]

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
    lengths = dict.fromkeys(loop.length for eqn in jaxpr.eqns if (loop := compat.loop_of(eqn)))
    for length in [] if signatures.has_effects(jaxpr) else lengths:
        analysis = Layers(jaxpr, (), leaves, alike, length)
        if ends := analysis.ends():
            closed = jax.make_jaxpr(functools.partial(_with_ends, analysis, ends))(*(v.aval for v in jaxpr.invars))
            analysis = Layers(*compat.opened(closed), leaves, alike, length)
        if (nodes := _in_order(analysis, analysis.hosts())) is not None:
            closed = jax.make_jaxpr(functools.partial(_run, analysis, nodes))(*(v.aval for v in jaxpr.invars))
            # Another length would need the analysis of the new jaxpr. Losses with loops of several lengths are rare.
            return compat.opened(closed)
    return jaxpr, ()


class Layers:
    """Finds the values of a jaxpr that have one entry per layer, for all stacks of `length` layers."""

    def __init__(self, jaxpr: Any, consts: Sequence, leaves: Sequence, alike: Sequence[bool], length: int):
        """Find the loops and their stacks. `leaves` and `alike` are those of `moved_into_loops`."""
        self.jaxpr, self.consts, self.length = jaxpr, consts, length
        self.made = jaxprs.makers(jaxpr.eqns)
        loops = [(eqn, compat.loop_of(eqn)) for eqn in jaxpr.eqns]
        self.loops = [eqn for eqn, loop in loops if loop is not None and loop.length == length]
        _, reads = jaxprs.needed_for(jaxpr.eqns, [v for eqn in self.loops for v in stacks_of(eqn)])
        layouts = dict(zip(jaxpr.invars, leaves, strict=True))
        self.given = [v for v, on in zip(jaxpr.invars, alike, strict=True) if on or layouts[v] is not None]
        stacks = [v for v in self.given if v in reads and v.aval.shape[:1] == (length,)]
        # If devices divide a stack over its layers, an iteration has no shard of its layer.
        self.stacks = dict.fromkeys((v for v in stacks if layouts[v] is None or layouts[v].dim != 0), 0)
        self.params = {v: layouts[v] for v in self.stacks if layouts[v] is not None}

    @functools.cached_property
    def weights(self) -> set:
        """Return the variables that depend on parameters and on other arguments that are alike, and on nothing else."""
        found = set(self.given)
        for eqn in self.jaxpr.eqns:
            if found.issuperset(jaxprs.variables_in(eqn.invars)):
                found.update(eqn.outvars)
        return found

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

    def roots(self, variables: Iterable) -> set:
        return {v for v in self.cone(variables, ())[1] if v in self.params}

    def ends(self) -> set:
        """Return the small values that need a whole layer, and that an equation without a dim of layers reads.

        They are pairs `(value, id of the equation)`, with `id(None)` if the loss returns the value.
        """
        pairs = [(v, None) for v in jaxprs.variables_in(self.jaxpr.outvars)]
        for eqn in self.jaxpr.eqns if self.params else ():
            loop = compat.loop_of(eqn) if eqn in self.loops else None
            reads = eqn.invars if loop is None else eqn.invars[: loop.consts + loop.carry]
            if all(self.dims.get(v) is None for v in eqn.outvars):
                pairs += [(v, eqn) for v in jaxprs.variables_in(reads)]
        is_whole = lambda v: v in self.weights and v not in self.stacks and v in self.whole
        return {(v, id(reader)) for v, reader in pairs if is_whole(v) and self._is_small(v, reader)}

    def _is_small(self, var: Any, reader: Any) -> bool:
        """Return whether a loop returns at most half as many elements as the largest stack has."""
        size = self.length * reader.outvars[0].aval.size if _sums_layers(reader) else var.aval.size
        return 2 * size <= max((v.aval.size for v in self.roots([var])), default=0)

    def hosts(self) -> list[Host]:
        """Return the loops that compute further values."""
        hosts: list[Host] = []
        for eqn in sorted(self.loops, key=self._is_of_weights):  # Loops of parameters alone come last.
            host = next((host for host in hosts if self._is_of_weights(eqn) and self._can_join(eqn, host)), None)
            if host is not None:
                host.loops.append(eqn)
            else:
                hosts.append(host := Host([eqn]))
            host.computed |= dict.fromkeys(v for v in stacks_of(eqn) if self._is_computed(v))
        for host in hosts:
            # An iteration also computes casts and transposes of its layers, if it needs these layers anyway.
            stacks = set(self.cone(host.computed, host.stacks)[1]) & self.params.keys()
            for var in host.stacks if stacks else ():
                if var not in self.stacks and self.dims.get(var) == 0 and self.roots([var]) & stacks:
                    host.computed[var] = None
        return [host for host in hosts if host.computed or len(host.loops) > 1]

    def _is_of_weights(self, eqn: Any) -> bool:
        return self.weights.issuperset(jaxprs.variables_in(eqn.invars))

    def _is_computed(self, var: Any) -> bool:
        """Return whether an iteration should compute its row of `var`.

        It should if `var` changes a sharded stack, or is much larger than the stacks from which it is computed, such as
        a product of low-rank factors.
        """
        if var in self.stacks or self.dims.get(var) != 0:
            return False
        eqns, stacks, _ = self.cone([var], ())
        if self.params.keys().isdisjoint(stacks):
            return 2 * sum(v.aval.size for v in stacks) <= var.aval.size
        return any(eqn.primitive.name not in _KEPT for eqn in eqns)

    def inputs(self, host: Host) -> list:
        _, stacks, others = self.cone(host.computed, host.stacks)
        return [*host.reads, *host.stacks, *stacks, *others]

    def _can_join(self, eqn: Any, host: Host) -> bool:
        loop, main = _loop(eqn), _loop(host.loops[0])
        behind = lambda variables: jaxprs.needed_for(self.jaxpr.eqns, list(variables))[1]
        roots_of = lambda loops: self.roots(v for eqn in loops for v in stacks_of(eqn) if self.dims.get(v) == 0)
        return (
            (loop.reverse == main.reverse or not loop.carry)
            and not roots_of([eqn]).isdisjoint(roots_of(host.loops))
            and behind(self.inputs(host)).isdisjoint(eqn.outvars)
            and behind(jaxprs.variables_in(eqn.invars)).isdisjoint(host.results)
        )


def _sums_layers(eqn: Any) -> bool:
    """Return whether an equation sums over the dim of layers and further dims. A loop can sum over the further dims."""
    return eqn is not None and eqn.primitive.name == "reduce_sum" and len(eqn.params["axes"]) > 1


def _with_ends(analysis: Layers, ends: set, *args: Any) -> list:
    """Evaluate the jaxpr. New loops return the values `ends` to the equations that read them, or the sums of layers."""
    returned: dict = {}

    def by_loop(x, dim):
        # From the results of a scan, JAX removes a row itself. So it gets a further dim.
        _, rows = lax.scan(lambda _, row: (None, lax.expand_dims(row, [0])), None, jnp.moveaxis(x, dim, 0))
        return lax.squeeze(rows, [1])

    def read(var, x, reader):
        if compat.is_literal(var) or (var, id(reader)) not in ends:
            return x
        if var not in returned:
            dim = analysis.dims[var]
            returned[var] = jnp.moveaxis(by_loop(x, dim), 0, dim)
        return returned[var]

    def rule(eqn, values):
        var, x = (*eqn.invars, None)[0], (*values, None)[0]
        if _sums_layers(eqn) and (var, id(eqn)) in ends:
            dim = analysis.dims[var]
            x = jnp.sum(x, [d for d in eqn.params["axes"] if d != dim], x.dtype, keepdims=True)
            return [jnp.sum(by_loop(x, dim), 0, x.dtype).reshape(eqn.outvars[0].aval.shape)]
        return compat.evaluate_one(eqn, [read(*pair, eqn) for pair in zip(eqn.invars, values, strict=True)])

    results = jaxprs.evaluate(analysis.jaxpr, (), args, rule)
    return [read(*pair, None) for pair in zip(analysis.jaxpr.outvars, results, strict=True)]


def _in_order(analysis: Layers, hosts: Sequence[Host]) -> list | None:
    """Return the equations, with hosts instead of their loops, so that each one follows everything that it reads.

    Return None if there is no host, or if two hosts would read results of each other.
    """
    first = {id(host.loops[0]): host for host in hosts}
    left_out = {id(eqn) for host in hosts for eqn in host.loops[1:]}
    waiting: list = [first.get(id(eqn), eqn) for eqn in analysis.jaxpr.eqns if id(eqn) not in left_out]
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
    env = dict(zip(compat.constvars_of(analysis.jaxpr), jaxprs.as_jax_values(analysis.consts), strict=True))
    env.update(zip(analysis.jaxpr.invars, args, strict=True))
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
    eqns, stacks, others = analysis.cone(host.computed, host.stacks)
    jaxpr = compat.part_of(analysis.jaxpr, eqns, [*stacks, *others], list(host.computed))
    dims = [*[0] * len(stacks), *[None] * len(others)]
    loops = [(eqn, _loop(eqn)) for eqn in host.loops]
    scanned = list(dict.fromkeys([*host.stacks, *stacks]))

    def iteration(carries, slices):
        index, slices = slices
        rows, layer = dict(zip(scanned, slices, strict=True)), Layer(analysis.length, 1, analysis.length, (), index)
        # Not `lax.expand_dims`: behind a broadcast, the backward pass could not compute a changed layer again.
        given = [*(lax.reshape(rows[v], (1, *rows[v].shape)) for v in stacks), *map(value, others)]
        found = evaluate_parts(jaxpr, given, along(dims, layer))
        rows |= {v: lax.squeeze(x, [0]) for v, x in zip(host.computed, found, strict=True)}
        carry, results = [], []
        for (eqn, loop), before in zip(loops, carries, strict=True):
            consts = map(value, eqn.invars[: loop.consts])
            outs = call(loop.body, *consts, *before, *(rows[v] for v in stacks_of(eqn)))
            carry.append(outs[: loop.carry])
            results.append(outs[loop.carry :])
        return carry, results

    main = loops[0][1]
    before = [[value(a) for a in eqn.invars[loop.consts : loop.consts + loop.carry]] for eqn, loop in loops]
    with names.at(host.loops[0]):
        slices = jnp.arange(analysis.length), [value(v) for v in scanned]
        options = {"length": analysis.length, "reverse": main.reverse, "unroll": main.unroll}
        carries, stacked = lax.scan(iteration, before, slices, **options)
    return [x for carry, results in zip(carries, stacked, strict=True) for x in [*carry, *results]]
