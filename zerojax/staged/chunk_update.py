"""Update parameters on disk: sum the gradients of chunks, write the sums to files, and update chunk by chunk.

An update may need scalars of whole gradients, such as norms. To compute these without reading a gradient twice,
the part of the update that does not depend on offloaded state is traced as one list of equations. A *cut* is an
equation that reduces one gradient on disk to a scalar. Only elementwise equations may come between the gradient and the
cut. They and the cut are evaluated per chunk, before the chunk is written, and later equations read only the scalar. If
any other equation reads a gradient, as for the norm of clipped gradients, the gradient is read as a whole array.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from zerojax import compat, jaxprs, signatures
from zerojax.comm.mesh import wait_if_simulated
from zerojax.layout.leaf import Leaf
from zerojax.optim.equations import evaluate_as
from zerojax.optim.partition import UpdateGroup
from zerojax.optim.traced import CUT, GRAD, PARAM, Equations, equations_behind, producers_of
from zerojax.optim.update import StreamedInputs
from zerojax.placement.storage import unpadded
from zerojax.staged.model_files import READ_AHEAD, ChunkId, DiskShard, ModelFiles, OnDisk, Trained
from zerojax.streaming.chunk_programs import update_on_device
from zerojax.streaming.stores import IN_FLIGHT, StateStore
from zerojax.streaming.stream import Chunk, StreamedUpdate, UpdateQueue

# For each reduction, the function that reduces a chunk, and the function that joins the values of two chunks.
_REDUCTIONS: Mapping[str, tuple[Callable, Callable]] = {
    "reduce_sum": (jnp.sum, jnp.add),
    "reduce_max": (jnp.max, jnp.maximum),
    "reduce_min": (jnp.min, jnp.minimum),
    "reduce_and": (jnp.all, jnp.logical_and),
    "reduce_or": (jnp.any, jnp.logical_or),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """A scalar that is reduced from one gradient."""

    var: Any  # the variable of the scalar
    grad: int  # the index of the gradient among those of the trained parameters
    jaxpr: Any  # the equations that compute the scalar from the gradient
    reduce: Callable  # the function that reduces a chunk
    combine: Callable  # the function that joins the values of two chunks

    def of_chunk(self, chunk: Array, is_padding: Array | None) -> Array:
        """Return the scalar of one chunk. `is_padding` marks padding; it is None if there is no padding."""
        *eqns, last = self.jaxpr.eqns
        before = compat.part_of(self.jaxpr, eqns, self.jaxpr.invars, last.invars)
        (x,) = evaluate_as(before, (), [chunk.astype(self.jaxpr.invars[0].aval.dtype)], chunk.shape)
        x = jnp.broadcast_to(x, chunk.shape)
        if is_padding is not None:  # replace it by 0, or by the first element, which is never padding
            x = jnp.where(is_padding, 0 if self.reduce is jnp.sum else x[(0,) * x.ndim], x)
        return self.reduce(x)


class Reductions:
    """The cuts of an update's equations, in the order of the equations."""

    def __init__(self, equations: Equations, on_disk: Collection[int]):
        """Find the cuts. `on_disk` contains the indices of the gradients in files."""
        self.equations, jaxpr = equations, equations.jaxpr
        self._programs: dict[Any, Any] = {}
        reads = dict(zip(jaxpr.invars, equations.reads, strict=True))
        needs = {var: frozenset((i,)) for var, (kind, i) in reads.items() if kind == GRAD and i in on_disk}
        producers, self.cuts = producers_of(jaxpr), []
        for eqn in jaxpr.eqns:
            large = frozenset().union(*(needs.get(v, ()) for v in jaxprs.variables_in(eqn.invars)))
            if len(large) == 1 and (cut := self._cut(eqn, next(iter(large)), producers)) is not None:
                self.cuts.append(cut)
            elif large:
                needs |= dict.fromkeys(eqn.outvars, large)
        eqns, inputs = equations_behind(jaxpr, producers, jaxpr.outvars, {cut.var for cut in self.cuts})
        reads |= {cut.var: (CUT, n) for n, cut in enumerate(self.cuts)}
        # The equations after the cuts, and the indices of the gradients on disk that they read as whole arrays.
        self.rest = equations.whole.equations(
            [equations.eqns[e] for e in eqns], {v: reads[v] for v in inputs}, jaxpr.outvars
        )
        self.whole = sorted(set(self.rest.indices(GRAD)).intersection(on_disk))

    def of(self, grad: int) -> list[Cut]:
        return [cut for cut in self.cuts if cut.grad == grad]

    def finishing(self, grad: int, of: OnDisk) -> Any:
        """Return a program `f(chunk, start, factor) -> (chunk, [sum of squares, cuts...])` for chunks of a gradient.

        The program multiplies the chunk, which begins at `start`, by `factor`, and reduces the product to scalars.
        Chunks of equal layout share a program.
        """
        cuts, leaf, dim = self.of(grad), of.leaf, of.chunking.dim
        key = leaf.shape, leaf.dim, leaf.dtype, dim, tuple(signatures.signature(cut.jaxpr) for cut in cuts)
        if key not in self._programs:
            self._programs[key] = jax.jit(functools.partial(_finished, leaf, dim, cuts), donate_argnums=0)
        return self._programs[key]

    def _cut(self, last: Any, grad: int, producers: dict) -> Cut | None:
        """Return the cut whose last equation is `last`, or None if `last` keeps a dim, or depends on other values."""
        jaxpr = self.equations.jaxpr
        if last.primitive.name not in _REDUCTIONS or last.outvars[0].aval.shape:
            return None
        eqns, inputs = equations_behind(jaxpr, producers, last.outvars)
        (*before, _), root = (ordered := [jaxpr.eqns[e] for e in eqns]), inputs[0]
        elementwise = all(
            (jaxprs.facts(one).elementwise or one.primitive.name == "broadcast_in_dim")
            and all(v.aval.shape == root.aval.shape for v in one.outvars)
            for one in before
        )
        if len(inputs) > 1 or not elementwise:
            return None
        part = compat.part_of(jaxpr, ordered, inputs, last.outvars)
        return Cut(last.outvars[0], grad, part, *_REDUCTIONS[last.primitive.name])


def _finished(leaf: Leaf, dim: int, cuts: list[Cut], grad: Array, start: Array, factor: Array) -> tuple[Array, list]:
    grad = grad * factor.astype(grad.dtype)
    chunk, is_padding = grad if dim == leaf.dim else unpadded(grad, leaf), None
    if dim == leaf.dim and leaf.padding:
        shard, index = jnp.divmod(jax.lax.broadcasted_iota(jnp.int32, grad.shape, dim), grad.shape[dim] // leaf.shards)
        is_padding = shard * leaf.local_shape[dim] + start + index >= leaf.shape[dim]
    squares = jnp.sum(jnp.square(jnp.abs(grad).astype(jnp.float32)))
    return grad, [squares, *(cut.of_chunk(chunk, is_padding) for cut in cuts)]


@functools.partial(jax.jit, donate_argnums=0)
def _added(total, grad):
    return total + grad.astype(total.dtype)


@functools.partial(jax.jit, static_argnums=1)
def _scaled(grad, dtype, share):
    return grad.astype(dtype) if share is None else grad.astype(dtype) * share.astype(dtype)


class ChunkGradients:
    """The gradients of one step, for the parameters on disk.

    In each microbatch, a chunk's gradient is summed over the chunk's uses and scaled, and the sum over the microbatches
    so far is written. In the last microbatch, the weights of the whole loss are known. Each sum is then multiplied by
    the factor that makes the sum the gradient of the loss. Scalars that the update needs are computed from the product
    before the product is written, so that the update reads each gradient only once.
    """

    def __init__(
        self,
        files: ModelFiles,
        trained: Mapping[int, Trained],
        expected: Mapping[ChunkId, int],
        reductions: Reductions,
        mesh: Mesh,
    ):
        """Begin a step. `expected` says how many gradients each chunk gets in one microbatch."""
        self._files, self._expected, self._mesh = files, expected, mesh
        self._of = {x.param.index: (k, x.grad) for k, x in trained.items()}
        self._reductions = reductions
        self._pending: dict[ChunkId, tuple[int, Array]] = {}
        self._ready: list[tuple[int, int, Array]] = []
        self._scalars: dict[int, list[list[Array]]] = collections.defaultdict(list)
        self._first, self._share, self._factor = True, None, None

    def begin(self, *, first: bool, share: Array | None, factor: Array | None) -> None:
        """Begin a microbatch, whose gradients are scaled by `share`.

        In the last microbatch, `factor` scales the sums over all microbatches. In earlier ones, `factor` is None.
        """
        self._first, self._share, self._factor = first, share, factor

    def add(self, chunk_id: ChunkId, grad: Array) -> None:
        """Add the gradient of one use of a chunk. After the last use, `write` writes the sum over the uses."""
        count, total = self._pending.pop(chunk_id, (0, None))
        total = grad if total is None else wait_if_simulated(self._mesh, _added(total, grad))
        if count + 1 < self._expected[chunk_id]:
            self._pending[chunk_id] = count + 1, total
        else:
            self._complete(*self._of[chunk_id[0]], chunk_id[1], total)

    def end(self) -> None:
        """End a microbatch. After the last, write zeros as the gradients of chunks that the loss does not use."""
        assert not self._pending
        self.write()
        if self._factor is None:
            return
        for index, (k, of) in self._of.items():
            for n in range(len(of.chunking.extents)):
                if not self._expected.get((index, n)):
                    shape = of.chunking.chunk_shape(of.leaf, of.chunking.extents[n])
                    zeros = jnp.zeros(shape, of.leaf.dtype, device=of.sharding)
                    self._finish(k, of, n, zeros)
                    self.write()

    def write(self) -> None:
        """Begin to write the sums of the chunks whose last gradient was added. The devices may still compute them."""
        for index, n, grad in self._ready:
            self._files.write(index, n, grad)
        self._ready.clear()

    def scalars(self) -> tuple[dict[int, Array], dict[Any, Array]]:
        """Return each gradient's sum of squares, by index, and the value of each cut, by variable."""
        squares, known = {}, {}
        for k, rows in self._scalars.items():
            first, *others = zip(*rows, strict=True)
            squares[k] = functools.reduce(jnp.add, first)
            for cut, values in zip(self._reductions.of(k), others, strict=True):
                known[cut.var] = functools.reduce(cut.combine, values)
        return squares, known

    def _complete(self, k: int, of: OnDisk, n: int, grad: Array) -> None:
        if self._share is not None or grad.dtype != of.leaf.dtype:
            grad = wait_if_simulated(self._mesh, _scaled(grad, of.leaf.dtype, self._share))
        if not self._first:
            grad = wait_if_simulated(self._mesh, _added(self._files.load(of.index, n), grad))
        if self._factor is None:
            self._ready.append((of.index, n, grad))
        else:
            self._finish(k, of, n, grad)

    def _finish(self, k: int, of: OnDisk, n: int, grad: Array) -> None:
        start = np.int32(of.chunking.chunks[n][0])
        grad, scalars = wait_if_simulated(self._mesh, self._reductions.finishing(k, of)(grad, start, self._factor))
        self._scalars[k].append(scalars)
        self._ready.append((of.index, n, grad))


class StagedQueue(UpdateQueue):
    """An `UpdateQueue` that reads parameters and gradients from files, and writes new parameters to files."""

    def __init__(
        self,
        streamed: StreamedUpdate,
        inputs: StreamedInputs,
        store: StateStore,
        files: ModelFiles,
        trained: Mapping[int, Trained],
    ):
        super().__init__(streamed, inputs, store)
        self._files, self._trained = files, trained

    def _params_of(self, group: UpdateGroup) -> list:
        return [None if i in self._trained else self._inputs.pending.pop(i) for i in group.params]

    def _begin(self, group: UpdateGroup, n: int) -> tuple[Any, dict]:
        """Begin to read a chunk of the state and, if there are enough buffers, of its parameters and gradients."""
        of = [self._trained[i].param for i in group.reads(PARAM) if i in self._trained]
        of += [self._trained[i].grad for i in group.reads(GRAD) if i in self._trained]
        chunk_ids = [chunk_id for x in of for chunk_id in _shard(x, group, n).chunk_ids]
        fits = len(chunk_ids) * IN_FLIGHT <= READ_AHEAD
        return super()._begin(group, n), {chunk_id: self._files.read(*chunk_id) for chunk_id in chunk_ids if fits}

    def _update_on_device(self, chunk: Chunk) -> None:
        (ticket, begun), of, trained = self._fetching.popleft(), chunk.of, self._trained
        group, inputs = of.group, self._inputs_of(of.group)

        def read(x: OnDisk) -> Array:
            shard, found = _shard(x, group, chunk.n), {}
            for chunk_id in shard.chunk_ids:
                reading = begun.pop(chunk_id, None) or self._files.read(*chunk_id)
                found[chunk_id] = self._files.receive(*chunk_id, reading, "device")
            return shard.joined(found)

        old = zip(group.params, of.params, strict=True)
        params = [read(trained[i].param) if i in trained else x for i, x in old]
        resident = zip(group.reads(GRAD), inputs.grads, strict=True)
        grads = [read(trained[i].grad) if x is None else x for i, x in resident]
        state = self._store.receive(ticket)
        # Donate nothing. XLA reads the old moments again for the parameters, so it would first copy donated moments.
        program = self._streamed.program(update_on_device, chunk.key, ())
        params, state, of.resident = wait_if_simulated(
            self._streamed.config.mesh,
            program(params, state, of.resident, inputs._replace(grads=grads), np.int32(0)),
        )
        new = dict(zip(group.params, params, strict=True))
        of.params = [None if i in trained else x for i, x in new.items()]
        for i, x in new.items():
            chunks = _shard(trained[i].param, group, chunk.n).split(x) if i in trained else {}
            for (index, n), new_chunk in wait_if_simulated(self._streamed.config.mesh, chunks).items():
                self._files.write(index, n, new_chunk)
        self._write(chunk, state)


def _shard(of: OnDisk, group: UpdateGroup, n: int) -> DiskShard:
    """Return chunk `n` of a parameter or gradient, or the whole shard if the group is not chunked."""
    return DiskShard(of, None if group.chunking is None else n)
