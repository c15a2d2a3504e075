"""Parameters on disk as a tree: nodes that know their files, and the files' numbers."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.comm.mesh import replicated
from zerojax.config import Config
from zerojax.config.precision import common_dtype
from zerojax.layout.chunked import Chunked, is_chunked, row_chunking_of
from zerojax.layout.leaf import Leaf
from zerojax.layout.padded import Padded, is_padded
from zerojax.layout.tree import Layout, canonical
from zerojax.offload.state_files import LeafFiles
from zerojax.optim.plan import ShardingPlan
from zerojax.placement.chunking import joined, splitting
from zerojax.placement.place import place_array
from zerojax.placement.storage import named, storage_leaves
from zerojax.staged.model_files import ModelFiles
from zerojax.staged.sources import OnDisk
from zerojax.staged.update import Trained

if TYPE_CHECKING:
    from jaxtyping import Array, PyTree


def on_disk(config: Config, layout: Layout, types: Mapping[int, Any] | None = None) -> dict[int, OnDisk]:
    """Return how each sharded parameter is kept on disk, by its index; in other types if `types` has them."""
    assert config.offload is not None
    found = {}
    for i, (param, wide) in enumerate(zip(layout.params, layout.grads, strict=True)):
        if param.kind == "sharded":
            leaf = param if types is None else _typed(param, types[i])
            found[i] = OnDisk(i, leaf, row_chunking_of(wide, config.offload.chunk_bytes), named(config, leaf))
    return found


def trained_on_disk(config: Config, plan: ShardingPlan) -> dict[int, Trained]:
    """Return the trained parameters on disk with their gradients, by their index among the trained.

    Gradients are at least float32 in files. Their numbers follow those of the parameters.
    """
    params, found = on_disk(config, plan.layout), {}
    for k, i in enumerate(plan.layout.trained):
        if i in params:
            grad = _typed(plan.grads[k], common_dtype(plan.grads[k].dtype, jnp.float32))
            number = len(plan.layout.params) + k
            found[k] = Trained(params[i], OnDisk(number, grad, params[i].chunking, named(config, grad)))
    return found


def files_of_run(config: Config, plan: ShardingPlan) -> ModelFiles:
    """Return the files of a run's parameters and gradients. Parameters are kept in host memory before gradients."""
    params = on_disk(config, plan.layout)
    grads = [trained.grad for trained in trained_on_disk(config, plan).values()]
    return _files(config, "params", [*params.values(), *grads])


def files_of_params(config: Config, layout: Layout) -> ModelFiles:
    """Return the files of parameters that were initialised or imported, in the types of the master weights."""
    wide = dict(enumerate(leaf.dtype for leaf in layout.grads))
    return _files(config, "given", list(on_disk(config, layout, wide).values()))


def _files(config: Config, name: str, kept: list[OnDisk]) -> ModelFiles:
    offload = config.offload
    assert offload is not None
    assert offload.path is not None
    leaves = {of.index: (of.leaf, of.chunking, of.sharding) for of in kept}
    assert not isinstance(offload.host_bytes, str)
    return ModelFiles(
        os.path.join(offload.path, name), leaves, host_bytes=offload.host_bytes, first=[of.index for of in kept]
    )


def node_of(files: ModelFiles, of: OnDisk) -> Chunked:
    """Return the node that stands for a parameter in a tree."""
    version = jax.device_put(files.version, replicated(of.mesh))
    chunks = len(of.chunking.extents)
    return Chunked((version,), of.leaf, of.chunking, of.sharding, LeafFiles(files, of.index, chunks))


def node_of_shape(config: Config, of: OnDisk) -> Chunked:
    """Return the node of a parameter of which only the shape is known; no file is made."""
    version: Any = jax.ShapeDtypeStruct((), np.int32, sharding=replicated(config.mesh))
    return Chunked((version,), of.leaf, of.chunking, of.sharding)


def leaves_of_tree(params: PyTree) -> list:
    """Return the leaves of a tree without opening nodes of padded arrays and of parameters on disk."""
    return jax.tree.leaves(params, is_leaf=lambda x: is_padded(x) or is_chunked(x))


def files_of(params: PyTree) -> ModelFiles | None:
    """Return the files of a tree of parameters, or None if it has no parameter on disk; optimizer state is none."""
    stores = (x.store for x in leaves_of_tree(params) if is_chunked(x) and x.store is not None)
    return next((store.files for store in stores if isinstance(store.files, ModelFiles)), None)


def placed_leaf(config: Config, x: Any, leaf: Leaf) -> Array:
    """Return a parameter in storage shape on the devices, in the type it has: a copy, or read from its files."""
    if is_chunked(x):
        return joined(x)
    (stored,) = storage_leaves([x], [leaf])
    return place_array(stored, named(config, leaf))


def write_leaf(files: ModelFiles, of: OnDisk, stored: Array) -> None:
    """Write a parameter that is on the devices, in the type of its files."""
    chunks = splitting(of.mesh, of.sharding, of.leaf, of.chunking)(stored.astype(of.leaf.dtype))
    for n, chunk in enumerate(jax.block_until_ready(chunks)):
        files.write(of.index, n, chunk)


def shapes_on_disk(params: PyTree) -> PyTree:
    """Return the tree with the logical shapes of parameters on disk in place of their nodes."""

    def one(x):
        return jax.ShapeDtypeStruct(x.leaf.shape, x.leaf.dtype) if is_chunked(x) else x

    return jax.tree.map(one, params, is_leaf=lambda x: is_padded(x) or is_chunked(x))


def loaded(tree: PyTree) -> PyTree:
    """Return the tree with parameters on disk brought to the devices, sharded as they are; all of them at once."""

    def one(x):
        if not is_chunked(x):
            return x
        stored, leaf = joined(x), x.leaf
        return Padded(stored, leaf.shape, leaf.dim) if leaf.padding and leaf.dim is not None else stored

    return jax.tree.map(one, tree, is_leaf=lambda x: is_padded(x) or is_chunked(x))


def dtype_of(x: Any) -> Any:
    """Return the type of a leaf as JAX has it."""
    return x.dtype if is_chunked(x) else canonical(x.dtype)


def _typed(leaf: Leaf, dtype: Any) -> Leaf:
    return dataclasses.replace(leaf, dtype=np.dtype(dtype))
