"""Prepare the arguments of a loss: find, check, place and cast the batch, and pack all further arguments."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from zerojax import names
from zerojax.comm.mesh import batch_sharding, owned
from zerojax.config import Config
from zerojax.layout.tree import canonical

if TYPE_CHECKING:
    from zerojax.config.precision import Precision

# The default of a positional batch. It means that the caller passed the batch by keyword, or passed none.
NO_BATCH = inspect.Parameter.empty
_TRACED = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, int, float, complex)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Constant:
    """A hashable argument that is not traced: a pytree node without leaves, so that jit compiles once per value."""

    value: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["batch_too"])
@dataclasses.dataclass(frozen=True)
class Keywords:
    """The keyword arguments of a loss, by name. zerojax packs them into the last positional argument.

    If `batch_too` is true, the batch is a dict of keyword arguments, too.
    """

    values: dict[str, Any]
    batch_too: bool = False


def separated(args: tuple, keywords: Mapping[str, Any], *, mutable: bool = False) -> tuple[Any, Any, tuple]:
    """Find the batch among the arguments that follow the parameters of a loss.

    Without a positional batch, the batch is a dict of the keyword arguments that contain arrays with rows. All other
    keyword arguments, such as flags, numbers and keys, are further arguments. `NO_BATCH` in `args` is ignored. With
    `mutable`, `args` begins with a mutable state.

    Returns:
        `(mutable state or None, batch, further arguments)`. The further arguments are a result of `packed`.

    Raises:
        TypeError: If there is no batch.
    """
    args, leading = tuple(x for x in args if x is not NO_BATCH), 1 if mutable else 0
    if len(args) > leading:
        state, batch, *rest = args if mutable else (None, *args)
        return state, batch, packed(tuple(rest), keywords)
    rows = {name: x for name, x in keywords.items() if has_rows(x)}
    if not rows or len(args) < leading:
        raise TypeError(
            "The loss was called without a batch. Rows that it closes over are not divided over the devices: each "
            "device would compute all of them. Make the rows an argument of the loss, and pass them here: "
            "loss_fn(params, batch), or loss_fn(params, x=x, y=y)."
        )
    others = {name: x for name, x in keywords.items() if name not in rows}
    return (args[0] if mutable else None), rows, packed((), others, batch_too=True)


def has_rows(tree: Any) -> bool:
    """Return whether an argument may be a batch, because it contains an array with at least one dim."""
    return any(len(getattr(x, "shape", ())) > 0 for x in jax.tree.leaves(tree))


def packed(args: tuple, keywords: Mapping[str, Any] | None = None, *, batch_too: bool = False) -> tuple:
    """Pack arguments into one tuple of trees of arrays. A value that is not an array becomes a `Constant`.

    Python numbers count as arrays, as under `jax.jit`. Python bools become constants, because models branch on them.
    Raise a TypeError for a `jax.Ref`, and for a value that is neither an array nor hashable.
    """

    def one(path, x):
        if isinstance(x, jax.Ref):
            raise TypeError(
                f"{_name(path)} is a jax.Ref, which has no sharding over several devices. Pass its value, and return "
                "the new one: as aux, or with mutable=True of train_step as the mutable state."
            )
        if is_constant(x) or (isinstance(x, _TRACED) and not isinstance(x, bool)) or hasattr(x, "__jax_array__"):
            return x
        try:
            hash(x)
        except TypeError as error:
            raise TypeError(
                f"{_name(path)} is a {type(x).__name__}, which is no array, and cannot be hashed as a constant for "
                "which the program is compiled. Pass arrays or hashable values, or let the loss close over it."
            ) from error
        return Constant(x)

    given = (*args, Keywords(dict(keywords or {}), batch_too)) if keywords or batch_too else args
    return jax.tree_util.tree_map_with_path(one, given, is_leaf=is_constant)


def call_unpacked(fn: Callable, leading: tuple, batch: Any, args: tuple) -> Any:
    """Call `fn` with the positional and keyword arguments of the user's call. `args` may be a result of `packed`."""
    args = jax.tree.map(lambda x: x.value if is_constant(x) else x, args, is_leaf=is_constant)
    if not (args and isinstance(args[-1], Keywords)):
        return fn(*leading, batch, *args)
    *rest, keywords = args
    if keywords.batch_too:
        return fn(*leading, *rest, **batch, **keywords.values)
    return fn(*leading, batch, *rest, **keywords.values)


def is_constant(x: Any) -> bool:
    return isinstance(x, Constant)


def _name(path: tuple) -> str:
    return f"args{jax.tree_util.keystr(path)}"


def is_even(batch: PyTree, parts: int) -> bool:
    """Return whether all leaves are arrays with equally many rows, a multiple of `parts`.

    If False, the caller imports `checked`, and `check_batch` accepts or refuses the batch.
    """
    leaves = jax.tree.leaves(batch)
    others = [x for x in leaves if not isinstance(x, jax.Array | jax.ShapeDtypeStruct)]
    if not all(isinstance(x, np.ndarray) and x.dtype.kind in "biufc" for x in others):
        return False
    rows = {x.shape[:1] for x in leaves}
    return len(rows) == 1 and all(sizes and sizes[0] and sizes[0] % parts == 0 for sizes in rows)


def place_batch(config: Config, batch: PyTree, accumulate: int = 1) -> PyTree:
    """Check a batch, and divide it over the devices of the caller's mesh. Shapes are returned with shardings."""
    if not is_even(batch, config.data.workers * accumulate):
        from zerojax.train.checked import check_batch

        check_batch(batch, config.data, accumulate)
    return jax.tree.map(place_leaf, batch, batch_shardings(config, config.user_mesh, batch))


def batch_shardings(config: Config, mesh: Mesh, batch: PyTree) -> Any:
    """Return the sharding of each leaf of a batch. Raise a ValueError if `batch_spec` does not fit the batch."""
    if config.batch_spec is not None:
        return config.batch_spec.shardings(mesh, config.data, batch)
    sharding = batch_sharding(mesh, config.data)
    return jax.tree.map(lambda _: sharding, batch)


def place_leaf(x: Any, sharding: NamedSharding) -> Any:
    """Move one leaf of a batch to the devices of a sharding. A traced leaf is returned unchanged."""
    if isinstance(x, jax.core.Tracer):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, canonical(x.dtype), sharding=sharding)
    if getattr(x, "sharding", None) == sharding:
        return x
    try:
        return jax.device_put(owned(x), sharding)
    except AssertionError as error:  # JAX raises an AssertionError if the processes gave different values
        raise ValueError(
            f"Process {jax.process_index()} gave a batch of {list(jnp.shape(x))} whose values are not those of the "
            f"others. An array that is on no mesh is the whole batch, and must be the same on every process. If each "
            f'process has its own rows, place them with zerojax.data.shard_batches(batches, tx, rows="process") or '
            f"jax.make_array_from_process_local_data."
        ) from error


@jax.named_scope(names.SHARDS)
def cast_inputs(precision: "Precision | None", batch: PyTree) -> Any:
    """Cast the leaves of a batch to the types that the loss sees."""
    if precision is None:
        return batch

    def cast_leaf(x):
        dtype = jnp.result_type(x)
        is_cast = precision.cast_inputs and jnp.ndim(x) > 1 and jnp.issubdtype(dtype, jnp.floating)
        return jnp.asarray(x, precision.compute if is_cast else dtype)

    return jax.tree.map(cast_leaf, batch)
