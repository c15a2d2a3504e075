"""Choose the mesh, make the shardings that depend on it, map functions over shards, and leave Explicit axes.

On Explicit axes an array's type says how the array is sharded. zerojax computes on Auto axes: public functions use
`on_auto_mesh` to move their arguments to the same devices with Auto axes, and their results back to the caller's mesh.
Moving a concrete array keeps its buffers, so donating the moved array donates the caller's. Moving a traced array
changes its type, and runs no operation if the sharding stays the same.

`mapped` is a `jax.shard_map` that `checkify` does not look into. `checkify` carries its error through every equation,
with one entry per device after one `shard_map`, and one per pair of devices after the next `shard_map`. A step has
dozens of these, so the error would take terabytes. Automatic checks need not look inside: the results show any NaN.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.core
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from zerojax import compat, jaxprs
from zerojax.config import DataMesh, with_auto_axes
from zerojax.config.data_mesh import axes_of, entry_axes, in_words, spec_entry
from zerojax.layout.leaf import Leaf, pad, replace_items
from zerojax.primitives import MAPPED

# The mesh of absent GPUs for which `zerojax.plan` traces a jitted function, or None. JAX traces again for each value.
# Made early, when `zero_shard` is imported: after JAX makes a context, it compiles all earlier functions once more.
PLANNED = jax.make_user_context()


def resolve_mesh(mesh: Mesh | None, axes: tuple[str, ...]) -> Mesh:
    """Check `mesh`, whose devices may be absent here, and return it. If it is None, put all devices on one axis."""
    if mesh is None:
        if len(axes) > 1:
            raise ValueError(
                f"axis={axes!r} names several axes, and no mesh says how the devices are divided over them. "
                f"Pass mesh=jax.make_mesh(sizes, {axes!r})."
            )
        return jax.make_mesh((jax.device_count(),), axes, axis_types=(AxisType.Auto,))
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh= must be a jax.sharding.Mesh, not {type(mesh).__name__}. Build one with jax.make_mesh.")
    if missing := tuple(axis for axis in axes if axis not in mesh.axis_names):
        raise ValueError(
            f"The mesh has no {in_words(missing)}: its axes are {mesh.axis_names}. Name the data axis with axis=, "
            f"or build the mesh with an axis called {missing[0]!r}."
        )
    if mesh.manual_axes:
        raise ValueError(
            f"The mesh has Manual axes: {', '.join(map(repr, mesh.manual_axes))}, as inside of shard_map. zerojax "
            f"writes its own shard_map: give the mesh from outside, whose axes are Auto or Explicit."
        )
    return mesh


def constrain(mesh: Mesh, stored: jax.Array, leaf: Leaf) -> jax.Array:
    spec = leaf.spec
    if len(mesh.axis_names) > 1 and not leaf.others:  # the compiler chooses the sharding over the other axes
        free = PartitionSpec.UNCONSTRAINED
        spec = PartitionSpec(*(s or free for s in (*spec, *[None] * (stored.ndim - len(spec)))))
    return jax.lax.with_sharding_constraint(stored, NamedSharding(mesh, spec))


def in_storage_shape(value: jax.Array, leaf: Leaf) -> jax.Array:
    """Pad or flatten a logical array as its layout says. A flat array that is already in storage shape is unchanged."""
    if leaf.kind == "flat":
        return pad(value.reshape(-1), 0, leaf.storage_shape[0])
    return value if leaf.dim is None else pad(value, leaf.dim, leaf.storage_shape[leaf.dim])


def to_storage(mesh: Mesh, value: jax.Array, leaf: Leaf) -> jax.Array:
    return constrain(mesh, in_storage_shape(value, leaf), leaf)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, data: DataMesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(spec_entry(data.batch)))


def owned(x: Any) -> Any:
    # `jax.device_put` may share the memory of a NumPy array, even with `may_alias=False`, or read it after the call.
    # Without this copy, a caller that writes to its array later would change values that were placed before.
    return np.array(x) if isinstance(x, np.ndarray) else x


def row_shardings(mesh: Mesh, data: DataMesh, tree: Any, batch: Any) -> Any:
    """Return shardings for `tree`: the batch's for arrays with as many rows as the batch, and replicated for others."""
    counts = {x.shape[0] for x in jax.tree.leaves(batch)}
    one = lambda x: batch_sharding(mesh, data) if set(x.shape[:1]) & counts else replicated(mesh)
    return jax.tree.map(one, tree)


def wait_if_simulated(mesh: Mesh, arrays: Any) -> Any:
    # Simulated devices share one pool of threads. Collectives of two programs at once would block each other.
    if mesh.size > 1 and mesh.devices.flat[0].platform == "cpu":
        jax.block_until_ready(arrays)
    return arrays


def mapped(fn: Callable, *, mesh: Mesh, in_specs: Any, out_specs: Any, axis_names: set[str]) -> Callable:
    """Map a function over shards, as `jax.shard_map` does with these arguments and `check_vma=False`.

    A primitive hides the `shard_map` from `checkify`, unless `fn` is differentiated or batched, or makes a `jax.Ref`.
    """
    over_shards = jax.shard_map(
        fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axis_names, check_vma=False
    )

    def call(*args):
        closed, shapes = jax.make_jaxpr(over_shards, return_shape=True)(*args)
        jaxpr, consts = compat.opened(closed)
        inner = [*jaxprs.equations(jaxpr)] if jaxpr.effects else []
        if any(map(jaxprs.makes_ref, inner)):  # JAX removes refs with a rule per primitive: mapped_p has no such rule
            return over_shards(*args)
        if any(eqn.primitive.name == "check" for eqn in inner):
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
mapped_p.def_effectful_abstract_eval(lambda *_, jaxpr: ([atom.aval for atom in jaxpr.outvars], jaxpr.effects))
ad.primitive_jvps[mapped_p] = _differentiated
batching.primitive_batchers[mapped_p] = _batched
# JAX calls this rule if a value has a hijax type. The plain `shard_map` lowers such values.
setattr(mapped_p, "to_lojax", _evaluate)  # noqa: B010
mlir.register_lowering(mapped_p, mlir.lower_fun(_evaluate, multiple_results=True))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["spec"])
@dataclasses.dataclass(frozen=True)
class Typed:
    """A leaf on the Auto mesh, with the sharding that the leaf's type named on the caller's mesh."""

    value: Any
    spec: PartitionSpec


def is_typed(x: Any) -> bool:
    return isinstance(x, Typed)


def with_types(tree: PyTree) -> Any:
    """Wrap in `Typed` each array that Explicit axes divide, so that its type is still known on the Auto mesh."""

    def one(x):
        spec = explicit_part(sharding_of(x).spec, mesh_of(x)) if is_explicit(x) else PartitionSpec()
        return Typed(x, spec) if axes_of(spec) else x

    return jax.tree.map(one, tree)


def without_types(tree: PyTree) -> Any:
    return jax.tree.map(lambda x: x.value if is_typed(x) else x, tree, is_leaf=is_typed)


def on_auto_mesh(
    mesh: Mesh | None, fn: Callable, *args: PyTree, shardings: Callable[[Any], PyTree] = lambda _: PartitionSpec()
) -> Any:
    """Call `fn(*args)` on the Auto mesh, and return the results on the caller's mesh.

    If `mesh` is None, the mesh is that of the first argument that has one. `shardings(results)` returns shardings or
    specs, as a tree or a tree prefix. Only traced results that are not wrapped in `Typed` need them, because the types
    of these results do not say how Auto axes divide them.
    """
    mesh = mesh or next((m for x in jax.tree.leaves(args) if isinstance(m := mesh_of(x), Mesh)), None)
    if mesh is None:
        return fn(*args)
    with auto_context(mesh):
        results = fn(*to_auto(args))
    return to_explicit(mesh, results, shardings)


@contextlib.contextmanager
def auto_context(mesh: Mesh | None = None) -> Iterator[None]:
    """Enter a context without Explicit axes, which has `mesh` with Auto axes, or no mesh. Also a decorator.

    Pass `mesh` if the code is traced or has a `shard_map`: another library may have set another mesh (`jax.set_mesh`).
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
    one = lambda x: moved(x, with_auto_axes(mesh_of(x)), PartitionSpec()) if is_explicit(x) else x
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


def sharding_of(x: Any) -> Any:
    x = jax.typeof(x) if isinstance(x, jax.core.Tracer) else x
    return x if isinstance(x, NamedSharding) else getattr(x, "sharding", None)


def mesh_of(x: Any) -> Any:
    return sharding.mesh if isinstance(sharding := sharding_of(x), NamedSharding) else None


def is_explicit(x: Any) -> bool:
    return (mesh := mesh_of(x)) is not None and bool(mesh.explicit_axes)


def moved(x: Any, mesh: Any, spec: PartitionSpec) -> Any:
    """Move a leaf to another mesh of the same devices. A traced array gets the sharding `spec`, others keep theirs."""
    if isinstance(x, jax.core.Tracer):
        return jax.sharding.reshard(x, NamedSharding(mesh.abstract_mesh, spec))
    old = x if isinstance(x, NamedSharding) else x.sharding
    sharding = NamedSharding(mesh, old.spec.update(reduced=frozenset()), memory_kind=old.memory_kind)
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
