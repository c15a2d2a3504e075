"""Name an array that cannot be used, because it was donated or because it is on another mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.core
from jax.sharding import Mesh

from zerojax.config.data_mesh import in_words


@contextlib.contextmanager
def unusable_named(mesh: Mesh | None, *, donates: bool = False, **trees: Any) -> Iterator[None]:
    """Replace JAX's error about an unusable array by an error that names the array.

    The arrays are checked only after an error. `mesh` is the mesh of the transformation, or None to accept arrays on
    any mesh. `trees` are the arguments by name. If the call `donates` them, deleted arrays are not named.
    """
    of_arrays = (ValueError,) if donates else (RuntimeError, ValueError)
    try:
        yield
    except of_arrays as error:
        for name, tree in trees.items():
            if donates:
                tree = jax.tree.map(lambda x: None if isinstance(x, jax.Array) and x.is_deleted() else x, tree)
            if problem := problem_of(mesh, name, tree):
                raise ValueError(problem) from error
        raise


def problem_of(mesh: Mesh | None, name: str, tree: Any) -> str:
    """Explain why the first unusable array cannot be used. Return an empty string if all arrays can be used."""
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        which = name + jax.tree_util.keystr(path)
        if isinstance(x, jax.ShapeDtypeStruct):
            return (
                f"{which} is a shape and has no values. Make it with tx.create(params) or tx.shard(params) of arrays, "
                f"or of what tx.init_params returns; or restore a checkpoint into it."
            )
        if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
            continue
        if x.is_deleted():
            return (
                f"{which} was used up: a step, or a jit that it was donated to, took its memory. Use the result of "
                f"that call, or copy the array before the call."
            )
        if problem := elsewhere(mesh, which, x):
            return problem
    return ""


def elsewhere(mesh: Mesh | None, which: str, x: jax.Array) -> str:
    """Explain why an array on other devices than those of `mesh` cannot be used. Return "" if it can be used."""
    if mesh is not None:
        devices, found = set(mesh.devices.flat), getattr(x.sharding, "mesh", None)
        if isinstance(found, Mesh) and set(found.devices.flat) != devices:
            return (
                f"{which} is on a mesh of {found.size} devices {dict(found.shape)}, and the mesh of this "
                f"transformation has {mesh.size}, {dict(mesh.shape)} over {in_words(mesh.axis_names)}. Use the "
                f"transformation that placed the array, or move it: tx.unshard(params) of that transformation returns "
                f"arrays that tx.shard of another one takes."
            )
        if x.committed and x.sharding.device_set != devices:
            return (
                f"{which} was put on {len(x.sharding.device_set)} of the {mesh.size} devices of the mesh. Give it the "
                f"sharding that it had, with jax.device_put(x, old.sharding), or place parameters with tx.shard."
            )
    return ""
