"""Make the forward and the backward pass of one segment, and choose the residuals to store between them.

A segment calls `traced_passes`, which traces the segment's function and its derivative, and returns `Passes`.
`Passes.run` is the forward pass, and `Passes.pull` the backward pass.

Plain autodiff keeps gathered parameters for the backward pass. It also keeps them under other names: transposed,
reshaped, named by `checkpoint_name`, or saved by a remat's policy. So the forward pass is traced together with its
residuals, and `_classified` sorts the residuals by the values that they depend on:

param     a gathered parameter. It is not stored, but gathered again.
other     another input of the segment. It is not stored twice.
derived   a value that depends on gathered parameters alone. It is not stored, but computed again from them. A parameter
          combined with a smaller or stored value, such as a mask or a gain per unit, is derived, too.
saved     everything else: activations. They are stored, as JAX would store them.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from zerojax import compat, jaxprs, names
from zerojax.comm.collectives import Collectives
from zerojax.dims import NOWHERE, UNKNOWN, Follower, RowDims
from zerojax.jaxprs import differentiable
from zerojax.layout.leaf import replace_items


class Sums(NamedTuple):
    """The sums over devices that a segment's backward pass leaves to the later reduction of gradients."""

    later: tuple[int, ...] = ()  # indices of the others whose cotangents may be partial sums
    experts: tuple[tuple[int, tuple[str, ...]], ...] = ()  # `Collectives.experts` of `(*params, *others)`, as pairs

    @classmethod
    def of(cls, later: Iterable[int], experts: Mapping[int, tuple[str, ...]]) -> "Sums":
        return cls(tuple(later), tuple(experts.items()))


Source = tuple[Literal["param", "other", "saved", "derived"], int]


@dataclasses.dataclass(frozen=True, eq=False)
class Passes:
    """The forward and backward pass of `function(params, others) -> results`.

    The equations lack JAX's name scopes `jvp` and `transpose`, which the caller enters.
    """

    forward: Any  # the jaxpr `(*consts, *params, *others) -> (*results, *saved)`
    consts: Sequence  # the values of the first arguments of `forward` and `derive`
    results: int  # the number of results
    active_params: tuple[int, ...]  # indices of the parameters, others and results that have cotangents
    active_others: tuple[int, ...]
    active_results: tuple[int, ...]
    sources: tuple[Source, ...]  # the source of each residual of the backward pass
    derive: Any  # the jaxpr from `(*consts, *derive_reads)` to the residuals whose source is "derived"
    derive_reads: tuple[Source, ...]
    tree: Any  # the structure of JAX's backward function, whose leaves are the residuals
    other_shapes: tuple
    residual_rows: tuple[RowDims, ...]  # which dims of each residual hold the rows of the batch
    result_rows: tuple[RowDims, ...]  # which dims of each active result, and of its cotangent, hold the rows
    is_shared: bool = False  # whether several segments run these passes, each traced once, under `jax.jit`

    @functools.cached_property
    def needed(self) -> frozenset[int]:
        return frozenset(i for source, i in (*self.sources, *self.derive_reads) if source == "param")

    @functools.cached_property
    def needed_others(self) -> frozenset[int]:
        return frozenset(i for source, i in (*self.sources, *self.derive_reads) if source == "other")

    @functools.cached_property
    def run(self) -> Callable[[Sequence, Sequence], tuple[list, list]]:
        return jax.jit(self._run) if self.is_shared else self._run

    def _run(self, params, others) -> tuple[list, list]:
        values = self._evaluated(self.forward, *params, *others)
        return values[: self.results], values[self.results :]

    @functools.cached_property
    def pull(self) -> Callable[..., tuple[list, list]]:
        return jax.jit(self._pull, static_argnames=("comm", "sums", "paired")) if self.is_shared else self._pull

    def _evaluated(self, jaxpr: Any, *args) -> list:
        return jaxprs.run(jaxpr, (), *jaxprs.as_jax_values(self.consts), *args)

    def zero_cotangent(self, result: int) -> jax.Array:
        aval = self.forward.outvars[result].aval
        return compat.zero_cotangent(aval.shape, aval.dtype)

    def _check_types(self, cotangents: Sequence) -> None:
        for cotangent, index in zip(cotangents, self.active_results, strict=True):
            dtype = self.forward.outvars[index].aval.dtype
            if cotangent.dtype != dtype:
                raise TypeError(
                    f"A custom rule in the loss gives a cotangent of {cotangent.dtype} for a value of {dtype} with "
                    f"shape {cotangent.shape}. At stage 3 the backward pass runs in parts, which take cotangents of "
                    f"its results' types. Return the cotangent as {dtype} from the rule, or cast the value to "
                    f"{cotangent.dtype} before the rule."
                )

    def _pull(
        self,
        comm: Collectives,
        params: Sequence,
        others: Sequence,
        saved: Sequence,
        cotangents: Sequence,
        zero: jax.Array | None = None,
        *,
        sums: Sums,
        paired: bool = False,
    ) -> tuple[list, list]:
        """Run the backward pass, and return the cotangents of the active parameters and of the active others.

        The cotangents of parameters may be partial sums, which `comm` reduces later. An entry of `params` or `others`
        may be None if `needed` or `needed_others` does not have its index. Arrays of zeros, such as the array that a
        lookup's gradient is added to, are made from `zero`, so that XLA cannot allocate these arrays before it computes
        `zero`. `paired` says whether both cotangents of a product of activations are computed together (`paired`).
        """
        self._check_types(cotangents)
        pools = {"param": params, "other": others, "saved": saved}
        reads = [pools[pool][i] for pool, i in self.derive_reads]
        if any(map(jaxprs.expands, self.derive.eqns)):
            # Without the barrier, XLA would keep the product from the forward pass.
            reads, _ = jax.lax.optimization_barrier((reads, comm.zero_after(cotangents, self.result_rows)))
        pools["derived"] = self._evaluated(self.derive, *reads)
        values = [*(pools[pool][index] for pool, index in self.sources), *cotangents]
        backward = self._backward(values, paired=paired)
        # The results are the cotangents of the active parameters, and then those of the active others.
        inputs, axes = [*self.active_params, *(len(params) + i for i in self.active_others)], dict(sums.experts)
        experts = {k: axes[i] for k, i in enumerate(inputs) if i in axes}
        count, rows = len(self.active_params), [*self.residual_rows, *self.result_rows]
        later = [count + k for k, i in enumerate(self.active_others) if i in sums.later]
        grads = [k for k in (*range(count), *later) if k not in experts]
        results = comm.backward(backward, values, rows, grads, zero, experts=experts)
        return results[:count], results[count:]

    def _backward(self, values: Sequence, *, paired: bool) -> Any:
        """Return JAX's backward function as a closed jaxpr, which takes `values`: residuals and then cotangents."""
        size = len(self.sources)

        def pull(values):
            return jax.tree.leaves(jax.tree.unflatten(self.tree, values[:size])(list(values[size:])))

        closed = jax.make_jaxpr(pull)(values)
        jaxpr = names.without_transforms(compat.opened(closed)[0], "transpose", "jvp")
        if paired:
            from zerojax.gather.paired import with_pairs

            weights = [pool in ("param", "derived") for pool, _ in self.sources]
            jaxpr = with_pairs(jaxpr, [*weights, *[False] * (len(values) - size)])
        return compat.with_jaxpr(closed, jaxpr)


class KnownRows(NamedTuple):
    """Which dims of a function's arguments and results hold the rows of the batch."""

    others: Sequence[RowDims] = ()  # of each argument that is not a parameter
    results: Sequence[RowDims] = ()  # of each result in the whole program; if empty, the function's trace gives them
    follower: Follower | None = None  # finds the rows in the function's values; without it, all row dims are unknown
    comm: Collectives | None = None  # runs kernels on each device's rows (`on_own_rows`); None: kernels are unchanged


def traced_passes(
    function: Callable,
    params: Sequence,
    others: Sequence,
    *,
    active: Sequence[bool],
    trained: Sequence[bool] = (),
    wanted: Collection[int] | None = None,
    rows: KnownRows,
    carried: Mapping[int, np.dtype] = MappingProxyType({}),
) -> Passes:
    """Trace `function(params, others)`, which returns a list of arrays, and its derivative.

    `params` has the gathered parameters, or their shapes. `trained` says which parameters get cotangents, and `active`
    which others. `wanted` has the indices of the results to differentiate (None: all). If a parameter's gathered type
    has no useful cotangents (int8, float8), `carried` maps its index to the wider type in which it is differentiated.
    """
    active_params = tuple(i for i, on in enumerate(trained) if on and (i in carried or differentiable(params[i].dtype)))
    active_others = tuple(i for i, on in enumerate(active) if on and differentiable(others[i].dtype))
    active_results: tuple[int, ...] = ()
    refs: list[bool] = []  # whether each residual is a ref, for which `both` returns what the ref holds

    def both(params, others):
        def of_active(some_params, some_others):
            nonlocal active_results
            given = replace_items(params, active_params, some_params), replace_items(others, active_others, some_others)
            results = function(*given)
            candidates = range(len(results)) if wanted is None else sorted(wanted)
            active_results = tuple(i for i in candidates if differentiable(results[i].dtype))
            return [results[i] for i in active_results], results

        of_params = [params[i].astype(carried[i]) if i in carried else params[i] for i in active_params]
        primals = of_params, [others[i] for i in active_others]
        _, backward, results = jax.vjp(of_active, *primals, has_aux=True)
        refs.extend(isinstance(x, jax.Ref) for x in jax.tree.leaves(backward))
        return results, jax.tree.map(lambda x: x[...] if isinstance(x, jax.Ref) else x, backward)

    closed, shapes = jax.make_jaxpr(both, return_shape=True)(list(params), list(others))
    results = len(shapes[0])
    given = [*[NOWHERE] * len(params), *rows.others]
    jaxpr, consts = compat.opened(closed if rows.comm is None else rows.comm.on_own_rows(closed, given))
    if any(eqn.primitive.name == "shard_map" for eqn in jaxpr.eqns):
        from zerojax.gather.known_parts import divided

        jaxpr = divided(jaxpr, jaxpr.invars[: len(params)])
    jaxpr = names.without_transforms(jaxpr, "jvp")
    if any(refs):
        from zerojax.gather.ref_residuals import with_refs

        jaxpr = with_refs(jaxpr, refs)
    forward, sources, derive, reads = _classified(jaxpr, len(params), results)
    row_dims: list[RowDims] = [UNKNOWN] * len(jaxpr.outvars)
    if rows.follower is not None:
        row_dims = [*rows.results, *rows.follower.results(jaxpr, given)[len(rows.results) :]]
    return Passes(
        forward=forward,
        consts=consts,
        results=results,
        active_params=active_params,
        active_others=active_others,
        active_results=active_results,
        sources=sources,
        derive=derive,
        derive_reads=reads,
        tree=jax.tree.structure(shapes[1]),
        other_shapes=tuple(v.aval for v in jaxpr.invars[len(params) :]),
        residual_rows=tuple(row_dims[results:]),
        result_rows=tuple(row_dims[i] for i in active_results),
    )


def shared_passes(
    known: dict[Hashable, Passes] | None,
    function: Callable,
    params: Sequence,
    others: Sequence,
    *,
    rows: KnownRows,
    **options: Any,
) -> Passes:
    """Call `traced_passes`, unless the cache `known` has the passes of a segment with inputs of the same types."""
    if known is None:
        return traced_passes(function, params, others, rows=rows, **options)
    chosen = (x if x is None else tuple(x.items() if isinstance(x, Mapping) else x) for x in options.values())
    key = tuple(map(jax.typeof, (*params, *others))), tuple(rows.others), tuple(rows.results), *options, *chosen
    if key not in known:
        passes = traced_passes(function, params, others, rows=rows, **options)
        known[key] = dataclasses.replace(passes, is_shared=True)
    return known[key]


def _classified(jaxpr, params: int, results: int):
    """Sort the residuals into the module's four kinds. Return `(forward, sources, derive, derive_reads)` of `Passes`.

    `params` is the number of arguments that are parameters. The residuals follow the first `results` outputs.
    """
    constvars = compat.constvars_of(jaxpr)
    arguments: dict[Any, Source] = {var: ("param", i) for i, var in enumerate(jaxpr.invars[:params])}
    arguments |= {var: ("other", i) for i, var in enumerate(jaxpr.invars[params:])}
    # Variables that depend on an input other than parameters, or on the result of an equation with effects.
    mixed = jaxprs.dependent_on(
        jaxpr.invars[params:], jaxpr.eqns, lambda eqn, reads: eqn.outvars if reads or eqn.effects else ()
    )
    atoms = jaxpr.outvars[results:]
    # Residuals to store, unless `again` has them. The order is fixed, because every process must make the same program.
    kept = dict.fromkeys(atom for atom in jaxprs.variables_in(atoms) if atom in mixed)
    again = _recomputed(jaxpr, [*kept, *arguments], params, mixed)
    # A residual that is computed again is not stored, but the values that it reads are.
    stored = dict.fromkeys(v for v in itertools.chain(kept, *again.values()) if v in mixed and v not in again)
    saved = {v: i for i, v in enumerate(v for v in stored if v not in arguments)}
    known: dict[Any, Source] = {**arguments, **{atom: ("saved", i) for atom, i in saved.items()}}
    derived: dict[Any, tuple[int, Any]] = {}  # computed once each, in the order of first use
    sources = []
    for atom in atoms:
        key = id(atom) if compat.is_literal(atom) else atom  # a literal is not hashable
        sources.append(known.get(key) or ("derived", derived.setdefault(key, (len(derived), atom))[0]))
    outs = [*jaxpr.outvars[:results], *saved]
    forward = compat.part_of(jaxpr, jaxpr.eqns, [*constvars, *jaxpr.invars], outs)
    wanted = [atom for _, atom in derived.values()]
    # `derive` takes known values as arguments, so it must not compute them.
    eqns = [eqn for eqn in jaxpr.eqns if known.keys().isdisjoint(eqn.outvars)]
    eqns, reads = jaxprs.needed_for(eqns, wanted)
    read = [var for var in known if var in reads]
    derive = compat.part_of(jaxpr, eqns, [*constvars, *read], wanted)
    return forward, tuple(sources), derive, tuple(known[var] for var in read)


def _is_cast_or_broadcast(eqn: Any) -> bool:
    return eqn.primitive.name in ("broadcast_in_dim", "convert_element_type", "reshape")


def _is_by_element(eqn: Any) -> bool:
    """Return whether an equation with one result, or a function with a custom derivative, computes element by element.

    The function may also broadcast small values.
    """
    if (body := compat.evaluated_body(eqn)) is not None:
        cheap = (_is_cast_or_broadcast(inner) or _is_by_element(inner) for inner in body.eqns)
        return len(eqn.outvars) == 1 and all(cheap)
    return jaxprs.facts(eqn).elementwise or jaxprs.facts(eqn).is_view


def _recomputed(jaxpr, kept: Collection, params: int, mixed: Set) -> dict[Any, dict]:
    """Return the residuals that are cheaper to compute again than to store, although they depend on activations, too.

    Such a residual is computed element by element from a parameter of its size. The other values that it reads are
    kept anyway, or take less memory than the residual. The result maps each residual to the values that it reads.
    """
    made = jaxprs.makers(jaxpr.eqns)
    # The parameters, and values that are computed element by element from a parameter of their size.
    of_params = set(jaxpr.invars[:params])
    for eqn in jaxpr.eqns:
        if eqn.effects or not _is_by_element(eqn):
            continue
        (out,) = eqn.outvars
        if any(v in of_params and v.aval.size == out.aval.size for v in jaxprs.variables_in(eqn.invars)):
            of_params.add(out)
    kept = dict.fromkeys(kept)
    recomputed: dict[Any, dict] = {}
    for atom in kept:
        if atom not in of_params or atom not in made:
            continue

        def is_again(var, atom=atom):
            # A broadcast, a cast or a product of low-rank factors is cheap to compute again from smaller operands.
            grown = var in made and (_is_cast_or_broadcast(made[var]) or jaxprs.expands(made[var]))
            return var in mixed and var in made and (var is atom or var not in kept) and (var in of_params or grown)

        behind = jaxprs.reached([atom], lambda v: jaxprs.variables_in(made[v].invars) if is_again(v) else ())
        # the values that its recomputation reads
        reads = {v: None for v in behind if not is_again(v) and (v in mixed or v not in made)}
        # The additional bytes to store, if the residual is computed again.
        more = sum(jaxprs.nbytes(var) for var in reads if var in mixed and var not in kept)
        if more < jaxprs.nbytes(atom):
            recomputed[atom] = reads
    return recomputed
