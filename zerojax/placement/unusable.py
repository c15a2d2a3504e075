"""Name an array that cannot be used as it is given: one that a step has used up, or one of another mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.core
from jax.sharding import Mesh, NamedSharding

from zerojax.config.data_mesh import in_words


@contextlib.contextmanager
def unusable_named(mesh: Mesh | None, **trees: Any) -> Iterator[None]:
    """Name the array that a call fails for, where JAX's error does not; a call that succeeds costs nothing.

    Args:
        mesh: That of the transformation; None where arrays of any may be given.
        **trees: What was given, by the name of its parameter.

    Raises:
        ValueError: In place of JAX's error.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        for name, tree in trees.items():
            if problem := problem_of(mesh, name, tree):
                raise ValueError(problem) from error
        raise


def problem_of(mesh: Mesh | None, name: str, tree: Any) -> str:
    """Explain why the first unusable array cannot be used; empty if all can."""
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
            continue
        which = name + jax.tree_util.keystr(path)
        if x.is_deleted():
            return (
                f"{which} was used up: a step, or a jit that it was donated to, took its memory. Use what that call "
                f"returned, or copy the array before."
            )
        if mesh is not None and isinstance(x.sharding, NamedSharding) and foreign(x.sharding.mesh, mesh):
            return (
                f"{which} is on a mesh of {x.sharding.mesh.size} devices {dict(x.sharding.mesh.shape)}, and this "
                f"transformation's has {mesh.size}, {dict(mesh.shape)} over {in_words(mesh.axis_names)}. Use the "
                f"transformation that placed it; its tx.unshard(params) gives arrays that another one's tx.shard takes."
            )
    return ""


def foreign(found: Any, mesh: Mesh) -> bool:
    """Return whether an array's mesh has other devices."""
    return isinstance(found, Mesh) and set(found.devices.flat) != set(mesh.devices.flat)
