"""Move arrays between the caller's mesh, which may have Explicit axes, and the same devices with Auto axes.

On Explicit axes an array's type says how the array is sharded, and every operation must be valid for the types. zerojax
computes on Auto axes. Public functions use `on_auto_mesh` to move their arguments to the Auto mesh, and their results
back to the caller's mesh. Functions that run at every step move arrays during tracing.

Moving a concrete array keeps its buffers, so donating the moved array donates the caller's array. Moving a traced
array changes its type. This runs no operation if the sharding stays the same.
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
    """A leaf on the Auto mesh, with the sharding that its type names on the caller's mesh."""

    value: Any
    spec: PartitionSpec


def is_typed(x: Any) -> bool:
    return isinstance(x, Typed)


def with_types(tree: PyTree) -> Any:
    """Wrap each array that is divided over Explicit axes in `Typed`, which keeps its type on the Auto mesh."""

    def one(x):
        mesh = mesh_of(x)
        if mesh is None or not mesh.explicit_axes:
            return x
        spec = explicit_part((jax.typeof(x) if isinstance(x, jax.core.Tracer) else x).sharding.spec, mesh)
        return Typed(x, spec) if axes_of(spec) else x

    return jax.tree.map(one, tree)


def without_types(tree: PyTree) -> Any:
    return jax.tree.map(lambda x: x.value if is_typed(x) else x, tree, is_leaf=is_typed)


def on_auto_mesh(
    mesh: Mesh | None, fn: Callable, *args: PyTree, shardings: Callable[[Any], PyTree] = lambda _: PartitionSpec()
) -> Any:
    """Call `fn(*args)` on the Auto mesh, and return the results on the caller's mesh.

    If `mesh` is None, the first argument that has a mesh decides. `shardings` is a function of the results that returns
    their shardings or specs, as a tree or a tree prefix. Traced results need it, except `Typed` ones, because their
    types do not say how Auto axes divide them.
    """
    mesh = mesh or next((m for x in jax.tree.leaves(args) if isinstance(m := mesh_of(x), Mesh)), None)
    if mesh is None:
        return fn(*args)
    with auto_context(mesh):
        results = fn(*to_auto(args))
    return to_explicit(mesh, results, shardings)


@contextlib.contextmanager
def auto_context(mesh: Mesh | None = None) -> Iterator[None]:
    """Enter a context without Explicit axes or another mesh, even inside `jax.set_mesh`. Also usable as a decorator.

    A library may have called `jax.set_mesh` when it was imported, and no `shard_map` accepts another mesh than the
    context's. Code that may be traced must pass the caller's mesh.
    """
    context = jax.sharding.get_abstract_mesh()
    other = mesh is not None and not context.manual_axes and context.shape_tuple not in ((), mesh.shape_tuple)
    if not compat.is_tracing():
        with jax.set_mesh(None) if context.explicit_axes or other else contextlib.nullcontext():
            yield
    elif mesh is not None and (context.explicit_axes or mesh.explicit_axes or other):
        with jax.sharding.use_abstract_mesh(with_auto_axes(mesh).abstract_mesh):
            yield
    else:
        yield


def to_auto(tree: PyTree) -> Any:
    def one(x):
        mesh = mesh_of(x)
        return x if mesh is None or not mesh.explicit_axes else moved(x, with_auto_axes(mesh), PartitionSpec())

    return jax.tree.map(one, tree)


def to_explicit(mesh: Mesh, tree: PyTree, shardings: Callable[[Any], PyTree] = lambda _: PartitionSpec()) -> Any:
    """Move values on the Auto mesh to the caller's `mesh`. See `on_auto_mesh` for `shardings`."""
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
    if isinstance(x, jax.core.Tracer):
        x = jax.typeof(x)
    sharding = x if isinstance(x, NamedSharding) else getattr(x, "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def moved(x: Any, mesh: Any, spec: PartitionSpec) -> Any:
    """Move a leaf to another mesh of the same devices. `spec` is the new sharding of a traced array."""
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
    """Remove all but the Explicit axes from a spec, because a type names only Explicit axes."""
    kept = lambda entry: tuple(axis for axis in entry_axes(entry) if axis in mesh.explicit_axes)
    return PartitionSpec(*(kept(entry) or None for entry in spec))
