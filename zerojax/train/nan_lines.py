"""Name the line of the loss that makes the first NaN, if `jax_debug_nans` finds one in device view."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
from jax import lax

from zerojax.inspect.nonfinite import origins
from zerojax.layout.leaf import replace_items
from zerojax.placement.storage import in_logical_shape, to_device
from zerojax.train.checked import fold_keys
from zerojax.train.loss import LossInputs, View


@contextlib.contextmanager
def line_in_errors(view: View, given: LossInputs) -> Iterator[None]:
    """Add a note with the line of the loss that makes the first NaN to each FloatingPointError of `jax_debug_nans`.

    If a result has a NaN, JAX evaluates the function again, one operation at a time. But it does not test the
    operations inside of a `shard_map`, and the error only says that the NaN comes from a sharded computation.
    """
    try:
        yield
    except FloatingPointError as error:
        # Without a note if the loss cannot be evaluated here. For example, a kernel may have no rule for `vmap`.
        with contextlib.suppress(Exception), jax.debug_nans(False), jax.debug_infs(False):
            for origin in _origins(view, given):
                error.add_note(f"On the rows of one device, {origin}.")
        raise


def _origins(view: View, given: LossInputs) -> tuple:
    """Find the first NaN of the loss and its gradient, with `vmap` over the axes of devices instead of `shard_map`."""
    data, layout = view.config.data, view.layout
    stored = [in_logical_shape(to_device(x), leaf) for x, leaf in zip(given.stored, layout.params, strict=True)]
    trained = layout.trained

    def of_device(rows):
        args = fold_keys(given.args, lax.axis_index(data.batch))

        def total(values):
            params = jax.tree.unflatten(layout.treedef, replace_items(stored, trained, values))
            return view.call(params, given.mutable, rows, *args).total

        return jax.value_and_grad(total)([stored[i] for i in trained])

    of_all = of_device
    for axis in reversed(data.batch):
        of_all = jax.vmap(of_all, axis_name=axis)
    sizes = [view.config.mesh.shape[axis] for axis in data.batch]
    batch = jax.tree.map(lambda x: x.reshape(*sizes, x.shape[0] // data.workers, *x.shape[1:]), given.batch)
    return origins(lambda rows: of_all(rows), rows=batch)  # `vmap` maps keywords, too
