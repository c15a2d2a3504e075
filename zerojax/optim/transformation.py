"""Call a wrapped transformation with the loss, guard its calls in an analysis, and check the state that it returns.

A `Description` describes a transformation in a checkpoint, so that a later run can tell whether it uses another one.
The states of two transformations, such as AdamW and LAMB, may have the same leaves. Their descriptions differ.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax import compat
from zerojax.layout.leaf import Leaf

if TYPE_CHECKING:
    from jaxtyping import PyTree

NOTE = (
    "The transformation that zero_shard wraps was called with gradients in the tree of its trained parameters. If it "
    "needs the gradients of a part of them, as optax.lookahead does, let it wrap zero_shard, in a loop of your own: "
    "optax.lookahead(zero_shard(tx, ...), ...)."
)
UNEXPECTED = "unexpected keyword argument 'value'"  # Python's message
PARAMS, LEAF = "params", "*"  # in the structure of a state


class TransformationError(Exception):
    """An analysis could not trace the wrapped transformation. `__cause__` is the transformation's error."""


def guarded(update: Callable) -> Callable:
    """Return a function that calls `update`, and raises a `TransformationError` if `update` raises any error.

    An analysis traces the transformation with fewer arguments, or in other shapes, than training does. If the
    transformation then raises an error, the analysis has no result, and the plan reports this. An error of the analysis
    itself is a bug, and must not silently replicate a leaf. So an analysis catches only a `TransformationError`.
    """

    def call(*args: Any, **keywords: Any) -> Any:
        try:
            return update(*args, **keywords)
        except Exception as error:
            raise TransformationError(f"{type(error).__name__}: {error}") from error

    return call


def with_extra_args(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return the transformation with an `update` that accepts the loss as `value=`.

    A training step gives every transformation the loss. optax drops the loss if a transformation takes no extra
    arguments. But a transformation that takes other extra arguments, such as `optax.contrib.sam`, raises a `TypeError`,
    alone or in a chain. The signature of `update` does not help, because a chain takes any argument. So after this
    error, the update is called again without the loss.
    """
    supported = optax.with_extra_args_support(tx)

    def noted(*args, **extra):
        try:
            return supported.update(*args, **extra)
        except (AttributeError, TypeError, ValueError) as error:
            error.add_note(NOTE)
            raise

    def update(updates, state, params=None, **extra):
        try:
            return noted(updates, state, params, **extra)
        except TypeError as error:
            if "value" not in extra or UNEXPECTED not in str(error):
                raise
        del extra["value"]
        return noted(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(supported.init, update)  # pyright: ignore[reportArgumentType]


def check_new_state(leaves: Sequence[Leaf], state: PyTree) -> None:
    """Raise a `ValueError` if `update` returned a state with other paths than the state that `init` made."""
    found = jax.tree_util.tree_leaves_with_path(state)
    if [jax.tree_util.keystr(path) for path, _ in found] != [leaf.path for leaf in leaves]:
        raise ValueError(
            f"The transformation changes the tree of its state: what update returns {tree_difference(found, leaves)}, "
            f"and init did not. How the state is sharded is planned from init: let it return a state of the same tree."
        )


def tree_difference(found: Sequence, required: Sequence[Leaf]) -> str:
    """Describe how the paths of a flattened tree differ from the required paths."""
    paths, wanted = [jax.tree_util.keystr(path) for path, _ in found], [leaf.path for leaf in required]
    if lacking := [path for path in wanted if path not in paths]:
        return f"lacks {lacking[0]}"
    surplus = [path for path in paths if path not in wanted]
    return f"has {surplus[0]} beyond that" if surplus else "has other nodes"


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


@dataclasses.dataclass(frozen=True, eq=False)
class Describe:
    """Describe the transformation `tx` of the trained parameters `params`, which have logical shapes.

    The description is made when a checkpoint first reads it, because tracing takes time.
    """

    tx: optax.GradientTransformation
    params: Any

    @functools.cached_property
    def description(self) -> Description:
        """Return the description. It does not depend on the stage, the mesh, or the float types of the parameters."""
        wide = lambda x: jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, wide(x)), self.params)
        tx = with_extra_args(self.tx)
        state = compat.eval_shape(tx.init, params)
        try:
            update = lambda grads, state, params, value: guarded(tx.update)(grads, state, params, value=value)
            traced = jax.make_jaxpr(update)(params, state, params, jax.ShapeDtypeStruct((), np.float32))
        except TransformationError:  # the update needs arguments that a step does not give
            found: list[tuple[str, tuple]] = []
        else:
            jaxpr, consts = compat.opened(traced)
            found = [(f"constant {in_words(x)}", ()) for x in consts] + list(operations_in(jaxpr))
        structure = structure_of(jax.tree.structure(state), jax.tree.structure(params))
        program = hashlib.sha256("\n".join(f"{name} {reads}" for name, reads in found).encode()).hexdigest()
        return Description(structure, tuple(sorted({name for name, _ in found})), program)


def structure_of(state: Any, params: Any) -> str:
    """Return a state's nested types as text, with `params` for a part that has the structure of the parameters."""
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
    """Yield each operation as text, and the numbers of the variables that it reads. Include inner jaxprs."""
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
    """Return a number as text, or the type, shape and digest of an array."""
    if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    if x.size == 1:
        return f"{x.item():.7g}" if x.dtype.kind in "fc" else str(x.item())
    return f"{x.dtype}{list(x.shape)} {hashlib.sha256(x.tobytes()).hexdigest()[:12]}"
