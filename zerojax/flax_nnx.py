"""Functions that shard and differentiate modules of Flax NNX.

Linen needs no such functions. Its parameters are a dict, `flax.training.train_state.TrainState` takes a transformation
unchanged, and a loss can return batch statistics with `has_aux`.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from zerojax import compat, jaxprs
from zerojax.config import Config
from zerojax.metrics import Replicated
from zerojax.train.arguments import has_rows
from zerojax.units import format_bytes
from zerojax.zero import ZeroTransformation

TAG = "zerojax"

__all__ = ["init_module", "shard_module", "value_and_grad"]


def __dir__() -> list[str]:
    return sorted([*__all__, "__doc__", "__name__", "__file__"])


def init_module(init: Callable[..., nnx.Module], tx: ZeroTransformation, *args: Any, wrt: Any = nnx.Param) -> Any:
    """Initialise a module with sharded parameters. Each device creates only its own shards.

    At stage 3, no device ever holds the whole model. Flax's sharding annotations work without a mesh context.

    Args:
        init: Function that returns the module, such as `lambda key: Model(rngs=nnx.Rngs(key))`.
        tx: A transformation that `zero_shard` returned.
        *args: Arguments of `init`: arrays and PRNG keys.
        wrt: NNX filter that selects the variables that are parameters.

    Returns:
        The module. As with `tx.init_params`, its parameters have the types of the master weights. A parameter that is
        padded in storage is a `Padded`, which the module's code can use like the logical array.

    Examples:
        >>> model = init_module(lambda key: Model(rngs=nnx.Rngs(key)), tx, jax.random.key(0))
    """

    def parts(*args):
        with nnx.use_eager_sharding(False):
            return nnx.split(init(*args), wrt, ...)

    check_order("init_module(init, tx, *args)", tx, init)
    graph, _, others = jax.eval_shape(parts, *args)
    warn_of_whole(tx, others)
    params = tx.init_params(lambda *args: parts(*args)[1], *args)
    return nnx.merge(graph, params, jax.jit(lambda *args: parts(*args)[2])(*args))


def shard_module(module: nnx.Module, tx: ZeroTransformation, *, wrt: Any = nnx.Param) -> None:
    """Shard the parameters of a module for the stage, in place.

    Args:
        module: The module. Its parameters must be logical arrays. A parameter that needs padding in storage becomes a
            `Padded`, which the module's code can use like the logical array.
        tx: A transformation that `zero_shard` returned.
        wrt: NNX filter that selects the variables to shard. From the first step on, every device holds all other
            variables in full. To train a part of the parameters and shard all of them, as for LoRA, leave `wrt` out,
            and give `zero_shard` a `trainable=` that chooses this part.

    Examples:
        >>> model = Model(rngs=nnx.Rngs(0))
        >>> shard_module(model, tx)
    """
    check_order("shard_module(module, tx)", tx, module)
    chosen, others = nnx.split_state(nnx.state(module), wrt, ...)
    warn_of_whole(tx, others)
    nnx.update(module, tx.shard(chosen))


def check_order(call: str, tx: Any, other: Any) -> None:
    """Raise a TypeError if `tx` is not a transformation of zerojax, with the order of the arguments of `call`."""
    if not isinstance(getattr(tx, "config", None), Config):
        swapped = isinstance(getattr(other, "config", None), Config)
        remedy = "Swap the arguments" if swapped else "Pass tx = zero_shard(...) as tx"
        raise TypeError(
            f"flax_nnx.{call} was called with a {type(tx).__name__} as tx, which cannot shard parameters. {remedy}."
        )


def warn_of_whole(tx: ZeroTransformation, others: nnx.State) -> None:
    """Warn at stage 3 about parameters that `wrt=` does not choose, which every device would hold in full."""
    found = jax.tree.leaves(nnx.split_state(others, nnx.Param, ...)[0])
    if tx.config.stage == 3 and found:
        whole = format_bytes(sum(x.size * x.dtype.itemsize for x in found))
        warnings.warn(
            f"wrt= leaves {whole} of other parameters whole on every device. To shard them as frozen parameters, leave "
            f"wrt= out, and give zero_shard a trainable= that chooses the parameters to train, such as "
            f'trainable=lambda path, leaf: "lora" in path.',
            stacklevel=3,
        )


def value_and_grad(
    tx: ZeroTransformation,
    loss_fn: Callable,
    *,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    wrt: Any = nnx.Param,
    has_aux: bool = False,
    weighted: bool = False,
    accumulate: int = 1,
    reduction: Literal["mean", "sum"] | None = None,
) -> Callable:
    """Return a function that computes loss and gradient of modules in storage, like `nnx.value_and_grad`.

    Args:
        tx: A transformation that `zero_shard` returned.
        loss_fn: `loss_fn(module, batch, *args)`. In global view it sees all rows of the batch, and in device view only
            the rows of its device. Any argument may contain modules, `nnx.Rngs` and metrics. The batch is the first
            argument without NNX objects. If every argument has NNX objects, the batch is the keyword arguments that
            contain arrays with rows.
        argnums: The arguments to differentiate, as for `nnx.value_and_grad`.
        wrt: NNX filter that selects the variables to differentiate. An `nnx.DiffState` in `argnums` has its own filter.
        has_aux: Whether `loss_fn` returns `(loss, aux)`.
        weighted: Whether the loss is `(total, weight)`, as for `tx.value_and_grad`.
        accumulate: Number of microbatches per device, as for `tx.value_and_grad`.
        reduction: As for `tx.value_and_grad`.

    Returns:
        `f(module, batch, *args) -> (loss, grads)`, or `((loss, aux), grads)` with `has_aux`. `grads` is an
        `nnx.State` for `nnx.Optimizer.update`, or a tuple of states if `argnums` is a sequence. All other variables of
        the arguments (batch statistics, metrics, counts of random streams) are updated as by `nnx.value_and_grad`,
        once per microbatch. In device view, float variables are averaged over the devices, and random streams
        are folded with the device's index.

    Raises:
        TypeError: When `f` is called, if the loss assigns to a parameter. In device view, also if it assigns to a PRNG
            key, or to an integer other than the count of a random stream.
        ValueError: When `f` is called without a batch.

    Examples:
        >>> gradient = value_and_grad(tx, lambda model, batch: loss(model(batch["x"]), batch["y"]))
        >>> value, grads = gradient(model, batch)
        >>> optimizer.update(model, grads)
    """
    check_order("value_and_grad(tx, loss_fn)", tx, loss_fn)
    several = isinstance(argnums, Sequence)
    given = argnums if several else [argnums]
    numbers = [x if isinstance(x, nnx.DiffState) else nnx.DiffState(x, wrt) for x in given]
    filters = {x.argnum: nnx.filterlib.to_predicate(x.filter) for x in numbers}
    module_loss = ModuleLoss(loss_fn, filters, several, has_aux, tx.config.view == "device")
    combined: Any = {"weighted": weighted, "accumulate": accumulate, "reduction": reduction}
    differentiate = tx.value_and_grad(module_loss.pure, has_aux=True, mutable=True, **combined)

    @functools.wraps(loss_fn, assigned=("__name__", "__qualname__", "__module__"), updated=())
    def wrapped(*args, **keywords):
        refuse_nodes(keywords)
        nodes = tuple(jax.tree.map(lambda x: x if is_node(x) else None, args, is_leaf=is_node))
        arrays = list(jax.tree.map(lambda x: None if is_node(x) else x, args, is_leaf=is_node))
        at = batch_index(nodes)
        if at is None:
            batch = {name: x for name, x in keywords.items() if has_rows(x)}
            keywords = {name: x for name, x in keywords.items() if name not in batch}
            if not batch:
                raise ValueError(
                    "The loss was called without a batch: every argument has NNX objects in it. Pass the rows that are "
                    "divided over the devices as an argument that contains only arrays."
                )
        else:
            batch, arrays[at] = arrays[at], None
        with nnx.update_context(TAG):
            with nnx.split_context(TAG) as context:
                graph, trained, constants, variables = context.split(nodes, *module_loss.groups)
            # Do not put a single state into a tuple: the paths that `trainable` gets would then begin with "0".
            params = tuple(trained[i] for i in filters) if several else trained[next(iter(filters))]
            returned, grads = differentiate(params, variables, batch, graph, constants, arrays, **keywords)
            loss, updated, (aux, graph, created) = returned
            with nnx.merge_context(TAG, inner=False) as context:
                context.merge(graph, trained, constants, updated, created)
        return ((loss, aux) if has_aux else loss), grads

    return wrapped


@dataclasses.dataclass(frozen=True)
class ModuleLoss:
    """A loss that takes NNX objects, converted to a pure function of their variables."""

    fn: Callable  # the caller's loss
    filters: Mapping[int, Callable]  # by index of an argument, a predicate that selects the variables to differentiate
    several: bool  # whether the differentiated variables are a tuple with one state per argument; otherwise one state
    has_aux: bool  # whether `fn` returns `(loss, aux)`
    in_device_view: bool  # whether each device calls the loss on its own rows

    @property
    def groups(self) -> tuple:
        """Return filters that select differentiated variables, constants, and variables that the loss may update."""
        is_trained = lambda path, x: path[0] in self.filters and self.filters[path[0]](path[1:], x)
        return is_trained, (nnx.Param, nnx.RngKey) if self.in_device_view else nnx.Param, ...

    def pure(self, trained, variables, batch, graph, constants, arrays, **keywords):
        """Rebuild the NNX objects from their variables, and call the loss on them.

        `graph` is the structure of the NNX objects of all arguments together. `trained`, `constants` and `variables`
        are the variables of each of the `groups`. `arrays` has, for each argument, its leaves that are not NNX objects;
        None for the batch. Return `(loss, variables, (aux, graph, created))`: `variables` and `graph` are updated, and
        `created` has variables that the loss created. `tx.value_and_grad` treats `variables` as the mutable state.
        """

        def call(states):
            with nnx.merge_context(TAG, inner=True) as context:
                nodes = context.merge(graph, *states)
            at = batch_index(nodes)
            args = [batch if i == at else with_nodes(*pair) for i, pair in enumerate(zip(nodes, arrays, strict=True))]
            returned = self.fn(*args, **keywords) if at is not None else self.fn(*args, **batch, **keywords)
            with nnx.split_context(TAG) as context:
                after, *states = context.split(nodes, *self.groups)
            return returned, after, states

        by_argument = zip(self.filters, trained if self.several else [trained], strict=True)
        old = [nnx.State(dict(by_argument)), constants, variables]
        returned, after, new = call(old)
        loss, aux = returned if self.has_aux else (returned, ())
        assigned = assigned_paths(lambda states: call(states)[2], old, new)
        before = dict(nnx.to_flat_state(variables))
        updated, created = nnx.split_state(new[2], lambda path, _: path in before, ...)
        check_assigned(assigned, new[:2], updated if self.in_device_view else nnx.State({}))
        return loss, updated, (aux, Replicated(after), created)


def is_node(x: Any) -> bool:
    return isinstance(x, nnx.Pytree | nnx.Variable)


def refuse_nodes(keywords: Mapping) -> None:
    """Raise a TypeError for NNX objects in keyword arguments, because `nnx.value_and_grad` does not update them."""
    for path, x in jax.tree_util.tree_flatten_with_path(dict(keywords), is_leaf=is_node)[0]:
        if is_node(x):
            raise TypeError(
                f"{jax.tree_util.keystr(path)} is a {type(x).__name__} and a keyword argument, which would not be "
                "updated. Pass it by position."
            )


def with_nodes(nodes: Any, arrays: Any) -> Any:
    return jax.tree.map(
        lambda node, x: x if node is None else node, nodes, arrays, is_leaf=lambda x: x is None or is_node(x)
    )


def batch_index(nodes: Sequence) -> int | None:
    """Return the index of the batch, the first argument without NNX objects. None: every argument has NNX objects."""
    return next((i for i, node in enumerate(nodes) if not jax.tree.leaves(node, is_leaf=is_node)), None)


def assigned_paths(call: Callable, old: Sequence[nnx.State], new: Sequence[nnx.State]) -> set:
    """Return the paths of the variables that a loss creates, or to which it assigns a new value.

    A new array may have the old value, because `nnx.jit` and `nnx.remat` write every variable of their arguments back
    as a new array. `call` maps the `old` variables to the `new` ones. If arrays are new, `call` is traced once more,
    and the jaxpr shows which variables are returned unchanged.
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
    jaxpr, _ = compat.opened(closed)
    sources = jax.tree.unflatten(jax.tree.structure(shapes), passed_on(jaxpr, [*map(id, arrays)]))
    unchanged = {path for path, of in zip(found, sources, strict=True) if of == [*map(id, known.get(path, ()))]}
    return different - unchanged


def check_assigned(assigned: Collection, after: Sequence[nnx.State], averaged: nnx.State) -> None:
    """Raise a TypeError if the loss assigns to a variable whose new value would be lost or wrong.

    `after` has parameters and PRNG keys, whose new values would be lost. The variables in `averaged` are averaged over
    the devices, and integers other than counts of random streams have no mean.
    """
    chosen = lambda state: [(path, x) for path, x in nnx.to_flat_state(state) if path in assigned]
    if lost := [pair for state in after for pair in chosen(state)]:
        path, x = lost[0]
        raise TypeError(
            f"The loss function assigns to {variable_in_words(path)}, a {type(x).__name__}, which is not written back. "
            f"Make it a variable of another type, or assign to it outside of the loss."
        )
    for path, x in chosen(averaged):
        kinds = {new.dtype for new in jax.tree.leaves(x) if not jnp.issubdtype(new.dtype, jnp.inexact)}
        if kinds and not isinstance(x, nnx.RngCount):
            raise TypeError(
                f"In device view the loss function assigns {kinds.pop()} to {variable_in_words(path)}, a "
                f"{type(x).__name__}. Every device assigns its own value, and integers have no mean. Make it a float, "
                f'return it as aux marked with zerojax.metrics.Sum, or pass view="global" to zero_shard.'
            )


def variable_in_words(path: Sequence) -> str:
    """Describe a variable by the index of its argument and its path in that argument."""
    return f"{'.'.join(str(key) for key in path[1:]) or 'itself'} of argument {path[0]}"


def passed_on(jaxpr: Any, args: Sequence) -> list:
    """Return, for each result of `jaxpr`, the label in `args` of the argument that the result equals, or None."""
    consts = [None] * len(compat.constvars_of(jaxpr))
    return jaxprs.evaluate(jaxpr, consts, args, _passed_on_by, literal=lambda value: None)


def _passed_on_by(eqn: Any, values: Sequence) -> Sequence:
    """Return labels of the results of `eqn`; see `passed_on`. Only loops, branches and calls return operands."""
    if (loop := compat.loop_of(eqn)) is not None:
        found = passed_on(compat.opened(loop.body)[0], range(len(values)))
        first = loop.consts + loop.carry  # the index of the first operand that is sliced
        is_same = lambda k, i: i is not None and (i == loop.consts + k if k < loop.carry else i >= first)
        return [values[i] if is_same(k, i) else None for k, i in enumerate(found)]
    if eqn.primitive.name == "cond":
        branches = [passed_on(compat.opened(branch)[0], values[1:]) for branch in eqn.params["branches"]]
        return [of[0] if len({*of}) == 1 else None for of in zip(*branches, strict=True)]
    body = compat.evaluated_body(eqn)
    return [None] * len(eqn.outvars) if body is None else passed_on(body, values)
