"""Contain all code that depends on the version of JAX, or that uses the internals of JAX.

Tested with jax 0.10.2 and 0.12.0. Each function hides one difference, so a new version of JAX changes one file:

- Up to 0.11, a closed jaxpr is a `ClosedJaxpr` that holds a `Jaxpr`. From 0.12, both are one class.
- Up to 0.11, the parameters of `scan` have the numbers of constants and carries. From 0.12, they have trees.
- The primitives of `jax.jit` and `jax.checkpoint` have changed their names.
- Up to 0.11, `compute_on` returns a context manager. From 0.12, it takes the function to run.
- The functions of JAX and optax that sum over the leaves of a tree have moved to other modules.
"""

import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax.core

MAPPED = "zerojax_mapped"  # the name of the primitive that `comm.mapped` defines
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "eval_jaxpr", MAPPED})
_REMATS = frozenset({"checkpoint", "remat", "remat2"})
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


@dataclasses.dataclass(frozen=True)
class LoopEqn:
    """A scan equation, which is a loop with a known number of iterations.

    Attributes:
        body: The body's closed jaxpr: `(*consts, *carry, *x) -> (*carry, *y)`.
        consts: The number of operands that are constant over the iterations.
        carry: The number of operands that are carried from one iteration to the next.
        length: The number of iterations.
        reverse: Whether the iterations run from the last slice to the first.
        unroll: The number of iterations that are unrolled into one iteration of the compiled loop.
    """

    body: Any
    consts: int
    carry: int
    length: int
    reverse: bool
    unroll: int


@functools.cache
def _jex():
    """Import `jax.extend.core` only when a jaxpr is first read, because that module imports Pallas."""
    from jax.extend import core

    return core


def opened(closed) -> tuple[Any, Sequence]:
    """Split `closed` into `(jaxpr, consts)`. `consts` has the values of `constvars_of(jaxpr)`."""
    if isinstance(closed, _jex().ClosedJaxpr) and hasattr(closed, "jaxpr"):
        return closed.jaxpr, tuple(closed.consts)
    return closed, ()


def is_jaxpr(x) -> bool:
    """Return whether `x`, a parameter of an equation, is an open or a closed jaxpr."""
    return isinstance(x, _jex().Jaxpr | _jex().ClosedJaxpr)


def constvars_of(jaxpr) -> Sequence:
    """Return the variables of a jaxpr's constants."""
    return tuple(getattr(jaxpr, "constvars", ()))


def line_of(eqn) -> str:
    """Return the line of the user's source where an equation was traced, as "file.py:12", or "" if it is unknown."""
    from jax._src import source_info_util

    info = eqn.source_info
    for frame in source_info_util.user_frames(getattr(info, "traceback", info)):
        if is_users(frame.file_name):
            return f"{frame.file_name.rsplit('/', 1)[-1]}:{frame.start_line}"
    return ""


def at_line_of(eqn) -> Any:
    """Enter a context in which all equations that are traced get the source line of `eqn`."""
    from jax._src import source_info_util

    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack)


def is_users(file: str) -> bool:
    """Return whether a source file belongs to the user, and not to an installed package or to zerojax."""
    return "site-packages" not in file and not file.startswith(_PACKAGE)


def keeps_barriers(platform: str) -> bool:
    """Return whether XLA keeps optimization barriers. On CPU with jax 0.10, XLA drops them and merges equal gathers."""
    return platform != "cpu" or jax.__version_info__ >= (0, 11)


def is_literal(atom) -> bool:
    """Return whether `atom`, an operand of an equation, is a constant that is written into the jaxpr."""
    return isinstance(atom, _jex().Literal)


def is_dropped(var) -> bool:
    """Return whether `var`, a result of an equation, is a placeholder for a result that nothing reads."""
    return isinstance(var, _jex().DropVar)


def is_ref(atom) -> bool:
    """Return whether `atom`, an operand or a result of an equation, is a mutable array (`jax.Ref`)."""
    return hasattr(atom.aval, "inner_aval")


def is_high(atom) -> bool:
    """Return whether the type of `atom`, an operand or a result, is defined with `jax.experimental.hijax`."""
    return bool(getattr(atom.aval, "is_high", False))


def called(eqn):
    """Return the closed jaxpr that `eqn` calls, for example through `jax.jit`. Return None if `eqn` is not a call."""
    if eqn.primitive.name not in _CALLS:
        return None
    return eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))


def inner_jaxprs(eqn) -> list:
    """Return the jaxprs among the parameters of `eqn`, as open jaxprs."""
    return [opened(inner)[0] for inner in _jex().jaxprs_in_params(eqn.params)]


def is_remat(eqn) -> bool:
    """Return whether the equation is a `jax.checkpoint`."""
    return eqn.primitive.name in _REMATS


def inlined_body(eqn):
    """Return the open jaxpr inside `eqn` if `eqn` is a call or a `jax.checkpoint`, or None."""
    body = eqn.params["jaxpr"] if is_remat(eqn) else called(eqn)
    return None if body is None else opened(body)[0]


def evaluated_body(eqn):
    """Return `inlined_body(eqn)`, or the jaxpr of the function if `eqn` calls a function with a custom derivative."""
    if not eqn.primitive.name.startswith("custom_"):
        return inlined_body(eqn)
    bodies = (eqn.params.get(name) for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"))
    return next((opened(body)[0] for body in bodies if is_jaxpr(body)), None)


def loop_of(eqn) -> LoopEqn | None:
    """Return an equation as a `LoopEqn`, or None if it is not a loop with a known number of iterations."""
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
    """Return a jaxpr without constants that has some equations of `jaxpr`, and the given arguments and results."""
    info = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    return jaxpr.replace(constvars=[], invars=list(invars), eqns=list(eqns), outvars=list(outvars), debug_info=info)


def in_force(eqn):
    """Return `eqn` as if it had been traced on the current mesh. The rest of its context is unchanged."""
    mesh = jax.sharding.get_abstract_mesh()
    with eqn.ctx.manager, jax.sharding.use_abstract_mesh(mesh):
        return eqn.replace(ctx=type(eqn.ctx)())


def eval_shape(fn: Callable, *args: Any) -> Any:
    """Return `jax.eval_shape(fn, *args)`, without a cache entry that would exist as long as `fn` exists."""
    return jax.eval_shape(lambda *args: fn(*args), *args)


def mesh_of_calls() -> Any:
    """Return the mesh that a call of `jax.jit` would record if it were traced here, or None."""
    (call,) = opened(jax.make_jaxpr(jax.jit(lambda: 0.0))())[0].eqns
    return call.params.get("ctx_mesh")


def like(closed, other):
    """Return `closed` as a closed or an open jaxpr, whichever `other` is. It replaces `other` in an equation."""
    if isinstance(other, _jex().ClosedJaxpr):
        return closed
    jaxpr, consts = opened(closed)
    assert not consts
    return jaxpr


def evaluate_one(eqn, values: Sequence) -> list:
    """Evaluate one equation on `values`. A dropped result is None.

    This calls the public `jax.core.eval_jaxpr`, which binds any primitive correctly (custom derivatives, effects, the
    name stack). The way to call `bind` itself differs between jax 0.10 and 0.12.
    """
    operands = {var: value for var, value in zip(eqn.invars, values, strict=True) if not is_literal(var)}
    read = [var for var in eqn.outvars if not is_dropped(var)]
    one = part_of(_empty_jaxpr(), [eqn], list(operands), read)
    results = iter(jax.core.eval_jaxpr(one, (), *operands.values()))
    return [None if is_dropped(var) else next(results) for var in eqn.outvars]


@functools.cache
def _empty_jaxpr():
    return opened(jax.make_jaxpr(lambda: ())())[0]


def in_host_memory(aval) -> bool:
    """Return whether arrays of the type `aval` are in pinned host memory."""
    from jax._src.core import MemorySpace

    return getattr(aval, "memory_space", None) == MemorySpace.Host


def add_cotangents(a: Any, b: Any) -> Any:
    """Add two cotangents as JAX does. An extended type defines its own sum: Flax's type for FP8 takes the maximum."""
    from jax._src.ad_util import add_jaxvals

    return add_jaxvals(a, b) if jax.dtypes.issubdtype(a.dtype, jax.dtypes.extended) else a + b


def zero_cotangent(shape: Sequence[int], dtype: Any) -> Any:
    """Make a cotangent of zeros. For an extended type, the type itself defines the zero."""
    from jax._src.ad_util import zeros_like_aval

    return zeros_like_aval(jax.core.ShapedArray(tuple(shape), dtype))


def host_buffer(shape: Sequence[int], dtype) -> Any:
    """Return an uninitialised array in host memory. Call this function while tracing.

    `jax.lax.scan` makes the same array for results in host memory. The public API can only copy an array from the
    device to the host, so the array would exist on the device first.
    """
    from jax._src.core import MemorySpace
    from jax._src.lax import lax

    return lax.broadcast(lax.empty2(dtype, memory_space=MemorySpace.Host), tuple(shape))


def on_host(fn: Callable) -> Callable:
    """Return a function that runs on the host's processor, on arrays in host memory. Call the function under jit."""
    from jax.experimental.compute_on import compute_on

    if "out_memory_spaces" in inspect.signature(compute_on).parameters:
        newer: Any = compute_on
        return newer(fn, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)
    return compute_on("device_host")(jax.jit(fn))


def makes_refs(effects: Any) -> bool:
    """Return whether a function with these `effects` makes a `jax.Ref`, which JAX must remove before the evaluation."""
    from jax._src.core import internal_mutable_array_effect

    return internal_mutable_array_effect in effects


def is_check(effect: Any) -> bool:
    """Return whether `effect` comes from a call of `checkify.check`."""
    from jax._src.checkify import ErrorEffect

    return isinstance(effect, ErrorEffect)


def flags_of(error: Any) -> list:
    """Return one flag per kind of error in a `checkify.Error`. The flag says whether this error has happened."""
    (flags, _, _), _ = error.tree_flatten()
    return list(flags.values())


def is_tracing() -> bool:
    """Return whether JAX is tracing a function now, for example under `jax.jit`."""
    from jax._src.core import trace_state_clean

    return not trace_state_clean()


def coordination_client() -> Any:
    """Return the client of JAX's coordination service, through which processes communicate without devices."""
    from jax._src import distributed

    return distributed.global_state.client


# Functions that sum an expression over the leaves of a tree, by module. Zeros in a leaf do not change the sum.
SUMS_OVER_TREES = {
    "optax.tree_utils._tree_math": ("tree_sum", "tree_vdot"),
    "jax._src.scipy.sparse.linalg": ("_vdot_real_tree", "_vdot_tree"),
}


def is_sum_over_tree() -> bool:
    """Return whether a function of `SUMS_OVER_TREES` makes the calling pytree node, which then holds a term of the sum.

    A `Padded` node calls this function when it is made, because it sees only the result of a mapped function, and not
    the function. If the node raised an error here, optax could not compute a norm of padded leaves.
    """
    frame = sys._getframe(1)
    between = ("zerojax.layout.padded", "jax._src.tree", "jax.tree")  # the frames of the node and of jax.tree.map
    while frame is not None and frame.f_globals.get("__name__", "").startswith(between):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name in SUMS_OVER_TREES.get(frame.f_globals.get("__name__", ""), ())
