"""Which files a checkpoint must have: those of its leaves, of all their shards, and of its processes."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp

from zerojax.checkpoint.manifest import ZARRAY_BYTES, Damage, data_file, read_limited
from zerojax.checkpoint.records import ARRAYS, Manifest, SavedLeaf
from zerojax.checkpoint.soundness import is_storage_of

ZARRAY = ".zarray"
# What `arrays.write` makes: the files of such an array are known by name and size.
WRITTEN = {"zarr_format": 2, "compressor": None, "filters": None, "order": "C", "dimension_separator": "."}


def incomplete(directory: Path, manifest: Manifest, leaves: Sequence[SavedLeaf]) -> list[Damage]:
    """Find files of a manifest that are not the ones that its leaves need.

    Args:
        directory: The checkpoint; the zarr metadata of each leaf is read from it.
        manifest: With the files that there are.
        leaves: Those of its leaves to look at.

    Returns:
        `(leaf, file, what)`: the first file of each leaf that is missing, or of another size.
    """
    data = [data_file(i) for i in range(manifest.made_by["processes"])]
    damage = [("", name, "is missing") for name in data if name not in manifest.files]
    for leaf in leaves:
        missing = [(leaf.name, one.file, "is missing") for one in leaf.pieces if one.file not in manifest.files]
        damage += missing[:1]
        if leaf.folder:
            damage += itertools.islice(damage_of(directory, leaf, manifest.files), 1)
    return damage


def damage_of(directory: Path, leaf: SavedLeaf, files: Mapping[str, tuple[int, str]]) -> Iterator[Damage]:
    """Describe what is wrong with the files of one leaf."""
    prefix = f"{ARRAYS}/{leaf.folder}/"
    if prefix + ZARRAY not in files:
        yield leaf.name, prefix + ZARRAY, "is missing"
        return
    try:
        described = json.loads(read_limited(directory, f"{prefix}{ZARRAY}", ZARRAY_BYTES))
        shape, extents, dtype = described["shape"], described["chunks"], jnp.dtype(described["dtype"])
        grid = [-(-n // extent) for n, extent in zip(shape, extents, strict=True)]
        # bounded, so that what follows is
        fits = (
            WRITTEN.items() <= described.items()
            and all(isinstance(n, int) and n > 0 for n in grid)
            # a file has no more than the array: all of a file is read to memory
            and all(type(n) is int and 0 < n <= max(m, 1) for n, m in zip(extents, shape, strict=True))
            and math.prod(grid) <= len(files)
        )
        fits = fits and is_storage_of(leaf, shape, dtype)
        size = math.prod(extents) * dtype.itemsize
    except OSError as error:  # it was there just now: a run that writes may have removed it
        yield leaf.name, prefix + ZARRAY, f"cannot be read: {error.strerror}"
        return
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        yield leaf.name, prefix + ZARRAY, f"does not describe an array ({type(error).__name__}: {error})"
        return
    if not fits:
        yield leaf.name, prefix + ZARRAY, f"describes another array than {leaf.described} in so many files"
        return
    for index in itertools.product(*map(range, grid)):
        name = prefix + (".".join(map(str, index)) or "0")
        if name not in files:
            yield leaf.name, name, "is missing"
        elif files[name][0] != size:
            yield leaf.name, name, f"has {files[name][0]} bytes instead of {size}"
