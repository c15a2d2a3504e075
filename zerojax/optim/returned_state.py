"""The optimizer state as `init` and `update` return it, and as a plan has it.

Flax puts the variables of a model into the state of its optimizer, annotations included; and under
`jax.jit` an array of Auto axes does not say over which of them it is divided. So what is returned says both.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax

from zerojax.config import Config
from zerojax.layout.chunked import is_chunked
from zerojax.optim.plan import ShardingPlan

if TYPE_CHECKING:
    from jaxtyping import PyTree


@functools.partial(jax.tree_util.register_dataclass, data_fields=["state"], meta_fields=["others"])
@dataclasses.dataclass(frozen=True)
class OnOtherAxes:
    """The state of an optimizer some of whose parameters are divided over Auto axes that are not the data axes.

    Attributes:
        state: The state, in the transformation's own structure.
        others: For each parameter its `Leaf.others`, which `update` cannot see under `jax.jit`.
    """

    state: PyTree
    others: tuple[tuple, ...]


def other_axes_in(state: PyTree) -> tuple[tuple, ...]:
    """The other mesh axes of each parameter, as far as the state knows; () where it does not."""
    return state.others if isinstance(state, OnOtherAxes) else ()


def as_returned(config: Config, plan: ShardingPlan, state: PyTree) -> PyTree:
    """A state, or its shardings, as `init` and `update` return it."""
    others = tuple(leaf.others for leaf in plan.layout.params)
    names = {
        name for entries in others for entry in entries for name in (entry if isinstance(entry, tuple) else [entry])
    }
    labelled = relabelled(plan, state)
    return OnOtherAxes(labelled, others) if names - {None, *config.user_mesh.explicit_axes} else labelled


def as_planned(plan: ShardingPlan, state: PyTree) -> PyTree:
    """The inverse of `as_returned`; a state of another structure is left for `check_state` to refuse.

    For a transformation without state, optax takes None.
    """
    if state is None and plan.state_def.num_leaves == 0:
        return jax.tree.unflatten(plan.state_def, ())
    state = state.state if isinstance(state, OnOtherAxes) else state
    leaves = jax.tree.leaves(state, is_leaf=is_chunked)
    if len(leaves) != plan.state_def.num_leaves:
        return state
    planned = jax.tree.unflatten(plan.state_def, leaves)
    same = jax.tree.structure(relabelled(plan, planned), is_leaf=is_chunked) == jax.tree.structure(
        state, is_leaf=is_chunked
    )
    return planned if same else state


def relabelled(plan: ShardingPlan, state: PyTree) -> PyTree:
    """The state with the annotations of Flax's variables saying how they are sharded, and not their parameters."""
    nodes, treedef = jax.tree.flatten(state, is_leaf=lambda x: is_chunked(x) or is_annotated(x))
    new = [x.copy(out_sharding=leaf.spec) if is_annotated(x) else x for x, leaf in zip(nodes, plan.state, strict=True)]
    return jax.tree.unflatten(treedef, new)


def is_annotated(x: Any) -> bool:
    """Whether a node is a variable of Flax's that says how it is sharded."""
    read = getattr(x, "get_metadata", None)
    metadata = read() if callable(read) else None
    return isinstance(metadata, dict) and bool(metadata.get("out_sharding"))
