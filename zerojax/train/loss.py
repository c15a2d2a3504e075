"""A loss function, as the user gave it (`Loss`), and as a step calls it, in one of two views (`View`).

In global view, the loss sees the whole batch, as under `jax.jit`, and the compiler divides the rows. In device view,
each device differentiates the loss of its own rows inside of a `shard_map`, as under `pmap` and DDP. The views use
different collectives.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from zerojax.comm.collectives import Collectives
from zerojax.comm.mesh import without_types
from zerojax.compat import common_dtype
from zerojax.config import Config, check_word
from zerojax.layout.leaf import Leaf, replace_items, without_padding
from zerojax.layout.tree import Layout
from zerojax.placement.storage import cast
from zerojax.train.arguments import call_unpacked, cast_inputs

if TYPE_CHECKING:
    from zerojax.config.precision import Precision

# Indices among the arguments of a loss after the parameters, which are (mutable state, batch, *args).
OF_ROWS = (1,)  # only the batch has rows
DIFFERING = (0, 1)  # in device view, these may differ between devices; the state is averaged at the end of a step


class Returned(NamedTuple):
    """The values that one call of a loss function returned."""

    total: Float[Array, ""]  # the loss, or the total of a weighted loss, in float32 or wider
    weight: Float[Array, ""]  # the weight of a weighted loss; otherwise 1
    aux: PyTree  # the auxiliary results; None without `has_aux`
    mutable: PyTree  # the new mutable state; None without `mutable`


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss function, and flags for its arguments and return values."""

    fn: Callable  # `fn(params, batch, *args)`; in device view, `batch` has only the rows of the device
    has_aux: bool = False  # whether `fn` returns `(loss, aux)`
    weighted: bool = False  # whether the loss is `(total, weight)`; the mean is then sum of totals / sum of weights
    mutable: bool = False  # whether `fn` is `fn(params, mutable, batch, *args)`, and returns `(loss, mutable[, aux])`
    # whether the losses of microbatches and, in device view, of devices are averaged ("mean", or None) or added up
    # ("sum"); None also refuses to average losses that are sums over rows
    reduction: Literal["mean", "sum"] | None = None
    # the kernels that every device ran on all rows when the loss was last traced, in words
    undivided: list[str] = dataclasses.field(default_factory=list, init=False, compare=False, repr=False)

    def returned(self, loss: Any, mutable: PyTree, aux: PyTree) -> Any:
        """Combine a loss, a mutable state and aux in the form in which `fn` returns them: one value, or a tuple."""
        parts = (loss, *((mutable,) if self.mutable else ()), *((aux,) if self.has_aux else ()))
        return parts if len(parts) > 1 else loss

    def __post_init__(self):
        check_word("reduction", self.reduction, (None, "mean", "sum"))
        if self.weighted and self.reduction is not None:
            raise ValueError(
                f"reduction={self.reduction!r} says how losses are combined, and with weighted=True they are the sum "
                f"of totals over the sum of weights. Give one of them."
            )

    @property
    def form(self) -> str:
        """Describe the values that `fn` must return, for an error message."""
        parts = self.returned("(total, weight)" if self.weighted else "loss", "mutable", "aux")
        return parts if isinstance(parts, str) else f"({', '.join(parts)})"

    def call(self, params: PyTree, mutable: PyTree, batch: PyTree, args: tuple) -> Returned:
        """Call `fn` on logical parameters, and check what it returns. `args` may come from `arguments.packed`."""
        given = (mutable,) if self.mutable else ()
        try:
            value = call_unpacked(self.fn, (params, *given), batch, args)
        except TypeError as error:
            from zerojax.train.checked import check_called

            check_called(params, error)
            raise
        aux = new = None
        if self.has_aux or self.mutable:
            if not (isinstance(value, tuple) and len(value) == len(self.returned(None, None, None))):
                options = [name for name in ("mutable", "has_aux") if getattr(self, name)]
                raise TypeError(
                    f"With {' and '.join(f'{name}=True' for name in options)} the loss function returns {self.form}, "
                    f"not {type(value).__name__}{f' of {len(value)}' if isinstance(value, tuple) else ''}."
                )
            value, *rest = value
            aux = rest.pop() if self.has_aux else None
            new = rest.pop() if self.mutable else None
        if self.mutable:
            from zerojax.train.checked import check_mutable

            check_mutable(new, mutable)
        if self.weighted:
            if not (isinstance(value, tuple) and len(value) == 2):
                raise TypeError(f"With weighted=True the loss function returns {self.form}, and its loss is {value!r}.")
            total, weight = scalar("total", value[0]), scalar("weight", value[1])
        else:
            total, weight = scalar("loss", value), jnp.ones((), jnp.float32)
        return Returned(at_least_float32(total), at_least_float32(weight), aux, new)


def scalar(name: str, value: Any) -> Array:
    """Convert a value that the loss function returned to an array. Raise an error if it is not a real scalar."""
    if isinstance(value, tuple | list | dict):
        raise TypeError(
            f"The loss function must return a scalar {name}, not a {type(value).__name__}. "
            f"For (loss, aux) pass has_aux=True; for (total, weight) pass weighted=True."
        )
    if value is None:
        raise TypeError(f"The loss function must return a scalar {name}, but it returns None: is its `return` missing?")
    value = jnp.asarray(value)
    if value.shape != ():
        raise ValueError(
            f"The loss function must return a scalar {name}, but it has shape {list(value.shape)}. "
            f"Take jnp.mean(...) over the rows, or return (total, weight) with weighted=True."
        )
    if name != "weight" and not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(
            f"The loss function must return a floating point {name}, but it is {value.dtype}, which has no gradient. "
            f"Compute it with floating point numbers."
        )
    return value


def at_least_float32(value: Array) -> Array:
    """Cast a value to float32, unless its type is wider, because sums over devices need this precision."""
    return value.astype(common_dtype(value.dtype, jnp.float32))


class LossInputs(NamedTuple):
    """The arguments of a loss, with the parameters in storage."""

    stored: Sequence[Array]  # one array per parameter, in storage shape
    mutable: PyTree  # the mutable state, or None
    batch: PyTree  # all rows in global view, or this device's rows in device view
    args: tuple  # further arguments


@dataclasses.dataclass(frozen=True)
class View:
    """The loss of a step in one view, with the collectives that reduce its gradients.

    Parameters and gradients have storage shape in global view, and local shape in device view.
    """

    config: Config
    layout: Layout  # of the parameters
    grads: Sequence[Leaf]  # the layout in which the gradient of each trained parameter is returned
    loss: Loss | Any  # the loss function, or another object with the same `call` method
    accumulate: int  # number of microbatches per device

    @property
    def microbatches(self) -> int:
        return self.comm.losses * self.accumulate

    @property
    def divisor(self) -> int:
        """Return the number by which the sum of the losses of a step is divided."""
        return 1 if self.loss.reduction == "sum" else self.microbatches

    @property
    def reduces_each(self) -> bool:
        """Return whether the gradients of each microbatch are reduced. Otherwise they are reduced once per step."""
        return self.config.stage >= 2 or self.accumulate == 1

    @property
    def gathers_on_use(self) -> bool:
        """Return whether parameters are gathered, and their gradients reduced, where the loss uses them."""
        is_away = self.config.params_on_disk or self.config.layout_policy.params_on_host
        return any(leaf.kind == "sharded" and (leaf.shards > 1 or is_away) for leaf in self.layout.params)

    @functools.cached_property
    def comm(self) -> Collectives:
        return self._comm(self.config.bucket_bytes, self.config.shared_bytes)

    @property
    def reduces_across_once(self) -> bool:
        """Return whether hybrid sharding reduces gradients across hosts only once, at the end of a step."""
        return self.accumulate > 1 and self.reduces_each and bool(self.config.data.across)

    def _comm(self, bucket_bytes: int, shared_bytes: int = 0) -> Collectives:
        precision = self.config.precision
        reduce = None if precision is None else precision.reduce
        options = self.config.data.batch, bucket_bytes, reduce, self.config.wire, self.reduces_across_once, shared_bytes
        if self.config.view == "global":
            return Collectives(*options, mesh=self.config.mesh)
        from zerojax.comm.device_collectives import DeviceCollectives

        return DeviceCollectives(*options)

    def microbatches_of(self, rows: Array) -> Array:
        """Divide the rows of the batch into microbatches, along a new dim 0. A microbatch has rows of every device."""
        devices = self.config.data.workers // self.comm.losses
        each = rows.shape[0] // (devices * self.accumulate)  # `reshape` with -1 fails if another dim is empty
        divided = rows.reshape(devices, self.accumulate, each, *rows.shape[1:])
        return jnp.moveaxis(divided, 1, 0).reshape(self.accumulate, devices * each, *rows.shape[1:])

    def rows_of(self, microbatches: Array) -> Array:
        """Undo `microbatches_of`, by merging dims 0 and 1 into rows in the order of the batch."""
        devices = self.config.data.workers // self.comm.losses
        each = microbatches.shape[1] // devices
        divided = microbatches.reshape(self.accumulate, devices, each, *microbatches.shape[2:])
        return jnp.moveaxis(divided, 0, 1).reshape(self.accumulate * devices * each, *microbatches.shape[2:])

    @property
    def is_one_loss(self) -> bool:
        return self.config.view == "global" and self.accumulate == 1

    def call(self, params: PyTree, mutable: PyTree, batch: PyTree, *args: Any) -> Any:
        """Cast logical parameters and the batch, and call the loss."""
        config, args = self.config, without_padding(args)
        if config.precision is not None:
            leaves = cast(jax.tree.leaves(params), self.layout.compute)
            params = jax.tree.unflatten(self.layout.treedef, leaves)
            batch = cast_inputs(config.precision, batch)
        if config.user_mesh.explicit_axes:
            from zerojax.comm.typed import TypedLoss

            found = TypedLoss(config, self.layout, self.loss).call(params, mutable, batch, args)
            if not isinstance(found, Returned):
                return found
            aux = found.aux if config.view == "global" else without_types(found.aux)
            return without_types(found)._replace(aux=aux)
        return self.loss.call(params, mutable, batch, without_types(args))

    @property
    def checked_call(self) -> Callable:
        """Return `call` with the checks of a loss that is called once per device or microbatch."""
        if self.is_one_loss:
            return self.call
        from zerojax.train.checked import checked_loss

        return checked_loss(self.call, manual=self.config.data.batch if self.config.view == "device" else ())

    def reduce(self, grads: Sequence[Array]) -> list[Shaped[Array, "*local"]]:
        """Reduce-scatter the gradients. Gradients of parameters that are gathered on use are reduced already."""
        params = [self.layout.params[i] for i in self.layout.trained]
        pending = [k for k, leaf in enumerate(params) if leaf.dim is None or not self.gathers_on_use]
        only_flat_buckets, parts = self._comm(bucket_bytes=0), [self.grads[k] for k in pending]
        sums = only_flat_buckets.reduce_scatter([grads[k] for k in pending], parts)
        if not self.reduces_across_once:
            sums = only_flat_buckets.reduce_across(sums, parts)
        return replace_items(grads, pending, sums)

    def scattered_leaf(self, k: int) -> Leaf:
        """Return the layout of the gradient of trained parameter `k` before the reduction across hosts."""
        param = self.layout.params[self.layout.trained[k]]
        return self.grads[k] if param.dim is None else param


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["scale", "clean", "hysteresis_count", "skips", "nonfinite", "weights_invalid"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class ScalingState:
    """The loss scale, and the record of skipped steps."""

    scale: Float[Array, ""]  # the factor by which the next step multiplies its loss; 1 without loss scaling
    clean: Int[Array, ""]  # number of steps without overflow since the last overflow or growth of the scale
    hysteresis_count: Int[Array, ""]  # number of overflows, since the scale last grew, that did not lower the scale
    # number of steps in a row that were skipped, up to and including the last step
    skips: Int[Array, ""]
    # for each trained parameter, whether its gradient was not finite in the first of the skipped steps
    nonfinite: Bool[Array, " trained"]
    weights_invalid: Bool[Array, ""]  # whether a step was skipped because weights were negative or summed to zero


def init_scaling(precision: "Precision | None", trained: int) -> ScalingState:
    """Return the `ScalingState` for step 0. `trained` is the number of trained parameters."""
    scale = None if precision is None else precision.loss_scale
    first = 1.0 if scale is None else getattr(scale, "initial", scale)  # a `DynamicScale`, or a number
    zero = jnp.zeros((), jnp.int32)
    return ScalingState(jnp.float32(first), zero, zero, zero, jnp.zeros(trained, bool), jnp.zeros((), bool))
