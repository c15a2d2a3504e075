"""Find parameters and optimizer state in a tree by the paths and shapes of the leaves of a plan."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from zerojax.config import Config, path_of
from zerojax.layout.leaf import is_padded
from zerojax.optim.sharding_plan import ShardingPlan, state_shapes

NAMED = 5


class Found(NamedTuple):
    """Parameters and their optimizer state among the leaves of a tree."""

    plan: ShardingPlan  # the plan of their layouts
    params: list[int]  # the indices of the parameters among the leaves of the tree
    opt_state: list[int]  # the indices of the leaves of the optimizer state
    root: str  # the path of the parameters in the tree
    state_root: str  # the path of the optimizer state


def models_in(
    config: Config, paths: list[str], nodes: list[Any], is_leaf: Callable[[Any], bool]
) -> tuple[list[Found], str]:
    """Return the largest models of the known plans in a tree. If there are none, also return why.

    Args:
        config: The configuration whose plans are looked for.
        paths: The path of each leaf of the tree, as `path_of` returns it.
        nodes: The leaves: arrays, shapes, or nodes that represent one array.
        is_leaf: The predicate of nodes that was used to flatten the tree.
    """
    found: dict[frozenset[int], Found] = {}
    is_named = lambda root: root.rpartition("/")[2] == "params"
    unplaced, problem = "", f"no leaves of it have the paths of both: {', '.join(paths[:NAMED])}, ..."
    for plan in config.plans.values():  # the plan of `init` comes before those of updates, which may know less
        trees = plan.layout.treedef.unflatten(plan.layout.params), state_shapes(config, plan)
        shapes = [(x.shape, getattr(x, "storage_shape", x.shape)) for x in jax.tree.leaves(trees, is_leaf)]
        for (root, params), (other, state) in itertools.product(*(parts_like(paths, tree, is_leaf) for tree in trees)):
            indices = [*params, *state]
            if len({*indices}) < len(indices):  # moments have the same paths as the parameters
                continue
            arrays = [x.storage if is_padded(x) else x for x in (nodes[i] for i in indices)]
            stored = [(tuple(nodes[i].shape), tuple(x.shape)) for i, x in zip(indices, arrays, strict=True)]
            if differ := [k for k, shape in enumerate(shapes) if stored[k] != shape]:
                k = differ[0]
                problem = f"{paths[indices[k]]} is stored with shape {stored[k][1]}, and the plan has {shapes[k][1]}"
                unplaced = unplaced or (problem if is_named(root) else "")
            else:
                found.setdefault(frozenset(indices), Found(plan, params, state, root, other))
    # A plan of a part of the parameters also fits.
    largest = [one for indices, one in found.items() if not any(indices < other for other in found)]
    if unplaced and not any(is_named(one.root) for one in largest):  # another part would be an average of `params`
        return [], unplaced
    return largest, problem


def only_model(found: Sequence[Found]) -> Found | None:
    """Return the only model, or the only one at the key `params`, if all of them have one optimizer state."""
    named = [one for one in found if one.root.rpartition("/")[2] == "params"] or found
    return named[0] if len(named) == 1 and len({one.state_root for one in found}) == 1 else None


def parts_like(paths: list[str], tree: PyTree, is_leaf: Callable[[Any], bool]) -> list[tuple[str, list[int]]]:
    """Find each part whose leaves have the same paths as those of `tree`. Return its path and its leaves' indices."""
    wanted = [path_of(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree, is_leaf)[0]]
    indices = {path: i for i, path in enumerate(paths)}
    roots = {path.removesuffix(wanted[0]) for path in paths if path.endswith(wanted[0])} if wanted else {""}
    roots = [root for root in sorted(roots) if not root or root.endswith("/") or wanted == [""]]
    parts = [(root.removesuffix("/"), [indices.get(root + path, -1) for path in wanted]) for root in roots]
    return [part for part in parts if -1 not in part[1]]
