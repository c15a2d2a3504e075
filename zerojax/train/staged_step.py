"""Run a training step with parameters on disk: first the loss in stages, then the update chunk by chunk.

`StagedFunction` runs other functions, such as an evaluation, forward only.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from zerojax.comm.mesh import constrain, on_auto_mesh, replicated, to_storage, wait_if_simulated, with_types
from zerojax.config import Config
from zerojax.gather.engine import trace_loss
from zerojax.gather.schedule import Options
from zerojax.jaxprs import split_arrays
from zerojax.layout.leaf import is_chunked, shapes_of_chunked
from zerojax.layout.tree import Layout, layout_of
from zerojax.optim.equations import update_first_group
from zerojax.optim.sharding_plan import ShardingPlan
from zerojax.optim.update import ResidentResults, StreamedInputs, check_state
from zerojax.placement.storage import leaves_of, storage_leaves, unpadded
from zerojax.staged.chunk_update import ChunkGradients, Reductions, StagedQueue
from zerojax.staged.microbatch import Microbatch, Reader
from zerojax.staged.model_files import DiskShard, ModelFiles, OnDisk, files_of, on_disk, trained_on_disk
from zerojax.staged.program import StagedProgram
from zerojax.streaming.stores import StateStore, store_for
from zerojax.streaming.stream import StreamedUpdate
from zerojax.train.arguments import batch_shardings
from zerojax.train.checked import fold_keys
from zerojax.train.gradients import StepGradients, mean_loss, unscale
from zerojax.train.loss import OF_ROWS, LossInputs, Returned, View, at_least_float32
from zerojax.train.optional_outputs import combine, mean_mutable, whole_aux
from zerojax.train.same_run import signature_of
from zerojax.train.several_losses import check_reduction
from zerojax.train.state import ZeroState
from zerojax.train.step_program import Differentiated, StepProgram
from zerojax.train.streamed_step import resident_state


class StagedStep:
    """The executor of a step with parameters on disk. Its programs run while Python reads and writes files."""

    def __init__(self, program: StepProgram):
        self.program, options = program, program.options
        if options.users_options:
            raise ValueError(
                'train_step(compiler_options=) is for one compiled program, and with Offload(params="disk") a step is '
                "many. Set the options for all programs in the environment variable XLA_FLAGS."
            )
        if options.memory is not None:
            raise ValueError(
                f'train_step(memory={options.memory!r}) fits one compiled program, and with Offload(params="disk") a '
                f"step is many. Leave out memory=, and give the blocks of the loss budgets with zerojax.remat_within."
            )
        self._planned = functools.cache(functools.partial(PlannedStep, program))

    def run(self, state: ZeroState, rows: Any, args: tuple) -> tuple[ZeroState, Any]:
        config = self.program.config
        config.offload.require_jit()
        return on_auto_mesh(config.user_mesh, self._planned(state.plan).run, state, rows, with_types(args))

    def trace(self, state: ZeroState, rows: Any, args: tuple) -> Any:
        raise TypeError(
            'With Offload(params="disk") a step is many programs, which Python runs while files are read and '
            "written. Call the step as it is, outside of jax.jit; there is no single program to trace or lower."
        )

    inside = trace

    def lower_update(self, state: ZeroState) -> list[Any]:
        config = self.program.config
        if not state.plan.offloaded:
            return []
        return on_auto_mesh(config.user_mesh, StreamedUpdate(config, state.plan).lower)


class PlannedStep:
    """The training step for one sharding plan. Its programs are compiled when they are first needed."""

    def __init__(self, program: StepProgram, plan: ShardingPlan):
        self._program, self._plan, self._config = program, plan, program.config
        self._view = View(program.config, plan.layout, plan.grads, program.loss, program.options.accumulate)
        self._on_disk, self._trained = on_disk(program.config, plan.layout), trained_on_disk(program.config, plan)
        self._traced: dict[Any, Traced] = {}
        self._update = StreamedUpdate(program.config, plan)
        self._reductions = Reductions(self._update.partition.first.equations, self._trained)
        self._microbatch = jax.jit(self._inputs, static_argnums=3)
        self._begin, self._end, self._reduce = jax.jit(self._cotangent), jax.jit(self._mean), jax.jit(self._reduced)
        self._finish = jax.jit(self._finished)

    def run(self, state: ZeroState, batch: Any, args: tuple) -> tuple[ZeroState, dict]:
        """Run one step. If an error leaves files half written, mark them as unusable."""
        check_state(self._plan, state.opt_state)
        files = files_of(state.params)
        if files is None:
            raise TypeError(
                'The state has no files, because another transformation made it, and Offload(params="disk") trains '
                "from files. Make it with this transformation's tx.create, of arrays or of what tx.init_params returns."
            )
        if not {of.grad.index for of in self._trained.values()} <= files.leaves.keys():
            raise ValueError(
                f"The parameters are in {files.path}, the files of tx.shard or tx.init_params, which have no room for "
                f"gradients. Write them to the files of the state: export(params, path), and then "
                f"state.replace(params=import_params(path, state.params))."
            )
        leaves = leaves_of(state.params)
        files.require(next(x for x in leaves if is_chunked(x)).chunks[0])
        store = store_for(self._config, self._plan, jax.tree.leaves(state.opt_state, is_leaf=is_chunked))
        before = files.writes + store.writes
        try:
            return self._run(state, files, store, batch, args)
        except BaseException:
            if files.writes + store.writes > before:
                files.abandon()
                store.abandon()
            raise

    def _run(
        self, state: ZeroState, files: ModelFiles, store: StateStore, batch: Any, args: tuple
    ) -> tuple[ZeroState, dict]:
        config, plan = self._config, self._plan
        stored = on_devices(leaves_of(state.params), plan.layout)
        scale = state.scaling.scale if self._program.scales_loss else jnp.float32(1)
        found, (squares, known) = self._differentiated(files, stored, (state.mutable, batch, args), scale)
        cuts = [known[cut.var] for cut in self._reductions.cuts]
        whole = {k: self._whole(k, files) for k in self._reductions.whole}
        bare = state.replace(params=None, opt_state=resident_state(state))
        new, metrics, inputs = wait_if_simulated(config.mesh, self._finish(bare, stored, found, squares, cuts, whole))
        if inputs.skipped:  # waits for the devices
            params, leaves = self._update.skip(inputs, store)
        else:
            params, leaves = StagedQueue(self._update, inputs, store, files, self._trained).update()
            files.advance()
        nodes, pairs = files.nodes(), zip(params, plan.layout.params, strict=True)
        # Only sharded parameters have padding, and these are in files.
        in_forms = [x if x is None else unpadded(x, leaf) for x, leaf in pairs]
        tree = jax.tree.unflatten(plan.layout.treedef, [nodes.get(i, x) for i, x in enumerate(in_forms)])
        return new.replace(params=tree, opt_state=jax.tree.unflatten(plan.state_def, leaves)), metrics

    def _whole(self, k: int, files: ModelFiles) -> Array:
        """Read a gradient in files onto the devices, in logical shape."""
        grad = self._trained[k].grad
        stored = (shard := DiskShard(grad)).joined({chunk_id: files.load(*chunk_id) for chunk_id in shard.chunk_ids})
        return wait_if_simulated(self._config.mesh, unpadded(stored, grad.leaf).astype(self._plan.grads[k].dtype))

    def _staged(self, stored: Mapping[int, Array], inputs: tuple) -> "Traced":
        """Return the traced loss for `inputs = (mutable, batch, args)`. Trace once per signature of the inputs."""
        arrays = jax.eval_shape(functools.partial(self._inputs, number=0), *inputs)
        key = signature_of(arrays)
        if key not in self._traced:
            if self._view.accumulate > 1:
                check_reduction(self._view, LossInputs((), *inputs))
            self._traced[key] = trace_stages(self._view, self._on_disk, stored, arrays, self._view.layout.trained)
            self._view.loss.undivided[:] = self._view.comm.undivided_kernels()
        return self._traced[key]

    def _differentiated(
        self, files: ModelFiles, stored: Mapping[int, Array], inputs: tuple, scale: Any
    ) -> "tuple[LossAndGrads, tuple[dict, dict]]":
        """Differentiate the loss in every microbatch. Also return `ChunkGradients.scalars` of the gradients in files.

        `stored` has the parameters that are on the devices, by index, and `inputs` are `(mutable, batch, args)`.
        """
        view, mesh, traced, (mutable, batch, args) = self._view, self._config.mesh, self._staged(stored, inputs), inputs
        gradients = ChunkGradients(files, self._trained, traced.staged.expected, self._reductions, mesh)
        count, last = view.accumulate, view.accumulate - 1
        returned, shares, sums, end = [], [], None, None
        reader = Reader(files, traced.staged.reads * count)
        for m in range(count):
            one = Microbatch(traced.staged, reader, gradients)
            found = traced.forward(one, stored, self._microbatch(mutable, batch, args, m))
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
        return LossAndGrads(returned, sums, mutable, *end), gradients.scalars()

    def _inputs(self, mutable: PyTree, batch: PyTree, args: tuple, number: int) -> tuple:
        """Return the arguments of the loss that follow the parameters, for one microbatch. Traced under jit."""
        view = self._view
        batch = lax.with_sharding_constraint(batch, batch_shardings(view.config, view.config.mesh, batch))
        if view.accumulate > 1:
            batch = jax.tree.map(lambda x: view.microbatches_of(x)[number], batch)
            args = fold_keys(args, jnp.int32(number))
        return mutable, batch, *args

    def _cotangent(self, total: Array, weight: Array, scale: Array) -> tuple[Array, Array]:
        """Return the cotangent of a microbatch's loss, and the factor that multiplies the microbatch's gradients."""
        view = self._view
        cotangent = jnp.asarray(scale).astype(total.dtype)
        if not view.loss.weighted:
            return cotangent, jnp.float32(1 / view.divisor)
        share = jnp.where(weight > 0, weight, 1).astype(cotangent.dtype)
        return cotangent / share, share

    def _mean(self, totals: list, weights: list, shares: list, scale: Array) -> tuple:
        share = shares[0] if len(shares) == 1 else None
        return mean_loss(self._view, jnp.stack(totals), jnp.stack(weights), share, scale)

    def _reduced(self, others: dict[int, Array], share: Array, sums: list | None) -> list:
        """Reduce a microbatch's gradients of parameters on the devices, and add them to the earlier `sums`."""
        view, layout = self._view, self._view.layout
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

    def _finished(
        self, state: ZeroState, stored: Mapping, found: "LossAndGrads", squares: Mapping, cuts: Sequence, whole: Mapping
    ) -> tuple[ZeroState, dict, StreamedInputs]:
        """Finish the step, except the update of files; see `StepProgram.finished`. Traced under jit.

        `state` has no parameters, and only the optimizer state that is on the devices. `squares` has the sum of squares
        of each gradient in files, and `whole` has the gradients in files that the update reads as whole arrays, in
        logical shape. Both are by index among trained parameters. `cuts` are in the order of `Reductions.cuts`.
        """
        mesh, plan, program, comm = self._config.mesh, self._plan, self._program, self._view.comm
        trained = range(len(plan.grads))
        pairs = [(k, i) for k, i in enumerate(plan.layout.trained) if i in stored]
        old = {k: to_storage(mesh, stored[i], plan.grads[k]) for k, i in pairs}
        given = {k: x for k, x in enumerate(found.resident) if x is not None}
        pairs = zip(given, unscale(list(given.values()), found.factor), strict=True)
        wide = {k: constrain(mesh, x, plan.grads[k]) for k, x in pairs}
        grads: dict[int, Any] = {k: x.astype(plan.grads[k].dtype) for k, x in wide.items()}
        of = lambda k: squares[k] if k in squares else jnp.sum(jnp.square(jnp.abs(wide[k]).astype(jnp.float32)))
        sums = jnp.asarray([of(k) for k in trained], jnp.float32)
        reads = [whole.get(k, grads.get(k)) for k in trained]
        params = [old.get(k) for k in trained]
        updated, leaves, shared, _ = update_first_group(
            self._config, plan, reads, state.opt_state, params, found.loss, self._reductions.rest, cuts
        )
        valid = found.weights_valid
        scaling, skipped = program.next_scaling(state.scaling, sums, valid)
        mutable = lax.with_sharding_constraint(mean_mutable(found.mutable, comm), replicated(mesh))
        resident_grads: list[Any] = [grads.get(k) for k in trained]
        stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *(x.aux for x in found.returned))
        weights = jnp.stack([x.weight for x in found.returned])
        aux = whole_aux(*combine(self._view, stacked, weights, found.weight))
        gradients = StepGradients(found.loss, resident_grads, aux, None, mutable, valid, sums, [])
        done = Differentiated(gradients, [*map(stored.get, range(len(plan.layout.params)))], params, scaling, skipped)
        return program.finished(state, done, ResidentResults(updated, leaves, shared, tuple(trained)))


class Traced(NamedTuple):
    """A loss, traced for arguments of certain shapes and types."""

    staged: StagedProgram  # the stages of the loss
    consts: list  # arrays that the loss closes over
    structure: Any  # the tree structure of the loss's result

    def forward(self, one: Microbatch, stored: Mapping[int, Array], inputs: tuple) -> Any:
        """Run the forward pass of a microbatch, and return the loss's result.

        `stored` has the parameters on the devices, by index. `inputs` are the arguments after the parameters.
        """
        given = [*split_arrays(inputs)[0], *self.consts]
        first = len(self.staged.program.invars) - len(given)
        return jax.tree.unflatten(self.structure, one.forward({**stored, **dict(enumerate(given, first))}))


class LossAndGrads(NamedTuple):
    """The results of differentiating a loss in all microbatches, except the gradients in files."""

    returned: list[Returned]  # the values that the loss returned in each microbatch, without the mutable state
    resident: list  # per trained parameter, the sum of its reduced gradients; None for a parameter on disk
    mutable: PyTree  # the mutable state that the last microbatch returned
    loss: Array  # the mean loss; this and the following fields are the results of `mean_loss`
    weight: Array
    factor: Array
    weights_valid: Array


def trace_stages(
    view: View, disk: Mapping[int, OnDisk], stored: Mapping[int, Array], arrays: tuple, trained: Collection[int] = ()
) -> Traced:
    """Trace the loss, or another function, of `view`, and divide it into stages.

    `disk` and `stored` map the indices of the parameters on disk, or on the devices, to nodes or arrays. `trained` has
    the indices of the parameters that need gradients. `arrays` are the arguments that follow the parameters.
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


def on_devices(leaves: Sequence, layout: Layout) -> dict[int, Array]:
    """Return the parameters that are not on disk, by index, in storage shape."""
    pairs = enumerate(zip(leaves, layout.params, strict=True))
    return {i: storage_leaves([x], [leaf])[0] for i, (x, leaf) in pairs if not is_chunked(x)}


class StagedFunction:
    """A function of logical parameters and a batch. Each call reads the parameters from disk, stage by stage.

    `function` has a method `call`, like a `Loss`. Each call with new shapes traces `function`.
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
        stored = {i: x.astype(layout.params[i].dtype) for i, x in on_devices(leaves, layout).items()}
        inputs = self._on_devices(None, batch, *args)
        view = View(self._config, layout, (), self._function, 1)
        key = layout, tuple(kept.values()), signature_of(inputs)
        if key not in self._traced:
            self._traced[key] = trace_stages(view, kept, stored, inputs)
        found = self._traced[key]
        reader = Reader(files, found.staged.reads)
        return found.forward(Microbatch(found.staged, reader, None), stored, inputs)
