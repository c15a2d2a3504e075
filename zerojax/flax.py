"""What Flax NNX needs beyond optax's own interface: modules are sharded and differentiated in place.

Linen needs nothing: parameters are a dict, `flax.training.train_state.TrainState` takes
the transformation as it is, and batch statistics pass through `has_aux`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from zerojax.train.aux import Same
from zerojax.zero import ZeroTransformation

TAG = "zerojax"

__all__ = ["init_module", "shard_module", "value_and_grad"]


def __dir__() -> list[str]:
    """The public surface."""
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
    """`nnx.value_and_grad` with explicit collectives, for modules in any stage's layout.

    Args:
        tx: From `zero_shard`.
        loss_fn: `loss_fn(module, batch, *args)`, on all rows, or in device view on the
            device's; with `has_aux`, `(loss, aux)`. Modules, `nnx.Rngs` and metrics may be any
            of its arguments: the batch is the first in which there is none.
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
        by_argument = nnx.State(dict(zip(filters, trained if several else [trained], strict=True)))
        with nnx.merge_context(TAG, inner=True) as context:
            nodes = context.merge(graph, by_argument, constants, variables)
        at = batch_index(nodes)
        args = [batch if i == at else joined(*pair) for i, pair in enumerate(zip(nodes, arrays, strict=True))]
        returned = loss_fn(*args, **keywords)
        loss, aux = returned if has_aux else (returned, ())
        with nnx.split_context(TAG) as context:
            graph, *states, after = context.split(nodes, *groups)
        check_assigned([by_argument, constants], states)
        before = dict(nnx.to_flat_state(variables))
        updated, created = nnx.split_state(after, lambda path, _: path in before, ...)
        if in_device_view:
            check_integers(before, updated)
        return loss, updated, (aux, Same(graph), created)

    differentiate = tx.value_and_grad(pure, has_aux=True, weighted=weighted, mutable=True, accumulate=accumulate)

    @functools.wraps(loss_fn, assigned=("__name__", "__qualname__", "__module__"), updated=())
    def wrapped(*args, **keywords):
        refuse_nodes(keywords)
        nodes = tuple(jax.tree.map(lambda x: x if is_node(x) else None, args, is_leaf=is_node))
        arrays = list(jax.tree.map(lambda x: None if is_node(x) else x, args, is_leaf=is_node))
        at = batch_index(nodes)
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
    """Whether NNX updates it in place."""
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
    """One argument of its NNX objects and its arrays, each None where the other has something."""
    return jax.tree.map(
        lambda node, x: x if node is None else node, nodes, arrays, is_leaf=lambda x: x is None or is_node(x)
    )


def batch_index(nodes: Sequence) -> int:
    """The position of the batch: the first argument without NNX objects.

    Raises:
        ValueError: If there is none.
    """
    for i, node in enumerate(nodes):
        if not jax.tree.leaves(node, is_leaf=is_node):
            return i
    raise ValueError(
        "The loss was called without a batch: every argument has NNX objects in it. Pass the rows that are divided "
        "over the devices as an argument of arrays alone."
    )


def check_assigned(before: Sequence[nnx.State], after: Sequence[nnx.State]) -> None:
    """Refuse an assignment to what is not updated beside the gradient.

    Raises:
        TypeError: Naming the first variable.
    """
    for old, new in zip(before, after, strict=True):
        known = dict(nnx.to_flat_state(old))
        for path, x in nnx.to_flat_state(new):
            if [id(a) for a in jax.tree.leaves(known.get(path))] != [id(a) for a in jax.tree.leaves(x)]:
                raise TypeError(
                    f"The loss function assigns to {named(path)}, a {type(x).__name__}, which is not written back. "
                    f"Make it a variable of another type, or assign to it outside of the loss."
                )


def check_integers(before: Mapping, after: nnx.State) -> None:
    """Refuse an integer that each device changed for its own rows.

    Raises:
        TypeError: Naming the first variable.
    """
    for path, x in nnx.to_flat_state(after):
        for old, new in zip(jax.tree.leaves(before[path]), jax.tree.leaves(x), strict=True):
            if new is not old and not (jnp.issubdtype(new.dtype, jnp.inexact) or isinstance(x, nnx.RngCount)):
                raise TypeError(
                    f"In device view the loss function assigns {new.dtype} to {named(path)}, a {type(x).__name__}, of "
                    f"which every device has its own, and it has no mean. Make it a float, return it as aux marked "
                    f'with zerojax.Sum, or pass view="global" to zero_shard.'
                )


def named(path: Sequence) -> str:
    """A variable in words: which argument, and where in it."""
    return f"{'.'.join(str(key) for key in path[1:]) or 'itself'} of argument {path[0]}"
