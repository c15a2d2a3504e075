"""The optax update, each device doing its 1/N of it, exact for every transformation.

The update runs in global view under jit: gradients, parameters and state are logical
arrays whose layouts are pinned, and the compiler divides the work. A norm over all
parameters, a factored second moment or a Newton-Schulz iteration then sees whole
matrices, as on one device. Leaves updated element by element may lie flat.

References:
    Xu et al. 2020, arXiv 2004.13336: the sharded weight update.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..config import Config
from ..layout.chunked import Cut, is_chunked
from ..layout.leaf import Leaf
from ..layout.padded import is_padded
from ..layout.tree import HashedOnce, Layout, match_state, owners_of
from ..offload.host import arrived, waits
from ..offload.measure import Choice, choose, measure
from .elementwise import elementwise_leaves
from .master import transformed
from .offloading import Offloaded, offloaded
from .split import CONST, EXTRA, GRAD, PARAM, STATE
from .storage import cast, constrain, gather, layout_of, leaves_of, logical, rules_of, shapes, store, view

if TYPE_CHECKING:
    from jaxtyping import Array, PyTree, Shaped


@dataclasses.dataclass(frozen=True, eq=False)
class UpdatePlan(HashedOnce):
    """How gradients and optimizer state lie during the update.

    Attributes:
        layout: Layout of all parameters.
        trained: Layout of those that are trained; the others are holes in its tree.
        parts: One `Leaf` a trained parameter, for its gradient and its update.
        state: One `Leaf` for each leaf of the optimizer's state.
        state_def: Structure of the optimizer's state: the wrapped transformation's own,
            inside a `MasterState` where there are master weights.
        owners: For each leaf of the state, the trained parameter it belongs to, or None.
        cuts: For each leaf of the state, how it is cut into pieces that wait outside the
            device's memory; None: it is on the device.
        choice: Where the update of what is offloaded runs; None until live arrays ask for it.
    """

    layout: Layout
    trained: Layout
    parts: tuple[Leaf, ...]
    state: tuple[Leaf, ...]
    state_def: jax.tree_util.PyTreeDef
    owners: tuple[int | None, ...]
    cuts: tuple[Cut | None, ...]
    choice: Choice | None = None


def plan_update(config: Config, layout: Layout) -> UpdatePlan:
    """Lay out gradients and optimizer state, flat where the transformation is elementwise."""
    trained = layout.only_trained()
    tx = transformed(config, trained)
    params = jax.tree.unflatten(trained.treedef, shapes(trained.parts))
    state = jax.eval_shape(tx.init, params)
    owners = owners_of(state, trained)
    flat = elementwise_leaves(tx, params, trained.parts, owners)
    parts = tuple(
        dataclasses.replace(part, kind="whole", reason=f"{part.reason}; its update is not elementwise")
        if part.kind == "flat" and i not in flat
        else part
        for i, part in enumerate(trained.parts)
    )
    matched = match_state(state, trained, layout.rules, owners=owners, flat=flat)
    structure = jax.tree.structure(state)
    cuts: tuple[Cut | None, ...] = (None,) * len(matched)
    if config.offload is not None:
        cuts = offloaded(config, trained, parts, matched, structure, owners).cuts
    return UpdatePlan(layout, trained, parts, matched, structure, owners, cuts)


def chosen_update(config: Config, plan: UpdatePlan) -> Choice | None:
    """Where the update of what is offloaded runs; measured, if that is to decide it. None if nothing is offloaded."""
    if config.offload is None or not any(plan.cuts):
        return None
    if config.offload.update != "auto":
        return Choice(config.offload.update, f"as Offload(update={config.offload.update!r}) says")
    far = [(leaf, i) for leaf, cut, i in zip(plan.state, plan.cuts, plan.owners, strict=True) if cut is not None]
    elements = sum(plan.parts[i].size for i in {i for _, i in far if i is not None})
    return choose(measure(config.mesh, config.axis), sum(leaf.bytes for leaf, _ in far) / max(elements, 1))


def offloaded_part(config: Config, plan: UpdatePlan) -> Offloaded:
    """How the offloaded part of the state is held and updated; there is one."""
    return offloaded(config, plan.trained, plan.parts, plan.state, plan.state_def, plan.owners)


def divide(config: Config, plan: UpdatePlan, tree: PyTree) -> list[Shaped[Array, "*storage"]]:
    """The trained leaves of parameters or gradients, in any form, laid out for the update; storage shape.

    A parameter that waits in host memory lies as its gradient does, and is left there.
    """
    leaves = leaves_of(tree)

    def one(x, part: Leaf):
        value = x.storage if is_padded(x) else x
        if value.shape == part.storage_shape and (is_padded(x) or waits(value)):
            return value if waits(value) else constrain(config, value, part)
        return store(config, logical(x), part)

    return [one(x, part) for x, part in zip([leaves[i] for i in plan.layout.trained], plan.parts, strict=True)]


def undivide(
    config: Config,
    plan: UpdatePlan,
    divided: Sequence[Shaped[Array, "*storage"] | None],
    frozen: Sequence[Shaped[Array, "*storage"]],
) -> list[Any]:
    """The inverse of `divide`: gather what the stage keeps whole.

    Args:
        config: Mesh and axis.
        plan: How everything lies.
        divided: One array a trained parameter; storage shape of `plan.parts`. None makes None.
        frozen: One array a parameter, of which those that are not trained are taken.

    Returns:
        One array a parameter; storage shape of `plan.layout.params`.
    """
    there = {k: x for k, x in enumerate(divided) if x is not None}
    whole = [k for k, leaf in enumerate(plan.trained.params) if leaf.dim is None and k in there]
    gathered = gather(config, [there[k] for k in whole], [plan.parts[k] for k in whole])
    moved = dict(enumerate(divided)) | dict(zip(whole, gathered, strict=True))
    arrays = dict(enumerate(frozen)) | {i: moved[k] for k, i in enumerate(plan.layout.trained)}
    return [arrays[i] for i in range(len(plan.layout.params))]


def update(
    config: Config,
    plan: UpdatePlan,
    grads: Sequence[Shaped[Array, "*storage"]],
    state: PyTree,
    params: Sequence[Shaped[Array, "*storage"]] | None,
    extra: dict,
) -> tuple[list[Shaped[Array, "*storage"]], PyTree]:
    """One step of the optimizer on divided leaves.

    Args:
        config: The wrapped transformation and its mesh.
        plan: How everything lies.
        grads: Gradients; storage shape of `plan.parts`.
        state: Optimizer state in storage.
        params: Parameters; storage shape of `plan.parts`. None if `update` was given none.
        extra: Extra keyword arguments of the transformation.

    Returns:
        `(updates, state)`: updates in storage shape of `plan.parts`; with master weights
        not updates but the parameters they lead to.
    """
    tree = plan.trained.treedef

    def views(stored, leaves):
        return [view(x, leaf) for x, leaf in zip(stored, leaves, strict=True)]

    def keep(values, leaves):
        return [store(config, x, leaf) for x, leaf in zip(values, leaves, strict=True)]

    types = [part.dtype for part in plan.parts]
    params = None if params is None else [arrived(x) for x in params]
    updates, new_state = transformed(config, plan.trained).update(
        jax.tree.unflatten(tree, views(cast(grads, types), plan.parts)),
        jax.tree.unflatten(plan.state_def, views(jax.tree.leaves(state), plan.state)),
        None if params is None else jax.tree.unflatten(tree, views(cast(params, types), plan.parts)),
        **extra,
    )
    kept = keep(jax.tree.leaves(new_state), plan.state)
    return keep(jax.tree.leaves(updates), plan.parts), jax.tree.unflatten(plan.state_def, kept)


def advance(
    config: Config,
    plan: UpdatePlan,
    grads: Sequence[Shaped[Array, "*storage"]],
    state: PyTree,
    params: Sequence[Shaped[Array, "*storage"]],
    extra: dict,
) -> tuple[list[Shaped[Array, "*storage"]], PyTree]:
    """The trained parameters after one step, in the type they are stored in, and the state; as `update`."""
    params = [arrived(x) for x in params]
    updates, state = update(config, plan, grads, state, params, extra)
    moved: Any = updates if config.keeps_master else optax.apply_updates(list(params), updates)
    return cast(moved, [leaf.dtype for leaf in plan.trained.params]), state


class First(NamedTuple):
    """What an update does before any offloaded state is there.

    Attributes:
        moved: Trained parameters that have moved, by index; storage shape of their parts.
        state: One array a leaf of the state: the new one, or the old where a task replaces
            it; None for one that is offloaded.
        shared: What tasks share.
        wanted: Indices of the gradients that tasks read.
    """

    moved: dict[int, Array]
    state: list
    shared: list
    wanted: tuple[int, ...]


def begin(config: Config, plan: UpdatePlan, grads: Sequence, state: Sequence, params: Sequence, value: Array) -> First:
    """The part of an update that reads nothing offloaded; as `update`, with holes where the state is offloaded."""
    split = offloaded_part(config, plan).split
    looks = {
        GRAD: lambda i: view(grads[i], plan.parts[i]),
        PARAM: lambda i: view(arrived(params[i]).astype(plan.parts[i].dtype), plan.parts[i]),
        STATE: lambda k: view(state[k], plan.state[k]),
        EXTRA: lambda _: value,
        CONST: lambda i: split.consts[i],
    }
    results = iter(split.first.on([looks[kind](i) for kind, i in split.first.reads]))
    moved = {i: store(config, next(results), plan.parts[i]) for i in split.moved}
    new = {k: store(config, next(results), plan.state[k]) for k in split.resident}
    wanted = tuple(sorted({i for task in split.tasks for i in task.reading(GRAD)}))
    return First(moved, [new.get(k, x) for k, x in enumerate(state)], list(results), wanted)


def check_state(config: Config, plan: UpdatePlan, state: PyTree) -> None:
    """Refuse a state that was not made for these parameters.

    Raises:
        ValueError: Naming the first leaf that differs, what was found and what was required.
    """
    remedy = "Make a new state with init(params), or pass the parameters, stage and mesh it was made for."
    found, structure = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_chunked)
    if structure != plan.state_def:
        what = tree_difference(found, plan.state)
        raise ValueError(f"The optimizer state does not belong to these parameters: it {what}. {remedy}")
    for (_, x), leaf, cut in zip(found, plan.state, plan.cuts, strict=True):
        if (x.cut if is_chunked(x) else None) != cut:
            where = f"offloaded in {len(x.cut.extents)} pieces" if is_chunked(x) else "on the device"
            wanted = f"offloaded in {len(cut.extents)} pieces" if cut else "on the device"
            raise ValueError(f"opt_state{leaf.path} is {where}, and this transformation has it {wanted}. {remedy}")
        # optax turns the integer moments of an integer parameter to floats at its first update
        changed = x.dtype != leaf.dtype and jnp.issubdtype(leaf.dtype, jnp.floating)
        if tuple(x.shape) != leaf.storage_shape or changed:
            raise ValueError(
                f"The optimizer state does not belong to these parameters: opt_state{leaf.path} is "
                f"{x.dtype}{list(x.shape)}, and {leaf.dtype}{list(leaf.storage_shape)} is required (storage shape; "
                f"logical {list(leaf.shape)}, {leaf.shards} shards). {remedy}"
            )


def check_params(config: Config, plan: UpdatePlan, params: PyTree) -> None:
    """Refuse parameters that are not those a plan was made for, and a plan of another stage or mesh.

    Raises:
        ValueError: Naming what differs, what was found and what was required.
    """
    rules = rules_of(config)
    if plan.layout.rules != rules:
        made = plan.layout.rules
        raise ValueError(
            f"The state was made for stage {made.stage} on {made.shards} devices (persist_below={made.persist_below}"
            f"{', parameters on the host' * made.host}), and the step is for stage {rules.stage} on {rules.shards} "
            f"(persist_below={rules.persist_below}{', parameters on the host' * rules.host}). "
            f"Make it with this transformation's create(params)."
        )
    found, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_padded)
    if structure != plan.layout.treedef:
        raise ValueError(
            f"The parameters are not those the state was made with: their tree "
            f"{tree_difference(found, plan.layout.params)}. Make a new state with create(params)."
        )
    for (_, x), leaf in zip(found, plan.layout.params, strict=True):
        if tuple(x.shape) != leaf.shape or x.dtype != leaf.dtype:
            raise ValueError(
                f"params{leaf.path} is {x.dtype}{list(x.shape)}, and the state was made for {leaf.dtype}"
                f"{list(leaf.shape)} (logical). Make a new state with create(params)."
            )
    for found, required in zip(roles(layout_of(config, params)), roles(plan.layout), strict=True):
        if found != required:
            raise ValueError(
                f"The state was made with another precision= or trainable= than the step: {required}, and the step "
                f"needs {found}. Make a new state with this transformation's create(params)."
            )


def roles(layout: Layout) -> Iterator[str]:
    """In words, what precision and trainable say of each parameter."""
    for i, (part, compute) in enumerate(zip(layout.parts, layout.compute, strict=True)):
        use = "trained" if i in layout.trained else "frozen"
        yield f"params{part.path} {use}, {part.dtype} computed in {compute}"


def tree_difference(found: Sequence, required: Sequence[Leaf]) -> str:
    """In words, how the paths of a flattened tree differ from those required."""
    paths, wanted = [jax.tree_util.keystr(path) for path, _ in found], [leaf.path for leaf in required]
    if lacking := [path for path in wanted if path not in paths]:
        return f"lacks {lacking[0]}"
    surplus = [path for path in paths if path not in wanted]
    return f"has {surplus[0]} beyond that" if surplus else "has other nodes"
