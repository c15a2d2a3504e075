"""What Flax NNX needs beyond optax's own interface: modules are sharded and differentiated in place.

Linen needs nothing: parameters are a dict, `flax.training.train_state.TrainState` takes
the transformation as it is, and batch statistics pass through `has_aux`.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from zerojax import compat, jaxprs
from zerojax.budget.linen import remat
from zerojax.train.arguments import has_rows
from zerojax.train.aux import Same
from zerojax.zero import ZeroTransformation

TAG = "zerojax"

__all__ = ["init_module", "remat", "shard_module", "value_and_grad"]


def __dir__() -> list[str]:
    """Return the public surface."""
    return sorted([*__all__, "__doc__", "__name__", "__file__"])


def init_module(init: Callable[..., nnx.Module], tx: ZeroTransformation, *args: Any, wrt: Any = nnx.Param) -> Any:
    """Initialise a module, each parameter in its layout from the start.

    At stage 3 the whole model never exists on one device. Flax's annotations need no mesh context here.

    Args:
        init: Returns the module, such as `lambda key: Model(rngs=nnx.Rngs(key))`.
        tx: From `zero_shard`.
        *args: Arguments of `init`: arrays and PRNG keys.
        wrt: Filter of the variables that are parameters.

    Returns:
        The module; its parameters in the types of the master weights, as from `tx.init_params`. To its
        code one that is padded in storage, a `Padded`, is the logical array.
    """

    def parts(*args):
        with nnx.use_eager_sharding(False):
            return nnx.split(init(*args), wrt, ...)

    graph, _, _ = jax.eval_shape(parts, *args)
    params = tx.init_params(lambda *args: parts(*args)[1], *args)
    return nnx.merge(graph, params, jax.jit(lambda *args: parts(*args)[2])(*args))


def shard_module(module: nnx.Module, tx: ZeroTransformation, *, wrt: Any = nnx.Param) -> None:
    """Shard a module's parameters for the stage, in place.

    Args:
        module: The module; its parameters are logical arrays. To its code they stay that: one that has to be
            padded in storage becomes a `Padded`, which is indexed and computed with as the logical array.
        tx: From `zero_shard`.
        wrt: Filter of the variables that are parameters.
    """
    nnx.update(module, tx.shard(nnx.state(module, wrt)))


def value_and_grad(
    tx: ZeroTransformation,
    loss_fn: Callable,
    *,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    wrt: Any = nnx.Param,
    has_aux: bool = False,
    weighted: bool = False,
    accumulate: int = 1,
) -> Callable:
    """Return `nnx.value_and_grad` with explicit collectives, for modules in any stage's layout.

    Args:
        tx: From `zero_shard`.
        loss_fn: `loss_fn(module, batch, *args)`, on all rows, or in device view on the
            device's; with `has_aux`, `(loss, aux)`. Modules, `nnx.Rngs` and metrics may be any
            of its arguments: the batch is the first in which there is none, or if there is no such argument,
            the keyword arguments that have rows.
        argnums: Which arguments are differentiated, as for `nnx.value_and_grad`.
        wrt: Filter of the variables to differentiate, where `argnums` has no `nnx.DiffState`.
        has_aux: Whether `loss_fn` returns `(loss, aux)`.
        weighted: As for `tx.value_and_grad`.
        accumulate: As for `tx.value_and_grad`.

    Returns:
        `f(module, batch, *args) -> (loss, grads)` (`((loss, aux), grads)` with `has_aux`); `grads`
        is an `nnx.State` for `nnx.Optimizer.update`, or for a sequence `argnums` a tuple of
        them. Batch statistics, metrics, counts of random streams and all other variables of
        the arguments are updated as `nnx.value_and_grad` does, by microbatches one after the
        other. In device view floats among them are averaged over the devices, and random
        streams are folded with the device's index.

    Raises:
        TypeError: When called, if the loss assigns to a parameter; in device view, if it assigns
            to a key, or to an integer that is no count of a random stream.
        ValueError: When called, if every argument has NNX objects in it, so that none is a batch.
    """
    several = isinstance(argnums, Sequence)
    numbers = [
        x if isinstance(x, nnx.DiffState) else nnx.DiffState(x, wrt) for x in (argnums if several else [argnums])
    ]
    filters = {x.argnum: nnx.filterlib.to_predicate(x.filter) for x in numbers}
    is_trained = lambda path, x: path[0] in filters and filters[path[0]](path[1:], x)
    in_device_view = tx.config.view == "device"
    groups = (is_trained, (nnx.Param, nnx.RngKey) if in_device_view else nnx.Param, ...)

    def pure(trained, variables, batch, graph, constants, arrays, **keywords):
        def call(states):
            with nnx.merge_context(TAG, inner=True) as context:
                nodes = context.merge(graph, *states)
            at = batch_index(nodes)
            args = [batch if i == at else joined(*pair) for i, pair in enumerate(zip(nodes, arrays, strict=True))]
            returned = loss_fn(*args, **keywords) if at is not None else loss_fn(*args, **batch, **keywords)
            with nnx.split_context(TAG) as context:
                after, *states = context.split(nodes, *groups)
            return returned, after, states

        by_argument = nnx.State(dict(zip(filters, trained if several else [trained], strict=True)))
        old = [by_argument, constants, variables]
        returned, after, new = call(old)
        loss, aux = returned if has_aux else (returned, ())
        assigned = assigned_paths(lambda states: call(states)[2], old, new)
        check_assigned(assigned, new[:2])
        before = dict(nnx.to_flat_state(variables))
        updated, created = nnx.split_state(new[2], lambda path, _: path in before, ...)
        if in_device_view:
            check_integers(assigned, updated)
        return loss, updated, (aux, Same(after), created)

    differentiate = tx.value_and_grad(pure, has_aux=True, weighted=weighted, mutable=True, accumulate=accumulate)

    @functools.wraps(loss_fn, assigned=("__name__", "__qualname__", "__module__"), updated=())
    def wrapped(*args, **keywords):
        refuse_nodes(keywords)
        nodes = tuple(jax.tree.map(lambda x: x if is_node(x) else None, args, is_leaf=is_node))
        arrays = list(jax.tree.map(lambda x: None if is_node(x) else x, args, is_leaf=is_node))
        at = batch_index(nodes)
        if at is None:
            batch = {name: x for name, x in keywords.items() if has_rows(x)}
            keywords = {name: x for name, x in keywords.items() if name not in batch}
            check_given(batch)
        else:
            batch, arrays[at] = arrays[at], None
        with nnx.update_context(TAG):
            with nnx.split_context(TAG) as context:
                graph, trained, constants, variables = context.split(nodes, *groups)
            params = tuple(trained[i] for i in filters) if several else trained[next(iter(filters))]
            returned, grads = differentiate(params, variables, batch, graph, constants, arrays, **keywords)
            loss, updated, (aux, graph, created) = returned
            with nnx.merge_context(TAG, inner=False) as context:
                context.merge(graph, trained, constants, updated, created)
        return ((loss, aux) if has_aux else loss), grads

    return wrapped


def is_node(x: Any) -> bool:
    """Return whether NNX updates it in place."""
    return isinstance(x, nnx.Pytree | nnx.Variable)


def refuse_nodes(keywords: Mapping) -> None:
    """Refuse NNX objects among keyword arguments, which `nnx.value_and_grad` does not update either.

    Raises:
        TypeError: Naming the first.
    """
    for path, x in jax.tree_util.tree_flatten_with_path(dict(keywords), is_leaf=is_node)[0]:
        if is_node(x):
            raise TypeError(
                f"{jax.tree_util.keystr(path)} is a {type(x).__name__} and a keyword argument, which would not be "
                "updated. Pass it by position."
            )


def joined(nodes: Any, arrays: Any) -> Any:
    """Join an argument's NNX objects and its arrays, each None where the other has something."""
    return jax.tree.map(
        lambda node, x: x if node is None else node, nodes, arrays, is_leaf=lambda x: x is None or is_node(x)
    )


def batch_index(nodes: Sequence) -> int | None:
    """Return the position of the batch, the first argument without NNX objects; None if there is none."""
    return next((i for i, node in enumerate(nodes) if not jax.tree.leaves(node, is_leaf=is_node)), None)


def check_given(batch: Mapping) -> None:
    """Refuse a call without a batch, by position or by keyword.

    Raises:
        ValueError: If there is none.
    """
    if not batch:
        raise ValueError(
            "The loss was called without a batch: every argument has NNX objects in it. Pass the rows that are divided "
            "over the devices as an argument of arrays alone."
        )


def assigned_paths(call: Callable, old: Sequence[nnx.State], new: Sequence[nnx.State]) -> set:
    """Return the paths of the variables that a loss gives other values, or creates.

    Transforms such as `nnx.jit` and `nnx.remat` write every variable of their arguments back, as new arrays. So where
    an array is not the old one, the program says whether it is the same value.

    Args:
        call: From variables before the loss to those after it; a call of it more is traced if need be.
        old: The variables before.
        new: The variables after.
    """
    known = {path: jax.tree.leaves(x) for state in old for path, x in nnx.to_flat_state(state)}
    found = {path: jax.tree.leaves(x) for state in new for path, x in nnx.to_flat_state(state)}
    same = lambda path: [*map(id, known.get(path, ()))] == [*map(id, found[path])]
    different = {path for path in found if not same(path)}
    if known.keys().isdisjoint(different):
        return different
    arrays, structure = jax.tree.flatten(list(old))

    def after(arrays):
        return [jax.tree.leaves(x) for state in call(structure.unflatten(arrays)) for _, x in nnx.to_flat_state(state)]

    closed, shapes = jax.make_jaxpr(after, return_shape=True)(arrays)
    # For each array after the loss the index of the one before that it is, or None.
    sources = jax.tree.unflatten(jax.tree.structure(shapes), jaxprs.passed_on(compat.opened(closed)[0]))
    ids = {path: [None if i is None else id(arrays[i]) for i in of] for path, of in zip(found, sources, strict=True)}
    unchanged = {path for path in found if ids[path] == [*map(id, known.get(path, ()))]}
    return different - unchanged


def check_assigned(assigned: Collection, after: Sequence[nnx.State]) -> None:
    """Refuse an assignment to what is not updated beside the gradient.

    Raises:
        TypeError: Naming the first variable.
    """
    for state in after:
        for path, x in nnx.to_flat_state(state):
            if path in assigned:
                raise TypeError(
                    f"The loss function assigns to {named(path)}, a {type(x).__name__}, which is not written back. "
                    f"Make it a variable of another type, or assign to it outside of the loss."
                )


def check_integers(assigned: Collection, after: nnx.State) -> None:
    """Refuse an integer that each device changed for its own rows.

    Raises:
        TypeError: Naming the first variable.
    """
    for path, x in nnx.to_flat_state(after):
        if path not in assigned or isinstance(x, nnx.RngCount):
            continue
        for new in jax.tree.leaves(x):
            if not jnp.issubdtype(new.dtype, jnp.inexact):
                raise TypeError(
                    f"In device view the loss function assigns {new.dtype} to {named(path)}, a {type(x).__name__}, of "
                    f"which every device has its own, and it has no mean. Make it a float, return it as aux marked "
                    f'with zerojax.Sum, or pass view="global" to zero_shard.'
                )


def named(path: Sequence) -> str:
    """Describe a variable: which argument, and where in it."""
    return f"{'.'.join(str(key) for key in path[1:]) or 'itself'} of argument {path[0]}"
