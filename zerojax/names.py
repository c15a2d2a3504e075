"""Read and set the name scopes and source lines of equations.

Every equation of a jaxpr has name scopes, which name its operations in profiles, and a source line, which errors show.
Code that evaluates an equation enters the equation's context (`contexts`), as `jax.core.eval_jaxpr` does. An equation
records its name scopes relative to its jaxpr, so the current scopes are put before the recorded ones.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import source_info_util

from zerojax import compat

# Name scopes of operations that zerojax adds to a loss. `comm.collectives` has those of collectives and of the update.
SHARDS = "zerojax_shards"  # slices, casts, layouts and the order of shards and gradients
MEAN = "zerojax_mean"  # sums and means of losses and gradients over microbatches and devices
GRAD_NORM = "zerojax_grad_norm"
BLOCK = "zerojax_block"  # the name of the call into which `zerojax.block` wraps a function

# The class of the name scopes that JAX's transforms add.
_TRANSFORM = type(source_info_util.new_name_stack().transform("jvp").stack[0])


def is_block(eqn: Any) -> bool:
    return compat.called(eqn) is not None and eqn.params.get("name") == BLOCK


class EquationContext(source_info_util.user_context):
    """The context of an equation.

    If `jax_debug_nans` finds a NaN, JAX runs the function again, one operation at a time, and raises an error that does
    not show the user's line. So this context adds the line to the error, as a note.
    """

    __slots__ = ()

    def __exit__(self, kind, error, traceback):
        super().__exit__(kind, error, traceback)
        if isinstance(error, FloatingPointError) and not hasattr(error, "__notes__"):
            for frame in itertools.islice(compat.users_frames(self.traceback), 1):
                where = f"{frame.file_name}, line {frame.line_num}, in {frame.function_name}"
                error.add_note(f"The operation is in {where}.")


def contexts() -> Callable[[Any], Any]:
    """Return a function that maps an equation to the context in which to evaluate the equation.

    Operations that are traced in the equation's context get the equation's source line. Their name scopes are those at
    the call of `contexts`, followed by those of the equation. A `FloatingPointError` in the context shows the line.
    """
    outer, known = source_info_util.current_name_stack(), (None, None)

    def context_of(eqn):
        nonlocal known
        info = eqn.source_info
        if info.name_stack is not known[0]:  # Consecutive equations mostly have the same object.
            known = info.name_stack, outer + info.name_stack
        return EquationContext(info.traceback, name_stack=known[1])

    return context_of


def at(eqn, *transforms: str) -> Any:
    """Enter the context of an equation (see `contexts`), inside the scopes of JAX's `transforms`, such as "jvp"."""
    info = eqn.source_info
    return EquationContext(info.traceback, name_stack=_inside(transforms, info.name_stack.stack))


def at_end(jaxpr, outer: Sequence, *transforms: str) -> Any:
    """Enter the scopes `transforms` and `outer`, and inside of them the context of the jaxpr's last equation."""
    if not jaxpr.eqns:
        return in_scopes(outer, *transforms)
    info = jaxpr.eqns[-1].source_info
    return EquationContext(info.traceback, name_stack=_inside(transforms, (*outer, *info.name_stack.stack)))


def in_scopes(scopes: Sequence, *transforms: str) -> Any:
    """Enter the scopes of JAX's `transforms`, such as "jvp", and inside of them `scopes`, made by `scopes_of`."""
    return source_info_util.set_name_stack(_inside(transforms, scopes))


def _inside(transforms: Sequence[str], scopes: Sequence) -> Any:
    """Return the current name scopes, followed by `transforms` and then by `scopes`."""
    outer = source_info_util.current_name_stack()
    for name in transforms:
        outer = outer.transform(name)
    return type(outer)((*outer.stack, *scopes))


def outside_transforms() -> Any:
    """Enter the current name scopes without the innermost ones that JAX's transforms added, such as `jvp`."""
    stack = source_info_util.current_name_stack()
    while len(stack) and isinstance(stack.stack[-1], _TRANSFORM):
        stack = stack[:-1]
    return source_info_util.set_name_stack(stack)


def without_transforms(jaxpr, *transforms: str) -> Any:
    """Remove the outermost name scopes of each equation if they are exactly those of JAX's `transforms`."""
    around = tuple(map(_TRANSFORM, transforms))

    def without(eqn):
        scopes = scopes_of(eqn)
        return with_scopes(eqn, scopes[len(around) :]) if scopes[: len(around)] == around else eqn

    return jaxpr.replace(eqns=[*map(without, jaxpr.eqns)])


def scopes_of(eqn) -> tuple:
    return eqn.source_info.name_stack.stack


def with_scopes(eqn, scopes: Sequence) -> Any:
    info = eqn.source_info
    return eqn.replace(source_info=info.replace(name_stack=type(info.name_stack)(tuple(scopes))))


def inside_call(eqn) -> Any:
    """Enter the name scope that JAX gives to the body of a call or a remat, to evaluate the body in place."""
    if compat.is_remat(eqn):
        return jax.named_scope("checkpoint")
    name = eqn.params.get("name")
    return jax.named_scope(eqn.primitive.name if name is None else f"jit({name})")
