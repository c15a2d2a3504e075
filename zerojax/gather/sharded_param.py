"""Describe a sharded parameter, and the equations that are applied to its shard before the shard is gathered.

`rules` asks `extended` whether an equation can be applied to the shard. `schedule` asks `ShardedParam.shard` for the
array to gather.

A cast to a narrower type is applied to the shard, because the gather then moves fewer bytes. A slice that keeps the
sharded dim whole is applied to the shard, so that a gather moves one layer and not a stack of layers. Most other
equations run on the gathered parameter; `_SHARDWISE` has the exceptions.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax import compat, jaxprs
from zerojax.layout.leaf import Leaf
from zerojax.placement.storage import to_device


@dataclasses.dataclass(frozen=True)
class ShardedParam:
    """A sharded parameter that is not gathered yet, or a slice or a cast of such a parameter."""

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
    def cotangent_dtype(self) -> np.dtype | None:
        """Return the type of the cotangent if it differs from the type in which the value is gathered, or None."""
        return self.wide if self.computed and self.is_cast else None

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
        """Return the parameter with the line ("file.py:12"), the gathered type and the gradient's order of one use."""
        leaf = dataclasses.replace(self.leaf, path=f"{self.leaf.path} {line}".rstrip())
        # Two casts round differently from one, so a parameter that has been cast keeps its type.
        if dtype is not None and not self.is_cast:
            leaf = dataclasses.replace(leaf, dtype=dtype)
        return dataclasses.replace(self, leaf=leaf, order=order)

    def at_layer(self, layer: int) -> "ShardedParam":
        return dataclasses.replace(self, layer=layer, leaf=_with_dims(self.leaf, range(1, len(self.leaf.shape))))

    @property
    def grad_leaf(self) -> Leaf:
        """Return the layout of the gradient, with its dims in the order in which the use computes it."""
        return _with_dims(self.leaf, self.order) if self.order else self.leaf

    def to_order(self, grad: jax.Array) -> jax.Array:
        """Transpose a gradient to the order of dims in which its use computes it."""
        first = tuple(range(grad.ndim - len(self.order)))  # A dim of partial sums in front is not moved.
        return lax.transpose(grad, (*first, *(dim + len(first) for dim in self.order))) if self.order else grad

    def from_order(self, grad: jax.Array) -> jax.Array:
        """Undo `to_order`. Also accepts a shard of the gradient."""
        first = tuple(range(grad.ndim - len(self.order)))
        return lax.transpose(grad, (*first, *(np.argsort(self.order) + len(first)))) if self.order else grad

    def shard(self, env: Mapping, zero: Callable[[], jax.Array]) -> jax.Array:
        """Return this device's shard of the value, on the device and in the gathered type, given the shards in `env`.

        `zero()` returns a zero that XLA can compute only when the gather may start. It is added to the index of a
        layer, so that the layer is not sliced earlier.
        """
        value = self.sliced(env)
        return self._as_sent(value) if self.layer is None else self.row(value, self.layer + zero())

    def row(self, stack: jax.Array, layer: jax.Array) -> jax.Array:
        # A stack in host memory is indexed there, so that only one layer is copied.
        return self._as_sent(lax.dynamic_index_in_dim(stack, layer, 0, keepdims=False))

    def _as_sent(self, value: jax.Array) -> jax.Array:
        return lax.convert_element_type(to_device(value), self.leaf.dtype)

    def sliced(self, env: Mapping) -> jax.Array:
        """Return the parameter's shard after its slices. A shard in host memory stays there if the slices allow it."""
        return self._slice(env[self.root], {v: env[v] for v in self.operands})

    def _slice(self, value, operands: Mapping):
        for eqn in self.slices:
            indices = [v.val if compat.is_literal(v) else operands[v] for v in eqn.invars[1:]]
            value = _SHARDWISE[eqn.primitive.name](value, eqn, indices)
        return value

    def root_grad(self, grad: jax.Array, env: Mapping, shape: tuple[int, ...]) -> jax.Array:
        """Return the gradient of the parameter's shard, given `grad`, the gradient of the sliced shard.

        `shape` is the shape of the result. It differs from the shard's shape if gradients are sharded over more axes
        than parameters, or if `grad` has partial sums, on one more dim in front.
        """
        if not self.slices:
            return grad
        if grad.ndim > len(self.leaf.shape):
            return jax.vmap(lambda grad: self.root_grad(grad, env, shape[1:]))(grad)
        operands = {v: env[v] for v in self.operands}
        like = jax.ShapeDtypeStruct(shape, self.root.aval.dtype)
        return jax.linear_transpose(lambda root: self._slice(root, operands), like)(grad)[0]


def root_param(var, leaf: Leaf) -> ShardedParam:
    assert leaf.dim is not None
    dtype = np.dtype(var.aval.dtype)
    leaf = dataclasses.replace(leaf, shape=tuple(var.aval.shape), dtype=dtype)
    return ShardedParam(var, leaf, leaf, dtype)


def carried_by(params: Sequence[ShardedParam]) -> dict[int, np.dtype]:
    """Return the type of a parameter's cotangent, by its index in `params`, where it is not the gathered type."""
    dtypes = (param.cotangent_dtype for param in params)
    return {i: dtype for i, dtype in enumerate(dtypes) if dtype is not None}


def bytes_of(params: Iterable[ShardedParam]) -> int:
    """Return the bytes of gathered parameters, in the types in which they are gathered. Each gather counts once."""
    leaves = {param.key: param.leaf for param in params}.values()
    return sum(leaf.bytes for leaf in leaves)


def extended(param: ShardedParam, eqn) -> ShardedParam | None:
    """Return `param` after `eqn` is applied to it, or None if `eqn` cannot be applied to the shard."""
    if not eqn.outvars:
        return None
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    leaf = param.leaf
    assert leaf.dim is not None
    if name == "convert_element_type":
        if param.is_cast or not narrower(out.dtype, leaf.dtype):
            return None
        dtype = np.dtype(out.dtype)
        return dataclasses.replace(param, leaf=dataclasses.replace(leaf, dtype=dtype), wide=dtype)
    if name not in _SHARDWISE:
        return None
    if name == "transpose":
        leaf = _with_dims(leaf, eqn.params["permutation"])
    elif name == "rev":
        if leaf.dim in eqn.params["dimensions"]:
            return None
    elif name == "reshape":
        kept = _dims_kept(leaf.shape, out.shape)
        first = len(leaf.shape) - kept
        if leaf.dim < first or any(leaf.others[:first]):
            return None
        missing = len(out.shape) - kept
        others = (*[None] * missing, *leaf.others[first:]) if leaf.others else ()
        leaf = dataclasses.replace(leaf, shape=tuple(out.shape), dim=leaf.dim - first + missing, others=others)
    elif name in ("slice", "dynamic_slice"):
        strides = eqn.params.get("strides")
        if out.shape[leaf.dim] != leaf.shape[leaf.dim] or (strides is not None and strides[leaf.dim] != 1):
            return None
        sizes = zip(leaf.others, leaf.shape, out.shape, strict=False)
        others = tuple(name if before == after else None for name, before, after in sizes)
        leaf = dataclasses.replace(leaf, shape=tuple(out.shape), others=others)
    elif name == "squeeze":
        dropped = {d % len(leaf.shape) for d in eqn.params["dimensions"]}
        if leaf.dim in dropped:
            return None
        leaf = _with_dims(leaf, [d for d in range(len(leaf.shape)) if d not in dropped])
    return dataclasses.replace(param, leaf=leaf, slices=(*param.slices, eqn))


def _dims_kept(before: Sequence[int], after: Sequence[int]) -> int:
    """Return the number of trailing dims that a reshape does not change."""
    pairs = zip(reversed(before), reversed(after), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(before), len(after)))


def _with_dims(leaf: Leaf, dims) -> Leaf:
    """Return a leaf with only the given dims, in the given order. The sharded dim must be among them."""
    assert leaf.dim is not None
    dims, others = list(dims), [*leaf.others, *[None] * len(leaf.shape)]
    return dataclasses.replace(
        leaf,
        shape=tuple(leaf.shape[d] for d in dims),
        dim=dims.index(leaf.dim),
        others=tuple(others[d] for d in dims) if leaf.others else (),
    )


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


def _sharded_dim(value, eqn) -> int:
    """Return the dim in which the shard is shorter than the logical value, or -1 if there is none."""
    for dim, (have, full) in enumerate(zip(value.shape, eqn.invars[0].aval.shape, strict=True)):
        if have != full:
            return dim
    return -1


def _slice(value, eqn, indices):
    starts, limits = list(eqn.params["start_indices"]), list(eqn.params["limit_indices"])
    if (dim := _sharded_dim(value, eqn)) >= 0:
        starts[dim], limits[dim] = 0, value.shape[dim]
    if any(stride != 1 for stride in eqn.params["strides"] or ()):
        value = to_device(value)  # XLA copies only contiguous ranges from host memory.
    return lax.slice(value, starts, limits, eqn.params["strides"])


def _dynamic_slice(value, eqn, indices):
    sizes = list(eqn.params["slice_sizes"])
    if (dim := _sharded_dim(value, eqn)) >= 0:
        sizes[dim] = value.shape[dim]
    return lax.dynamic_slice(value, indices, sizes)


def _reshape(value, eqn, indices):
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    kept = _dims_kept(before, after)
    return lax.reshape(to_device(value), (*after[: len(after) - kept], *value.shape[len(before) - kept :]))


# How to apply an equation to a shard, by its primitive: `fn(shard, equation, values of the operands after the first)`.
_SHARDWISE: Mapping[str, Callable] = MappingProxyType(
    {
        "slice": _slice,
        "dynamic_slice": _dynamic_slice,
        "squeeze": lambda value, eqn, _: lax.squeeze(value, eqn.params["dimensions"]),
        "transpose": lambda value, eqn, _: lax.transpose(to_device(value), eqn.params["permutation"]),
        "rev": lambda value, eqn, _: lax.rev(to_device(value), eqn.params["dimensions"]),
        "reshape": _reshape,
    }
)


# All primitives that may be applied to the shard. Of casts, only those to a narrower type are applied.
OF_SHARDS = frozenset(_SHARDWISE) | {"convert_element_type"}

# Equations that copy the shard. The copy is made only for a stack that a loop scans over. Without it, the whole stack
# would be gathered before the loop.
OF_STACKS = frozenset({"transpose", "rev", "reshape"})


def scanned_over(jaxpr: Any) -> set:
    """Return the variables that loops scan over, directly or after equations that can be applied to the shard."""
    scanned: set = set()
    for eqn in reversed(jaxpr.eqns):
        if (loop := compat.loop_of(eqn)) is not None:
            scanned.update(v for v in eqn.invars[loop.consts + loop.carry :] if not compat.is_literal(v))
        elif eqn.primitive.name in OF_SHARDS and not scanned.isdisjoint(eqn.outvars):
            scanned.update(v for v in eqn.invars[:1] if not compat.is_literal(v))
    return scanned
