"""The shardings of parameters, gradients and optimizer state, for `jax.jit` and `jax.device_put`."""

from __future__ import annotations

from typing import Any, NamedTuple

from zerojax.comm.explicit import to_explicit
from zerojax.config import Config
from zerojax.optim.plan import make_plan
from zerojax.placement.storage import named_tree, storage_forms
from zerojax.train.optax_pair import init_shardings
from zerojax.train.tree_api import returned_grads


class Shardings(NamedTuple):
    """Where everything lives: trees of `jax.sharding.NamedSharding`.

    Attributes:
        params: Of the parameters; the user's structure.
        grads: Of the gradients that `value_and_grad` returns; the user's structure.
        opt_state: Of the transformation's state; its own structure.
    """

    params: Any
    grads: Any
    opt_state: Any


def shardings(config: Config, params: Any) -> Shardings:
    """Return the shardings of a state; see `ZeroTransformation.shardings`."""
    plan = make_plan(config, params)
    layout = plan.layout
    parts = returned_grads(config, layout, storage_forms(layout.params))
    found = Shardings(
        params=named_tree(config, layout.treedef, layout.params),
        grads=named_tree(config, layout.treedef, parts),
        opt_state=init_shardings(config, plan),
    )
    return to_explicit(config.user_mesh, found)
