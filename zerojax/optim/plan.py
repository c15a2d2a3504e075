"""Plan from shapes alone how parameters, gradients and optimizer state are sharded.

A plan is made once, before any array is placed. It is frozen and hashable, because it is static data in `ZeroState`.
`PlannedUpdate` analyses the update of a plan: its offloaded state, its groups, and the cores that owners compute.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import compat
from zerojax.comm.explicit import auto_context
from zerojax.config import Config
from zerojax.config.chosen import LeafMask, check_chosen
from zerojax.layout.leaf import CachedHash, Leaf
from zerojax.layout.tree import Layout, lay_out_state, layout_of, params_of_state
from zerojax.offload.chunked import Chunking
from zerojax.optim.elementwise import elementwise_leaves
from zerojax.optim.master_weights import wrapped_tx
from zerojax.optim.owned import OwnedUpdate, owned_update
from zerojax.optim.partition import OffloadedState, Partition, groups_of, merged, partition
from zerojax.optim.traced import FlatUpdate, TracedUpdate, UpdatedLeaves
from zerojax.optim.transformation import Describe, TransformationError
from zerojax.placement.storage import shapes

WHERE = {"device": "on the device", "host": "in host memory", "disk": "on disk"}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ShardingPlan(CachedHash):
    """A plan of how parameters, gradients and optimizer state are sharded. `print(plan)` shows one line per leaf."""

    layout: Layout  # the layout of all parameters
    # the layout of the trained parameters; in its tree, `optax.MaskedNode()` replaces all other parameters
    trained: Layout
    grads: tuple[Leaf, ...]  # one `Leaf` per trained parameter, for its reduced gradient and its update
    state: tuple[Leaf, ...]  # one `Leaf` per leaf of the optimizer's state
    # the tree structure of the wrapped transformation's state, inside a `MasterState` if there are master weights
    state_def: jax.tree_util.PyTreeDef
    # for each leaf of the state, the index of the trained parameter that the leaf mirrors, or None
    param_of: tuple[int | None, ...]
    # for each leaf of the state, how the leaf is divided into offloaded chunks; None if the leaf stays on the device
    chunkings: tuple[Chunking | None, ...]
    # how matrices are updated; None if the update needs arguments that a step does not give
    matrices: MatrixUpdates | None
    groups: str  # a text that describes the groups of the update and their places; empty if nothing is offloaded
    # describes the wrapped transformation for a checkpoint; equality of plans ignores it
    describe: Describe | None = dataclasses.field(default=None, compare=False)

    @property
    def leaves(self) -> UpdatedLeaves:
        return UpdatedLeaves(self.grads, self.state, self.param_of)

    @functools.cached_property
    def offloaded(self) -> dict[int, Chunking]:
        return {k: chunking for k, chunking in enumerate(self.chunkings) if chunking is not None}

    def along_others(self, sizes: Mapping[str, int]) -> ShardingPlan:
        """Restrict the plan to one slice of the mesh along all axes but the data axes. `sizes` has all axes' sizes."""
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
        policy = self.layout.policy
        uses = map(self.layout.why_not_trained, range(len(self.layout.params)))
        pairs = zip(self.layout.params, uses, strict=True)
        rows = [("params", leaf, _sent(leaf) + (f", {why}" if why not in leaf.reason else "")) for leaf, why in pairs]
        rows += [("grads", leaf, _sent(leaf)) for leaf in self.grads]
        chunks = [f", offloaded in {len(x.extents)} chunks" if x else "" for x in self.chunkings]
        rows += [("opt_state", leaf, more) for leaf, more in zip(self.state, chunks, strict=True)]
        title = f"stage {policy.stage} over {policy.data.in_words()}, {policy.data.workers} workers"
        lines = [title, *(f"{part}{leaf.path}  {leaf}{more}" for part, leaf, more in rows)]
        return "\n".join([*lines, *self.update_in_words])

    @property
    def update_in_words(self) -> list[str]:
        """Return one line per set of similar groups of the update, and per set of similar matrices."""
        return [*self.groups.splitlines(), *str(self.matrices or "").splitlines()]


def _sent(leaf: Leaf) -> str:
    return f", {leaf.sent}" if leaf.sent else ""


def make_plan(config: Config, params: Any) -> ShardingPlan:
    """Plan a run, from shapes alone. `params` are arrays, `Padded` arrays or shapes."""
    with auto_context(config.user_mesh):
        return plan_of_layout(config, layout_of(config, params))


def plan_of_layout(config: Config, layout: Layout) -> ShardingPlan:
    """Add gradients and optimizer state to a layout of parameters. Only leaves with an elementwise update stay flat."""
    config.require_jit()
    check_choices(config, layout)
    trained = layout.trained_only()
    tx = wrapped_tx(config, trained)
    params = jax.tree.unflatten(trained.treedef, shapes(trained.grads))
    state = compat.eval_shape(tx.init, params)
    param_of = params_of_state(state, trained)
    flat = elementwise_leaves(tx, params, trained.grads, param_of)
    grads = tuple(
        dataclasses.replace(leaf, kind="replicated", reason=f"{leaf.reason}; its update is not elementwise")
        if leaf.kind == "flat" and i not in flat
        else leaf
        for i, leaf in enumerate(trained.grads)
    )
    state_leaves = lay_out_state(state, trained, param_of=param_of, flat=flat)
    structure = jax.tree.structure(state)
    leaves = UpdatedLeaves(grads, state_leaves, param_of)
    found = planned_update(FlatUpdate(config, trained, leaves, structure, applies=True))
    plan = ShardingPlan(
        layout,
        trained,
        grads,
        state_leaves,
        structure,
        param_of,
        found.chunkings,
        found.matrices,
        found.groups,
        describe=Describe(config.tx, params),
    )
    config.plans[layout] = plan
    return plan


def check_choices(config: Config, layout: Layout) -> None:
    """Raise a ValueError for an option that was given to choose parameters, and chooses none."""
    # A mask names every leaf, so a mask without leaves to overwrite is meant.
    overwrite = None if isinstance(config.overwrite, LeafMask) else config.overwrite
    choices: dict[str, Any] = {"trainable=": config.trainable, "overwrite=": overwrite}
    if config.precision is not None:
        choices["Precision(keep=)"] = config.precision.keep
    if config.offload is not None:
        choices["Offload(where=)"] = config.offload.where
    if config.wire is not None:
        choices["Wire(where=)"] = config.wire.where
    for option, where in choices.items():
        check_chosen(option, where, layout.paths, shapes(layout.grads))


def partitioned_update(config: Config, plan: ShardingPlan) -> Partition:
    return planned_update(FlatUpdate(config, plan.trained, plan.leaves, plan.state_def, applies=True)).partition


@dataclasses.dataclass(frozen=True)
class PlannedUpdate:
    """Analyses of the `flat` update that a training step runs. Each analysis runs once, when it is first needed."""

    flat: FlatUpdate

    @functools.cached_property
    def offloaded(self) -> OffloadedState:
        return OffloadedState(self.flat.config, self.flat.trained, self.flat.leaves)

    @functools.cached_property
    def traced(self) -> TracedUpdate:
        """Return the traced update. Raise a `TransformationError` if it needs arguments that a step does not give."""
        return self.trace({})

    def trace(self, changed: dict[int, tuple[int, ...]]) -> TracedUpdate:
        """Trace the update. `changed` maps the index of a parameter to the shape that replaces its planned shape."""
        seen = lambda leaf: leaf.storage_shape if leaf.kind == "flat" else leaf.shape
        shapes = lambda leaves: [jax.ShapeDtypeStruct(seen(leaf), leaf.dtype) for leaf in leaves]
        grads, state = shapes(self.flat.leaves.grads), shapes(self.flat.leaves.state)
        return self.flat.tracer(grads, state, grads, {"value": jax.ShapeDtypeStruct((), jnp.float32)})(changed)

    @functools.cached_property
    def _with_offloaded(self) -> list[list[int]]:
        """Return the indices of the results of each group with offloaded state."""
        some = self.offloaded.units or self.offloaded.params_on_disk
        return groups_of(self.traced, self.offloaded) if some else []

    @functools.cached_property
    def owned(self) -> OwnedUpdate:
        """Return the cores that owners compute, or raise a `TransformationError` as `traced` does."""
        config, grads = self.flat.config, self.flat.leaves.grads
        if config.matrix_updates == "sharded" or all(leaf.kind != "sharded" or leaf.shards == 1 for leaf in grads):
            return OwnedUpdate((), {})
        streamed = {o for outs in self._with_offloaded for o in outs if o < len(grads)}
        return owned_update(config, self.flat.leaves, self.traced, self.trace, streamed)

    @functools.cached_property
    def partition(self) -> Partition:
        """Return the groups of the update. Raise the error of the transformation if it cannot be traced."""
        try:
            groups = merged(self._with_offloaded, self.owned)
        except TransformationError as error:
            raise error.__cause__ or error from None
        return partition(self.traced, self.offloaded, groups, self.trace, self.owned.groups)

    @property
    def chunkings(self) -> tuple[Chunking | None, ...]:
        """Return the chunking of each leaf of the state, or None for a leaf that stays on the device."""
        state, found = self.flat.leaves.state, {}
        for group in self.partition.groups if self.offloaded.units else ():
            found |= {k: group.chunking or Chunking(0, state[k].local_shape[:1]) for k in group.state}
        return tuple(map(found.get, range(len(state))))

    @property
    def groups(self) -> str:
        """Return a description of the update's groups, or an empty string if nothing is offloaded."""
        offload = self.flat.config.offload
        if offload is None or not self.offloaded.units:
            return ""
        return groups_in_words(self.partition, self.flat.leaves, offload.optimizer or "device")

    @property
    def matrices(self) -> MatrixUpdates | None:
        """Return how matrices are updated, or None if the update needs arguments that a step does not give."""
        try:
            return matrix_updates(self.owned, self.flat.leaves.grads)
        except TransformationError:
            return None


# Cached, because tracing takes seconds for a deep model, and a plan and its step ask for the same update.
planned_update = functools.lru_cache(maxsize=8)(PlannedUpdate)


@dataclasses.dataclass(frozen=True)
class OwnedMatrices:
    """Matrices with equal shapes and equal programs that are updated by owners."""

    paths: tuple[str, ...]  # the paths of the parameters
    matrices: int  # the number of matrices; a parameter may be a stack of matrices
    owners: int  # the number of owners that share the matrices
    within: int  # the number of devices per owner
    seconds: float  # the time of the update at peak rates
    seconds_sharded: float  # the time at peak rates if each product were divided among all devices

    def __str__(self) -> str:
        """Return one line that compares the time of the update with owners to the time without owners."""
        each = f"{self.within} devices each" if self.within > 1 else "one device each"
        matrices = "1 matrix" if self.matrices == 1 else f"{self.matrices} matrices"
        return (
            f"{_named(self.paths)}: {matrices} by {self.owners} owners, {each}: "
            f"{1e3 * self.seconds:.3g} ms instead of {1e3 * self.seconds_sharded:.3g}, at peak rates"
        )


@dataclasses.dataclass(frozen=True)
class MatrixUpdates:
    """A summary of how the matrices of an update are computed."""

    owned: tuple[OwnedMatrices, ...] = ()  # the matrices that owners compute
    # the paths of all other matrices, with the reason why owners do not compute them
    left: tuple[tuple[tuple[str, ...], str], ...] = ()

    def __str__(self) -> str:
        """Return one line per entry of `owned` and `left`, or an empty string if the update multiplies no matrices."""
        lines = [str(group) for group in self.owned]
        lines += [f"{_named(paths)}: divided among all devices: {reason}" for paths, reason in self.left]
        return "\n".join(f"update of {line}" for line in lines)


def _named(paths: Sequence[str]) -> str:
    return paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")


def matrix_updates(found: OwnedUpdate, leaves: Sequence[Leaf]) -> MatrixUpdates:
    """Describe how each matrix is updated. `leaves` are the layouts of the trained parameters."""
    owned = tuple(
        OwnedMatrices(
            tuple(leaves[core.leaf].path for core in group.cores),
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
        by_reason.setdefault(reason, []).append(leaves[i].path)
    return MatrixUpdates(owned, tuple((tuple(paths), reason) for reason, paths in by_reason.items()))


def groups_in_words(partition: Partition, leaves: UpdatedLeaves, offloaded_to: str) -> str:
    """Return one line per set of similar groups, with their parameters and where their state waits between steps."""
    alike: dict[tuple, list[list[str]]] = {}
    for group in (partition.first, *partition.groups):
        state = group.state or group.resident
        paths = [leaves.grads[i].path for i in group.params] or [f"opt_state{leaves.state[k].path}" for k in state]
        place = "device" if group is partition.first else offloaded_to
        key = place, len(group.chunks), len(group.params), len(state)
        alike.setdefault(key, []).extend([paths] if paths else [])
    lines = []
    for (place, chunks, _, count), members in alike.items():
        if members:
            number = f"{len(members)} groups, each" if len(members) > 1 else "one group"
            divided = f", in {chunks} chunks" if chunks > 1 else ""
            state = f"{count} {'leaf' if count == 1 else 'leaves'} of the state"
            paths = _named([path for paths in members for path in paths])
            lines.append(f"update of {paths}: {number} with {state} {WHERE[place]}{divided}")
    return "\n".join(lines)
