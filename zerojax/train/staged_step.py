"""Run a training step with parameters on disk: first the loss in stages, then the update chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.comm.mesh import constrain, replicated, to_storage
from zerojax.layout.chunked import is_chunked
from zerojax.optim.checks import check_state
from zerojax.optim.plan import ShardingPlan
from zerojax.optim.traced import CONST, EXTRA, GRAD, PARAM, STATE
from zerojax.optim.update import Updated
from zerojax.placement.storage import leaves_of, storage_leaves, unpadded
from zerojax.staged.gradients import Finishing, Gradients, logical_chunk
from zerojax.staged.model_files import ModelFiles
from zerojax.staged.reductions import Cut, Reductions, combined
from zerojax.staged.state import files_of, trained_on_disk
from zerojax.staged.update import StagedUpdate
from zerojax.streaming.stores import StateStore, store_for
from zerojax.streaming.stream import UpdateInputs
from zerojax.train.aux import combine, merged, unmarked
from zerojax.train.gradients import Gradients as AllGradients
from zerojax.train.jitted_step import resident_state
from zerojax.train.loss import mean_mutable
from zerojax.train.loss_scaling import unscale
from zerojax.train.staged_loss import LossAndGrads, StagedLoss, wait
from zerojax.train.state import ZeroState
from zerojax.train.step_program import Differentiated, StepProgram

if TYPE_CHECKING:
    from jaxtyping import Array


class Small(NamedTuple):
    """The values of a step that are on the devices after the gradients were written to files.

    Attributes:
        state: The state before the step, without parameters and optimizer state.
        stored: The parameters on the devices, by index, in storage shape.
        found: The loss, and the gradients of parameters on the devices.
        squares: The sum of squares of each gradient in files, by index among the trained parameters.
        cuts: The value of each cut, in the order of `Reductions.cuts`. None if the cut is not evaluated yet.
        whole: Gradients in files that the update reads as whole arrays in logical shape, by index as in `squares`.
    """

    state: ZeroState
    stored: Mapping[int, Array]
    found: LossAndGrads
    squares: Mapping[int, Array]
    cuts: Sequence[Array | None]
    whole: Mapping[int, Array]


class StagedStep:
    """The training step of one plan. Its programs are compiled when they are first needed."""

    def __init__(self, program: StepProgram, plan: ShardingPlan):
        """Plan the update. Nothing is compiled."""
        self._program, self._plan, self._config = program, plan, program.config
        self._trained = trained_on_disk(program.config, plan)
        self._loss = StagedLoss(program, plan)
        self._update = StagedUpdate(program.config, plan, self._trained)
        self._reductions = Reductions(self._update.partition.first.equations[0], self._trained)
        self._finishing = Finishing()
        self._finish = jax.jit(self._finished)
        self._round = jax.jit(self._small_values, static_argnums=1)

    def run(self, state: ZeroState, batch: Any, args: tuple) -> tuple[ZeroState, dict]:
        """Run one step. After an error the files may be half written. Then they are given up."""
        check_state(self._plan, state.opt_state)
        files = files_of(state.params)
        if files is None:
            raise TypeError(
                'The state has no files, as tx.create makes it of shapes, and Offload(params="disk") trains from '
                "files. Call tx.create with arrays, or with what tx.init_params returns."
            )
        if not {of.grad.index for of in self._trained.values()} <= set(files.numbers):
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
        resident = resident_state(state)
        stored = self._stored(state)
        inputs = state.mutable, batch, args
        traced = self._loss.traced(stored, inputs)
        gradients = Gradients(
            files, self._trained, traced.staged.expected, self._reductions, self._finishing, config.mesh
        )
        scale = state.scaling.scale if self._program.scales_loss else jnp.float32(1)
        found = self._loss.run(traced, files, gradients, stored, inputs, scale)
        squares, known = gradients.scalars()
        cuts = [known.get(cut.var) for cut in self._reductions.cuts]
        small = Small(state.replace(params=None, opt_state=None), stored, found, squares, cuts, {})
        small = self._reduced(small, resident, files)
        new, metrics, inputs = wait(config.mesh, self._finish(small, resident))
        if self._is_skipped(inputs):
            params, leaves = self._update.skip(inputs, store)
        else:
            params, leaves = self._update.on_files(inputs._replace(skipped=None), store, files)
            files.advance()
        nodes, pairs = files.nodes(), zip(params, plan.layout.params, strict=True)
        # Only sharded parameters have padding, and these are in files.
        in_forms = [x if x is None else unpadded(x, leaf) for x, leaf in pairs]
        tree = jax.tree.unflatten(plan.layout.treedef, [nodes.get(i, x) for i, x in enumerate(in_forms)])
        return new.replace(params=tree, opt_state=jax.tree.unflatten(plan.state_def, leaves)), metrics

    def _is_skipped(self, inputs: UpdateInputs) -> bool:
        """Return whether the step is skipped. This waits for the devices if the step can be skipped."""
        return self._program.may_skip and bool(inputs.skipped)

    def _stored(self, state: ZeroState) -> dict[int, Array]:
        """Return the parameters on the devices, by index, in storage shape."""
        leaves = enumerate(zip(leaves_of(state.params), self._plan.layout.params, strict=True))
        return {i: storage_leaves([x], [leaf])[0] for i, (x, leaf) in leaves if not is_chunked(x)}

    def _reduced(self, small: Small, resident: Sequence, files: ModelFiles) -> Small:
        """Evaluate the cuts that are not in `at_once`, and read the gradients that the update needs as whole arrays."""
        reductions, cuts = self._reductions, list(small.cuts)
        for number in range(1, reductions.rounds + 1):
            later = reductions.later(number)
            if not later:
                continue
            known = self._round(small._replace(cuts=cuts), number, resident)
            for cut in later:
                values = dict(zip(cut.inputs[1:], known[reductions.cuts.index(cut)], strict=True))
                cuts[reductions.cuts.index(cut)] = self._evaluated(cut, values, files)
        whole = {k: self._whole(k, files) for k in reductions.whole}
        return small._replace(cuts=cuts, whole=whole)

    def _evaluated(self, cut: Cut, known: Mapping, files: ModelFiles) -> Array:
        grad = self._trained[cut.grad].grad
        if cut.combine is None:
            return wait(self._config.mesh, jax.jit(cut.of_whole)(self._whole(cut.grad, files), list(known.values())))
        program = jax.jit(lambda x, values: cut.of_chunk(logical_chunk(x, grad.leaf, grad.chunking.dim), values))
        chunks = (files.receive(*piece, files.read(*piece), "device") for piece in grad.pieces)
        return combined(cut, [wait(self._config.mesh, program(x, list(known.values()))) for x in chunks])

    def _whole(self, k: int, files: ModelFiles) -> Array:
        """Read a gradient in files onto the devices, in logical shape."""
        grad = self._trained[k].grad
        stored = grad.joined([files.receive(*piece, files.read(*piece), "device") for piece in grad.pieces])
        return wait(self._config.mesh, unpadded(stored, grad.leaf))

    def _known(self, small: Small, resident: Sequence, old: Mapping, grads: Mapping) -> dict:
        """Return the values of the inputs of `Reductions.equations` and of evaluated cuts. Traced under jit."""
        plan, equations = self._plan, self._reductions.equations
        consts = self._update.partition.consts
        read = {
            PARAM: lambda i: unpadded(old[i].astype(plan.grads[i].dtype), plan.grads[i]),
            STATE: lambda k: unpadded(resident[k], plan.state[k]),
            EXTRA: lambda _: small.found.loss.astype(jnp.float32),
            CONST: lambda i: consts[i],
            GRAD: lambda i: unpadded(grads[i], plan.grads[i]),
        }
        known = {}
        for var, (kind, i) in zip(equations.jaxpr.invars, equations.reads, strict=True):
            if kind == GRAD and i in self._trained:
                if i in small.whole:
                    known[var] = small.whole[i].astype(var.aval.dtype)
            else:
                known[var] = read[kind](i)
        cuts = zip(self._reductions.cuts, small.cuts, strict=True)
        return known | {cut.var: x for cut, x in cuts if x is not None}

    def _small_values(self, small: Small, number: int, resident: Sequence) -> dict[int, list]:
        """Return the inputs, except gradients, of a round's `later` cuts, by index of the cut. Traced under jit."""
        cuts = self._reductions.later(number)
        values = self._reductions.small_values(cuts, self._known(small, resident, self._old(small), self._grads(small)))
        return {self._reductions.cuts.index(cut): [values[v] for v in cut.inputs[1:]] for cut in cuts}

    def _old(self, small: Small) -> dict[int, Array]:
        """Return the trained parameters on the devices, sharded for the update, by index among trained parameters."""
        plan = self._plan
        pairs = [(k, i) for k, i in enumerate(plan.layout.trained) if i in small.stored]
        return {k: to_storage(self._config.mesh, small.stored[i], plan.grads[k]) for k, i in pairs}

    def _grads(self, small: Small) -> dict[int, Array]:
        """Return the gradients on the devices, times `LossAndGrads.factor`, by index among trained parameters."""
        plan, view, factor = self._plan, self._loss.view, small.found.factor
        found = dict(zip(view.differentiable, small.found.resident, strict=True))
        given = {k: x for k, x in found.items() if x is not None}
        pairs = zip(given, unscale(list(given.values()), factor), strict=True)
        return {k: constrain(self._config.mesh, x, plan.grads[k]) for k, x in pairs}

    def _finished(self, small: Small, resident: Sequence) -> tuple[ZeroState, dict, UpdateInputs]:
        """Finish the step, except the update of files; see `StepProgram.ended`. Traced under jit."""
        config, plan, program = self._config, self._plan, self._program
        state, found, view = small.state, small.found, self._loss.view
        old, wide = self._old(small), self._grads(small)
        squares = [
            small.squares[k] if k in small.squares else jnp.sum(jnp.square(jnp.abs(wide[k]).astype(jnp.float32)))
            for k in range(len(plan.grads))
        ]
        squares = jnp.asarray(squares, jnp.float32)
        mutable = lax.with_sharding_constraint(mean_mutable(found.mutable, view.comm), replicated(config.mesh))
        grads = {k: x.astype(plan.grads[k].dtype) for k, x in wide.items()}
        results = iter(self._reductions.results(self._known(small, resident, old, grads)))
        first = self._update.partition.first
        updated = {i: to_storage(config.mesh, next(results), plan.grads[i]) for i in first.params}
        new_state = {k: to_storage(config.mesh, next(results), plan.state[k]) for k in first.resident}
        leaves, trained = [new_state.get(k, x) for k, x in enumerate(resident)], range(len(plan.grads))
        scaling, skipped = program.next_scaling(state.scaling, squares, found.weights_valid)
        resident_grads: list[Any] = [grads.get(k) for k in trained]
        aux = self._aux(found)
        gradients = AllGradients(found.loss, resident_grads, aux, None, mutable, found.weights_valid, squares, [])
        stored = [small.stored.get(i) for i in range(len(plan.layout.params))]
        done = Differentiated(gradients, stored, [old.get(k) for k in trained], scaling, skipped)
        return program.ended(
            state.replace(opt_state=list(resident)), done, Updated(updated, leaves, list(results), tuple(trained))
        )

    def _aux(self, found: LossAndGrads) -> Any:
        view = self._loss.view
        stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *(x.aux for x in found.returned))
        if view.is_one_loss:
            return unmarked(jax.tree.map(lambda x: x[0], stacked))
        weights = jnp.stack([x.weight for x in found.returned])
        total = weights.sum() if view.loss.weighted else view.microbatches
        if view.loss.weighted:
            total = jnp.where(found.weights_valid, total, jnp.nan)
        return merged(*combine(stacked, weights, total, view.comm, view.rows_of))
