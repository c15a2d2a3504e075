"""Check rules that every saved manifest satisfies, to reject a forged manifest before memory is allocated for it.

A checkpoint may come from anyone. Its digests prove only that its files are the ones that its author wrote.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from zerojax.checkpoint.packing import PACKED, storage_shape
from zerojax.checkpoint.records import Manifest, SavedLeaf

KINDS = ("replicated", "sharded", "flat")
MAX_DIMS, MAX_DIM = 64, 2**63
SCALARS = (jnp.number, jnp.bool_)
# Maximum number of words of a PRNG key. The keys of JAX have 2 or 4 words.
KEY_WORDS = 64
# Maximum bytes of a packed leaf, which is read into memory as a whole. No save packs a leaf this large.
MAX_PACKED_BYTES = 1 << 20


def require_sound(manifest: Manifest) -> None:
    """Raise a `ValueError` for a manifest that no save writes. The error names the leaf or file, and its problem."""
    if not is_count(manifest.step):
        raise ValueError(f"the step is {manifest.step!r}, which is no number of steps")
    for name, entry in manifest.files.items():
        if problem := problem_of_file(name, *entry):
            raise ValueError(f"the file {name!r} {problem}")
    for leaf in manifest.leaves:
        if problem := problem_of_leaf(leaf):
            raise ValueError(f"the leaf {str(leaf.name)[:200]!r} {problem}")
    require_unique("leaves have the name", (leaf.name for leaf in manifest.leaves))
    require_unique("leaves have the path", (leaf.path for leaf in manifest.leaves))
    require_packed(manifest)
    # Some file systems do not distinguish upper from lower case.
    require_unique("leaves have the folder", (leaf.folder.lower() for leaf in manifest.leaves if leaf.folder))
    processes = manifest.made_by["processes"]
    if not is_count(processes) or not 0 < processes <= len(manifest.files):
        raise ValueError(f"{processes!r} is no number of processes that wrote {len(manifest.files)} files")


def require_packed(manifest: Manifest) -> None:
    """Raise a `ValueError` if packed leaves share or skip bytes. Otherwise, a small file could make large arrays."""
    for file, extents in manifest.packed().items():
        end = 0
        for one in extents:
            if one.offset != end:
                raise ValueError(f"the leaf {one.leaf!r} begins at byte {one.offset} of {file}, not at {end}")
            end += one.bytes
        if file in manifest.files and manifest.files[file][0] != end:
            raise ValueError(f"the file {file!r} has {manifest.files[file][0]} bytes, and its leaves have {end}")


def require_unique(what: str, names: Iterable[Any]) -> None:
    seen = set()
    for name in names:
        if name in seen:
            raise ValueError(f"two {what} {name!r}")
        seen.add(name)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of a JSON object. Raise a `ValueError` if a key occurs twice, because its value is then ambiguous."""
    require_unique("values have the key", (key for key, _ in pairs))
    return dict(pairs)


def problem_of_file(name: Any, size: Any, sha256: Any) -> str:
    if not is_text(name):
        return "has a name that cannot be printed"
    if not is_count(size):
        return f"has a size of {size!r}"
    return "" if isinstance(sha256, str) else f"has {sha256!r} for a digest"


def problem_of_leaf(leaf: SavedLeaf) -> str:
    texts = (leaf.name, leaf.dtype, leaf.kind, *leaf.path, *([] if leaf.key is None else [leaf.key]))
    if not all(isinstance(text, str) for text in (*texts, leaf.folder)) or not is_text(leaf.name):
        return "has a name that is not printable text"
    if any(surrogates(text) for text in texts):
        return "has text that is no Unicode"
    if not leaf.path or not leaf.name.startswith(leaf.path[0]):
        return f"has the path {list(leaf.path)!r}, which is not that of its name"
    if len(leaf.shape) > MAX_DIMS or not all(is_count(n) and n < MAX_DIM for n in leaf.shape):
        return f"has the shape {list(leaf.shape)[:MAX_DIMS]!r}, in which not all are numbers of elements"
    if leaf.kind not in KINDS:
        return f"is of the kind {leaf.kind!r}, not one of {', '.join(KINDS)}"
    if problem := problem_of_dtype(leaf.dtype, leaf.key):
        return problem
    if not leaf.is_empty and not leaf.folder and not leaf.pieces:
        return f"is {leaf.described} and has no files"
    if leaf.is_empty and (leaf.folder or leaf.pieces):
        return f"is {leaf.described}, without elements, and has files"
    if leaf.folder and leaf.pieces:
        return "is packed, and has a folder"
    if leaf.pieces and (problem := problem_of_pieces(leaf)):
        return problem
    if leaf.folder and (not is_text(leaf.folder) or "/" in leaf.folder or leaf.folder.strip(".") == ""):
        return f"has the folder {leaf.folder!r}, which is no name of a folder"
    return ""


def problem_of_pieces(leaf: SavedLeaf) -> str:
    """Explain why the pieces of a leaf do not cover each element of its storage once, or return an empty string."""
    dims = len(leaf.pieces[0].shape)
    for one in leaf.pieces:
        if not isinstance(one.file, str) or not PACKED.fullmatch(one.file):
            return f"has a piece in {one.file!r}, which is no file of packed leaves"
        if not is_count(one.offset) or not isinstance(one.sha256, str):
            return f"has a piece at {one.offset!r} with {one.sha256!r} for a digest"
        counts = all(is_count(n) and n < MAX_DIM for n in (*one.start, *one.shape))
        if not len(one.start) == len(one.shape) == dims <= MAX_DIMS or not counts or not math.prod(one.shape):
            return "has a piece that is no box of elements"
    shape = storage_shape(leaf.pieces)
    if math.prod(shape) * leaf.storage_dtype.itemsize > MAX_PACKED_BYTES:
        return f"is packed, and has more than {MAX_PACKED_BYTES} bytes"
    if not is_storage_of(leaf, shape, leaf.storage_dtype):
        return f"is {leaf.described}, and has pieces of another array"
    covered = np.zeros(shape, bool)
    if sum(math.prod(one.shape) for one in leaf.pieces) == covered.size:  # this comes first, because it bounds the loop
        for one in leaf.pieces:
            covered[one.index] = True
    return "" if covered.all() else "has pieces that overlap, or leave elements out"


def is_storage_of(leaf: SavedLeaf, shape: Sequence[int], dtype: jnp.dtype) -> bool:
    """Return whether an array of this shape may be the storage of a leaf: padded, flat, or the data of PRNG keys."""
    if leaf.key is not None:
        keys, words = shape[: len(leaf.shape)], shape[len(leaf.shape) :]
        return tuple(leaf.shape) == tuple(keys) and math.prod(words) <= KEY_WORDS and dtype == leaf.storage_dtype
    if leaf.kind == "flat":
        fits = len(shape) == 1 and shape[0] >= math.prod(leaf.shape)
    else:
        fits = len(shape) == len(leaf.shape) and all(n >= m for n, m in zip(shape, leaf.shape, strict=True))
    return fits and dtype == leaf.storage_dtype


def problem_of_dtype(dtype: str, key: str | None) -> str:
    if dtype.startswith("key<") != (key is not None):
        return f"is {dtype} and {'not said to be' if key is None else 'said to be'} PRNG keys"
    if key is not None:
        return ""
    try:
        found = jnp.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):  # NumPy parses some strings as a structured type
        return f"has the type {dtype!r}, which does not exist"
    numeric = any(jnp.issubdtype(found, kind) for kind in SCALARS)
    return "" if numeric and found.name == dtype else f"has the type {dtype!r}, which no saved array has"


def is_count(x: Any) -> bool:
    """Return whether `x` is an integer of at least 0. Booleans do not count, although `bool` is a subclass of `int`."""
    return type(x) is int and x >= 0


def is_text(x: Any) -> bool:
    return isinstance(x, str) and bool(x) and x.isprintable()


def surrogates(text: str) -> bool:
    """Return whether the text has unpaired surrogates, which neither a file nor a terminal accepts."""
    return any("\ud800" <= c <= "\udfff" for c in text)
