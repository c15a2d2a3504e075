"""Divide further dims of a batch over mesh axes, such as the sequence, as the option `batch_spec` says."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.config.data_mesh import DataMesh, axes_of, entry_axes, in_words, is_spec


@dataclasses.dataclass(frozen=True)
class BatchSpec:
    """One `PartitionSpec` for all leaves of a batch, or a tree of specs, flattened so that the record is hashable."""

    specs: tuple[PartitionSpec, ...]
    structure: Any

    @classmethod
    def of(cls, given: Any) -> "BatchSpec":
        """Convert a spec or a tree of specs to a `BatchSpec`. Raise a TypeError for anything else."""
        specs, structure = jax.tree.flatten(given, is_leaf=lambda x: is_spec(x) or x is None)
        for spec in specs:
            entries = tuple(spec) if isinstance(spec, PartitionSpec) else (PartitionSpec.UNCONSTRAINED,)
            if PartitionSpec.UNCONSTRAINED in entries or not all(isinstance(name, str) for name in axes_of(entries)):
                raise TypeError(
                    f"batch_spec= is a jax.sharding.PartitionSpec of mesh axes, such as "
                    f'PartitionSpec("data", "sequence"), or a tree of them, not {spec!r}.'
                )
        return cls(tuple(specs), structure)

    def check(self, axis: tuple[str, ...], sizes: Mapping[str, int]) -> None:
        """Raise a ValueError if a spec does not fit the mesh.

        The first entry must be `axis`. Only axes of the mesh (the keys of `sizes`) may be named, each at most once.
        """
        for spec in self.specs:
            named = axes_of(spec)
            if missing := tuple(name for name in dict.fromkeys(named) if name not in sizes):
                raise ValueError(
                    f"batch_spec={spec} names {in_words(missing)}, and the axes of the mesh are {tuple(sizes)}. "
                    f"Name axes of the mesh, or build it with an axis called {missing[0]!r}."
                )
            if not len(spec) or entry_axes(spec[0]) != axis:
                raise ValueError(
                    f"batch_spec={spec} does not divide dim 0 over {in_words(axis)}, like the rows: axis={axis!r}. "
                    f"Begin it with {(axis[0] if len(axis) == 1 else axis)!r}, or give other axes in axis=."
                )
            if len(set(named)) < len(named):
                raise ValueError(f"batch_spec={spec} names an axis twice. Divide at most one dim over each axis.")

    def over(self, batch: Any) -> Any:
        """Return a tree with the spec of each leaf of a batch, cut to the number of dims of the leaf."""
        cut = lambda spec, x: PartitionSpec(*tuple(spec)[: np.ndim(x) if np.isscalar(x) else len(x.shape)])
        try:
            tree = jax.tree.unflatten(self.structure, self.specs)
            each = lambda spec, part: jax.tree.map(lambda x: cut(spec, x), part)
            return jax.tree.map(each, tree, batch, is_leaf=is_spec)
        except ValueError as error:
            raise ValueError(
                f"batch_spec= is the tree {self.structure}, and the batch {jax.tree.structure(batch)}. Give one spec "
                f"for all leaves, or a tree of specs with the structure of the batch, or of its beginning."
            ) from error

    def shardings(self, mesh: Mesh, data: DataMesh, batch: Any) -> Any:
        """Return the sharding of each leaf of a batch. Raise a ValueError if the specs do not fit the batch."""
        if undivided := self.first_undivided(data, batch):
            name, dim, size, axes = undivided
            parts = data.size(axes)
            below, above = size // parts * parts, -(-size // parts) * parts
            raise ValueError(
                f"Cannot divide {name} over mesh {in_words(axes)}: its dim {dim} has a size of {size}, and the "
                f"{'axis has' if len(axes) == 1 else 'axes have'} {parts} devices. Give a size of "
                f"{f'{below} or {above}' if below else above} (for inputs and for targets, not for a window that is "
                f"one longer), or a batch_spec= that does not divide this dim."
            )
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), self.over(batch), is_leaf=is_spec)

    def first_undivided(self, data: DataMesh, batch: Any) -> tuple[str, int, int, tuple[str, ...]] | None:
        """Return `(name, dim, size, axes)` of the first dim of the batch that the mesh does not divide, or None."""
        leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
        for (path, x), spec in zip(leaves, jax.tree.leaves(self.over(batch), is_leaf=is_spec), strict=True):
            for dim, (size, entry) in enumerate(zip(np.shape(x), spec, strict=False)):
                if size % data.size(entry_axes(entry)):
                    return f"batch{jax.tree_util.keystr(path)}", dim, size, entry_axes(entry)
        return None


def is_divisible(batch: Any, data: DataMesh, spec: BatchSpec | None) -> bool:
    """Return whether the mesh axes evenly divide the rows of every leaf, and the dims that `spec` names."""
    if not all(np.ndim(x) and np.shape(x)[0] % data.workers == 0 for x in jax.tree.leaves(batch)):
        return False
    return spec is None or spec.first_undivided(data, batch) is None
