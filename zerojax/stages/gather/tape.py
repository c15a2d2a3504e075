"""Run a program forward, and backward over what the forward pass kept.

The loss is differentiated here, segment by segment, and not by JAX as a whole: only so
can the backward pass gather each parameter again at a time of our choosing, and start
the gather for the segment after next while this one computes.
"""

import dataclasses
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import compat
from zerojax.stages.gather import collectives
from zerojax.stages.gather.program import Program, Segment, Whole
from zerojax.stages.gather.vjp import Passes, differentiable, passes
from zerojax.stages.gather.weight import Weight


@dataclasses.dataclass(frozen=True)
class Options:
    """How parameters are gathered.

    Attributes:
        axis: Mesh axis the parameters are cut over.
        prefetch: How many uses ahead a gather may start; 0 is none.
        bucket_bytes: Leaves of one block travel together up to this many logical bytes.
        reshard_after_forward: Drop gathered parameters after the forward pass.
    """

    axis: str
    prefetch: int
    bucket_bytes: int
    reshard_after_forward: bool

    def gather(self, shards: Sequence[jax.Array], weights: Sequence[Weight]) -> list[jax.Array]:
        """Logical arrays of the shards of `weights`."""
        return collectives.gather(shards, weights, axis=self.axis, bucket_bytes=self.bucket_bytes)

    def reduce_scatter(self, cotangents: Sequence[jax.Array], weights: Sequence[Weight]) -> list[jax.Array]:
        """Shards of the summed cotangents of `weights`."""
        return collectives.reduce_scatter(cotangents, weights, axis=self.axis, bucket_bytes=self.bucket_bytes)


@dataclasses.dataclass(frozen=True, eq=False)
class Static:
    """Something known while tracing that travels with arrays from the forward pass to the backward."""

    value: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fixed:
    """A tree without arrays, around something static."""

    static: Static = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kept:
    """What the backward pass of one segment reads.

    Attributes:
        arrays: Residuals; a plain segment keeps its backward function here.
        operands: What the slices of the segment's weights read.
        whole: Gathered parameters kept for the backward pass; empty when they are gathered again.
        passes: A block's two passes (`Passes`); for a plain segment which results and inputs
            have cotangents.
    """

    arrays: Any
    operands: Any
    whole: Any
    passes: Static = dataclasses.field(metadata={"static": True})


class Gathers:
    """The gathers of one pass over a program, each started a number of uses ahead.

    Lives as long as one trace of one pass. `order` holds the segments that gather, in the
    order of the pass, each with the weights it gathers.
    """

    def __init__(self, order: Sequence[Sequence[Weight]], options: Options):
        self.order = order
        self.options = options
        self.next = 0
        self.ready: dict[int, list] = {}

    def take(self, position: int, env: Mapping, *anchors: Sequence[jax.Array]) -> tuple[list, list[list[jax.Array]]]:
        """Gathered weights of the segment at `position`, and the `anchors`, now behind the barrier.

        Gathers up to `prefetch` positions on are started, no earlier than the anchors are there.
        """
        due = []
        for ahead in range(self.next, min(position + self.options.prefetch + 1, len(self.order))):
            if ahead > position and not all(v in env for w in self.order[ahead] for v in w.operands):
                break
            due.append(ahead)
        self.next += len(due)
        roots = list(dict.fromkeys(w.root for ahead in due for w in self.order[ahead]))
        flat = [x for anchor in anchors for x in anchor]
        flat, values = collectives.tie(flat, [env[root] for root in roots])
        behind = {**env, **dict(zip(roots, values, strict=True))}
        for ahead in due:
            unique = {w.key: w for w in self.order[ahead]}
            shards = [w.shard(behind) for w in unique.values()]
            whole = dict(zip(unique, self.options.gather(shards, list(unique.values())), strict=True))
            self.ready[ahead] = [whole[w.key] for w in self.order[ahead]]
        rest = iter(flat)
        return self.ready.pop(position), [[next(rest) for _ in anchor] for anchor in anchors]


class Returns:
    """Cotangents of gathered weights, on their way to the shards; lives as long as one trace of one pass.

    A scheduler left to itself puts off the gradients of parameters, which nothing waits for,
    and keeps every layer's activations for them. So the gradients of a block must be computed
    before the next block's backward pass starts, and be reduce-scattered before the one after.
    """

    def __init__(self, env: Mapping, found: MutableMapping, options: Options, arguments: frozenset):
        self.env = env
        self.found = found
        self.options = options
        self.arguments = arguments
        self.small: tuple[list, list] = ([], [])
        self.computed: tuple[list[Weight], list] = ([], [])
        self.scattered: tuple[list[Weight], list] = ([], [])

    @property
    def due(self) -> tuple[list, list, list]:
        """What must be there before the next block's backward pass.

        Gradients of whole parameters, of gathered ones, and shards of those of the block before.
        """
        return self.small[1], self.computed[1], self.scattered[1]

    def settle(self, small: list, computed: list, scattered: list) -> None:
        """Take `due` back from behind the barrier; start to reduce-scatter the gathered gradients."""
        for var, cotangent in zip(self.small[0], small, strict=True):
            _add(self.found, var, cotangent)
        self.small = [], []
        for weight, shard in zip(self.scattered[0], scattered, strict=True):
            _add(self.found, weight.root, weight.root_cotangent(shard, self.env))
        weights = self.computed[0]
        self.scattered = weights, self.options.reduce_scatter(computed, weights)
        self.computed = [], []

    def give_others(self, variables: Sequence, cotangents: Sequence) -> None:
        """Add a block's cotangents of what is no gathered weight."""
        for var, cotangent in zip(variables, cotangents, strict=True):
            if var in self.arguments:
                self.small[0].append(var)
                self.small[1].append(cotangent)
            else:
                _add(self.found, var, cotangent)

    def give(self, weights: Sequence[Weight], cotangents: Sequence) -> None:
        """Add the gradients of one block's gathered weights."""
        unique: dict = {}
        for weight, cotangent in zip(weights, cotangents, strict=True):
            _, held = unique.get(weight.key, (weight, None))
            unique[weight.key] = weight, cotangent if held is None else held + cotangent
        together = [weight for weight, _ in unique.values()]
        whole = [cotangent for _, cotangent in unique.values()]
        if self.options.prefetch:
            self.computed = together, whole
        else:
            self.scattered = together, self.options.reduce_scatter(whole, together)

    def finish(self) -> None:
        """Bring the last gradients home."""
        self.settle(*self.due)
        self.settle(*self.due)


def run_forward(program: Program, args: Sequence, active: Sequence[bool] | None, options: Options):
    """Run a program.

    Args:
        program: What to run.
        args: One array for each of its arguments.
        active: For each argument, whether its cotangent is wanted; None if there is no backward pass.
        options: How to gather.

    Returns:
        `(results, kept)`; `kept` has one entry a segment, None where there is nothing to pull back.
    """
    env: dict = dict(zip(program.invars, args, strict=True))
    live = {v for v, on in zip(program.invars, active or (), strict=False) if on and differentiable(v.aval.dtype)}
    gathering = [s for s in program.segments if s.weights]
    gathers = Gathers([s.weights for s in gathering], options)
    kept = []
    for segment in program.segments:
        whole: list = []
        if segment.weights:
            anchors = [v for v in segment.others if v not in program.invars][-1:]
            whole, (tied,) = gathers.take(gathering.index(segment), env, [env[v] for v in anchors])
            env.update(zip(anchors, tied, strict=True))
        results, keep = _segment_forward(segment, whole, env, live, active is not None)
        env.update(zip(segment.results, results, strict=True))
        stays = not options.reshard_after_forward or (bool(segment.weights) and segment is gathering[-1])
        if keep is not None and segment.weights and stays:
            needed = keep.passes.value.needed
            keep = dataclasses.replace(keep, whole=[w if i in needed else None for i, w in enumerate(whole)])
        kept.append(keep)
    return [_read(env, atom) for atom in program.outs], kept


def _read(env: Mapping, atom):
    return atom.val if not isinstance(atom, Whole) and compat.is_literal(atom) else env[atom]


def _segment_forward(segment: Segment, whole: Sequence, env: Mapping, live: set, backward: bool):
    """`(results, kept)` of one segment; adds to `live` the results that have cotangents."""
    others = [env[v] for v in segment.others]
    active = [v in live for v in segment.others]
    trained = [w.root in live for w in segment.weights]
    if not backward or not any(active + trained):
        return segment.run(whole, others), None
    live.update(_live_results(segment, active, trained))
    if not segment.weights:
        return _plain_forward(segment, others, active, live)
    found = passes(segment.run, whole, others, active=active)
    results, saved = found.run(whole, others)
    read = {i for pool, i in found.sources if pool == "other"}
    arrays = saved, [x if i in read else None for i, x in enumerate(others)]
    operands = [env[v] for w in segment.weights for v in w.operands]
    return results, Kept(arrays, operands, [], Static(found))


def _plain_forward(segment: Segment, others: Sequence, active: Sequence[bool], live: set):
    moving = [i for i, on in enumerate(active) if on]
    pulled = [i for i, key in enumerate(segment.results) if key in live]

    def of_moving(moved):
        values = list(others)
        for i, value in zip(moving, moved, strict=True):
            values[i] = value
        results = segment.run((), values)
        return [results[i] for i in pulled], results

    _, backward, results = jax.vjp(of_moving, [others[i] for i in moving], has_aux=True)
    return results, Kept(backward, [], [], Static((pulled, moving)))


def _live_results(segment: Segment, active: Sequence[bool], trained: Sequence[bool]) -> list:
    """Results that may depend on something that wants a cotangent."""
    live = {v for v, on in zip(segment.jaxpr.invars, [*trained, *active], strict=True) if on}
    for eqn in segment.jaxpr.eqns:
        reads = any(not compat.is_literal(a) and a in live for a in eqn.invars)
        if reads and eqn.primitive.name != "stop_gradient":
            live.update(v for v in eqn.outvars if differentiable(v.aval.dtype))
    return [key for key, v in zip(segment.results, segment.jaxpr.outvars, strict=True) if v in live]


def run_backward(
    program: Program, args: Sequence, active: Sequence[bool], kept: Sequence, cotangents: Sequence, options: Options
) -> list:
    """Pull cotangents back through a program.

    Args:
        program: As in `run_forward`.
        args: As in `run_forward`.
        active: As in `run_forward`.
        kept: As `run_forward` gave it.
        cotangents: One for each result; None where it is zero.
        options: As in `run_forward`.

    Returns:
        One cotangent for each argument; None where it is zero.
    """
    env: dict = dict(zip(program.invars, args, strict=True))
    found: dict = {}
    for atom, cotangent in zip(program.outs, cotangents, strict=True):
        if cotangent is not None and (isinstance(atom, Whole) or not compat.is_literal(atom)):
            _add(found, atom, cotangent)
    pairs = [(s, k) for s, k in zip(program.segments, kept, strict=True) if k is not None][::-1]
    for segment, keep in pairs:
        env.update(zip([v for w in segment.weights for v in w.operands], keep.operands, strict=True))
    gathering = [s for s, k in pairs if isinstance(k.passes.value, Passes)]
    gathers = Gathers([_gathered_again(s, k) for s, k in pairs if isinstance(k.passes.value, Passes)], options)
    returns = Returns(env, found, options, frozenset(program.invars))
    for segment, keep in pairs:
        if not isinstance(keep.passes.value, Passes):
            _plain_backward(segment, keep, found)
        else:
            _block_backward(segment, keep, found, gathers, gathering.index(segment), returns)
    returns.finish()
    wanted = [v if on else None for v, on in zip(program.invars, active, strict=True)]
    return [found.get(v) if v is not None else None for v in wanted]


def _add(found: MutableMapping, key, cotangent):
    found[key] = found[key] + cotangent if key in found else cotangent


def _gathered_again(segment: Segment, keep: Kept) -> list[Weight]:
    if keep.whole:
        return []
    return [w for i, w in enumerate(segment.weights) if i in keep.passes.value.needed]


def _pulled(keys: Sequence, variables: Sequence, found: Mapping) -> list | None:
    """Cotangents of the results `keys`, zeros where there is none; None if there is none at all."""
    if not any(key in found for key in keys):
        return None
    return [
        found[k] if k in found else jnp.zeros(v.aval.shape, v.aval.dtype) for k, v in zip(keys, variables, strict=True)
    ]


def _plain_backward(segment: Segment, keep: Kept, found: MutableMapping) -> None:
    live, moving = keep.passes.value
    keys = [segment.results[i] for i in live]
    cotangents = _pulled(keys, [segment.jaxpr.outvars[i] for i in live], found)
    if cotangents is None:
        return
    (moved,) = keep.arrays(cotangents)
    for index, cotangent in zip(moving, moved, strict=True):
        _add(found, segment.others[index], cotangent)


def _block_backward(
    segment: Segment, keep: Kept, found: MutableMapping, gathers: Gathers, position: int, returns: Returns
) -> None:
    two: Passes = keep.passes.value
    keys = [segment.results[i] for i in two.active_results]
    cotangents = _pulled(keys, [segment.jaxpr.outvars[i] for i in two.active_results], found)
    if cotangents is None:
        return
    again, (cotangents, *due) = gathers.take(position, returns.env, cotangents, *returns.due)
    returns.settle(*due)
    whole: list = list(keep.whole) or [None] * len(segment.weights)
    if not keep.whole:
        for index, value in zip(sorted(two.needed), again, strict=True):
            whole[index] = value
    saved, others = keep.arrays
    to_weights, to_others = two.pull(whole, others, saved, cotangents)
    returns.give_others([segment.others[i] for i in two.active_others], to_others)
    returns.give([segment.weights[i] for i in two.active_weights], to_weights)
