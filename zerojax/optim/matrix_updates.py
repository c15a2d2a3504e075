"""How a plan's matrices are updated: found once, from shapes alone, for the plan, the report and the update."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.config import Config
from zerojax.layout.leaf import Leaf
from zerojax.layout.tree import Layout
from zerojax.optim.guarded import TransformationError, guarded
from zerojax.optim.master_weights import wrapped_tx
from zerojax.optim.new_state import check_new_state
from zerojax.optim.owned import UpdatedLeaves, owned_update
from zerojax.optim.traced import TracedUpdate, trace_update

NO_MESH = jax.sharding.AbstractMesh((), ())


@dataclasses.dataclass(frozen=True)
class OwnedMatrices:
    """Matrices of one shape and one program that are updated by owners.

    Attributes:
        paths: Of the parameters.
        matrices: How many there are: a parameter may be a stack of them.
        owners: How many owners share them.
        within: How many devices an owner is.
        seconds: Least time of their update.
        seconds_sharded: The same if each product were divided among all devices.
    """

    paths: tuple[str, ...]
    matrices: int
    owners: int
    within: int
    seconds: float
    seconds_sharded: float

    def __str__(self) -> str:
        """Return one line that says what is saved."""
        each = f"{self.within} devices each" if self.within > 1 else "one device each"
        return (
            f"{_named(self.paths)}: {self.matrices} matrices by {self.owners} owners, {each}: "
            f"{1e3 * self.seconds:.3g} ms instead of {1e3 * self.seconds_sharded:.3g}, at peak rates"
        )


@dataclasses.dataclass(frozen=True)
class MatrixUpdates:
    """How the matrices of an update are computed.

    Attributes:
        owned: By owners.
        left: Divided, or repeated, as the compiler does it: the paths, and why.
    """

    owned: tuple[OwnedMatrices, ...] = ()
    left: tuple[tuple[tuple[str, ...], str], ...] = ()

    def without_owners(self, reason: str) -> MatrixUpdates:
        """Return the same matrices with no owners."""
        paths = (
            *(path for group in self.owned for path in group.paths),
            *(path for some, _ in self.left for path in some),
        )
        return MatrixUpdates(left=((paths, reason),) if paths else ())

    def __str__(self) -> str:
        """Return a line for each group of parameters, or an empty string if no matrices are multiplied."""
        lines = [str(group) for group in self.owned]
        lines += [f"{_named(paths)}: divided among all devices: {reason}" for paths, reason in self.left]
        return "\n".join(f"update of {line}" for line in lines)


def _named(paths: Sequence[str]) -> str:
    return paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")


@dataclasses.dataclass(frozen=True)
class FlatUpdate:
    """The wrapped transformation's update as a function of lists, which can be traced.

    Attributes:
        config: The wrapped transformation.
        trained: Layout of the trained parameters.
        leaves: What is read and replaced.
        state_def: Structure of the state.
    """

    config: Config
    trained: Layout
    leaves: UpdatedLeaves
    state_def: jax.tree_util.PyTreeDef

    def __call__(self, grads: list, state: list, params: list | None, extra: dict) -> tuple[list, list]:
        """Return `(updates, state)` as lists."""
        tree: Any = self.trained.treedef
        updates, new = wrapped_tx(self.config, self.trained).update(
            jax.tree.unflatten(tree, grads),
            jax.tree.unflatten(self.state_def, state),
            None if params is None else jax.tree.unflatten(tree, params),
            **extra,
        )
        check_new_state(self.leaves.state, new)
        return jax.tree.leaves(updates), jax.tree.leaves(new)

    def tracer(self, grads: Sequence, state: Sequence, params: Sequence | None, extra: dict) -> Callable:
        """Return `trace(stacks, size)`, which traces the update of these values or shapes; see `owned.owned_update`."""
        numbers, tree = jax.tree.flatten(extra)
        fixed = [None if is_traced(x) else x for x in numbers]
        given = [grads, state, params or [], [x for x in numbers if is_traced(x)]]

        def update(grads, state, moved, arrays):
            rest = iter(arrays)
            filled = [next(rest) if value is None else value for value in fixed]
            return guarded(self)(grads, state, None if params is None else moved, jax.tree.unflatten(tree, filled))

        def trace(stacks: frozenset[int] = frozenset(), size: int = 0) -> TracedUpdate:
            _, leaves, owners = self.leaves
            as_long = lambda k, i: i in stacks and leaves[k].shape[:1] == self.leaves.grads[i].shape[:1]
            of_state = {k for k, i in enumerate(owners) if as_long(k, i)}
            seen = [
                [_shape(x, size if i in some else None) for i, x in enumerate(values)]
                for values, some in zip(given, (stacks, of_state, stacks, ()), strict=True)
            ]
            with jax.sharding.use_abstract_mesh(NO_MESH):  # equations remember the context, and may run in a shard_map
                return trace_update(update, *seen)

        return trace


def is_traced(x: Any) -> bool:
    """Return whether a further argument of an update is an array or stands for one. Other arguments are static."""
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct)


def _shape(x: Any, size: int | None) -> jax.ShapeDtypeStruct:
    """Return a value's logical shape and type; for a stack, those of its first `size` matrices."""
    shape = x.shape if size is None else (size, *x.shape[1:])
    return jax.ShapeDtypeStruct(shape, x.dtype, weak_type=getattr(x, "weak_type", False))


@functools.lru_cache(maxsize=8)
def matrix_updates(
    config: Config, trained: Layout, leaves: UpdatedLeaves, state_def: jax.tree_util.PyTreeDef
) -> MatrixUpdates | None:
    """Return how the matrices of an update are computed, or None if it needs more arguments than a step gives."""
    if config.matrix_updates == "sharded" or all(leaf.kind != "sharded" or leaf.shards == 1 for leaf in leaves.grads):
        return MatrixUpdates()
    shapes = lambda leaves: [jax.ShapeDtypeStruct(_seen(leaf), leaf.dtype) for leaf in leaves]
    grads, state = shapes(leaves.grads), shapes(leaves.state)
    extra = {"value": jax.ShapeDtypeStruct((), jnp.float32)}
    trace = FlatUpdate(config, trained, leaves, state_def).tracer(grads, state, grads, extra)
    try:
        traced = trace()
    except TransformationError:  # it needs more arguments
        return None
    found = owned_update(config, leaves, traced, trace)
    paths = leaves.grads
    owned = tuple(
        OwnedMatrices(
            tuple(paths[core.leaf].path for core in group.cores),
            group.items * max(group.size, 1),
            group.leaf.shards // group.within,
            group.within,
            group.seconds,
            group.seconds_sharded,
        )
        for group in found.groups
    )
    by_reason: dict[str, list[str]] = {}
    for i, reason in sorted(found.left.items()):
        by_reason.setdefault(reason, []).append(paths[i].path)
    return MatrixUpdates(owned, tuple((tuple(found), reason) for reason, found in by_reason.items()))


def _seen(leaf: Leaf) -> tuple[int, ...]:
    """Return the shape in which an update sees a leaf: logical, or flat if it is stored flat."""
    return leaf.storage_shape if leaf.kind == "flat" else leaf.shape
