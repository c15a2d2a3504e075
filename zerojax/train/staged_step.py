"""Run a training step with parameters on disk: first the loss in stages, then the update chunk by chunk."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.comm.mesh import constrain, on_auto_mesh, replicated, to_storage, wait_if_simulated, with_types
from zerojax.layout.leaf import is_chunked
from zerojax.optim.equations import update_first_group
from zerojax.optim.sharding_plan import ShardingPlan
from zerojax.optim.update import Updated, UpdateInputs, check_state
from zerojax.placement.storage import leaves_of, storage_leaves, unpadded
from zerojax.staged.chunk_gradients import ChunkGradients, Reductions
from zerojax.staged.chunk_update import StagedQueue
from zerojax.staged.model_files import ModelFiles, files_of, trained_on_disk
from zerojax.streaming.stores import StateStore, store_for
from zerojax.streaming.stream import StreamedUpdate
from zerojax.train.combined_aux import combine, mean_mutable, whole_aux
from zerojax.train.gradients import StepGradients, unscale
from zerojax.train.staged_loss import LossAndGrads, StagedLoss
from zerojax.train.state import ZeroState
from zerojax.train.step_program import Differentiated, StepProgram
from zerojax.train.streamed_step import resident_state

if TYPE_CHECKING:
    from jaxtyping import Array


class StagedStep:
    """The executor of a step whose parameters are on disk. Python runs its programs while it reads and writes files."""

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
        self._planned = functools.lru_cache(maxsize=4)(functools.partial(PlannedStep, program))

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
    """The training step of one plan. Its programs are compiled when they are first needed."""

    def __init__(self, program: StepProgram, plan: ShardingPlan):
        self._program, self._plan, self._config = program, plan, program.config
        self._trained = trained_on_disk(program.config, plan)
        self._loss = StagedLoss(program, plan)
        self._update = StreamedUpdate(program.config, plan)
        self._reductions = Reductions(self._update.partition.first.equations, self._trained)
        self._finish = jax.jit(self._finished)

    def run(self, state: ZeroState, batch: Any, args: tuple) -> tuple[ZeroState, dict]:
        """Run one step. After an error the files may be half written. Then they are given up."""
        check_state(self._plan, state.opt_state)
        files = files_of(state.params)
        if files is None:
            raise TypeError(
                'The state has no files, as tx.create makes it of shapes, and Offload(params="disk") trains from '
                "files. Call tx.create with arrays, or with what tx.init_params returns."
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
        stored = self._stored(state)
        inputs = state.mutable, batch, args
        traced = self._loss.traced(stored, inputs)
        gradients = ChunkGradients(files, self._trained, traced.staged.expected, self._reductions, config.mesh)
        scale = state.scaling.scale if self._program.scales_loss else jnp.float32(1)
        found = self._loss.run(traced, files, gradients, stored, inputs, scale)
        squares, known = gradients.scalars()
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

    def _stored(self, state: ZeroState) -> dict[int, Array]:
        """Return the parameters on the devices, by index, in storage shape."""
        leaves = enumerate(zip(leaves_of(state.params), self._plan.layout.params, strict=True))
        return {i: storage_leaves([x], [leaf])[0] for i, (x, leaf) in leaves if not is_chunked(x)}

    def _whole(self, k: int, files: ModelFiles) -> Array:
        """Read a gradient in files onto the devices, in logical shape."""
        grad = self._trained[k].grad
        stored = grad.joined([files.receive(*piece, files.read(*piece), "device") for piece in grad.pieces])
        return wait_if_simulated(self._config.mesh, unpadded(stored, grad.leaf).astype(self._plan.grads[k].dtype))

    def _finished(
        self, state: ZeroState, stored: Mapping, found: LossAndGrads, squares: Mapping, cuts: Sequence, whole: Mapping
    ) -> tuple[ZeroState, dict, UpdateInputs]:
        """Finish the step, except the update of files; see `StepProgram.ended`. Traced under jit.

        `state` has no parameters, and only the leaves of the optimizer state on the devices. `squares` has the sum of
        squares of each gradient in files, and `whole` those gradients in files that the update reads as whole arrays in
        logical shape, by index among the trained parameters. `cuts` are in the order of `Reductions.cuts`.
        """
        mesh, plan, program, comm = self._config.mesh, self._plan, self._program, self._loss.view.comm
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
        aux = whole_aux(*combine(self._loss.view, stacked, weights, found.weight))
        gradients = StepGradients(found.loss, resident_grads, aux, None, mutable, valid, sums, [])
        done = Differentiated(gradients, [*map(stored.get, range(len(plan.layout.params)))], params, scaling, skipped)
        return program.ended(state, done, Updated(updated, leaves, shared, tuple(trained)))
