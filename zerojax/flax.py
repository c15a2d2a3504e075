"""What Flax NNX needs beyond optax's own interface: modules are sharded and differentiated in place.

Linen needs nothing: parameters are a dict, `flax.training.train_state.TrainState` takes
the transformation as it is, and batch statistics pass through `has_aux`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from zerojax.layout.padded import is_padded
from zerojax.train.aux import Mean, Same
from zerojax.zero import ZeroTransformation


def shard_module(module: nnx.Module, tx: ZeroTransformation, *, wrt: Any = nnx.Param) -> None:
    """Shard a module's parameters for the stage, in place.

    Args:
        module: The module; its parameters are logical arrays.
        tx: From `zero_shard`.
        wrt: Filter of the variables that are parameters.

    Raises:
        ValueError: If a parameter has to be padded, which a module's own code could not read.
    """
    stored = tx.shard(nnx.state(module, wrt))
    for path, x in jax.tree_util.tree_flatten_with_path(stored, is_leaf=is_padded)[0]:
        if is_padded(x):
            raise ValueError(
                f"{jax.tree_util.keystr(path)} has shape {list(x.shape)}, and none of its dims divides by "
                f"{tx.config.data.workers} devices, so it is padded in storage; a module's own code cannot read it. "
                f"Raise persist_below above {math.prod(x.shape)} to replicate it, or train the module's state "
                f"(nnx.split) with tx.create and tx.train_step."
            )
    nnx.update(module, stored)


def value_and_grad(
    tx: ZeroTransformation, loss_fn: Callable, *, wrt: Any = nnx.Param, has_aux: bool = False
) -> Callable:
    """`nnx.value_and_grad` with explicit collectives, for a module in any stage's layout.

    Args:
        tx: From `zero_shard`.
        loss_fn: `loss_fn(module, batch, *args)`, on all rows, or in device view on the
            device's; with `has_aux`, `(loss, aux)`.
        wrt: Filter of the variables to differentiate.
        has_aux: Whether `loss_fn` returns `(loss, aux)`.

    Returns:
        `f(module, batch, *args) -> (loss, grads)` (`((loss, aux), grads)` with
        `has_aux`); `grads` is an `nnx.State` for `nnx.Optimizer.update`. Batch statistics,
        counts of random streams and other variables are written back, as
        `nnx.value_and_grad` does. In device view statistics and other variables are averaged
        over the devices, where one that is no float is a `TypeError`, and random streams
        are folded with the device's index.
    """

    @functools.wraps(loss_fn, assigned=("__name__", "__qualname__", "__module__"), updated=())
    def wrapped(module, batch, *args, **keywords):
        graph, params, keys, statistics, rest = nnx.split(module, wrt, nnx.RngKey, nnx.BatchStat, ...)

        def pure(params, batch, keys, statistics, rest, *args, **keywords):
            inner = nnx.merge(graph, params, keys, statistics, rest, copy=True)  # variables of this trace level
            returned = loss_fn(inner, batch, *args, **keywords)
            loss, aux = returned if has_aux else (returned, ())
            _, _, _, statistics, counts, rest = nnx.split(inner, wrt, nnx.RngKey, nnx.BatchStat, nnx.RngCount, ...)
            return loss, (aux, Mean(statistics), Same(counts), Mean(rest))

        differentiate = tx.value_and_grad(pure, has_aux=True)
        parts = params, batch, keys, statistics, rest
        (loss, (aux, statistics, counts, rest)), grads = differentiate(*parts, *args, **keywords)
        nnx.update(module, statistics, counts, rest)
        return ((loss, aux) if has_aux else loss), grads

    return wrapped
