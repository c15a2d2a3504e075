"""Describe a transformation in a checkpoint, so that a later run can tell whether it uses another one.

The states of two transformations, such as AdamW and LAMB, may have the same leaves. Their descriptions differ.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax import compat
from zerojax.layout.tree import Layout
from zerojax.optim.wrapped import TransformationError, guarded, with_extra_args
from zerojax.placement.storage import shapes

PARAMS, LEAF = "params", "*"  # how `Description.structure` writes a tree like the parameters, and any other leaf


@dataclasses.dataclass(frozen=True)
class Description:
    """The description of a transformation in a checkpoint.

    Attributes:
        structure: The nested types of its state, such as `(ScaleByAdamState(*, params, params), EmptyState())`.
        operations: The sorted distinct operations of its update, each with its constants, such as `mul 0.9`. Empty if
            the update needs arguments that a step does not give.
        program: The sha256 of all operations in order, each with the numbers of the variables that it reads.
    """

    structure: str
    operations: tuple[str, ...]
    program: str


@functools.lru_cache(maxsize=8)  # because tracing takes time
def description_of(tx: optax.GradientTransformation, trained: Layout) -> Description:
    """Describe `tx`. The result does not depend on the stage, the mesh, or the float types of the parameters."""
    wide = lambda x: jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
    leaves = [jax.ShapeDtypeStruct(x.shape, wide(x)) for x in shapes(trained.grads)]
    params, tx = jax.tree.unflatten(trained.treedef, leaves), with_extra_args(tx)
    state = compat.eval_shape(tx.init, params)
    try:
        update = lambda grads, state, params, value: guarded(tx.update)(grads, state, params, value=value)
        traced = jax.make_jaxpr(update)(params, state, params, jax.ShapeDtypeStruct((), np.float32))
    except TransformationError:  # the update needs arguments that a step does not give
        found: list[tuple[str, tuple]] = []
    else:
        jaxpr, consts = compat.opened(traced)
        found = [(f"constant {describe_constant(x)}", ()) for x in consts] + list(operations_in(jaxpr))
    structure = structure_of(jax.tree.structure(state), jax.tree.structure(params))
    program = hashlib.sha256("\n".join(f"{name} {reads}" for name, reads in found).encode()).hexdigest()
    return Description(structure, tuple(sorted({name for name, _ in found})), program)


def structure_of(state: Any, params: Any) -> str:
    """Return a state's nested types as text. A part with the structure of the parameters becomes `PARAMS`."""
    if state == params:
        return PARAMS
    if (data := state.node_data()) is None:
        return LEAF
    kind, keys = data
    children = [structure_of(child, params) for child in state.children()]
    if kind is dict:
        children = [f"{key!r}: {child}" for key, child in zip(keys, children, strict=True)]
    return f"{'' if kind is tuple else kind.__name__}({', '.join(children)})"


def operations_in(jaxpr: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield each operation as text, and the numbers of the variables that it reads. Include inner jaxprs."""
    numbers: dict[Any, int] = {}
    for var in (*compat.constvars_of(jaxpr), *jaxpr.invars):
        numbers[var] = len(numbers)
    for eqn in jaxpr.eqns:
        literals = [describe_constant(atom.val) for atom in eqn.invars if compat.is_literal(atom)]
        literals += [f"{name}={x}" for name, x in sorted(eqn.params.items()) if name == "y" and isinstance(x, int)]
        reads = tuple(numbers[atom] for atom in eqn.invars if not compat.is_literal(atom))
        yield " ".join([eqn.primitive.name, *literals]), reads
        numbers.update((var, len(numbers) + i) for i, var in enumerate(eqn.outvars))
        for inner in compat.inner_jaxprs(eqn):
            yield from operations_in(inner)


def describe_constant(x: Any) -> str:
    """Return a number as text, or the type, shape and digest of an array."""
    if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    if x.size == 1:
        return f"{x.item():.7g}" if x.dtype.kind in "fc" else str(x.item())
    return f"{x.dtype}{list(x.shape)} {hashlib.sha256(x.tobytes()).hexdigest()[:12]}"
