"""Export: parameters as safetensors, in logical shape and a chosen type, without the optimizer."""

from __future__ import annotations

import functools
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.checkpoint import arrays
from zerojax.checkpoint.directory import step_name
from zerojax.checkpoint.errors import CheckpointError
from zerojax.checkpoint.manifest import ARRAYS, SavedLeaf
from zerojax.checkpoint.resharding import logical
from zerojax.checkpoint.safetensors import NAMES, Tensor, write
from zerojax.checkpoint.state_leaves import dotted, key_paths, state_leaves
from zerojax.checkpoint.verifying import existing_step, reading, verified
from zerojax.comm.explicit import on_auto_mesh
from zerojax.layout.chunked import is_chunked
from zerojax.layout.leaf import Leaf
from zerojax.layout.padded import is_padded
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

    One leaf at a time is gathered, so that host memory has room for one. With several
    processes all call it, and the first one writes.

    Args:
        state: A state, of which master weights are written where there are some; or a tree of
            parameters.
        path: The folder to write, which must not exist, or be empty. It appears when it is
            complete.
        dtype: Floating type that floating leaves are cast to; None leaves them.
        tied: Leaves that are tied to another one and not written again, as `{"head.kernel":
            "embed.embedding"}`; the two must be equal. In a tree of parameters, leaves that
            are the same array need no mention.
        file_bytes: Size from which a second file is begun, and an index written.

    Returns:
        The files written.

    Raises:
        CheckpointError: If the folder is not empty.
        TypeError: If a leaf has a type that safetensors does not know.
        ValueError: If leaves said to be tied are not equal, two have the same name, or `dtype`
            is no floating type.
    """
    check_dtype(dtype)
    leaves = list(leaves_of_state(state) if isinstance(state, ZeroState) else leaves_of_params(state))
    ties = dict(tied or {})
    first: dict[int, str] = {}
    for name, x, _ in leaves:
        other = first.setdefault(id(x), name)
        if other != name:
            ties.setdefault(name, other)
    tensors = [
        tensor_of(name, tuple(leaf.shape), x.dtype, dtype, functools.partial(gather_to_host, x, leaf))
        for name, x, leaf in leaves
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
    check_dtype(dtype)
    directory = Path(directory)
    manifest = verified(directory, existing_step(directory, step))
    folder = directory / step_name(manifest.step) / ARRAYS

    def read(saved: SavedLeaf) -> np.ndarray:
        if not saved.folder:
            return np.zeros(saved.shape, jnp.dtype(saved.dtype))
        shape = (math.prod(saved.shape),) if saved.kind == "flat" else saved.shape
        return arrays.read_on_host(folder, saved.folder, shape).reshape(saved.shape)

    tensors = [
        tensor_of(".".join(saved.path[1:]), saved.shape, saved.dtype, dtype, functools.partial(read, saved))
        for saved in manifest.leaves
        if saved.path[0] == "params"
    ]
    with reading(directory, manifest):
        return write_folder(Path(path), tensors, dict(tied or {}), file_bytes)


def check_dtype(dtype: Any) -> None:
    """Refuse to cast weights to integers."""
    if dtype is not None and not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        raise ValueError(f"dtype= is {dtype}, which would destroy weights. Give a floating type, such as bfloat16.")


def leaves_of_state(state: ZeroState) -> Iterator[tuple[str, Any, Leaf]]:
    """Name, stored array and layout of each parameter, or of its master weights."""
    for one in state_leaves(state).values():
        if one.path[0] == "params":
            yield ".".join(one.path[1:]), one.array, one.leaf


def leaves_of_params(params: PyTree) -> Iterator[tuple[str, Any, Leaf]]:
    """As `leaves_of_state`, of a tree of arrays or `Padded`."""
    leaves, structure = jax.tree.flatten(params, is_leaf=is_padded)
    for path, x in zip(key_paths(jax.tree.unflatten(structure, range(len(leaves)))), leaves, strict=True):
        padded = is_padded(x)
        kind, dim = ("sharded", x.dim) if padded else ("replicated", None)
        yield dotted(path), x.storage if padded else x, Leaf("", tuple(x.shape), x.dtype, (), 1, kind, dim)


def tensor_of(name: str, shape: tuple[int, ...], dtype: Any, wanted: Any, fetch: Callable[[], np.ndarray]) -> Tensor:
    """What to write of a leaf: floating ones in the type wanted."""
    target = dtype
    if str(dtype) in NAMES and wanted is not None and jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        target = jnp.dtype(wanted)
    if str(target) not in NAMES:
        raise TypeError(f"params {name!r} is {target}, which safetensors cannot store. Leave it out, or give dtype=.")
    target = jnp.dtype(target)
    return Tensor(name, tuple(shape), target, lambda: fetch().astype(target))


def gather_to_host(x: Any, leaf: Leaf) -> np.ndarray:
    """All of a leaf in host memory, in logical shape; all processes take part."""

    def gather(x) -> np.ndarray:
        x = joined(x) if is_chunked(x) else x
        if not isinstance(x, jax.Array):
            return np.asarray(x)
        mesh = getattr(x.sharding, "mesh", None)
        replicated = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        program = jax.jit(logical, static_argnums=1, out_shardings=replicated)
        return np.asarray(program(to_device(x), leaf).addressable_data(0))

    return on_auto_mesh(None, gather, x)


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
        raise CheckpointError(f"{path} exists already and is not empty. Give another name, or remove it.")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    temporary.mkdir()
    try:
        written = write(temporary, kept, {"format": "flax", **tied}, limit)
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return [path / name for name in written]


def check_tie(tensors: dict[str, Tensor], name: str, other: str) -> None:
    """Refuse a tie between leaves that do not exist, or are not equal."""
    if name not in tensors or other not in tensors:
        missing = name if name not in tensors else other
        raise ValueError(f"tied= names {missing!r}, and there is no such parameter. There are {', '.join(tensors)}.")
    a, b = tensors[name], tensors[other]
    if (a.shape, a.dtype) != (b.shape, b.dtype) or a.fetch().tobytes() != b.fetch().tobytes():
        raise ValueError(f"tied= says that {name!r} is {other!r}, but they are not equal.")
