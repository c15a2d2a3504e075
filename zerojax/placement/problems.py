"""Explain why an array cannot be used, or how its placement differs from the plan."""

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.core
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from zerojax.config.data_mesh import entry_axes, in_words
from zerojax.layout.leaf import Leaf, is_chunked, is_padded, is_stored_node, restricted

NAMED = 3


def misplaced(leaf: Leaf, x: Any, data: Sequence[str]) -> str:
    """Describe the placement of a real (not traced) array if it differs from the plan. Otherwise, return "".

    Only the axes `data`, which divide the batch, are compared. The compiler decides about all other mesh axes. `leaf`
    is the planned layout. `x` is an array in storage, or its `Padded` or `Chunked` node.
    """
    x = x.storage if is_padded(x) else x
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer) or is_chunked(x) or leaf.shards == 1:
        return ""
    planned, sharding = over(leaf.spec, data), x.sharding
    if isinstance(sharding, NamedSharding) and set(data) <= set(sharding.mesh.axis_names):
        found = over(sharding.spec, data)
    elif sharding.is_fully_replicated:
        found = ()
    else:
        return ""  # a sharding without mesh axes, such as the compiler's, may equal the plan
    if found == planned:
        return ""
    wanted, instead = placements_in_words(planned, found)
    return f"planned: {wanted}; found: {'on one device' if is_on_one_device(x) else instead}"


def is_on_one_device(x: Any) -> bool:
    return len(x.sharding.device_set) == 1


def over(spec: PartitionSpec, data: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return, for each dim of `spec`, the axes of `data` that divide the dim. Drop undivided dims at the end."""
    return tuple(map(entry_axes, restricted(spec, data)))


def placements_in_words(*placements: tuple[tuple[str, ...], ...]) -> list[str]:
    """Describe each placement. If none is replicated, the texts also name the sharded dims."""

    def one(dims: tuple[tuple[str, ...], ...]) -> str:
        names = ", ".join(repr(axis) for axes in dims for axis in axes)
        at = " and ".join(str(i) for i, axes in enumerate(dims) if axes)
        dim = f" on dim {at}" if all(placements) else ""
        return f"sharded over {names}{dim}" if any(dims) else "replicated"

    return [one(dims) for dims in placements]


def warn_of_misplaced(
    trees: Iterable[tuple[str, PyTree, Sequence[Leaf]]], data: Sequence[str], *, at_start: bool = False, stacklevel: int
) -> None:
    """Warn about arrays that are not sharded as planned.

    `trees` has the name of each tree, the tree, and the layouts of its leaves. Only the axes `data` are compared. An
    array on one device is accepted, because the step shards its arguments. With `at_start`, when a loop is set up, it
    is not: a loop would return it replicated. `stacklevel` is that of `warnings.warn`; 1 means the caller of this
    function.
    """
    found: dict[str, str] = {}
    for name, tree, leaves in trees:
        nodes = jax.tree.leaves(tree, is_leaf=is_stored_node)
        placed = zip(leaves, nodes, strict=True) if len(leaves) == len(nodes) else ()  # other checks refuse the tree
        for leaf, node in placed:
            x = node.storage if is_padded(node) else node
            if leaf.kind == "replicated":
                continue
            if at_start and isinstance(x, np.ndarray) and leaf.shards > 1:
                found[f"{name}{leaf.path}"] = "planned: sharded; found: a NumPy array"
            elif (text := misplaced(leaf, x, data)) and (at_start or not is_on_one_device(x)):
                found[f"{name}{leaf.path}"] = text
    if found:
        first = ", ".join(f"{path} ({text})" for path, text in list(found.items())[:NAMED])
        more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
        cause = (
            "Before tx.init, make the parameters with tx.init_params(init, key), or shard existing ones with params = "
            "tx.shard(params), and train these. For a module of NNX, call zerojax.flax_nnx.init_module or shard_module."
            if at_start
            else "Often a jax.jit(out_shardings=...) has placed them, for example with shardings of nn.get_sharding. "
            "Leave out_shardings out, or pass shardings of tx.shardings(params). tx.shard(params) places existing "
            "parameters."
        )
        warnings.warn(
            f"{len(found)} arrays are placed otherwise than planned: {first}{more}. They use the memory of their "
            f"present placement. tx.train_step returns them as planned, but a hand-written loop keeps them where "
            f"they are. {cause} zerojax.report names every leaf.",
            stacklevel=stacklevel + 1,
        )


def check_present(mesh: Mesh) -> None:
    """Raise a ValueError if arrays cannot be made, because `mesh` has devices that this machine does not have."""
    device = mesh.devices.flat[0]
    with contextlib.suppress(RuntimeError):  # of a platform that JAX does not know here
        if device in jax.devices(device.platform):
            return
    raise ValueError(
        f"Arrays cannot be made on {mesh.size} x {device.device_kind}, which this machine does not have. To plan a "
        f"jitted function, make tx and arrays on {mesh.size} simulated devices: zerojax.plan moves both to the GPUs. A "
        f"step of tx.train_step is planned with shapes: tx.create(jax.eval_shape(init, key))."
    )


@contextlib.contextmanager
def unusable_named(mesh: Mesh | None, *, donates: bool = False, **trees: Any) -> Iterator[None]:
    """Replace JAX's error about an unusable array by an error that names the array.

    The arrays are checked only after an error. `mesh` is the mesh of the transformation, or None to accept arrays on
    any mesh. `trees` are the arguments by name. With `donates`, the call deletes arrays, so deleted ones are not named.
    """
    of_arrays = (ValueError,) if donates else (RuntimeError, ValueError)
    try:
        yield
    except of_arrays as error:
        for name, tree in trees.items():
            if donates:
                tree = jax.tree.map(lambda x: None if isinstance(x, jax.Array) and x.is_deleted() else x, tree)
            if problem := problem_of(mesh, name, tree):
                raise ValueError(problem) from error
        raise


def problem_of(mesh: Mesh | None, name: str, tree: Any) -> str:
    """Explain why the first unusable array cannot be used. Return an empty string if all arrays can be used."""
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        which = name + jax.tree_util.keystr(path)
        if isinstance(x, jax.ShapeDtypeStruct):
            return (
                f"{which} is a shape and has no values. Make it with tx.create(params) or tx.shard(params) of arrays, "
                f"or of what tx.init_params returns; or restore a checkpoint into it."
            )
        if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
            continue
        if x.is_deleted():
            return (
                f"{which} was used up: a step, or a jit that it was donated to, took its memory. Use the result of "
                f"that call, or copy the array before the call."
            )
        if problem := elsewhere(mesh, which, x):
            return problem
    return ""


def elsewhere(mesh: Mesh | None, which: str, x: jax.Array) -> str:
    """Explain why an array on other devices than those of `mesh` cannot be used. Return "" if it can be used."""
    if mesh is not None:
        devices, found = set(mesh.devices.flat), getattr(x.sharding, "mesh", None)
        if isinstance(found, Mesh) and set(found.devices.flat) != devices:
            return (
                f"{which} is on a mesh of {found.size} devices {dict(found.shape)}, and the mesh of this "
                f"transformation has {mesh.size}, {dict(mesh.shape)} over {in_words(mesh.axis_names)}. Use the "
                f"transformation that placed the array, or move it: tx.unshard(params) of that transformation returns "
                f"arrays that tx.shard of another one takes."
            )
        if x.committed and x.sharding.device_set != devices:
            return (
                f"{which} was put on {len(x.sharding.device_set)} of the {mesh.size} devices of the mesh. Give it the "
                f"sharding that it had, with jax.device_put(x, old.sharding), or place parameters with tx.shard."
            )
    return ""


def tree_difference(found: Sequence, required: Sequence[Leaf]) -> str:
    """Describe how the paths of a flattened tree differ from the required paths."""
    paths, wanted = [jax.tree_util.keystr(path) for path, _ in found], [leaf.path for leaf in required]
    if lacking := [path for path in wanted if path not in paths]:
        return f"lacks {lacking[0]}"
    surplus = [path for path in paths if path not in wanted]
    return f"has {surplus[0]} beyond that" if surplus else "has other nodes"
