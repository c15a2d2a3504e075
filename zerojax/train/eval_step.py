"""Call functions of sharded parameters outside of training. Parameters are gathered, or read from disk, on use."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.core
from jaxtyping import PyTree

from zerojax.comm.mesh import on_auto_mesh, replicated, row_shardings, wait_if_simulated, with_types
from zerojax.config import Config
from zerojax.config.batch_dims import is_divisible
from zerojax.gather.on_use import as_function
from zerojax.layout.leaf import has_chunked
from zerojax.layout.tree import layout_of
from zerojax.placement.problems import unusable_named
from zerojax.placement.storage import cast, storage_leaves
from zerojax.train.arguments import NO_BATCH, call_unpacked, place_batch, place_leaf, separated
from zerojax.train.checked import check_leaf_types
from zerojax.train.gradients import trace_view
from zerojax.train.loss import LossInputs, View
from zerojax.train.same_run import SameCalls, signature_of


@dataclasses.dataclass(frozen=True)
class Function:
    """Gives a function `fn(params, batch, *args)` the `call` method of a `Loss`. `fn` may return any value."""

    fn: Callable

    def call(self, params: PyTree, mutable: PyTree, batch: PyTree, args: tuple) -> Any:
        del mutable
        return call_unpacked(self.fn, (params,), batch, args)


def eval_step(config: Config, fn: Callable) -> Callable:
    """Return a jitted function for evaluation; see `ZeroTransformation.eval_step`."""
    given, config = config, dataclasses.replace(config, view="global")

    def run(others, params, batch, *args):
        layout = layout_of(config, params, others=others)
        stored = cast(storage_leaves(params, layout.params), [leaf.dtype for leaf in layout.params])
        view = View(config, layout, (), Function(fn), 1)
        if not view.gathers_on_use:
            return view.call(jax.tree.unflatten(layout.treedef, stored), None, batch, *args)
        program, values, options, structure = trace_view(view, LossInputs(stored, None, batch, args))
        return jax.tree.unflatten(structure, as_function(program, options)(*values))

    @functools.cache
    def program_for(others: tuple) -> Callable:
        def program(params, batch, *args):
            rows = batch if is_divisible(batch, config.data, config.batch_spec) else ()
            shardings = lambda results: row_shardings(config.mesh, config.data, results, rows)
            call = functools.partial(run, others)
            return on_auto_mesh(config.user_mesh, call, params, batch, *with_types(args), shardings=shardings)

        return jax.jit(program)

    @functools.cache
    def staged() -> Callable:
        from zerojax.train.staged_step import StagedFunction

        return StagedFunction(config, Function(fn))

    same = SameCalls(config, f"evaluate {getattr(fn, '__name__', 'a function')}")

    @functools.wraps(fn, assigned=("__name__", "__qualname__", "__module__"), updated=())
    def step(params, batch=NO_BATCH, *args, **keywords):
        _, batch, args = separated((batch, *args), keywords)
        with unusable_named(config.mesh, params=params, batch=batch):
            check_leaf_types(batch)
            on_disk = has_chunked(params)
            is_new = not on_disk and same.is_needed and same.is_new(signature_of(params), batch, args)
            wait_if_simulated(config.mesh, (params, batch, args))
            on_all = lambda x: place_leaf(x, replicated(config.user_mesh))
            divides = is_divisible(batch, config.data, config.batch_spec)
            rows = place_batch(config, batch) if divides else jax.tree.map(on_all, batch)
            if on_disk:
                return on_auto_mesh(config.user_mesh, staged(), params, rows, with_types(args))
            return same.call(program_for(others_of(given, params)), params, rows, *args, is_new=is_new)

    return step


def others_of(config: Config, params: PyTree) -> tuple:
    """Return the mesh axes, other than data axes, that divide each parameter (`Leaf.others`); () without such axes.

    Arrays under `jax.jit` do not show these axes. `config` must not be a copy, because a copy has no sharding plans.
    """
    if not (config.data.compiler_axes or config.data.experts):
        return ()
    return tuple(leaf.others for leaf in layout_of(config, params).params)
