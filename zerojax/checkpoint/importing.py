"""Read parameters from safetensors, or from a checkpoint of another run, into any layout."""

import functools
import itertools
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from zerojax.checkpoint.checkpointer import Checkpointer
from zerojax.checkpoint.mapping import Names, Resolved, Section, listed, resolve
from zerojax.checkpoint.restoring import NAMED, copies_of
from zerojax.checkpoint.safetensors import DTYPES, Header, read_headers
from zerojax.checkpoint.state_leaves import keys_of, leaf_name
from zerojax.layout.leaf import Leaf, is_chunked, is_padded, is_stored_node
from zerojax.layout.padded import Padded
from zerojax.offload.chunked import assembled, filled, parts_of
from zerojax.staged.model_files import files_of
from zerojax.train.state import ZeroState

BLOCK_BYTES = 1 << 20

# The tensors of one leaf. Maps each index of the leaf's stacked dims to a tensor's header, and the section to read.
Tensors = dict[tuple[int, ...], tuple[Header, Section]]


def import_params(
    path: str | Path,
    like: ZeroState | PyTree,
    *,
    mapping: Names | None = None,
    partial: bool | Callable[[str], bool] = False,
) -> PyTree:
    """Read parameters from safetensors. Each device reads its own shard.

    Names, shapes and types are checked before any tensor is read. Host memory holds one shard at a time, or one leaf if
    the leaf is replicated. A parameter on disk is written to its files one chunk at a time, and no device takes part.

    Args:
        path: A folder, or one file.
        like: A state or a tree of parameters, with arrays or shapes as leaves. The names, shapes, types and shardings
            of the result are those of `like`. Floating tensors are cast to the types of `like`.
        mapping: Maps names in the file to leaves, as `zerojax.checkpoint.mapping` describes. None expects that
            each tensor's name is a leaf's keys joined by dots, as in the files that `export` writes.
        partial: Allow leaves of `like` for which the files have no tensor, such as LoRA factors or a new head. They
            keep the values that they have in `like`. A function of a leaf's path, such as `lambda path: "lora" in
            path`, returns which leaves these are. True allows any leaf that the mapping does not name (without a
            mapping, any leaf), and a warning names these leaves. A state has no values here: give
            `tx.weights(state.params, state.opt_state)`.

    Returns:
        Parameters in the layout of `like`. For a state, they have the types of its master weights, as `tx.create`
        expects: `tx.create(import_params(path, tx.create(shapes)))`.
        If `like` is a tree with parameters on disk, its files are overwritten, and `like` cannot be used any more.

    Raises:
        FileNotFoundError: If there are no files, or a file is missing.
        TypeError: If `mapping` is not a mapping.
        ValueError: If a file is damaged; if a tensor is missing, or has another shape or a type of another kind (such
            as integers for floats); or if the mapping does not fit. A mapping must name every tensor. Without a
            mapping, tensors that belong to no leaf only cause a warning. The error lists every mismatch.
    """
    headers = read_headers(Path(path).expanduser())
    tree = master_shapes(like) if isinstance(like, ZeroState) else like
    found, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_stored_node)
    nodes = [x for _, x in found]
    leaves = [x.leaf if is_chunked(x) else x for x in nodes]  # with logical shapes
    given = [(keys_of(path), tuple(x.shape)) for (path, _), x in zip(found, leaves, strict=True)]
    may_lack = partial if callable(partial) else lambda path: partial
    resolved = resolve(mapping, given, may_lack=may_lack)
    named = () if callable(partial) or mapping is None else resolved.tensors  # must be in the files
    new = drop_new_leaves(resolved, {*headers, *named}, [may_lack("/".join(keys)) for keys, _ in given])
    unread = sorted(headers.keys() - resolved.tensors.keys())
    unread = [name for name in unread if not any(one.fullmatch(name) for one in resolved.left_out)]
    problems = [*resolved.problems, *problems_of_tensors(headers, resolved, leaves)]
    if mapping is not None or problems:
        problems += [f"{name} is only in the file: map it to a parameter, or to None" for name in unread]
    elif unread:
        warnings.warn(f"{len(unread)} tensors of {path} are not wanted: {', '.join(unread[:5])}.", stacklevel=2)
    if problems:
        raise ValueError(f"{path} does not have these parameters, and nothing was read:{listed(problems)}")
    copies = copies_of({leaf_name("params", found[i][0]): nodes[i] for i in new})
    warn_of_kept(path, () if callable(partial) else copies)
    tensors: list[Tensors] = [{} for _ in leaves]
    for name, sections in resolved.tensors.items():
        for section in sections:
            tensors[section.leaf][section.index] = headers[name], section
    arrays = dict(zip(new, copies.values(), strict=True))
    for i, (node, x, of_leaf) in enumerate(zip(nodes, leaves, tensors, strict=True)):
        if i not in arrays:
            read = functools.partial(read_shard, of_leaf, x)
            arrays[i] = filled(node, read) if is_chunked(node) else read_leaf(x, read)
    return jax.tree.unflatten(structure, [arrays[i] for i in range(len(leaves))])


def drop_new_leaves(resolved: Resolved, required: Collection[str], may_lack: Sequence[bool]) -> list[int]:
    """Remove from `resolved` each leaf that may lack and has no required tensor. Return the indices of these leaves.

    If no leaf has a required tensor, nothing is removed, so that every missing tensor is a problem.
    """
    read = {one.leaf for name, sections in resolved.tensors.items() if name in required for one in sections}
    new = [i for i, may in enumerate(may_lack) if may and i not in read] if read else []
    for name, sections in list(resolved.tensors.items()):
        if all(one.leaf in new for one in sections):
            del resolved.tensors[name]
    return new


def warn_of_kept(source: Any, names: Collection[str]) -> None:
    if names:
        some = f"{', '.join(list(names)[:NAMED])}{f' and {len(names) - NAMED} more' * (len(names) > NAMED)}"
        warnings.warn(f"{source} lacks {len(names)} leaves, which keep their values of like=: {some}.", stacklevel=3)


def restore_params(
    directory: str | Path, like: ZeroState | PyTree, *, step: int | None = None, partial: bool = False
) -> PyTree:
    """Read the parameters of a checkpoint, to begin a new run with them. Each device reads its own shard.

    Args:
        directory: The directory of a `Checkpointer`. The other run may have another stage, mesh, precision or
            optimizer, and may still write to the directory.
        like: As for `import_params`, with shardings.
        step: The step to read; None reads the newest step.
        partial: Allow parameters that only `like` or only the checkpoint has, or that have different shapes, such as
            LoRA factors or a new head. Such parameters of `like`, which are not a state, keep their values, and a
            warning names them.

    Returns:
        Parameters in the layout of `like`, as from `import_params`, for `tx.create` or `tx.init`.

    Raises:
        CheckpointError: If there is no such checkpoint; a `DamagedError` if it is damaged.
        TypeError: If a leaf of `like` has no sharding.
        ValueError: If parameters differ and `partial` is false, if none is the same, or if `like` has only the shape of
            a parameter that the checkpoint lacks.
    """
    tree = master_shapes(like) if isinstance(like, ZeroState) else like
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if getattr(x, "sharding", None) is None:
            name = leaf_name("params", path)
            raise TypeError(f"{name} of like= is a {type(x).__name__} without a sharding. Place it with tx.shard.")
    reader = Checkpointer(directory, read_only=True)
    restored = reader._restore(tree, step=step, partial=partial)
    warn_of_kept(reader.directory, restored.missing)
    return restored.state


def problems_of_tensors(headers: dict[str, Header], resolved: Resolved, leaves: list[Any]) -> Iterator[str]:
    for name, sections in resolved.tensors.items():
        if name not in headers:
            yield f"{name} is missing"
            continue
        found, shape = headers[name], sections[0].tensor_shape
        if found.shape != shape:
            yield f"{name} has the shape {list(found.shape)} in the file, and {list(shape)} is wanted"
        for dtype in {jnp.dtype(leaves[one.leaf].dtype) for one in sections}:
            known = jnp.dtype(DTYPES[found.dtype]) if found.dtype in DTYPES else None
            floating = known is not None and all(jnp.issubdtype(one, jnp.floating) for one in (known, dtype))
            if known != dtype and not floating:
                yield f"{name} is {known or found.dtype} in the file, and {dtype} is wanted"


def read_leaf(like: Any, read: Callable[[tuple[slice, ...]], np.ndarray]) -> Any:
    stored = like.storage if is_padded(like) else like
    shape, sharding = tuple(stored.shape), getattr(stored, "sharding", None)
    if sharding is None:
        array = jnp.asarray(read(tuple(slice(0, size) for size in shape)))
    else:
        shards = (read(tuple(slice(*span) for span in box)) for box in parts_of(shape, sharding))
        array = assembled(shape, sharding, like.dtype, shards)
    return Padded(array, like.shape, like.dim) if is_padded(like) else array


def read_shard(tensors: Tensors, like: Any, box: tuple[slice, ...]) -> np.ndarray:
    """Read a part of a leaf's storage, and pad it with zeros. `like` has the leaf's logical shape and type."""
    inside = [slice(min(one.start, n), min(one.stop, n)) for one, n in zip(box, like.shape, strict=True)]
    shard = np.zeros([one.stop - one.start for one in box], like.dtype)
    if not tensors:  # a stacked leaf whose leading dim has size 0
        return shard
    stacked = len(next(iter(tensors)))
    for at in itertools.product(*(range(one.start, one.stop) for one in inside[:stacked])):
        x = view(*tensors[at], tuple(inside[stacked:]))
        position = (i - one.start for i, one in zip(at, box, strict=False))
        copy_by_blocks(shard[(*position, *(slice(n) for n in x.shape), ...)], x)
    return shard


def copy_by_blocks(out: np.ndarray, x: np.ndarray) -> None:
    """Copy and cast `x` in blocks, in file order. To copy a transposed bfloat16 view at once takes twice as long."""
    if not x.ndim:
        out[...] = x
        return
    dim = int(np.argmax(x.strides))
    rows = max(1, BLOCK_BYTES // max(x.strides[dim], 1))
    for start in range(0, x.shape[dim], rows):
        block = (slice(None),) * dim + (slice(start, start + rows),)
        out[block] = x[block]


def view(header: Header, section: Section, index: tuple[slice, ...]) -> np.ndarray:
    """Return the slice `index` of a section, memory-mapped. The file is read only when the slice is copied."""
    return section.view(header.map())[index]


def master_shapes(state: ZeroState) -> PyTree:
    """Return the parameters of a state as shapes with shardings, in the types of their master weights.

    Each parameter on disk becomes a node of new files, which no state uses yet.
    """
    files, grads = files_of(state.params), state.plan.layout.grads
    on_disk = {} if files is None else files.given([leaf.dtype for leaf in grads]).nodes(is_shape=True)

    def wide(i: int, x, grad: Leaf):
        if i in on_disk:
            return on_disk[i]
        stored = x.storage if is_padded(x) else x
        shape = jax.ShapeDtypeStruct(stored.shape, grad.dtype, sharding=stored.sharding)
        return Padded(shape, x.shape, x.dim) if is_padded(x) else shape  # pyright: ignore[reportArgumentType]

    leaves, structure = jax.tree.flatten(state.params, is_leaf=is_stored_node)
    return structure.unflatten([wide(i, x, grad) for i, (x, grad) in enumerate(zip(leaves, grads, strict=True))])
