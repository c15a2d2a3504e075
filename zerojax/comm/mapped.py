"""Define `mapped`, a `jax.shard_map` that `checkify` does not look into.

`checkify` carries its error through every equation. After one `shard_map` the error has one entry per device, and after
the next `shard_map` one entry per pair of devices. A step of zerojax has dozens of `shard_map`s. The error would take
terabytes, and checks after the first `shard_map` fail because shapes do not fit. Automatic checks need not look inside,
because the results show any NaN. So each `shard_map` of zerojax is one equation for which `checkify` has no rule.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh

from zerojax import compat, jaxprs
from zerojax.layout.leaf import replace_items
from zerojax.primitives import MAPPED


def mapped(fn: Callable, *, mesh: Mesh, in_specs: Any, out_specs: Any, axis_names: set[str]) -> Callable:
    """Map a function over shards, as `jax.shard_map` does with these arguments and `check_vma=False`.

    The plain `shard_map` is used if the call is differentiated or batched by `vmap`, or if `fn` creates a `jax.Ref`.
    """
    over_shards = jax.shard_map(
        fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axis_names, check_vma=False
    )

    def call(*args):
        closed, shapes = jax.make_jaxpr(over_shards, return_shape=True)(*args)
        jaxpr, consts = compat.opened(closed)
        if compat.makes_refs(jaxpr.effects):  # JAX removes refs with a rule per primitive: mapped_p has no such rule
            return over_shards(*args)
        if any(map(compat.is_check, jaxpr.effects)):
            raise NotImplementedError(
                "The loss calls checkify.check in device view, where each device would have its own error. "
                'Use view="global", or return what you check as an auxiliary result.'
            )
        bare = compat.part_of(jaxpr, jaxpr.eqns, [*compat.constvars_of(jaxpr), *jaxpr.invars], jaxpr.outvars)
        results = mapped_p.bind(*consts, *jax.tree.leaves(args), jaxpr=bare)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call


def _evaluate(*args: Any, jaxpr: Any) -> list:
    return jaxprs.run(jaxpr, (), *args)


def _abstract(*_: Any, jaxpr: Any) -> tuple[list, Any]:
    return [atom.aval for atom in jaxpr.outvars], jaxpr.effects


def _differentiated(primals: Sequence, tangents: Sequence, *, jaxpr: Any) -> tuple[list, list]:
    moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    of_moving = lambda *some: _evaluate(*replace_items(primals, moving, some), jaxpr=jaxpr)
    results, found = jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])
    zero = lambda x: ad.Zero(jax.typeof(x).to_tangent_aval())
    return results, [zero(x) if t.dtype == jax.dtypes.float0 else t for x, t in zip(results, found, strict=True)]


def _batched(args: Sequence, dims: Sequence, *, jaxpr: Any) -> tuple[list, list]:
    results = jax.vmap(lambda *args: _evaluate(*args, jaxpr=jaxpr), in_axes=tuple(dims))(*args)
    return results, [0] * len(results)


mapped_p = Primitive(MAPPED)
mapped_p.multiple_results = True
mapped_p.def_impl(_evaluate)
mapped_p.def_effectful_abstract_eval(_abstract)
ad.primitive_jvps[mapped_p] = _differentiated
batching.primitive_batchers[mapped_p] = _batched
# JAX calls this rule if a value has a hijax type. The plain `shard_map` lowers such values.
setattr(mapped_p, "to_lojax", _evaluate)  # noqa: B010
mlir.register_lowering(mapped_p, mlir.lower_fun(_evaluate, multiple_results=True))
