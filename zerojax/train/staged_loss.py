"""Divide a loss into stages, and run them forward and backward per microbatch. Run other functions forward only."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from zerojax.comm.mesh import wait_if_simulated
from zerojax.config import Config
from zerojax.gather.engine import trace_loss
from zerojax.gather.schedule import Options
from zerojax.jaxprs import split_arrays
from zerojax.layout.leaf import is_chunked, shapes_of_chunked
from zerojax.layout.tree import layout_of
from zerojax.optim.sharding_plan import ShardingPlan
from zerojax.placement.storage import leaves_of, storage_leaves
from zerojax.staged.chunk_gradients import ChunkGradients
from zerojax.staged.microbatch import Microbatch, Reader
from zerojax.staged.model_files import ModelFiles, files_of, on_disk
from zerojax.staged.program import StagedProgram
from zerojax.staged.sources import OnDisk
from zerojax.train.arguments import batch_shardings
from zerojax.train.checked import fold_keys
from zerojax.train.gradients import mean_loss
from zerojax.train.loss import OF_ROWS, LossInputs, Returned, View, at_least_float32
from zerojax.train.several_losses import check_reduction
from zerojax.train.step_program import StepProgram

if TYPE_CHECKING:
    from jaxtyping import Array, PyTree


class Traced(NamedTuple):
    """A loss, traced for arguments of certain shapes and types."""

    staged: StagedProgram  # the stages of the loss
    consts: list  # arrays that the loss closes over
    structure: Any  # the tree structure of the loss's result


class LossAndGrads(NamedTuple):
    """The results of differentiating a loss in all microbatches, except the gradients in files."""

    returned: list[Returned]  # the values that the loss returned in each microbatch, without the mutable state
    resident: list  # per trained parameter, the sum of its reduced gradients; None for a parameter on disk
    mutable: PyTree  # the mutable state that the last microbatch returned
    loss: Array  # the mean loss; for this and what follows see `mean_loss`
    weight: Array
    factor: Array
    weights_valid: Array


class StagedLoss:
    """The loss of a step, in stages, under one plan. It is traced when `traced` is called."""

    def __init__(self, program: StepProgram, plan: ShardingPlan):
        self.view = View(program.config, plan.layout, plan.grads, program.loss, program.options.accumulate)
        self._traced: dict[Any, Traced] = {}
        self.disk = on_disk(program.config, plan.layout)
        self._microbatch = jax.jit(self._inputs, static_argnums=3)
        self._begin = jax.jit(self._cotangent)
        self._end = jax.jit(self._mean)
        self._reduce = jax.jit(self._reduced)

    def traced(self, stored: dict[int, Array], inputs: tuple) -> Traced:
        """Return the stages of the loss for `inputs = (mutable, batch, args)`. Trace it once per `type_key`.

        `stored` has the parameters on the devices, by index.
        """
        arrays = jax.eval_shape(functools.partial(self._inputs, number=0), *inputs)
        key = type_key(arrays)
        if key not in self._traced:
            if self.view.accumulate > 1:
                check_reduction(self.view, LossInputs((), *inputs))
            self._traced[key] = trace_stages(self.view, self.disk, stored, arrays, self.view.layout.trained)
        return self._traced[key]

    def run(
        self,
        traced: Traced,
        files: ModelFiles,
        gradients: ChunkGradients,
        stored: dict[int, Array],
        inputs: tuple,
        scale: Any,
    ) -> LossAndGrads:
        """Differentiate the loss in every microbatch. `stored` and `inputs` are as for `traced`."""
        view, mesh, (mutable, batch, args) = self.view, self.view.config.mesh, inputs
        count, last = view.accumulate, view.accumulate - 1
        returned, shares, sums, end = [], [], None, None
        reader = Reader(files, traced.staged.reads * count)
        for m in range(count):
            arrays, _ = split_arrays(self._microbatch(mutable, batch, args, m))
            given = dict(stored)
            given |= dict(enumerate([*arrays, *traced.consts], len(view.layout.params)))
            one = Microbatch(traced.staged, reader, view.comm, mesh, gradients)
            found = jax.tree.unflatten(traced.structure, one.forward(given))
            mutable = found.mutable
            returned.append(found._replace(mutable=None))
            cotangent, share = self._begin(found.total, found.weight, scale)
            shares.append(share)
            if m == last:
                end = self._end([x.total for x in returned], [x.weight for x in returned], shares, scale)
            gradients.begin(first=m == 0, share=share if count > 1 else None, factor=end[2] if end else None)
            others = wait_if_simulated(mesh, one.backward(cotangent))
            gradients.end()
            sums = wait_if_simulated(mesh, self._reduce(others, share, sums))
        assert end is not None
        assert sums is not None
        return LossAndGrads(returned, sums, mutable, *end)

    def _inputs(self, mutable: PyTree, batch: PyTree, args: tuple, number: int) -> tuple:
        """Return the loss's arguments after the parameters for one microbatch. Traced under jit."""
        view = self.view
        batch = lax.with_sharding_constraint(batch, batch_shardings(view.config, view.config.mesh, batch))
        if view.accumulate > 1:
            batch = jax.tree.map(lambda x: view.microbatches_of(x)[number], batch)
            args = fold_keys(args, jnp.int32(number))
        return mutable, batch, *args

    def _cotangent(self, total: Array, weight: Array, scale: Array) -> tuple[Array, Array]:
        """Return the cotangent of a microbatch's loss, and the factor by which its gradients are multiplied."""
        view = self.view
        cotangent = jnp.asarray(scale).astype(total.dtype)
        if not view.loss.weighted:
            return cotangent, jnp.float32(1 / view.divisor)
        share = jnp.where(weight > 0, weight, 1).astype(cotangent.dtype)
        return cotangent / share, share

    def _mean(self, totals: list, weights: list, shares: list, scale: Array) -> tuple:
        share = shares[0] if len(shares) == 1 else None
        return mean_loss(self.view, jnp.stack(totals), jnp.stack(weights), share, scale)

    def _reduced(self, others: dict[int, Array], share: Array, sums: list | None) -> list:
        """Reduce a microbatch's gradients of parameters on the devices, and add them to the earlier `sums`."""
        view, layout = self.view, self.view.layout
        grads: list[Any] = []
        for i in layout.trained:
            leaf = layout.params[i]
            zeros = view.comm.zeros(leaf.shape, leaf.dtype)
            grads.append(None if leaf.kind == "sharded" else view.comm.like(others[i], zeros) if i in others else zeros)
        grads = view.reduce(grads)
        if view.accumulate > 1:
            grads = [x if x is None else at_least_float32(x) * share for x in grads]
        if sums is None:
            return grads
        return [x if x is None else total + x.astype(total.dtype) for total, x in zip(sums, grads, strict=True)]


def trace_stages(
    view: View, disk: Mapping[int, OnDisk], stored: Mapping[int, Array], arrays: tuple, trained: Collection[int] = ()
) -> Traced:
    """Trace the loss, or another function, of `view`, and divide it into stages.

    Parameters are given by index: those on disk, those `stored` on the devices, and those whose gradients are needed.
    `arrays` are the arguments after the parameters.
    """
    layout, call = view.layout, view.checked_call
    shape = lambda i, leaf: jax.ShapeDtypeStruct(leaf.shape, disk[i].leaf.dtype)
    full = [stored[i] if i in stored else shape(i, leaf) for i, leaf in enumerate(layout.params)]
    on_leaves = lambda full, *args: call(jax.tree.unflatten(layout.treedef, full), *args)
    by_row = [i for i, of in disk.items() if of.chunking.is_by_row(of.leaf)]
    program, _, consts, structure = trace_loss(
        on_leaves, layout.params, full, arrays, OF_ROWS, view.comm, by_row=by_row
    )
    options = Options(view.comm, prefetch=0, reshard_after_forward=True)
    active = [i in trained for i in range(len(full))]
    return Traced(StagedProgram(program, disk, active, options, view.config.mesh), consts, structure)


def type_key(arrays: tuple) -> Any:
    """Return a key of structure, shapes and types. A loss is traced once per key."""
    leaves, structure = jax.tree.flatten(arrays)
    return structure, tuple((x.shape, x.dtype, x.weak_type) for x in leaves)


class StagedFunction:
    """A function of logical parameters and a batch. Each call reads the parameters from disk, stage by stage.

    `function` has a method `call`, like a `Loss`, and is traced by the first call.
    """

    def __init__(self, config: Config, function: Any):
        self._config, self._function = config, function
        self._traced: dict[Any, Traced] = {}
        self._on_devices: Callable = jax.jit(lambda *inputs: inputs)

    def __call__(self, params: PyTree, batch: PyTree, args: tuple) -> Any:
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((params, batch, args))):
            raise TypeError(
                "An eval step of parameters on disk was called inside of jax.jit or another transformation. It runs "
                "many programs, between which Python reads files, so JAX cannot trace it. Call it from Python, for "
                "example once per token of a text."
            )
        files = files_of(params)
        assert files is not None
        layout = layout_of(self._config, shapes_of_chunked(params))
        leaves = leaves_of(params)
        files.require(*next(x for x in leaves if is_chunked(x)).chunks)
        kept = {i: OnDisk(x.leaf, x.chunking, x.sharding, i) for i, x in enumerate(leaves) if is_chunked(x)}
        stored = {
            i: storage_leaves([x], [leaf])[0].astype(leaf.dtype)
            for i, (x, leaf) in enumerate(zip(leaves, layout.params, strict=True))
            if i not in kept
        }
        inputs = self._on_devices(None, batch, *args)
        view = View(self._config, layout, (), self._function, 1)
        key = layout, tuple(of.leaf.dtype for of in kept.values()), type_key(inputs)
        if key not in self._traced:
            self._traced[key] = trace_stages(view, kept, stored, inputs)
        found = self._traced[key]
        arrays, _ = split_arrays(inputs)
        given = stored | dict(enumerate([*arrays, *found.consts], len(leaves)))
        reader = Reader(files, found.staged.reads)
        outs = Microbatch(found.staged, reader, view.comm, self._config.mesh, None).forward(given)
        return jax.tree.unflatten(found.structure, outs)
