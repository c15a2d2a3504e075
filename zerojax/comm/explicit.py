"""Explicit meshes: zerojax computes on the same devices with Auto axes, and gives back arrays of the caller's mesh.

On Explicit axes the type of an array says how it is sharded, and every operation must follow that. Only this module
knows of them: public functions take their arguments to the Auto mesh and their results to the caller's with
`on_auto_mesh`; what is called at every step does so while it is traced. Live arrays keep their buffers, so donating one
donates the caller's; a traced array changes its type, which is no operation where its sharding stays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.core
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from zerojax import compat
from zerojax.config import with_auto_axes
from zerojax.config.data_mesh import axes_of, entry_axes

if TYPE_CHECKING:
    from jaxtyping import PyTree


@functools.partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["spec"])
@dataclasses.dataclass(frozen=True)
class Typed:
    """A leaf on the Auto mesh that keeps the type which it has, or is to have, on the caller's.

    Attributes:
        value: An array.
        spec: How its type says that it is sharded.
    """

    value: Any
    spec: PartitionSpec


def is_typed(x: Any) -> bool:
    """Return whether a node is `Typed`."""
    return isinstance(x, Typed)


def with_types(tree: PyTree) -> Any:
    """Wrap the arrays that Explicit axes divide as `Typed`, so that they keep their types on the Auto mesh."""

    def one(x):
        mesh = mesh_of(x)
        if mesh is None or not mesh.explicit_axes:
            return x
        spec = explicit_part((jax.typeof(x) if isinstance(x, jax.core.Tracer) else x).sharding.spec, mesh)
        return Typed(x, spec) if axes_of(spec) else x

    return jax.tree.map(one, tree)


def without_types(tree: PyTree) -> Any:
    """Return the tree with its `Typed` leaves as arrays."""
    return jax.tree.map(lambda x: x.value if is_typed(x) else x, tree, is_leaf=is_typed)


def on_auto_mesh(
    mesh: Mesh | None, fn: Callable, *args: PyTree, shardings: Callable[[Any], PyTree] = lambda _: PartitionSpec()
) -> Any:
    """Call a function where every axis of a mesh is Auto.

    Args:
        mesh: The caller's; None: that of the first array, or shape, that is on one.
        fn: Sees arrays, shapes and shardings of `mesh` on the Auto mesh.
        *args: Its arguments.
        shardings: Gives shardings, or specs, of the results it is called with: a tree, or a prefix of one. Read where
            they are traced, since their types do not say how they are sharded over Auto axes. Default: replicated.
            Results that are `Typed` say it themselves.

    Returns:
        `fn(*args)` on `mesh`.
    """
    mesh = mesh or next((m for x in jax.tree.leaves(args) if isinstance(m := mesh_of(x), Mesh)), None)
    if mesh is None:
        return fn(*args)
    with auto_context(mesh):
        results = fn(*to_auto(args))
    return to_explicit(mesh, results, shardings)


@contextlib.contextmanager
def auto_context(mesh: Mesh | None = None) -> Iterator[None]:
    """Enter a context without Explicit axes, whatever `jax.set_mesh` says. Also usable as a decorator.

    Args:
        mesh: The caller's, for code that may be traced.
    """
    explicit = jax.sharding.get_abstract_mesh().explicit_axes
    if not compat.is_tracing():
        with jax.set_mesh(None) if explicit else contextlib.nullcontext():
            yield
    elif mesh is not None and (explicit or mesh.explicit_axes):
        with jax.sharding.use_abstract_mesh(with_auto_axes(mesh).abstract_mesh):
            yield
    else:
        yield


def to_auto(tree: PyTree) -> Any:
    """Move arrays, shapes and shardings on Explicit axes to the same devices with Auto axes."""

    def one(x):
        mesh = mesh_of(x)
        return x if mesh is None or not mesh.explicit_axes else moved(x, with_auto_axes(mesh), PartitionSpec())

    return jax.tree.map(one, tree)


def to_explicit(mesh: Mesh, tree: PyTree, shardings: Callable[[Any], PyTree] = lambda _: PartitionSpec()) -> Any:
    """Move values on the Auto mesh to the caller's `mesh`. The arguments are those of `on_auto_mesh`."""
    if not mesh.explicit_axes:
        return tree

    def one(x, spec: PartitionSpec):
        if is_typed(x):
            return one(x.value, x.spec)
        if isinstance(x, jax.core.Tracer):
            return moved(x, mesh, explicit_part(spec, mesh))
        return moved(x, mesh, spec) if mesh_of(x) == with_auto_axes(mesh) else x

    def subtree(sharding, values):
        spec = getattr(sharding, "spec", sharding)
        return jax.tree.map(lambda x: one(x, spec), values, is_leaf=is_typed)

    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))
    return jax.tree.map(subtree, shardings(without_types(tree)) if traced else PartitionSpec(), tree)


def mesh_of(x: Any) -> Any:
    """Return the mesh that a leaf is on, abstract for a traced array, or None."""
    if isinstance(x, jax.core.Tracer):
        x = jax.typeof(x)
    sharding = x if isinstance(x, NamedSharding) else getattr(x, "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def moved(x: Any, mesh: Any, spec: PartitionSpec) -> Any:
    """Move a leaf to another mesh of the same devices. `spec` is the sharding of a traced array there."""
    if isinstance(x, jax.core.Tracer):
        return jax.sharding.reshard(x, NamedSharding(mesh.abstract_mesh, spec))
    old = x if isinstance(x, NamedSharding) else x.sharding
    sharding = NamedSharding(mesh, old.spec, memory_kind=old.memory_kind)
    if isinstance(x, NamedSharding):
        return sharding
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    shards = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, shards, dtype=x.dtype)


def explicit_part(spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Return the axes of a spec that a type may name."""
    kept = lambda entry: tuple(axis for axis in entry_axes(entry) if axis in mesh.explicit_axes)
    return PartitionSpec(*(kept(entry) or None for entry in spec))
