"""Define `remat_within`: a `jax.checkpoint` with a budget of bytes instead of a policy."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from zerojax import compat, jaxprs, primitives, signatures
from zerojax.budget.graph import CALLED_BACK, Choice, choose_saved, graph_of, run_named, without_consts
from zerojax.primitives import Kind
from zerojax.units import parse_bytes


def remat_within(fn: Callable, *, budget: float | str, prevent_cse: bool = True) -> "Remat":
    """Rematerialise a function within a budget of memory.

    Between its forward and its backward pass, a call keeps at most `budget` bytes in addition to its arguments. Within
    this budget, the values to save are chosen so that the fewest FLOPs are repeated. With a budget of 0, this is
    `jax.checkpoint`. With at least `choice(...).most_bytes`, all values that the backward pass reads are saved, and
    nothing is repeated. Values and gradients equal those of `fn`. The backward pass repeats no collectives. It does not
    repeat callbacks either, such as `jax.debug.print`, unless the call is under `jax.vmap`.

    Args:
        fn: Any function that `jax.checkpoint` accepts, such as one block of a model. No mesh is needed.
        budget: The bytes that a call may save, in total over all devices that compute the call: a number, or text such
            as `"1 GiB"`. In a `jax.lax.scan` each iteration is a call.
        prevent_cse: As for `jax.checkpoint`. Use False in a `scan`, whose compiled loop needs no barriers.

    Returns:
        A function with the arguments and results of `fn`. Its method `choice(*args)` returns what a call saves.

    Raises:
        TypeError: If `budget` is not a size.
        ValueError: If the size is unknown. The returned function raises it if the results of the function's collectives
            need more than the budget.

    References:
        Jain et al. 2020, arXiv 1910.02653 (Checkmate): the integer program.
        Chen et al. 2016, arXiv 1604.06174: rematerialisation.

    Examples:
        >>> block = zerojax.remat_within(lambda w, x: jnp.tanh(x @ w), budget="64 MiB")
        >>> jax.grad(lambda w, x: block(w, x).sum())(jnp.ones((4, 4)), jnp.ones((2, 4))).shape
        (4, 4)
    """
    return Remat(fn, parse_bytes("remat_within(budget=)", budget), prevent_cse=prevent_cse)


class Remat:
    """A function that saves at most a budget of bytes for its backward pass. `remat_within` returns it.

    Calls with the same jaxpr share one choice and one traced function.
    """

    def __init__(self, fn: Callable, budget: int, *, prevent_cse: bool):
        functools.update_wrapper(self, fn)
        self._fn, self._budget, self._prevent_cse = fn, budget, prevent_cse
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
        leaves, structure = jax.tree.flatten((args, kwargs))

        def flat(*leaves):
            args, kwargs = jax.tree.unflatten(structure, leaves)
            return self._fn(*args, **kwargs)

        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        return closed, jax.tree.structure(shapes), leaves

    def _rematerialised(self, jaxpr: Any, consts: Any) -> tuple[Callable, Choice]:
        """Return a function of the constants and arguments that saves at most the budget, and its `Choice`."""
        key = signatures.signature(jaxpr)
        if key is not None and key in self._known:
            return self._known[key]
        whole, avals = without_consts(jaxpr)
        choice = choose_saved(graph_of(whole, (), avals), self._budget)
        run = functools.partial(run_named, whole, ())
        if self._budget < choice.most_bytes:
            run = checkpointed(run, choice, prevent_cse=self._prevent_cse)
        if key is not None:
            self._known[key] = run, choice
        return run, choice


def checkpointed(run: Callable, choice: Choice, *, prevent_cse: bool) -> Callable:
    """Return `run` under `jax.checkpoint`, so that the forward pass saves the values of `choice`.

    The backward pass computes all other values again, and does not repeat callbacks, such as `jax.debug.print`. `run`
    must name its values as `run_named` does.
    """
    policy = jax.checkpoint_policies.save_only_these_names(*choice.saved, CALLED_BACK)

    def policy_of(primitive, *avals, **params):
        return primitives.named(primitive.name).kind is Kind.DEBUG or policy(primitive, *avals, **params)

    return jax.checkpoint(run, policy=policy_of, prevent_cse=prevent_cse)
