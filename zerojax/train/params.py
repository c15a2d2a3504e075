"""Initialise parameters in storage, copy existing parameters there, and read stored arrays in logical shapes."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.core
from jaxtyping import PyTree

from zerojax import compat
from zerojax.comm.mesh import auto_context, mesh_of, on_auto_mesh, to_auto
from zerojax.config import Config
from zerojax.layout.leaf import Leaf, is_chunked, is_padded, is_stored_node, shapes_of_chunked
from zerojax.layout.padded import Padded, is_number_array
from zerojax.layout.tree import Layout, check_experts_named, layout_of
from zerojax.offload.chunked import Chunked, joined
from zerojax.optim.sharding_plan import plan_of_layout
from zerojax.placement import storage
from zerojax.placement.problems import check_present
from zerojax.placement.storage import (
    are_shapes,
    cast_params,
    check_host_room,
    in_logical_shape,
    in_storage,
    leaf_sharding,
    leaves_of,
    place_params,
    sharding_tree,
    storage_leaves,
)
from zerojax.train.state import ZeroState

MOST_PROGRAMS = 8


def init_params(config: Config, init_fn: Callable, args: tuple) -> Any:
    """Initialise parameters in storage; see `ZeroTransformation.init_params`. Check that all processes agree."""
    check_present(config.mesh)
    layout = layout_of(config, jax.eval_shape(init_fn, *args))
    remember_experts(config, layout)
    check_host_room(config, layout)
    wide = in_master_types(layout, range(len(layout.params)))
    # For parameters on disk, each program makes about one leaf, in the type of the files, to save device memory.
    given, most = (wide, len(layout.params)) if config.params_on_disk else (layout, MOST_PROGRAMS)
    programs, what = init_programs(config, given, init_fn, args, most=most), "initialise parameters"
    if jax.process_count() > 1:
        from zerojax.train.same_run import require_same_programs, require_same_values

        require_same_values(config, what, args=args)
        require_same_programs(config, what, (functools.partial(one.lower, *args) for one in programs))
    if config.params_on_disk:
        from zerojax.staged.model_files import files_of_params, write_params

        files = files_of_params(config, layout, layout.grads)
        return on_auto_mesh(config.user_mesh, lambda: write_params(config, wide, one_by_one(programs, args), files))
    arrays = [x for program in programs for x in program(*args)]
    store = lambda arrays: in_storage(cast_params(config, layout, arrays, like=layout.grads), layout)
    return on_auto_mesh(config.user_mesh, store, arrays, shardings=lambda _: params_shardings(config, layout))


def remember_experts(config: Config, layout: Layout) -> None:
    """Record the sharding plan of a layout with experts, because stored arrays do not show that they have experts."""
    check_experts_named(layout)
    if config.expert_axis:
        plan_of_layout(config, layout)


def init_programs(
    config: Config, layout: Layout, init_fn: Callable, args: tuple, *, most: int = MOST_PROGRAMS
) -> list[Any]:
    """Return jitted functions of `args`. Each function initialises some parameters, and returns them in storage shape.

    A single program would hold the intermediate values of all leaves at once, several times as many bytes as the leaves
    have. Barriers cannot order the leaves, because jax 0.10 drops barriers on CPU.
    """
    jaxpr, consts = compat.opened(jax.make_jaxpr(init_fn)(*args))

    def some(indices, *args):
        leaves = jax.core.eval_jaxpr(jaxpr, consts, *jax.tree.leaves(args))
        with auto_context(config.user_mesh):
            return [x for i, x in enumerate(storage_leaves(to_auto(leaves), layout.params)) if i in indices]

    return [
        jax.jit(functools.partial(some, share), out_shardings=[leaf_sharding(config, layout.params[i]) for i in share])
        for share in program_shares(layout.params, most)
    ]


def program_shares(leaves: tuple[Leaf, ...], most: int = MOST_PROGRAMS) -> Iterator[tuple[int, ...]]:
    """Yield ranges of leaf indices, one per program. Leaves that share a program have a limit of bytes per device.

    The limit is the larger one of half the largest full leaf, and 1/`most` of one device's shards of all leaves.
    """
    local = [leaf.local_bytes for leaf in leaves]
    largest = max((leaf.bytes for leaf in leaves), default=0)
    budget = max(largest // 2, sum(local) // most)
    share: list[int] = []
    for i, size in enumerate(local):
        if share and sum(local[j] for j in share) + size > budget:
            yield tuple(share)
            share = []
        share.append(i)
    if share:
        yield tuple(share)


def one_by_one(programs: Sequence[Callable], args: tuple) -> Iterator[Any]:
    """Call each program, and yield its results. Keep no yielded array, so that the caller can free the array."""
    for program in programs:
        results = list(reversed(program(*args)))
        while results:
            yield results.pop()


def in_master_types(layout: Layout, wide: Collection[int]) -> Layout:
    """Return a layout in which the parameters with the indices `wide` are stored in the types of master weights.

    A `ZeroState` may store narrow copies of parameters. Outside of a `ZeroState`, parameters are wide, because `init`
    and `create` copy the master weights from them.
    """
    pairs = enumerate(zip(layout.params, layout.grads, strict=True))
    typed = (dataclasses.replace(x, dtype=grad.dtype) if i in wide else x for i, (x, grad) in pairs)
    return dataclasses.replace(layout, params=tuple(typed))


def shard(config: Config, params: Any) -> Any:
    layout = layout_of(config, shapes_of_chunked(params))
    layout = in_master_types(layout, layout.trained)
    remember_experts(config, layout)
    if config.params_on_disk:
        from zerojax.staged.model_files import files_of_params, write_params

        files = files_of_params(config, layout, layout.params)
        write = lambda params: write_params(config, layout, leaves_of(params), files, shapes=are_shapes(params))
        return on_auto_mesh(config.user_mesh, write, params)

    def store(params):
        arrays = place_params(config, layout, params)
        return in_storage(cast_params(config, layout, arrays, like=layout.params), layout)

    return on_auto_mesh(config.user_mesh, store, params, shardings=lambda _: params_shardings(config, layout))


def params_shardings(config: Config, layout: Layout) -> Any:
    return sharding_tree(config, layout.treedef, layout.params)


def logical(tree: PyTree) -> PyTree:
    """Replace each `Padded` of a tree by its logical array, for statistics, assertions and logging.

    Under `jax.jit`, each logical array is a slice of the stored array. The compiler keeps it sharded, without a gather.

    Args:
        tree: Parameters, gradients, updates, a `ZeroState`, or a tree that contains them. For an optimizer state,
            pass its `ZeroState`, which records which arrays are padded or flat, or call `tx.unshard(opt_state)`.

    Returns:
        The tree with logical arrays. In a `ZeroState`, the leaves of `opt_state` also get their logical shapes, and
        offloaded leaves are copied to the devices. Such a state cannot be passed to a training step.

    Examples:
        >>> means = jax.jit(lambda params: jax.tree.map(jnp.mean, zerojax.logical(params)))(state.params)
    """
    is_node = lambda x: is_stored_node(x) or isinstance(x, ZeroState)
    return jax.tree.map(logical_node, tree, is_leaf=is_node)


def logical_node(x: Any) -> Any:
    """Return a `Padded`, a leaf on disk or a `ZeroState` in logical shapes. Return any other leaf unchanged."""
    if isinstance(x, ZeroState):
        leaves, structure = jax.tree.flatten(x.opt_state, is_leaf=is_chunked)
        arrays = [logical_of_stored(*pair) for pair in zip(leaves, x.plan.state, strict=True)]
        return dataclasses.replace(x, params=logical(x.params), opt_state=jax.tree.unflatten(structure, arrays))
    if is_chunked(x):
        return logical_of_stored(x, x.leaf)
    if not is_padded(x):
        return x
    if isinstance(x.storage, jax.ShapeDtypeStruct):
        return compat.eval_shape(Padded.logical, x)
    return on_auto_mesh(mesh_of(x.storage), storage.logical_array, x) if is_number_array(x.storage) else x.storage


def logical_of_stored(x: Any, leaf: Leaf) -> Any:
    if isinstance(x, Chunked) and any(isinstance(chunk, jax.ShapeDtypeStruct) for chunk in x.chunks):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    array = joined(x) if isinstance(x, Chunked) else x
    trim = functools.partial(in_logical_shape, leaf=leaf)
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.eval_shape(trim, array)
    return on_auto_mesh(mesh_of(array), trim, array) if array.shape != leaf.shape else array
