"""Sum the gradients of chunks over their uses and over microbatches, scale the sums, and write them to files."""

from __future__ import annotations

import collections
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zerojax.comm.mesh import wait_if_simulated
from zerojax.staged.chunk_update import Trained
from zerojax.staged.model_files import ModelFiles
from zerojax.staged.reductions import Reductions
from zerojax.staged.sources import ChunkId, OnDisk

if TYPE_CHECKING:
    from jaxtyping import Array


@functools.partial(jax.jit, donate_argnums=0)
def _added(total, grad):
    return total + grad.astype(total.dtype)


@functools.partial(jax.jit, static_argnums=1)
def _scaled(grad, dtype, share):
    return grad.astype(dtype) if share is None else grad.astype(dtype) * share.astype(dtype)


class ChunkGradients:
    """The gradients of one step, for the parameters on disk.

    Each chunk's gradient is written once per microbatch. In the last microbatch, the weights of the whole loss are
    known. So each sum is then multiplied by the factor that makes it the gradient of the loss, and is reduced to the
    scalars that the update needs. Therefore the update reads each gradient only once.
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

        In the last microbatch, `factor` is the factor for the sums over all microbatches. It is None in the others.
        """
        self._first, self._share, self._factor = first, share, factor

    def add(self, piece: ChunkId, grad: Array) -> None:
        """Add the gradient of one use of a chunk. After the last use, `write` writes the sum over the uses."""
        count, total = self._pending.pop(piece, (0, None))
        total = grad if total is None else wait_if_simulated(self._mesh, _added(total, grad))
        if count + 1 < self._expected[piece]:
            self._pending[piece] = count + 1, total
        else:
            self._complete(*self._of[piece[0]], piece[1], total)

    def end(self) -> None:
        """End a microbatch. If it is the last, write zeros as the gradients of chunks that the loss does not use."""
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
            before = self._files.receive(of.index, n, self._files.read(of.index, n), "device")
            grad = wait_if_simulated(self._mesh, _added(before, grad))
        if self._factor is None:
            self._ready.append((of.index, n, grad))
        else:
            self._finish(k, of, n, grad)

    def _finish(self, k: int, of: OnDisk, n: int, grad: Array) -> None:
        grad, scalars = wait_if_simulated(self._mesh, self._reductions.finishing(k, of)(grad, self._factor))
        self._scalars[k].append(scalars)
        self._ready.append((of.index, n, grad))
