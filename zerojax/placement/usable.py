"""Check cheaply that arrays can be used and are placed as planned. `problems.py`, loaded if they are not, says why."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.core
from jax.sharding import Mesh

from zerojax.layout.leaf import Leaf

if TYPE_CHECKING:
    from jaxtyping import PyTree


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
        from zerojax.placement.problems import problem_of

        for name, tree in trees.items():
            if donates:
                tree = jax.tree.map(lambda x: None if isinstance(x, jax.Array) and x.is_deleted() else x, tree)
            if problem := problem_of(mesh, name, tree):
                raise ValueError(problem) from error
        raise


class PlacementCheck:
    """On the first call with real (not traced) arrays, warn about arrays that are not sharded as planned."""

    def __init__(self):
        self._done = False

    def first(self, parts: Iterable[tuple[str, PyTree, Sequence[Leaf]]], data: Sequence[str], *, stacklevel: int):
        """Check the arrays, unless they are traced or an earlier call has checked arrays.

        `parts` has the name of each tree, the tree, and the layouts of its leaves. Only the axes `data` are compared.
        An array on one device is accepted, because a program shards its arguments. `stacklevel` is that of
        `warnings.warn`; 1 means this method's caller.
        """
        if self._done:
            return
        trees = list(parts)
        arrays = [jax.tree.leaves(tree) for _, tree, _ in trees]
        if any(isinstance(x, jax.core.Tracer) for some in arrays for x in some):
            return
        self._done = True
        planned = [leaf.spec for _, _, leaves in trees for leaf in leaves]
        found = [getattr(getattr(x, "sharding", None), "spec", None) for some in arrays for x in some]
        if found != planned:
            from zerojax.placement.problems import warn_of_misplaced

            warn_of_misplaced(trees, data, stacklevel=stacklevel + 1)
