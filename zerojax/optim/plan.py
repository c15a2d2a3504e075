"""The plan of a run: how parameters, gradients and optimizer state are sharded, from shapes alone.

Made once, before any array is placed; frozen and hashable, so that it rides in `ZeroState`.
"""

from __future__ import annotations

import dataclasses

import jax

from zerojax.config import Config
from zerojax.layout.cached_hash import CachedHash
from zerojax.layout.chunked import Chunking
from zerojax.layout.leaf import Leaf
from zerojax.layout.opt_state import lay_out_state, owners_of
from zerojax.layout.tree import Layout
from zerojax.offload.measure import Choice, choose, measure
from zerojax.optim.elementwise import elementwise_leaves
from zerojax.optim.master_weights import wrapped_tx
from zerojax.optim.offloaded import Offloaded, offloaded
from zerojax.placement.storage import shapes


@dataclasses.dataclass(frozen=True, eq=False)
class ShardingPlan(CachedHash):
    """How gradients and optimizer state lie during the update.

    Attributes:
        layout: Layout of all parameters.
        trained: Layout of those that are trained; the others are holes in its tree.
        grads: One `Leaf` a trained parameter, for its gradient and its update.
        state: One `Leaf` for each leaf of the optimizer's state.
        state_def: Structure of the optimizer's state: the wrapped transformation's own,
            inside a `MasterState` where there are master weights.
        owners: For each leaf of the state, the trained parameter it belongs to, or None.
        chunkings: For each leaf of the state, how it is cut into pieces that wait outside the
            device's memory; None: it is on the device.
        choice: Where the update of what is offloaded runs; None until live arrays ask for it.
    """

    layout: Layout
    trained: Layout
    grads: tuple[Leaf, ...]
    state: tuple[Leaf, ...]
    state_def: jax.tree_util.PyTreeDef
    owners: tuple[int | None, ...]
    chunkings: tuple[Chunking | None, ...]
    choice: Choice | None = None


def make_plan(config: Config, layout: Layout) -> ShardingPlan:
    """Lay out gradients and optimizer state, flat where the transformation is elementwise."""
    trained = layout.trained_only()
    tx = wrapped_tx(config, trained)
    params = jax.tree.unflatten(trained.treedef, shapes(trained.grads))
    state = jax.eval_shape(tx.init, params)
    owners = owners_of(state, trained)
    flat = elementwise_leaves(tx, params, trained.grads, owners)
    parts = tuple(
        dataclasses.replace(part, kind="replicated", reason=f"{part.reason}; its update is not elementwise")
        if part.kind == "flat" and i not in flat
        else part
        for i, part in enumerate(trained.grads)
    )
    matched = lay_out_state(state, trained, layout.policy, owners=owners, flat=flat)
    structure = jax.tree.structure(state)
    chunkings: tuple[Chunking | None, ...] = (None,) * len(matched)
    if config.offload is not None:
        chunkings = offloaded(config, trained, parts, matched, structure, owners).chunkings
    return ShardingPlan(layout, trained, parts, matched, structure, owners, chunkings)


def chosen_update(config: Config, plan: ShardingPlan) -> Choice | None:
    """Where the update of what is offloaded runs; measured, if that is to decide it. None if nothing is offloaded."""
    if config.offload is None or not any(plan.chunkings):
        return None
    if config.offload.update != "auto":
        return Choice(config.offload.update, f"as Offload(update={config.offload.update!r}) says")
    far = [
        (leaf, i)
        for leaf, chunking, i in zip(plan.state, plan.chunkings, plan.owners, strict=True)
        if chunking is not None
    ]
    elements = sum(plan.grads[i].size for i in {i for _, i in far if i is not None})
    return choose(measure(config.mesh, config.data.batch), sum(leaf.bytes for leaf, _ in far) / max(elements, 1))


def offloaded_part(config: Config, plan: ShardingPlan) -> Offloaded:
    """How the offloaded part of the state is held and updated; there is one."""
    return offloaded(config, plan.trained, plan.grads, plan.state, plan.state_def, plan.owners)
