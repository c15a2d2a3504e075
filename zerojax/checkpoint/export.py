"""Write parameters as safetensors, in logical shape and a chosen type, without the optimizer's state.

The parameters of a state, a tree or a checkpoint become a list of `TensorSource`, one per leaf. All later code is
shared.
"""

import dataclasses
import functools
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree, Shaped

from zerojax.checkpoint import arrays
from zerojax.checkpoint.directory import step_name, steps_in
from zerojax.checkpoint.errors import CheckpointError, attempt
from zerojax.checkpoint.manifest import SavedLeaf, existing_step, reading, verified
from zerojax.checkpoint.mapping import Names, Section, listed, resolve
from zerojax.checkpoint.safetensors import METADATA, NAMES, Tensor, write_tensors
from zerojax.checkpoint.state_leaves import state_leaves
from zerojax.comm.mesh import on_auto_mesh
from zerojax.comm.processes import Processes
from zerojax.layout.leaf import Leaf, is_chunked
from zerojax.offload.chunked import joined
from zerojax.placement.problems import problem_of
from zerojax.placement.storage import in_logical_shape, to_device
from zerojax.train.state import ZeroState
from zerojax.units import parse_bytes

FILE_BYTES = 5_000_000_000
OF_OTHER_TYPES = "Leave it out, or give jax.random.key_data of a PRNG key, and a cast of other types."


def export(
    state: ZeroState | PyTree,
    path: str | Path,
    *,
    mapping: Names | None = None,
    dtype: Any = None,
    file_bytes: float | str = FILE_BYTES,
) -> list[Path]:
    """Write the parameters of a state to safetensors.

    Tensors are gathered to host memory one at a time. All processes must call this function, and the first process
    writes the files.

    Args:
        state: A state, or a tree of parameters. If a state has master weights, they are written as the parameters.
        path: The folder to write. It must be empty or not exist. It is created only when all files are complete.
        mapping: The mapping with which `import_params` would read the files. None writes every leaf unchanged, under
            the name of its keys joined by dots.
        dtype: The floating type to which floating leaves are cast. None keeps their types.
        file_bytes: Maximum bytes of tensors per file, such as `"5 GB"`. If there are several files, an index is
            written, too.

    Returns:
        The paths of the written files.

    Raises:
        CheckpointError: If the folder is not empty.
        TypeError: If safetensors does not know the type of a leaf.
        ValueError: If leaves of one tensor differ, two leaves have the same name, `dtype` is not a floating type, or
            the mapping does not fit the parameters. The error lists every mismatch.
    """
    check_dtype(dtype)
    if problem := problem_of(None, "state" if isinstance(state, ZeroState) else "params", state):
        raise ValueError(problem)
    params = [one for one in state_leaves(state).values() if one.path[0] == "params"]
    read = lambda one: functools.partial(gather_to_host, one.array, one.leaf)
    sources = [TensorSource(one.path[1:], tuple(one.leaf.shape), one.array.dtype, read(one)) for one in params]
    processes = Processes("export", error=CheckpointError)  # so that no process waits for one that raised an error
    processes.agree("export", attempt(check_target, Path(path).expanduser()) if processes.is_first else "")
    return write_sources(sources, path, mapping, dtype, file_bytes)


def export_checkpoint(
    directory: str | Path,
    path: str | Path,
    *,
    step: int | None = None,
    mapping: Names | None = None,
    dtype: Any = None,
    file_bytes: float | str = FILE_BYTES,
) -> list[Path]:
    """Write the parameters of a checkpoint to safetensors. This needs neither the model nor an accelerator.

    Args:
        directory: The directory of a `Checkpointer`.
        path: As for `export`.
        step: The step to export; None exports the newest step.
        mapping: As for `export`.
        dtype: As for `export`.
        file_bytes: As for `export`.

    Returns:
        The paths of the written files.

    Raises:
        CheckpointError: If there is no such checkpoint.
        DamagedError: If the checkpoint is damaged.
    """
    check_dtype(dtype)
    directory = Path(directory).expanduser()
    manifest = verified(directory, existing_step(directory, step, steps_in(directory)))
    read = functools.partial(read_logical, directory / step_name(manifest.step))
    sources = [
        TensorSource(saved.path[1:], tuple(saved.shape), saved.dtype, functools.partial(read, saved))
        for saved in manifest.leaves
        if saved.path[0] == "params"
    ]
    with reading(directory, manifest):
        return write_sources(sources, path, mapping, dtype, file_bytes)


class TensorSource(NamedTuple):
    """A leaf to write. `fetch(index)` returns the elements at an index of the leaf's leading dims, in host memory."""

    path: tuple[str, ...]
    shape: tuple[int, ...]  # logical shape
    dtype: Any
    fetch: Callable[[tuple[int, ...]], np.ndarray]


def check_dtype(dtype: Any) -> None:
    """Raise an error unless `dtype` is None or a floating type. A cast to integers would destroy the weights."""
    if dtype is not None and not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        raise ValueError(f"dtype= is {dtype}, which would destroy weights. Give a floating type, such as bfloat16.")


def check_target(path: Path) -> None:
    if path.is_symlink():  # the complete folder is renamed to this name, which fails for a link
        raise CheckpointError(f"{path} is a link to {os.readlink(path)}. Give the folder itself, or remove the link.")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} exists already and is not empty. Give another name, or remove it.")


def read_logical(folder: Path, saved: SavedLeaf, index: tuple[int, ...]) -> np.ndarray:
    """Read `saved[index]`, where `index` selects along leading dims, and return it in logical shape."""
    shape = saved.shape[len(index) :]
    box = (*(slice(i, i + 1) for i in index), *(slice(0, n) for n in shape))
    leaf = Leaf("", saved.shape, jnp.dtype(saved.dtype), (), 1)
    return arrays.read_part(folder, saved, leaf, box).reshape(shape)


def tensor_of(name: str, sections: list[Section], sources: list[TensorSource], wanted: Any) -> Tensor:
    """Return the tensor `name` to write. A floating tensor is cast to `wanted`, unless `wanted` is None."""
    common, *others = [sources[one.leaf].dtype for one in sections]
    common = jnp.result_type(common, *others) if others else common
    is_floating = jnp.issubdtype(common, jnp.floating)
    target = common if wanted is None or not is_floating else jnp.dtype(wanted)
    if str(target) not in NAMES:
        remedy = "Give a dtype= that it has, such as bfloat16." if is_floating else OF_OTHER_TYPES
        raise TypeError(f"params {name!r} is {target}, which safetensors cannot store. {remedy}")
    common, target, shape = jnp.dtype(common), jnp.dtype(target), sections[0].tensor_shape

    def fetch() -> np.ndarray:
        tensor = np.empty(shape, common)
        for k, one in enumerate(sections):
            view = one.view(tensor)
            values = sources[one.leaf].fetch(one.index).astype(common, copy=False)
            if k and one.pattern.divided is None and values.tobytes() != view.tobytes():
                names = " and ".join(repr("/".join(sources[one.leaf].path)) for one in sections)
                raise ValueError(
                    f"The mapping makes {names} the same tensor {name!r}, but they are not equal. Give each a name."
                )
            view[...] = values
        return tensor.astype(target, copy=False)

    return Tensor(name, shape, target, fetch)


def gather_to_host(x: Any, leaf: Leaf, index: tuple[int, ...]) -> np.ndarray:
    """Gather `x[index]`, in logical shape, to host memory. All processes must call this function.

    A stack of layers on disk is loaded onto the devices one layer at a time.
    """
    if is_chunked(x) and x.leaf_files is not None and x.chunking.is_by_row(x.leaf):
        if not index:
            stack = np.empty(leaf.shape, leaf.dtype)
            for i in range(len(stack)):
                stack[i] = gather_to_host(x, leaf, (i,))
            return stack
        layer = dataclasses.replace(leaf, shape=(1, *leaf.shape[1:]))
        return gather_to_host(x.leaf_files.load_chunk(*x.chunks, index[0]), layer, (0, *index[1:]))

    def gather(x) -> np.ndarray:
        x = joined(x) if is_chunked(x) else x
        if not isinstance(x, jax.Array):
            return np.asarray(x)[index]
        mesh = getattr(x.sharding, "mesh", None)
        replicated = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        program = jax.jit(logical_at, static_argnums=1, out_shardings=replicated)
        return np.asarray(program(to_device(x), leaf, index).addressable_data(0))

    return on_auto_mesh(None, gather, x)


def logical_at(x: Shaped[Array, "*storage"], leaf: Leaf, index: tuple) -> Shaped[Array, "*logical"]:
    """Return `x[index]` in logical shape. The `index` is traced, so that all indices share one program."""
    x = in_logical_shape(x, leaf)
    return x[index] if index else x


def write_sources(
    sources: list[TensorSource],
    path: str | Path,
    mapping: Names | None,
    dtype: Any,
    file_bytes: float | str,
) -> list[Path]:
    """Write leaves into a temporary folder, and rename the complete folder. Only the first process writes."""
    file_bytes = parse_bytes("file_bytes", file_bytes, least=1)
    resolved = resolve(mapping, [(one.path, one.shape) for one in sources])
    if METADATA in resolved.tensors:
        raise ValueError(
            f"A tensor would be named {METADATA!r}, under which a file of safetensors keeps its metadata, so nothing "
            f"could read the file. Rename the parameter, or give mapping= with another name for it."
        )
    if resolved.problems:
        raise ValueError(f"The mapping does not fit these parameters:{listed(resolved.problems)}")
    tensors = [tensor_of(name, sections, sources, dtype) for name, sections in resolved.tensors.items()]
    if jax.process_index() > 0:
        for tensor in tensors:
            tensor.fetch()
        return []
    path = Path(path).expanduser()
    check_target(path)
    # transformers reads `format` to learn which framework the tensors' names come from.
    metadata = {"format": "flax" if mapping is None else "pt"}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    temporary.mkdir()
    try:
        written = write_tensors(temporary, tensors, metadata, file_bytes)
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return [path / name for name in written]
