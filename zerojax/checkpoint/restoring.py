"""Restore a state from a verified checkpoint. Match the leaves, read each into its new layout, and fill the state."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zerojax.checkpoint import arrays, data_state
from zerojax.checkpoint.directory import step_name
from zerojax.checkpoint.errors import no_zero_state
from zerojax.checkpoint.manifest import Manifest, SavedLeaf, data_file
from zerojax.checkpoint.matching import Match, match, target_layout
from zerojax.checkpoint.processes import Processes
from zerojax.checkpoint.resharding import convert, read_plan
from zerojax.checkpoint.state_leaves import StateLeaf, state_leaves, with_leaves
from zerojax.comm.explicit import on_auto_mesh
from zerojax.layout.chunked import is_chunked
from zerojax.placement.chunking import filled, joined, replaced
from zerojax.train.state import ZeroState

log = logging.getLogger("zerojax.checkpoint")
REMEDY = (
    "Make the state given as like= as the saved one was made. Or pass partial=True to restore what matches, or "
    'partial="params" to begin a new run with the weights that match.'
)


class Restored(NamedTuple):
    """The result of restoring a checkpoint.

    Attributes:
        state: The state, in the layout of `like`.
        data: The data that was saved with the state.
        step: The step of the checkpoint.
        missing: Names of the leaves of `like` that were not restored; only with `partial=`.
        unused: Names of the saved leaves that were not restored; only with `partial=`.
        cast: Names of frozen parameters that were rounded to the type in which this stage keeps them.
    """

    state: ZeroState
    data: Any
    step: int
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()


def restore(
    root: Path, manifest: Manifest, like: ZeroState, *, data: Any, partial: bool | str, processes: Processes
) -> Restored:
    """Read a verified checkpoint. The arguments are those of `Checkpointer.restore`."""
    if not isinstance(like, ZeroState):
        raise no_zero_state("restore takes like=", like)
    folder = root / step_name(manifest.step)
    where = f"The checkpoint of step {manifest.step} in {root}"
    state, matched = on_auto_mesh(None, functools.partial(read_state, folder, manifest, partial, where), like)
    if partial is True and (differing := {*matched.missing, *matched.unused}):
        warnings.warn(
            f"{where} differs from like= in {len(differing)} leaves. All others are restored, step {manifest.step} and "
            f"the optimizer's counts among them. To begin a new run at step 0 with the weights alone, give "
            f'partial="params".',
            stacklevel=5,
        )
    if matched.warning:
        warnings.warn(matched.warning, stacklevel=5)
    if matched.cast:
        log.info("Rounded to the type in which this stage keeps them: %s.", ", ".join(matched.cast))
    data = read_data(folder, manifest, data, processes)
    return Restored(state, data, manifest.step, matched.missing, matched.unused, matched.cast)


def read_state(
    folder: Path, manifest: Manifest, partial: bool | str, where: str, like: ZeroState
) -> tuple[ZeroState, Match]:
    """Read the state into the layout of `like`. Return the state, and the match of saved and wanted leaves."""
    matched = match(manifest, like, partial=partial, where=where, remedy=REMEDY)
    wanted = state_leaves(like)
    restored = read_leaves(folder, matched.pairs)
    for name in matched.missing:
        array = wanted[name].array
        if isinstance(array.chunks[0] if is_chunked(array) and array.chunks else array, jax.ShapeDtypeStruct):
            raise ValueError(f"{name} was not saved, and like= has only its shape. Give live arrays to keep its value.")
        restored[name] = replaced(array, joined(array)) if is_chunked(array) else jnp.copy(array)
    return with_leaves(like, restored), matched


def read_leaves(folder: Path, pairs: Sequence[tuple[SavedLeaf, StateLeaf]]) -> dict[str, Any]:
    restored = read_on_devices(folder, [pair for pair in pairs if not is_chunked(pair[1].array)])
    for saved, wanted in pairs:
        if is_read_by_chunk(saved, wanted):
            restored[wanted.name] = filled(wanted.array, functools.partial(arrays.read_box, folder, saved))
        elif is_chunked(wanted.array):  # one leaf at a time, because device memory may be too small for all
            restored[wanted.name] = replaced(wanted.array, read_on_devices(folder, [(saved, wanted)])[wanted.name])
    return restored


def is_read_by_chunk(saved: SavedLeaf, wanted: StateLeaf) -> bool:
    """Return whether a leaf is read into host memory, or into files, chunk by chunk.

    The leaf must be offloaded and have the saved type. Neither the leaf nor the saved leaf can be flat.
    """
    has_same_form = "flat" not in (saved.kind, wanted.leaf.kind) and saved.dtype == wanted.dtype
    return is_chunked(wanted.array) and has_same_form and not saved.is_empty


def read_on_devices(folder: Path, pairs: Sequence[tuple[SavedLeaf, StateLeaf]]) -> dict[str, Any]:
    """Read leaves into device memory in storage shape. Return them by name.

    Leaves that must be converted are read one by one, so that only one of them is in memory in both forms.
    """
    loaded = {wanted.name: zeros_of(wanted.array) for saved, wanted in pairs if saved.is_empty}
    plain = {}
    for saved, wanted in pairs:
        if saved.is_empty:
            continue
        request, conversion = read_plan(saved, target_layout(saved, wanted), wanted.array)
        if conversion is None:
            plain[wanted.name] = request
        else:
            [x] = arrays.read(folder, [request])
            loaded[wanted.name] = jax.block_until_ready(convert(x, conversion))
    return loaded | dict(zip(plain, arrays.read(folder, list(plain.values())), strict=True))


def zeros_of(array: Any) -> jax.Array:
    return jnp.zeros(array.shape, array.dtype, device=array.sharding)


def read_data(folder: Path, manifest: Manifest, template: Any, processes: Processes) -> Any:
    count = manifest.made_by["processes"]
    same = len({manifest.files[data_file(i)] for i in range(count)}) == 1
    if count != processes.count and not same:
        warnings.warn(
            f"The data was saved by {count} processes, each with a position that differs, and there are "
            f"{processes.count} now, so it is not restored. Read rows with grain.experimental.ElasticIterator, or "
            f"restore on as many processes.",
            stacklevel=4,
        )
        return None
    name = data_file(0 if same else processes.index)
    return data_state.loads((folder / name).read_bytes(), template)
