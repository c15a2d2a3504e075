"""Find the plan of each leaf of a tree of arrays, from a `ZeroState`, or from a transformation and parameters."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from zerojax.config import Config
from zerojax.layout.leaf import Leaf
from zerojax.optim.plan import ShardingPlan, make_plan
from zerojax.optim.state_forms import Annotated, as_planned
from zerojax.placement.storage import is_stored_node


@dataclasses.dataclass(frozen=True)
class Planned:
    """The plan of the leaves of a tree."""

    leaves: dict[str, Leaf] = dataclasses.field(default_factory=dict)  # the layout of each leaf, by its path
    notes: dict[str, str] = dataclasses.field(default_factory=dict)  # why a leaf is not sharded or trained, by path
    data: tuple[str, ...] = ()  # the mesh axes that divide the batch


def planned(state: Any, tx: Any = None) -> Planned:
    """Return the plan of the leaves of a tree, or an empty `Planned` if the plan is not known.

    `state` is a `ZeroState`, a Flax `TrainState`, or a mapping with `params` and `opt_state`. With `tx`, it may also be
    parameters or an optimizer state.
    """
    if isinstance(plan := getattr(state, "plan", None), ShardingPlan):
        return of_plan(plan, {"params": ".params", "opt_state": ".opt_state"})
    config = getattr(tx if tx is not None else getattr(state, "tx", None), "config", None)
    if not isinstance(config, Config):
        return Planned()
    has = state.__contains__ if isinstance(state, Mapping) else lambda name: hasattr(state, name)
    if has("params") and has("opt_state"):
        get = state.__getitem__ if isinstance(state, Mapping) else lambda name: getattr(state, name)
        at = "[{!r}]" if isinstance(state, Mapping) else ".{}"
        opt_state = at.format("opt_state") + ".state" * isinstance(get("opt_state"), Annotated)
        return of_plan(make_plan(config, get("params")), {"params": at.format("params"), "opt_state": opt_state})
    if tx is None:
        return Planned()
    keyed = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_stored_node)
    paths = [jax.tree_util.keystr(path) for path, _ in keyed]
    for plan in config.plans.values():
        if paths and as_planned(plan, state) is not state and paths == [leaf.path for leaf in plan.state]:
            return of_plan(plan, {"opt_state": ""})
    return of_plan(make_plan(config, state), {"params": ""})


def of_plan(plan: ShardingPlan, prefixes: dict[str, str]) -> Planned:
    """Index the leaves of a plan by their paths in a tree. `prefixes` has the paths of `"params"` and `"opt_state"`."""
    of_part = {"params": plan.layout.params, "opt_state": plan.state}
    parts = {at: of_part[part] for part, at in prefixes.items()}
    leaves = {at + leaf.path: leaf for at, found in parts.items() for leaf in found}
    notes = {path: note_from_layout(leaf) for path, leaf in leaves.items()}
    for i, leaf in enumerate(plan.layout.params if "params" in prefixes else ()):
        path, why = prefixes["params"] + leaf.path, plan.layout.why_not_trained(i)
        notes[path] = "; ".join(filter(None, (notes[path], leaf.sent, "" if why in leaf.reason else why)))
    return Planned(leaves, notes, plan.layout.policy.data.batch)


def note_from_layout(leaf: Leaf) -> str:
    """Explain why a leaf is replicated or flat, and how it is padded. Empty for a sharded leaf without padding."""
    padding = f"padded by {leaf.padding} elements" if leaf.padding else ""
    if leaf.kind == "sharded":
        return padding and f"dim {leaf.dim} {padding}"
    kind = f"{leaf.kind}: {leaf.reason}" if leaf.reason else leaf.kind
    return f"{kind}; {padding}" if padding else kind
