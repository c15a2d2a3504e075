"""Describe a transformation for a checkpoint.

The states of two transformations may have the same leaves, as for AdamW and LAMB. Their descriptions differ.
"""

from __future__ import annotations

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
from zerojax.optim.transformation import TransformationError, guarded, with_extra_args

PARAMS, LEAF = "params", "*"


@dataclasses.dataclass(frozen=True)
class Description:
    """The record of a transformation.

    Attributes:
        structure: The types in its state, such as `(ScaleByAdamState(*, params, params), EmptyState())`.
        operations: The distinct operations of its update, each with its constants, such as `mul 0.9`; sorted. Empty
            if it takes more arguments than a step gives.
        program: sha256 of all operations in order, and of the numbers of the values that each of them reads.
    """

    structure: str
    operations: tuple[str, ...]
    program: str


@dataclasses.dataclass(frozen=True, eq=False)
class Describe:
    """Describes a transformation of the trained parameters, which are given in logical shapes.

    The description is made when it is first asked for: tracing takes time, and only a checkpoint needs it.
    """

    tx: optax.GradientTransformation
    params: Any

    @functools.cached_property
    def description(self) -> Description:
        """Return the description, which does not depend on stage, mesh, devices or parameter types."""
        wide = lambda x: jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, wide(x)), self.params)
        tx = with_extra_args(self.tx)
        state = compat.eval_shape(tx.init, params)
        try:
            update = lambda grads, state, params, value: guarded(tx.update)(grads, state, params, value=value)
            traced = jax.make_jaxpr(update)(params, state, params, jax.ShapeDtypeStruct((), np.float32))
        except TransformationError:  # it needs more arguments
            found: list[tuple[str, tuple]] = []
        else:
            jaxpr, consts = compat.opened(traced)
            found = [(f"constant {in_words(x)}", ()) for x in consts] + list(operations_in(jaxpr))
        structure = structure_of(jax.tree.structure(state), jax.tree.structure(params))
        program = hashlib.sha256("\n".join(f"{name} {reads}" for name, reads in found).encode()).hexdigest()
        return Description(structure, tuple(sorted({name for name, _ in found})), program)


def structure_of(state: Any, params: Any) -> str:
    """Name the types of the nodes of a state's structure. A part with the parameters' structure is named `params`."""
    if state == params:
        return PARAMS
    if (data := state.node_data()) is None:
        return LEAF if state.num_leaves else "None"
    kind, keys = data
    children = [structure_of(child, params) for child in state.children()]
    if kind is dict:
        children = [f"{key!r}: {child}" for key, child in zip(keys, children, strict=True)]
    return f"{'' if kind is tuple else kind.__name__}({', '.join(children)})"


def operations_in(jaxpr: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield each operation with its constants, and the numbers of the variables that it reads; inner jaxprs too."""
    numbers: dict[Any, int] = {}
    for var in (*compat.constvars_of(jaxpr), *jaxpr.invars):
        numbers[var] = len(numbers)
    for eqn in jaxpr.eqns:
        literals = [in_words(atom.val) for atom in eqn.invars if compat.is_literal(atom)]
        literals += [f"{name}={x}" for name, x in sorted(eqn.params.items()) if name == "y" and isinstance(x, int)]
        reads = tuple(numbers[atom] for atom in eqn.invars if not compat.is_literal(atom))
        yield " ".join([eqn.primitive.name, *literals]), reads
        numbers.update((var, len(numbers) + i) for i, var in enumerate(eqn.outvars))
        for inner in compat.inner_jaxprs(eqn):
            yield from operations_in(inner)


def in_words(x: Any) -> str:
    """Return a constant as text: a number, or the shape and digest of an array."""
    if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    if x.size == 1:
        return f"{x.item():.7g}" if x.dtype.kind in "fc" else str(x.item())
    return f"{x.dtype}{list(x.shape)} {hashlib.sha256(x.tobytes()).hexdigest()[:12]}"
