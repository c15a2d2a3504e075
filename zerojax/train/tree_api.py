"""Gradients and updates as trees with the structure of the caller's parameters, for optax, Flax and hand-written loops.

A gradient returned here has the structure and shape of its parameter, because optax and Flax map functions over both
trees. The shards of some small or padded gradients do not form an array of this shape, so these gradients are
replicated. A training step keeps them sharded.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Shaped

from zerojax.comm.mesh import (
    PLANNED,
    auto_context,
    constrain,
    on_auto_mesh,
    replicated,
    row_shardings,
    to_explicit,
    with_types,
)
from zerojax.compat import common_dtype
from zerojax.config import Config
from zerojax.layout.leaf import (
    Leaf,
    has_chunked,
    is_chunked,
    is_padded,
    is_stored_node,
    shapes_of_chunked,
    without_padding,
)
from zerojax.layout.padded import Padded
from zerojax.layout.tree import Layout, has_gradient, layout_of
from zerojax.offload.chunked import joined
from zerojax.optim.returned_state import as_planned, as_returned, rechunked, seen_in
from zerojax.optim.sharding_plan import ShardingPlan, make_plan, plan_of_layout, state_shardings
from zerojax.optim.update import (
    check_state,
    shard_for_update,
    state_to_device,
    state_to_host,
    unshard_after_update,
    update_shards,
)
from zerojax.placement.problems import check_present, tree_difference, unusable_named, warn_of_misplaced
from zerojax.placement.storage import (
    Form,
    cast,
    leaves_of,
    logical_array,
    padded_forms,
    sharding_tree,
    storage_forms,
    storage_leaves,
    storage_of,
    to_device,
    unflatten_params,
)
from zerojax.train.arguments import place_batch, separated
from zerojax.train.loss import Loss, LossInputs, View
from zerojax.train.same_run import SameCalls, signature_of
from zerojax.train.state import ZeroState, init_opt_state
from zerojax.train.step_program import loss_and_grads


def on_planned_mesh(config: Config) -> Config:
    mesh, own = PLANNED.value, config.user_mesh
    if mesh is None or mesh.shape_tuple != own.shape_tuple:
        return config
    return dataclasses.replace(config, user_mesh=Mesh(mesh.devices, own.axis_names, axis_types=own.axis_types))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NewValue:
    """An update that replaces its parameter. `parameter + NewValue(value)` is `value`, in logical shape.

    `optax.apply_updates` adds an update to its parameter. The update of a parameter in `overwrite=` cannot be a
    difference, because in float32 `parameter + (value - parameter)` does not always equal `value`.
    """

    value: Shaped[Array, "*logical"]

    __array_ufunc__ = None  # so that NumPy calls `__radd__`

    def __radd__(self, parameter: Any) -> Shaped[Array, "*logical"]:
        """Return the new value. The old value of the parameter is ignored."""
        return self.value


@dataclasses.dataclass(frozen=True)
class TreeForm:
    """The form of a caller's trees. Gradients and updates have the structure and logical shapes of the parameters.

    `forms`, which `padded_forms` computes, says for each parameter whether it is a `Padded`.
    """

    config: Config
    layout: Layout
    forms: tuple[Form, ...]

    @functools.cached_property
    def grads(self) -> tuple[Leaf, ...]:
        """Return the layout in which `value_and_grad` returns each gradient.

        A gradient is sharded if its parameter is sharded. At stages 2 and 3, it is also sharded if its shards form an
        array of its shape, or if its parameter is a `Padded`. All other gradients are replicated.
        """

        def one(param: Leaf, grad: Leaf, form: Form) -> Leaf:
            if param.dim is not None:
                return dataclasses.replace(grad if param.further > 1 else param, dtype=param.dtype, host=False)
            if self.config.stage >= 2 and grad.kind == "sharded" and (grad.padding == 0 or form):
                return grad
            return dataclasses.replace(grad, kind="replicated", dim=None)

        return tuple(map(one, self.layout.params, self.layout.grads, self.forms))

    @property
    def grad_shardings(self) -> Any:
        return sharding_tree(self.config, self.layout.treedef, self.grads)

    def differentiate(self, loss: Loss, accumulate: int, params: Any, mutable: Any, batch: Any, *args: Any) -> Any:
        """Return the loss's combined results, and its gradient as a tree. All arrays are on a mesh with Auto axes."""
        layout = self.layout
        given = storage_leaves(params, layout.params)
        stored = cast(given, [leaf.dtype for leaf in layout.params])
        view = View(self.config, layout, [self.grads[i] for i in layout.trained], loss, accumulate)
        found = loss_and_grads(view, LossInputs(stored, mutable, batch, args), scale=1.0)
        known = dict(zip(layout.trained, found.grads, strict=True))
        known |= zip(layout.overwritten, found.overwritten, strict=True)
        grads = []
        for i, (leaf, x) in enumerate(zip(self.grads, given, strict=True)):
            grad = known[i].astype(x.dtype) if i in known else jnp.zeros(leaf.storage_shape, x.dtype)
            grads.append(constrain(self.config.mesh, grad, leaf))
        returned = loss.returned(found.loss, found.mutable, found.aux)
        return returned, unflatten_params(grads, layout, self.grads, self.forms)


def differentiate_tree(given: Config, loss: Loss, *, accumulate: int) -> Callable:
    """Return the function that differentiates a loss; see `ZeroTransformation.value_and_grad`."""

    @functools.partial(jax.jit, static_argnames="form")
    def value_and_grad_tree(params, mutable, batch, *args, form):
        run = functools.partial(form.differentiate, loss, accumulate)
        rows_of = lambda loss: row_shardings(form.config.mesh, form.config.data, loss, batch)
        shardings = lambda returned: (rows_of(returned[0]), form.grad_shardings)
        return on_auto_mesh(form.config.user_mesh, run, params, mutable, batch, *with_types(args), shardings=shardings)

    checked: list = []  # one entry after the first call with arrays
    what = f"differentiate {getattr(loss.fn, '__name__', 'a loss')}"
    same = SameCalls(given, what, (loss.has_aux, loss.weighted, loss.mutable, loss.reduction, accumulate))

    @functools.wraps(loss.fn, assigned=("__name__", "__qualname__", "__module__"), updated=())
    def value_and_grad(params, *args, **keywords):
        config = on_planned_mesh(given)
        state, batch, rest = separated(args, keywords, mutable=loss.mutable)
        if has_chunked(params):
            raise TypeError(
                "The parameters are on disk, and tx.value_and_grad runs one program, which needs all of them in "
                "memory. Train them with the step of tx.train_step, which runs in stages."
            )
        is_new = same.is_needed and same.is_new(signature_of((params, state)), batch, rest)
        layout, rows = layout_of(config, params), place_batch(config, batch, accumulate)
        if not checked and not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(params)):
            checked.append(True)
            warn_of_misplaced([("params", params, layout.params)], config.data.batch, stacklevel=2)
        with unusable_named(config.mesh, params=params, state=state, batch=rows):
            form = TreeForm(config, layout, padded_forms(params))
            return same.call(value_and_grad_tree, params, state, rows, *rest, form=form, is_new=is_new)

    return value_and_grad


@functools.partial(jax.jit, static_argnames=("form", "static"))
def jitted_update(
    grads: Any, state: Any, params: Any, arrays: dict, form: TreeForm, static: tuple[tuple[str, Any], ...]
) -> tuple[Any, Any]:
    """Return updates as a tree like the parameters, and the new optimizer state.

    `arrays` and `static` are the further keyword arguments of `update`.

    Raises:
        ValueError: If the structures of gradients, state and parameters do not match, or `params` is None and the
            state has master weights.
    """
    config, layout, extra = form.config, form.layout, arrays | dict(static)
    check_grads(grads, layout)
    with auto_context(config.user_mesh):
        plan = plan_of_layout(config, layout)
    if plan.offloaded:
        state = rechunked(config, plan, state)
    state = as_planned(plan, state)
    check_state(plan, state, may_be_wider=not plan.offloaded)
    if params is None and config.has_master_weights:
        raise ValueError(
            "This transformation has master weights, and an update of these needs the parameters. Call "
            "update(grads, state, params)."
        )

    def run(grads, state, params, extra):
        state = state_to_device(config, plan, state)
        extra = without_padding(extra)
        sharded = None if params is None else shard_for_update(config, plan, params)
        reduced = shard_for_update(config, plan, grads)
        if sharded is not None and config.has_master_weights:
            stored = storage_leaves(params, layout.params)
            updated, state = update_shards(config, plan, reduced, state, sharded, extra, applies=True)
            new = unshard_after_update(config, plan, updated, frozen=stored)
            updates: list[Any] = [difference(a, b) for a, b in zip(new, stored, strict=True)]
        else:
            increments, state = update_shards(config, plan, reduced, state, sharded, extra)
            pairs = zip(storage_leaves(grads, layout.params), layout.params, strict=True)
            # An integer parameter gets integer zeros, because adding a float32 zero would round a large integer.
            types = [(leaf, grad.dtype if has_gradient(leaf.dtype) else leaf.dtype) for grad, leaf in pairs]
            zeros = [jnp.zeros(leaf.storage_shape, dtype) for leaf, dtype in types]
            updates = unshard_after_update(config, plan, increments, frozen=zeros)
        values = leaves_of(grads)
        for i in layout.overwritten:
            updates[i] = NewValue(constrain(config.mesh, logical_array(values[i]), layout.params[i]))
        state = as_returned(config, plan, state_to_host(config, plan, state))
        return unflatten_params(updates, layout, layout.params, form.forms), state

    like = jax.tree.map(lambda x: jax.typeof(x).sharding, grads if params is None else params)
    shardings = lambda _: (like, as_returned(config, plan, state_shardings(config, plan)))
    return on_auto_mesh(config.user_mesh, run, grads, state, params, extra, shardings=shardings)


def difference(new: Array, old: Array) -> Array:
    """Return `new - old` in float32 or wider, so that `optax.apply_updates` turns `old` into exactly `new`."""
    if new.dtype == bool:
        return jnp.zeros_like(new)
    new, old = to_device(new), to_device(old)
    wide = common_dtype(old.dtype, jnp.float32) if jnp.issubdtype(old.dtype, jnp.inexact) else old.dtype
    return new.astype(wide) - old.astype(wide)


def check_grads(grads: Any, layout: Layout) -> None:
    """Raise a ValueError if the gradients and the parameters differ in structure or shapes."""
    found, structure = jax.tree_util.tree_flatten_with_path(grads, is_leaf=is_padded)
    if structure != layout.treedef:
        raise ValueError(
            f"The gradients are not of the parameters' tree: it {tree_difference(found, layout.params)}. "
            f"Pass the gradients of the parameters given. If the transformation takes only a part of them, as "
            f"optax.lookahead does, let it wrap zero_shard: optax.lookahead(zero_shard(tx, ...), ...)."
        )
    for (_, g), leaf in zip(found, layout.params, strict=True):
        if tuple(g.shape) != leaf.shape:
            raise ValueError(
                f"grads{leaf.path} has shape {list(g.shape)}, but its parameter has {list(leaf.shape)} (logical). "
                f"Pass gradients of these parameters."
            )


def create_opt_state(config: Config, params: Any) -> Any:
    """Return the initial optimizer state of the wrapped transformation, sharded for the stage."""
    check_present(config.mesh)
    plan = make_plan(config, params)
    warn_of_misplaced([("params", params, plan.layout.params)], config.data.batch, at_start=True, stacklevel=3)
    make = lambda params: as_returned(config, plan, init_opt_state(config, plan, storage_of(params, plan.layout)))
    return on_auto_mesh(config.user_mesh, make, params, shardings=lambda _: init_shardings(config, plan))


def adopt(config: Config, state: Any, params: Any) -> Any:
    """Shard a plain optimizer state; see `ZeroTransformation.adopt`."""
    from zerojax.streaming.first_state import adopt_state

    plan = make_plan(config, params)
    place = lambda state, params: as_returned(config, plan, adopt_state(config, plan, state, params))
    return on_auto_mesh(config.user_mesh, place, state, params, shardings=lambda _: init_shardings(config, plan))


def unshard(config: Config, tree: Any, params: Any = None) -> Any:
    """Gather a tree into logical arrays; see `ZeroTransformation.unshard`."""
    from zerojax.optim.logical_state import unshard_state

    if isinstance(tree, ZeroState):
        raise ValueError(
            "tx.unshard takes parameters or an optimizer state, and this is a ZeroState, which has both. Call "
            "tx.unshard(state.params) and tx.unshard(state.opt_state)."
        )
    with unusable_named(config.mesh, tree=tree):
        is_params = False
        if has_chunked(tree):
            from zerojax.staged.model_files import files_of

            is_params = files_of(tree) is not None
        if not is_params and (state := unshard_state(config, tree, shapes_of_chunked(params))) is not None:
            return state
        on_device = jax.tree.map(lambda x: to_device(x) if isinstance(x, jax.Array) else x, loaded(tree))
        gather = functools.partial(on_auto_mesh, config.user_mesh, without_padding)
        return jax.jit(gather, out_shardings=replicated(config.user_mesh))(on_device)


def loaded(tree: Any) -> Any:
    """Load all parameters on disk onto the devices. They keep their sharding."""

    def one(x):
        if not is_chunked(x):
            return x
        stored, leaf = joined(x), x.leaf
        return Padded(stored, leaf.shape, leaf.dim) if leaf.padding and leaf.dim is not None else stored

    return jax.tree.map(one, tree, is_leaf=is_stored_node)


def init_shardings(config: Config, plan: ShardingPlan) -> Any:
    return as_returned(config, plan, state_shardings(config, plan))


def update_tree(config: Config, updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
    """Return updates with the structure and shardings of the parameters, and the new optimizer state."""
    config = on_planned_mesh(config)
    check_context(config)
    like = updates if params is None else params
    number = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
    arrays = {k: v for k, v in extra.items() if all(isinstance(x, number) for x in jax.tree.leaves(v))}
    static = tuple((k, v) for k, v in extra.items() if k not in arrays)
    form = TreeForm(config, layout_of(config, like, **seen_in(state)), padded_forms(like))
    same = same_updates(config)
    is_new = same.is_needed and same.is_new((signature_of((updates, state, params)), static), arrays, ())
    return same.call(jitted_update, updates, state, params, arrays, form, static, is_new=is_new)


class Shardings(NamedTuple):
    """The shardings of a run, as trees of `jax.sharding.NamedSharding` for `jax.jit` and `jax.device_put`.

    Attributes:
        params: Shardings of the parameters.
        grads: Shardings of the gradients that `value_and_grad` returns.
        opt_state: Shardings of the optimizer state.
    """

    params: Any
    grads: Any
    opt_state: Any


def shardings(config: Config, params: Any) -> Shardings:
    """Return the shardings of a run; see `ZeroTransformation.shardings`."""
    plan = make_plan(config, params)
    layout = plan.layout
    found = Shardings(
        params=sharding_tree(config, layout.treedef, layout.params),
        grads=TreeForm(config, layout, storage_forms(layout.params)).grad_shardings,
        opt_state=init_shardings(config, plan),
    )
    return to_explicit(config.user_mesh, found)


@functools.lru_cache
def same_updates(config: Config) -> SameCalls:
    """Return the `SameCalls` that compares calls of `update` over processes. There is one per configuration."""
    return SameCalls(config, "update")


def check_context(config: Config) -> None:
    """Raise a ValueError inside of a `jax.pmap` or `jax.shard_map` over an axis that `config.mesh` does not have."""
    others = sorted(set(jax.sharding.get_abstract_mesh().manual_axes) - set(config.mesh.axis_names))
    if others:
        raise ValueError(
            f"update runs inside of jax.pmap or jax.shard_map over {', '.join(map(repr, others))}, and this "
            f"transformation's mesh has {', '.join(map(repr, config.mesh.axis_names))}. Call it outside, under "
            f"jax.jit: it divides its work over the mesh itself, and value_and_grad divides the batch."
        )
