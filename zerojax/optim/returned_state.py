"""Convert the optimizer state between the form that a plan describes and the form that `init` and `update` return.

The returned form is for Flax and hand-written loops. Its Flax annotations describe the layout of the state, and
`Annotated` adds facts that `update` cannot see under `jax.jit`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax

from zerojax.config import Config
from zerojax.config.data_mesh import axes_of
from zerojax.layout.annotations import metadata_of, overwritten_leaves
from zerojax.layout.leaf import is_chunked
from zerojax.optim.sharding_plan import ShardingPlan
from zerojax.placement.storage import shapes

if TYPE_CHECKING:
    from jaxtyping import PyTree


@functools.partial(jax.tree_util.register_dataclass, data_fields=["state"], meta_fields=["others", "overwritten"])
@dataclasses.dataclass(frozen=True)
class Annotated:
    """The state of an optimizer, with facts about the parameters that `update` cannot see.

    Under `jax.jit`, `update` cannot see which Auto axes, other than the data axes, divide a parameter. Flax's
    `nnx.Optimizer` passes arrays without their variables, whose class marks overwritten parameters.
    """

    state: PyTree  # the state, in the structure of the wrapped transformation
    # `Leaf.others` of each parameter; () if no Auto axis other than the data axes divides a parameter
    others: tuple[tuple, ...]
    # indices of the overwritten parameters that `update` cannot recognise by their paths or shapes
    overwritten: tuple[int, ...]


def seen_in(state: PyTree) -> dict[str, tuple]:
    """Return the facts in an `Annotated` state as keyword arguments of `layout_of`. Other states give no arguments."""
    return {"others": state.others, "overwritten": state.overwritten} if isinstance(state, Annotated) else {}


def as_returned(config: Config, plan: ShardingPlan, state: PyTree) -> PyTree:
    """Convert `state`, or a tree of its shardings, to the form that `init` and `update` return."""
    others = tuple(leaf.others for leaf in plan.layout.params)
    others = others if {*axes_of(*others)} - {*config.user_mesh.explicit_axes} else ()
    visible = overwritten_leaves((), plan.layout.paths, shapes(plan.layout.grads), overwrite=config.overwrite)
    hidden = tuple(i for i in plan.layout.overwritten if i not in visible)
    labelled = relabelled(plan, state)
    return Annotated(labelled, others, hidden) if others or hidden else labelled


def as_planned(plan: ShardingPlan, state: PyTree) -> PyTree:
    """Undo `as_returned`. A state of another structure is returned unchanged, and `check_state` refuses it.

    As in optax, None is accepted as the state of a transformation without state.
    """
    if state is None and plan.state_def.num_leaves == 0:
        return jax.tree.unflatten(plan.state_def, ())
    state = state.state if isinstance(state, Annotated) else state
    leaves = jax.tree.leaves(state, is_leaf=is_chunked)
    if len(leaves) != plan.state_def.num_leaves:
        return state
    planned = jax.tree.unflatten(plan.state_def, leaves)
    same = jax.tree.structure(relabelled(plan, planned), is_leaf=is_chunked) == jax.tree.structure(
        state, is_leaf=is_chunked
    )
    return planned if same else state


def relabelled(plan: ShardingPlan, state: PyTree) -> PyTree:
    """Return the state with Flax annotations that describe the layouts of the state, and not of the parameters."""
    is_annotated = lambda x: bool(metadata_of(x).get("out_sharding"))
    nodes, treedef = jax.tree.flatten(state, is_leaf=lambda x: is_chunked(x) or is_annotated(x))
    new = [x.copy(out_sharding=leaf.spec) if is_annotated(x) else x for x, leaf in zip(nodes, plan.state, strict=True)]
    return jax.tree.unflatten(treedef, new)
