"""One parameter of which this device holds a shard, and what is done to the shard before it is gathered.

Casts and slices that leave the cut dim whole can be made on the shard: a cast makes the
gather move fewer bytes, and a slice of a stack of layers gathers one layer. Everything
else happens after the gather.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax import compat
from zerojax.layout.leaf import Leaf, shard_extent
from zerojax.offload.host import to_device


@dataclasses.dataclass(frozen=True)
class ShardedParam:
    """A cut parameter, or a slice or cast of one, not gathered.

    Attributes:
        root: The jaxpr's variable that holds the parameter.
        leaf: How the parameter is laid out.
        dim: The cut dim of this value (slicing may have moved it).
        shape: Logical shape of this value.
        dtype: The type in which it is gathered.
        wide: The type the jaxpr expects of the gathered value.
        before: Slices to make on the shard, in order.
        line: Where the model uses it, as "file.py:12".
        turn: Which layer of the stack this is, if it is one layer of a scan's stack.
        order: The dims in the order in which its use makes the gradient; `()` if that is their own.
    """

    root: Any
    leaf: Leaf
    dim: int
    shape: tuple[int, ...]
    dtype: np.dtype
    wide: np.dtype
    before: tuple = ()
    line: str = ""
    turn: int | None = None
    order: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """The leaf, and where it is used: names its collectives in the compiled program."""
        return f"{self.leaf.path} {self.line}".rstrip()

    @property
    def operands(self) -> tuple:
        """Variables the equations on the shard read besides the parameter (a layer's index)."""
        return tuple(v for eqn in self.before for v in eqn.invars[1:] if not compat.is_literal(v))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this device's part, padding included."""
        extent, _ = shard_extent(self.shape[self.dim], self.leaf.shards)
        return (*self.shape[: self.dim], extent, *self.shape[self.dim + 1 :])

    @property
    def key(self) -> tuple:
        """Two weights with one key are one gather."""
        return (self.root, *map(id, self.before), self.dtype, self.turn)

    def narrowed(self, dtype: np.dtype | None) -> "ShardedParam":
        """The same weight gathered in `dtype`, unless it has been cast before: two casts are not one."""
        if dtype is None or self.dtype != self.root.aval.dtype:
            return self
        return dataclasses.replace(self, dtype=dtype)

    def at_turn(self, turn: int) -> "ShardedParam":
        """One layer of this stack."""
        return dataclasses.replace(self, turn=turn, dim=self.dim - 1, shape=self.shape[1:])

    @property
    def as_made(self) -> "ShardedParam":
        """The same weight with its dims in `order`."""
        if not self.order:
            return self
        shape = tuple(self.shape[dim] for dim in self.order)
        return dataclasses.replace(self, dim=self.order.index(self.dim), shape=shape, order=())

    def to_order(self, cotangent: jax.Array) -> jax.Array:
        """A cotangent with its dims as its product made them."""
        return lax.transpose(cotangent, self.order) if self.order else cotangent

    def from_order(self, cotangent: jax.Array) -> jax.Array:
        """The inverse of `to_order`, of a shard too."""
        return lax.transpose(cotangent, np.argsort(self.order)) if self.order else cotangent

    def shard(self, env: Mapping, zero: jax.Array) -> jax.Array:
        """This device's part, sliced, brought to the device and cast, of the parameter whose shard `env` holds.

        `zero` is a zero that is there when the gather may start.
        """
        value = self.sliced(env)
        if self.turn is not None:
            return self.layer(value, self.turn + zero)
        return lax.convert_element_type(to_device(value), self.dtype)

    def layer(self, stack: jax.Array, turn: jax.Array) -> jax.Array:
        """This device's part of one layer, cast, out of the stack that `sliced` gave."""
        # Indexing the whole stack and casting in the turn: a cast before the loop would copy the stack.
        # A stack in host memory is indexed there, so that one layer travels.
        row = lax.dynamic_index_in_dim(stack, turn, 0, keepdims=False)
        return lax.convert_element_type(to_device(row), self.dtype)

    def sliced(self, env: Mapping) -> jax.Array:
        """This device's part, sliced, in the parameter's own type."""
        return self._slice(env[self.root], {v: env[v] for v in self.operands})

    def _slice(self, value, operands: Mapping):
        for eqn in self.before:
            indices = [v.val if compat.is_literal(v) else operands[v] for v in eqn.invars[1:]]
            value = _SHARDWISE[eqn.primitive.name](value, eqn, indices)
        return value

    def root_cotangent(self, cotangent, env: Mapping):
        """The cotangent of the parameter's shard, from the cotangent of `shard` or `sliced`."""
        root = env[self.root]
        cotangent = lax.convert_element_type(cotangent, root.dtype)
        if not self.before:
            return cotangent
        operands = {v: env[v] for v in self.operands}
        # Of its shape alone: the shard may wait in host memory, and gradients are on the device.
        shape = jax.ShapeDtypeStruct(root.shape, root.dtype)
        return jax.linear_transpose(lambda root: self._slice(root, operands), shape)(cotangent)[0]


def root_param(var, leaf: Leaf) -> ShardedParam:
    """The weight that a cut parameter is before anything is done to it."""
    assert leaf.dim is not None
    dtype = np.dtype(var.aval.dtype)
    return ShardedParam(var, leaf, leaf.dim, tuple(var.aval.shape), dtype, dtype)


def extended(weight: ShardedParam, eqn) -> ShardedParam | None:
    """The weight after one more equation on its shard, or None if that needs the gathered value."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    dim = weight.dim
    if name == "convert_element_type":
        if weight.dtype != weight.root.aval.dtype or not narrower(out.dtype, weight.dtype):
            return None
        return dataclasses.replace(weight, dtype=np.dtype(out.dtype), wide=np.dtype(out.dtype))
    if name not in _SHARDWISE:
        return None
    if name in ("slice", "dynamic_slice"):
        strides = eqn.params.get("strides")
        if out.shape[dim] != weight.shape[dim] or (strides is not None and strides[dim] != 1):
            return None
    elif name == "squeeze":
        dims = {d % len(weight.shape) for d in eqn.params["dimensions"]}
        if dim in dims:
            return None
        dim -= sum(d < dim for d in dims)
    return dataclasses.replace(weight, dim=dim, shape=tuple(out.shape), before=(*weight.before, eqn))


def narrower(new, old) -> bool:
    """Whether a cast between floating types saves bytes."""
    both = jnp.issubdtype(new, jnp.floating) and jnp.issubdtype(old, jnp.floating)
    return both and np.dtype(new).itemsize < np.dtype(old).itemsize


def _cut_dim(value, eqn) -> int:
    """The one dim in which the shard is shorter than the value the equation was written for."""
    for dim, (have, full) in enumerate(zip(value.shape, eqn.invars[0].aval.shape, strict=True)):
        if have != full:
            return dim
    return -1


def _slice(value, eqn, indices):
    starts, limits = list(eqn.params["start_indices"]), list(eqn.params["limit_indices"])
    if (dim := _cut_dim(value, eqn)) >= 0:
        starts[dim], limits[dim] = 0, value.shape[dim]
    if any(stride != 1 for stride in eqn.params["strides"] or ()):
        value = to_device(value)  # of host memory XLA moves what lies together; else it copies there first
    return lax.slice(value, starts, limits, eqn.params["strides"])


def _dynamic_slice(value, eqn, indices):
    sizes = list(eqn.params["slice_sizes"])
    if (dim := _cut_dim(value, eqn)) >= 0:
        sizes[dim] = value.shape[dim]
    return lax.dynamic_slice(value, indices, sizes)


def _squeeze(value, eqn, indices):
    return lax.squeeze(value, eqn.params["dimensions"])


_SHARDWISE: Mapping[str, Callable] = MappingProxyType(
    {"slice": _slice, "dynamic_slice": _dynamic_slice, "squeeze": _squeeze}
)
