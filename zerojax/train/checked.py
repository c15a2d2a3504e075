"""Check a batch, and what a loss does and returns. Give each call of a loss its own PRNG keys.

The losses of the parts of a batch must combine to the loss of the whole batch. So each call, for a device or a
microbatch, must draw different random numbers, and a loss must not divide rows over the devices itself.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Int, PyTree

from zerojax import compat, jaxprs
from zerojax.config import DataMesh
from zerojax.config.data_mesh import axes_of, in_words

NO_NUMBERS = "OSTUMm"  # `dtype.kind` of objects, strings, dates and time differences in NumPy
NUMBERS = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, bool, int, float, complex)


def check_batch(batch: PyTree, data: DataMesh, accumulate: int = 1) -> None:
    """Raise an error unless all leaves have equally many rows, a multiple of devices times microbatches."""
    check_leaf_types(batch)
    first: tuple[str, int] | None = None
    parts = data.workers * accumulate
    where = f"mesh {in_words(data.batch)}"
    among = f"the {'axis has' if len(data.batch) == 1 else 'axes have'} {data.workers} devices"
    if accumulate > 1:
        among += f" of {accumulate} microbatches each, which are {parts} parts"
    for path, x in jax.tree_util.tree_flatten_with_path(batch)[0]:
        name = f"batch{jax.tree_util.keystr(path)}"
        shape = jnp.shape(x)
        if not shape:
            raise ValueError(
                f"Cannot divide {name} over {where}: it is a scalar and has no dim 0. Pass values that belong to no "
                f"row as further arguments, after the batch, and lists of numbers as arrays."
            )
        first = first or (name, shape[0])
        if not shape[0]:
            raise ValueError(
                f"{name} has the shape {list(shape)}, of no rows, so the mean loss would be NaN. Drop this batch."
            )
        if shape[0] != first[1]:
            raise ValueError(
                f"{name} has {shape[0]} rows, and {first[0]} has {first[1]}: rows would be paired wrongly. Give all "
                f"leaves of a batch as many rows: repeat what belongs to a pair for both of its rows. Pass values that "
                f"belong to no row as further arguments, after the batch."
            )
        if shape[0] % parts:
            below, above = shape[0] // parts * parts, -(-shape[0] // parts) * parts
            fits = f"{below} or {above}" if below else f"{above}"
            raise ValueError(
                f"Cannot divide {name} over {where}: its dim 0 has {shape[0]} rows, and {among}. "
                f"Give a batch of {fits} rows, or drop the remainder in the data loader."
            )


def check_leaf_types(batch: PyTree) -> None:
    """Raise a TypeError for a leaf that JAX cannot use, such as a string, or a tensor of another library."""
    for path, x in jax.tree_util.tree_flatten_with_path(batch)[0]:
        name, dtype = f"batch{jax.tree_util.keystr(path)}", getattr(x, "dtype", None)
        if isinstance(x, str | bytes) or (isinstance(x, np.ndarray) and x.dtype.kind in NO_NUMBERS):
            raise TypeError(
                f"{name} has the type {dtype or type(x).__name__}, which JAX has no arrays of. Leave it out of the "
                f"batch, or pass numbers, such as tokens."
            )
        if not isinstance(x, NUMBERS) and not hasattr(x, "__jax_array__") and not isinstance(dtype, np.dtype):
            kind = f"{type(x).__module__.partition('.')[0]}.{type(x).__name__}"
            raise TypeError(
                f"{name} is a {kind}, which JAX takes for no array. Convert it with np.asarray(x), let "
                f"zerojax.data.shard_batches(loader, tx) convert it, or leave it out if the loss does not use it."
            )


def checked_loss(fn: Callable, manual: Sequence[str]) -> Callable:
    """Return a function that traces the loss `fn`, checks its jaxpr, and evaluates the jaxpr.

    A loss must not close over a PRNG key, create a key from a constant, or constrain an array over the `manual` mesh
    axes, which already divide its rows.
    """

    def call(*args):
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        jaxpr, consts = compat.opened(closed)
        check_code(jaxpr, frozenset(manual))
        results = jaxprs.run(jaxpr, jaxprs.as_jax_values(consts), *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return call


def check_code(jaxpr: Any, manual: frozenset[str]) -> None:
    """Raise a ValueError if the jaxpr of a loss contains code that `checked_loss` does not allow."""
    check_keys(jaxpr)
    for eqn in jaxpr.eqns:
        sharding = eqn.params.get("sharding") if eqn.primitive.name == "sharding_constraint" else None
        if isinstance(sharding, NamedSharding) and manual.intersection(axes_of(sharding.spec)):
            raise ValueError(
                f"The loss function divides rows over a mesh axis at {compat.line_of(eqn)}. In device view, each "
                f'device already has only its own rows. Pass view="global" to zero_shard: then the loss sees all rows.'
            )
    for eqn in jaxprs.alive(jaxpr):
        for inner in compat.inner_jaxprs(eqn):
            check_code(inner, manual)


def check_keys(jaxpr: Any) -> None:
    """Raise a ValueError for a PRNG key that comes from no argument, because all calls would draw the same numbers."""
    same = "a PRNG key: every device (in device view) and every microbatch would draw the same numbers. "
    for var in compat.constvars_of(jaxpr):
        if jax.dtypes.issubdtype(var.aval.dtype, jax.dtypes.prng_key) or is_untyped_key(var.aval):
            raise ValueError(
                f"The loss function closes over {var.aval.str_short()}, {same}"
                "Pass the key as a further argument of the loss."
            )
    of_arguments = jaxprs.dependent_on(jaxpr.invars, jaxpr.eqns)
    for eqn in jaxprs.alive(jaxpr):
        if eqn.primitive.name == "random_seed" and not of_arguments.intersection(jaxprs.variables_in(eqn.invars)):
            raise ValueError(
                f"The loss function makes a key of a constant at {compat.line_of(eqn)}, {same}"
                "Pass the key as a further argument of the loss. Draw equal numbers outside of the loss."
            )


def check_args(args: tuple) -> None:
    """Raise a TypeError for an untyped PRNG key, because `fold_keys` would treat it as data."""
    for path, x in jax.tree_util.tree_flatten_with_path(args)[0]:
        if is_untyped_key(x):
            raise TypeError(
                f"args{jax.tree_util.keystr(path)} is uint32[2], which looks like an untyped PRNG key: every device "
                f"would draw the same numbers. Pass jax.random.key(seed), or jax.random.wrap_key_data(key)."
            )


def is_untyped_key(x: Any) -> bool:
    """Return whether an array, or a shape, is uint32[2] and so looks like an untyped PRNG key."""
    return jnp.shape(x) == (2,) and jnp.result_type(x) == jnp.uint32


def fold_keys(args: PyTree, number: Int[Array, ""]) -> Any:
    """Fold typed PRNG keys with the index of a device or microbatch, so that each index draws different numbers."""

    def fold(x):
        if not (isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)):
            return x
        folded = lambda key: jax.random.fold_in(key, number)
        for _ in range(x.ndim):
            folded = jax.vmap(folded)
        return folded(x)

    return jax.tree.map(fold, args)


def check_mutable(new: PyTree, old: PyTree) -> None:
    """Raise a TypeError if the `new` mutable state differs from the `old` state in structure, shape or type."""
    found, structure = jax.tree_util.tree_flatten_with_path(new)
    if structure != jax.tree.structure(old):
        raise TypeError(
            f"The loss function returns a mutable state of the structure {structure}, but it was given a state of the "
            f"structure {jax.tree.structure(old)}. Return a state of the same structure."
        )
    for (path, x), before in zip(found, jax.tree.leaves(old), strict=True):
        if jnp.shape(x) != jnp.shape(before) or jnp.result_type(x) != jnp.result_type(before):
            raise TypeError(
                f"mutable{jax.tree_util.keystr(path)} comes back as {jnp.result_type(x)}{list(jnp.shape(x))}, and was "
                f"given as {jnp.result_type(before)}{list(jnp.shape(before))}. Return the same shape and type."
            )


def check_called(params: PyTree, error: TypeError) -> None:
    """Raise a better TypeError if `error` says that a loss calls its parameters as if they were a model."""
    kind = type(params).__name__
    if str(error) == f"{kind!r} object is not callable":
        raise TypeError(
            f"The loss calls its parameters, but a {kind} is not a model. Call the model on it: model.apply(params, x) "
            "or nnx.merge(graphdef, params)(x). For a module of NNX, use zerojax.flax_nnx.value_and_grad(tx, loss_fn)."
        ) from error
