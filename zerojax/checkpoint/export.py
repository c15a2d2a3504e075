"""Parameters in files that others read: logical, in a chosen type, without the optimizer."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.checkpoint import arrays as disk
from zerojax.checkpoint.canonical import key_paths, logical, slots_of
from zerojax.checkpoint.errors import CheckpointError
from zerojax.checkpoint.files import step_name
from zerojax.checkpoint.integrity import ARRAYS, Record
from zerojax.checkpoint.restoring import intact
from zerojax.checkpoint.safetensors import NAMES, Files, Tensor, write
from zerojax.config import path_of
from zerojax.layout.chunked import is_chunked
from zerojax.layout.leaf import Leaf
from zerojax.layout.padded import Padded, is_padded
from zerojax.offload.host import to_device
from zerojax.placement.chunking import joined
from zerojax.train.state import ZeroState

if TYPE_CHECKING:
    from jaxtyping import PyTree

FILE_BYTES = 5_000_000_000


def export(
    state: ZeroState | PyTree,
    path: str | Path,
    *,
    dtype: Any = None,
    tied: Mapping[str, str] | None = None,
    file_bytes: int = FILE_BYTES,
) -> list[Path]:
    """Write the parameters of a state to safetensors.

    One leaf at a time is gathered, so that the host holds about one leaf. With several
    processes all call it, and the first one writes.

    Args:
        state: A state, of which master weights are written where there are some; or a tree of
            parameters.
        path: The folder to write, which must not be there, or be empty. It appears when it is
            complete.
        dtype: Floating type that floating leaves are cast to; None leaves them.
        tied: Names of leaves that are another one and not written again, as `{"head.kernel":
            "embed.embedding"}`; the two must be equal. Leaves of a tree of parameters that
            are one and the same array are found without it.
        file_bytes: Past this a second file is begun, and an index written.

    Returns:
        The files written.

    Raises:
        CheckpointError: If the folder is not empty.
        TypeError: If a leaf has a type that safetensors does not know.
        ValueError: If leaves said to be tied are not equal, or two have one name.
    """
    found = list(leaves_of_state(state) if isinstance(state, ZeroState) else leaves_of_params(state))
    ties = dict(tied or {})
    first: dict[int, str] = {}
    for name, x, _ in found:
        other = first.setdefault(id(x), name)
        if other != name:
            ties.setdefault(name, other)
    tensors = [
        tensor_of(name, tuple(leaf.shape), x.dtype, dtype, lambda x=x, leaf=leaf: state_to_device(x, leaf))
        for name, x, leaf in found
    ]
    return write_folder(Path(path), tensors, ties, file_bytes)


def export_checkpoint(
    directory: str | Path,
    path: str | Path,
    *,
    step: int | None = None,
    dtype: Any = None,
    tied: Mapping[str, str] | None = None,
    file_bytes: int = FILE_BYTES,
) -> list[Path]:
    """Write the parameters of a checkpoint to safetensors; no model and no accelerator is needed.

    Args:
        directory: Where a `Checkpointer` saved.
        path: As for `export`.
        step: Which checkpoint; None is the newest.
        dtype: As for `export`.
        tied: As for `export`.
        file_bytes: As for `export`.

    Returns:
        The files written.

    Raises:
        CheckpointError: If there is no such checkpoint.
        DamagedError: If it is damaged.
    """
    directory = Path(directory)
    step, manifest = intact(directory, step)

    def read(record: Record) -> np.ndarray:
        if not record.folder:
            return np.zeros(record.shape, jnp.dtype(record.dtype))
        flat = record.kind == "flat"
        shape = (int(np.prod(record.shape)),) if flat else record.shape
        return disk.read_whole(directory / step_name(step) / ARRAYS, record.folder, shape).reshape(record.shape)

    tensors = [
        tensor_of(".".join(record.path[1:]), record.shape, record.dtype, dtype, lambda record=record: read(record))
        for record in manifest.leaves
        if record.path[0] == "params"
    ]
    return write_folder(Path(path), tensors, dict(tied or {}), file_bytes)


def import_params(path: str | Path, like: ZeroState | PyTree) -> PyTree:
    """Read parameters from safetensors, each device its own part.

    Args:
        path: A folder, or one file.
        like: A state, or a tree of parameters: live arrays, or shapes. Says names, shapes,
            types and where everything goes; floating leaves are cast to its types.

    Returns:
        Parameters in the layout of `like`. Of a state they have the types of its master
        weights, as `tx.create` takes them: `tx.create(import_params(path, tx.create(shapes)))`.
        Leaves that are tied in the file are one array.

    Raises:
        FileNotFoundError: If there is nothing to read.
        ValueError: If a leaf is not there, or has another shape or kind of type.
    """
    files = Files(Path(path))
    tree = master_shapes(like) if isinstance(like, ZeroState) else like
    found, structure = jax.tree.flatten(tree, is_leaf=is_padded)
    names = [dotted(keys) for keys in key_paths(jax.tree.unflatten(structure, range(len(found))))]
    if lacking := [name for name in names if name not in files]:
        have = ", ".join(sorted(files.names())[:5])
        raise ValueError(f"{path} has no {lacking[0]!r} ({len(lacking)} of {len(names)} lack). It has {have}, ...")
    if surplus := sorted(files.names() - set(names)):
        warnings.warn(f"{len(surplus)} tensors of {path} are not wanted: {', '.join(surplus[:5])}.", stacklevel=2)
    made: dict[str, Any] = {}
    for name, x in zip(names, found, strict=True):
        kept = files.tied.get(name, name)
        made[name] = made[kept] if kept in made else placed(files, name, x)
        made.setdefault(kept, made[name])
    return jax.tree.unflatten(structure, [made[name] for name in names])


def placed(files: Files, name: str, like: Any) -> Any:
    """One leaf, read into the layout of `like`."""
    shape, stored = tuple(like.shape), like.storage if is_padded(like) else like
    if files.shape(name) != shape:
        raise ValueError(f"{name} has the shape {list(files.shape(name))} in the file, and {list(shape)} is wanted.")
    dtype = jnp.dtype(like.dtype)

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        spans = [range(*s.indices(n)) for s, n in zip(index or (), stored.shape, strict=True)]
        inside = tuple(slice(min(s.start, n), min(s.stop, n)) for s, n in zip(spans, shape, strict=True))
        read = files.part(name, inside)
        if read.dtype != dtype and not all(jnp.issubdtype(one, jnp.floating) for one in (read.dtype, dtype)):
            raise ValueError(f"{name} is {read.dtype} in the file, and {dtype} is wanted.")
        beyond = [(0, len(s) - n) for s, n in zip(spans, read.shape, strict=True)]
        return np.pad(read.astype(dtype), beyond) if beyond else read.astype(dtype)

    sharding = getattr(stored, "sharding", None)
    if sharding is None:
        array = jnp.asarray(part(tuple(slice(0, n) for n in shape)))
    else:
        array = jax.make_array_from_callback(tuple(stored.shape), sharding, part)
    return Padded(array, like.shape, like.dim) if is_padded(like) else array


def master_shapes(state: ZeroState) -> PyTree:
    """The parameters of a state as shapes where they are stored, in the types of their master weights."""

    def wide(x, part: Leaf):
        stored = x.storage if is_padded(x) else x
        shape = jax.ShapeDtypeStruct(stored.shape, part.dtype, sharding=stored.sharding)
        return Padded(shape, x.shape, x.dim) if is_padded(x) else shape  # pyright: ignore[reportArgumentType]

    leaves, structure = jax.tree.flatten(state.params, is_leaf=is_padded)
    return structure.unflatten([wide(x, part) for x, part in zip(leaves, state.plan.layout.grads, strict=True)])


def leaves_of_state(state: ZeroState) -> Iterator[tuple[str, Any, Leaf]]:
    """Name, stored array and layout of each parameter, the master weight where there is one."""
    for slot in slots_of(state).values():
        if slot.path[0] == "params":
            yield ".".join(slot.path[1:]), slot.array, slot.leaf


def leaves_of_params(params: PyTree) -> Iterator[tuple[str, Any, Leaf]]:
    """As `leaves_of_state`, of a tree of arrays or `Padded`."""
    leaves, structure = jax.tree.flatten(params, is_leaf=is_padded)
    for keys, x in zip(key_paths(jax.tree.unflatten(structure, range(len(leaves)))), leaves, strict=True):
        padded = is_padded(x)
        kind, dim = ("sharded", x.dim) if padded else ("replicated", None)
        yield dotted(keys), x.storage if padded else x, Leaf("", tuple(x.shape), x.dtype, (), 1, kind, dim)


def tensor_of(name: str, shape: tuple[int, ...], saved: Any, wanted: Any, fetch: Any) -> Tensor:
    """What to write of a leaf: floating ones in the type wanted."""
    target = saved
    if str(saved) in NAMES and wanted is not None and jnp.issubdtype(jnp.dtype(saved), jnp.floating):
        target = jnp.dtype(wanted)
    if str(target) not in NAMES:
        raise TypeError(f"params {name!r} is {target}, which safetensors does not hold. Leave it out, or give dtype=.")
    target = jnp.dtype(target)
    return Tensor(name, tuple(shape), target, lambda: fetch().astype(target))


def state_to_device(x: Any, leaf: Leaf) -> np.ndarray:
    """One leaf, whole and logical, on the host; all processes take part."""
    x = joined(x) if is_chunked(x) else x
    if not isinstance(x, jax.Array):
        return np.asarray(x)
    where = x.sharding
    whole = NamedSharding(where.mesh, PartitionSpec()) if isinstance(where, NamedSharding) else None
    return np.asarray(jax.jit(logical, static_argnums=1, out_shardings=whole)(to_device(x), leaf).addressable_data(0))


def write_folder(path: Path, tensors: list[Tensor], tied: dict[str, str], limit: int) -> list[Path]:
    """Write all but the tied tensors into a folder that appears when it is complete."""
    names = [tensor.name for tensor in tensors]
    if doubled := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"Two parameters would have the name {min(doubled)!r}: a key has a dot in it. Rename one.")
    by_name = {tensor.name: tensor for tensor in tensors}
    for name, other in tied.items():
        check_tie(by_name, name, other)
    kept = [tensor for tensor in tensors if tensor.name not in tied]
    if jax.process_index() > 0:
        for tensor in kept:
            tensor.fetch()
        return []
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} is there already and not empty. Give another name, or remove it.")
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    begun.mkdir()
    try:
        written = write(begun, kept, {"format": "flax", **tied}, limit)
        os.replace(begun, path)
    except BaseException:
        shutil.rmtree(begun, ignore_errors=True)
        raise
    return [path / name for name in written]


def check_tie(tensors: dict[str, Tensor], name: str, other: str) -> None:
    """Refuse a tie between leaves that are not there, or not equal."""
    if name not in tensors or other not in tensors:
        lacking = name if name not in tensors else other
        raise ValueError(f"tied= names {lacking!r}, and there is no such parameter. There are {', '.join(tensors)}.")
    a, b = tensors[name], tensors[other]
    if (a.shape, a.dtype) != (b.shape, b.dtype) or a.fetch().tobytes() != b.fetch().tobytes():
        raise ValueError(f"tied= says that {name!r} is {other!r}, but they are not equal.")


def dotted(keys: tuple) -> str:
    """A leaf's name in the file."""
    return ".".join(path_of((key,)) for key in keys)
