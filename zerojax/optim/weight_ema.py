"""Keep an exponential moving average of the weights in the state of an optax transformation."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zerojax.config.precision import common_dtype

if TYPE_CHECKING:
    from jaxtyping import PyTree


class WeightEmaState(NamedTuple):
    """The state of `weight_ema`. `average` is a tree like the parameters, whose floats are float32 or wider."""

    average: PyTree


def weight_ema(decay: float) -> optax.GradientTransformation:
    """Keep a moving average of the parameters in the optimizer's state. Updates pass through unchanged.

    Put `weight_ema` last in an `optax.chain`, because only the last updates are the numbers that are added to the
    parameters. Under `zero_shard`, `weight_ema` averages the master weights. The average is sharded, offloaded, rolled
    back, checkpointed and restored like all other state.

    Args:
        decay: The share of the old average that each step keeps, from 0 to 1. The first average equals the parameters.

    Returns:
        An optax transformation. `zerojax.averaged` finds the average in any state that contains it.

    Raises:
        ValueError: If `decay` is below 0 or above 1. `update` raises it if it is called without parameters.

    Examples:
        >>> tx = zero_shard(optax.chain(optax.adamw(3e-4), weight_ema(0.999)), stage=3)
        >>> average = tx.as_params(averaged(state.opt_state), state.params)
        >>> tx.eval_step(model.apply)(average, batch)
    """
    if not 0 <= decay <= 1:
        raise ValueError(f"decay={decay} must be within 0 and 1: it is the share of the average that each step keeps.")

    def init(params):
        return WeightEmaState(jax.tree.map(lambda x: jnp.array(x, wide(x)), params))

    def update(updates, state, params=None):
        if params is None:
            raise ValueError("weight_ema averages the parameters: call update(updates, state, params).")

        def one(average, new):
            inexact = jnp.issubdtype(new.dtype, jnp.inexact)
            return decay * average + (1 - decay) * new.astype(average.dtype) if inexact else new

        return updates, WeightEmaState(jax.tree.map(one, state.average, optax.apply_updates(params, updates)))

    return optax.GradientTransformation(init, update)


def wide(x: jax.Array) -> jnp.dtype:
    """Return the type of a parameter's average. A float that is narrower than float32 becomes float32."""
    return common_dtype(x.dtype, jnp.float32) if jnp.issubdtype(x.dtype, jnp.inexact) else x.dtype


def averaged(opt_state: PyTree) -> PyTree:
    """Return the average that `weight_ema` keeps.

    Args:
        opt_state: A state that contains the state of one `weight_ema`, at any depth.

    Returns:
        A tree with the parameters' structure. In a state of `zero_shard`, its leaves have storage shapes, and
        `tx.as_params` converts the tree into parameters.

    Raises:
        ValueError: If `opt_state` does not have exactly one average.
    """
    is_ema = lambda x: isinstance(x, WeightEmaState)
    found = [x for x in jax.tree.leaves(opt_state, is_leaf=is_ema) if is_ema(x)]
    if len(found) != 1:
        raise ValueError(
            f"The state has {len(found)} averages of weights, and exactly one is needed. Chain one "
            "weight_ema(decay) after the optimizer, and give the state of the chain, such as state.opt_state."
        )
    return found[0].average
