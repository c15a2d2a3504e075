"""Parameters outside of the loss: a jitted function of them, with the gathers of a training step and no gradient."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from zerojax.comm.explicit import on_auto_mesh
from zerojax.comm.mesh import replicated, row_shardings, wait_if_simulated
from zerojax.config import Config
from zerojax.gather import StandIn
from zerojax.layout.tree import layout_of
from zerojax.placement.storage import cast, storage_leaves
from zerojax.train.arguments import packed, unpacked
from zerojax.train.batch import first_undivided, place_batch, placed
from zerojax.train.view import View

if TYPE_CHECKING:
    from jaxtyping import PyTree


@dataclasses.dataclass(frozen=True)
class Function:
    """A function in the place of a loss: whatever it returns, it returns.

    Attributes:
        fn: `fn(params, batch, *args)`.
    """

    fn: Callable

    def call(self, params: PyTree, mutable: PyTree, batch: PyTree, args: tuple) -> Any:
        """Call it; there is nothing mutable."""
        del mutable
        args, keywords = unpacked(args)
        return self.fn(params, batch, *args, **keywords)


def eval_step(config: Config, fn: Callable) -> Callable:
    """What `ZeroTransformation.eval_step` returns."""
    config = dataclasses.replace(config, view="global")

    def run(params, batch, *args):
        layout = layout_of(config, params)
        stored = cast(storage_leaves(params, layout.params), [leaf.dtype for leaf in layout.params])
        view = View(config, layout, (), Function(fn), 1)
        zeros = view.stand_ins(stored)
        shards = [StandIn(x, zeros[i]) if i in zeros else x for i, x in enumerate(stored)]
        return view.loss_of_storage()(jax.tree.unflatten(layout.treedef, shards), None, batch, *args)

    @jax.jit
    def program(params, batch, *args):
        rows = batch if divides(config, batch) else ()
        shardings = lambda results: row_shardings(config.mesh, config.data, results, rows)
        return on_auto_mesh(config.user_mesh, run, params, batch, *args, shardings=shardings)

    @functools.wraps(fn, assigned=("__name__", "__qualname__", "__module__"), updated=())
    def step(params, batch, *args, **keywords):
        args = packed(args, keywords)
        wait_if_simulated(config.mesh, (params, batch, args))
        if divides(config, batch):
            return program(params, place_batch(config, batch), *args)
        return program(params, jax.tree.map(lambda x: placed(x, replicated(config.user_mesh)), batch), *args)

    return step


def divides(config: Config, batch: PyTree) -> bool:
    """Whether the devices divide the rows of every leaf, and `batch_spec` its other dims."""
    if not all(jnp.ndim(x) and jnp.shape(x)[0] % config.data.workers == 0 for x in jax.tree.leaves(batch)):
        return False
    return config.batch_spec is None or first_undivided(config, batch, config.batch_spec.over(batch)) is None
