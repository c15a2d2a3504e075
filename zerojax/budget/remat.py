"""Define `remat`: a `jax.checkpoint` with a budget of bytes instead of a policy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax

from zerojax import compat, jaxprs
from zerojax.budget.choice import Choice, Fate, choose
from zerojax.budget.graph import CALLBACKS, CALLED_BACK, graph_of, named
from zerojax.config.checks import check_word
from zerojax.offload.remat import require_offload
from zerojax.units import parse_bytes


def remat(
    fn: Callable,
    *,
    budget: float | str,
    named: Mapping[str, Fate] = MappingProxyType({}),
    offload: float | str = 0,
    repeat_collectives: bool = False,
    prevent_cse: bool = True,
    static_argnums: int | tuple[int, ...] = (),
) -> Remat:
    """Rematerialise a function within a budget of memory.

    Between its forward and its backward pass, a call keeps at most `budget` bytes in addition to its arguments. Within
    this budget, `remat` chooses the values to save so that the fewest FLOPs are repeated. With a budget
    of 0, it is `jax.checkpoint`. With at least `choice(...).most_bytes`, all values that the backward pass reads are
    saved, and nothing is repeated. Values and gradients equal those of `fn`. The backward pass does not repeat
    callbacks, such as `jax.debug.print`, unless the call is under `jax.vmap`.

    Args:
        fn: Any function that `jax.checkpoint` accepts, such as one block of a model. No mesh is needed.
        budget: The bytes that a call may save, in total over all devices that compute the call: a number, or text such
            as `"1 GiB"`. In a `jax.lax.scan` each iteration is a call.
        named: The fate of each value that `fn` names with `jax.ad_checkpoint.checkpoint_name`, by name: `"save"`,
            `"recompute"`, or `"offload"` to host memory. Saved values count towards the budget.
        offload: The bytes per call that may be saved in pinned host memory if this avoids FLOPs. `"auto"` allows as
            many as the link to the host can copy while the block is computed, in each direction, so that the copies
            delay nothing.
        repeat_collectives: Whether collectives inside `fn` may be repeated. Otherwise their results are saved.
        prevent_cse: As for `jax.checkpoint`. Use False in a `scan`, whose compiled loop needs no barriers.
        static_argnums: Positional arguments that are no arrays, such as flags.

    Returns:
        A function with the arguments and results of `fn`. Its method `choice(*args)` returns what a call saves.

    Raises:
        TypeError: If `budget` or `offload` is not a size.
        ValueError: If a size or a fate is unknown. The returned function raises it if the values that must be saved
            need more than the budget.

    References:
        Jain et al. 2020, arXiv 1910.02653 (Checkmate): the integer program.
        Chen et al. 2016, arXiv 1604.06174: rematerialisation.

    Examples:
        >>> block = zerojax.remat(lambda w, x: jnp.tanh(x @ w), budget="64 MiB")
        >>> jax.grad(lambda w, x: block(w, x).sum())(jnp.ones((4, 4)), jnp.ones((2, 4))).shape
        (4, 4)
    """
    for name, fate in named.items():
        check_word(f"remat(named={{{name!r}: ...}})", fate, ("save", "recompute", "offload"))
    host_bytes = None if offload == "auto" else parse_bytes("remat(offload=)", offload)
    if host_bytes != 0 or "offload" in named.values():
        require_offload()
    options = {
        "budget": parse_bytes("remat(budget=)", budget),
        "host_bytes": host_bytes,
        "fates": dict(named),
        "repeat_collectives": repeat_collectives,
    }
    static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    return Remat(fn, options, prevent_cse=prevent_cse, static_argnums=static)


class Remat:
    """A function that saves at most a budget of bytes for its backward pass. `remat` returns it.

    Calls with the same jaxpr share one choice and one traced function.
    """

    def __init__(self, fn: Callable, options: dict[str, Any], *, prevent_cse: bool, static_argnums: tuple[int, ...]):
        functools.update_wrapper(self, fn)
        self._fn, self._options, self._prevent_cse, self._static = fn, options, prevent_cse, static_argnums
        self._known: dict[Any, tuple[Callable, Choice]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function. The backward pass recomputes the values that the call does not save."""
        closed, structure, leaves = self._traced(args, kwargs)
        jaxpr, consts = compat.opened(closed)
        run, _ = self._rematerialised(jaxpr, consts)
        return jax.tree.unflatten(structure, run(*jaxprs.as_jax_values(consts), *leaves))

    def choice(self, *args: Any, **kwargs: Any) -> Choice:
        """Return what a call saves and repeats.

        Args:
            *args: The function's arguments. Arrays may be `jax.ShapeDtypeStruct`.
            **kwargs: The function's keyword arguments, in the same form.
        """
        closed, _, _ = self._traced(args, kwargs)
        return self._rematerialised(*compat.opened(closed))[1]

    def _traced(self, args: tuple, kwargs: dict) -> tuple[Any, Any, list]:
        static = {i % len(args): args[i] for i in self._static if -len(args) <= i < len(args)}
        leaves, structure = jax.tree.flatten(([x for i, x in enumerate(args) if i not in static], kwargs))

        def flat(*leaves):
            given, kwargs = jax.tree.unflatten(structure, leaves)
            for i, value in sorted(static.items()):
                given.insert(i, value)
            return self._fn(*given, **kwargs)

        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        return closed, jax.tree.structure(shapes), leaves

    def _rematerialised(self, jaxpr: Any, consts: Any) -> tuple[Callable, Choice]:
        """Return a function of constants and arguments that saves at most the budget, and the `Choice` for it."""
        key = jaxprs.signature(jaxpr)
        if key is None or key not in self._known:
            inputs = [*compat.constvars_of(jaxpr), *jaxpr.invars]
            whole = compat.part_of(jaxpr, jaxpr.eqns, inputs, jaxpr.outvars)
            choice = choose(graph_of(whole, (), [var.aval for var in inputs]), **self._options)
            run = functools.partial(named, whole, ())
            if self._options["budget"] < choice.most_bytes or choice.offloaded:
                run = checkpointed(run, choice, prevent_cse=self._prevent_cse)
            found = run, choice
            if key is None:
                return found
            self._known[key] = found
        return self._known[key]


def checkpointed(run: Callable, choice: Choice, *, prevent_cse: bool) -> Callable:
    """Return `run` under `jax.checkpoint`, so that it saves or offloads the values of `choice`.

    The backward pass computes all other values again, and does not repeat callbacks, such as `jax.debug.print`. `run`
    names its values as `graph.named` does.
    """
    saved = [*choice.saved, CALLED_BACK]
    if choice.offloaded:
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=saved,
            names_which_can_be_offloaded=list(choice.offloaded),
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        policy = jax.checkpoint_policies.save_only_these_names(*saved)

    def policy_of(primitive, *avals, **params):
        return primitive.name in CALLBACKS or policy(primitive, *avals, **params)

    return jax.checkpoint(run, policy=policy_of, prevent_cse=prevent_cse)
