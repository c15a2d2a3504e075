"""Compute quantised weights on shards at the start of each pass, and gather them instead of the parameters.

`narrow` finds the quantised weights of a loss, and adds equations of two primitives:

shardwise   computes a narrow value (such as an int8 copy of a weight) or a straight-through weight from parameters and
            from values that are alike on all devices. Each device computes its part. The first result counts as a
            sharded parameter (`Shardwise`), which each use gathers.
widen       computes the wide weight from the gathered narrow value, where the weight is used.

A narrow value `q` has no useful cotangent: integers have none, and JAX rounds the cotangent of a float8 to float8. So a
`shardwise` equation returns `z`, which equals `q`, but has the type of the wide weight `y`. The shard of `z` is stored
in the type of `q`, so the gather moves `q`. In the backward pass, `widen` gives the cotangent of `y` to
`z` unchanged, and this cotangent is reduced like a gradient. At the end of the pass, the derivative of the whole
computation of `y` is evaluated on the shards of the reduced cotangent (`Shardwise.pull`).
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive

from zerojax import compat, jaxprs
from zerojax.comm.collectives import Collectives
from zerojax.gather.on_parts import Division, Split, evaluate_on_shards, splits_of
from zerojax.gather.parts import bare, both_passes, result_dims, with_cotangent_of, without_calls
from zerojax.gather.sharded_param import ShardedParam
from zerojax.layout.leaf import Leaf
from zerojax.primitives import SHARDWISE, WIDEN

shardwise_p = Primitive(SHARDWISE)
shardwise_p.multiple_results = True
widen_p = Primitive(WIDEN)


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """The two functions of a `shardwise` equation, as closed jaxprs of the same arguments."""

    # Returns `(z, *scales)`. The scales are small values of parameters that `widen` reads. All devices have them.
    head: Any
    full: Any  # returns the wide weight `y`
    # The indices of the arguments that are constants, which get no cotangent. If a function with a custom derivative
    # closes over a constant, JAX cannot differentiate with respect to the constant.
    fixed: frozenset[int] = frozenset()
    narrow: Any = None  # the type in which `z` is stored and gathered; None for the type of `z`


@shardwise_p.def_abstract_eval
def _of_shardwise(*_: Any, of: Computation) -> list:
    return [bare(var) for var in compat.opened(of.head)[0].outvars]


@widen_p.def_abstract_eval
def _of_widen(*_: Any, tail: Any, dtype: Any) -> Any:
    return bare(compat.opened(tail)[0].outvars[0])


def evaluate_widen(eqn: Any, z: jax.Array, others: Sequence) -> list:
    """Evaluate a `widen` equation: compute the weight from its gathered quantised value `z`.

    `z` has the type that was gathered. But if `z` needs a cotangent, `z` has the floating type before quantisation.
    """
    tail, consts = compat.opened(eqn.params["tail"])
    (value,) = jaxprs.run(tail, consts, z.astype(eqn.params["dtype"]), *others)
    return [value if z.dtype == eqn.params["dtype"] else with_cotangent_of(value, z)]


@jax.custom_jvp
def _differentiated_once(x: Any) -> Any:
    """Return `x`. Raise an error if JAX differentiates this function, as only a second derivative of the loss does."""
    return x


@_differentiated_once.defjvp
def _refuse(*_: Any) -> Any:
    raise TypeError(
        "A second derivative of a loss with a quantised weight was asked for. Stage 3 quantises the shards of weights, "
        "and this computation has no second derivative. Use stage 2, or leave the quantisation out of this derivative."
    )


@dataclasses.dataclass(frozen=True)
class Shardwise:
    """A `shardwise` equation, whose operands are arguments of a program."""

    eqn: Any
    leaves: tuple[Leaf | None, ...]  # for each operand, its layout if it is a sharded parameter
    leaf: Leaf  # the layout of the first result, `z`

    @classmethod
    def of(cls, eqn: Any, layouts: Mapping[Any, Leaf]) -> "Shardwise | None":
        """Return `eqn` with the layout of its first result, or None if devices cannot compute it on their shards.

        Devices can compute the result on shards if the derivative can be computed on parts, too. All parameters must
        be in device memory, be divided in dims of the same size over the same axes, and have gradients that are not
        sharded further. `layouts` has the layouts of the program's sharded parameters.
        """
        leaves = tuple(layouts.get(v) for v in eqn.invars)
        first = next(leaf for leaf in leaves if leaf is not None)
        same = {(x.axes, x.shards, x.shape[x.dim]) for x in leaves if x is not None and x.dim is not None}
        shape = eqn.outvars[0].aval.shape
        others = first.others[len(first.others) - len(shape) :] if first.others else ()
        leaf = dataclasses.replace(first, shape=shape, dtype=np.dtype(eqn.outvars[0].aval.dtype), others=others)
        found = cls(eqn, leaves, leaf)
        if len(same) != 1 or any(x.further > 1 or x.host for x in leaves if x is not None):
            return None
        dim = result_dims(found._head, found._dims)[0]
        if dim is None or dim < 0:
            return None
        found = dataclasses.replace(found, leaf=dataclasses.replace(leaf, dim=dim))
        dims = result_dims(found._derivative, [*found._dims, dim])
        return found if dims == [found._dims[i] for i in found._moving] else None

    @property
    def param(self) -> ShardedParam:
        return ShardedParam(self.eqn.outvars[0], self.leaf, self.leaf, self.leaf.dtype, computed=True)

    @property
    def scales(self) -> Sequence:
        """Return the variables of the other results; see `Computation`."""
        return self.eqn.outvars[1:]

    @functools.cached_property
    def _dims(self) -> list[int | None]:
        return [leaf and leaf.dim for leaf in self.leaves]

    @functools.cached_property
    def _head(self) -> Any:
        return without_calls(self.eqn.params["of"].head)

    @functools.cached_property
    def _moving(self) -> list[int]:
        """Return the indices of the operands that get cotangents."""
        fixed = self.eqn.params["of"].fixed
        return [i for i, v in enumerate(self.eqn.invars) if i not in fixed and jaxprs.differentiable(v.aval.dtype)]

    @functools.cached_property
    def _derivative(self) -> Any:
        """Return the derivative of `full`, as the jaxpr of a function of `(*operands, cotangent)`.

        The cotangent is that of the weight. The results are the cotangents of the operands `_moving`.
        """
        full, weight = compat.opened(self.eqn.params["of"].full), {0: self.eqn.outvars[0]}
        run = lambda values: jaxprs.run(*full, *values)
        return without_calls(both_passes(run, self.eqn.invars, self._moving, weight, results="none"))

    @functools.cached_property
    def _splits(self) -> list[Split | None]:
        return splits_of([*self._dims, self.leaf.dim], Division.of(self.leaf))

    def compute(self, comm: Collectives, env: Mapping) -> list[jax.Array]:
        """Return `(z, *scales)`, given the program's arguments in `env`. `z` is divided like a parameter."""
        values, (*given, of_z) = [_differentiated_once(env[v]) for v in self.eqn.invars], self._splits
        # The padding of `z` is 0, as in storage, because a quantised gather computes a scale from it.
        wanted = [of_z, *[None] * len(self.scales)]
        z, *scales = evaluate_on_shards(comm, self._head, values, given, wanted)
        return [z if (narrow := self.eqn.params["of"].narrow) is None else z.astype(narrow), *scales]

    def pull(self, comm: Collectives, env: Mapping, cotangent: jax.Array) -> dict[Any, jax.Array]:
        """Return the cotangent of each operand, given the reduced cotangent of `z`.

        A parameter's cotangent is divided like the parameter. In device view, any other operand's cotangents are
        partial sums, whose sum over all devices is the derivative. If `cotangent` has one more dim in front, with one
        partial sum per group of devices, the cotangents of parameters have this dim, too.
        """
        if cotangent.ndim == len(self.leaf.shape):
            found = self._pulled(comm, env, cotangent)
        else:
            pulled = jax.vmap(lambda part: self._pulled(comm, env, part), spmd_axis_name=comm.across(self.leaf))
            triples = zip(pulled(cotangent), self._results(), strict=True)
            found = [x if leaf is not None else x.sum(0) if linear else x.max(0) for x, (_, leaf, linear) in triples]
        return dict(zip((v for v, _, _ in self._results()), found, strict=True))

    def _results(self) -> list[tuple[Any, Leaf | None, bool]]:
        """Return, for each result of `_derivative`, `(operand, layout of the operand, whether the result is linear)`.

        A linear result depends on the cotangent. The other results are zeros, or new values for parameters that have no
        gradient, such as the scales of Flax's FP8 layers.
        """
        jaxpr, _ = compat.opened(self._derivative)
        moved = jaxprs.dependent_on([jaxpr.invars[-1]], jaxpr.eqns)
        pairs = zip(self._moving, jaxpr.outvars, strict=True)
        return [(self.eqn.invars[i], self.leaves[i], not compat.is_literal(a) and a in moved) for i, a in pairs]

    def _pulled(self, comm: Collectives, env: Mapping, cotangent: jax.Array) -> list[jax.Array]:
        values, wanted = [*(env[v] for v in self.eqn.invars), cotangent], [self._splits[i] for i in self._moving]
        found = evaluate_on_shards(comm, self._derivative, values, self._splits, wanted)
        if comm.follower is not None:
            return found
        # Each device computes the whole derivative, and the devices' results are summed later.
        losses = self.leaf.shards * (1 if comm.defers else comm.losses // self.leaf.shards)
        is_sum = [linear and leaf is None for _, leaf, linear in self._results()]
        return [x / losses if on else x for x, on in zip(found, is_sum, strict=True)]
