"""Restore a state from a verified checkpoint. Match the leaves, read each into its new layout, and fill the state.

Before anything is read, all leaves and the optimizer of the checkpoint are compared with the wanted state's.
"""

import dataclasses
import functools
import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from zerojax.checkpoint import arrays, data_state
from zerojax.checkpoint.directory import step_name
from zerojax.checkpoint.manifest import Manifest, SavedLeaf, data_file, made_by
from zerojax.checkpoint.state_leaves import ROUNDING, StateLeaf, convert, placed_like, state_leaves, with_leaves
from zerojax.comm.mesh import on_auto_mesh
from zerojax.comm.processes import Processes
from zerojax.compat import common_dtype
from zerojax.layout.leaf import is_chunked
from zerojax.narrow_state.encoded_state import encoded_leaf, wide_leaf
from zerojax.offload.chunked import filled, kept, replaced
from zerojax.optim.description import Description, description_of
from zerojax.optim.sharding_plan import ShardingPlan
from zerojax.placement.storage import are_shapes
from zerojax.train.state import ZeroState

log = logging.getLogger("zerojax.checkpoint")
REMEDY = (
    "Give a state of the saved model, optimizer and precision. Or pass partial=True to restore what matches, or "
    'partial="params" to begin a new run with the weights that match.'
)
NAMED = 5
NAMED_OPERATIONS = 6
REMEDY_OF_PARAMS = (
    "Make the model of like= as the saved one was made. Or pass partial=True to read the parameters that match, and to "
    "keep the values of the others."
)
WEIGHTS = ("params", "mutable")  # the fields that partial="params" restores


class Restored(NamedTuple):
    """The result of restoring a checkpoint.

    Attributes:
        state: The state, in the form and layout of `like`.
        data: The data that was saved with the state.
        step: The step of the checkpoint.
        missing: Names of the leaves of `like` that were not restored; only with `partial=`.
        unused: Names of the saved leaves that were not restored; only with `partial=`.
        cast: Names of frozen parameters that were rounded to the type in which this stage keeps them.
    """

    state: Any
    data: Any
    step: int
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()


def restore(
    root: Path, manifest: Manifest, like: ZeroState | PyTree, *, data: Any, partial: bool | str, processes: Processes
) -> Restored:
    """Read a verified checkpoint. The arguments are those of `Checkpointer.restore`; a tree has only parameters."""
    folder = root / step_name(manifest.step)
    where = f"The checkpoint of step {manifest.step} in {root}"
    state, matched = on_auto_mesh(None, functools.partial(read_state, folder, manifest, partial, where), like)
    if matched.cast:
        log.info("Rounded to the type in which this stage keeps them: %s.", ", ".join(matched.cast))
    if isinstance(like, ZeroState):
        data = read_data(folder, manifest, data, processes)
        if partial is True and (differing := {*matched.missing, *matched.unused}):
            warnings.warn(
                f"{where} differs from like= in {len(differing)} leaves. All others are restored, step {manifest.step} "
                f"and the optimizer's counts among them. To begin a new run at step 0 with the weights alone, give "
                f'partial="params".',
                stacklevel=6,
            )
    return Restored(state, data, manifest.step, matched.missing, matched.unused, matched.cast)


def read_state(
    folder: Path, manifest: Manifest, partial: bool | str, where: str, like: ZeroState | PyTree
) -> "tuple[Any, Match]":
    """Read the state into the layout of `like`. Return the state, and the match of saved and wanted leaves."""
    leaves, is_state = state_leaves(like), isinstance(like, ZeroState)
    # The tree of a hand-written loop has no loss scale, and may have no step. With "params", `like` keeps its own.
    optional = {"step", "scaling"} if partial != "params" else set()
    optional |= set() if is_state else {"opt_state", "mutable"}
    unwanted = optional - {leaf.path[0] for leaf in leaves.values()}
    unsaved = optional - {leaf.path[0] for leaf in manifest.leaves}
    saved = [leaf for leaf in manifest.leaves if leaf.path[0] not in unwanted]
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.path[0] not in unsaved}
    matched = match(saved, wanted, partial=partial, where=where, remedy=REMEDY if is_state else REMEDY_OF_PARAMS)
    if is_state and not partial and (warning := other_optimizer(manifest, like.plan, where, REMEDY)):
        warnings.warn(warning, stacklevel=8)
    restored = copies_of({name: wanted[name].array for name in matched.missing})
    restored |= read_leaves(folder, matched.pairs)
    for name in leaves.keys() - restored.keys():
        if leaves[name].path[0] == ROUNDING:
            restored[name] = new_seeds(leaves[name])
            continue
        x, value = leaves[name].array, {"step": manifest.step, "scaling.scale": 1}.get(name, 0)
        keeps = name == "scaling.scale" and not are_shapes(x)
        restored[name] = jnp.copy(x) if keeps else jnp.full(x.shape, value, x.dtype, device=x.sharding)
    return with_leaves(like, restored), matched


def copies_of(nodes: Mapping[str, Any]) -> dict[str, Any]:
    """Copy leaves of `like=` that were not saved. Raise a `ValueError` if a leaf is a shape, which has no value."""
    for name, x in nodes.items():
        if are_shapes(x):
            raise ValueError(
                f"{name} was not saved, and like= has only its shape. Give live arrays to keep its value: those of "
                f"tx.init_params(init, key), or tx.create of them. Of a state, restore_params and import_params take "
                f"only the shapes: give them tx.weights(state.params, state.opt_state)."
            )
    return {name: kept(x) if is_chunked(x) else jax.tree.map(jnp.copy, x) for name, x in nodes.items()}


def read_leaves(folder: Path, pairs: Sequence[tuple[SavedLeaf, StateLeaf]]) -> dict[str, Any]:
    """Read each leaf into the place, layout and type in which the state keeps the leaf. Return the leaves by name."""
    requests = {wanted.name: (read_request(saved, wanted), wanted) for saved, wanted in pairs}
    on_devices = {name: request for name, (request, wanted) in requests.items() if not is_chunked(wanted.array)}
    restored = dict(zip(on_devices, arrays.read_arrays(folder, list(on_devices.values())), strict=True))
    for name, (request, wanted) in requests.items():
        node = wanted.array
        if not is_chunked(node):
            restored[name] = as_wanted(restored[name], request, wanted)
        elif request.leaf.dtype == node.dtype and request.leaf.encoding == node.leaf.encoding:
            restored[name] = filled(node, functools.partial(arrays.read_part, folder, request.saved, request.leaf))
        else:  # another encoding, or integer state, which becomes float in the first update
            (found,) = arrays.read_arrays(folder, [request])
            restored[name] = replaced(node, as_wanted(found, request, wanted))
    return restored


def read_request(saved: SavedLeaf, wanted: StateLeaf) -> arrays.ReadRequest:
    """Return the request to read `saved` as `wanted` is stored. If `wanted` takes any type, keep the saved type.

    A leaf that is encoded in another way is read as it was saved. `as_wanted` converts it.
    """
    shape, dtype = wanted.leaf.shape, wanted.array.dtype
    if saved.encoding != wanted.leaf.encoding:
        leaf, sharding = wide_leaf(wanted.leaf), wanted.array.sharding
        return arrays.ReadRequest(saved, encoded_leaf(leaf, saved.encoding) if saved.encoding else leaf, sharding)
    if saved.key is not None:
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        shape, dtype = data.shape, data.dtype
    elif takes_any_dtype(wanted):
        dtype = jnp.dtype(saved.dtype)
    leaf = dataclasses.replace(wanted.leaf, shape=shape, dtype=dtype)
    return arrays.ReadRequest(saved, leaf, wanted.array.sharding)


def as_wanted(x: Any, request: arrays.ReadRequest, wanted: StateLeaf) -> Any:
    """Return an array that was read or moved as `request` says, in the encoding of `wanted`."""
    same = request.leaf.encoding == wanted.leaf.encoding
    return x if same else convert(x, request.leaf, wanted.leaf, request.sharding)


def new_seeds(wanted: StateLeaf) -> Any:
    """Return seeds with which a parameter is rounded, for a state that was saved without them."""
    sharding = NamedSharding(wanted.array.sharding.mesh, wanted.array.sharding.spec)
    wide = dataclasses.replace(wide_leaf(wanted.leaf), encoding=None)
    zeros = jnp.zeros(wide.storage_shape, wide.dtype, device=sharding)
    return placed_like(wanted.array, convert(zeros, wide, wanted.leaf, sharding))


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
    return data_state.fill(template, json.loads((folder / name).read_bytes(), object_hook=data_state.decode))


@dataclasses.dataclass(frozen=True)
class Match:
    """The pairs of a saved leaf and the leaf that it is restored into. `Restored` explains the other fields."""

    pairs: tuple[tuple[SavedLeaf, StateLeaf], ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    cast: tuple[str, ...]


def match(
    saved: Sequence[SavedLeaf], wanted: Mapping[str, StateLeaf], *, partial: bool | str, where: str, remedy: str
) -> Match:
    """Match saved leaves with wanted leaves by name.

    Raise a `ValueError` if leaves differ and `partial` is False, or if no parameter matches. In errors, `where` names
    the saved state, and `remedy` says what to do. With `partial="params"`, only parameters and mutable state can match.
    Seeds for rounding that only one side has are left out. They are dropped, or made again by `new_seeds`.
    """
    names = {leaf.name for leaf in saved} & wanted.keys()
    wanted = {name: leaf for name, leaf in wanted.items() if name in names or leaf.path[0] != ROUNDING}
    saved = [leaf for leaf in saved if leaf.name in names or leaf.path[0] != ROUNDING]
    by_name = {leaf.name: leaf for leaf in saved}
    differences = {name: why for name, leaf in wanted.items() if (why := why_not_restorable(by_name.get(name), leaf))}
    surplus = {name: f"{leaf.described} is there, nothing is wanted" for name, leaf in by_name.items()}
    differences |= {name: why for name, why in surplus.items() if name not in wanted}
    others = [] if partial != "params" else [leaf for leaf in (*saved, *wanted.values()) if leaf.path[0] not in WEIGHTS]
    differences |= dict.fromkeys((leaf.name for leaf in others), "not restored")
    # List parameters first, because differences in other fields mostly follow from differences in the parameters.
    differences = dict(sorted(differences.items(), key=lambda one: not one[0].startswith("params")))
    if differences and not partial:
        first = "\n".join(f"  {name}: {why}" for name, why in list(differences.items())[:NAMED])
        more = f"\n  and {len(differences) - NAMED} more" if len(differences) > NAMED else ""
        raise ValueError(
            f"{where} is of another model, optimizer or precision than the wanted state:\n{first}{more}\n{remedy}"
        )
    pairs = tuple((by_name[name], leaf) for name, leaf in wanted.items() if name not in differences)
    if not any(leaf.path[0] == "params" for _, leaf in pairs) and any(leaf.path[0] == "params" for leaf in saved):
        names = [leaf.name for leaf in saved if leaf.path[0] == "params"]
        raise ValueError(
            f"{where} has no parameter with a name, shape and type of the wanted state. It has "
            f"{', '.join(names[:NAMED])}{', ...' if len(names) > NAMED else ''}. Rename the parameters: "
            f"zerojax.checkpoint.export_checkpoint writes them to a folder, and import_params(..., mapping=) reads "
            f"them under other names."
        )
    return Match(
        pairs,
        missing=tuple(name for name in wanted if name in differences),
        unused=tuple(name for name in by_name if name in differences),
        cast=tuple(leaf.name for saved, leaf in pairs if is_rounded(saved, leaf)),
    )


def why_not_restorable(saved: SavedLeaf | None, wanted: StateLeaf) -> str:
    """Explain why `saved` cannot be restored into `wanted`, or return an empty string if it can."""
    needed = f"{wanted.dtype}{list(wanted.leaf.shape)}"
    if saved is None:
        return f"nothing is there, {needed} is wanted"
    if saved.encoding != wanted.leaf.encoding:  # compare the wide arrays
        if (wide := saved.encoding) is not None:
            saved = dataclasses.replace(saved, shape=wide.shape, dtype=wide.dtype, encoding=None)
        leaf = wide_leaf(wanted.leaf)
        wanted = dataclasses.replace(wanted, leaf=leaf, array=jax.ShapeDtypeStruct(leaf.storage_shape, leaf.dtype))
    if saved.shape != tuple(wanted.leaf.shape):
        return f"{saved.described} is there, {needed} is wanted"
    if (saved.key is None) == arrays.is_key(wanted.array):
        return f"an array {'of' if saved.key else 'without'} PRNG keys is there, {needed} is wanted"
    if saved.dtype == wanted.dtype or takes_any_dtype(wanted) or is_rounded(saved, wanted):
        return ""
    if saved.key is None and widens_exactly(saved.dtype, wanted.array.dtype):
        return ""
    return f"{saved.described} is there, {needed} is wanted, which cannot represent every value"


def is_rounded(saved: SavedLeaf, wanted: StateLeaf) -> bool:
    """Return whether restoring rounds the parameter `saved` to the narrower type of `wanted`, as `tx.create` does."""
    return wanted.narrow and saved.key is None and widens_exactly(wanted.dtype, saved.dtype)


def takes_any_dtype(wanted: StateLeaf) -> bool:
    """Return whether `wanted` accepts any saved type: an update may turn integer optimizer state into floats."""
    return (
        wanted.path[0] == "opt_state"
        and wanted.leaf.encoding is None
        and jnp.issubdtype(wanted.leaf.dtype, jnp.integer)
    )


def widens_exactly(narrow: Any, wide: Any) -> bool:
    narrow, wide = jnp.dtype(narrow), jnp.dtype(wide)
    both = jnp.issubdtype(narrow, jnp.floating) and jnp.issubdtype(wide, jnp.floating)
    return both and narrow != wide and common_dtype(narrow, wide) == wide


def other_optimizer(manifest: Manifest, plan: ShardingPlan, where: str, remedy: str) -> str:
    """Compare the saved transformation with that of `plan`. Transformations may differ although their leaves are equal.

    Raise an error if the structures differ, and return a warning if only the programs differ. If another version of JAX
    or optax saved the checkpoint, the same update may have another structure and program. Then a different structure
    causes only a warning, and programs are not compared. Return an empty string if nothing differs, or if the
    checkpoint has no description, because an early zerojax saved it.
    """
    saved = manifest.transformation
    if saved is None:
        return ""
    wanted, now = description_of(plan.tx, plan.trained), made_by(1)
    others = ((name, manifest.made_by.get(name)) for name in ("jax", "optax"))
    old = ", ".join(f"{name} {made}" for name, made in others if made != now[name])
    if saved.structure != wanted.structure:
        message = f"{where} is of another transformation than the wanted state: {structures(saved, wanted)}"
        if not old:
            raise ValueError(f"{message} {remedy}")
        return f"{message} They may be the same: it was saved with {old}."
    if saved.program == wanted.program or old:
        return ""
    return (
        f"{where} is of an optimizer that computes something else than that of the wanted state: "
        f"{changes(saved, wanted)}. The optimizer state keeps its values. If you changed the optimizer on purpose, "
        f"such as its learning rate, nothing needs to be done."
    )


def structures(saved: Description, wanted: Description) -> str:
    """Describe the structures of `saved` and `wanted`, starting shortly before their first difference."""
    a, b = saved.structure, wanted.structure
    differs = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    begin = max(0, next(differs, min(len(a), len(b))) - 60)
    end = begin + 200
    shown = lambda text: f"{'...' if begin else ''}{text[begin:end]}{'...' if len(text) > end else ''}"
    return f"{shown(a)} is there, {shown(b)} is wanted."


def changes(saved: Description, wanted: Description) -> str:
    before = [one for one in saved.operations if one not in wanted.operations]
    after = [one for one in wanted.operations if one not in saved.operations]
    if not before and not after:
        return "the same operations, in another arrangement"
    more = lambda names: f" and {len(names) - NAMED_OPERATIONS} more" if len(names) > NAMED_OPERATIONS else ""
    listed = lambda names: (", ".join(names[:NAMED_OPERATIONS]) + more(names)) or "nothing else"
    return f"before {listed(before)}; now {listed(after)}"
