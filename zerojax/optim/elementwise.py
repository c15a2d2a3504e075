"""Find the leaves that an optax transformation updates element by element.

Such a leaf may be flattened, padded and divided without changing any number. Transformations are not recognised by
name. `tx.update` is traced twice, with the leaf in its logical shape and with the leaf flattened and padded, and the
two programs are compared. The leaf qualifies if, by the same program in both traces, each element of its update and
state is computed from scalars and from the same element of the leaf's arrays. State that depends on the leaf but does
not have its shape must be a scalar that both traces compute by the same program.

A sum over a full leaf (as in `clip_by_global_norm`) counts as such a scalar if padding adds zero to the sum. This
holds if the summed value is zero wherever the gradient and the parameter are zero.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.core
import optax

from zerojax import compat, jaxprs
from zerojax.layout.encoding import BY_BLOCK
from zerojax.layout.tree import Layout
from zerojax.optim.wrapped import TransformationError, guarded
from zerojax.primitives import Kind

SHAPE_ONLY = frozenset(("shape", "broadcast_dimensions", "sharding", "out_sharding", "axes"))
SCALAR, LEAF, MIXED = "scalar", "leaf", "mixed"


@dataclasses.dataclass(frozen=True)
class Known:
    """Properties of one value of a traced program.

    The kind is `SCALAR` if all elements are equal, whatever the shapes of the leaves. It is `LEAF` if element i depends
    only on scalars and on element i of one leaf's arrays. Otherwise it is `MIXED`.
    """

    kind: str
    token: int = 0  # a hash of the program that computes the value; equal programs have equal tokens
    leaf: int | None = None  # the index of the leaf of a `LEAF`
    zero: bool = False  # whether the value is zero wherever gradients and parameters are zero
    reads: frozenset[int] = frozenset()  # the indices of all leaves that the value depends on


def elementwise_leaves(
    tx: optax.GradientTransformation, trained: Layout, state: Any, param_of: tuple[int | None, ...]
) -> frozenset[int]:
    """Return the indices of the flat gradients that `tx` updates element by element. Empty if `tx` refuses flat leaves.

    `state` has the shapes of the first state. `param_of` has, for each leaf of the state, the index of the parameter
    that the leaf mirrors, or None.
    """
    small = frozenset(i for i, leaf in enumerate(trained.grads) if leaf.kind == "flat")
    vectors = frozenset(i for i in small if len(trained.grads[i].shape) < 2)
    for wanted in filter(None, (small, vectors)):  # a transformation may refuse matrices that are flat, but not vectors
        changed = {i: trained.grads[i].storage_shape for i in wanted}
        try:
            logical, flat = (read_update(tx, trained, state, param_of, shapes) for shapes in ({}, changed))
        except TransformationError:  # tx needs arguments that are not given here, or refuses flat leaves
            continue
        return wanted - refused_leaves(logical, flat)
    return frozenset()


def refused_leaves(logical: list[tuple[int | None, Known]], flat: list[tuple[int | None, Known]]) -> set[int]:
    """Return the leaves whose update is not the same elementwise program in both traces of `read_update`.

    State that mirrors no leaf must be a scalar that both traces compute by the same program. If not, all leaves that
    the state depends on are returned.
    """
    refused: set[int] = set()
    for (param, a), (_, b) in zip(logical, flat, strict=True):
        same = a.kind == b.kind and a.token == b.token
        if not (same and a.kind == LEAF and a.leaf == b.leaf == param) and not (same and a.kind == SCALAR):
            refused |= a.reads | b.reads if param is None else {param}
    return refused


def read_update(tx, trained: Layout, state, param_of, changed: Mapping[int, tuple]) -> list[tuple[int | None, Known]]:
    """Trace `tx.update` with `changed` shapes. For each output, return its parameter's index or None, and a `Known`."""
    parts, (leaves, tree) = trained.grads, jax.tree.flatten(state)
    seen = [jax.ShapeDtypeStruct(changed.get(i, part.shape), part.dtype) for i, part in enumerate(parts)]
    params = jax.tree.unflatten(trained.treedef, seen)
    # A state leaf can be elementwise only if it has the shape of its parameter.
    pairs = zip(leaves, param_of, strict=True)
    mirrored = [i if i is not None and x.shape == parts[i].shape else None for x, i in pairs]
    pairs = zip(leaves, mirrored, strict=True)
    given = [x if i is None else jax.ShapeDtypeStruct(seen[i].shape, x.dtype) for x, i in pairs]
    update = guarded(optax.with_extra_args_support(tx).update)
    jaxpr, consts = compat.opened(jax.make_jaxpr(update)(params, jax.tree.unflatten(tree, given), params))
    if len(jaxpr.outvars) != len(parts) + len(leaves):
        raise TransformationError("update returns another tree than the gradients' and the state's")
    of_leaf = lambda i, *name, zero: Known(LEAF, hash(name), i, zero, frozenset((i,)))
    inputs = [of_leaf(i, "gradient", i, zero=True) for i in range(len(parts))]
    for k, (x, i) in enumerate(zip(leaves, mirrored, strict=True)):
        alone = Known(MIXED if x.shape else SCALAR, hash(("state", k)))
        inputs.append(alone if i is None else of_leaf(i, "state", k, zero=False))
    inputs += [of_leaf(i, "parameter", i, zero=True) for i in range(len(parts))]
    return list(zip([*range(len(parts)), *mirrored], walk(jaxpr, consts, inputs), strict=True))


def walk(jaxpr, consts: Sequence, inputs: list[Known]) -> list[Known]:
    return jaxprs.evaluate(jaxpr, [of_closed_over(c) for c in consts], inputs, interpret, literal=of_constant)


def of_closed_over(value) -> Known:
    """Return the properties of a value that a transformation closes over, such as a hyperparameter.

    Under `jax.jit`, the value may be a tracer, so it is not known whether the value is zero. `init` and `update` must
    agree on which leaves are flat. So an array outside of `jit` does not count as zero either.
    """
    if isinstance(value, jax.core.Tracer):
        return Known(SCALAR, hash(("closed over", id(value)))) if value.shape == () else Known(MIXED)
    known = of_constant(value)
    return dataclasses.replace(known, zero=False) if isinstance(value, jax.Array) else known


def of_constant(value) -> Known:
    """Return the properties of a constant. An array is `MIXED`. Equal scalars have equal `Known.token`s."""
    if getattr(value, "shape", ()) != ():
        return Known(MIXED)
    number = value.item() if hasattr(value, "item") and jax.dtypes.issubdtype(value.dtype, jax.numpy.number) else value
    return Known(SCALAR, hash(("constant", str(number))), zero=number == 0)


def interpret(eqn, values: list[Known]) -> list[Known]:
    if (body := compat.evaluated(eqn)) is not None:
        return walk(*compat.opened(body), values)
    reads = frozenset().union(*(v.reads for v in values))
    known = choose(eqn, values) if eqn.primitive.name == "cond" else of_equation(eqn, values)
    return [dataclasses.replace(x, reads=reads) for x in known]


def of_equation(eqn, values: list[Known]) -> list[Known]:
    name = eqn.primitive.name
    mixed = [Known(MIXED)] * len(eqn.outvars)
    if any(v.kind == MIXED for v in values):
        return mixed
    if name == "bitcast_convert_type" and eqn.invars[0].aval.shape != eqn.outvars[0].aval.shape:
        return mixed  # a wider type becomes several elements
    token = hash((name, parameters(eqn), tuple(v.token for v in values)))
    leaves = {v.leaf for v in values if v.kind == LEAF}
    if name == "broadcast_in_dim":  # a broadcast scalar has the same value in every element
        return [values[0]] if not leaves else mixed
    if name == "reduce_sum" and len(leaves) == 1 and values[0].zero:
        full = tuple(eqn.params["axes"]) == tuple(range(eqn.invars[0].aval.ndim))
        return [Known(SCALAR, token)] if full else mixed
    if (is_by_element(eqn) or eqn.primitive.name in BY_BLOCK) and len(leaves) <= 1:
        kind, leaf = (LEAF, leaves.pop()) if leaves else (SCALAR, None)
        return [Known(kind, hash((token, i)), leaf, stays_zero(eqn, values)) for i in range(len(eqn.outvars))]
    if not leaves and all(v.aval.shape == () for v in (*eqn.invars, *eqn.outvars)):
        return [Known(SCALAR, hash((token, i))) for i in range(len(eqn.outvars))]
    return mixed


def stays_zero(eqn, values: list[Known]) -> bool:
    """Return whether the result of the elementwise `eqn` is zero wherever gradients and parameters are zero."""
    name = eqn.primitive.name
    if name == "mul":
        # Zero times a scalar is zero. Zero times state is not safe, because the state's padding might be infinite.
        return any(v.zero for v in values) and all(v.zero or v.kind == SCALAR for v in values)
    if name == "div":
        return values[0].zero and not values[1].zero and values[1].kind == SCALAR
    if name == "integer_pow" and eqn.params["y"] < 1:
        return False
    if name == "select_n":
        return all(v.zero for v in values[1:])
    return jaxprs.facts(eqn).zero_at_zero and all(v.zero for v in values)


def is_by_element(eqn) -> bool:
    """Return whether an equation computes element by element. Callers must check that a bitcast keeps the shape."""
    return jaxprs.facts(eqn).elementwise or eqn.primitive.name in ("optimization_barrier", "bitcast_convert_type")


def has_products(eqn) -> bool:
    return any(jaxprs.facts(e).kind in (Kind.PRODUCT, Kind.DECOMPOSITION) for e in jaxprs.with_inner(eqn))


def choose(eqn, values: list[Known]) -> list[Known]:
    """Return properties of a `cond`'s results: `MIXED` if the index is not `SCALAR`, or if several leaves are read."""
    index, *operands = values
    branches = [walk(*compat.opened(branch), operands) for branch in eqn.params["branches"]]
    joined = []
    for outcomes in zip(*branches, strict=True):
        kinds, leaves = {o.kind for o in outcomes}, {o.leaf for o in outcomes if o.kind == LEAF}
        token = hash(("cond", index.token, tuple(o.token for o in outcomes)))
        if index.kind != SCALAR or MIXED in kinds or len(leaves) > 1:
            joined.append(Known(MIXED))
        else:
            kind = LEAF if leaves else SCALAR
            joined.append(Known(kind, token, next(iter(leaves), None), all(o.zero for o in outcomes)))
    return joined


def parameters(eqn) -> str:
    return str(sorted((k, str(v)) for k, v in eqn.params.items() if k not in SHAPE_ONLY))
