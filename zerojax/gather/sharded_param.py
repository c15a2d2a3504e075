"""Describe a sharded parameter, and the equations that are applied to its shard before the shard is gathered.

`rules` asks `extended` whether an equation can be applied to the shard. `schedule` asks `ShardedParam.shard` for the
array to gather.

A cast to a narrower type is applied to the shard, because the gather then moves fewer bytes. Slices and changes of
layout that keep the sharded dim are applied to the shard, too (`sliced`). Other equations run after the gather.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax import compat, jaxprs
from zerojax.layout.leaf import Leaf
from zerojax.placement.storage import to_device

# Equations that copy the shard. They are applied only to stacks that a loop scans over, because otherwise the whole
# stack would be gathered before the loop.
OF_STACKS = frozenset({"transpose", "rev", "reshape"})
# All primitives that may be applied to the shard. Of casts, only those to a narrower type are applied.
OF_SHARDS = OF_STACKS | {"slice", "dynamic_slice", "squeeze", "convert_element_type"}


@dataclasses.dataclass(frozen=True)
class ShardedParam:
    """What one use of a sharded parameter gathers: the parameter, or a slice or a cast of the parameter."""

    root: Any  # the variable of the parameter
    stored: Leaf  # the layout of the parameter
    # The layout of this value: its shape and sharded dim, the type in which it is gathered, and a path that consists of
    # the parameter's path and the line that uses it.
    leaf: Leaf
    wide: np.dtype  # the type that the jaxpr expects of the gathered value
    slices: tuple = ()  # equations to apply to the shard, in order
    layer: int | None = None  # the index of the layer, if this is a layer of a scan's stack
    # The order of dims in which the use computes the gradient (`evaluate.orders`). `()` is the parameter's order.
    order: tuple[int, ...] = ()
    # Whether this is a result of a `shardwise` equation instead of a parameter. If it is gathered in a narrower type,
    # it loses no precision, and its cotangent keeps the wide type.
    computed: bool = False

    @property
    def cotangent_dtype(self) -> np.dtype:
        return self.wide if self.computed else self.leaf.dtype

    @property
    def operands(self) -> tuple:
        """Return the variables that the slices read in addition to the parameter, such as the index of a layer."""
        return tuple(v for eqn in self.slices for v in eqn.invars[1:] if not compat.is_literal(v))

    @property
    def key(self) -> tuple:
        """Return the key of this value. Uses in one segment that have the same key share one gather."""
        # JAX's equations define no equality, so the key contains their identity.
        return (self.root, *map(id, self.slices), self.leaf.dtype, self.layer)

    @property
    def is_cast(self) -> bool:
        return self.leaf.dtype != self.root.aval.dtype

    def used(self, line: str, dtype: np.dtype | None, order: tuple[int, ...]) -> "ShardedParam":
        """Return the parameter as the use at `line` ("file.py:12") gathers it, with the gradient's dims in `order`."""
        leaf = dataclasses.replace(self.leaf, path=f"{self.leaf.path} {line}".rstrip())
        # Two casts round differently from one, so a parameter that has been cast keeps its type.
        if dtype is not None and not self.is_cast:
            leaf = dataclasses.replace(leaf, dtype=dtype)
        return dataclasses.replace(self, leaf=leaf, order=order)

    def at_layer(self, layer: int) -> "ShardedParam":
        return dataclasses.replace(self, layer=layer, leaf=self.leaf.with_dims(range(1, len(self.leaf.shape))))

    @property
    def grad_leaf(self) -> Leaf:
        """Return the layout of the gradient, with its dims in the order in which the use computes it."""
        return self.leaf.with_dims(self.order) if self.order else self.leaf

    def to_order(self, grad: jax.Array) -> jax.Array:
        """Transpose a gradient to the order of dims in which its use computes it."""
        first = tuple(range(grad.ndim - len(self.order)))  # A dim of partial sums in front is not moved.
        return lax.transpose(grad, (*first, *(dim + len(first) for dim in self.order))) if self.order else grad

    def from_order(self, grad: jax.Array) -> jax.Array:
        """Undo `to_order`. Also accepts a shard of the gradient."""
        first = tuple(range(grad.ndim - len(self.order)))
        return lax.transpose(grad, (*first, *(np.argsort(self.order) + len(first)))) if self.order else grad

    def shard(self, env: Mapping, zero: jax.Array | None) -> jax.Array:
        """Return this device's shard of the value, on the device and in the gathered type, given the shards in `env`.

        `zero` is a zero that XLA can compute only when the gather may start. It is added to the index of a layer, so
        that the layer is not sliced earlier.
        """
        value = self.sliced(env)
        if self.layer is None:
            return self._as_sent(value)
        assert zero is not None
        return self.row(value, self.layer + zero)

    def row(self, stack: jax.Array, layer: jax.Array) -> jax.Array:
        # A stack in host memory is indexed there, so that only one layer is copied.
        return self._as_sent(lax.dynamic_index_in_dim(stack, layer, 0, keepdims=False))

    def _as_sent(self, value: jax.Array) -> jax.Array:
        return lax.convert_element_type(to_device(value), self.leaf.dtype)

    def sliced(self, env: Mapping) -> jax.Array:
        """Return the parameter's shard after its slices. A shard in host memory stays there if the slices allow it."""
        if not self.slices:
            return env[self.root]
        from zerojax.gather.sliced import sliced_shard

        return sliced_shard(env[self.root], self.slices, env)

    def root_grad(self, grad: jax.Array, env: Mapping, shape: tuple[int, ...]) -> jax.Array:
        """Return the gradient of the parameter's shard, given `grad`, the gradient of the sliced shard.

        `shape` is the shape of the result. It differs from the shard's shape if gradients are sharded over more axes
        than parameters, or if `grad` has partial sums, on one more dim in front.
        """
        if not self.slices:
            return grad
        if grad.ndim > len(self.leaf.shape):
            return jax.vmap(lambda grad: self.root_grad(grad, env, shape[1:]))(grad)
        like = jax.ShapeDtypeStruct(shape, self.root.aval.dtype)
        return jax.linear_transpose(lambda root: self.sliced({**env, self.root: root}), like)(grad)[0]


def root_param(var, leaf: Leaf) -> ShardedParam:
    assert leaf.dim is not None
    dtype = np.dtype(var.aval.dtype)
    leaf = dataclasses.replace(leaf, shape=tuple(var.aval.shape), dtype=dtype)
    return ShardedParam(var, leaf, leaf, dtype)


def carried_by(params: Sequence[ShardedParam]) -> dict[int, np.dtype]:
    """Map a parameter's index to the type of its cotangent, for each parameter that is gathered in another type."""
    return {i: p.cotangent_dtype for i, p in enumerate(params) if p.cotangent_dtype != p.leaf.dtype}


def bytes_of(params: Iterable[ShardedParam]) -> int:
    """Return the bytes of gathered parameters, in the types in which they are gathered. A shared gather counts once."""
    leaves = {param.key: param.leaf for param in params}.values()
    return sum(leaf.bytes for leaf in leaves)


def extended(param: ShardedParam, eqn) -> ShardedParam | None:
    """Return `param` after `eqn` is applied to it, or None if `eqn` cannot be applied to the shard."""
    name = eqn.primitive.name
    if not eqn.outvars or name not in OF_SHARDS:
        return None
    if name == "convert_element_type":
        dtype = eqn.outvars[0].aval.dtype
        if param.is_cast or not narrower(dtype, param.leaf.dtype):
            return None
        dtype = np.dtype(dtype)
        return dataclasses.replace(param, leaf=dataclasses.replace(param.leaf, dtype=dtype), wide=dtype)
    from zerojax.gather.sliced import sliced_leaf

    leaf = sliced_leaf(param.leaf, eqn)
    return None if leaf is None else dataclasses.replace(param, leaf=leaf, slices=(*param.slices, eqn))


def narrower(new, old) -> bool:
    """Return whether `new` and `old` are floating types, and a cast from `old` to `new` saves bytes."""
    both = jnp.issubdtype(new, jnp.floating) and jnp.issubdtype(old, jnp.floating)
    return both and np.dtype(new).itemsize < np.dtype(old).itemsize


def quantises(eqn: Any) -> bool:
    """Return whether an equation rounds to integers, or casts to a type of at most one byte."""
    if eqn.primitive.name != "convert_element_type":
        return jaxprs.facts(eqn).rounds
    dtypes = eqn.params["new_dtype"], eqn.invars[0].aval.dtype
    is_number = [jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer) for dtype in dtypes]
    return all(is_number) and dtypes[0].itemsize == 1 < dtypes[1].itemsize


def scanned_over(jaxpr: Any) -> set:
    """Return the variables that loops scan over, directly or after equations that can be applied to the shard."""
    scanned: set = set()
    for eqn in reversed(jaxpr.eqns):
        if (loop := compat.loop_of(eqn)) is not None:
            scanned.update(v for v in eqn.invars[loop.consts + loop.carry :] if not compat.is_literal(v))
        elif eqn.primitive.name in OF_SHARDS and not scanned.isdisjoint(eqn.outvars):
            scanned.update(v for v in eqn.invars[:1] if not compat.is_literal(v))
    return scanned
