"""Find the quantised and straight-through weights of a loss, so that devices compute parts of them before the gather.

A quantised weight is computed element by element from parameters and from values that are alike on all devices, such as
a maximum of the weight. `hoisted` moves the computation out of remats, calls of `zerojax.block` and loops to the start
of the loss, as a `shardwise` equation (see `shardwise`). Devices then gather a narrow value. Where the loss uses the
weight, a `widen` equation computes it from this value. If the weight can be computed from several values, without the
parameters, devices gather the one with the narrowest type. A straight-through weight
`w + stop_gradient(quantised(w) - w)` has no such value, so devices gather the weight itself.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zerojax import compat, jaxprs, names, signatures
from zerojax.gather.parts import dims_of, function_of, without_calls
from zerojax.gather.sharded_param import quantises
from zerojax.gather.shardwise import Computation, Shardwise, shardwise_p, widen_p
from zerojax.gather.unread import is_small, spared
from zerojax.layout.leaf import Leaf


class Request(NamedTuple):
    """A weight that a jaxpr takes as an argument instead of computing it.

    `of` computes the requested values from the jaxpr's arguments at the indices `operands`. Given these values, the
    jaxpr does not compute its variables `targets`. Instead, `widened(arguments, requested values)` returns `targets`.
    """

    operands: tuple[int, ...]
    of: Computation
    targets: list
    widened: Callable[[Sequence, Sequence], Sequence] = lambda args, values: values

    def bind(self, values: Sequence, constants: int = 0) -> list:
        """Add a `shardwise` equation to the trace that is running.

        `values` are the arguments of the jaxpr. The last `constants` of them are constants of the loss.
        """
        fixed = frozenset(k for k, i in enumerate(self.operands) if i >= len(values) - constants)
        return shardwise_p.bind(*(values[i] for i in self.operands), of=dataclasses.replace(self.of, fixed=fixed))


def hoisted(jaxpr: Any, leaves: Sequence[Leaf | None], alike: Sequence[bool], constants: int) -> tuple[Any, Sequence]:
    """Return `(new jaxpr, consts)`. The new jaxpr begins with `shardwise` equations that compute the quantised weights.

    If `Shardwise.of` rejects one of these weights, `jaxpr` is returned unchanged. For each argument, `leaves` has the
    layout of a sharded parameter, or None, and `alike` says whether all devices have the same value. The last
    `constants` arguments are constants of the loss.
    """
    # Equations are kept if a result needs them. An effect, or a write to a ref, has no result, and would be lost.
    if signatures.has_effects(jaxpr):
        return jaxpr, ()
    triples = zip(jaxpr.invars, leaves, alike, strict=True)
    given = {v: leaf and leaf.dim for v, leaf, on in triples if on or leaf is not None}
    closed, requests = _rewritten(jaxpr, given)
    if not requests:
        return jaxpr, ()

    def run(*args):
        values = [x for request in requests for x in request.bind(args, constants)]
        return jaxprs.run(*compat.opened(closed), *args, *values)

    new, consts = compat.opened(jax.make_jaxpr(run)(*(v.aval for v in jaxpr.invars)))
    layouts = {v: leaf for v, leaf in zip(new.invars, leaves, strict=True) if leaf is not None}
    found = [Shardwise.of(eqn, layouts) for eqn in new.eqns if eqn.primitive is shardwise_p]
    return (new, consts) if all(found) else (jaxpr, ())


def _rewritten(jaxpr: Any, given: Mapping) -> tuple[Any, list[Request]]:
    """Rewrite a jaxpr and its inner jaxprs to take quantised weights as arguments. Return `(closed jaxpr, requests)`.

    The closed jaxpr takes the requested values as its last arguments. `given` maps an argument that is a parameter to
    its divided dim, and an argument that is alike on all devices to None.
    """
    avals = [v.aval for v in jaxpr.invars]
    places = {i: given[v] for i, v in enumerate(jaxpr.invars) if v in given}
    by_place = lambda jaxpr: {jaxpr.invars[i]: dim for i, dim in places.items()}
    closed = jax.make_jaxpr(functools.partial(jaxprs.inline_calls, jaxpr, (), stops=names.is_block))(*avals)
    jaxpr, consts = compat.opened(closed)
    dims = dims_of(jaxpr, by_place(jaxpr))
    inner = lambda eqn, values: spared(eqn, values, dims) or _inside(eqn, values, dims)
    closed = jax.make_jaxpr(lambda *args: jaxprs.evaluate(jaxpr, consts, args, inner))(*avals)
    jaxpr, consts = compat.opened(closed)
    jaxpr = jaxpr.replace(eqns=jaxprs.alive(jaxpr))
    chosen = chosen_values(jaxpr, dims_of(jaxpr, by_place(jaxpr)))
    requests = [_request(jaxpr, consts, eqn_or_var, by_place(jaxpr)) for eqn_or_var in chosen]
    requests = [request for request in requests if request is not None]
    if not requests:
        return closed, []
    targets = [var for request in requests for var in request.targets]
    rest = function_of(jaxpr, consts, [*jaxpr.invars, *targets], jaxpr.outvars)

    def run(*args):
        own, extra = args[: len(avals)], list(args[len(avals) :])
        values: list = []
        for request in requests:
            size = len(request.of.head.out_avals)
            values += request.widened(own, extra[:size])
            del extra[:size]
        return rest(*own, *values)

    extra = [aval for request in requests for aval in request.of.head.out_avals]
    return jax.make_jaxpr(run)(*avals, *extra), requests


def _inside(eqn: Any, values: Sequence, dims: Mapping) -> Sequence | None:
    """Evaluate a remat, layer or loop with the weights that its body requests. Return None if it requests none."""
    loop, is_remat = compat.loop_of(eqn), compat.is_remat(eqn)
    is_block = compat.called(eqn) is not None
    of_params = any(dims.get(v) is not None for v in jaxprs.variables_in(eqn.invars))
    if not (loop or is_remat or is_block) or not of_params:
        return None
    body, _ = compat.opened(compat.params_of(eqn)["jaxpr"])
    if compat.constvars_of(body) or not any(map(quantises, jaxprs.equations(body))):
        return None
    first = len(body.invars) if loop is None else loop.consts  # the first operand that is carried
    rows = first if loop is None else first + loop.carry  # the first operand of which iterations read rows
    given = {}
    for i, (var, atom) in enumerate(zip(body.invars, eqn.invars, strict=True)):
        dim = None if compat.is_literal(atom) else dims.get(atom, -1)
        if dim is not None and i >= rows:
            dim -= 1  # A row has no dim of layers. If the stack is divided over its layers, this gives -1.
        if dim != -1 and dim != -2 and not first <= i < rows:
            given[var] = dim
    closed, requests = _rewritten(body, given)
    # If iterations quantise one parameter with different scales, each would need another copy of the parameter.
    is_shared = lambda i: i < rows and given[body.invars[i]] is not None
    if not requests or any(max(r.operands) >= rows and any(map(is_shared, r.operands)) for r in requests):
        return None
    operands, by_row = list(values), [*range(rows, len(values))]
    for request in requests:
        batched = [i >= rows for i in request.operands]
        request = _batched(request, batched, eqn) if any(batched) else request
        found = request.bind(values)
        by_row += range(len(operands), len(operands) + len(found)) if any(batched) else ()
        operands += found
    # A body that takes a narrow weight no longer reads the parameter, which would be gathered if it stayed an argument.
    jaxpr, consts = compat.opened(closed)
    _, reads = jaxprs.needed_for(jaxpr.eqns, jaxpr.outvars)
    read = [i for i, v in enumerate(jaxpr.invars) if v in reads]
    run = function_of(jaxpr, consts, [jaxpr.invars[i] for i in read], jaxpr.outvars)
    args = [operands[i] for i in read]
    if is_remat:
        return jaxprs.evaluate_remat(eqn, args, lambda _, __, values: run(*values))
    if loop is not None:
        return _scan(loop, run, read, operands, by_row)
    named = lambda *args: run(*args)
    named.__name__ = names.BLOCK
    return jax.jit(named)(*args)


def _scan(loop: Any, run: Any, read: Sequence[int], given: Sequence, by_row: Sequence[int]) -> list:
    """Run a loop. Its body `run` takes the operand `given[i]` for each i in `read`, row by row if i is in `by_row`."""
    rows = loop.consts + loop.carry
    by_row = [i for i in by_row if i in read]

    def iteration(values):
        at = dict(zip([*range(rows), *by_row], values, strict=True))
        return run(*(at.get(i, given[i]) for i in read))

    return loop.evaluate(iteration, [*given[:rows], *(given[i] for i in by_row)])


def _batched(request: Request, batched: Sequence[bool], eqn: Any) -> Request:
    """Convert a loop body's request to one for all iterations. Each of them reads one row of a `batched` operand."""
    axes = [0 if on else None for on in batched]
    loop = compat.loop_of(eqn)
    assert loop is not None
    avals = [eqn.invars[i].aval for i in request.operands]

    def over_layers(closed):
        fn = jax.vmap(functools.partial(jaxprs.run, *compat.opened(closed)), in_axes=axes, axis_size=loop.length)
        return jax.make_jaxpr(fn)(*avals)

    of = dataclasses.replace(request.of, head=over_layers(request.of.head), full=over_layers(request.of.full))
    return request._replace(of=of)


def chosen_values(jaxpr: Any, dims: Mapping) -> list:
    """Return what to compute on shards: the `shardwise` equations of `jaxpr`, and a tuple of variables per weight.

    A tuple begins with a quantised weight: the last value that shards can compute (`dims`), and from which all uses of
    the weight's parameters can be computed. The other variables in the tuple are small values without derivative that
    depend on the same parameters.
    """
    chosen: list = [eqn for eqn in jaxpr.eqns if eqn.primitive is shardwise_p]
    made, done = jaxprs.makers(jaxpr.eqns), {v for eqn in chosen for v in eqn.outvars}
    # The values that shards can compute, and that the rest of the function reads.
    rest = [eqn.invars for eqn in jaxpr.eqns if not all(v in dims for v in eqn.outvars)]
    read = dict.fromkeys(v for atoms in [*rest, jaxpr.outvars] for v in jaxprs.variables_in(atoms) if v in dims)
    params = {v for v in jaxpr.invars if dims.get(v) is not None}
    params_of = functools.cache(lambda v: frozenset(params.intersection(_cone(v, made))))
    uses = [v for v in read if dims[v] is not None and v not in done]
    fixed = [v for v in read if v not in done and v in made and made[v].primitive.name == "stop_gradient"]
    floats = [v for v in dims if v in made and v not in done and jnp.issubdtype(v.aval.dtype, jnp.floating)]
    weights = [v for v in floats if dims[v] is not None and _is_quantised(v, made)]
    for of in dict.fromkeys(map(params_of, uses)):
        shared = lambda v, of=of: not of.isdisjoint(params_of(v))
        ends = [*filter(shared, uses)]
        found = [v for v in weights if shared(v) and all(_computes(v, end, made, dims) for end in ends)]
        for weight in found[-1:]:
            chosen.append((weight, *(v for v in fixed if shared(v) and is_small(v, weight))))
    return list(dict.fromkeys(chosen))


def _is_quantised(weight: Any, made: Mapping) -> bool:
    """Return whether a weight is quantised by more than casts. The rule "on the shard" is enough for casts."""
    eqns = [made[v] for v in _cone(weight, made) if v in made]
    if all(eqn.primitive.name == "convert_element_type" for eqn in eqns):
        return False
    return any(quantises(one) for eqn in eqns for one in jaxprs.with_inner(eqn))


def _cone(var: Any, made: Mapping) -> dict:
    """Return `var` and all variables from which it is computed. `made` has the equation of each variable."""
    return jaxprs.reached([var], lambda v: jaxprs.variables_in(made[v].invars) if v in made else [])


def _computes(var: Any, end: Any, made: Mapping, dims: Mapping) -> bool:
    """Return whether `end` can be computed from `var`, values that are alike, and values much smaller than `var`."""
    is_known = lambda v: v is var or dims.get(v) is None or is_small(v, var)
    reads = lambda v: () if is_known(v) or v not in made else jaxprs.variables_in(made[v].invars)
    return all(is_known(v) or v in made for v in jaxprs.reached([end], reads))


def _request(jaxpr: Any, consts: Sequence, target: Any, given: Mapping) -> Request | None:
    """Return the request for `target`, one of the `chosen_values`. `given` is as in `_rewritten`."""
    wanted = list(target if isinstance(target, tuple) else target.outvars)
    _, reads = jaxprs.needed_for(jaxpr.eqns, wanted)
    operands = tuple(i for i, v in enumerate(jaxpr.invars) if v in reads)
    inputs = [jaxpr.invars[i] for i in operands]
    traced = lambda run: jax.make_jaxpr(run)(*(v.aval for v in inputs))
    if isinstance(target, tuple):
        full = traced(function_of(jaxpr, consts, inputs, wanted))
        return _of_weight(full, operands, wanted, [given[v] for v in inputs])
    of, before = target.params["of"], function_of(jaxpr, consts, inputs, target.invars)

    def behind(closed):
        def run(*args):
            values = before(*args)
            with names.at(target):
                return jaxprs.run(*compat.opened(closed), *values)

        return traced(run)

    return Request(operands, dataclasses.replace(of, head=behind(of.head), full=behind(of.full)), wanted)


def _of_weight(full: Any, operands: tuple[int, ...], targets: list, given: Sequence[int | None]) -> Request | None:
    """Return the request for `targets`, which `full` computes: a quantised weight, and then small values.

    Shards compute the narrowest value from which the weight can be computed, and each use computes the weight from this
    value. Return None if shards cannot compute the weight, or if the narrowest value is a parameter.
    """
    jaxpr, consts = compat.opened(without_calls(full))
    jaxpr = jaxpr.replace(eqns=jaxprs.alive(jaxpr))
    dims, made = dims_of(jaxpr, dict(zip(jaxpr.invars, given, strict=True))), jaxprs.makers(jaxpr.eqns)
    weight, *small_targets = jaxpr.outvars
    if dims.get(weight) is None:
        return None
    same_shape = [v for v, dim in dims.items() if dim is not None and v.aval.shape == weight.aval.shape]
    exact = [v for v in same_shape if v is weight or _is_exact_in(v.aval.dtype, weight.aval.dtype)]
    enough = [v for v in exact if _computes(v, weight, made, dims)]
    narrow = min(reversed(enough), key=lambda v: v.aval.dtype.itemsize)
    if narrow not in made:
        return None
    if narrow is weight:
        return Request(operands, Computation(full, full), targets)
    # `widen` computes the weight from the narrow value, from the scales, and from the operands that are alike.
    depends = jaxprs.dependent_on([v for v in jaxpr.invars if dims[v] is not None], jaxpr.eqns)
    small = {v for v in depends if is_small(v, narrow)}
    late, reads = jaxprs.needed_for(jaxpr.eqns, [weight], {*small, narrow})
    computed_late = {v for eqn in late for v in eqn.outvars}
    scales = [v for v in made if v in reads and v is not narrow and v not in computed_late]
    alike = [i for i, v in enumerate(jaxpr.invars) if v in reads and dims[v] is None]
    inputs = [narrow, *scales, *(jaxpr.invars[i] for i in alike)]
    if not reads <= {*compat.constvars_of(jaxpr), *inputs, *computed_late}:
        return None
    dtype = narrow.aval.dtype
    sent = jnp.dtype({"int4": "int8", "int2": "int8", "uint4": "uint8", "uint2": "uint8"}.get(str(dtype), dtype))
    on_shards = function_of(jaxpr, consts, jaxpr.invars, [narrow, *scales, *small_targets])
    on_use = function_of(jaxpr, consts, inputs, [weight])

    def head(*args):
        value, *others = on_shards(*args)
        return [value.astype(weight.aval.dtype), *others]

    shapes = [narrow.aval.update(dtype=sent), *(v.aval for v in inputs[1:])]
    tail = jax.make_jaxpr(lambda value, *args: on_use(value.astype(dtype), *args))(*shapes)
    count = 1 + len(scales)

    def widened(args, values):
        given = [*values[:count], *(args[operands[i]] for i in alike)]
        return [widen_p.bind(*given, tail=tail, dtype=sent), *values[count:]]

    computation = Computation(jax.make_jaxpr(head)(*(v.aval for v in jaxpr.invars)), full, narrow=sent)
    return Request(operands, computation, targets, widened)


def _is_exact_in(narrow: Any, wide: Any) -> bool:
    """Return whether every number of the type `narrow` is a number of the wider floating type `wide`."""
    if not jnp.issubdtype(wide, jnp.floating) or narrow.itemsize >= wide.itemsize or narrow.kind == "b":
        return False
    return narrow.itemsize == 1 if jnp.issubdtype(narrow, jnp.integer) else jnp.issubdtype(narrow, jnp.floating)
