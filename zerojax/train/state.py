"""The state of a run, which a training step takes and returns, and its creation."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from zerojax.comm.mesh import on_auto_mesh, replicated
from zerojax.config import Config
from zerojax.layout.leaf import shapes_of_chunked
from zerojax.layout.tree import check_experts_named
from zerojax.optim.sharding_plan import ShardingPlan, make_plan, state_shapes, state_shardings
from zerojax.optim.update import init_state
from zerojax.placement.storage import are_shapes, cast_params, in_storage, place_params, place_replicated, sharding_tree
from zerojax.train.loss import ScalingState, init_scaling


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "opt_state", "scaling", "mutable"],
    meta_fields=["plan"],
)
@dataclasses.dataclass(frozen=True, repr=False)
class ZeroState:
    """The state of a run, with parameters and optimizer state in storage.

    Attributes:
        step: Number of updates done, without skipped steps; int32 scalar.
        params: The parameters. A leaf that is padded in storage is a `Padded`.
        opt_state: The state of the wrapped transformation, in storage. With master weights, a `MasterState` that
            contains this state and the weights.
        scaling: The loss scale, and the record of skipped steps.
        mutable: The state that the loss function updates, such as batch statistics; None without `mutable=True`.
        plan: How every leaf is sharded. It belongs to the structure of the pytree and is not a leaf.

    Examples:
        >>> state = tx.create(params)
        >>> state, metrics = step(state, batch)
        >>> state.params, int(state.step)
    """

    step: Int[Array, ""]
    params: PyTree
    opt_state: PyTree
    scaling: ScalingState
    mutable: PyTree
    plan: ShardingPlan

    def __repr__(self) -> str:
        """Return the stage, and the number and size of each field's leaves. `zerojax.report` lists the leaves."""
        from zerojax.units import format_bytes

        policy = self.plan.layout.policy
        parts = {"params": self.plan.layout.params, "opt_state": self.plan.state}
        rows = [
            f"  {name}: {len(leaves)} leaves, {format_bytes(sum(leaf.bytes for leaf in leaves))}"
            for name, leaves in parts.items()
        ]
        if self.mutable is not None:
            rows.append(f"  mutable: {len(jax.tree.leaves(self.mutable))} leaves")
        over = f"stage {policy.stage} over {policy.data.in_words()}, {policy.data.workers} devices"
        return "\n".join([f"ZeroState({over})", *rows])

    @classmethod
    def shardings(cls, config: Config, plan: ShardingPlan) -> "ZeroState":
        """Return a `ZeroState` of `NamedSharding`s. A field with only replicated leaves has one sharding."""
        same = replicated(config.mesh)
        params = sharding_tree(config, plan.layout.treedef, plan.layout.params)
        return cls(same, params, state_shardings(config, plan), same, same, plan)  # pyright: ignore[reportArgumentType]

    def reset_skips(self) -> "ZeroState":
        """Return a copy without the record of skipped steps, to continue after an error. Keep the loss scale."""
        record = ("skips", "nonfinite", "weights_invalid")
        zeros = {name: jnp.zeros_like(getattr(self.scaling, name)) for name in record}
        return self.replace(scaling=dataclasses.replace(self.scaling, **zeros))

    def replace(self, **changes: Any) -> "ZeroState":
        """Return a copy with some fields replaced.

        Args:
            **changes: New values of fields. `opt_state` may also be a state that `tx.init` or `tx.adopt` returned.
        """
        if "opt_state" in changes:
            from zerojax.optim.returned_state import as_planned

            changes["opt_state"] = as_planned(self.plan, changes["opt_state"])
        return dataclasses.replace(self, **changes)


def create(config: Config, params: Any, mutable: Any, opt_state: Any) -> ZeroState:
    """Create the state of a run, and check that all processes have equal states; see `ZeroTransformation.create`."""
    plan = make_plan(config, shapes_of_chunked(params))
    check_experts_named(plan.layout)
    compares = jax.process_count() > 1 and not are_shapes(params)
    if compares:
        from zerojax.train.same_run import require_same_run, require_same_values

        require_same_run(config, plan)
        require_same_values(config, "begin with values", params=params, mutable=mutable, given_opt_state=opt_state)
    shardings = lambda _: ZeroState.shardings(config, plan)
    begin = functools.partial(begin_run, config, plan)
    state = on_auto_mesh(config.user_mesh, begin, params, mutable, opt_state, shardings=shardings)
    if compares:
        require_same_values(config, "create a state", params=state.params, opt_state=state.opt_state)
    return state


def begin_run(config: Config, plan: ShardingPlan, params: Any, mutable: Any, plain: Any = None) -> ZeroState:
    """Return the state at step 0, with parameters in storage. If `params` are shapes, the state consists of shapes.

    `plain` is an optimizer state of plain optax to continue from. If it is None, the optimizer state is fresh.
    """
    others = (jnp.zeros((), jnp.int32), init_scaling(config.precision, len(plan.grads)), mutable)
    step, scaling, mutable = place_replicated(config.mesh, others, shapes=are_shapes(params))
    if config.params_on_disk:
        from zerojax.staged.model_files import begun_on_disk

        with begun_on_disk(config, plan, params) as (tree, stored):
            opt_state = first_opt_state(config, plan, params, stored, plain)
    else:
        stored = place_params(config, plan.layout, params)
        opt_state = first_opt_state(config, plan, params, stored, plain)
        tree = in_storage(cast_params(config, plan.layout, stored, like=plan.layout.params), plan.layout)
    return ZeroState(step, tree, opt_state, scaling, mutable, plan)


def first_opt_state(config: Config, plan: ShardingPlan, params: Any, stored: Sequence, plain: Any) -> Any:
    """Return the optimizer state of a new run, or its shapes if `params` are shapes.

    `stored` are the parameters in storage shape, in the types of the master weights. `plain` is as in `begin_run`.
    """
    shapes = are_shapes(params)
    if shapes and not plan.offloaded:
        return state_shapes(config, plan)
    if plain is None and not shapes:
        return init_opt_state(config, plan, stored)
    from zerojax.streaming.first_state import adopt_state, first_shapes

    return first_shapes(config, plan) if shapes else adopt_state(config, plan, plain, params)


def init_opt_state(config: Config, plan: ShardingPlan, stored: Sequence[Any]) -> PyTree:
    """Return the wrapped transformation's first state, sharded and offloaded as `plan` says."""
    is_whole = not plan.offloaded and not config.params_on_disk
    if is_whole or any(isinstance(x, jax.core.Tracer) for x in stored):
        return init_state(config, plan, stored)
    from zerojax.streaming.first_state import init_state_by_group

    return init_state_by_group(config, plan, stored)
