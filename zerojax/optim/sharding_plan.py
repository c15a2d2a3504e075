"""Plan from shapes alone how parameters, gradients and optimizer state are sharded.

A plan is made once, before any array is placed. It is frozen and hashable, because it is static data in `ZeroState`.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import optax
from jaxtyping import PyTree

from zerojax import compat
from zerojax.comm.mesh import auto_context
from zerojax.config import Config
from zerojax.layout.leaf import CachedHash, Leaf
from zerojax.layout.tree import NOT_FLAT, Layout, lay_out_state, layout_of, params_of_state
from zerojax.optim.elementwise import elementwise_leaves, has_products
from zerojax.optim.wrapped import NO_MESH, FlatUpdate, TransformationError, UpdatedLeaves, guarded, wrapped_tx
from zerojax.placement.storage import leaf_sharding, shapes

if TYPE_CHECKING:
    from zerojax.offload.chunked import Chunking
    from zerojax.optim.partition import PlannedUpdate


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ShardingPlan(CachedHash):
    """A plan of how parameters, gradients and optimizer state are sharded. `print(plan)` shows one line per leaf."""

    layout: Layout  # the layout of all parameters
    # the layout of the trained parameters; in its tree, `optax.MaskedNode()` replaces all other parameters
    trained: Layout
    grads: tuple[Leaf, ...]  # one `Leaf` per trained parameter, for its reduced gradient and its update
    state: tuple[Leaf, ...]  # one `Leaf` per leaf of the optimizer's state
    # for each leaf of the state, the index of the trained parameter that the leaf mirrors, or None
    param_of: tuple[int | None, ...]
    # the tree structure of the user's transformation's state, inside a `MasterState` if there are master weights
    state_def: jax.tree_util.PyTreeDef
    # for each leaf of the state, how the leaf is divided into offloaded chunks; None if the leaf stays on the device
    chunkings: "tuple[Chunking | None, ...]"
    # the user's transformation, which checkpoints describe; equality of plans ignores it
    tx: optax.GradientTransformation = dataclasses.field(compare=False)
    matrices: str = ""  # a text that describes how matrices are updated; empty if the update multiplies none
    # whether owners compute a part of the update; also true if the update cannot be traced without further arguments
    may_have_owners: bool = False
    groups: str = ""  # a text that describes the groups of the update and their places; empty if nothing is offloaded

    @property
    def leaves(self) -> UpdatedLeaves:
        return UpdatedLeaves(self.grads, self.state, self.param_of)

    def update(self, config: Config, *, applies: bool) -> FlatUpdate:
        return FlatUpdate(config, self.trained, self.leaves, self.state_def, applies)

    def analysis(self, config: Config) -> "PlannedUpdate":
        """Return the groups of a training step's update, and the matrices that owners compute."""
        from zerojax.optim.partition import planned_update

        return planned_update(self.update(config, applies=True))

    @functools.cached_property
    def offloaded(self) -> "dict[int, Chunking]":
        return {k: chunking for k, chunking in enumerate(self.chunkings) if chunking is not None}

    def along_others(self, sizes: Mapping[str, int]) -> "ShardingPlan":
        """Return the plan of a slice of the mesh that has only the data axes. `sizes` has the size of each axis."""
        pick = lambda leaves: tuple(leaf.along_others(sizes) for leaf in leaves)
        layout, trained = (
            dataclasses.replace(x, params=pick(x.params), grads=pick(x.grads)) for x in (self.layout, self.trained)
        )
        return dataclasses.replace(self, layout=layout, trained=trained, grads=pick(self.grads), state=pick(self.state))

    def __repr__(self) -> str:
        """Return one line. `str` describes every leaf."""
        return f"ShardingPlan(stage={self.layout.policy.stage}, {len(self.grads)} trained parameters)"

    def __str__(self) -> str:
        """Return a line with stage and axes, then one line per leaf with its type, logical shape and layout."""
        layout, sent = self.layout, lambda leaf: f", {leaf.sent}" if leaf.sent else ""
        rows = []
        for i, leaf in enumerate(layout.params):
            why = layout.why_not_trained(i)
            rows.append(("params", leaf, sent(leaf) + (f", {why}" if why not in leaf.reason else "")))
        rows += [("grads", leaf, sent(leaf)) for leaf in self.grads]
        chunks = [f", offloaded in {len(x.extents)} chunks" if x else "" for x in self.chunkings]
        rows += [("opt_state", leaf, more) for leaf, more in zip(self.state, chunks, strict=True)]
        data = layout.policy.data
        title = f"stage {layout.policy.stage} over {data.in_words()}, {data.workers} workers"
        lines = (f"{part}{leaf.path}  {leaf}{more}" for part, leaf, more in rows)
        return "\n".join([title, *lines, *self.update_in_words])

    @property
    def update_in_words(self) -> list[str]:
        """Return one line per set of similar groups of the update, and per set of similar matrices."""
        return [*self.groups.splitlines(), *self.matrices.splitlines()]


def make_plan(config: Config, params: Any) -> ShardingPlan:
    """Plan a run, from shapes alone. `params` are arrays, `Padded` arrays or shapes."""
    with auto_context(config.user_mesh):
        return plan_of_layout(config, layout_of(config, params))


def plan_of_layout(config: Config, layout: Layout) -> ShardingPlan:
    """Add the optimizer state to a layout. Gradients stay flat only if their update is elementwise."""
    if config.offload is not None:
        config.offload.require_jit()
    check_choices(config, layout)
    trained = layout.trained_only()
    tx = wrapped_tx(config, trained, encodes=False)
    state = compat.eval_shape(tx.init, jax.tree.unflatten(trained.treedef, shapes(trained.grads)))
    param_of = params_of_state(state, trained)
    flat = elementwise_leaves(tx, trained, state, param_of)
    grads = tuple(
        dataclasses.replace(leaf, kind="replicated", reason=f"{leaf.reason}; {NOT_FLAT}")
        if leaf.kind == "flat" and i not in flat
        else leaf
        for i, leaf in enumerate(trained.grads)
    )
    leaves = UpdatedLeaves(grads, lay_out_state(state, trained, param_of=param_of, flat=flat), param_of)
    if config.state is not None:
        from zerojax.optim.encoded_layouts import encoded_leaves

        leaves = leaves._replace(state=encoded_leaves(config, trained, state, leaves.state))
    structure = jax.tree.structure(state)
    plan = ShardingPlan(layout, trained, *leaves, structure, chunkings=(None,) * len(leaves.state), tx=config.tx)
    if config.offload is not None or multiplies_matrices(plan.update(config, applies=True)):
        found = plan.analysis(config)
        plan = dataclasses.replace(
            plan,
            chunkings=found.chunkings,
            matrices=found.owners_in_words(),
            may_have_owners=found.has_owners is not False,
            groups=found.groups_in_words(),
        )
    config.plans[layout] = plan
    return plan


def multiplies_matrices(update: FlatUpdate) -> bool:
    """Return whether an update may multiply sharded matrices, as Muon does.

    If so, the owner of each matrix, which is one device or a few, may compute its products. Also return True if the
    update cannot be traced, because it needs arguments that a step does not give.
    """
    if not update.may_have_owners:
        return False
    try:
        with jax.sharding.use_abstract_mesh(NO_MESH):
            jaxpr, _ = compat.opened(jax.make_jaxpr(guarded(update))(*update.planned_shapes()))
    except TransformationError:
        return True
    return any(map(has_products, jaxpr.eqns))


def check_choices(config: Config, layout: Layout) -> None:
    """Raise a ValueError for an option, such as `trainable=`, that should choose parameters and chooses none."""
    choices = {
        "trainable=": config.trainable,
        "overwrite=": config.overwrite,
        "Precision(keep=)": config.precision and config.precision.keep,
        "Offload(where=)": config.offload and config.offload.where,
        "Wire(where=)": config.wire and config.wire.where,
    }
    if any(where is not None for where in choices.values()):
        from zerojax.config.chosen import LeafMask, check_chosen

        for option, where in choices.items():
            # A mask for overwrite= has a bool for every leaf, so one that chooses no leaf is no mistake.
            if not (where is config.overwrite and isinstance(where, LeafMask)):
                check_chosen(option, where, layout.paths, shapes(layout.grads))


def state_shardings(config: Config, plan: ShardingPlan) -> PyTree:
    """Return the state's tree of `NamedSharding`s. Offloaded leaves are `Chunked` nodes of shardings."""
    return jax.tree.map(lambda x: x.sharding, state_shapes(config, plan))


def state_shapes(config: Config, plan: ShardingPlan) -> PyTree:
    """Return the storage shapes and shardings of the state as a tree. Nodes of state on disk have no files."""
    shape = lambda leaf: jax.ShapeDtypeStruct(leaf.storage_shape, leaf.dtype, sharding=leaf_sharding(config, leaf))
    found: list[Any] = [*map(shape, plan.state)]
    if plan.offloaded:
        from zerojax.offload.chunked import chunked_shape

        for k, chunking in plan.offloaded.items():
            found[k] = chunked_shape(config, plan.state[k], chunking)
    return jax.tree.unflatten(plan.state_def, found)
