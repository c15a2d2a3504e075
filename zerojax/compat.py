"""Contain all code that depends on the version of JAX. `internals` has what the public API of JAX lacks.

Tested with jax 0.10.2 and 0.12.0. Each function hides one difference, so a new version of JAX changes one file:

- Up to 0.11, a closed jaxpr is a `ClosedJaxpr` that holds a `Jaxpr`. From 0.12, both are one class.
- Up to 0.11, the parameters of `scan` have the numbers of constants and carries. From 0.12, they have trees.
- The primitives of `jax.jit` and `jax.checkpoint` have changed their names.
- With `jax_remat3`, `jax_custom_vjp3` or `jax_custom_jvp3` (jax 0.12), `jax.checkpoint`, `checkpoint_name` and custom
  derivatives are one primitive with an object (`HiPrim`) as its parameter. `name_of` and `params_of` hide this.
"""

import dataclasses
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import ad

from zerojax import primitives
from zerojax.primitives import Kind

# Files in these folders are not the user's.
_FOLDERS = tuple(
    os.path.join(path, "") for path in (*map(os.path.dirname, (__file__, jax.__file__)), sysconfig.get_path("stdlib"))
)


@dataclasses.dataclass(frozen=True)
class LoopEqn:
    """A scan equation, which is a loop with a known number of iterations. Its fields are named as in `jax.lax.scan`."""

    body: Any  # the body's closed jaxpr: `(*consts, *carry, *x) -> (*carry, *y)`
    consts: int  # the number of operands that are constant over the iterations
    carry: int  # the number of operands that are carried from one iteration to the next
    length: int
    reverse: bool
    unroll: int

    def evaluate(self, run: Callable[[list], list], values: Sequence) -> list:
        """Evaluate the loop on `values`, whose shapes may differ from the trace. `run` evaluates one iteration."""
        sliced = self.consts + self.carry

        def body(carry, slices):
            results = run([*values[: self.consts], *carry, *slices])
            return results[: self.carry], results[self.carry :]

        carry, slices = list(values[self.consts : sliced]), list(values[sliced:])
        options = {"length": self.length, "reverse": self.reverse, "unroll": self.unroll}
        carry, stacked = jax.lax.scan(body, carry, slices, **options)
        return [*carry, *stacked]


def common_dtype(first: Any, second: Any) -> np.dtype:
    """Return the type to which JAX promotes `first` and `second`, even if the user has set strict type promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(first, second)


def opened(closed) -> tuple[Any, Sequence]:
    """Split `closed` into `(jaxpr, consts)`: an open jaxpr, and the values of its constvars."""
    if isinstance(closed, core.ClosedJaxpr) and hasattr(closed, "jaxpr"):
        return closed.jaxpr, tuple(closed.consts)
    return closed, ()


def with_jaxpr(closed, jaxpr):
    # An inner jaxpr is open or closed, and from 0.12 both are one class.
    return jaxpr if closed is opened(closed)[0] else closed.replace(jaxpr=jaxpr)


def is_jaxpr(x) -> bool:
    return isinstance(x, core.Jaxpr | core.ClosedJaxpr)


def constvars_of(jaxpr) -> Sequence:
    return tuple(getattr(jaxpr, "constvars", ()))


def users_frames(traceback) -> Iterator[Any]:
    """Yield the frames of the user's code in a traceback that JAX has recorded, the innermost first."""
    return (frame for frame in (traceback.frames if traceback else ()) if is_users(frame.file_name))


def is_users(file: str) -> bool:
    return "site-packages" not in file and not file.startswith(_FOLDERS)


def line_of(eqn) -> str:
    """Return the line of the user's source where an equation was traced, as "file.py:12", or "" if it is unknown."""
    frame = next(users_frames(getattr(eqn.source_info, "traceback", eqn.source_info)), None)
    return "" if frame is None else f"{os.path.basename(frame.file_name)}:{frame.line_num}"


def is_literal(atom) -> bool:
    return isinstance(atom, core.Literal)


def new_var(aval) -> Any:
    return core.Var(aval)


def is_dropped(var) -> bool:
    return isinstance(var, core.DropVar)


def is_ref(atom) -> bool:
    """Return whether `atom`, an operand or a result of an equation, is a mutable array (`jax.Ref`)."""
    return hasattr(atom.aval, "inner_aval")


def is_high(atom) -> bool:
    """Return whether the type of `atom`, an operand or a result, is defined with `jax.experimental.hijax`."""
    return bool(getattr(atom.aval, "is_high", False))


def name_of(eqn) -> str:
    """Return the name of the primitive of `eqn`. For `HiPrim`, return the name of the primitive that it replaces."""
    if "_prim" not in eqn.params:
        return eqn.primitive.name
    from zerojax import internals

    return internals.replaced_primitives().get(type(eqn.params["_prim"])) or eqn.primitive.name


def params_of(eqn) -> dict:
    """Return the parameters of `eqn`. For `HiPrim`, name the parameters as in the primitive that `HiPrim` replaces."""
    if "_prim" not in eqn.params:
        return eqn.params
    prim = eqn.params["_prim"]
    params = {name: getattr(value, "jaxpr", value) for name, value in prim.params.items()} | {"_prim": type(prim)}
    if "traced" in params:  # The first operands are values that the function or its derivative closes over.
        bound = prim.in_avals[: 2 if name_of(eqn) == "custom_vjp_call" else 1]
        params |= {"call_jaxpr": params.pop("traced"), "num_consts": len(jax.tree.leaves(bound))}
    return params


def called(eqn):
    """Return the closed jaxpr that `eqn` calls, for example through `jax.jit`. Return None if `eqn` is not a call."""
    if primitives.named(eqn.primitive.name).kind is not Kind.CALL:
        return None
    return eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))


def inner_jaxprs(eqn) -> list:
    return [opened(inner)[0] for inner in core.jaxprs_in_params(params_of(eqn))]


def is_remat(eqn) -> bool:
    return primitives.named(name_of(eqn)).kind is Kind.REMAT


def inlined_body(eqn):
    """Return the open jaxpr inside `eqn` if `eqn` is a call or a `jax.checkpoint`, or None."""
    body = params_of(eqn)["jaxpr"] if is_remat(eqn) else called(eqn)
    return None if body is None else opened(body)[0]


def evaluated(eqn):
    """Return the jaxpr that a call, a `jax.checkpoint` or a function with a custom derivative evaluates, else None."""
    if name_of(eqn).startswith("custom_"):
        bodies = (params_of(eqn).get(name) for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"))
        return next((body for body in bodies if is_jaxpr(body)), None)
    return params_of(eqn)["jaxpr"] if is_remat(eqn) else called(eqn)


def evaluated_body(eqn):
    return opened(evaluated(eqn))[0]


def loop_of(eqn) -> LoopEqn | None:
    if eqn.primitive.name != "scan":
        return None
    params = eqn.params
    if "num_consts" in params:
        consts, carry = params["num_consts"], params["num_carry"]
    else:
        in_consts, in_carry, _ = params["ft_in"].unpack()
        consts, carry = len(in_consts), len(in_carry)
    return LoopEqn(params["jaxpr"], consts, carry, params["length"], params["reverse"], params["unroll"])


def part_of(jaxpr, eqns: Sequence, invars: Sequence, outvars: Sequence):
    """Make a jaxpr from some equations of `jaxpr`, without constants, with the given arguments and results."""
    info = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    return jaxpr.replace(constvars=[], invars=list(invars), eqns=list(eqns), outvars=list(outvars), debug_info=info)


def eval_shape(fn: Callable, *args: Any) -> Any:
    """Return `jax.eval_shape(fn, *args)`, but do not leave a cache entry that lives as long as `fn`."""
    return jax.eval_shape(lambda *args: fn(*args), *args)


def evaluate_one(eqn, values: Sequence) -> list:
    """Evaluate one equation on `values`, which may have other shapes than in its trace. A dropped result is None.

    `jax.core.eval_jaxpr` does the same, but under `jax_enable_checks` it refuses shapes that differ from the trace. The
    caller must enter the equation's context (`names.contexts`), as `jaxprs.evaluate` does.
    """
    operands = [atom.val if is_literal(atom) else x for atom, x in zip(eqn.invars, values, strict=True)]
    params = eqn.primitive.get_bind_params(eqn.params)
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*operands, **params)
    results = results if eqn.primitive.multiple_results else [results]
    return [None if is_dropped(var) else x for var, x in zip(eqn.outvars, results, strict=True)]


def is_tracing() -> bool:
    from jax._src.core import trace_state_clean

    return not trace_state_clean()


def in_host_memory(aval) -> bool:
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def add_cotangents(a: Any, b: Any) -> Any:
    """Add two cotangents as JAX does. An extended type defines its own sum: Flax's type for FP8 takes the maximum."""
    return ad.add_jaxvals(a, b) if jax.dtypes.issubdtype(a.dtype, jax.dtypes.extended) else a + b


def zero_cotangent(shape: Sequence[int], dtype: Any) -> Any:
    """Make a cotangent of zeros. For an extended type, the type itself defines the zero."""
    return ad.zeros_like_aval(jax.core.ShapedArray(tuple(shape), dtype))
