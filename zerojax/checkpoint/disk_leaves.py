"""Copy leaves on disk into a checkpoint, chunk by chunk, without the devices.

A checkpoint stores a leaf as orbax does: an uncompressed zarr array with one file per shard. So a chunk of a shard is a
few ranges of bytes in the shard's file. Each chunk is read into one buffer, where its checksum is verified. The buffer
is then written to these ranges. Links to the chunks' files would be wrong, because a step overwrites the files in
place. A copy inside the kernel would not verify the checksum, so a damaged chunk would get a valid digest.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import jax
import numpy as np
import tensorstore
from jax.sharding import NamedSharding

from zerojax.layout.chunked import Chunked, Chunking
from zerojax.offload.state_files import shards_of


def begin_copy(node: Chunked, folder: Path) -> list[Future[None]]:
    """Begin to copy a leaf on disk into a folder of a checkpoint. Return futures of this process's copies.

    The folder gets the leaf as it is at this call, even if a later step begins before the copies end.
    """
    local = node.sharding.shard_shape(node.shape)
    folder.mkdir(exist_ok=True)
    if jax.process_index() == 0:
        metadata = {"shape": node.shape, "chunks": local, "compressor": None}
        store = {"driver": "file", "path": f"{folder}/"}
        spec = {"driver": "zarr", "kvstore": store, "metadata": metadata, "dtype": np.dtype(node.dtype).name}
        tensorstore.open(spec, create=True).result()
    files = [folder / name if name else None for name in files_of_shards(node.sharding, node.shape)]
    for file in files:
        if file is not None:
            file.touch()
            os.truncate(file, math.prod(local) * node.dtype.itemsize)
    return node.store.copy(*node.chunks, functools.partial(write_chunk, files, local, node.chunking))


def files_of_shards(sharding: NamedSharding, shape: tuple[int, ...]) -> list[str]:
    """Return the name of the zarr file of each shard of this process, or "" if another process writes the shard.

    If several processes have a shard, the process of the shard's first device writes it.
    """
    indices, local = sharding.devices_indices_map(shape), sharding.shard_shape(shape)
    writers: dict[str, jax.Device] = {}
    for device, index in indices.items():
        writers.setdefault(str(index), device)
    names = []
    for device, *_ in shards_of(sharding, shape):
        index = indices[device] or ()
        grid = [one.indices(size)[0] // part for one, size, part in zip(index, shape, local, strict=True)]
        is_ours = writers[str(indices[device])].process_index == jax.process_index()
        names.append(".".join(map(str, grid)) if is_ours else "")
    return names


def write_chunk(
    files: Sequence[Path | None], local: tuple[int, ...], chunking: Chunking, n: int, shards: Sequence[np.ndarray]
) -> None:
    """Write chunk `n` of each shard to its place in the shard's file. `local` is the shape of one shard."""
    dim, (start, _) = chunking.dim, chunking.chunks[n]
    for file, shard in zip(files, shards, strict=True):
        if file is not None:
            rows = shard.reshape(math.prod(local[:dim]), -1)  # each row is contiguous in the file
            row_bytes = math.prod(local[dim:]) * shard.itemsize
            with file.open("r+b") as out:
                for i, row in enumerate(rows):
                    out.seek(i * row_bytes + start * (row_bytes // local[dim]))
                    out.write(row.view(np.uint8).data)
