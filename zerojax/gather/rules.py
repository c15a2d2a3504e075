"""The rules by which the planner decides what happens to each equation of a loss. Read the table `RULES` first.

The first rule that matches an equation acts. An action adds to the containers of `Decisions`, from which `planner`
makes segments. To add an optimization, add a rule.

An equation on parameters alone (a transpose, a reshape, a merged LoRA) is repeated in every segment that reads its
result. If it ran only once, its result, which is as large as a gathered parameter, would outlive the segment.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from zerojax import compat, jaxprs
from zerojax.gather.segments import BlockSegment, Segment, is_plain
from zerojax.gather.sharded_param import OF_STACKS, ShardedParam, extended, scanned_over
from zerojax.primitives import SHARDWISE

if TYPE_CHECKING:
    from zerojax.gather.clusters import Joined
    from zerojax.gather.reduced import Analysis, Chain
    from zerojax.gather.shardwise import Shardwise


@dataclasses.dataclass
class Draft:
    """A segment before its inputs and outputs are known."""

    make: Callable[..., Segment]
    eqns: list
    # Maps the variable of each parameter that this draft gathers for later segments to the variable by which they read
    # the gathered value. (The parameter's variable stands for the shard.) A draft with entries here has no `eqns`.
    gathers: Mapping = dataclasses.field(default_factory=dict)
    # the `gathers` of the draft that gathers for this one
    reads: Mapping = dataclasses.field(default_factory=dict)
    is_plain: bool = False  # whether the equations read no sharded parameter
    # Equations of another segment that this segment computes again, as keys, because their results are cheap or not
    # computed yet. They are not among this segment's results.
    again: dict = dataclasses.field(default_factory=dict)


def gathering(variables: Iterable) -> Draft:
    names = {var: compat.new_var(var.aval) for var in dict.fromkeys(variables)}
    return Draft(functools.partial(BlockSegment, lasting=True), [], names)


class Site(NamedTuple):
    """An equation, its index in the function, and the variables that it reads.

    `touched` has the variables among `reads` that depend on parameters alone: parameters, slices, repeated values.
    """

    index: int
    eqn: Any
    reads: list
    touched: list

    @property
    def size(self) -> int:
        return max((var.aval.size for var in self.touched), default=0)


class Decisions:
    """The decisions so far, and the predicates and actions of the rules. Each call of `planned` makes one instance."""

    def __init__(self, jaxpr: Any, params: Mapping[Any, ShardedParam], alike: Collection | None):
        """Analyse an inlined function once, before any decision.

        `alike` has the arguments that are alike on all devices. If it is None, no parameter is reduced on its shards.
        """
        self.params = dict(params)  # sharded parameters and slices of their shards, by variable
        self.shardwise: list[Shardwise] = []  # quantised weights, computed on shards at the start of each pass
        self.repeated: dict = {}  # the equations that segments repeat, by their result variables
        self.drafts = [Draft(BlockSegment, [], is_plain=True)]  # the segments so far
        self._jaxpr, self._reduces = jaxpr, alike is not None
        self._uses, self._final = jaxprs.uses_of(jaxpr)
        self._scanned = scanned_over(jaxpr)
        self.between_refs = _between_refs(jaxpr)
        # Variables that are alike on all devices: arguments, and results of equations that read no other variables.
        self.alike: set = set(alike or ())
        self._given = frozenset(self.alike)  # the arguments among them
        self.made_in: dict = {}  # the index of the draft that computes a variable
        self._blocks: dict = {}  # the last draft that gathers each parameter, by variable
        # For each value that a block computes from only one parameter, the variable of this parameter.
        self.roots: dict = {}

    def decide(self) -> None:
        """Apply the first rule that matches to each equation."""
        for index, eqn in enumerate(self._jaxpr.eqns):
            reads = jaxprs.variables_in(eqn.invars)
            site = Site(index, eqn, reads, [v for v in reads if v in self.params or v in self.repeated])
            if self.alike.issuperset(reads) and not eqn.effects and not jaxprs.facts(eqn).differs_by_device:
                self.alike.update(eqn.outvars)
            for rule in RULES:
                if (match := rule.matches(self, site)) not in (None, False):
                    rule.act(self, site, match)
                    for var in eqn.outvars:
                        self.made_in.setdefault(var, len(self.drafts) - 1)
                    break

    # A predicate returns the last argument of its action, or None or False if the rule does not match.

    def keep_together(self, site: Site, _) -> None:
        """Put all equations from the first `jax.new_ref` to the last use of a ref into one segment, in their order."""
        if site.index == self.between_refs.start:
            self.drafts.append(Draft(BlockSegment, []))
        self.drafts[-1].eqns.append(site.eqn)

    def run_in_place(self, site: Site, _) -> None:
        """Add the equation to the last segment if this is a plain segment, and otherwise to a new plain segment."""
        if not self.drafts[-1].is_plain:
            self.drafts.append(Draft(BlockSegment, [], is_plain=True))
        self.drafts[-1].eqns.append(site.eqn)

    def of_shard(self, site: Site) -> ShardedParam | None:
        """Return the result of a slice, cast or other view if a parameter's shard is enough to compute it, or None."""
        # There is an operand, because the rule "activations" took every equation that reads no parameter.
        eqn, first = site.eqn, site.eqn.invars[0]
        # A slice of each shard is a shard of the slice only if every device slices at the same index.
        alone = site.touched == [first] and first in self.params and self.alike.issuperset(site.reads[1:])
        alone &= eqn.primitive.name not in OF_STACKS or eqn.outvars[0] in self._scanned
        return extended(self.params[first], eqn) if alone else None

    def compute_on_shard(self, site: Site, param: ShardedParam) -> None:
        self.params[site.eqn.outvars[0]] = param

    def of_computation(self, site: Site) -> "Shardwise | None":
        if site.eqn.primitive.name != SHARDWISE:
            return None
        from zerojax.gather.shardwise import Shardwise

        return Shardwise.of(site.eqn, {var: param.stored for var, param in self.params.items()})

    def compute_first(self, site: Site, computation: "Shardwise") -> None:
        self.shardwise.append(computation)
        self.params[site.eqn.outvars[0]] = computation.param

    @functools.cached_property
    def _reductions(self) -> "Analysis":
        from zerojax.gather.reduced import Analysis

        return Analysis(self._jaxpr, self.params, self.repeated, self.alike)

    def reducible(self, site: Site) -> "Chain | None":
        """Return the `Chain` with which shards compute the reduction that an equation belongs to, or None."""
        is_known = lambda v: v in self.params or v in self.repeated or v in self.alike
        if not self._reduces or not all(map(is_known, site.reads)):
            return None
        chain = self._reductions.chain(site.eqn)
        # Statistics that only change a weight (a norm) are computed where the weight is gathered anyway.
        if chain is None or all(self._only_scales(end, site) for end in self._reductions.ends(site.eqn)):
            return None
        return chain

    def reduce_on_shards(self, site: Site, chain: "Chain") -> None:
        """Add a reduction to the first segment of reductions that runs after all values that the reduction reads."""
        from zerojax.gather.reduced import ReducedSegment

        if chain.is_link:
            self.repeat(site, None)
            return
        first = max((self.made_in[v] for v in chain.reads if v in self.made_in), default=-1) + 1
        places = [i for i, draft in enumerate(self.drafts) if draft.make == ReducedSegment.of and i >= first]
        if not places:
            places = [len(self.drafts)]
            self.drafts.append(Draft(ReducedSegment.of, []))
        draft = self.drafts[places[0]]
        draft.eqns.append(site.eqn)
        draft.again |= chain.again
        self.alike.update(site.eqn.outvars)
        self.made_in |= dict.fromkeys(site.eqn.outvars, places[0])

    def is_repeatable(self, site: Site) -> bool:
        size = max((atom.aval.size for atom in site.eqn.invars), default=0)
        of_params = [not compat.is_literal(a) and self._is_of_params(a, size) for a in site.eqn.invars]
        return is_repeatable(site.eqn, of_params)

    def scales(self, site: Site) -> bool:
        """Return whether an equation reads parameters alone, and its result, such as a norm, only scales weights."""
        return self.is_of_params_alone(site) and self._only_scales(site.eqn, site)

    def _is_of_params(self, var: Any, size: int) -> bool:
        """Return whether `var` depends on parameters alone, or is an argument or small value, alike on all devices."""
        is_free = var in self._given or 8 * var.aval.size <= size
        return var in self.params or var in self.repeated or (is_free and var in self.alike)

    def is_of_params_alone(self, site: Site) -> bool:
        """Return whether an equation is plain, and reads only variables for which `_is_of_params` is true."""
        return is_plain(site.eqn) and all(self._is_of_params(var, site.size) for var in site.reads)

    def _only_scales(self, eqn: Any, site: Site) -> bool:
        """Return whether the result of `eqn`, which is at `site` or later, only scales weights; see `only_scales`."""
        from zerojax.gather.clusters import only_scales

        following = self._jaxpr.eqns[site.index + 1 :]
        return only_scales(following, eqn, lambda var: self._is_of_params(var, site.size), self._final)

    def is_expanded(self, site: Site) -> bool:
        """Return whether an equation multiplies small factors into a large matrix that only changes weights."""
        if site.touched or not jaxprs.expands(site.eqn) or not self._given.issuperset(site.reads):
            return False
        (first,) = site.eqn.outvars
        of_params = lambda eqn: any(v in self.params or v in self.repeated for v in jaxprs.variables_in(eqn.invars))
        changed = lambda eqn: () if of_params(eqn) else eqn.outvars
        found = jaxprs.reached([first], lambda var: [v for eqn, _ in self._uses.get(var, ()) for v in changed(eqn)])
        readers = [eqn for var in found for eqn, _ in self._uses.get(var, ())]
        changes = lambda eqn: jaxprs.facts(eqn).changes_weights and eqn.outvars[0].aval.shape == first.aval.shape
        return all(map(changes, readers)) and self._final.isdisjoint(found)

    def is_masked(self, site: Site) -> bool:
        """Return whether an equation changes a weight, for example by a mask, and only one equation reads the result.

        A `jax.custom_vjp` of weights alone counts, too. Its backward pass may be nonlinear (it may clip), so it must
        get the sum of all readers' cotangents. With several readers, the call is therefore a segment.
        """
        eqn = site.eqn
        is_rule = compat.name_of(eqn) == "custom_vjp_call" and self.is_of_params_alone(site)
        if not (is_rule or jaxprs.facts(eqn).changes_weights) or [v.aval.ndim > 1 for v in eqn.outvars] != [True]:
            return False
        (var,) = eqn.outvars
        readers = self._uses.get(var, ())
        may_move = len(readers) == 1 and var not in self._final and not jaxprs.facts(readers[0][0]).is_control

        def is_weight(atom) -> bool:
            if compat.is_literal(atom) or atom.aval.shape != var.aval.shape:
                return False
            made = self.repeated.get(atom)
            return atom in self.params or (made is not None and made.primitive.name != "broadcast_in_dim")

        return may_move and any(map(is_weight, eqn.invars))

    def repeat(self, site: Site, _) -> None:
        self.repeated |= dict.fromkeys(site.eqn.outvars, site.eqn)

    def gather_per_iteration(self, site: Site, loop: compat.LoopEqn) -> None:
        """Gather one layer per iteration. Parameters that the loop needs whole are gathered before the loop."""
        from zerojax.gather.scan import ScanSegment

        eqn = site.eqn

        def stays_sharded(i: int, var: Any) -> bool:
            if var not in self.params or loop.length == 0:
                return False
            return i < loop.consts or (i >= loop.consts + loop.carry and self.params[var].leaf.dim != 0)

        early = gathering(v for i, v in enumerate(eqn.invars) if v in site.touched and not stays_sharded(i, v))
        loop_draft = Draft(ScanSegment, [eqn], reads=early.gathers)
        self.drafts += [early, loop_draft] if early.gathers else [loop_draft]

    def _root_of(self, reads: Sequence) -> Any:
        """Return the variable of the parameter from which `reads` are computed; None unless it is exactly one."""
        stops = lambda var: var in self.params or var in self.roots or var not in self.repeated
        behind = jaxprs.reached(reads, lambda v: () if stops(v) else jaxprs.variables_in(self.repeated[v].invars))
        found = {self.params[var].root if var in self.params else self.roots.get(var) for var in behind} - {None}
        return found.pop() if len(found) == 1 else None

    @functools.cached_property
    def made(self) -> dict:
        return jaxprs.makers(self._jaxpr.eqns)

    def _joined(self, site: Site) -> "Joined | None":
        """Return the block that gathers the only parameter of an equation, or None if the equation cannot join it."""
        place = self._blocks.get(root := self._root_of(site.reads))
        if place is None or not is_plain(site.eqn):
            return None
        from zerojax.gather.clusters import block_to_join

        return block_to_join(self, site.eqn, root, place)

    def of_cluster(self, site: Site) -> "Joined | None":
        """Return a cluster's block if the equation reads only results of the cluster and alike values, or None."""
        return None if site.touched or self.roots.keys().isdisjoint(site.reads) else self._joined(site)

    def of_one_param(self, site: Site) -> "Joined | None":
        """Return the block that gathers the only parameter of an equation, if the results are at most half its size."""
        size = 2 * sum(var.aval.size for var in site.eqn.outvars)
        found = self._joined(site)
        return found if found and size <= found.root.aval.size else None

    def join_block(self, site: Site, block: "Joined") -> None:
        draft = self.drafts[block.place]
        draft.eqns.append(site.eqn)
        draft.again |= block.again
        self.roots |= dict.fromkeys(site.eqn.outvars, block.root)
        self.made_in |= dict.fromkeys(site.eqn.outvars, block.place)

    def gather_for_use(self, site: Site, _) -> None:
        roots = {self._root_of([var]) for var in site.touched} - {None}
        self._blocks |= dict.fromkeys(roots, len(self.drafts))
        if len(roots) == 1 and self.is_of_params_alone(site):
            self.roots |= dict.fromkeys(site.eqn.outvars, *roots)
        self.drafts.append(Draft(BlockSegment, [site.eqn]))


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule by which the planner handles equations of one kind."""

    name: str  # as in docs/engine.md
    example: str  # a line of a loss that falls under the rule, where `w` is a parameter
    matches: Callable[[Decisions, Site], Any]  # returns the last argument of `act`; None or False: no match
    act: Callable[[Decisions, Site, Any], None]  # records the decision


RULES = (
    # A jaxpr cannot return a ref, so all equations between the first and the last use of refs must share a segment.
    Rule("state", "ref[...] += x", lambda so_far, site: site.index in so_far.between_refs, Decisions.keep_together),
    Rule("cluster", "jnp.tanh(u @ w @ v)", Decisions.of_cluster, Decisions.join_block),
    Rule("expanded", "x @ (w + a @ b)", Decisions.is_expanded, Decisions.repeat),
    Rule("activations", "jnp.tanh(x)", lambda so_far, site: not site.touched, Decisions.run_in_place),
    Rule("on the shard", "w.astype(jnp.bfloat16)", Decisions.of_shard, Decisions.compute_on_shard),
    Rule("quantised", "jnp.round(w / scale)", Decisions.of_computation, Decisions.compute_first),
    Rule("repeated", "x @ w.T", Decisions.is_repeatable, Decisions.repeat),
    Rule("reduction", "jnp.sum(w**2)", Decisions.reducible, Decisions.reduce_on_shards),
    Rule("scale", "x @ (w / jnp.linalg.norm(w))", Decisions.scales, Decisions.repeat),
    Rule("masked", "x @ (w * mask)", Decisions.is_masked, Decisions.repeat),
    Rule("shared gather", "x @ w; u @ w @ v", Decisions.of_one_param, Decisions.join_block),
    Rule(
        "loop over layers",
        "lax.scan(lambda x, w: (x @ w, None), x, w)",
        lambda so_far, site: compat.loop_of(site.eqn) if not so_far.is_of_params_alone(site) else None,
        Decisions.gather_per_iteration,
    ),
    Rule("use", "x @ w", lambda so_far, site: True, Decisions.gather_for_use),
)


def is_repeatable(eqn: Any, of_params: Sequence[bool]) -> bool:
    """Return whether an equation reads parameters alone and may be repeated in each segment that needs it.

    `of_params` says for each operand whether it is computed from parameters alone.
    """
    if not all(on or compat.is_literal(atom) for atom, on in zip(eqn.invars, of_params, strict=True)):
        return False
    is_control = jaxprs.facts(eqn).is_control and compat.name_of(eqn) != "custom_jvp_call"
    if eqn.effects or is_control or compat.is_remat(eqn) or compat.called(eqn) is not None:
        return False
    # A result of at most half the parameter's size (a norm, a row) is stored, which is cheap. Repeated norms would make
    # a penalty on all parameters one segment, which gathers all parameters at once.
    return all(2 * math.prod(var.aval.shape) > math.prod(a.aval.shape) for var in eqn.outvars for a in eqn.invars)


def _between_refs(jaxpr: Any) -> range:
    """Return the indices of the equations from the first `jax.new_ref` to the last use of a ref."""
    touching = [i for i, eqn in enumerate(jaxpr.eqns) if any(map(compat.is_ref, [*eqn.invars, *eqn.outvars]))]
    return range(touching[0], touching[-1] + 1) if touching else range(0)
