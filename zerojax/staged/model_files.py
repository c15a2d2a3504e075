"""Read and write the files of parameters and gradients, and represent parameters in a tree by nodes.

With `Offload(host_bytes=)`, some chunks stay in host memory instead of files.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from zerojax.comm.mesh import replicated
from zerojax.compat import common_dtype
from zerojax.config import Config
from zerojax.layout.leaf import Leaf, is_chunked
from zerojax.layout.tree import Layout, canonical
from zerojax.offload.chunked import (
    Chunked,
    ChunkedLayout,
    chunks_of,
    concrete_mesh,
    jitted,
    join_chunks,
    joined,
    row_chunkings_of,
    split_chunks,
)
from zerojax.offload.state_files import LeafFiles, StateFiles
from zerojax.optim.sharding_plan import ShardingPlan
from zerojax.placement.storage import are_shapes, leaf_sharding, leaves_of, place_array, storage_leaves
from zerojax.streaming.first_state import Deferred
from zerojax.streaming.stores import abandoned_on_error, state_buffer_bytes

ChunkId = tuple[int, int]  # the number of a parameter's (or gradient's) files, and the number of a chunk
# The number of chunks that are read ahead at a time. As many chunks can wait to be written.
READ_AHEAD = 8
# The folder, within `Offload(path=)`, of parameters that no run uses yet.
GIVEN = "given"
# The largest number of arrays that are copied from the devices to host memory while Python goes on.
COPYING = 2


@dataclasses.dataclass(frozen=True)
class OnDisk(ChunkedLayout):
    """How one parameter, or its gradient, is kept on disk."""

    index: int  # the number of the files; for a parameter, the index among all parameters


@dataclasses.dataclass(frozen=True)
class DiskShard:
    """The shard of a parameter or a gradient on disk, or one chunk of the shard."""

    of: OnDisk
    n: int | None = None  # the number of the chunk; None: all chunks, joined

    @property
    def chunk_ids(self) -> tuple[ChunkId, ...]:
        numbers = range(len(self.of.chunking.extents)) if self.n is None else (self.n,)
        return tuple((self.of.index, n) for n in numbers)

    def joined(self, chunks: Mapping[ChunkId, Array]) -> Array:
        arrays, of = [chunks[chunk_id] for chunk_id in self.chunk_ids], self.of
        return jitted(join_chunks, of.sharding, of.leaf, of.chunking)(arrays) if self.n is None else arrays[0]

    def split(self, stored: Array) -> dict[ChunkId, Array]:
        of = self.of
        chunks = jitted(split_chunks, of.sharding, of.leaf, of.chunking)(stored) if self.n is None else [stored]
        return dict(zip(self.chunk_ids, chunks, strict=True))


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained parameter on disk, and its gradient on disk."""

    param: OnDisk
    grad: OnDisk


class ModelFiles(StateFiles):
    """The files of one process's shards of parameters and gradients.

    The version of the files is the version of the parameters. As many chunks as fit into `host_bytes` are always in
    host memory. A cache of recently used chunks would not help: every step reads all chunks in the same order, so the
    cache would drop each chunk just before its use.
    """

    part: ClassVar[str] = "params"

    def __init__(
        self,
        path: str | os.PathLike,
        leaves: Mapping[int, ChunkedLayout],
        *,
        name: str,
        params: int,
        host_bytes: int | None,
        state_buffers: int = 0,
    ):
        """Name the files, which are in the folder `name` of `path`.

        The first `params` of `leaves` are parameters, and the others gradients. `host_bytes` limits the bytes of chunks
        and buffers in host memory, including `state_buffers` bytes for the optimizer state. If `host_bytes` is None,
        only the buffers are in host memory. Chunks of earlier leaves are the first to be kept in host memory.
        """
        super().__init__(path, leaves, in_flight=READ_AHEAD, copying=COPYING, name=name)
        self._given_bytes = host_bytes
        self._every = frozenset(list(leaves)[:params])
        buffers = self.buffer_bytes + state_buffers
        if host_bytes is not None and host_bytes < buffers:
            raise ValueError(
                f"Offload(host_bytes={host_bytes}) is less than the {buffers} bytes of the buffers that read "
                f"and write: {2 * READ_AHEAD} buffers with the size of the largest chunk, and {state_buffers} bytes of "
                f"buffers for the optimizer state. Allow at least that many, or make the chunks smaller with "
                f"chunk_bytes=."
            )
        left = (host_bytes or 0) - buffers
        for index, spec in enumerate(self._specs):
            if spec.bytes <= left:
                left -= spec.bytes
                self._in_memory.add(index)

    def given(self, types: Sequence[Any]) -> "ModelFiles":
        """Return new files, not used by any run yet, for the same parameters. Parameter k is stored in `types[k]`."""
        wide = {}
        for k in sorted(self._every):
            of = self.leaves[k]
            wide[k] = dataclasses.replace(of, leaf=dataclasses.replace(of.leaf, dtype=np.dtype(types[k])))
        return ModelFiles(self.root, wide, name=GIVEN, params=len(wide), host_bytes=self._given_bytes)

    def nodes(self, *, is_shape: bool = False) -> dict[int, Chunked]:
        """Return a `Chunked` node per parameter, by number. If `is_shape`, the nodes have shapes instead of arrays."""
        found = {}
        for k in sorted(self._every):
            of = self.leaves[k]
            where = replicated(concrete_mesh(of.sharding))
            version: Any = jax.ShapeDtypeStruct((), np.int32, sharding=where)
            if not is_shape:
                version = jax.device_put(np.array(self._version, np.int32), where)
            found[k] = Chunked(of.leaf, of.chunking, of.sharding, (version,), LeafFiles(self, k))
        return found


def on_disk(config: Config, layout: Layout, types: Sequence[Leaf] = ()) -> dict[int, OnDisk]:
    """Return an `OnDisk` for each sharded parameter, by index. If `types` are given, use the types of these leaves."""
    assert config.offload is not None
    found = {}
    chunkings = row_chunkings_of(layout.grads, config.offload.chunk_bytes)
    # Divide a trained parameter like its optimizer state, whose division depends on the trained parameters alone.
    trained = row_chunkings_of([layout.grads[i] for i in layout.trained], config.offload.chunk_bytes)
    chunkings |= {layout.trained[k]: chunking for k, chunking in trained.items()}
    for i, param in enumerate(layout.params):
        if param.kind == "sharded":
            leaf = _with_dtype(param, types[i].dtype) if types else param
            found[i] = OnDisk(leaf, chunkings[i], leaf_sharding(config, leaf), i)
    return found


def trained_on_disk(config: Config, plan: ShardingPlan) -> dict[int, Trained]:
    """Return a `Trained` for each trained parameter on disk, by index among the trained parameters.

    Gradients are in float32 or wider. The numbers of their files follow the numbers of the parameters' files.
    """
    params, found = on_disk(config, plan.layout), {}
    for k, i in enumerate(plan.layout.trained):
        if i in params:
            grad = _with_dtype(plan.grads[k], common_dtype(plan.grads[k].dtype, jnp.float32))
            number = len(plan.layout.params) + k
            found[k] = Trained(params[i], OnDisk(grad, params[i].chunking, leaf_sharding(config, grad), number))
    return found


def files_of_params(config: Config, layout: Layout, types: Sequence[Leaf]) -> ModelFiles:
    """Return new files, used by no run yet, for all parameters. `types` are leaves with the types of the parameters."""
    return _files(config, GIVEN, on_disk(config, layout, types))


def _files(
    config: Config, name: str, params: Mapping[int, OnDisk], grads: Sequence[OnDisk] = (), state_buffers: int = 0
) -> ModelFiles:
    """Return the files of parameters and gradients. Host memory is used for chunks of parameters first."""
    offload = config.offload
    assert offload is not None
    assert offload.path is not None
    if not params:
        raise ValueError(
            'Offload(params="disk") has no parameter to keep on disk: each parameter is replicated, because it has '
            "fewer elements than persist_below, or no dim that can be sharded. Lower Tuning(persist_below=), or leave "
            "out params=."
        )
    leaves = {**params, **{of.index: of for of in grads}}
    return ModelFiles(
        offload.path, leaves, name=name, params=len(params), host_bytes=offload.host_bytes, state_buffers=state_buffers
    )


def files_of(params: PyTree) -> ModelFiles | None:
    """Return the files of the parameters in a tree, or None if it has no parameter on disk."""
    found = (x.leaf_files.state_files for x in leaves_of(params) if is_chunked(x) and x.leaf_files is not None)
    return next((files for files in found if isinstance(files, ModelFiles)), None)


def placed_leaf(config: Config, x: Any, leaf: Leaf) -> Array:
    """Copy a parameter to the devices, or read it from its files. Return it in storage shape and its own type."""
    if is_chunked(x):
        return joined(x)
    (stored,) = storage_leaves([x], [leaf])
    return place_array(stored, leaf_sharding(config, leaf))


@contextlib.contextmanager
def begun_on_disk(config: Config, plan: ShardingPlan, params: PyTree) -> Iterator[tuple[PyTree, list]]:
    """Write the parameters of a new run to files. Yield the stored tree, and a list from which the state is made.

    If `params` are shapes, no file is written. After an error in the context, the files are given up.
    """
    layout = plan.layout
    if layout.overwritten:
        raise ValueError(
            f"params{layout.params[layout.overwritten[0]].path} takes its gradient as its new value, which a step in "
            f'stages does not do. Use Offload(params="host").'
        )
    grads = [trained.grad for trained in trained_on_disk(config, plan).values()]
    files = _files(config, "params", on_disk(config, layout), grads, state_buffer_bytes(config, plan))
    tree = write_params(config, layout, leaves_of(params), files, shapes=are_shapes(params))
    # The state is made from parameters that are copied to the devices later, one by one, and keep their types.
    later = lambda x, leaf: Deferred(lambda: placed_leaf(config, x, leaf), leaf.storage_shape, canonical(x.dtype))
    with abandoned_on_error(files):
        yield tree, [later(x, leaf) for x, leaf in zip(leaves_of(params), layout.params, strict=True)]


def write_params(
    config: Config, layout: Layout, leaves: Iterable[Any], files: ModelFiles, *, shapes: bool = False
) -> PyTree:
    """Write sharded parameters to files, one after the other, in the files' types. Return all parameters in storage.

    `leaves` yields the parameters in any form. Each is freed when it is written, before the next is made. If `shapes`
    is true, `leaves` yields shapes, no file is written, and the result consists of shapes.
    """
    stored: dict[int, Any] = dict(files.nodes(is_shape=shapes))
    leaves = iter(leaves)
    with abandoned_on_error(files):
        for i, leaf in enumerate(layout.params):
            x = next(leaves)
            if i not in stored:
                shape = jax.ShapeDtypeStruct(leaf.storage_shape, leaf.dtype, sharding=leaf_sharding(config, leaf))
                stored[i] = shape if shapes else placed_leaf(config, x, leaf).astype(leaf.dtype)
            elif not shapes:
                write_leaf(files, i, x)
            del x  # before the next leaf is made
        if not shapes:
            files.flush()
    return jax.tree.unflatten(layout.treedef, [stored[i] for i in range(len(layout.params))])


def write_leaf(files: ModelFiles, i: int, x: Any) -> None:
    """Write `x` as parameter `i`. If `x` is on disk in the same chunks, copy chunk by chunk. If not, load `x` first."""
    of = files.leaves[i]
    if is_chunked(x) and x.chunking == of.chunking and x.leaf_files is not None:
        chunks = (x.leaf_files.load_chunk(*x.chunks, n) for n in range(len(of.chunking.extents)))
    else:
        # Unlike `placed_leaf`, do not copy an array that is already in place.
        stored = joined(x) if is_chunked(x) else jax.device_put(storage_leaves([x], [of.leaf])[0], of.sharding)
        chunks = chunks_of(stored, of.leaf, of.chunking)
    for n, chunk in enumerate(chunks):
        files.write(i, n, jax.block_until_ready(chunk.astype(of.leaf.dtype)))


def _with_dtype(leaf: Leaf, dtype: Any) -> Leaf:
    return dataclasses.replace(leaf, dtype=np.dtype(dtype))
